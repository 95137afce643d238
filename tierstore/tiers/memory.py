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
        self._views: dict[tuple[int, int, int], Tensor] = {}  # made once: a view costs more than to look it up
        self._memory: dict[tuple[int, int, int], memoryview] = {}

    def bytes_at(self, extent: Extent, nbytes: int) -> Tensor:
        """View the first `nbytes` of an extent as a uint8 tensor, the same one each time."""
        key = extent.slab, extent.offset, nbytes
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._slabs[extent.slab].narrow(0, extent.offset, nbytes)
        return view

    def memory_at(self, extent: Extent, nbytes: int) -> memoryview:
        """The first `nbytes` of an extent of host memory as what engines read into and write from, made once too."""
        key = extent.slab, extent.offset, nbytes
        memory = self._memory.get(key)
        if memory is None:
            memory = self._memory[key] = self.bytes_at(extent, nbytes).numpy().data
        return memory

    def ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of each slab."""
        return [(slab.data_ptr(), slab.numel()) for slab in self._slabs]

    def release(self, extent: Extent) -> None:
        self.device.discard(self.bytes_at(extent, extent.length))
        super().release(extent)

    def close(self) -> None:
        self._views.clear()
        self._memory.clear()
        self._slabs.clear()

    def _reserve(self, nbytes: int, path: int) -> None:
        self._slabs.append(self.device.allocate(nbytes))

    def _give_back(self, nbytes: int, path: int) -> None:
        last = len(self._slabs) - 1
        self._views = {key: view for key, view in self._views.items() if key[0] < last}
        self._memory = {key: memory for key, memory in self._memory.items() if key[0] < last}
        del self._slabs[-1]
