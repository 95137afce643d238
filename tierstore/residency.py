"""The one ledger of where each chunk is, who leases it, and where its home is. Pure: it moves and waits for nothing.

A chunk is `Fresh` (no bytes yet), `Resident` in one extent, or `Moving` along hops whose first place holds the only
valid copy. A hop is begun before its copy starts and committed after the bytes have landed; until then giving up costs
nothing but the destinations. A leased chunk neither moves nor goes away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.arena import Extent
from tierstore.errors import InvariantError, LeaseError


@dataclass(frozen=True, slots=True)
class Resident:
    """The only valid copy is in this extent of this tier."""

    tier: str
    extent: Extent


@dataclass(frozen=True, slots=True)
class Moving:
    """The only valid copy is in `source`; `destinations` are the hops begun, in order."""

    source: Resident
    destinations: tuple[Resident, ...]

    @property
    def destination(self) -> Resident:
        """Where the chunk will be when all its hops are committed."""
        return self.destinations[-1]


@dataclass(frozen=True, slots=True)
class Fresh:
    """The chunk has no bytes yet: its state is still to be made."""


Residency = Fresh | Resident | Moving
FRESH = Fresh()


class Ledger:
    """Residency, home and leases of every chunk, by chunk number."""

    def __init__(self) -> None:
        self._where: dict[int, Residency] = {}
        self._home: dict[int, str] = {}
        self._leases: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._where

    def add(self, chunk: int, home: str) -> None:
        """Enter a fresh chunk whose home is `home`."""
        if chunk in self._where:
            raise InvariantError(f"chunk {chunk} is in the ledger already")
        self._where[chunk] = FRESH
        self._home[chunk] = home

    def remove(self, chunk: int) -> Fresh | Resident:
        """Strike out a chunk that is neither leased nor moving; return where it was."""
        place = self._settled(chunk, "be deleted")
        del self._where[chunk], self._home[chunk]
        return place

    def where(self, chunk: int) -> Residency:
        """Where the chunk's only valid copy is now."""
        return self._where[chunk]

    def home(self, chunk: int) -> str:
        """The tier that has room reserved for the chunk between steps."""
        return self._home[chunk]

    def set_home(self, chunk: int, tier: str) -> None:
        """Change a chunk's home; it moves there at a later eviction."""
        self._home[chunk] = tier

    def bound_for(self, chunk: int) -> str | None:
        """The tier the chunk is in, or will be in when its hops are done; None while it is fresh."""
        place = self._where[chunk]
        if isinstance(place, Fresh):
            return None
        return place.destination.tier if isinstance(place, Moving) else place.tier

    def create(self, chunk: int, place: Resident) -> None:
        """Give a fresh chunk its first extent."""
        if not isinstance(self._where[chunk], Fresh):
            raise InvariantError(f"chunk {chunk} has bytes already, at {self._where[chunk]}")
        self._where[chunk] = place

    def begin_move(self, chunk: int, destination: Resident) -> Resident:
        """Begin a hop to `destination`; return the place it starts from."""
        if self.is_leased(chunk):
            raise LeaseError(f"chunk {chunk} is leased and cannot move to {destination.tier}")
        match self._where[chunk]:
            case Resident() as source:
                self._where[chunk] = Moving(source, (destination,))
                return source
            case Moving(source, hops):
                self._where[chunk] = Moving(source, (*hops, destination))
                return hops[-1]
            case _:
                raise InvariantError(f"chunk {chunk} is fresh: there is nothing to move")

    def commit_move(self, chunk: int) -> Resident:
        """The first hop's bytes have landed: make its destination the valid copy, return the place given up."""
        place = self._moving(chunk)
        first, *rest = place.destinations
        self._where[chunk] = Moving(first, tuple(rest)) if rest else first
        return place.source

    def abort_move(self, chunk: int, hops: int) -> tuple[Resident, ...]:
        """Give up the last `hops` hops of a chunk; its source stays valid. Return the destinations given up."""
        place = self._moving(chunk)
        kept, given_up = place.destinations[:-hops], place.destinations[-hops:]
        self._where[chunk] = Moving(place.source, kept) if kept else place.source
        return given_up

    def lease(self, chunk: int) -> Resident:
        """Hold a chunk where it is until `release`. It must have landed."""
        place = self._where[chunk]
        if not isinstance(place, Resident):
            raise LeaseError(f"chunk {chunk} cannot be leased: it is {place}")
        self._leases[chunk] = self._leases.get(chunk, 0) + 1
        return place

    def release(self, chunk: int) -> None:
        """End one lease."""
        if not self.is_leased(chunk):
            raise LeaseError(f"chunk {chunk} is not leased")
        self._leases[chunk] -= 1
        if not self._leases[chunk]:
            del self._leases[chunk]

    def is_leased(self, chunk: int) -> bool:
        """Whether anybody holds the chunk where it is."""
        return chunk in self._leases

    def places(self) -> Iterator[tuple[int, Resident]]:
        """Every place that some chunk holds or is moving to, with the chunk; promised extents come up twice."""
        for chunk, place in self._where.items():
            if isinstance(place, Resident):
                yield chunk, place
            elif isinstance(place, Moving):
                yield chunk, place.source
                for destination in place.destinations:
                    yield chunk, destination

    def valid_places(self) -> dict[Resident, int]:
        """The place of each chunk's only valid copy. Raises InvariantError if two chunks claim one."""
        valid: dict[Resident, int] = {}
        for chunk, place in self._where.items():
            if isinstance(place, Fresh):
                continue
            source = place.source if isinstance(place, Moving) else place
            if source in valid:
                raise InvariantError(f"chunks {valid[source]} and {chunk} both claim {source}")
            valid[source] = chunk
        return valid

    def _moving(self, chunk: int) -> Moving:
        place = self._where[chunk]
        if not isinstance(place, Moving):
            raise InvariantError(f"chunk {chunk} is not moving: it is {place}")
        return place

    def _settled(self, chunk: int, purpose: str) -> Fresh | Resident:
        place = self._where[chunk]
        if isinstance(place, Moving) or self.is_leased(chunk):
            raise LeaseError(f"chunk {chunk} cannot {purpose}: it is {'leased' if self.is_leased(chunk) else 'moving'}")
        return place
