"""The file tier: reserved swap files, one per path; each slab is the next range of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.arena import Arena, Extent
from tierstore.errors import InvariantError
from tierstore.io.requests import Sums
from tierstore.swapfile import SwapFile
from tierstore.tiers.base import Tier


class FileTier(Tier):
    """Extents that are ranges of swap files; with `checksum`, the tier remembers what was written to each."""

    def __init__(self, name: str, files: Sequence[SwapFile], extent_bytes: int, *, checksum: bool = False) -> None:
        super().__init__(name, Arena(name, extent_bytes), [str(file.folder) for file in files])
        self._sums: dict[Extent, Sums] | None = {} if checksum else None
        self.files = tuple(files)
        self._slabs: dict[int, tuple[SwapFile, int]] = {}  # file and offset of each slab; workers read it too

    def range_at(self, extent: Extent) -> tuple[SwapFile, int]:
        """The file an extent lies in, and the byte it begins at."""
        file, offset = self._slabs[extent.slab]
        return file, offset + extent.offset

    @property
    def keeps_sums(self) -> bool:
        """Whether it remembers checksums of what was written."""
        return self._sums is not None

    def begin_sums(self, extent: Extent) -> Sums | None:
        """Where a write is to note what it writes to an extent; None without checksums."""
        if self._sums is None:
            return None
        sums = self._sums[extent] = {}
        return sums

    def sums_of(self, extent: Extent) -> Sums | None:
        """What the last write to an extent noted; None without checksums, or a write."""
        return None if self._sums is None else self._sums.get(extent)

    def release(self, extent: Extent) -> None:
        self._forget_sums(extent)
        super().release(extent)

    def quarantine(self, extent: Extent) -> None:
        self._forget_sums(extent)
        super().quarantine(extent)

    def check(self) -> None:
        super().check()
        nobodys = [extent for extent in list(self._sums or ()) if not self.arena.is_owned(extent)]
        if nobodys:
            raise InvariantError(f"tier {self.name} has checksums of {nobodys[0]}, which no chunk is in")

    def close(self) -> None:
        for file in self.files:
            file.close()

    @staticmethod
    def dealt(extents: int, slab_extents: int, files: int) -> list[int]:
        """How many of the first `extents` each of so many files gets, in slabs of at most `slab_extents`."""
        shares = [0] * files
        for first in range(0, extents, slab_extents):
            shares[shares.index(min(shares))] += min(slab_extents, extents - first)
        return shares

    def _forget_sums(self, extent: Extent) -> None:
        if self._sums is not None:
            self._sums.pop(extent, None)

    def _reserve(self, nbytes: int, path: int) -> None:
        file = self.files[path]
        self._slabs[self.arena.next_slab] = file, file.grow(nbytes)

    def _give_back(self, nbytes: int, path: int) -> None:
        self.files[path].shrink(nbytes)
