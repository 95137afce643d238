"""Keeps the books of moves under way: who promised which extent to whom, and what falls with a move that failed.

A flight is one hop of one chunk. Its destination is a free extent, or one promised by another flight that is still
leaving it. When a flight lands its source extent goes to whoever it was promised to, else back to the arena; when it
fails, the chunk's later hops fall with it, and every flight that counted on an extent it was to leave falls too, none
of which has begun. Pure book-keeping: the store submits, waits and commits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.residency import Resident
from tierstore.transfer import Ticket


@dataclass(eq=False, slots=True)
class Flight:
    """One hop of one chunk, or (without a source) the place kept for a chunk that is still to be made."""

    chunk: int
    source: Resident | None
    destination: Resident
    claims: Flight | None = None  # the flight that is leaving the destination
    claimed_by: Flight | None = None  # the flight that the source was promised to
    ticket: Ticket | None = None
    has_landed: bool = False
    has_fallen: bool = False

    @property
    def owns_destination(self) -> bool:
        """Whether its destination is its own already, not still that of the flight leaving it."""
        return self.claims is None or self.claims.has_landed


class Flights:
    """All moves under way, by chunk and by the tier they leave."""

    def __init__(self, tiers: Iterator[str]) -> None:
        self._of: dict[int, deque[Flight]] = {}
        self._leaving: dict[str, dict[Flight, None]] = {tier: {} for tier in tiers}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Flight]:
        return (flight for flights in self._of.values() for flight in flights)

    def of(self, chunk: int) -> Flight | None:
        """The chunk's last hop under way."""
        flights = self._of.get(chunk)
        return flights[-1] if flights else None

    def in_front(self, chunk: int) -> Flight:
        """The flight whose copy is running and which the chunk's next hop stands behind; that hop if it is none.

        A hop stands behind the chunk's earlier one, and behind the flight that is leaving the extent it goes to.
        """
        flight = self._of[chunk][0]
        while (before := self._before(flight)) is not None:
            flight = before
        return flight

    def _before(self, flight: Flight) -> Flight | None:
        first = self._of[flight.chunk][0]
        for before in (None if first is flight else first, flight.claims):
            if before is not None and before.ticket is not None and not before.ticket.is_done():
                return before
        return None

    def join(self, tier: str) -> None:
        """Know of one tier more."""
        self._leaving[tier] = {}

    def chunks(self) -> list[int]:
        """The chunks that are under way or have a place kept."""
        return list(self._of)

    def leaving(self, tier: str) -> int:
        """How many extents of a tier are being left and promised to nobody."""
        return len(self._leaving[tier])

    def next_leaving(self, tier: str, towards: str | None = None) -> Flight | None:
        """The flight that has been leaving an unpromised extent of the tier for longest.

        One that goes to the tier `towards` comes before all others. Whoever comes from there then stands behind copies
        over one link only: chunks that change places between device and host memory do not wait for a disk.
        """
        leaving = self._leaving[tier]
        same_link = (flight for flight in leaving if flight.destination.tier == towards)
        return next(same_link, None) or next(iter(leaving), None)

    def all_leaving(self, tier: str) -> Iterator[Flight]:
        """The flights that are leaving unpromised extents of the tier, the longest under way first."""
        return iter(self._leaving[tier])

    def add(self, flight: Flight) -> None:
        """Enter a flight; if it claims another's source, that is promised from now on."""
        self._of.setdefault(flight.chunk, deque()).append(flight)
        if flight.claims is not None and not flight.claims.has_landed:
            flight.claims.claimed_by = flight
            assert flight.claims.source is not None
            self._leaving[flight.claims.source.tier].pop(flight.claims, None)
        if flight.source is not None:
            self._leaving[flight.source.tier][flight] = None

    def land(self, flight: Flight) -> bool:
        """Strike out a flight that landed. True: its source extent is promised to nobody and free now."""
        flight.has_landed = True
        if flight.claimed_by is not None:
            flight.claimed_by.claims = None  # it owns its destination now; else each flight would keep all before it
        self._strike(flight)
        return flight.claimed_by is None

    def fall(self, flight: Flight) -> list[Flight]:
        """Strike out a flight, its chunk's later hops and all that counted on their extents; return them all."""
        fallen: list[Flight] = []
        waiting = [flight]
        while waiting:
            first = waiting.pop()
            if first.has_fallen or first.has_landed:
                continue
            hops = self._of[first.chunk]
            for hop in list(hops)[hops.index(first) :]:
                if hop.has_fallen:
                    continue
                hop.has_fallen = True
                fallen.append(hop)
                if hop.claimed_by is not None:
                    waiting.append(hop.claimed_by)
        for hop in fallen:
            self._strike(hop)
            if hop.claims is not None and not hop.claims.has_landed and not hop.claims.has_fallen:
                hop.claims.claimed_by = None
                assert hop.claims.source is not None
                self._leaving[hop.claims.source.tier][hop.claims] = None
        return fallen

    def _strike(self, flight: Flight) -> None:
        hops = self._of[flight.chunk]
        hops.remove(flight)
        if not hops:
            del self._of[flight.chunk]
        if flight.source is not None:
            self._leaving[flight.source.tier].pop(flight, None)
