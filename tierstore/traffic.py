"""Issues and commits single moves: where the ledger, the arenas, the flights and the transfers of one store meet.

Every change to them is made here, on the thread that called the store. A move is begun with its extent taken or
claimed; `settle` commits what has landed and rolls back what has failed. A failed move leaves the chunk where it was;
its error is kept until `raise_errors`. A failed write to a file can be made good, by who knows where else there is
room; until then it is among `failed_writes`. What a file could not be made to give back is `unreadable`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from tierstore.arena import Arena
from tierstore.device import Event
from tierstore.errors import (
    ChecksumError,
    InvariantError,
    TierstoreError,
    TransferCancelledError,
    TransferError,
    TransferNotBegunError,
    TransferTimeoutError,
)
from tierstore.flights import Flight, Flights
from tierstore.planning import Move
from tierstore.residency import Ledger, Moving, Resident
from tierstore.stats import Recorder
from tierstore.striping import Striping
from tierstore.tiers import MemoryTier, Tier
from tierstore.trace import CONTROL, Trace
from tierstore.transfer import Ticket, TransferEngine

_WAY_ON = "all other state can be saved (state_dict(partial=True)), and load_state_dict() puts this right"


SILENCE = (TransferTimeoutError, TransferNotBegunError)
"""What is raised where a disk does not answer, which says nothing of what is on it."""


class FailedWriteError(TransferError):
    """A write to a file has failed for good. Its extent is lost, the chunk is where it was, and every plan is void."""


class Traffic:
    """Chunks under way between tiers. `describe` turns a chunk number into words for errors."""

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        transfer: TransferEngine,
        *,
        describe: Callable[[int], str],
        timeout_seconds: float | None,
    ) -> None:
        self.tiers = tiers
        self.ledger = Ledger()
        self.recorder = Recorder()
        self.last_use: dict[int, Event] = {}
        self.trace: Trace | None = None
        self.read_wait_seconds = 0.0  # blocked behind copies to a faster tier
        self.write_wait_seconds = 0.0  # and to a slower one
        self.describe = describe
        self._transfer = transfer
        self._timeout_seconds = timeout_seconds
        self.striping = {name: Striping(tier, self.recorder.decide) for name, tier in tiers.items() if tier.paths}
        self._flights = Flights(iter(tiers))
        self._by_ticket: dict[Ticket, Flight] = {}
        self._errors: list[TierstoreError] = []
        self.failed_writes: dict[int, FailedWriteError] = {}  # by chunk
        self.unreadable: dict[int, TransferError] = {}  # chunks whose last read from a file failed, and how
        self._draining: list[tuple[Resident, Event]] = []
        self._given_up: dict[Flight, tuple[str, int]] = {}  # the system may write there yet; its file's tier and path
        self._rank = {tier: rank for rank, tier in enumerate(tiers)}

    def join(self, tier: Tier) -> None:
        """Know of one tier more, which is among `tiers` now, the last on the line."""
        self._flights.join(tier.name)
        self._rank[tier.name] = len(self._rank)
        if tier.paths:
            self.striping[tier.name] = Striping(tier, self.recorder.decide)

    def tell(self, trace: Trace | None) -> None:
        """Report what happens to a trace from now on, or to nobody."""
        self.trace = trace
        self._transfer.tell(trace)

    # -- beginning ----------------------------------------------------------------------------------------------

    def issue(self, move: Move, nbytes: int) -> None:
        """Begin a move, or keep a place for a chunk that has no bytes yet.

        Its extent is free, or one that another chunk is still leaving: the copy then follows that one's.
        """
        if move.source is None:
            self._flights.add(Flight(move.chunk, None, *self._extent_in(move.destination, nbytes, None)))
        else:
            self.send(move.chunk, move.destination, nbytes)

    def send(self, chunk: int, tier: str, nbytes: int) -> None:
        """Begin one hop of a chunk to a tier (its own, too: to another extent there)."""
        previous = self._flights.of(chunk)
        place, claims = self._extent_in(tier, nbytes, self.ledger.bound_for(chunk))
        try:
            source = self.ledger.begin_move(chunk, place)
        except BaseException:
            if claims is None:
                self.tiers[tier].release(place.extent)
            raise
        flight = Flight(chunk, source, place, claims)
        self._flights.add(flight)
        try:
            self._submit(flight, previous, nbytes)
        except BaseException:
            self._let_fall(flight)
            raise

    def _submit(self, flight: Flight, previous: Flight | None, nbytes: int) -> None:
        assert flight.source is not None
        source, destination = flight.source, flight.destination
        after = [one.ticket for one in (previous, flight.claims) if one is not None and one.ticket is not None]
        flight.ticket = self._transfer.submit(
            (self.tiers[source.tier], source.extent),
            (self.tiers[destination.tier], destination.extent),
            nbytes,
            after=after,
            ready=None if previous else self.last_use.get(flight.chunk),
        )
        self._by_ticket[flight.ticket] = flight
        for place, is_write in ((source, False), (destination, True)):
            if place.tier in self.striping:
                self.striping[place.tier].watch(place.extent, flight.ticket, is_write=is_write)

    def _extent_in(self, tier: str, nbytes: int, source: str | None) -> tuple[Resident, Flight | None]:
        """Take a free extent for a chunk from `source`, or claim the one that another has been leaving for longest.

        It lies on the path chosen, or, where there is but one, is rather one that is left for `source`.
        """
        arena, striping = self.tiers[tier].arena, self.striping.get(tier)
        if striping is None or not (striping.has_choice or self.tiers[tier].shunned):
            path, claimed = 0, self._flights.next_leaving(tier, source)
        else:
            leaving = self._leaving_by_path(tier)
            path = striping.choose(nbytes, promised=leaving)
            claimed = leaving.get(path)
        if arena.has_room(path) or claimed is None or claimed.source is None:
            return Resident(tier, arena.take(path)), None
        return claimed.source, claimed

    def _leaving_by_path(self, tier: str) -> dict[int, Flight]:
        """Of each path of a tier, the flight that has been leaving an extent that may be claimed for longest."""
        arena = self.tiers[tier].arena
        by_path: dict[int, Flight] = {}
        for flight in self._flights.all_leaving(tier):
            if flight.source is not None and not arena.is_condemned(flight.source.extent):
                by_path.setdefault(arena.path_of(flight.source.extent.slab), flight)
        return by_path

    def room(self) -> dict[str, int]:
        """Extents of each tier that are free, or are being left and promised to nobody."""
        self.drain()
        return {name: self._room_in(name, tier.arena) for name, tier in self.tiers.items()}

    def _room_in(self, name: str, arena: Arena) -> int:
        leaving = self._flights.leaving(name)
        if arena.condemned:
            leaving -= sum(
                flight.source is not None and arena.is_condemned(flight.source.extent)
                for flight in self._flights.all_leaving(name)
            )
        return arena.available + leaving

    def wait_for_room(self) -> dict[str, int]:
        """As `room`, but first wait for kernels that are still at extents of deleted chunks."""
        self.drain(wait=True)
        return self.room()

    # -- ending -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Commit what has landed and roll back what has failed; wait for nothing."""
        while (ticket := self._transfer.next_ended(wait=False)) is not None:
            self._conclude(self._by_ticket.pop(ticket))
        self._take_back()

    def wait_for(self, chunk: int) -> None:
        """Block until the chunk's hops are over. Raises the error of one that failed."""
        self.wait_until_over(chunk)
        self.raise_errors()

    def wait_until_over(self, chunk: int) -> None:
        """Block until the chunk's hops have landed or failed. The error of one that failed is kept."""
        while (flight := self._flights.of(chunk)) is not None and flight.ticket is not None:
            self._conclude_next(chunk)

    def wait_for_all(self) -> None:
        """Block until nothing is under way. Raises the errors of moves that failed."""
        self.wait_until_all_over()
        self.raise_errors()

    def wait_until_all_over(self) -> None:
        """Block until nothing is under way. The errors of moves that failed are kept."""
        for chunk in self._flights.chunks():
            self.wait_until_over(chunk)
        self.drain(wait=True)

    def is_under_way(self, chunk: int) -> bool:
        """Whether a move of the chunk, or the place kept for it, is not over yet."""
        return self._flights.of(chunk) is not None

    def count_under_way(self) -> int:
        """How many moves have not landed, those that stand behind others among them."""
        return sum(not ticket.is_done() for ticket in self._by_ticket)

    def make(self, chunk: int) -> bool:
        """Give a chunk without bytes the extent kept for it, once whoever is leaving it has left.

        Returns False, and does nothing, for a chunk that has bytes.
        """
        flight = self._flights.of(chunk)
        if flight is None or flight.source is not None:
            return False
        while not flight.owns_destination and not flight.has_fallen:
            self._conclude_next(chunk)
        self.raise_errors()
        self._flights.land(flight)
        self.ledger.create(chunk, flight.destination)
        return True

    def raise_errors(self) -> None:
        """Raise the errors of moves that failed, each once; that of a failed write until somebody has made it good."""
        if self._errors:
            errors, self._errors = self._errors, []
            for other in errors[1:]:
                errors[0].add_note(f"also: {other}")
            raise errors[0]
        for failed in self.failed_writes.values():
            raise failed

    def unmake(self) -> None:
        """Give back the places kept for chunks that were not made after all."""
        for flight in [flight for flight in self._flights if flight.source is None]:
            self._let_fall(flight)

    def give_up(self, chunk: int, place: Resident) -> None:
        """Free the place of a chunk that is gone; later, if a kernel may be at it; never, if it was unreadable itself.

        That its disk did not answer says nothing of the place.
        """
        last_use = self.last_use.pop(chunk, None)
        self.failed_writes.pop(chunk, None)
        unread = self.unreadable.pop(chunk, None)
        if unread is not None and not isinstance(unread, SILENCE):
            self.striping[place.tier].give_up(place.extent)
            return
        if last_use is None or last_use.query():
            self.tiers[place.tier].release(place.extent)
            return
        self.tiers[place.tier].arena.drain(place.extent)
        self._draining.append((place, last_use))

    def drain(self, *, wait: bool = False) -> None:
        """Free the extents that no kernel is at any more."""
        still = []
        for place, event in self._draining:
            if wait:
                event.wait()
            if event.query():
                self.tiers[place.tier].release(place.extent)
            else:
                still.append((place, event))
        self._draining = still

    def _take_back(self) -> None:
        """Let be used again what was given up and has come back since: extents, and paths that have done it at last."""
        for flight, ticket in [(one, one.ticket) for one in self._given_up if one.ticket and one.ticket.is_let_go]:
            tier, path = self._given_up.pop(flight)
            self.tiers[flight.destination.tier].arena.pardon(flight.destination.extent)
            self.striping[tier].hear_from(path, ticket.failed_late, was_write=flight.destination.tier == tier)

    def _conclude_next(self, chunk: int) -> None:
        began, is_write = time.perf_counter(), self._stands_behind_write(chunk)
        ticket = self._transfer.next_ended(wait=True, timeout=self._timeout_seconds)
        ended = time.perf_counter()
        if is_write:
            self.write_wait_seconds += ended - began
        else:
            self.read_wait_seconds += ended - began
        if self.trace is not None:
            self.trace.add(CONTROL, f"wait for {'write' if is_write else 'read'}", began, ended, chunk=chunk)
        if ticket is None:
            raise TransferTimeoutError(
                f"{self.describe(chunk)} did not arrive, nor did anything else, within {self._timeout_seconds} s "
                f"(tiers.nvme.io.timeout)"
            )
        self._conclude(self._by_ticket.pop(ticket))

    def _stands_behind_write(self, chunk: int) -> bool:
        """Whether what holds up a chunk's next hop is a copy to a slower tier, which leaves the extent it needs."""
        flight = self._flights.in_front(chunk)
        return flight.source is None or self._rank[flight.source.tier] < self._rank[flight.destination.tier]

    def _conclude(self, flight: Flight) -> None:
        if flight.has_fallen:
            return
        assert flight.ticket is not None and flight.source is not None
        error = flight.ticket.error()
        if error is not None:
            self._fail(flight, flight.source, error)
            return
        source = self.ledger.commit_move(flight.chunk)
        self.last_use.pop(flight.chunk, None)
        if self._flights.land(flight):
            self.tiers[source.tier].release(source.extent)
        for place, is_write in ((source, False), (flight.destination, True)):
            striping = self.striping.get(place.tier)
            if striping is not None and striping.has_failed:
                striping.succeed(place.extent, is_write=is_write)
        self.unreadable.pop(flight.chunk, None)
        ticket = flight.ticket
        self.recorder.record_move(*ticket.route, ticket.nbytes, ticket.seconds)
        if self.trace is not None:
            route, began = "->".join(ticket.route), ticket.began_seconds
            args = {"chunk": flight.chunk, "bytes": ticket.nbytes}
            self.trace.add(route, f"chunk {flight.chunk}", began, began + ticket.seconds, **args)

    def _fail(self, flight: Flight, source: Resident, error: TierstoreError) -> None:
        """Undo a flight that failed, and note what that means for the chunk and for the extents it was at."""
        is_lost = isinstance(error, TransferTimeoutError)
        if is_lost:
            file = source if source.tier in self.striping else flight.destination
            self._given_up[flight] = file.tier, self.tiers[file.tier].arena.path_of(file.extent.slab)
        striping = self.striping.get(flight.destination.tier)
        if striping is not None and isinstance(error, TransferError):
            self._let_fall(flight, keep=True)
            striping.fail(flight.destination.extent, error, is_write=True)
            told = self.explain(flight.chunk, (source.tier, flight.destination.tier), error)
            failed = FailedWriteError(error.errno, getattr(told, "strerror", None) or str(told), error.filename)
            failed.__cause__ = error
            self.failed_writes[flight.chunk] = failed
            return
        self._let_fall(flight, keep=is_lost)
        if is_lost:
            self.tiers[flight.destination.tier].quarantine(flight.destination.extent)
        if isinstance(error, TransferCancelledError):
            return
        if source.tier in self.striping and isinstance(error, TransferError):
            self.striping[source.tier].fail(source.extent, error, is_write=False)
            self.unreadable[flight.chunk] = error
        self._errors.append(self.explain(flight.chunk, (source.tier, flight.destination.tier), error))

    def _let_fall(self, flight: Flight, *, keep: bool = False) -> None:
        """Undo a flight and all that counted on it; every source stays the valid copy. `keep`: not its own extent."""
        fallen = self._flights.fall(flight)
        for chunk, hops in Counter(one.chunk for one in fallen if one.source is not None).items():
            self.ledger.abort_move(chunk, hops)
        for one in fallen:
            if one.owns_destination and not (keep and one is flight):
                self.tiers[one.destination.tier].release(one.destination.extent)

    def explain(self, chunk: int, route: tuple[str, str], error: TierstoreError) -> TierstoreError:
        """Add to a transfer's error which chunk it hit and what has become of it."""
        if not isinstance(error, TransferError):
            return error
        source, destination = route
        if isinstance(error, ChecksumError):
            state = f"its only copy, in {source}, is damaged: {_WAY_ON}"
        elif source in self.striping and not isinstance(error, SILENCE):
            state = f"its only copy, in {source}, cannot be read now: {_WAY_ON}"
        else:
            state = f"nothing is lost, its copy in {source} is still the valid one"
        text = (
            f"moving {self.describe(chunk)} from {source} to {destination} failed; {state}: {error.strerror or error}"
        )
        explained = type(error)(error.errno, text, error.filename)
        explained.__cause__ = error
        return explained

    # -- the books ----------------------------------------------------------------------------------------------

    def memory(self, tier: str) -> MemoryTier:
        """The tier that a class computes in."""
        memory = self.tiers[tier]
        assert isinstance(memory, MemoryTier)  # placement never computes in a file
        return memory

    def check(self) -> None:
        """Raise InvariantError unless arenas, ledger and flights tell one consistent story."""
        holders = Counter(self.ledger.valid_places().keys())
        holders.update(flight.destination for flight in self._flights if flight.owns_destination)
        if any(count > 1 for count in holders.values()):
            raise InvariantError(f"an extent has two owners: {holders.most_common(1)[0]}")
        for name, tier in self.tiers.items():
            tier.check()
            owned = [place for place in holders if place.tier == name]
            if len(owned) != tier.arena.owned or not all(tier.arena.is_owned(place.extent) for place in owned):
                raise InvariantError(f"tier {name} counts {tier.arena.owned} owned extents, the ledger {len(owned)}")
            homes = sum(self.ledger.home(chunk) == name for chunk in self.ledger)
            if homes > max(tier.arena.lasting, tier.due):  # what is lost was somebody's home
                raise InvariantError(f"tier {name} is home to {homes} chunks but has {tier.arena.lasting} extents")
        self._check_hops()

    def _check_hops(self) -> None:
        """The hops that the ledger has begun are those under way, chunk by chunk."""
        under_way: dict[int, tuple[Resident, ...]] = {}
        for flight in self._flights:
            if flight.source is not None:
                under_way[flight.chunk] = (*under_way.get(flight.chunk, ()), flight.destination)
        for chunk in self.ledger:
            place, hops = self.ledger.where(chunk), under_way.pop(chunk, ())
            begun = place.destinations if isinstance(place, Moving) else ()
            if hops != begun:
                raise InvariantError(f"{self.describe(chunk)}: the ledger has begun {begun}, under way are {hops}")
        if under_way:
            raise InvariantError(f"chunks that are not in the ledger are under way: {under_way}")
