"""Owns which extents of one tier are free. Knows nothing of chunks, bytes or devices.

Every extent is free, owned, draining or quarantined, exactly once. All extents of an arena are equally long, so any
free one serves any chunk and no history can fragment it. The arena grows and shrinks by whole slabs, each of which lies
on one path (a swap folder, by number; memory has only path 0). A slab is condemned first (nothing is taken from it any
more), and removed once its extents have come back.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from tierstore.errors import CapacityError, InvariantError


class Extent(NamedTuple):
    """One piece of an arena: `length` bytes from `offset` on in slab number `slab`.

    A tuple, as every move looks extents up several times, and a dataclass would compute its hash in Python.
    """

    slab: int
    offset: int
    length: int


@dataclass(slots=True)
class _Slab:
    extents: int
    path: int
    made: int = 0  # how many of them were made; the last one made is free as long as there are more

    @property
    def unmade(self) -> int:
        return self.extents - self.made


class Arena:
    """The extents of one tier.

    Of a path the lowest slab's extents are taken first, so that the last slab empties by itself. Extents that were
    never taken cost nothing but the first of each slab: a tier may be far larger than what is in it.
    """

    def __init__(self, tier: str, extent_bytes: int) -> None:
        self.tier = tier
        self.extent_bytes = extent_bytes
        self._slabs: dict[int, _Slab] = {}  # by number; numbers only grow from one slab to the next
        self._free: dict[int, list[tuple[int, int, Extent]]] = {}  # heaps by path: what may be taken
        self._idle: dict[int, list[Extent]] = {}  # free extents of condemned slabs
        self._owned: set[Extent] = set()
        self._draining: set[Extent] = set()
        self._quarantined: set[Extent] = set()
        self.peak_owned = 0

    # -- size ---------------------------------------------------------------------------------------------------

    @property
    def slabs(self) -> tuple[int, ...]:
        """Extents in each slab, the oldest first."""
        return tuple(slab.extents for slab in self._slabs.values())

    @property
    def last_slab(self) -> int:
        """The number of the newest slab."""
        return next(reversed(self._slabs))

    @property
    def next_slab(self) -> int:
        """The number that the next slab will have."""
        return self.last_slab + 1 if self._slabs else 0

    @property
    def capacity(self) -> int:
        """Extents in all, condemned ones included."""
        return sum(slab.extents for slab in self._slabs.values())

    @property
    def lasting(self) -> int:
        """Extents of slabs that are not condemned, without those in quarantine."""
        lost = sum(self._is_open(extent.slab) for extent in self._quarantined)
        return self.capacity - self.condemned - lost

    @property
    def untouched(self) -> int:
        """Extents that nobody has ever taken."""
        return sum(slab.unmade for slab in self._slabs.values())

    @property
    def condemned(self) -> int:
        """Extents of condemned slabs."""
        return sum(self._slabs[number].extents for number in self._idle)

    @property
    def available(self) -> int:
        """Extents that `take` can still give out."""
        unmade = sum(slab.unmade for number, slab in self._slabs.items() if self._is_open(number))
        return sum(map(len, self._free.values())) + unmade

    @property
    def free(self) -> int:
        """Extents nobody uses, those of condemned slabs included."""
        return self.available + sum(len(idle) + self._slabs[number].unmade for number, idle in self._idle.items())

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
        """Extents that cannot be written or read, or that a request that was given up may still write to."""
        return len(self._quarantined)

    def has_room(self, path: int) -> bool:
        """Whether `take` can still give out an extent of this path."""
        return bool(self._free.get(path))

    def slabs_on(self, path: int) -> tuple[int, ...]:
        """The numbers of a path's slabs that are not condemned, the oldest first."""
        return tuple(number for number, slab in self._slabs.items() if slab.path == path and self._is_open(number))

    def slabs_of(self, path: int) -> tuple[int, ...]:
        """The numbers of all slabs of a path, the oldest first."""
        return tuple(number for number, slab in self._slabs.items() if slab.path == path)

    def last_slab_on(self, path: int) -> int:
        """The number of the newest slab on a path that has one."""
        return next(number for number, slab in reversed(self._slabs.items()) if slab.path == path)

    def last_lasting(self) -> int | None:
        """The number of the newest slab that is not condemned; None without one."""
        return next((number for number in reversed(self._slabs) if self._is_open(number)), None)

    def lasting_slabs(self) -> tuple[int, ...]:
        """The numbers of the slabs that are not condemned, the newest first."""
        return tuple(number for number in reversed(self._slabs) if self._is_open(number))

    def lasting_in(self, slab: int) -> int:
        """Extents of a slab, without those in quarantine."""
        return self._slabs[slab].extents - sum(extent.slab == slab for extent in self._quarantined)

    def has_slab(self, slab: int) -> bool:
        """Whether there is a slab of this number."""
        return slab in self._slabs

    def extents_of(self, slab: int) -> int:
        """How many extents a slab has."""
        return self._slabs[slab].extents

    def path_of(self, slab: int) -> int:
        """The path that a slab lies on."""
        return self._slabs[slab].path

    def reserved_on(self, path: int) -> int:
        """Extents of a path, those of condemned slabs left out."""
        return sum(map(self.extents_of, self.slabs_on(path)))

    def extents_owned_on(self, path: int) -> frozenset[Extent]:
        """The extents of a path that hold, receive or are promised a chunk."""
        return frozenset(extent for extent in self._owned if self.path_of(extent.slab) == path)

    def owned_on(self, path: int) -> int:
        """How many extents of a path are owned."""
        return len(self.extents_owned_on(path))

    def grow(self, extents: int, *, path: int = 0) -> int:
        """Add a slab of `extents` extents on a path and return its number."""
        number = self.next_slab
        self._slabs[number] = _Slab(extents, path)
        self._free.setdefault(path, [])
        if extents:
            self._make_next(number)
        return number

    def condemn(self, slab: int) -> frozenset[Extent]:
        """Take nothing more from a slab; return its extents that are still in use."""
        heap = self._free[self._slabs[slab].path]
        self._idle[slab] = [extent for _, _, extent in heap if extent.slab == slab]
        heap[:] = [entry for entry in heap if entry[2].slab != slab]
        heapq.heapify(heap)
        return self.in_use(slab)

    def condemn_last(self) -> frozenset[Extent]:
        """Take nothing more from the last slab not yet condemned; return its extents that are still in use."""
        return self.condemn(next(number for number in reversed(self._slabs) if self._is_open(number)))

    def in_use(self, slab: int) -> frozenset[Extent]:
        """The extents of a slab that are not free."""
        return frozenset(extent for extent in self._owned | self._draining | self._quarantined if extent.slab == slab)

    def has_quarantined(self, slab: int) -> bool:
        """Whether an extent of a slab is in quarantine, so that the slab cannot be given back."""
        return any(extent.slab == slab for extent in self._quarantined)

    def is_condemned(self, extent: Extent) -> bool:
        """Whether the extent, once it is free, will not be taken any more."""
        return extent.slab in self._idle

    def reprieve(self, slab: int | None = None) -> None:
        """Make a condemned slab ordinary again, or all of them."""
        for number in list(self._idle) if slab is None else [slab]:
            for extent in self._idle.pop(number):
                self._make_free(extent)

    def remove(self, slab: int) -> int:
        """Remove a slab, which must be condemned and unused; return how many extents it had."""
        if slab not in self._idle or len(self._idle[slab]) != self._slabs[slab].made:
            raise InvariantError(f"slab {slab} of tier {self.tier} cannot be removed: some of its extents are in use")
        del self._idle[slab]
        return self._slabs.pop(slab).extents

    # -- extents ------------------------------------------------------------------------------------------------

    def take(self, path: int | None = None) -> Extent:
        """Own a free extent of a path, or of any. Raises CapacityError when there is none."""
        if path is None:
            path = next((path for path, heap in self._free.items() if heap), 0)
        if not self._free.get(path):
            raise CapacityError(
                f"tier {self.tier}: all {self.capacity} extents of {self.extent_bytes} bytes are in use; "
                f"raise tiers.{self.tier}.capacity"
            )
        extent = heapq.heappop(self._free[path])[2]
        slab = self._slabs[extent.slab]
        is_last_made = extent.offset == (slab.made - 1) * self.extent_bytes
        if is_last_made and slab.unmade:
            self._make_next(extent.slab)
        self._owned.add(extent)
        self.peak_owned = max(self.peak_owned, len(self._owned))
        return extent

    def release(self, extent: Extent) -> None:
        """Give back an extent that is owned or draining."""
        owners = self._owned if extent in self._owned else self._draining
        self._leave(owners, extent)
        self._put_back(extent)

    def drain(self, extent: Extent) -> None:
        """Give up an owned extent that may still be touched; `release` follows when it no longer can be."""
        self._leave(self._owned, extent)
        self._draining.add(extent)

    def quarantine(self, extent: Extent) -> None:
        """Use an owned extent no more: it cannot be written, or, until `pardon`, what was given up may write to it."""
        self._leave(self._owned, extent)
        self._quarantined.add(extent)

    def pardon(self, extent: Extent) -> None:
        """Let a quarantined extent be used again: it was not its own fault, and nobody is at it."""
        self._leave(self._quarantined, extent)
        self._put_back(extent)

    def check(self) -> None:
        """Raise InvariantError unless every extent is in exactly one state."""
        free = [entry[2] for heap in self._free.values() for entry in heap]
        free += [extent for idle in self._idle.values() for extent in idle]
        everywhere = [*free, *self._owned, *self._draining, *self._quarantined]
        made = sum(slab.made for slab in self._slabs.values())
        if len(set(everywhere)) != len(everywhere) or len(everywhere) != made:
            raise InvariantError(
                f"tier {self.tier}: owned {self.owned} + draining {self.draining} + free {self.free} + quarantined "
                f"{self.quarantined} is not its capacity of {self.capacity} extents, each once"
            )

    def is_owned(self, extent: Extent) -> bool:
        """Whether the extent holds, receives or is promised a chunk."""
        return extent in self._owned

    def _is_open(self, slab: int) -> bool:
        return slab not in self._idle

    def _put_back(self, extent: Extent) -> None:
        if extent.slab in self._idle:
            self._idle[extent.slab].append(extent)
        else:
            self._make_free(extent)

    def _make_next(self, slab: int) -> None:
        made = self._slabs[slab].made
        self._make_free(Extent(slab, made * self.extent_bytes, self.extent_bytes))
        self._slabs[slab].made += 1

    def _make_free(self, extent: Extent) -> None:
        heapq.heappush(self._free[self._slabs[extent.slab].path], (extent.slab, extent.offset, extent))

    def _leave(self, owners: set[Extent], extent: Extent) -> None:
        if extent not in owners:
            raise InvariantError(f"tier {self.tier}: {extent} is not in use, so it cannot be given up")
        owners.remove(extent)
