"""The order of a step and its moves: pure data, made from values, printable; it issues nothing.

The tiers stand on a line, fastest first; a chunk's home is never faster than the tier it is used in, and a move is one
hop between neighbours. A plan lists moves and updates in
the order in which they are to be issued; each move finds its extent free, or freed by a move before it in the list, so
whoever issues them never has to wait for one before issuing the next. Which chunk makes room is Belady's choice over
this step's order and the next one's: the chunk whose next use is farthest away. A chunk is fetched ahead exactly when
the one it replaces is needed later than itself. With an alternating order that keeps the last chunks of a step as the
first of the next one, which is the fewest bytes any schedule can move (2 (M - n) for M chunks and n extents).
"""

from __future__ import annotations

import enum
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierstore.errors import CapacityError

TRANSIT_EXTENTS = 4
"""Extents of a tier between the two ends that stay free for what passes through, when the tier is large enough."""


class Reason(enum.Enum):
    """Why a chunk moves."""

    FRESH = "fresh"  # its state is made in the tier that computes
    PREFETCH = "prefetch"
    WRITE_BACK = "write-back"
    SPILL = "spill"
    PROMOTE = "promote"


@dataclass(frozen=True, slots=True)
class Move:
    """One chunk, one hop. `source` is None for a chunk that has no bytes yet."""

    chunk: int
    source: str | None
    destination: str
    reason: Reason

    def __str__(self) -> str:
        return f"{self.reason.value:<10} chunk {self.chunk}: {self.source or 'nowhere'} -> {self.destination}"


