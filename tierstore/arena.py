"""Owns which extents of one tier are free. Knows nothing of chunks, bytes or devices.

Every extent is free, owned, draining or quarantined, exactly once. All extents of an arena are equally long, so any
free one serves any chunk and no history can fragment it. The arena grows and shrinks by whole slabs: the last slab is
condemned first (nothing is taken from it any more), and removed once its extents have come back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from tierstore.errors import CapacityError, InvariantError


@dataclass(frozen=True, slots=True)
class Extent:
    """One piece of an arena: `length` bytes from `offset` on in slab number `slab`."""

    slab: int
    offset: int
    length: int


class Arena:
    """The extents of one tier.

    `spread=False` takes the lowest slab's extents first, so that the last slab empties by itself; `spread=True` takes
    turns between the slabs, which stripes chunks over the swap paths behind them. Extents that were never taken cost
    nothing but the first of each slab: a tier may be far larger than what is in it.
    """

    def __init__(self, tier: str, extent_bytes: int, *, spread: bool = False) -> None:
        self.tier = tier
        self.extent_bytes = extent_bytes
        self._spread = spread
        self._slabs: list[int] = []  # number of extents in each slab
        self._made: list[int] = []  # how many of them were made; the last one made is free as long as there are more
        self._free: list[tuple[int, int, Extent]] = []  # heap: what may be taken
        self._idle: dict[int, list[Extent]] = {}  # free extents of condemned slabs
        self._owned: set[Extent] = set()
        self._draining: set[Extent] = set()
        self._quarantined: set[Extent] = set()
        self.peak_owned = 0

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def slabs(self) -> tuple[int, ...]:
        """Extents in each slab, by slab number."""
        return tuple(self._slabs)

    @property
    def capacity(self) -> int:
        """Extents in all, condemned ones included."""
        return sum(self._slabs)

    @property
    def available(self) -> int:
        """Extents that `take` can still give out."""
        return len(self._free) + self._unmade(len(self._slabs) - len(self._idle))

    @property
    def free(self) -> int:
        """Extents nobody uses, those of condemned slabs included."""
        return len(self._free) + sum(map(len, self._idle.values())) + self._unmade(len(self._slabs))

    @property
    def owned(self) -> int:
        """Extents that hold, receive or are promised a chunk."""
        return len(self._owned)

    @property
    def draining(self) -> int:
        """Extents given up by their chunk that a copy or a kernel may still touch."""
        return len(self._draining)

    @property
    def quarantined(self) -> int:
        """Extents that a timed-out request may still touch; never used again."""
        return len(self._quarantined)

    def grow(self, extents: int) -> int:
        """Add a slab of `extents` extents and return its number."""
        slab = len(self._slabs)
        self._slabs.append(extents)
        self._made.append(0)
        if extents:
            self._make_next(slab)
        return slab

    def condemn_last(self) -> frozenset[Extent]:
        """Take nothing more from the last slab not yet condemned; return its extents that are still in use."""
        slab = len(self._slabs) - len(self._idle) - 1
        self._idle[slab] = [extent for _, _, extent in self._free if extent.slab == slab]
        self._free = [entry for entry in self._free if entry[2].slab != slab]
        heapq.heapify(self._free)
        return frozenset(extent for extent in self._owned | self._draining | self._quarantined if extent.slab == slab)

    def reprieve(self) -> None:
        """Make all condemned slabs ordinary again."""
        idle, self._idle = self._idle, {}
        for extents in idle.values():
            for extent in extents:
                self._make_free(extent)

    def remove_last(self) -> int:
        """Remove the last slab, which must be condemned and unused; return how many extents it had."""
        slab = len(self._slabs) - 1
        if slab not in self._idle or len(self._idle[slab]) != self._made[slab]:
            raise InvariantError(f"slab {slab} of tier {self.tier} cannot be removed: some of its extents are in use")
        del self._idle[slab], self._made[slab]
        return self._slabs.pop()

    # -- extents ------------------------------------------------------------------------------------------------

    def take(self) -> Extent:
        """Own a free extent. Raises CapacityError when there is none."""
        if not self._free:
            raise CapacityError(
                f"tier {self.tier}: all {self.capacity} extents of {self.extent_bytes} bytes are in use; "
                f"raise tiers.{self.tier}.capacity"
            )
        extent = heapq.heappop(self._free)[2]
        is_last_made = extent.offset == (self._made[extent.slab] - 1) * self.extent_bytes
        if is_last_made and self._made[extent.slab] < self._slabs[extent.slab]:
            self._make_next(extent.slab)
        self._owned.add(extent)
        self.peak_owned = max(self.peak_owned, len(self._owned))
        return extent

    def release(self, extent: Extent) -> None:
        """Give back an extent that is owned or draining."""
        owners = self._owned if extent in self._owned else self._draining
        self._leave(owners, extent)
        if extent.slab in self._idle:
            self._idle[extent.slab].append(extent)
        else:
            self._make_free(extent)

    def drain(self, extent: Extent) -> None:
        """Give up an owned extent that may still be touched; `release` follows when it no longer can be."""
        self._leave(self._owned, extent)
        self._draining.add(extent)

    def quarantine(self, extent: Extent) -> None:
        """Never use an owned extent again."""
        self._leave(self._owned, extent)
        self._quarantined.add(extent)

    def check(self) -> None:
        """Raise InvariantError unless every extent is in exactly one state."""
        free = [entry[2] for entry in self._free] + [extent for idle in self._idle.values() for extent in idle]
        everywhere = [*free, *self._owned, *self._draining, *self._quarantined]
        if len(set(everywhere)) != len(everywhere) or len(everywhere) != sum(self._made):
            raise InvariantError(
                f"tier {self.tier}: owned {self.owned} + draining {self.draining} + free {self.free} + quarantined "
                f"{self.quarantined} is not its capacity of {self.capacity} extents, each once"
            )

    def is_owned(self, extent: Extent) -> bool:
        """Whether the extent holds, receives or is promised a chunk."""
        return extent in self._owned

    def _unmade(self, slabs: int) -> int:
        """Extents of the first so many slabs that were not made yet."""
        return sum(self._slabs[:slabs]) - sum(self._made[:slabs])

    def _make_next(self, slab: int) -> None:
        self._make_free(Extent(slab, self._made[slab] * self.extent_bytes, self.extent_bytes))
        self._made[slab] += 1

    def _make_free(self, extent: Extent) -> None:
        position = extent.offset // self.extent_bytes
        rank = (position, extent.slab) if self._spread else (extent.slab, position)
        heapq.heappush(self._free, (*rank, extent))

    def _leave(self, owners: set[Extent], extent: Extent) -> None:
        if extent not in owners:
            raise InvariantError(f"tier {self.tier}: {extent} is not in use, so it cannot be given up")
        owners.remove(extent)
