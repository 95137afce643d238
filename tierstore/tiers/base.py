"""The contract of a tier: an arena, and a backing that grows and shrinks with it slab by slab.

A tier reserves and gives back; it never copies, waits or decides. Whoever calls `shrink` has emptied the last slab.
"""

from __future__ import annotations

import abc

from tierstore.arena import Arena, Extent
from tierstore.stats import TierStats


class Tier(abc.ABC):
    """One place chunks can be."""

    def __init__(self, name: str, arena: Arena) -> None:
        self.name = name
        self.arena = arena

    def grow(self, extents: int, *, slab_extents: int) -> None:
        """Reserve `extents` more, in slabs of at most `slab_extents`.

        All or nothing: on an error the size is as before.
        """
        before = len(self.arena.slabs)
        try:
            while extents > 0:
                count = min(extents, slab_extents)
                self._reserve(count * self.arena.extent_bytes)
                self.arena.grow(count)
                extents -= count
        except BaseException:
            while len(self.arena.slabs) > before:
                self.arena.condemn_last()
                self.shrink()
            raise

    def shrink(self) -> None:
        """Give back the last slab, which is condemned and empty."""
        self._give_back(self.arena.remove_last() * self.arena.extent_bytes)

    def release(self, extent: Extent) -> None:
        """Give an extent back to the arena: nobody will touch it before it is taken again."""
        self.arena.release(extent)

    def stats(self, chunks: int) -> TierStats:
        """Say how full the tier is, in bytes; the caller knows how many chunks are here or bound for here."""
        arena = self.arena
        return TierStats(
            capacity_bytes=arena.capacity * arena.extent_bytes,
            used_bytes=arena.owned * arena.extent_bytes,
            peak_bytes=arena.peak_owned * arena.extent_bytes,
            chunks=chunks,
        )

    @abc.abstractmethod
    def _reserve(self, nbytes: int) -> None:
        """Add `nbytes` of backing as the next slab."""

    @abc.abstractmethod
    def _give_back(self, nbytes: int) -> None:
        """Remove the backing of the last slab, which had `nbytes`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
