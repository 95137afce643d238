"""Which dtype of torch is stored as which data type of Zarr. Bits are never changed.

Zarr has no bfloat16 and no float8: those are stored as unsigned integers of their size, and an attribute names the
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_AS_INTEGERS = (
    *("bfloat16", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_INTEGERS = {1: "uint8", 2: "uint16", 4: "uint32"}


def _known() -> Iterator[tuple[str, torch.dtype, str]]:
    for name in (*_NATIVE, *_AS_INTEGERS):
        dtype = getattr(torch, name, None)  # not every release has every float8
        if isinstance(dtype, torch.dtype):
            yield name, dtype, name if name in _NATIVE else _INTEGERS[dtype.itemsize]


_DTYPES = {name: dtype for name, dtype, _ in _known()}
_NAMES = {dtype: name for name, dtype, _ in _known()}
_STORED = {dtype: stored for _, dtype, stored in _known()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name that attributes have for a dtype: torch's, without `torch.`. Raises KeyError for one not storable."""
    return _NAMES[dtype]


def dtype_named(name: object) -> torch.dtype:
    """The dtype of that name. Raises KeyError."""
    if not isinstance(name, str):
        raise KeyError(name)
    return _DTYPES[name]


def is_storable(dtype: torch.dtype) -> bool:
    """Whether arrays of a dtype can be stored."""
    return dtype in _NAMES


def data_type(dtype: torch.dtype) -> str:
    """Zarr's data type for a dtype."""
    return _STORED[dtype]


def fill_value(dtype: torch.dtype) -> object:
    """Zero, as Zarr's metadata writes it for the data type. Nothing is ever left to it: every element is stored."""
    stored = data_type(dtype)
    if stored == "bool":
        return False
    if stored.startswith("complex"):
        return [0.0, 0.0]
    return 0.0 if stored.startswith("float") else 0


def as_bytes(values: Tensor) -> Tensor:
    """View a 1-D CPU tensor as its bytes, or those of a copy if its elements do not lie side by side."""
    return values.detach().resolve_conj().resolve_neg().contiguous().view(torch.uint8)
