"""How large a store's tiers are: room is added, moved between paths, and given back once it has been emptied.

A tier shrinks by whole slabs from the last on. What lies in them leaves first, all of it at once: guests go home, and
what is at home there moves to other extents of the tier. Homes are chosen for the new sizes before anything moves, so
that what cannot be fails with everything as it was. A tier of the policy that nothing needed at first joins here, when
something does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping

from tierstore.arena import Extent
from tierstore.errors import CapacityError, LeaseError, TransferError
from tierstore.growth import slab_extents_of, slab_extents_of_memory
from tierstore.housing import Housing
from tierstore.planning import plan_eviction, plan_step
from tierstore.residency import Resident
from tierstore.striping import Striping
from tierstore.tiers import MemoryTier, Tier

_log = logging.getLogger("tierstore.store")


class Sizing(Housing):
    """The sizes of a store's tiers."""

    def _resize(self, sizes: Mapping[str, int], homes: Mapping[int, str], *, is_remedy: bool = False) -> None:
        """Give tiers other sizes, and chunks homes that fit these. All or nothing, until homes are as they should be.

        Smaller means emptying a tier's last slabs, and going down by whole slabs only. `is_remedy`: this may be what
        failed writes need, for which there was no room.
        """
        self._come_to_rest(is_remedy=is_remedy)
        tiers = {name: self.setup.tiers[name] for name in sizes}
        before = {name: tier.arena.lasting for name, tier in tiers.items()}
        with contextlib.ExitStack() as undo:
            for name in reversed([name for name in self._line if name in tiers]):  # files first: they are what fails
                undo.callback(self._shrink, tiers[name], before[name])
                self._grow(tiers[name], sizes[name])
            self._rehome(homes)
            undo.pop_all()
        if is_remedy:
            self._short = None
        for name, tier in tiers.items():
            self._shrink(tier, sizes[name])

    def _come_to_rest(self, *, is_remedy: bool = False) -> None:
        """Wait until every move under way has landed, and finish what room is on its way between paths."""
        try:
            self.wait()
        except TransferError:
            if not is_remedy or self._short is None:
                raise
        self._move_room(to_the_end=True)

    def wait(self) -> None:
        """Wait until every move under way has landed. Raises the error of one that failed."""
        with self._entered():
            while True:
                self._traffic.wait_until_all_over()
                if not self._traffic.failed_writes:
                    break
                self._raise_errors()
            self._raise_errors()

    def _grow(self, tier: Tier, extents: int) -> None:
        """Reserve what a tier lacks to be so large, in slabs that it can be given back in."""
        is_memory = isinstance(tier, MemoryTier)
        slab = slab_extents_of_memory(extents, self._extent_bytes) if is_memory else slab_extents_of(extents)
        least = self.setup.slab_extents.get(tier.name, 1)
        tier.grow(max(0, extents - tier.arena.lasting), slab_extents=max(least, slab))

    def _join(self, name: str) -> None:
        """Open a tier of the policy that nothing needed until now, of no size yet."""
        tier, self._io = self.setup.later[name]()
        self.setup.tiers[name] = tier
        self._tiers_to_close.append(tier)
        self._line = tuple(self.setup.tiers)
        self._traffic.join(tier)
        self._traffic.recorder.decide("room", f"{name} has joined: {', '.join(tier.paths)}", "nothing needed it before")

    # -- room between paths ---------------------------------------------------------------------------------------

    def _move_room(self, *, to_the_end: bool = False) -> None:
        """Let room move between the paths of a tier; `to_the_end`: finish what has begun instead."""
        for name, striping in self._traffic.striping.items():
            tier = self.setup.tiers[name]
            with contextlib.nullcontext() if to_the_end else contextlib.suppress(CapacityError):  # there is a next time
                self._vacate(tier, striping.in_the_way() if to_the_end else striping.move_room())
                self._fetch_left_behind(tier, striping)
            striping.give_back()

    def _fetch_left_behind(self, tier: Tier, striping: Striping) -> None:
        """Move some chunks off paths that fail; those that cannot be read stay, for who needs them to be told."""
        for extent in striping.left_behind():
            chunk = self._ledger.valid_places().get(Resident(tier.name, extent))
            if chunk is not None and chunk not in self._traffic.unreadable and not self._ledger.is_leased(chunk):
                try:
                    self._vacate(tier, [extent])
                except TransferError as error:
                    _log.warning("%s", error)

    # -- giving back ----------------------------------------------------------------------------------------------

    def _shrink(self, tier: Tier, extents: int) -> None:
        """Empty and give back slabs from the last on, as long as `extents` are left."""
        arena = tier.arena
        slabs: list[int] = []
        left = arena.lasting
        for slab in arena.lasting_slabs():
            left -= arena.lasting_in(slab)
            if left < extents or arena.has_quarantined(slab):  # the second was lost meanwhile
                break
            slabs.append(slab)
        in_use = [extent for slab in slabs for extent in arena.condemn(slab)]
        try:
            self._vacate(tier, in_use)
            for slab in slabs:
                tier.shrink_on(slab)
            if slabs and isinstance(tier, MemoryTier):
                tier.device.release_unused()
        finally:
            for slab in filter(arena.has_slab, slabs):
                if arena.path_of(slab) not in tier.shunned:  # since then
                    arena.reprieve(slab)
            homes = sum(self._ledger.home(chunk) == tier.name for chunk in self._infos)
            tier.due = min(tier.due, max(arena.lasting, extents, homes))

    def _vacate(self, tier: Tier, extents: Iterable[Extent]) -> None:
        """Move the chunks in some extents, of slabs that are condemned, home or to other extents of the tier."""
        places = self._ledger.valid_places()
        chunks = [chunk for extent in sorted(extents) if (chunk := places.get(Resident(tier.name, extent))) is not None]
        if not chunks:
            return  # and what is under way need not be waited for
        guests = [chunk for chunk in chunks if self._ledger.home(chunk) != tier.name]
        self._send_home(guests)
        self._traffic.wait_for_all()
        at_home = [chunk for chunk in chunks if self._ledger.home(chunk) == tier.name]
        if isinstance(tier, MemoryTier):
            self._make_room(tier, len(at_home))
            for chunk in at_home:
                self._traffic.send(chunk, tier.name, self._infos[chunk].record_bytes)
        else:
            for chunk in at_home:
                self._execution.issue_all(
                    plan_step([chunk], (), self._views(), self._traffic.wait_for_room(), self._line)
                )
                self._traffic.wait_for(chunk)
                self._send_home([chunk])
        self._traffic.wait_for_all()

    def _make_room(self, tier: Tier, extents: int) -> None:
        """See to so many free extents in a tier that has room for all its homes, by sending guests home."""
        self._send_home(self._guests_in(tier)[: max(0, extents - tier.arena.available)])
        self._traffic.wait_for_all()

    def _guests_in(self, tier: Tier) -> list[int]:
        """The chunks that can leave a tier's lasting slabs for a home elsewhere."""
        return [
            chunk
            for place, chunk in self._ledger.valid_places().items()
            if place.tier == tier.name != self._ledger.home(chunk) and not tier.arena.is_condemned(place.extent)
            if not self._ledger.is_leased(chunk)
        ]

    def _send_home(self, chunks: Collection[int]) -> None:
        """Begin to send chunks to their homes; wait for nothing. Raises LeaseError if one is leased."""
        for chunk in chunks:
            if self._ledger.is_leased(chunk):
                raise LeaseError(f"{self._describe(chunk)} is leased and cannot be evicted")
        self._execution.issue_all(plan_eviction(list(chunks), self._views(), self._traffic.wait_for_room(), self._line))
