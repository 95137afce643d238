"""What retention policies move and how long a step then takes: pure values, a link that carries one chunk at a time.

A policy is played over many steps on counters. What it does is a list of actions: use a chunk, read one, write one
back, make one in the first step; a read stands behind the write that frees its extent. `hits` counts, `pass_time` plays
the actions against a link and a processor. Every chunk is dirty once it was used, so whoever leaves is written.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tierstore.placement import Need, Room, place_homes
from tierstore.planning import ChunkView, Move, plan_step

Kind = Literal["use", "make", "read", "write"]
Action = tuple[Kind, int]
Order = Callable[[int], Sequence[int]]
"""The chunks of a step, by the step's number."""

Victim = Callable[["Pool"], int]
"""Which of the chunks that may leave does."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What a policy sees when it chooses: who may leave, when each came, was last used and will be used next."""

    may_leave: Sequence[int]
    came: Mapping[int, int]
    used: Mapping[int, int]
    next_use: Mapping[int, float]


def lru(pool: Pool) -> int:
    """Who was used longest ago."""
    return min(pool.may_leave, key=lambda chunk: pool.used.get(chunk, -1))


def fifo(pool: Pool) -> int:
    """Who came first."""
    return min(pool.may_leave, key=lambda chunk: pool.came[chunk])


def mru(pool: Pool) -> int:
    """Who was used last."""
    return max(pool.may_leave, key=lambda chunk: pool.used.get(chunk, -1))


def belady(pool: Pool) -> int:
    """Whose next use is farthest away: no policy has more hits."""
    return max(pool.may_leave, key=lambda chunk: pool.next_use[chunk])


def pins(pinned: Sequence[int]) -> Victim:
    """The pinned ones stay; the others leave in the order of their use."""
    kept = frozenset(pinned)

    def victim(pool: Pool) -> int:
        free = [chunk for chunk in pool.may_leave if chunk not in kept]
        return lru(Pool(free or pool.may_leave, pool.came, pool.used, pool.next_use))

    return victim


def first(chunks: int, count: int) -> list[int]:
    """The first `count` chunks."""
    return list(range(min(chunks, count)))


def spread(chunks: int, count: int) -> list[int]:
    """`count` chunks, evenly spread."""
    return [number * chunks // count for number in range(count)] if count else []


def fixed(chunks: int) -> Order:
    """The same order in every step."""
    return lambda step: range(chunks)


def alternating(chunks: int) -> Order:
    """Forwards, then backwards."""
    return lambda step: range(chunks) if step % 2 == 0 else range(chunks - 1, -1, -1)


ORDERS = {"fixed": fixed, "alternating": alternating}


def play(order: Order, extents: int, ahead: int, victim: Victim, steps: int) -> list[list[Action]]:
    """What a policy does in each step: chunks are read `ahead` of their use, and whom `victim` names makes room."""
    sequence = [chunk for step in range(steps + 2) for chunk in order(step)]
    uses: dict[int, deque[int]] = {}
    for position, chunk in enumerate(sequence):
        uses.setdefault(chunk, deque()).append(position)
    came: dict[int, int] = {}
    used: dict[int, int] = {}
    next_use = {chunk: float(positions[0]) for chunk, positions in uses.items()}
    resident: set[int] = set()
    found: list[list[Action]] = []
    position = entered = 0
    for step in range(steps):
        actions: list[Action] = []
        for _ in order(step):
            while entered < min(position + ahead, len(sequence)):
                chunk = sequence[entered]
                if chunk not in resident:
                    if len(resident) >= extents:
                        window = set(sequence[position:entered])
                        leaving = victim(Pool(sorted(resident - window), came, used, next_use))
                        resident.discard(leaving)
                        actions.append(("write", leaving))
                    resident.add(chunk)
                    came[chunk] = entered
                    actions.append(("read", chunk))
                entered += 1
            chunk = sequence[position]
            actions.append(("use", chunk))
            used[chunk] = position
            uses[chunk].popleft()
            next_use[chunk] = float(uses[chunk][0]) if uses[chunk] else math.inf
            position += 1
        found.append(actions)
    return found


def play_ours(kind: str, chunks: int, extents: int, steps: int) -> list[list[Action]]:
    """The same from tierstore's own homes and plans, which are made step by step from where the chunks then are.

    `kind` is the policy's order: alternating or fixed. In the first step all chunks are made.
    """
    order = ORDERS[kind](chunks)
    rooms = {"cpu": Room(extents), "nvme": Room(chunks)}
    homes = place_homes([Need("cpu")] * chunks, rooms, order=kind, extent_bytes=1)
    at: dict[int, str | None] = dict.fromkeys(range(chunks))
    found: list[list[Action]] = []
    for step in range(steps):
        views = {chunk: ChunkView(tier, homes[chunk], "cpu") for chunk, tier in at.items()}
        room = {"cpu": extents - sum(tier == "cpu" for tier in at.values()), "nvme": chunks}
        actions: list[Action] = []
        for action in plan_step(order(step), order(step + 1), views, room, ("cpu", "nvme")).actions:
            if isinstance(action, Move):
                at[action.chunk] = action.destination
                what: Kind = "write" if action.destination == "nvme" else "make" if action.source is None else "read"
                actions.append((what, action.chunk))
            else:
                actions.append(("use", action.chunk))
        found.append(actions)
    return found


def hits(actions: Sequence[Action], chunks: int) -> int:
    """Uses that needed no read."""
    return chunks - sum(kind == "read" for kind, _ in actions)


def pass_time(steps: Sequence[Sequence[Action]], extents: int, update: float, move: float) -> list[float]:
    """Seconds of each step where an update takes `update` and a move of one chunk `move`, one after another.

    Moves are issued in the order of the actions; a use waits for its chunk's read, a write for its chunk's last use.
    """
    now = link = 0.0
    free = deque([0.0] * extents)
    landed: dict[int, float] = {}
    ends: list[float] = []
    for actions in steps:
        for kind, chunk in actions:
            if kind == "use":
                now = max(now, landed.get(chunk, 0.0)) + update
            elif kind == "write":  # it could begin now: whoever is written was used before
                link = max(link, now) + move
                free.append(link)
            elif kind == "make":
                landed[chunk] = max(now, free.popleft())
            else:
                link = max(link, now, free.popleft()) + move
                landed[chunk] = link
        ends.append(now)
    return [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]


def belady_hits(order: Order, chunks: int, extents: int, steps: int) -> Iterator[int]:
    """Hits per step of Belady's algorithm with nothing read ahead: the most that any policy can have."""
    for actions in play(order, extents, 1, belady, steps):
        yield hits(actions, chunks)
