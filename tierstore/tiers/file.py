"""The file tier: reserved swap files, one per path, with the slabs dealt out to the paths in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tierstore.arena import Arena, Extent
from tierstore.swapfile import SwapFile
from tierstore.tiers.base import Tier


class FileTier(Tier):
    """Extents that are ranges of swap files."""

    def __init__(self, name: str, files: Sequence[SwapFile], extent_bytes: int) -> None:
        super().__init__(name, Arena(name, extent_bytes, spread=True))
        self.files = tuple(files)
        self._slabs: list[tuple[SwapFile, int]] = []  # file and offset of each slab

    def range_at(self, extent: Extent) -> tuple[SwapFile, int]:
        """The file an extent lies in, and the byte it begins at."""
        file, offset = self._slabs[extent.slab]
        return file, offset + extent.offset

    def close(self) -> None:
        for file in self.files:
            file.close()

    @staticmethod
    def dealt(extents: int, slab_extents: int, files: int) -> list[int]:
        """How many of `extents` new extents each of so many files gets, in slabs of at most `slab_extents`."""
        shares = Counter[int]()
        for slab, first in enumerate(range(0, extents, slab_extents)):
            shares[slab % files] += min(slab_extents, extents - first)
        return [shares[file] for file in range(files)]

    def _reserve(self, nbytes: int) -> None:
        file = self.files[len(self._slabs) % len(self.files)]
        self._slabs.append((file, file.grow(nbytes)))

    def _give_back(self, nbytes: int) -> None:
        file, _ = self._slabs.pop()
        file.shrink(nbytes)
