"""Buffers for what is computed tile by tile: made when first needed, used again by the next tile, valid until then."""

from __future__ import annotations

import torch
from torch import Tensor

from tierstore.layout import round_up

GRAIN_ELEMENTS = 256 * 1024
"""Elements worked on at once on the CPU; buffers hold a multiple of them."""
VIEWS_KEPT = 64
"""Views of buffers that are kept to be used again: making one costs as much as an operation on a thousand elements."""


class Scratch:
    """Buffers for one tile at a time. A purpose has one buffer on a device, whatever dtype it is viewed as."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._views: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}
        self._others: list[Scratch] = []

    def of_threads(self, count: int) -> list[Scratch]:
        """This one and as many more as threads need that work on a tile each; kept."""
        self._others += [Scratch() for _ in range(count - 1 - len(self._others))]
        return [self, *self._others[: count - 1]]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers there are."""
        return sum(buffer.numel() for buffer in self._buffers.values()) + sum(other.nbytes for other in self._others)

    def get(self, purpose: str, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
        """View the first `length` elements of the buffer for a purpose, whatever is in them."""
        view = self._views.get((purpose, dtype, device, length))
        if view is None:
            buffer, nbytes = self._buffers.get((purpose, device)), length * dtype.itemsize
            if buffer is None or buffer.numel() < nbytes:
                nbytes = round_up(length, GRAIN_ELEMENTS) * dtype.itemsize
                buffer = self._buffers[purpose, device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                self._views.clear()  # of the buffer before, and of no use to anybody else
            if len(self._views) >= VIEWS_KEPT:
                self._views.clear()
            nbytes = length * dtype.itemsize
            view = self._views[purpose, dtype, device, length] = buffer[:nbytes].view(dtype)
        return view

    def padded(
        self, purpose: str, dtype: torch.dtype, device: torch.device, like: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The buffer for a purpose, and parts of it as long as 1-D tensors that begin at multiples of 8 elements.

        What is between them is 0.
        """
        lengths = [tensor.numel() for tensor in like]
        if len(lengths) == 1:
            whole = self.get(purpose, dtype, device, lengths[0])
            return whole, [whole]
        gaps = [-length % 8 for length in lengths]
        whole = self.get(purpose, dtype, device, sum(lengths) + sum(gaps))
        if any(gaps):
            whole.zero_()
        return whole, list(
            whole.split_with_sizes([size for pair in zip(lengths, gaps, strict=True) for size in pair])[::2]
        )

    def copies(self, purpose: str, dtype: torch.dtype, device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
        """Copy 1-D tensors."""
        if len(tensors) == 1:
            return [self.get(purpose, dtype, device, tensors[0].numel()).copy_(tensors[0])]
        _, copies = self.padded(purpose, dtype, device, tensors)
        torch._foreach_copy_(copies, tensors)
        return copies

    def joined(self, purpose: str, tensors: list[Tensor]) -> Tensor:
        """Copy 1-D tensors, one after another; a single one is returned as it is."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        buffer = self.get(purpose, first.dtype, first.device, sum(tensor.numel() for tensor in tensors))
        return torch.cat(tensors, out=buffer)
