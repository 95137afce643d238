"""Spreads one tier's chunks over its paths: does what `paths` decides, and keeps the books it decides from.

A chunk's path is chosen when its extent is taken, so it is chosen anew at every write-back. Where the paths' parts of
the room do not suit their rates, room moves by slabs: one swap file grows, another's last slab is condemned, empties
itself as its chunks leave for memory, and is given back. A path that keeps failing is shunned: nothing is taken from
it any more, and what was lost with it, or with single extents that cannot be written, is reserved elsewhere.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection

from tierstore.arena import Extent
from tierstore.errors import TransferError, TransferNotBegunError, TransferTimeoutError
from tierstore.paths import DEALT_MEMORY, Path, PathLoad, Reserve, Shift, choose_path, plan_shifts
from tierstore.stats import PathStats
from tierstore.tiers import Tier
from tierstore.transfer import Ticket
from tierstore.tuning import per_second

PATIENCE = 3
"""So many looks a condemned slab may take to empty itself; then the chunks in it are fetched."""

FAILURES_IN_A_ROW = 3
"""So many reads, or writes, of a path that failed for good in a row are the path's own fault."""

LEFT_BEHIND_AT_ONCE = 4
"""So many chunks are fetched from paths that fail at the beginning of a step, besides those the step needs anyway."""

LOOKS_BEFORE_TRYING_AGAIN = 32
"""A path whose disk was found full is asked for room again after it was wanted at so many looks."""

