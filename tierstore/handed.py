"""Tensors of the state that somebody was given to look at, and how what is written into them finds its way back.

A tensor that was handed out is the same object until the next step. Whether it was changed is decided by its values:
writes through `.data`, numpy or a collective count in no version.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.forms import take_apart
from tierstore.guard import in_plain_torch
from tierstore.layout import empty_like_stored
from tierstore.members import Member
from tierstore.results import Results


class Handed:
    """Tensors handed out since the last step, and how to notice that they were changed."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._tensors: dict[int, dict[str, tuple[Tensor, object]]] = {}  # by position and field, with its version
        self._results: Results | None = None

    @in_plain_torch()
    def get(self, position: int, name: str) -> Tensor:
        """Read one field of a parameter, or hand out again what was handed out before."""
        fields = self._tensors.setdefault(position, {})
        if name not in fields:
            if self._results is None:
                self._results = Results.under(self._binding.policy)
            flat = self._binding.read({position: (name,)}, self._results)[position][name]
            tensor = shaped(self._binding.members[position], flat)
            fields[name] = (tensor, _mark(tensor))
        return fields[name][0]

    def is_unchanged(self, position: int, name: str, value: object) -> bool:
        """Whether `value` is what was handed out, and still as it was."""
        tensor, mark = self._tensors.get(position, {}).get(name, (None, None))
        return tensor is not None and value is tensor and _mark(tensor) == mark

    @property
    def is_empty(self) -> bool:
        """Whether nobody has been given anything since the last step."""
        return not any(self._tensors.values())

    def absorb(self) -> None:
        """Write back what was changed in place."""
        changed = {
            position: {name: tensor for name, (tensor, mark) in fields.items() if _mark(tensor) != mark}
            for position, fields in self._tensors.items()
        }
        changed = {position: fields for position, fields in changed.items() if fields}
        if changed:
            self._binding.write(changed)
            for position, tensors in changed.items():
                self._tensors[position] |= {name: (tensor, _mark(tensor)) for name, tensor in tensors.items()}

    def forget(self) -> None:
        """Let go of all that was handed out."""
        self._tensors.clear()
        self._results = None

    def forget_fields(self, position: int, names: Iterable[str]) -> None:
        """Let go of some fields of one parameter, which have other values now."""
        for name in names:
            self._tensors.get(position, {}).pop(name, None)


def shaped(member: Member, flat: Tensor) -> Tensor:
    """Give a 1-D real tensor in storage order the shape, strides and sharding a parameter had at binding."""
    tensor, _ = empty_like_stored(member.form, flat.dtype, flat)
    if member.dtype.is_complex:
        tensor = torch.view_as_complex(tensor)
    return _like_dtensor(member.parameter, tensor) if hasattr(member.parameter, "_local_tensor") else tensor


def _like_dtensor(parameter: Any, local: Tensor) -> Tensor:
    """Wrap a CPU tensor as a DTensor with the parameter's mesh and placements, not moving it to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = parameter._spec
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    make: Any = DTensor  # its constructor is not typed
    wrapped: Tensor = make(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
    return wrapped


def _mark(tensor: Tensor) -> int:
    """What tells whether a tensor was changed: by its values too, as `.data`, numpy and collectives count nothing."""
    raw: Any = take_apart(getattr(tensor, "_local_tensor", tensor))[1].numpy()
    return zlib.crc32(raw)
