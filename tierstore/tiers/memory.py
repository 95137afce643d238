"""The memory tier: gpu and cpu are this one class over two devices. A slab is one tensor of the device's memory."""

from __future__ import annotations

from torch import Tensor

from tierstore.arena import Arena, Extent
from tierstore.device import Device
from tierstore.tiers.base import Tier


class MemoryTier(Tier):
    """Extents that are pieces of uint8 tensors on `device`."""

    def __init__(self, name: str, device: Device, extent_bytes: int) -> None:
        super().__init__(name, Arena(name, extent_bytes))
        self.device = device
        self._slabs: list[Tensor] = []

    def bytes_at(self, extent: Extent, nbytes: int) -> Tensor:
        """View the first `nbytes` of an extent as a uint8 tensor."""
        return self._slabs[extent.slab][extent.offset : extent.offset + nbytes]

    def release(self, extent: Extent) -> None:
        self.device.discard(self.bytes_at(extent, extent.length))
        super().release(extent)

    def close(self) -> None:
        self._slabs.clear()

    def _reserve(self, nbytes: int) -> None:
        self._slabs.append(self.device.allocate(nbytes))

    def _give_back(self, nbytes: int) -> None:
        del self._slabs[-1]
