"""Runs plans: the one place where decisions (plan, placement) meet the doing (traffic), and where leases are granted.

Only one thread is inside at a time, and every call first commits what has landed meanwhile. A move that failed is
rolled back, and its error is raised by the next call that needs chunks. A run that breaks off after chunks were used
closes the store to further runs until `forgive`; reading works on.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tierstore.errors import CapacityError, FailedStepError, InvariantError, LeaseError, StoreClosedError
from tierstore.execution import ChunkInfo, Execution, Use
from tierstore.growth import SLABS_PER_TIER
from tierstore.guard import Guarded
from tierstore.placement import Need, Room, place_homes
from tierstore.plan import ChunkView, Plan, Update, plan_eviction, plan_fetch, plan_homes, plan_step
from tierstore.residency import Fresh, Moving, Resident
from tierstore.stats import IoStats, Stats
from tierstore.tiers import MemoryTier, Tier
from tierstore.trace import Trace
from tierstore.traffic import Traffic
from tierstore.transfer import TransferEngine

__all__ = ["ChunkInfo", "ChunkStore", "Setup", "Use"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a store is built from: tiers on a line, fastest first; which may be homes; and the doers."""

    tiers: Mapping[str, Tier]
    homes: frozenset[str]
    order: str
    slab_extents: Mapping[str, int]
    transfer: TransferEngine
    io: IoStats
    timeout_seconds: float | None = None
    decided: tuple[tuple[str, str, str], ...] = ()  # on the way here: each decision's kind, what, and why


