"""Random tensors of every dtype and layout, and what it means that two are the same to the bit. Shared by tests."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

_ALL = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DTYPES = sorted((dtype for dtype in _ALL if not str(dtype).startswith("torch.q")), key=str)
"""Every dtype that torch has, but the quantized ones."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Maker = Callable[[random.Random, torch.dtype, int], Tensor]


def random_bytes(chance: random.Random, dtype: torch.dtype, elements: int) -> Tensor:
    """Make a 1-D tensor of any bit patterns, NaNs among them; of a bool, the two that it has."""
    raw = torch.frombuffer(bytearray(chance.randbytes(max(1, elements * dtype.itemsize))), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw.clone()
    return raw[: elements * dtype.itemsize].view(dtype)


def scribble(tensor: Tensor, chance: random.Random) -> None:
    """Overwrite a dense tensor in place with other bit patterns."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    flat.view(torch.uint8).copy_(random_bytes(chance, tensor.dtype, tensor.numel()).view(torch.uint8))


def _flat(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return random_bytes(chance, dtype, chance.randint(1, most))


def _scalar(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return random_bytes(chance, dtype, 1).as_strided((), ())


def _empty(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return torch.empty(chance.choice([(0,), (0, 3), (2, 0, 5)]), dtype=dtype)


def _permuted(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    sizes = [chance.randint(1, 4), chance.randint(1, 5), max(1, chance.randint(1, most) // 20)]
    flat = random_bytes(chance, dtype, sizes[0] * sizes[1] * sizes[2])
    return flat.view(sizes).permute(*chance.sample(range(3), 3))


def _sliced(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    rows = chance.randint(2, 12)
    flat = random_bytes(chance, dtype, rows * max(2, most // rows))
    return flat.view(rows, -1)[:: chance.randint(1, 3), chance.randint(0, 1) :: chance.randint(1, 3)]


def _offset(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return random_bytes(chance, dtype, max(4, most))[3:]


def _expanded(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return random_bytes(chance, dtype, 4).view(4, 1).expand(4, max(2, most // 8))


def _overlapping(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return random_bytes(chance, dtype, 20).as_strided((8, 5), (2, 1))


def _conjugated(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return _flat(chance, chance.choice(COMPLEX), most // 2 + 1).conj()


def _negated(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return _flat(chance, chance.choice(COMPLEX), most // 2 + 1).conj().imag


def _learning(chance: random.Random, dtype: torch.dtype, most: int) -> Tensor:
    return _flat(chance, chance.choice(FLOATS), most).requires_grad_()


LAYOUTS: tuple[Maker, ...] = (
    *(_flat, _scalar, _empty, _permuted, _sliced, _offset),
    *(_expanded, _overlapping, _conjugated, _negated, _learning),
)


def random_tensor(chance: random.Random, most_bytes: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor of any dtype and layout, of up to about so many bytes, small ones more often."""
    dtype = chance.choice(DTYPES) if dtype is None else dtype
    most = max(1, int(most_bytes * chance.random() ** 3) // dtype.itemsize)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # complex32 is experimental
        return chance.choice(LAYOUTS)(chance, dtype, most)


def plain(tensor: Tensor) -> Tensor:
    """The values without autograd and lazy signs."""
    return tensor.detach().resolve_conj().resolve_neg()


def integers(tensor: Tensor) -> Tensor:
    """View plain values as integers of their size; two per complex128."""
    real = torch.view_as_real(tensor) if tensor.itemsize == 16 else tensor
    return real.view(INTEGERS[real.itemsize])


def copy_of(tensor: Tensor) -> Tensor:
    """Copy the values, of dtypes that cannot be copied too."""
    values = plain(tensor)
    return values.clone() if values.itemsize == 16 else integers(values).clone().view(values.dtype)


def keeps_strides(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of storage, so that torch keeps the strides when it clones."""
    view = integers(tensor)
    return torch.empty_like(view, memory_format=torch.preserve_format).stride() == view.stride()


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Fail unless two tensors have one shape, dtype and device, the same bits and, if dense, the same strides."""
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    values = plain(expected)
    assert torch.equal(integers(found), integers(values))
    if values.numel() and keeps_strides(values):
        assert strides_that_count(found) == strides_that_count(values)


def strides_that_count(tensor: Tensor) -> list[int]:
    """The strides of dimensions longer than one."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