@dataclass(frozen=True, slots=True)
class Update:
    """Use the chunk, in the tier where its class is computed."""

    chunk: int

    def __str__(self) -> str:
        return f"update     chunk {self.chunk}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to issue, in order."""

    actions: tuple[Move | Update, ...]

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves alone, in order."""
        return tuple(action for action in self.actions if isinstance(action, Move))

    def counts(self) -> Counter[tuple[str | None, str]]:
        """Moves by (source, destination)."""
        return Counter((move.source, move.destination) for move in self.moves)

    def __str__(self) -> str:
        return "\n".join(map(str, self.actions))


@dataclass(frozen=True, slots=True)
class ChunkView:
    """What planning must know of a chunk: where it is or is bound for (None: fresh), its home, where it is used."""

    tier: str | None
    home: str
    compute: str


def plan_step(
    order: Sequence[int],
    upcoming: Sequence[int],
    chunks: Mapping[int, ChunkView],
    room: Mapping[str, int],
    line: Sequence[str],
) -> Plan:
    """Plan the use of each chunk of `order` once.

    `upcoming` is the expected order of the step after (it may be empty). `room` gives the extents of each tier that are
    free, or will be when the moves under way are done. `line` names the tiers, fastest first.
    Raises CapacityError, before anything has moved, if some tier is too small to let a chunk pass.
    """
    return _Planner(order, upcoming, chunks, room, line).plan()


def plan_fetch(wanted: Sequence[int], chunks: Mapping[int, ChunkView], room: Mapping[str, int], line: Sequence[str]) -> Plan:
    """Plan to bring chunks to where they are used, as far as room can be made by chunks not wanted; use none."""
    planner = _Planner((), wanted, chunks, room, line)
    planner.fetch_ahead(0)
    return planner.so_far()


def plan_eviction(
    unwanted: Sequence[int], chunks: Mapping[int, ChunkView], room: Mapping[str, int], line: Sequence[str]
) -> Plan:
    """Plan to send chunks to their homes. Raises CapacityError if a tier on the way cannot let them pass."""
    planner = _Planner((), (), chunks, room, line)
    for chunk in unwanted:
        planner.send_home(chunk)
    return planner.so_far()


class _Planner:
    """Plays the step through on counters; `actions` is what it decided so far."""

    def __init__(
        self,
        order: Sequence[int],
        upcoming: Sequence[int],
        chunks: Mapping[int, ChunkView],
        room: Mapping[str, int],
        line: Sequence[str],
    ) -> None:
        self._order = order
        self._sequence = [*order, *upcoming]
        self._chunks = chunks
        self._line = list(line)
        self._rank = {tier: rank for rank, tier in enumerate(line)}
        self._room = dict(room)
        self._at: dict[int, str | None] = {chunk: view.tier for chunk, view in chunks.items()}
        self._next_use: dict[int, float] = dict.fromkeys(chunks, math.inf)
        self._after: dict[int, float] = {}  # next use once the one in this step is over
        for position in reversed(range(len(self._sequence))):
            chunk = self._sequence[position]
            self._after[chunk] = self._next_use[chunk]
            self._next_use[chunk] = position
        self._farthest: dict[str, list[tuple[float, int]]] = {tier: [] for tier in line}
        for chunk in chunks:
            self._offer(chunk)
        self._reserve = self._transit_reserve()
        self._ahead = dict.fromkeys(self._edges(), 0)
        self.actions: list[Move | Update | None] = []
        self._kept_for: dict[int, int] = {}  # chunks to be made later in this step: where in `actions` they get their place

    def plan(self) -> Plan:
        for position, chunk in enumerate(self._order):
            self.fetch_ahead(position)
            self._insist(chunk, position)
            self.actions.append(Update(chunk))
            self._kept_for.pop(chunk, None)
            self._next_use[chunk] = self._after[chunk]
            self._offer(chunk)
        self.fetch_ahead(len(self._order))
        return self.so_far()

    def so_far(self) -> Plan:
        return Plan(tuple(action for action in self.actions if action is not None))

    # -- fetching -----------------------------------------------------------------------------------------------

    def fetch_ahead(self, position: int) -> None:
        """Fetch over each hop, slowest first, every chunk that is needed before the one it would replace."""
        for edge in self._ahead:
            self._ahead[edge] = max(self._ahead[edge], position)
            while self._ahead[edge] < len(self._sequence) and self._fetch_over(edge):
                self._ahead[edge] += 1

    def _fetch_over(self, edge: tuple[str, str]) -> bool:
        """Pass the next needed chunk over one hop. False: it has to wait, and so do those needed after it."""
        source, destination = edge
        position = self._ahead[edge]
        chunk = self._sequence[position]
        hop = self._hop(chunk, self._chunks[chunk].compute)
        if hop is None or not self._is_before(chunk, edge):
            return True
        if hop != destination or (self._at[chunk] or source) != source:
            return False  # it has not come as far as this hop yet
        if self._at[chunk] is None and position >= len(self._order):
            return True  # what the next step will make needs no fetching
        if not self._make_room(destination, position, keep=chunk):
            return False
        self._move(chunk, destination, Reason.PREFETCH)
        return True

    def _is_before(self, chunk: int, edge: tuple[str, str]) -> bool:
        """Whether the way of the chunk to where it is used leads over this hop."""
        source, destination = (self._rank[tier] for tier in edge)
        compute = self._rank[self._chunks[chunk].compute]
        at = self._at[chunk]
        return compute == destination if at is None else self._rank[at] >= source and compute <= destination

    def _insist(self, chunk: int, position: int) -> None:
        """Bring the chunk to where it is used, even at the cost of one that was fetched ahead."""
        while (hop := self._hop(chunk, self._chunks[chunk].compute)) is not None:
            if not self._make_room(hop, None, keep=chunk):
                raise CapacityError(self._complaint(chunk, hop))
            self._move(chunk, hop, Reason.PREFETCH)

    def send_home(self, chunk: int) -> None:
        """Move the chunk to its home, hop by hop."""
        if self._at[chunk] is None:
            return
        while (hop := self._hop(chunk, self._chunks[chunk].home)) is not None:
            if not self._make_room(hop, None, keep=chunk):
                raise CapacityError(self._complaint(chunk, hop))
            self._move(chunk, hop, Reason.WRITE_BACK)

    # -- room ---------------------------------------------------------------------------------------------------

    def _make_room(self, tier: str, use: int | None, *, keep: int) -> bool:
        """See to a free extent in `tier` for a chunk needed at position `use` (None: it must be, whatever it costs)."""
        if self._room[tier] > (0 if use is None else self._reserve[tier]):
            return True
        victim = self._victim(tier, keep)
        if victim is None or (use is not None and self._next_use[victim] <= use):
            return False
        return self._evict(victim, tier, use, keep)

    def _evict(self, victim: int, tier: str, use: int | None, keep: int) -> bool:
        """Get a chunk out of `tier`: one hop towards its home, or back to nowhere if it was to be made here only later."""
        if victim not in self._kept_for:
            hop = self._hop(victim, self._chunks[victim].home)
            assert hop is not None  # a chunk at home is no victim
            if self._room[hop] <= 0 and not self._make_way(hop, use, keep):
                return False
        self._look_again(victim, tier)
        if victim in self._kept_for:
            self.actions[self._kept_for.pop(victim)] = None
            self._room[tier] += 1
            self._at[victim] = None
        else:
            assert hop is not None
            self._move(victim, hop, Reason.WRITE_BACK)
        return True

    def _make_way(self, tier: str, use: int | None, keep: int) -> bool:
        """Get something out of `tier` farther down, so that an evicted chunk can come in."""
        victim = self._victim(tier, keep)
        if victim is None or (use is not None and self._next_use[victim] <= use):
            return False
        hop = self._hop(victim, self._chunks[victim].home)
        return (victim in self._kept_for or self._room[hop or tier] > 0) and self._evict(victim, tier, use, keep)

    def _victim(self, tier: str, keep: int) -> int | None:
        """The chunk away from home in `tier` whose next use is farthest away, `keep` excepted."""
        heap = self._farthest[tier]
        while heap and not self._is_current(tier, heap[0]):
            heapq.heappop(heap)
        if heap and heap[0][1] == keep:
            first = heapq.heappop(heap)
            other = self._victim(tier, keep)
            heapq.heappush(heap, first)
            return other
        return heap[0][1] if heap else None

    def _is_current(self, tier: str, entry: tuple[float, int]) -> bool:
        minus_use, chunk = entry
        return self._at[chunk] == tier and self._next_use[chunk] == -minus_use

    def _look_again(self, victim: int, tier: str) -> None:
        """Look at the hops again from the chunk's next use on: it is about to leave."""
        use = self._next_use[victim]
        for edge, ahead in self._ahead.items():
            if use < ahead and self._at[victim] == tier:
                self._ahead[edge] = int(use)

    def _offer(self, chunk: int) -> None:
        """Let the chunk be evicted from where it is, unless it is at home there."""
        tier = self._at[chunk]
        if tier is not None and tier != self._chunks[chunk].home:
            heapq.heappush(self._farthest[tier], (-self._next_use[chunk], chunk))

    def _move(self, chunk: int, destination: str, reason: Reason) -> None:
        source = self._at[chunk]
        if source is None:
            self._kept_for[chunk] = len(self.actions)
        self.actions.append(Move(chunk, source, destination, reason if source else Reason.FRESH))
        self._room[destination] -= 1
        if source is not None:
            self._room[source] += 1
        self._at[chunk] = destination
        self._offer(chunk)

    # -- the line of tiers --------------------------------------------------------------------------------------

    def _hop(self, chunk: int, goal: str) -> str | None:
        """The neighbouring tier on the way to `goal`; None when the chunk is there."""
        at = self._at[chunk]
        if at is None or at == goal:
            return None if at == goal else goal
        step = 1 if self._rank[goal] > self._rank[at] else -1
        return self._line[self._rank[at] + step]

    def _edges(self) -> Iterator[tuple[str, str]]:
        """Hops towards where chunks are used, those farther away first."""
        for faster, slower in reversed(list(itertools.pairwise(self._line))):
            yield slower, faster

    def _transit_reserve(self) -> dict[str, int]:
        """Extents that fetching ahead must leave free: some in the tiers that chunks pass through on their way home."""
        reserve = dict.fromkeys(self._line, 0)
        for tier in self._line[1:-1]:
            rank = self._rank[tier]
            views = self._chunks.values()
            if any(self._rank[view.compute] < rank for view in views):
                movable = self._room[tier] + sum(view.tier == tier and view.home != tier for view in views)
                reserve[tier] = max(1, min(TRANSIT_EXTENTS, movable // 4)) if movable > 1 else 0
        return reserve

    def _complaint(self, chunk: int, tier: str) -> str:
        in_tier = sum(at == tier for at in self._at.values())
        return (
            f"chunk {chunk} cannot pass through tier {tier}: its {in_tier + self._room[tier]} extents are homes or needed "
            f"by the chunk itself, and three more than the homes are enough; raise tiers.{tier}.capacity"
        )
