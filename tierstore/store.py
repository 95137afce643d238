"""Runs plans: the one place where decisions (plan, placement) meet the doing (traffic), and where leases are granted.

Only one thread is inside at a time, and every call first commits what has landed meanwhile. A move that failed is
rolled back. A failed write is made good, and a run that it happens in planned anew from there; the error of any other
move is raised by the next call that needs chunks. A run that breaks off after chunks were used closes the store to
further runs until `forgive`; reading works on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from tierstore.device import Event
from tierstore.errors import (
    BusyStoreError,
    FailedStepError,
    InvariantError,
    LeaseError,
    StoreClosedError,
)
from tierstore.execution import ChunkInfo, Use
from tierstore.housing import Setup
from tierstore.parking import Parking
from tierstore.planning import Plan, plan_fetch
from tierstore.residency import Fresh, Moving, Resident
from tierstore.stats import Stats
from tierstore.trace import Trace
from tierstore.traffic import FailedWriteError

__all__ = ["ChunkInfo", "ChunkStore", "Setup", "Use"]

_log = logging.getLogger("tierstore.store")


class ChunkStore(Parking):
    """Chunks in tiers. `describe` turns a chunk number into words for errors."""

    def __init__(self, setup: Setup, *, describe: Callable[[int], str] = "chunk {}".format) -> None:
        super().__init__(setup, describe=describe)
        self._broken_off: tuple[int, ...] | None = None
        self._failure: str | None = None
        self._traces: list[Trace] = []
        self._ended_leases: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()  # each with its last use
        for decision in setup.decided:
            self._traffic.recorder.decide(*decision)

    def _on_entry(self) -> None:
        self._traffic.settle()
        while not self._ended_leases.empty():
            self._execution.end_use(*self._ended_leases.get())

    # -- chunks -------------------------------------------------------------------------------------------------

    def add_chunks(self, infos: Mapping[int, ChunkInfo]) -> None:
        """Enter fresh chunks and give them homes. Raises CapacityError, with nothing changed, if there is no room."""
        with self._entered():
            self._return()
            homes = self._homes_with(infos)
            self._rehome(homes)
            self._short = None
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
            if isinstance(place, Resident):
                self._traffic.give_up(chunk, place)

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
        flush: Callable[[], None] | None = None,
        finish: Callable[[], None] | None = None,
        is_step: bool = True,
        ready: Callable[[int], None] | None = None,
        zeroes: bool = True,
    ) -> None:
        """Bring each chunk of `order` to where it is used and call `use(chunk, record, is_fresh)`, in that order.

        A fresh record is zeroed, or (`zeroes` false) of any bytes, for uses that write all of theirs; `use` launches
        its work on the tier's device and must not keep the tensor.
        Where `use` only gathers what is to be launched, `flush` launches it, and is called before chunks are let go.
        `finish` is called last and belongs to the run: an error of launched work that it raises breaks the run off.
        `ready(chunk)` is called before each use, and may wait or raise: the chunk then counts as not used.
        `upcoming` is the order expected next time; `is_step` counts the run in `stats().step`. Raises CapacityError
        before anything has moved, FailedStepError if an earlier run broke off.
        """
        with self._entered():
            if self._failure is None:
                self._return()
            self._raise_errors()
            if self._failure is not None:
                raise FailedStepError(self._failure)
            self._serve()
            self._move_room()
            if is_step and ready is None:  # beside backward is no time to measure in: activations come and go
                self.adapt_if_due()
            self._refuse_unreadable(order)
            with self._running():
                self._execute(order, upcoming, use, finish, ready, flush, is_step=is_step, zeroes=zeroes)

    @contextlib.contextmanager
    def lease_chunk(self, chunk: int) -> Iterator[Tensor]:
        """Hold a chunk's record where it is used; changes are kept. The chunk does not move until the end.

        An end while somebody else is inside counts from the next call on.
        """
        with self._entered():
            record = self._begin_lease(chunk)
            device = self._traffic.memory(self._infos[chunk].compute).device
        try:
            yield record
        finally:
            self._ended_leases.put((chunk, device.record()))
            with contextlib.suppress(BusyStoreError), self._entered():
                pass  # entering ends it, unless a run is inside that may wait for this very thread, say

    def _begin_lease(self, chunk: int) -> Tensor:
        while True:
            self.fetch_now(chunk)
            try:
                return self._execution.begin_use(chunk)[0]
            except FailedWriteError:
                pass  # which the next round makes good, or raises

    def fetch(self, chunks: Sequence[int]) -> None:
        """Begin to bring chunks to where they are used, as far as there is room; wait for nothing."""
        with self._entered():
            self._return()
            self._raise_errors()
            wanted = [chunk for chunk in chunks if not isinstance(self._ledger.where(chunk), Fresh)]
            self._execution.issue_all(plan_fetch(wanted, self._views(), self._traffic.room(), self._line))

    def fetch_now(self, chunk: int) -> None:
        """Begin to bring one chunk to where it is used, whatever has to make room."""
        with self._entered():
            self._return()
            self._raise_errors()
            if self._ledger.bound_for(chunk) != self._infos[chunk].compute:
                self._execution.issue_all(self._plan([chunk], ()))

    def send_home(self, chunks: Sequence[int]) -> None:
        """Begin to send chunks to their homes; wait for nothing. Raises LeaseError if one is leased."""
        with self._entered():
            self._return()
            self._raise_errors()
            self._send_home(chunks)

    def read_record(self, chunk: int, into: Tensor) -> bool:
        """Copy a chunk's record into host memory (uint8, its record bytes, page-aligned); move nothing.

        Returns False, and copies nothing, while the chunk is fresh. Works after a failed step too. After an error
        `into` must not be used again: a request that was given up may write to it yet.
        """
        return self.read_records([(chunk, into)])[0]

    def read_records(self, wanted: Sequence[tuple[int, Tensor]]) -> list[bool]:
        """As `read_record` for several chunks at once; after an error no `into` may be used again."""
        with self._entered():
            found: list[tuple[int, Resident, Tensor]] = []
            are_made = []
            for chunk, into in wanted:
                self._traffic.wait_until_over(chunk)  # else the extent it leaves may be filled once it has left
                place = self._ledger.where(chunk)
                if isinstance(place, Resident):
                    found.append((chunk, place, into))
                elif not isinstance(place, Fresh):
                    raise InvariantError(f"{self._describe(chunk)} has stopped moving and is still {place}")
                are_made.append(isinstance(place, Resident))
            self._read_out(*found)
            return are_made

    def count_write_wait(self, seconds: float) -> None:
        """Count time in which a use waited for a copy of its chunk to be written as a wait for writes."""
        self._traffic.write_wait_seconds += seconds

    # -- failed steps -------------------------------------------------------------------------------------------

    @property
    def broken_off(self) -> tuple[int, ...] | None:
        """The chunks that a run had used when it broke off, the last ones perhaps in part; None when all is well."""
        return self._broken_off

    def fail(self, story: str) -> None:
        """Refuse further runs, for the reason told, until `forgive`; what has run counts as broken off."""
        self._failure = story
        self._broken_off = self._broken_off or ()

    def forgive(self) -> None:
        """Allow runs again: whoever calls has put parameters and state right."""
        self._failure = self._broken_off = None
        self._try_again()

    # -- running a plan -----------------------------------------------------------------------------------------

    def _execute(
        self,
        order: Sequence[int],
        upcoming: Sequence[int],
        use: Use,
        finish: Callable[[], None] | None = None,
        ready: Callable[[int], None] | None = None,
        flush: Callable[[], None] | None = None,
        *,
        is_step: bool = False,
        zeroes: bool = True,
    ) -> None:
        """Plan a run and carry it out; anew from where chunks are then, if a failed write voids the plan.

        A run that breaks off closes the store to further runs.
        """
        plan = self._plan(order, upcoming)

        def replan() -> Plan:
            self._raise_errors()
            return self._plan(order[len(self._execution.used) :], upcoming)

        try:
            if is_step:
                self._traffic.recorder.record_step(self._execution.step(plan, use, finish, ready, replan, flush))
            else:
                self._execution.run(plan, use, finish, ready, replan, flush, zeroes=zeroes)
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
            return self._traffic.recorder.snapshot(tiers, self.setup.transfer.io_stats(self._io), paths)

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
