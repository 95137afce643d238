"""Cuts parameters into chunks: classes, chunks, spans, fields, their alignment and byte counts.

Knows shapes and dtypes, never where a chunk is. Every element of a parameter is in exactly one span; a span starts at a
multiple of 1,024 elements of the parameter's storage order, so that whoever updates it span by span computes what one
call on the whole parameter computes. `storage_order` is that order, for everything that reads or writes parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import torch
from torch import Tensor

CUT_ELEMENTS = 1024
"""Spans begin at multiples of this many elements of their parameter."""
PACK_ELEMENTS = 16
"""Spans begin at multiples of this many elements of their chunk: 64 bytes of float32, 32 of bfloat16."""
RECORD_ALIGNMENT = 4096
"""Records are padded to what direct I/O moves."""
HUGE_PAGE = 2 << 20
"""Bytes. Only memory that covers one, at a multiple of it, lies on it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One kind of value in a record, one per element of the parameter.

    `bits` of each are stored, so many that 8 elements fill whole bytes; None: a value of the dtype, as it is.
    """

    name: str
    dtype: torch.dtype
    bits: int | None = None

    @property
    def element_bits(self) -> int:
        """Bits of state per element."""
        return 8 * self.dtype.itemsize if self.bits is None else self.bits

    def items(self, elements: int) -> int:
        """Items of the dtype that hold so many elements."""
        return elements if self.bits is None else round_up(elements * self.bits, 8) // 8 // self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkClass:
    """Parameters that are stored alike: one dtype, device, set of fields, home rule and tier that computes."""

    dtype: torch.dtype
    device: str
    fields: tuple[Field, ...]
    compute: str
    named: str | None = None

    @property
    def element_bits(self) -> int:
        """Bits of state per element, over all fields."""
        return sum(field.element_bits for field in self.fields)

    def bytes_of(self, elements: int) -> int:
        """Bytes of state of so many elements, over all fields."""
        return -(-elements * self.element_bits // 8)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What the layout needs of one parameter; `elements` counts real numbers (two per complex one)."""

    name: str
    group: int
    elements: int
    cls: ChunkClass


