"""Tiers emptied on demand, and filled again: for when something else needs their memory between steps.

What lies in the tiers goes to a slower one, which grows for it where the policy leaves its size open, and their memory
goes back to the system or the device. Until they are filled again no chunk can be used, but all state can be read and
saved where it is. Whoever uses a chunk has them filled again first.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError, LeaseError, PolicyError
from tierstore.execution import ChunkInfo
from tierstore.lending import Lending
from tierstore.placement import ENOUGH_EXTENTS, LINE, Room
from tierstore.planning import plan_fetch
from tierstore.stats import Relocation
from tierstore.tiers import MemoryTier
from tierstore.traffic import FailedWriteError

_log = logging.getLogger("tierstore.parking")


@dataclass(frozen=True, slots=True)
class _Parked:
    """What was changed: the extents that tiers had, those emptied and those that took what was in them; the homes of
    chunks, and which of them were where they are used.
    """

    emptied: frozenset[str]
    sizes: Mapping[str, int]
    homes: Mapping[int, str]
    in_use: tuple[int, ...]


class Parking(Lending):
    """Tiers that can be emptied."""

    _parked: _Parked | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether tiers are empty until somebody uses a chunk."""
        return self._parked is not None

    def offload(self, tiers: Sequence[str], to: str | None = None) -> Relocation:
        """Empty memory tiers and give their memory back; what is in them goes `to` a slower tier.

        Without `to` that is the fastest one that has, or may take, the room. Raises CapacityError, with nothing moved,
        if there is none; LeaseError if a chunk in them is leased; PolicyError for tiers that cannot be meant.
        """
        with self._entered():
            self._raise_errors()
            began, moved = time.perf_counter(), self._moved_bytes()
            emptied = self._check_emptied(tiers)
            self._come_to_rest()
            for name in emptied:
                self.setup.tiers[name].check_shrinks(0)
            room = {name: self.setup.tiers[name].arena.capacity for name in emptied}
            while True:
                goal, homes, wanted = self._goal(emptied, to)
                if goal not in self.setup.tiers:
                    self._join(goal)
                try:
                    self._park(self._what_is_parked(emptied, goal), emptied, goal, wanted, homes)
                    break
                except FailedWriteError:
                    self._raise_errors()  # which makes it good elsewhere, or raises what cannot be
            done = Relocation(
                self._moved_bytes() - moved, sum(room.values()) * self._extent_bytes, time.perf_counter() - began
            )
            self._tell_relocation("offload", f"{', '.join(emptied)} emptied into {goal}", done)
            return done

    def _park(self, parked: _Parked, emptied: Sequence[str], goal: str, wanted: int, homes: Mapping[int, str]) -> None:
        """Empty tiers into another; what breaks off half-way is put right by whoever uses a chunk."""
        before, self._parked = self._parked, parked
        passed = self._passed(emptied, goal)
        try:
            with self._passable(passed, dict.fromkeys(emptied, 0)):
                self._resize({goal: max(self._has(goal), wanted)}, homes)
                self._empty([self._memory_tier(name) for name in emptied], passed)
        except BaseException:
            is_as_before = all(self._has(name) == size for name, size in parked.sizes.items())
            if is_as_before and all(self._ledger.home(chunk) == home for chunk, home in parked.homes.items()):
                self._parked = before
            raise

    def _empty(self, tiers: Sequence[MemoryTier], passed: Sequence[MemoryTier]) -> None:
        """Send all that is in some tiers home at once, and give their memory back.

        The slower ones' chunks leave first: what follows passes through the room they leave, or that guests make.
        """
        leaving: list[int] = []
        for tier in passed:
            if tier not in tiers:
                leaving += self._guests_in(tier)[: max(0, ENOUGH_EXTENTS - tier.arena.available)]
        for tier in reversed(tiers):
            leaving += self._guests_in(tier)
        self._send_home(leaving)
        for tier in tiers:
            self._shrink(tier, 0)

    @contextlib.contextmanager
    def _passable(self, tiers: Sequence[MemoryTier], sizes: Mapping[str, int]) -> Iterator[None]:
        """Have room in tiers for chunks that must pass them, whatever size they have now, and in the end by `sizes`."""
        last = {tier.name: tier.arena.lasting for tier in tiers}
        for tier in tiers:
            self._grow(tier, ENOUGH_EXTENTS)
        try:
            yield
            last |= {name: size for name, size in sizes.items() if name in last}
        finally:
            for tier in tiers:
                self._shrink(tier, last[tier.name])

    def reload(self) -> Relocation:
        """Give emptied tiers their memory again, and chunks their homes; begin to fetch those that were in use.

        Does nothing while no tier is emptied. Raises CapacityError, with everything as it was, without the memory.
        """
        with self._entered():
            parked = self._parked
            if parked is None:
                return Relocation(0, 0, 0.0)
            began, moved = time.perf_counter(), self._moved_bytes()
            sizes = {
                name: min(parked.sizes[name], self._ceilings.get(name, parked.sizes[name])) for name in parked.emptied
            }
            self._check_host_memory(sizes.get("cpu", 0) - self._has("cpu"))
            before = sum(self.setup.tiers[name].arena.capacity for name in parked.emptied)
            is_limited = any(size < parked.sizes[name] for name, size in sizes.items())  # as some of them yield
            passed = self._passed(sorted(parked.emptied, key=LINE.index), LINE[-1])
            with self._passable(passed, sizes):
                self._resize(sizes, self._homes_again(parked, sizes, is_limited=is_limited), is_remedy=True)
            self._parked = None
            taken = sum(self.setup.tiers[name].arena.capacity for name in parked.emptied) - before
            if not is_limited:
                for name in parked.sizes.keys() - parked.emptied:
                    self._shrink(self.setup.tiers[name], parked.sizes[name])
            wanted = [chunk for chunk in parked.in_use if chunk in self._infos]
            self._execution.issue_all(plan_fetch(wanted, self._views(), self._traffic.room(), self._line))
            done = Relocation(self._moved_bytes() - moved, taken * self._extent_bytes, time.perf_counter() - began)
            self._tell_relocation("reload", f"{', '.join(parked.sizes)} as before", done)
            return done

    def _homes_again(self, parked: _Parked, sizes: Mapping[str, int], *, is_limited: bool) -> dict[int, str]:
        """The homes that chunks had; where they still are, as far as there is less room than there was."""
        if is_limited:
            rooms = self._rooms()
            return self._holdings().homes_in(
                {**rooms, **{name: replace(rooms[name], extents=size) for name, size in sizes.items()}}
            )
        return {chunk: parked.homes.get(chunk, self._ledger.home(chunk)) for chunk in self._infos}

    def adapt(self) -> None:
        """Measure how full memory is, and adapt to it, as steps do by themselves; emptied tiers stay so."""
        if self._parked is None:
            super().adapt()

    def resize_tier(self, name: str, extents: int) -> None:
        with self._entered():
            self._return()
            super().resize_tier(name, extents)

    def _make_usable(self, tier: str) -> None:
        if self._parked is not None and tier not in self._parked.emptied:
            self.reload()

    def _usual_size(self, tier: MemoryTier) -> int:
        if self._parked is None or tier.name not in self._parked.emptied:
            return super()._usual_size(tier)
        return self._parked.sizes[tier.name]

    def _take_again(self, tier: str, before: int) -> None:
        """As ever; of a tier that is empty, when it is filled again."""
        if self._parked is None or tier not in self._parked.emptied:
            super()._take_again(tier, before)
        else:
            self._parked = replace(self._parked, sizes={**self._parked.sizes, tier: before})

    def _return(self) -> None:
        """Fill emptied tiers again, as a chunk is about to be used."""
        if self._parked is not None:
            self.reload()

    def _move_room(self, *, to_the_end: bool = False) -> None:
        """As ever, but not while chunks have nowhere to pass through."""
        if self._parked is None:
            super()._move_room(to_the_end=to_the_end)

    def _homes_for(
        self, infos: Mapping[int, ChunkInfo], rooms: Mapping[str, Room], *, anew: Sequence[str] = ()
    ) -> dict[int, str]:
        """As ever; while tiers are empty no chunk has to pass anywhere, and homes stay if there is room for them."""
        if self._parked is None:
            return super()._homes_for(infos, rooms, anew=anew)
        homes = {chunk: self._ledger.home(chunk) for chunk in infos}
        for tier, count in Counter(homes.values()).items():
            if count > rooms[tier].extents:
                raise CapacityError(
                    f"{tier} has {rooms[tier].extents:,} extents of {self._extent_bytes:,} bytes, and {count:,} chunks "
                    f"are there or on their way, as tiers are offloaded: reload() them"
                )
        return homes

    def _check_emptied(self, tiers: Sequence[str]) -> list[str]:
        """The memory tiers to be emptied, the fastest first."""
        names = [tiers] if isinstance(tiers, str) else list(tiers)
        for name in names:
            self._memory_tier(name)
        emptied = [name for name in self._line if name in names]
        if not emptied:
            raise PolicyError(f"found no tier to empty; allowed: one or more of {', '.join(self._line)}")
        for place, chunk in self._ledger.valid_places().items():
            if place.tier in emptied and self._ledger.is_leased(chunk):
                raise LeaseError(f"{self._describe(chunk)} is leased, so that {place.tier} cannot be emptied")
        return emptied

    def _goal(self, emptied: Sequence[str], to: str | None) -> tuple[str, dict[int, str], int]:
        """Where what is in the tiers goes; every chunk's home then; how many extents that takes there."""
        last = LINE.index(emptied[-1])
        homes_in = self.setup.homes | self.setup.later.keys()
        slower = [name for name in LINE[last + 1 :] if name in homes_in]
        if to is not None and to not in slower:
            allowed = f"allowed: {', '.join(slower)}" if slower else "add a slower tier to the policy"
            raise PolicyError(f"{', '.join(emptied)} cannot be emptied into {to!r}; {allowed}")
        short: CapacityError | None = None
        for goal in slower if to is None else [to]:
            homes, wanted = self._homes_without(emptied, goal)
            try:
                self._check_room(goal, wanted)
            except CapacityError as error:
                short = error
            else:
                return goal, homes, wanted
        raise short or PolicyError(f"{', '.join(emptied)} cannot be emptied: add a slower tier to the policy")

    def _homes_without(self, emptied: Sequence[str], goal: str) -> tuple[dict[int, str], int]:
        """Homes once chunks have theirs in `goal` that had it in emptied tiers; and others that lie there, for which
        there is room in it, or which had theirs on the way. What has to pass a tier finds room in it."""
        homes = {chunk: self._ledger.home(chunk) for chunk in self._infos}
        there = [chunk for place, chunk in self._ledger.valid_places().items() if place.tier in emptied]
        passed = self._passed(emptied, goal)
        homes |= {chunk: goal for chunk, home in homes.items() if home in emptied}
        homes |= {chunk: goal for chunk in there if homes[chunk] in {tier.name for tier in passed}}
        wanted = sum(home == goal for home in homes.values())
        for chunk in there:
            if homes[chunk] != goal and wanted < self._has(goal):
                homes[chunk] = goal
                wanted += 1
        for tier in passed:
            at_home = [chunk for chunk, home in homes.items() if home == tier.name]
            in_the_way = at_home[: max(0, len(at_home) + ENOUGH_EXTENTS - tier.arena.lasting)]
            homes |= dict.fromkeys(in_the_way, goal)
            wanted += len(in_the_way)
        if any(LINE.index(homes[chunk]) > LINE.index(goal) for chunk in there):
            wanted += ENOUGH_EXTENTS
        return homes, wanted

    def _passed(self, emptied: Sequence[str], goal: str) -> list[MemoryTier]:
        """The tiers between the fastest that is emptied and the one that takes what is in it."""
        between = LINE[LINE.index(emptied[0]) + 1 : LINE.index(goal)]
        return [self._memory_tier(name) for name in between if name in self.setup.tiers]

    def _check_room(self, goal: str, wanted: int) -> None:
        has, most = self._has(goal), self._most.get(goal)
        if goal == "cpu" and most is None:
            self._check_host_memory(wanted - has)
        if wanted > has and most is not None and wanted > most:
            otherwise = "" if goal == LINE[-1] else ", or choose a slower tier"
            raise CapacityError(
                f"{goal} has {has:,} extents of {self._extent_bytes:,} bytes, and {wanted:,} are needed: raise "
                f"tiers.{goal}.capacity to at least {wanted * self._extent_bytes:,} bytes{otherwise}"
            )

    def _what_is_parked(self, emptied: Sequence[str], goal: str) -> _Parked:
        """What there is now; of tiers that are emptied one after another, what there was at first."""
        sizes = {name: self._has(name) for name in (*emptied, goal)}
        homes = {chunk: self._ledger.home(chunk) for chunk in self._infos}
        in_use = [chunk for chunk, info in self._infos.items() if self._ledger.bound_for(chunk) == info.compute]
        if self._parked is None:
            return _Parked(frozenset(emptied), sizes, homes, tuple(in_use))
        was = self._parked
        return _Parked(was.emptied | {*emptied}, {**sizes, **was.sizes}, {**homes, **was.homes}, was.in_use)

    def _moved_bytes(self) -> int:
        return self._traffic.recorder.moved_bytes

    def _tell_relocation(self, kind: str, what: str, done: Relocation) -> None:
        rate = done.bytes_moved / done.seconds if done.seconds else 0.0
        text = (
            f"{done.memory_bytes:,} bytes of memory and {done.bytes_moved:,} bytes moved in {done.seconds:.3f} s "
            f"({rate / 1e9:.2f} GB/s)"
        )
        _log.info("%s: %s; %s", kind, what, text)
        self._traffic.recorder.decide(kind, what, text)
