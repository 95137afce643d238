"""What is said of one parameter or tensor beside its values: the entry, and its form in attributes.

The values of each field are `numel` elements in the order of the parameter's storage, which shape and strides tell. Of
a tensor that is sharded over ranks an entry describes one rank's part, and says of which whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from tierstore.checkpoint.kinds import dtype_name, dtype_named, is_storable
from tierstore.checkpoint.parts import Part
from tierstore.errors import CheckpointValueError, DamagedCheckpointError

SECTIONS = ("params", "model", "extra")
VALUES = "values"
"""The one field of a tensor that is not a parameter's state."""
MOST_ELEMENTS = 1 << 48
MOST_DIMENSIONS = 64
MOST_STEPS = torch.finfo(torch.float32).max
"""What a step count, a float32, can hold."""
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

Json = Any
"""None, bool, int, float, str, lists and str-keyed dicts of them."""


@dataclass(frozen=True, slots=True)
class Whole:
    """What a part is a part of: shape and dense strides of the whole tensor, and where in it the part begins."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter (section `params`) or one tensor (sections `model`, `extra`).

    `name` may have any characters and occur twice. `stride` is that of a dense tensor: what is not dense is stored
    row-major. Each field is `numel` elements in storage order. `attributes` is the caller's, plain JSON. With `whole`,
    shape and stride are those of a part.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    fields: Mapping[str, torch.dtype]
    step: float | None = None
    attributes: Mapping[str, Json] = field(default_factory=lambda: MappingProxyType({}))
    whole: Whole | None = None

    @property
    def numel(self) -> int:
        """Elements of the tensor, and of each field."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all fields."""
        return self.numel * sum(dtype.itemsize for dtype in self.fields.values())

    @property
    def part(self) -> Part:
        """Which part of the whole is stored here."""
        offsets = (0,) * len(self.shape) if self.whole is None else self.whole.offsets
        return Part(offsets, self.shape, self.stride)

    def of_whole(self) -> Entry:
        """The same, said of the whole tensor."""
        if self.whole is None:
            return self
        return replace(self, shape=self.whole.shape, stride=self.whole.stride, whole=None)


def node_name(number: int) -> str:
    """What the group of an entry is called in its section."""
    return f"{number:06d}"


def check_entry(where: str, entry: Entry) -> None:
    """Refuse an entry that cannot be stored. Raises CheckpointValueError."""
    if (problem := _problem(entry)) is not None:
        raise CheckpointValueError(f"{where} ({entry.name!r}): {problem}")


def to_attributes(entry: Entry) -> dict[str, Json]:
    """The attributes of an entry's group."""
    attributes = {
        "name": entry.name,
        "shape": list(entry.shape),
        "strides": list(entry.stride),
        "dtype": dtype_name(entry.dtype),
        "step": entry.step,
        "fields": {name: dtype_name(dtype) for name, dtype in entry.fields.items()},
        "attributes": dict(entry.attributes),
    }
    if (whole := entry.whole) is not None:
        named = {"shape": whole.shape, "strides": whole.stride, "offsets": whole.offsets}
        attributes["whole"] = {name: list(values) for name, values in named.items()}
    return attributes


def from_attributes(where: str, attributes: Mapping[str, Json]) -> Entry:
    """Read an entry, believing nothing. Raises DamagedCheckpointError."""
    try:
        fields = attributes["fields"]
        attached = attributes["attributes"]
        if not isinstance(fields, Mapping) or not isinstance(attached, Mapping):
            raise TypeError("fields and attributes must be objects")
        entry = Entry(
            name=attributes["name"],
            shape=_integers(attributes["shape"]),
            stride=_integers(attributes["strides"]),
            dtype=dtype_named(attributes["dtype"]),
            fields={name: dtype_named(dtype) for name, dtype in fields.items()},
            step=attributes["step"],
            attributes=attached,
            whole=_whole(attributes.get("whole")),
        )
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{where}: its attributes are not an entry's ({error!r})") from error
    if (problem := _problem(entry)) is not None:
        raise DamagedCheckpointError(f"{where}: {problem}")
    return entry


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of that shape and stride fill their storage without gap and without overlap."""
    if 0 in shape:
        return True
    wanted = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1):
        if step != wanted:
            return False
        wanted *= size
    return True


def _problem(entry: Entry) -> str | None:
    """What is wrong with an entry, or None."""
    if not isinstance(entry.name, str):
        return f"its name is {entry.name!r}, not a string"
    if (problem := _problem_of_form(entry)) is not None:
        return problem
    if entry.whole is not None and (problem := _problem_of_part(entry, entry.whole)) is not None:
        return problem
    for dtype in (entry.dtype, *entry.fields.values()):
        if not is_storable(dtype):
            return f"{dtype} cannot be stored"
    if wrong := [name for name in entry.fields if not (isinstance(name, str) and _FIELD_NAME.fullmatch(name))]:
        return f"{wrong[0]!r} cannot be a field's name: letters, digits and _, at most 64 of them"
    is_number = isinstance(entry.step, int | float) and not isinstance(entry.step, bool)
    if entry.step is not None and not (is_number and 0 <= entry.step <= MOST_STEPS):
        return f"its step is {entry.step!r}, not a number from zero to {MOST_STEPS:.4g}"
    return None


def _problem_of_part(entry: Entry, whole: Whole) -> str | None:
    """What is wrong with what an entry says of its whole, or None."""
    if not len(entry.shape) == len(whole.shape) == len(whole.offsets):
        return f"it has {len(entry.shape)} dimensions, and is part of a whole of shape {whole.shape} at {whole.offsets}"
    if (problem := _problem_of_form(entry.of_whole())) is not None:
        return f"of its whole, {problem}"
    ends = [offset + size for offset, size in zip(whole.offsets, entry.shape, strict=True)]
    if min(whole.offsets, default=0) < 0 or any(end > size for end, size in zip(ends, whole.shape, strict=True)):
        return f"a part of shape {entry.shape} at {whole.offsets} lies outside its whole of shape {whole.shape}"
    return None


def _problem_of_form(entry: Entry) -> str | None:
    """What is wrong with shape and strides, or None."""
    if len(entry.shape) > MOST_DIMENSIONS:
        return f"it has {len(entry.shape)} dimensions, at most {MOST_DIMENSIONS} are stored"
    if len(entry.shape) != len(entry.stride):
        return f"its shape has {len(entry.shape)} dimensions, its strides are {len(entry.stride)}"
    if min((*entry.shape, *entry.stride), default=0) < 0 or max(*entry.shape, *entry.stride, 0, 0) > MOST_ELEMENTS:
        return f"its shape {entry.shape} or strides {entry.stride} are out of range"
    if entry.numel > MOST_ELEMENTS:
        return f"its shape {entry.shape} has {entry.numel:,} elements, more than {MOST_ELEMENTS:,}"
    if not is_dense(entry.shape, entry.stride):
        return f"strides {entry.stride} do not fill the storage of shape {entry.shape} without gap and overlap"
    return None


def _whole(attribute: Json) -> Whole | None:
    if attribute is None:
        return None
    if not isinstance(attribute, Mapping):
        raise TypeError("whole must be an object")
    return Whole(*(_integers(attribute[name]) for name in ("shape", "strides", "offsets")))


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError(f"{str(values)[:100]} is no list of integers")
    return tuple(values)
