"""The contract of a tier: an arena, and a backing that grows and shrinks with it slab by slab.

A tier reserves and gives back; it never copies, waits or decides. Whoever calls `shrink` has emptied the slab. A tier
may lie on several paths (swap folders); a slab lies on one of them.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

from tierstore.arena import Arena, Extent
from tierstore.errors import CapacityError, InvariantError
from tierstore.stats import TierStats


class Tier(abc.ABC):
    """One place chunks can be; `paths` names the folders it lies in, none for memory."""

    def __init__(self, name: str, arena: Arena, paths: Sequence[str] = ()) -> None:
        self.name = name
        self.arena = arena
        self.paths = tuple(paths)
        self.due = 0  # extents it was given and did not give back, or that homes need; some may be lost since
        self.shunned: set[int] = set()  # paths that nothing more is written to, as they fail

    def grow(self, extents: int, *, slab_extents: int) -> None:
        """Reserve `extents` more, in slabs of at most `slab_extents`, each on the path that has the least.

        All or nothing: on an error the size is as before.
        """
        before, left = len(self.arena.slabs), extents
        try:
            while left > 0:
                count = min(left, slab_extents)
                self.grow_on(self._least_path(), count)
                left -= count
        except BaseException:
            while len(self.arena.slabs) > before:
                self.arena.condemn_last()
                self.shrink()
            raise
        self.due += max(0, extents)

    def grow_on(self, path: int, extents: int) -> None:
        """Reserve one slab of `extents` on a path."""
        self._reserve(extents * self.arena.extent_bytes, path)
        self.arena.grow(extents, path=path)

    def shrink(self) -> None:
        """Give back the last slab, which is condemned and empty."""
        self.shrink_on(self.arena.last_slab)

    def check_shrinks(self, extents: int) -> None:
        """Check that the slabs a tier must lose to be `extents` large can be given back once they are empty.

        Raises CapacityError if an extent in them is quarantined.
        """
        arena, left = self.arena, self.arena.lasting
        for slab in arena.lasting_slabs():
            left -= arena.lasting_in(slab)
            if left >= extents and arena.has_quarantined(slab):
                raise CapacityError(
                    f"tier {self.name} stays {arena.capacity} extents large instead of {extents}: something that was "
                    f"given up (tiers.nvme.io.timeout) may still write to its last slab, or it cannot all be written"
                )

    def shrink_on(self, slab: int) -> None:
        """Give back a slab that is condemned and empty. Raises InvariantError if it is not the last on its path."""
        path = self.arena.path_of(slab)
        if self.arena.last_slab_on(path) != slab:
            raise InvariantError(f"tier {self.name}: slab {slab} is not the last on path {path}, and cannot be cut off")
        self._give_back(self.arena.remove(slab) * self.arena.extent_bytes, path)

    def release(self, extent: Extent) -> None:
        """Give an extent back to the arena: nobody will touch it before it is taken again."""
        self.arena.release(extent)

    def quarantine(self, extent: Extent) -> None:
        """Use an owned extent no more, as it cannot be written or read, or something may still write to it."""
        self.arena.quarantine(extent)

    def check(self) -> None:
        """Raise InvariantError unless the tier's books tell one consistent story."""
        self.arena.check()

    def stats(self, chunks: int) -> TierStats:
        """Say how full the tier is, in bytes; the caller knows how many chunks are here or bound for here."""
        arena = self.arena
        return TierStats(
            capacity_bytes=arena.lasting * arena.extent_bytes,
            used_bytes=arena.owned * arena.extent_bytes,
            peak_bytes=arena.peak_owned * arena.extent_bytes,
            chunks=chunks,
            quarantined_bytes=arena.quarantined * arena.extent_bytes,
        )

    def _least_path(self) -> int:
        paths = [path for path in range(len(self.paths)) if path not in self.shunned]
        if self.paths and not paths:
            raise CapacityError(
                f"tier {self.name} cannot grow: nothing more is written to {', '.join(self.paths)}, which keep failing"
            )
        return min(paths, key=self.arena.reserved_on, default=0)

    @abc.abstractmethod
    def _reserve(self, nbytes: int, path: int) -> None:
        """Add `nbytes` of backing on a path, as the next slab."""

    @abc.abstractmethod
    def _give_back(self, nbytes: int, path: int) -> None:
        """Remove the backing of the last slab on a path, which had `nbytes`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""
