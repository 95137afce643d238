"""Buffers for what is computed tile by tile: made when first needed, used again by the next tile, valid until then."""

from __future__ import annotations

import torch
from torch import Tensor

from tierstore.layout import round_up

GRAIN_ELEMENTS = 256 * 1024
"""Buffers hold a multiple of this many elements."""


class Scratch:
    """Buffers for one tile at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, purpose: str, dtype: torch.dtype, device: torch.device, length: int) -> Tensor:
        """View the first `length` elements of the buffer for a purpose, whatever is in them."""
        key = (purpose, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < length:
            buffer = self._buffers[key] = torch.empty(round_up(length, GRAIN_ELEMENTS), dtype=dtype, device=device)
        return buffer[:length]

    def pieces(self, purpose: str, dtype: torch.dtype, device: torch.device, like: list[Tensor]) -> list[Tensor]:
        """View parts of the buffer for a purpose that are as long as 1-D tensors, one after another."""
        lengths = [tensor.numel() for tensor in like]
        if len(lengths) == 1:
            return [self.get(purpose, dtype, device, lengths[0])]
        return list(self.get(purpose, dtype, device, sum(lengths)).split_with_sizes(lengths))

    def copies(self, purpose: str, dtype: torch.dtype, device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
        """Copy 1-D tensors."""
        copies = self.pieces(purpose, dtype, device, tensors)
        torch._foreach_copy_(copies, tensors)
        return copies

    def joined(self, purpose: str, tensors: list[Tensor]) -> Tensor:
        """Copy 1-D tensors, one after another; a single one is returned as it is."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        buffer = self.get(purpose, first.dtype, first.device, sum(tensor.numel() for tensor in tensors))
        return torch.cat(tensors, out=buffer)