class ChunkStore(Guarded):
    """Chunks in tiers. `describe` turns a chunk number into words for errors."""

    def __init__(self, setup: Setup, *, describe: Callable[[int], str] = "chunk {}".format) -> None:
        super().__init__(tuple(setup.tiers.values()), setup.transfer)
        self.setup = setup
        self._line = tuple(setup.tiers)
        self._extent_bytes = setup.tiers[self._line[0]].arena.extent_bytes
        self._infos: dict[int, ChunkInfo] = {}
        self._traffic = Traffic(setup.tiers, setup.transfer, describe=describe, timeout_seconds=setup.timeout_seconds)
        self._ledger = self._traffic.ledger
        self._execution = Execution(self._traffic, self._infos)
        self._describe = describe
        self._broken_off: tuple[int, ...] | None = None
        self._failure: str | None = None
        self._traces: list[Trace] = []
        for decision in setup.decided:
            self._traffic.recorder.decide(*decision)

    def _on_entry(self) -> None:
        self._traffic.settle()

    # -- chunks -------------------------------------------------------------------------------------------------

    def add_chunks(self, infos: Mapping[int, ChunkInfo]) -> None:
        """Enter fresh chunks and give them homes. Raises CapacityError, with nothing changed, if there is no room."""
        with self._entered():
            homes = self._homes_for({**self._infos, **infos}, self._rooms())
            self._rehome(homes)
            self._infos.update(infos)
            for chunk in infos:
                self._ledger.add(chunk, homes[chunk])
            if infos:
                self._tell_homes(f"{len(infos):,} new chunks", Counter(homes[chunk] for chunk in infos))

    def remove_chunk(self, chunk: int) -> None:
        """Delete a chunk and its bytes. Raises LeaseError while somebody leases it."""
        with self._entered():
            if self._ledger.is_leased(chunk):
                raise LeaseError(f"{self._describe(chunk)} is leased and cannot be deleted")
            self._traffic.wait_until_over(chunk)  # a move that failed leaves the source, which goes now too
            place = self._ledger.remove(chunk)
            del self._infos[chunk]
            last_use = self._traffic.last_use.pop(chunk, None)
            if isinstance(place, Resident):
                self._traffic.give_up(place, last_use)

    def holds(self, chunk: int) -> bool:
        """Whether the chunk was added and not removed."""
        return chunk in self._infos

    def home_of(self, chunk: int) -> str:
        """The tier that has room reserved for the chunk."""
        return self._ledger.home(chunk)

    def tier_of(self, chunk: int) -> str | None:
        """The tier of the chunk's only valid copy; None while it is fresh."""
        with self._entered():
            place = self._ledger.where(chunk)
            source = place.source if isinstance(place, Moving) else place
            return source.tier if isinstance(source, Resident) else None

    # -- using chunks -------------------------------------------------------------------------------------------

    def run(
        self,
        order: Sequence[int],
        upcoming: Sequence[int],
        use: Use,
        *,
        finish: Callable[[], None] | None = None,
        is_step: bool = True,
        ready: Callable[[int], None] | None = None,
    ) -> None:
        """Bring each chunk of `order` to where it is used and call `use(chunk, record, is_fresh)`, in that order.

        The record is zeroed if fresh; `use` launches its work on the tier's device and must not keep the tensor.
        `finish` is called last and belongs to the run: an error of launched work that it raises breaks the run off.
        `ready(chunk)` is called before each use, and may wait or raise: the chunk then counts as not used.
        `upcoming` is the order expected next time; `is_step` counts the run in `stats().step`. Raises CapacityError
        before anything has moved, FailedStepError if an earlier run broke off.
        """
        with self._entered():
            self._traffic.raise_errors()
            if self._failure is not None:
                raise FailedStepError(self._failure)
            self._move_room()
            plan = self._plan(order, upcoming)
            with self._running():
                self._execute(plan, use, finish, ready, is_step=is_step)

    @contextlib.contextmanager
    def lease_chunk(self, chunk: int) -> Iterator[Tensor]:
        """Hold a chunk's record where it is used; changes are kept. The chunk does not move until the end."""
        with self._entered():
            self.fetch_now(chunk)
            record, _ = self._execution.begin_use(chunk)
        try:
            yield record
        finally:
            with self._entered(wait=True):  # the lease must end, whoever is inside
                self._execution.end_use(chunk)

    def fetch(self, chunks: Sequence[int]) -> None:
        """Begin to bring chunks to where they are used, as far as there is room; wait for nothing."""
        with self._entered():
            self._traffic.raise_errors()
            wanted = [chunk for chunk in chunks if not isinstance(self._ledger.where(chunk), Fresh)]
            self._execution.issue_all(plan_fetch(wanted, self._views(), self._traffic.room(), self._line))

    def fetch_now(self, chunk: int) -> None:
        """Begin to bring one chunk to where it is used, whatever has to make room."""
        with self._entered():
            self._traffic.raise_errors()
            if self._ledger.bound_for(chunk) != self._infos[chunk].compute:
                self._execution.issue_all(self._plan([chunk], ()))

    def send_home(self, chunks: Sequence[int]) -> None:
        """Begin to send chunks to their homes; wait for nothing. Raises LeaseError if one is leased."""
        with self._entered():
            self._traffic.raise_errors()
            for chunk in chunks:
                if self._ledger.is_leased(chunk):
                    raise LeaseError(f"{self._describe(chunk)} is leased and cannot be evicted")
            self._execution.issue_all(plan_eviction(chunks, self._views(), self._traffic.wait_for_room(), self._line))

    def read_record(self, chunk: int, into: Tensor) -> bool:
        """Copy a chunk's record into host memory (uint8, its record bytes, page-aligned); move nothing.

        Returns False, and copies nothing, while the chunk is fresh. Works after a failed step too.
        """
        with self._entered():
            self._traffic.wait_until_over(chunk)  # the extent it leaves may be promised, and filled once it has left
            place = self._ledger.where(chunk)
            if isinstance(place, Fresh):
                return False
            if not isinstance(place, Resident):
                raise InvariantError(f"{self._describe(chunk)} has stopped moving and is still {place}")
            where = self.setup.tiers[place.tier], place.extent
            ticket = self.setup.transfer.read_out(where, into, ready=self._traffic.last_use.get(chunk))
            ticket.wait(self.setup.timeout_seconds)
            return True

    def count_write_wait(self, seconds: float) -> None:
        """Count time in which a use waited for a copy of its chunk to be written as a wait for writes."""
        self._traffic.write_wait_seconds += seconds

    def wait(self) -> None:
        """Wait until every move under way has landed. Raises the error of one that failed."""
        with self._entered():
            self._traffic.wait_for_all()
            self._traffic.raise_errors()

    # -- failed steps -------------------------------------------------------------------------------------------

    @property
    def broken_off(self) -> tuple[int, ...] | None:
        """The chunks that a run had used when it broke off, the last one perhaps in part; None when all is well."""
        return self._broken_off

    def fail(self, story: str) -> None:
        """Refuse further runs, for the reason told, until `forgive`; what has run counts as broken off."""
        self._failure = story
        self._broken_off = self._broken_off or ()

    def forgive(self) -> None:
        """Allow runs again: whoever calls has put parameters and state right."""
        self._failure = self._broken_off = None

    # -- size ---------------------------------------------------------------------------------------------------

    def resize_tier(self, name: str, extents: int) -> None:
        """Make a tier `extents` large; smaller means emptying its last slabs first, and going down by whole slabs only.

        Raises CapacityError, with the size as it was, if homes and pipelines would not fit. If a chunk that should move
        to a new home cannot, all homes stay as they were, and its error is raised.
        """
        with self._entered():
            self.wait()
            self._move_room(to_the_end=True)
            tier = self.setup.tiers[name]
            before, slab = tier.arena.capacity, max(self.setup.slab_extents[name], extents // SLABS_PER_TIER)
            slower = self._line[self._line.index(name) + 1 :] if extents > before else ()
            rooms = self._rooms() | {name: Room(extents, name in self.setup.homes)}
            homes = self._homes_for(self._infos, rooms, anew=slower)
            tier.grow(max(0, extents - before), slab_extents=slab)
            try:
                self._rehome(homes)
            except CapacityError:  # nothing has moved
                self._shrink(tier, before)
                raise
            self._shrink(tier, extents)
            what = f"{name} has {tier.arena.capacity:,} extents of {self._extent_bytes:,} bytes, before {before:,}"
            self._traffic.recorder.decide("resize", what, f"{extents:,} were asked for")

    def _move_room(self, *, to_the_end: bool = False) -> None:
        """Let room move between the paths of a tier; `to_the_end`: finish what has begun instead."""
        for name, striping in self._traffic.striping.items():
            with contextlib.nullcontext() if to_the_end else contextlib.suppress(CapacityError):  # there is a next time
                for extent in striping.in_the_way() if to_the_end else striping.move_room():
                    self._vacate(self.setup.tiers[name], Resident(name, extent))
            striping.give_back()

    def _shrink(self, tier: Tier, extents: int) -> None:
        """Empty and give back slabs from the last on, as long as `extents` are left."""
        try:
            while tier.arena.slabs and sum(tier.arena.slabs[:-1]) >= extents:
                for extent in tier.arena.condemn_last():
                    self._vacate(tier, Resident(tier.name, extent))
                tier.shrink()
        finally:
            tier.arena.reprieve()

    def _vacate(self, tier: Tier, place: Resident) -> None:
        """Move the chunk in a condemned extent to another tier, or to another extent of this one."""
        chunk = self._ledger.valid_places().get(place)
        if chunk is None:
            return
        if tier.name != self._ledger.home(chunk):
            self.send_home([chunk])
        elif isinstance(tier, MemoryTier):
            self._make_room(tier)
            self._traffic.send(chunk, tier.name, self._infos[chunk].record_bytes)
        else:
            self.fetch_now(chunk)
            self._traffic.wait_for(chunk)
            self.send_home([chunk])
        self._traffic.wait_for_all()

    def _make_room(self, tier: Tier) -> None:
        """See to a free extent in a tier that has room for all its homes, by sending guests home."""
        guests = [c for c, place in self._ledger.places() if place.tier == tier.name != self._ledger.home(c)]
        while not tier.arena.available:  # the extent that a guest leaves may be condemned too
            self.send_home([guests.pop()])
            self._traffic.wait_for_all()

    def _rooms(self) -> dict[str, Room]:
        return {name: Room(tier.arena.lasting, name in self.setup.homes) for name, tier in self.setup.tiers.items()}

    def _homes_for(
        self, infos: Mapping[int, ChunkInfo], rooms: Mapping[str, Room], *, anew: Sequence[str] = ()
    ) -> dict[int, str]:
        """Choose homes; chunks keep those they have, as far as they can, except in the tiers `anew`."""
        kept = {chunk: home for chunk in self._infos if (home := self._ledger.home(chunk)) not in anew}
        needs = [Need(info.compute, info.named, kept.get(chunk)) for chunk, info in infos.items()]
        homes = place_homes(needs, rooms, order=self.setup.order, extent_bytes=self._extent_bytes)
        return dict(zip(infos, homes, strict=True))

    def _rehome(self, homes: Mapping[int, str]) -> None:
        """Change homes once the chunks that move up to theirs have landed. On an error all stay as they were."""
        changed = {chunk: homes[chunk] for chunk in self._infos if homes[chunk] != self._ledger.home(chunk)}
        if not changed:
            return
        free = {chunk: home for chunk, home in changed.items() if not self._ledger.is_leased(chunk)}
        self._execution.issue_all(plan_homes(free, self._views(), self._traffic.wait_for_room(), self._line))
        self.wait()
        routes = Counter(f"{self._ledger.home(chunk)} -> {home}" for chunk, home in changed.items())
        for chunk, home in changed.items():
            self._ledger.set_home(chunk, home)
        self._tell_homes(f"{len(changed):,} chunks have another home", routes)

    def _tell_homes(self, what: str, counts: Mapping[str, int]) -> None:
        rooms = ", ".join(f"{name} {room.extents:,}" for name, room in self._rooms().items() if room.homes)
        where = ", ".join(f"{count:,} {home}" for home, count in counts.items())
        self._traffic.recorder.decide("homes", f"{what}: {where or 'none'}", f"room for homes and pipelines: {rooms}")

    # -- running a plan -----------------------------------------------------------------------------------------

    def _plan(self, order: Sequence[int], upcoming: Sequence[int]) -> Plan:
        """Plan a run; there is nothing to plan while all chunks of this one and the next are where they are used."""
        if self._are_in_place(order) and self._are_in_place(upcoming):
            return Plan(tuple(map(Update, order)))
        return plan_step(order, upcoming, self._views(), self._traffic.wait_for_room(), self._line)

    def _are_in_place(self, chunks: Sequence[int]) -> bool:
        bound_for, infos = self._ledger.bound_for, self._infos
        return all(bound_for(chunk) == infos[chunk].compute for chunk in chunks)

    def _views(self) -> dict[int, ChunkView]:
        """What planning sees; a leased chunk counts as at home where it is, so that it is not asked to leave."""
        views = {}
        for chunk, info in self._infos.items():
            tier = self._ledger.bound_for(chunk)
            is_held = tier is not None and self._ledger.is_leased(chunk)
            views[chunk] = ChunkView(tier, tier if is_held and tier else self._ledger.home(chunk), info.compute)
        return views

    def _execute(
        self,
        plan: Plan,
        use: Use,
        finish: Callable[[], None] | None = None,
        ready: Callable[[int], None] | None = None,
        *,
        is_step: bool = False,
    ) -> None:
        """Carry out a plan. A run that breaks off closes the store to further runs."""
        try:
            if is_step:
                self._traffic.recorder.record_step(self._execution.step(plan, use, finish, ready))
            else:
                self._execution.run(plan, use, finish, ready)
        except BaseException as error:
            self._break_off(self._execution.used, error)
            raise

    def _break_off(self, used: Sequence[int], error: BaseException) -> None:
        """Give back places kept for chunks that were not made; refuse further runs if any chunk was used."""
        self._traffic.settle()
        self._traffic.unmake()
        if used:
            self._broken_off = tuple(used)
            self._failure = f"a run broke off at {self._describe(used[-1])}, the {len(used)}th it used: {error!r}"

    # -- the whole ----------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Read counters, fill and routes as one frozen value. May be called within a run."""
        with self._entered(may_nest=True):
            chunks = Counter(self._ledger.bound_for(chunk) for chunk in self._ledger)
            tiers = {name: tier.stats(chunks[name]) for name, tier in self.setup.tiers.items()}
            paths = {folder: one for each in self._traffic.striping.values() for folder, one in each.stats().items()}
            return self._traffic.recorder.snapshot(tiers, self.setup.io, paths)

    def residency(self) -> dict[int, str | None]:
        """The tier that each chunk is in or bound for, None while it is fresh. May be called within a run."""
        with self._entered(may_nest=True):
            return {chunk: self._ledger.bound_for(chunk) for chunk in self._ledger}

    def describe(self, chunk: int) -> str:
        """Words for a chunk: its number, and what is in it."""
        return self._describe(chunk)

    @contextlib.contextmanager
    def traced(self) -> Iterator[Trace]:
        """Record what happens within the block as a timeline; write it when the block is over.

        Tracks: the control thread with its runs, updates and waits; each route, with its chunks from the moment their
        moves could begin to the moment they had landed; each worker and copy stream, with what it did. Moves that are
        under way at the end are waited for, and belong to it. A block within another belongs to both.
        """
        trace = Trace()
        self._traces.append(trace)
        try:
            self._tell()
            yield trace
        finally:
            outer = self._traces[: self._traces.index(trace)]
            self._traces.remove(trace)
            with contextlib.suppress(StoreClosedError):  # closing has waited for all there was
                self._tell()
            for one in outer:
                one.events += trace.events

    def _tell(self) -> None:
        """Let events go to the trace that was begun last of those that are not over."""
        with self._entered(wait=True):
            try:
                self._traffic.wait_until_all_over()
            finally:
                self._traffic.tell(self._traces[-1] if self._traces else None)

    def check(self) -> None:
        """Raise InvariantError unless every invariant of arenas, ledger and moves holds. May be called within a run."""
        with self._entered(may_nest=True):
            self._traffic.check()
