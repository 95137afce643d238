"""What a steady step moves, chunk by chunk: the plans of a few steps played through, or what they come to.

Pure: from homes and room to bytes, and no chunk moves. `play` makes the plans that steps would make, by the same
planner. For the commonest case with very many chunks `in_alternating_pool` says what those come to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.planning import ChunkView, plan_step

Route = tuple[str, str]
MANY_CHUNKS = 20_000
"""Beyond which steps are played only where nothing else says what they move: planning takes about 15 us for each."""
_MOST_STEPS, _FEW_STEPS = 9, 3
"""Played from the first one, which makes the state; of very many chunks the first steady ones must do."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks by their place in the order of a step: bytes of the record, tier of use, home."""

    record_bytes: Sequence[int]
    compute: Sequence[str]
    homes: Sequence[str]

    def __len__(self) -> int:
        return len(self.homes)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one step moves over each route, bytes and chunks, the mean of two steps, there and back; and how many chunks
    lie in each tier between steps.
    """

    bytes: Mapping[Route, int]
    chunks: Mapping[Route, float]
    resting: Mapping[str, int]

    @classmethod
    def over_two(cls, nbytes: Mapping[Route, int], chunks: Mapping[Route, int], resting: Mapping[str, int]) -> Moved:
        """From the sums of two steps."""
        halves = {route: n // 2 for route, n in nbytes.items()}
        return cls(halves, {route: n / 2 for route, n in chunks.items()}, resting)


def steady_step(chunks: Chunks, room: Mapping[str, int], line: Sequence[str], *, alternates: bool) -> Moved:
    """What steps move once retention has settled. `room` is extents by tier, `line` names the tiers, fastest first.

    Raises CapacityError if a step cannot be made.
    """
    used, home = set(chunks.compute), set(chunks.homes)
    if len(chunks) > MANY_CHUNKS and alternates and len(used) == len(home) == 1 and used != home:
        [fast], [slow] = used, home
        if line.index(slow) == line.index(fast) + 1:
            return in_alternating_pool(chunks.record_bytes, room[fast], (fast, slow))
    return play(chunks, room, line, alternates=alternates)


def in_alternating_pool(record_bytes: Sequence[int], extents: int, route: Route) -> Moved:
    """Chunks whose home is one tier below where they are used, there and back through a pool of `extents`.

    Those used last stay, and are the first of the next step: 2 (M - n) chunks move in each step, the fewest there can
    be. The M - n first ones travel in one step, the M - n last ones in the other, read in this and written in that.
    """
    travelling = max(0, len(record_bytes) - extents)
    resting = {route[0]: len(record_bytes) - travelling, route[1]: travelling}
    if not travelling:
        return Moved({}, {}, resting)
    both = sum(record_bytes[:travelling]) + sum(record_bytes[-travelling:])
    up_and_down = route, route[::-1]
    return Moved.over_two(dict.fromkeys(up_and_down, both), dict.fromkeys(up_and_down, 2 * travelling), resting)


def play(chunks: Chunks, room: Mapping[str, int], line: Sequence[str], *, alternates: bool) -> Moved:
    """Make the plans of steps from the first one on, until two in a row move what the two before them did."""
    at: dict[int, str | None] = dict.fromkeys(range(len(chunks)))
    free, order = dict(room), list(range(len(chunks)))
    steps: list[tuple[Counter[Route], Counter[Route]]] = []
    while len(steps) < (_MOST_STEPS if len(chunks) <= MANY_CHUNKS else _FEW_STEPS):
        upcoming = order[::-1] if alternates else order
        steps.append(_moves_of(chunks, at, free, order, upcoming, line))
        order = upcoming
        if len(steps) >= 5 and _sum(steps[-2:]) == _sum(steps[-4:-2]):
            break
    return Moved.over_two(*_sum(steps[-2:]), Counter(tier for tier in at.values() if tier is not None))


def _sum(steps: Sequence[tuple[Counter[Route], Counter[Route]]]) -> tuple[Counter[Route], Counter[Route]]:
    (bytes_there, chunks_there), (bytes_back, chunks_back) = steps
    return bytes_there + bytes_back, chunks_there + chunks_back


def _moves_of(
    chunks: Chunks,
    at: dict[int, str | None],
    free: dict[str, int],
    order: Sequence[int],
    upcoming: Sequence[int],
    line: Sequence[str],
) -> tuple[Counter[Route], Counter[Route]]:
    """Plan one step, put chunks where it leaves them, and count bytes and chunks by route."""
    nbytes: Counter[Route] = Counter()
    count: Counter[Route] = Counter()
    if all(at[chunk] == chunks.compute[chunk] for chunk in order):  # the store plans nothing then
        return nbytes, count
    views = {chunk: ChunkView(at[chunk], chunks.homes[chunk], chunks.compute[chunk]) for chunk in order}
    for move in plan_step(order, upcoming, views, free, line).moves:
        at[move.chunk] = move.destination
        free[move.destination] -= 1
        if move.source is not None:
            free[move.source] += 1
            nbytes[move.source, move.destination] += chunks.record_bytes[move.chunk]
            count[move.source, move.destination] += 1
    return nbytes, count
