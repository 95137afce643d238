"""How a tensor becomes bytes, and bytes become that tensor again, whatever its dtype and layout.

A form is all of a tensor but its values: shape, strides, dtype and device. Bytes are in storage order, so that a dense
tensor keeps its strides; one that is not dense (a strided view, an expanded tensor) becomes row-major. No value is ever
read as a number: everything goes through integer views, because some dtypes can do nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.layout import storage_order

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Form:
    """All of a dense tensor but its values. `device` is where the tensor was, not where its bytes are."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, raw: Tensor) -> Tensor:
        """View a 1-D uint8 tensor of `nbytes`, aligned to the dtype, as a tensor of this form, on its own device."""
        flat = raw.view(self.dtype)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Make a tensor of this form on `device`; return it and its bytes."""
        raw = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self.view(raw), raw


def take_apart(tensor: object) -> tuple[Form, Tensor]:
    """Give a tensor's form and its bytes (1-D uint8, on its device; a view of its memory where it is dense).

    Raises TypeError for what has no plain bytes: sparse, quantized, nested, meta and wrapped tensors (DTensor).
    """
    plain = _plain(tensor)
    ordered = storage_order(plain)
    if ordered is None:
        plain = _row_major(plain)
        ordered = plain.view(-1)
    form = Form(tuple(plain.shape), plain.stride(), plain.dtype, plain.device)
    return form, ordered.view(torch.uint8)


def _plain(tensor: object) -> Tensor:
    """Check that it is an ordinary tensor, and give its values without autograd, lazy signs or subclass."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"found {type(tensor).__name__}, which is no tensor: make one of it with torch.as_tensor")
    if (obstacle := _obstacle(tensor)) is not None:
        raise TypeError(f"found a tensor that {obstacle}")
    return tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def _obstacle(tensor: Tensor) -> str | None:
    if tensor.is_nested:
        return "is nested: put its parts (`unbind()`)"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}, a wrapper of other tensors: put those (of a DTensor, `to_local()`)"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}: put its parts (indices and values), or `to_dense()`"
    if tensor.is_quantized:
        return "is quantized: put its `int_repr()` and keep scale and zero point"
    if tensor.is_meta:
        return "is on the meta device and has no values: materialize it first"
    return None


def _row_major(tensor: Tensor) -> Tensor:
    """Copy a tensor that is not dense, bit by bit."""
    if tensor.itemsize == 16:
        return torch.view_as_complex(torch.view_as_real(tensor).view(torch.int64).contiguous().view(torch.float64))
    return tensor.view(_SAME_SIZE[tensor.itemsize]).contiguous().view(tensor.dtype)