_GONE = {errno.ENODEV, errno.ENXIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOMEDIUM}
"""What says at once that a path is gone, or can only be read."""

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
        self._full: dict[int, int] = {}  # paths whose disk had no more room, and for how many looks to believe it
        self._condemned: list[int] = []  # slabs that are to empty themselves, of each path the last one first
        self._looks = 0
        self.why_shunned: TransferError | None = None  # what the last path failed with that nothing is written to
        self._failures: Counter[tuple[int, bool]] = Counter()  # of each path, of reads and of writes, in a row
        self._silent: set[int] = set()  # paths of which something was given up, and nothing has been heard since
        self._failed: dict[int, list[Extent]] = {}  # those of them that were writes: where to

    @property
    def owed(self) -> int:
        """Extents lost to failures and not made up for; below zero: more are there than were lost."""
        return self._tier.due - self._tier.arena.lasting

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
        everywhere = [path for path in range(len(self._paths)) if path not in self._tier.shunned]
        with_room = {path for path in everywhere if self._tier.arena.has_room(path)} | set(promised)
        sound = {path for path in with_room if not self._failures[path, True]}
        chosen = self._best_of(sound or with_room, nbytes)
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

        One that is no longer near the end of its file, because the tier has grown meanwhile, or that a request which
        was given up may still write to, stays.
        """
        arena = self._tier.arena
        waiting: list[int] = []
        for slab in self._condemned:
            path = arena.path_of(slab)
            if max(arena.slabs_on(path), default=-1) > slab or arena.has_quarantined(slab):
                arena.reprieve(slab)
            elif arena.in_use(slab) or path in map(arena.path_of, waiting):
                waiting.append(slab)
            else:
                self._tier.shrink_on(slab)
        self._condemned = waiting

    def _begin_move(self) -> None:
        if self._refused.total():
            for path in [path for path in self._full if self._refused[path]]:
                self._full[path] -= 1
                if not self._full[path]:
                    del self._full[path]
            for shift in plan_shifts([self._reserve(path) for path in range(len(self._paths))]):
                if shift.to not in self._full:  # as the first of them may just have found
                    self._move(shift)
            self._refused.clear()

    def _move(self, shift: Shift) -> None:
        arena, paths = self._tier.arena, self._tier.paths
        try:
            self._tier.grow_on(shift.to, shift.extents)
        except OSError as error:
            _log.info("%s stays as it is, though it could be used more: %s", paths[shift.to], error)
            self._full[shift.to] = LOOKS_BEFORE_TRYING_AGAIN
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
            wants_more=self._refused[path] > 0
            and not (path in self._full or path in self._tier.shunned or path in self._silent),
        )

    # -- failures -----------------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether any path has failed and not done what it should since."""
        return bool(self._failures)

    def succeed(self, extent: Extent, *, is_write: bool) -> None:
        """A read or write has ended well: what failed on its path before were single extents."""
        path = self._tier.arena.path_of(extent.slab)
        self._failures.pop((path, is_write), None)
        if is_write:
            self._failed.pop(path, None)
        self._silent.discard(path)

    def fail(self, extent: Extent, error: TransferError, *, is_write: bool) -> None:
        """A read or write has failed for good. What cannot be written is never taken again; a path may be shunned.

        A path is if it is gone by what the error says, or after FAILURES_IN_A_ROW.
        """
        arena = self._tier.arena
        path = arena.path_of(extent.slab)
        is_lost = isinstance(error, TransferTimeoutError)
        is_to_nobody = path in self._tier.shunned and arena.is_condemned(extent)
        if is_write and (isinstance(error, TransferNotBegunError) or (is_to_nobody and not is_lost)):
            self._tier.release(extent)
        elif is_write:
            self._tier.quarantine(extent)
            if not arena.is_condemned(extent) and not is_lost:  # else it may be written to yet
                self._failed.setdefault(path, []).append(extent)
        self._failures[path, is_write] += 1
        if is_lost:
            self._silent.add(path)  # who asked its disk for room might wait for ever
        if error.errno in _GONE or self._failures[path, is_write] >= FAILURES_IN_A_ROW:
            self._shun(path, error)

    def give_up(self, extent: Extent) -> None:
        """Never again use an owned extent whose bytes could not be read."""
        self._tier.quarantine(extent)

    def make_up(self) -> str:
        """Reserve as many extents as were lost, as far as there is disk for them; say in words what was done."""
        told: list[str] = []
        sound = [path for path in range(len(self._paths)) if path not in self._tier.shunned | self._silent]
        for path in sorted(sound, key=lambda path: (self._failures[path, True], self._tier.arena.reserved_on(path))):
            before = self.owed
            self._make_up_on(path)
            if before > self.owed:
                told.append(f"{before - self.owed} extents more in {self._tier.paths[path]}")
        return " and ".join(told)

    def try_again(self) -> bool:
        """Take shunned paths into use again, if there are any; the next failure of one is enough to shun it again."""
        shunned = sorted(self._tier.shunned)
        for path in shunned:
            self._take_into_use(path)
        return bool(shunned)

    def hear_from(self, path: int, failed: TransferError | None, *, was_write: bool) -> None:
        """What was given up on a path has come back after all: it answers, and is used again as any other.

        Not if what came back is that it has `failed`: that is one failure more. It shuns no path in the middle of a
        run, whose plan reckons with it; the next one, which voids the plan, does.
        """
        self._silent.discard(path)
        if failed is not None:
            self._failures[path, was_write] += 1
            return
        if path in self._tier.shunned:
            self._take_into_use(path)
        for is_write in (False, True):
            self._failures.pop((path, is_write), None)

    def _take_into_use(self, path: int) -> None:
        arena = self._tier.arena
        self._tier.shunned.discard(path)
        for slab in set(arena.slabs_of(path)) - set(arena.slabs_on(path)):
            arena.reprieve(slab)
        self._failures[path, True] = FAILURES_IN_A_ROW - 1
        if not self._tier.shunned:
            self.why_shunned = None

    def left_behind(self) -> frozenset[Extent]:
        """Some of the extents still owned on paths that nothing more is written to."""
        there = [extent for path in self._tier.shunned for extent in self._tier.arena.extents_owned_on(path)]
        return frozenset(sorted(there)[:LEFT_BEHIND_AT_ONCE])

    def silent(self) -> dict[int, tuple[Extent, frozenset[Extent]]]:
        """Paths of which nothing was heard since something was given up: any extent there, and those that are owned."""
        arena = self._tier.arena
        return {
            path: (Extent(arena.slabs_of(path)[0], 0, arena.extent_bytes), arena.extents_owned_on(path))
            for path in self._silent
        }

    def _shun(self, path: int, error: TransferError) -> None:
        arena = self._tier.arena
        if path in self._tier.shunned:
            return
        for extent in self._failed.pop(path, ()):  # they are no worse than the others
            arena.pardon(extent)
        self._tier.shunned.add(path)
        self.why_shunned = error
        self._condemned = [slab for slab in self._condemned if arena.path_of(slab) != path]  # its file is left alone
        for slab in arena.slabs_on(path):
            arena.condemn(slab)
        _log.warning(
            "nothing more is written to %s, as it keeps failing; what is there moves elsewhere while that can be: %s",
            self._tier.paths[path],
            error,
        )

    def _make_up_on(self, path: int) -> None:
        extents = self.owed
        while self.owed > 0 and extents > 0:
            extents = min(extents, self.owed)
            try:
                self._tier.grow_on(path, extents)
            except OSError as error:
                _log.info("no room for %d extents in %s: %s", extents, self._tier.paths[path], error)
                extents //= 2

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
                is_shunned=number in self._tier.shunned,
            )
            for number, (folder, path) in enumerate(zip(self._tier.paths, self._paths, strict=True))
        }