@dataclass(frozen=True, slots=True)
class Span:
    """`length` elements of parameter number `parameter` from `start` on, at element `offset` of the chunk."""

    parameter: int
    group: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """The state of up to `elements` elements of one class: one record, one extent, one I/O."""

    number: int
    cls: ChunkClass
    elements: int
    spans: tuple[Span, ...]

    @cached_property
    def field_offsets(self) -> dict[str, int]:
        """Byte at which each field begins in the record."""
        offsets, position = {}, 0
        for field in self.cls.fields:
            offsets[field.name] = position
            position += field.items(self.elements) * field.dtype.itemsize
        return offsets

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of the record, padded to whole pages."""
        return round_up(self.cls.bytes_of(self.elements), RECORD_ALIGNMENT)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """The parameter of each span."""
        return tuple(span.parameter for span in self.spans)

    @cached_property
    def group(self) -> int | None:
        """The group that all spans are of; None if they are of several."""
        groups = {span.group for span in self.spans}
        return groups.pop() if len(groups) == 1 else None

    @cached_property
    def is_plain(self) -> bool:
        """Whether parameters and state are of one dtype, and updated on the CPU, where both are."""
        cls = self.cls
        return cls.compute == cls.device == "cpu" and all(field.dtype == cls.dtype for field in cls.fields)

    def field(self, record: Tensor, name: str) -> Tensor:
        """View one field of a record (uint8, at least `record_bytes`) as a 1-D tensor of its dtype: `elements`, or the
        items that hold them.
        """
        field = self._named[name]
        offset = self.field_offsets[name]
        return record[offset : offset + field.items(self.elements) * field.dtype.itemsize].view(field.dtype)

    def part(self, record: Tensor, name: str, span: Span) -> Tensor:
        """View one field of a record where it belongs to one span."""
        field = self._named[name]
        return self.field(record, name).narrow(0, field.items(span.offset), field.items(span.length))

    def parts(self, record: Tensor, name: str) -> tuple[Tensor, ...]:
        """View one field of a record span by span."""
        lengths, are_spans = self._cuts[self._named[name].bits]
        return tuple(compress(self.field(record, name).split_with_sizes(lengths), are_spans))

    @cached_property
    def _named(self) -> dict[str, Field]:
        return {field.name: field for field in self.cls.fields}

    @cached_property
    def _cuts(self) -> dict[int | None, tuple[list[int], list[bool]]]:
        """For fields of so many bits: items of the spans and of the gaps after them, and which are spans."""
        return {field.bits: self._cuts_of(field) for field in self.cls.fields}

    def _cuts_of(self, field: Field) -> tuple[list[int], list[bool]]:
        ends = [*(span.offset for span in self.spans[1:]), self.elements]
        lengths, are_spans = [], []
        for span, end in zip(self.spans, ends, strict=True):
            length = field.items(span.length)
            gap = field.items(end) - field.items(span.offset) - length
            lengths += [length, gap] if gap else [length]
            are_spans += [True, False] if gap else [True]
        return lengths, are_spans


@dataclass(frozen=True)
class Layout:
    """All chunks, and for each parameter the (chunk, span) pairs that hold it, in order of `start`."""

    chunks: tuple[Chunk, ...]
    spans_of: tuple[tuple[tuple[Chunk, Span], ...], ...]


def make_layout(parameters: Sequence[ParameterSpec], chunk_bytes: int, *, first_number: int = 0) -> Layout:
    """Pack parameters, in order, into chunks of at most `chunk_bytes`, class by class in order of first appearance.

    Raises ValueError if a chunk cannot hold `CUT_ELEMENTS` elements of some class.
    """
    chunks: list[Chunk] = []
    for cls in dict.fromkeys(spec.cls for spec in parameters if spec.cls.fields):
        members = [(number, spec) for number, spec in enumerate(parameters) if spec.cls == cls]
        for spans in _pack(members, _elements_per_chunk(cls, chunk_bytes)):
            used = spans[-1].offset + spans[-1].length
            elements = round_up(used, PACK_ELEMENTS)
            chunks.append(Chunk(first_number + len(chunks), cls, elements, tuple(spans)))
    spans_of: list[list[tuple[Chunk, Span]]] = [[] for _ in parameters]
    for chunk in chunks:
        for span in chunk.spans:
            spans_of[span.parameter].append((chunk, span))
    return Layout(tuple(chunks), tuple(map(tuple, spans_of)))


def _elements_per_chunk(cls: ChunkClass, chunk_bytes: int) -> int:
    elements = 8 * chunk_bytes // cls.element_bits // CUT_ELEMENTS * CUT_ELEMENTS
    if elements == 0:
        raise ValueError(
            f"a chunk of {chunk_bytes} bytes holds fewer than {CUT_ELEMENTS} elements of {cls.element_bits / 8:g} "
            f"bytes: raise chunk_size to at least {cls.bytes_of(CUT_ELEMENTS)}"
        )
    return elements


def _pack(members: Sequence[tuple[int, ParameterSpec]], capacity: int) -> list[list[Span]]:
    """Fill chunks of `capacity` elements one after another; cut a parameter only at multiples of CUT_ELEMENTS."""
    filled: list[list[Span]] = []
    used = capacity
    for number, spec in members:
        start = 0
        while start < spec.elements:
            length = min(spec.elements - start, capacity - used)
            if length < spec.elements - start:
                length = length // CUT_ELEMENTS * CUT_ELEMENTS
            if length == 0:
                filled.append([])
                used = 0
                continue
            filled[-1].append(Span(number, spec.group, start, length, used))
            start += length
            used = round_up(used + length, PACK_ELEMENTS)
    return filled


def slices_of(chunk: Chunk, most_bytes: int) -> Iterator[tuple[int, Chunk]]:
    """Cut a chunk into slices of at most so many bytes, or CUT_ELEMENTS: the element each begins at, and a chunk of it.

    The fields of a slice's record are parts of the fields of the chunk's. A chunk that is small enough is one slice.
    """
    size = max(1, 8 * most_bytes // chunk.cls.element_bits // CUT_ELEMENTS) * CUT_ELEMENTS
    if chunk.elements <= size:
        yield 0, chunk
        return
    for begin in range(0, chunk.elements, size):
        end = min(begin + size, chunk.elements)
        own = (span for span in chunk.spans if span.offset < end and begin < span.offset + span.length)
        yield begin, Chunk(chunk.number, chunk.cls, end - begin, tuple(_within(span, begin, end) for span in own))


def _within(span: Span, begin: int, end: int) -> Span:
    """What of a span lies between two elements of its chunk, at an element from the first of them on."""
    first, last = max(span.offset, begin), min(span.offset + span.length, end)
    return Span(span.parameter, span.group, span.start + first - span.offset, last - first, first - begin)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


# -- storage order ----------------------------------------------------------------------------------------------


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers; any other tensor is returned as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill one gap-free piece of storage, each once, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(_steps(tensor)):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def storage_order(parameter: Tensor) -> Tensor | None:
    """View a dense real tensor as 1-D, in the order of its storage; None if it is not dense (work on a copy then)."""
    if not is_dense(parameter):
        return None
    return parameter.as_strided((parameter.numel(),), (1,), parameter.storage_offset())


def in_storage_order_of(parameter: Tensor, values: Tensor) -> Tensor:
    """Give `values` (of the parameter's shape) as 1-D in the parameter's storage order, copying only if it must.

    For a parameter that is not dense the order is row-major.
    """
    if values is not parameter:
        values = values.resolve_neg()  # a gradient whose storage holds the negative of what it shows
    if parameter.is_contiguous() or not is_dense(parameter):
        values = values.contiguous()
        return values if values.dim() == 1 else values.flatten()
    if _steps(values) == _steps(parameter):
        return values.as_strided((values.numel(),), (1,), values.storage_offset())
    copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=values.dtype, device=values.device)
    copy.copy_(values)
    return copy.as_strided((copy.numel(),), (1,))


def stored_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a tensor whose storage order is the parameter's: its own, or row-major if it is not dense."""
    return parameter.stride() if is_dense(parameter) else _row_major(parameter.shape)


def empty_like_stored(parameter: Tensor, dtype: torch.dtype, storage: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Make a CPU tensor of the parameter's shape and, if it is dense, strides; return it with its storage-order view.

    `storage`: a 1-D tensor of the same number of elements to be used as its memory.
    """
    strides = stored_strides(parameter)
    flat = torch.empty(parameter.numel(), dtype=dtype, device="cpu") if storage is None else storage
    return flat.as_strided(parameter.shape, strides, flat.storage_offset()), flat


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension in which one can step at all."""
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
