"""The order of a step and its moves: pure data, made from values, printable; it issues nothing.

The tiers stand on a line, fastest first; a chunk's home is never faster than the tier it is used in, and a move is one
hop between neighbours. A plan lists moves and updates in the order in which they are to be issued; each move finds its
extent free, or freed by a move before it in the list, so whoever issues them never has to wait for one before issuing
the next. Which chunk makes room is Belady's choice over this step's order and the next one's: the guest (a chunk in a
faster tier than its home) whose next use is farthest away. A chunk is fetched ahead exactly when the one it replaces is
needed later than itself. With an alternating order that keeps the last chunks of a step as the first of the next one,
which is the fewest bytes any schedule can move (2 (M - n) for M chunks and n extents).

Why three extents besides homes are enough: a full tier that somebody passes through holds a guest, and the slowest tier
has room for every guest's return. So a chunk on its way up finds room by sending a guest one hop down, and that one, if
the tier below is full too, by sending down another: two besides the homes where chunks pass both ways, one for speed.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError

TRANSIT_EXTENTS = 4
"""Extents of a tier between the two ends that stay free for what passes through, when the tier is large enough."""


class Reason(enum.Enum):
    """Why a chunk moves."""

    FRESH = "fresh"  # its state is made in the tier that computes
    PREFETCH = "prefetch"
    WRITE_BACK = "write-back"
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
    """Plan the use of the chunks of `order`, each as often as it occurs.

    `upcoming` is the expected order of the step after (it may be empty). `room` gives the extents of each tier that are
    free, or will be when the moves under way are done. `line` names the tiers, fastest first.
    Raises CapacityError, before anything has moved, if some tier is too small to let a chunk pass.
    """
    return _Planner(order, upcoming, chunks, room, line).plan()


def plan_fetch(
    wanted: Sequence[int], chunks: Mapping[int, ChunkView], room: Mapping[str, int], line: Sequence[str]
) -> Plan:
    """Plan to bring chunks to where they are used, as far as room can be made by chunks not wanted; use none."""
    planner = _Planner((), wanted, chunks, room, line)
    planner.fetch_ahead()
    return planner.so_far()


def plan_eviction(
    unwanted: Sequence[int], chunks: Mapping[int, ChunkView], room: Mapping[str, int], line: Sequence[str]
) -> Plan:
    """Plan to send chunks to their homes, up or down. Raises CapacityError if a tier on the way lets them not pass."""
    planner = _Planner((), (), chunks, room, line)
    for chunk in unwanted:
        planner.send_home(chunk)
    return planner.so_far()


def plan_homes(
    homes: Mapping[int, str], chunks: Mapping[int, ChunkView], room: Mapping[str, int], line: Sequence[str]
) -> Plan:
    """Plan to give chunks new homes: those that would lie in a slower tier than theirs move up, one after another.

    The others become guests where they are. Raises CapacityError if there is no room to rearrange them in.
    """
    planner = _Planner((), (), chunks, room, line)
    rank = {tier: number for number, tier in enumerate(line)}
    is_promotion = {chunk: rank[home] < rank[chunks[chunk].home] for chunk, home in homes.items()}
    for chunk in sorted(homes, key=lambda chunk: (is_promotion[chunk], rank[homes[chunk]])):
        planner.promote(chunk, homes[chunk])
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
        self._chunks = dict(chunks)
        self._line = list(line)
        self._rank = {tier: rank for rank, tier in enumerate(line)}
        self._room = dict(room)
        self._at: dict[int, str | None] = {chunk: view.tier for chunk, view in chunks.items()}
        self._next_use: dict[int, float] = dict.fromkeys(chunks, math.inf)  # position in order and upcoming
        self._later: dict[int, list[float]] = {}  # the uses after that, nearest last
        for position, chunk in reversed(list(enumerate((*order, *upcoming)))):
            if self._next_use[chunk] < math.inf:
                self._later.setdefault(chunk, []).append(self._next_use[chunk])
            self._next_use[chunk] = position
        self._guests: dict[str, list[tuple[float, int]]] = {tier: [] for tier in line}  # heaps, farthest next use first
        self._coming: dict[str, list[tuple[float, int]]] = {tier: [] for tier in line[:-1]}  # heaps, nearest first
        for chunk in chunks:
            self._offer(chunk)
            self._await(chunk, self._line)
        self._reserve = {tier: self._transit_reserve(tier) for tier in line}
        self._actions: list[Move | Update | None] = []
        self._kept_for: dict[int, int] = {}  # chunks made later in this step: where in `_actions` they get their place

    def plan(self) -> Plan:
        for chunk in self._order:
            self.fetch_ahead()
            self._go(chunk, self._chunks[chunk].compute, Reason.PREFETCH)
            self._actions.append(Update(chunk))
            self._kept_for.pop(chunk, None)
            later = self._later.get(chunk)
            self._next_use[chunk] = later.pop() if later else math.inf
            self._offer(chunk)
        self.fetch_ahead()
        return self.so_far()

    def so_far(self) -> Plan:
        return Plan(tuple(action for action in self._actions if action is not None))

    def send_home(self, chunk: int) -> None:
        """Move the chunk to its home, hop by hop."""
        if self._at[chunk] is not None:
            self._go(chunk, self._chunks[chunk].home, Reason.WRITE_BACK)

    def promote(self, chunk: int, home: str) -> None:
        """Change the chunk's home, and move it there if it would lie in a slower tier."""
        self._chunks[chunk] = replace(self._chunks[chunk], home=home)
        self._offer(chunk)
        at = self._at[chunk]
        if at is not None and self._rank[home] < self._rank[at]:
            self._go(chunk, home, Reason.PROMOTE)

    # -- fetching -----------------------------------------------------------------------------------------------

    def fetch_ahead(self) -> None:
        """Fetch over each hop, slowest first, every chunk that is needed before the one it would replace."""
        for tier in reversed(self._coming):
            while (chunk := self._next_to_come(tier)) is not None and self._fetch_into(tier, chunk):
                pass

    def _fetch_into(self, tier: str, chunk: int) -> bool:
        """Take the next needed chunk over one hop. False: it has to wait, and so do those needed after it."""
        if self._hop(chunk, tier) != tier:
            return False  # it has not come as far as this hop yet
        use = self._next_use[chunk]
        if self._room[tier] <= self._reserve[tier] and not self._evict_from(tier, chunk, needed_at=use):
            return False
        self._move(chunk, tier, Reason.PREFETCH)
        return True

    def _go(self, chunk: int, goal: str, reason: Reason) -> None:
        """Bring the chunk to a tier, even at the cost of one that was fetched ahead."""
        while (hop := self._hop(chunk, goal)) is not None:
            if self._room[hop] <= 0 and not self._evict_from(hop, chunk, needed_at=-1):
                raise CapacityError(self._complaint(chunk, hop))
            self._move(chunk, hop, reason)

    def _next_to_come(self, tier: str) -> int | None:
        """The chunk, of those whose way to where they are used leads into `tier`, that is needed first."""
        heap = self._coming[tier]
        while heap:
            use, chunk = heap[0]
            if self._next_use[chunk] == use and self._must_enter(chunk, tier):
                return chunk
            heapq.heappop(heap)
        return None

    def _must_enter(self, chunk: int, tier: str) -> bool:
        at, compute = self._at[chunk], self._chunks[chunk].compute
        if at is None:  # what only the next step will make needs no fetching
            return compute == tier and self._next_use[chunk] < len(self._order)
        return self._rank[compute] <= self._rank[tier] < self._rank[at]

    def _await(self, chunk: int, tiers: Sequence[str]) -> None:
        """Expect the chunk to enter those of `tiers` that its way leads into."""
        if self._next_use[chunk] < math.inf:
            for tier in tiers:
                if tier in self._coming and self._must_enter(chunk, tier):
                    heapq.heappush(self._coming[tier], (self._next_use[chunk], chunk))

    # -- room ---------------------------------------------------------------------------------------------------

    def _evict_from(self, tier: str, keep: int, *, needed_at: float) -> bool:
        """Free an extent by sending a guest that is needed later than `needed_at` one hop towards its home.

        A chunk that was to be made here only later gives up its place instead.
        """
        victim = self._victim(tier, keep)
        if victim is None or self._next_use[victim] <= needed_at:
            return False
        if victim in self._kept_for:
            self._unmake(victim, tier)
            return True
        hop = self._hop(victim, self._chunks[victim].home)
        assert hop is not None  # a chunk at home is no victim
        if self._room[hop] <= 0 and not self._evict_from(hop, keep, needed_at=needed_at):
            return False
        self._move(victim, hop, Reason.WRITE_BACK)
        self._await(victim, [tier])
        return True

    def _victim(self, tier: str, keep: int) -> int | None:
        """The guest in `tier` whose next use is farthest away, `keep` excepted."""
        heap = self._guests[tier]
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
        is_there = self._at[chunk] == tier and self._next_use[chunk] == -minus_use
        return is_there and self._is_guest(tier, self._chunks[chunk].home)

    def _offer(self, chunk: int) -> None:
        """Let the chunk be evicted from where it is, if it is a guest there."""
        at = self._at[chunk]
        if at is not None and self._is_guest(at, self._chunks[chunk].home):
            heapq.heappush(self._guests[at], (-self._next_use[chunk], chunk))

    def _is_guest(self, tier: str, home: str) -> bool:
        return self._rank[tier] < self._rank[home]

    def _move(self, chunk: int, destination: str, reason: Reason) -> None:
        source = self._at[chunk]
        if source is None:
            self._kept_for[chunk] = len(self._actions)
        else:
            self._room[source] += 1
        self._actions.append(Move(chunk, source, destination, reason if source else Reason.FRESH))
        self._room[destination] -= 1
        self._at[chunk] = destination
        self._offer(chunk)

    def _unmake(self, chunk: int, tier: str) -> None:
        self._actions[self._kept_for.pop(chunk)] = None
        self._room[tier] += 1
        self._at[chunk] = None
        self._await(chunk, [tier])

    def _hop(self, chunk: int, goal: str) -> str | None:
        """The neighbouring tier on the way to `goal`; None when the chunk is there."""
        at = self._at[chunk]
        if at is None or at == goal:
            return goal if at is None else None
        step = 1 if self._rank[goal] > self._rank[at] else -1
        return self._line[self._rank[at] + step]

    def _transit_reserve(self, tier: str) -> int:
        """Extents that fetching ahead must leave free in a tier that chunks pass through on their way home."""
        views = self._chunks.values()
        rank = self._rank[tier]
        if not any(self._rank[view.compute] < rank < self._rank[view.home] for view in views):
            return 0
        movable = self._room[tier] + sum(view.tier == tier and self._is_guest(tier, view.home) for view in views)
        return max(1, min(TRANSIT_EXTENTS, movable // 4)) if movable > 1 else 0

    def _complaint(self, chunk: int, tier: str) -> str:
        held = sum(at == tier for at in self._at.values())
        return (
            f"chunk {chunk} cannot enter tier {tier}: each of its {held} extents in use is a home, is leased, or holds "
            f"a chunk that has no room to leave for; end a lease, or raise tiers.{tier}.capacity by an extent"
        )
