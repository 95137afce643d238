"""Spreads one tier's chunks over its paths: does what `paths` decides, and keeps the books it decides from.

A chunk's path is chosen when its extent is taken, so it is chosen anew at every write-back. Where the paths' parts of
the room do not suit their rates, room moves by slabs: one swap file grows, another's last slab is condemned, empties
itself as its chunks leave for memory, and is given back.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection

from tierstore.arena import Extent
from tierstore.errors import SwapError
from tierstore.paths import DEALT_MEMORY, Path, PathLoad, Reserve, Shift, choose_path, plan_shifts
from tierstore.stats import PathStats
from tierstore.tiers import Tier
from tierstore.transfer import Ticket
from tierstore.tuning import per_second

PATIENCE = 3
"""So many looks a condemned slab may take to empty itself; then the chunks in it are fetched."""

_log = logging.getLogger("tierstore.striping")


class Striping:
    """The paths of one tier."""

    def __init__(self, tier: Tier, decide: Callable[[str, str, str], None] = lambda kind, what, reason: None) -> None:
        """`decide` is told what was decided: its kind, what, and why."""
        self._tier = tier
        self._decide = decide
        self._paths = [Path() for _ in tier.paths]
        self._ended: deque[tuple[Path, Ticket, bool]] = deque()  # filled by workers
        self._refused: Counter[int] = Counter()  # how often a path was wanted and full, since the last look
        self._full: set[int] = set()  # paths whose disk has no more room
        self._condemned: list[int] = []  # slabs that are to empty themselves, of each path the last one first
        self._looks = 0

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one path."""
        return len(self._paths) > 1

    def choose(self, nbytes: int, *, promised: Collection[int]) -> int:
        """Choose the path for a chunk of `nbytes`, among those with free extents and those that can promise one.

        A promised extent is one that a read is still leaving. The read is queued on the same path, so that the chunk
        would have to wait for it in a free extent too.
        """
        self._hear()
        everywhere = range(len(self._paths))
        free = {path for path in everywhere if self._tier.arena.has_room(path)}
        chosen = self._best_of(free | set(promised), nbytes)
        wished = self._best_of(everywhere, nbytes)
        if chosen is None or wished is None:
            return 0
        self._refused[wished] += chosen != wished
        for path in self._paths:
            path.dealt_bytes *= DEALT_MEMORY
        self._paths[chosen].dealt_bytes += nbytes
        return chosen

    def watch(self, extent: Extent, ticket: Ticket, *, is_write: bool) -> None:
        """Count a transfer from or to an extent until it ends."""
        self._hear()
        path = self._paths[self._tier.arena.path_of(extent.slab)]
        path.begin(ticket.nbytes)
        ended = self._ended
        ticket.when_done(lambda ticket: ended.append((path, ticket, is_write)))

    def _best_of(self, with_room: Collection[int], nbytes: int) -> int | None:
        loads = [
            PathLoad(path.queued_bytes, path.dealt_bytes, path.bytes_per_second, number in with_room)
            for number, path in enumerate(self._paths)
        ]
        return choose_path(loads, nbytes)

    def _hear(self) -> None:
        while self._ended:
            path, ticket, is_write = self._ended.popleft()
            if ticket.error() is None:
                path.end(ticket.nbytes, *ticket.span, is_write=is_write)
            else:
                path.fail(ticket.nbytes)

    # -- room ---------------------------------------------------------------------------------------------------

    def move_room(self) -> frozenset[Extent]:
        """Begin to move room, if none is on its way; return the extents in the way of some for too long."""
        if not self.has_choice:
            return frozenset()
        if not self._condemned:
            self._begin_move()
            return frozenset()
        self._looks += 1
        return self.in_the_way() if self._looks >= PATIENCE else frozenset()

    def in_the_way(self) -> frozenset[Extent]:
        """The extents still in use of slabs that are to be given back."""
        return frozenset[Extent]().union(*map(self._tier.arena.in_use, self._condemned))

    def give_back(self) -> None:
        """Give back the slabs that were to empty themselves, as far as they have; a file is cut at its end only.

        One that is no longer near the end of its file, because the tier has grown meanwhile, stays.
        """
        arena = self._tier.arena
        waiting: list[int] = []
        for slab in self._condemned:
            path = arena.path_of(slab)
            if max(arena.slabs_on(path), default=-1) > slab:
                arena.reprieve(slab)
            elif arena.in_use(slab) or path in map(arena.path_of, waiting):
                waiting.append(slab)
            else:
                self._tier.shrink_on(slab)
        self._condemned = waiting

    def _begin_move(self) -> None:
        if self._refused.total():
            for shift in plan_shifts([self._reserve(path) for path in range(len(self._paths))]):
                self._move(shift)
            self._refused.clear()

    def _move(self, shift: Shift) -> None:
        arena, paths = self._tier.arena, self._tier.paths
        try:
            self._tier.grow_on(shift.to, shift.extents)
        except SwapError as error:
            _log.info("%s stays as it is, though it could be used more: %s", paths[shift.to], error)
            self._full.add(shift.to)
            return
        slab = arena.slabs_on(shift.giver)[-1]
        arena.condemn(slab)
        self._condemned.append(slab)
        self._looks = 0
        _log.info("room for %d chunks moves from %s to %s", shift.extents, paths[shift.giver], paths[shift.to])
        rates = [per_second(self._paths[path].bytes_per_second or 0.0) for path in (shift.giver, shift.to)]
        self._decide(
            "room",
            f"room for {shift.extents} chunks moves from {paths[shift.giver]} to {paths[shift.to]}",
            f"chunks were refused there {self._refused[shift.to]} times for want of room; {rates[0]} and {rates[1]}",
        )

    def _reserve(self, path: int) -> Reserve:
        arena = self._tier.arena
        return Reserve(
            slabs=tuple(map(arena.extents_of, arena.slabs_on(path))),
            bytes_per_second=self._paths[path].bytes_per_second,
            wants_more=self._refused[path] > 0 and path not in self._full,
        )

    # -- the whole ----------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, PathStats]:
        """Say of each path, by folder, what it has and how fast it has been."""
        self._hear()
        arena = self._tier.arena
        owned = [arena.owned_on(path) for path in range(len(self._paths))]
        return {
            folder: PathStats(
                capacity_bytes=arena.reserved_on(number) * arena.extent_bytes,
                used_bytes=owned[number] * arena.extent_bytes,
                share=owned[number] / max(1, sum(owned)),
                bytes_per_second=path.bytes_per_second or 0.0,
                bytes_read=path.read_bytes,
                bytes_written=path.written_bytes,
            )
            for number, (folder, path) in enumerate(zip(self._tier.paths, self._paths, strict=True))
        }
