"""What a parameter's state consists of: the fields that others see, and those in the record that they are made of.

They differ in one: a split `master` is float32 to everybody, and in the record a remainder and a tie bit (see
`masters`), of which the parameter itself is the high half. Reads and writes one field of one span at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from tierstore.kernels import LOW_PRECISION
from tierstore.layout import Chunk, ChunkClass, Field, Span, in_storage_order_of
from tierstore.masters import REMAINDER, TIE, master_in_parts, read_master, write_master
from tierstore.members import Member, local_of
from tierstore.policy import StateSettings
from tierstore.scratch import Scratch

MASTER = "master"


def may_be_split(member: Member) -> bool:
    """Whether the parameter can be the high half of its master."""
    return member.form.dtype == torch.bfloat16


def state_fields(member: Member, settings: StateSettings) -> tuple[Field, ...]:
    """The fields of a parameter's state as others see them.

    Moments in its real dtype, or float32 if that is too low and the policy does not ask for it; then a master too.
    """
    dtype = member.form.dtype
    is_low = dtype in LOW_PRECISION
    moments = torch.float32 if is_low and settings.moments == "float32" else dtype
    has_master = is_low and settings.master != "none"
    master = (Field(MASTER, torch.float32),) if has_master else ()
    return (*master, *(Field(name, moments) for name in member.moments))


def record_fields(fields: tuple[Field, ...], *, is_split: bool) -> tuple[Field, ...]:
    """The fields of the record that hold these."""
    if not is_split:
        return fields
    return (*(field for field in fields if field.name != MASTER), REMAINDER, TIE)


def is_split(cls: ChunkClass) -> bool:
    """Whether the records of a class hold split masters."""
    return REMAINDER in cls.fields


def precision_of(cls: ChunkClass) -> torch.dtype:
    """The dtype in which parameters of a class are updated."""
    return torch.float32 if is_split(cls) else cls.fields[0].dtype


def has_high_half(member: Member) -> bool:
    """Whether the parameter still has the shape that it had at binding, and values; else a split master is lost."""
    local = local_of(member.parameter)
    return local.shape == member.form.shape and not local.is_meta


def high_half(member: Member) -> Tensor:
    """The parameter as it is now, 1-D in the storage order that it had at binding."""
    return in_storage_order_of(member.form, local_of(member.parameter))


def read_field(
    chunk: Chunk, span: Span, name: str, record: Tensor, high: Tensor | None, into: Tensor, scratch: Scratch
) -> None:
    """Copy one span's part of a field that others see into a 1-D tensor. `high`: the parameter, for a split master."""
    if high is None:
        into.copy_(chunk.part(record, name, span))
        return
    remainder, tie = (chunk.part(record, field.name, span) for field in (REMAINDER, TIE))
    read_master(high.narrow(0, span.start, span.length), remainder, tie, into, scratch)


def field_in_parts(
    chunk: Chunk, span: Span, name: str, record: Tensor, high: Tensor | None, scratch: Scratch
) -> Iterator[tuple[int, Tensor]]:
    """One span's part of a field that others see, part by part: where each begins in the span, and its values, 1-D.

    They are valid until the next part, or the record, is there. `high`: the span's part of the parameter, for a split
    master.
    """
    if name != MASTER or high is None:
        yield 0, chunk.part(record, name, span)
        return
    remainder, tie = (chunk.part(record, field.name, span) for field in (REMAINDER, TIE))
    yield from master_in_parts(high, remainder, tie, scratch)


class Scatter:
    """Values of whole parameters on their way into records. Reorders one parameter's at a time, if they need it."""

    def __init__(self, values: Mapping[int, Mapping[str, Tensor]], members: Sequence[Member], scratch: Scratch) -> None:
        self._values = values
        self._scratch = scratch
        self._members = members
        self._flat: dict[int, dict[str, Tensor]] = {}
        self._elements_left = {position: members[position].form.numel() for position in values}

    def into(self, chunk: Chunk, record: Tensor) -> None:
        """Write the parts that belong to a chunk into its record."""
        for span in chunk.spans:
            if span.parameter not in self._values:
                continue
            for name, flat in self._flat_of(span.parameter).items():
                part = flat.narrow(0, span.start, span.length) if flat.dim() else flat
                write_field(chunk, span, name, record, part, self._scratch)
            self._elements_left[span.parameter] -= span.length
            if not self._elements_left[span.parameter]:
                del self._flat[span.parameter]

    def _flat_of(self, position: int) -> dict[str, Tensor]:
        if position not in self._flat:
            self._flat[position] = {
                name: self._in_order(position, value) for name, value in self._values[position].items()
            }
        return self._flat[position]

    def _in_order(self, position: int, value: Tensor) -> Tensor:
        local = local_of(value)
        return local if local.dim() == 0 else in_storage_order_of(self._members[position].form, local)


def write_field(chunk: Chunk, span: Span, name: str, record: Tensor, values: Tensor, scratch: Scratch) -> None:
    """Set one span's part of a field that others see, from as many values or one."""
    write_part(chunk, span, name, record, 0, values.expand(span.length), scratch)


def write_part(
    chunk: Chunk, span: Span, name: str, record: Tensor, start: int, values: Tensor, scratch: Scratch
) -> None:
    """Set elements of a field that others see from one of a span on, a multiple of 8."""
    if name != MASTER or not is_split(chunk.cls):
        chunk.part(record, name, span).narrow(0, start, len(values)).copy_(values)
        return
    remainder, tie = (chunk.part(record, field.name, span) for field in (REMAINDER, TIE))
    stop = start + len(values)
    write_master(values, remainder[start:stop], tie[start // 8 : -(-stop // 8)], scratch)
