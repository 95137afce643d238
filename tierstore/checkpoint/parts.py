"""Parts of tensors: boxes of a whole, each stored in an order of its own; and how any part is read from stored ones.

Pure geometry, but for `gather`, which reads through functions that it is given, in bounded memory. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW_BYTES = 8 << 20
"""Read at once where elements must be put into another order."""

Read = Callable[[int, Tensor], None]
"""Reads elements of a stored part, from one on in its storage order, into a 1-D contiguous CPU tensor."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: where it begins, and shape and dense strides of what is stored of it, in elements."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def all_of(cls, shape: Sequence[int], stride: Sequence[int]) -> Part:
        """The part that is a whole tensor."""
        return cls((0,) * len(shape), tuple(shape), tuple(stride))

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def is_like(self, other: Part) -> bool:
        """Whether it is the same box, stored in the same order."""
        is_same_box = (self.offsets, self.shape) == (other.offsets, other.shape)
        return is_same_box and is_same_order(self.shape, self.stride, other.stride)


def is_same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether strides of one shape mean the same positions."""
    return all(size <= 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def strides_in_order_of(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of a shape, whose dimensions follow one another as those with strides `like` do."""
    found, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda dimension: (like[dimension], -dimension)):
        found[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(found)


def are_cells(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes are the cells of a grid that covers all of a shape, each once."""
    sides = [sorted({(offsets[d], sizes[d]) for offsets, sizes in boxes}) for d in range(len(shape))]
    for size, intervals in zip(shape, sides, strict=True):
        end = 0
        for offset, length in intervals:
            if offset != end:
                return False
            end += length
        if end != size:
            return False
    return len(set(boxes)) == len(boxes) == math.prod(len(intervals) for intervals in sides)


def gather(target: Part, stored: Sequence[tuple[Part, Read]], start: int, into: Tensor) -> None:
    """Read elements of a part, from `start` on in its storage order, out of stored parts that together hold them.

    `into` is a 1-D contiguous CPU tensor. Takes at most WINDOW_BYTES of memory, if a single block is not more.
    """
    for part, read in stored:
        if part.is_like(target):
            read(start, into)
            return
    for offsets, shape in boxes_of(target.shape, target.stride, start, len(into)):
        box = tuple(a + b for a, b in zip(offsets, target.offsets, strict=True)), shape
        for part, read in stored:
            if (common := overlap(box, (part.offsets, part.shape))) is not None:
                _copy(common, part, read, target, start, into)


def boxes_of(shape: Sequence[int], stride: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """The boxes that elements `start` to `start + count` of a dense tensor, in storage order, consist of."""
    slowest = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -stride[d])
    yield from _cut(slowest, stride, start, count, ((0,) * len(shape), tuple(shape)))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common."""
    begin = [max(a, b) for a, b in zip(one[0], other[0], strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    if any(b >= e for b, e in zip(begin, end, strict=True)):
        return None
    return tuple(begin), tuple(e - b for b, e in zip(begin, end, strict=True))


def _cut(slowest: Sequence[int], stride: Sequence[int], start: int, count: int, box: Box) -> Iterator[Box]:
    """As `boxes_of`, of a box whose dimensions but the `slowest` ones are whole."""
    if not count:
        return
    if not slowest:
        yield box
        return
    dimension, *faster = slowest
    step = stride[dimension]
    first, skipped = divmod(start, step)
    last, rest = divmod(start + count, step)
    if first == last:
        yield from _cut(faster, stride, skipped, count, _narrowed(box, dimension, first, 1))
        return
    if skipped:
        yield from _cut(faster, stride, skipped, step - skipped, _narrowed(box, dimension, first, 1))
        first += 1
    if first < last:
        yield _narrowed(box, dimension, first, last - first)
    yield from _cut(faster, stride, 0, rest, _narrowed(box, dimension, last, 1))


def _copy(box: Box, part: Part, read: Read, target: Part, start: int, into: Tensor) -> None:
    """Copy a box that a stored part holds to its place; `into` begins with the target's element `start`."""
    offsets, shape = box
    source = _position(offsets, part)
    place = into[_position(offsets, target) - start :]
    numel, reach = math.prod(shape), _reach(shape, part.stride)
    if reach == numel and is_same_order(shape, part.stride, target.stride):
        read(source, place[:numel])
    elif reach * into.itemsize <= WINDOW_BYTES:
        values = torch.empty(reach, dtype=into.dtype, device="cpu")
        read(source, values)
        place.as_strided(shape, target.stride).copy_(values.as_strided(shape, part.stride))
    else:
        slowest = max(range(len(shape)), key=lambda d: (shape[d] - 1) * part.stride[d])
        half = shape[slowest] // 2
        _copy(_narrowed(box, slowest, offsets[slowest], half), part, read, target, start, into)
        _copy(_narrowed(box, slowest, offsets[slowest] + half, shape[slowest] - half), part, read, target, start, into)


def _narrowed(box: Box, dimension: int, offset: int, size: int) -> Box:
    offsets, shape = list(box[0]), list(box[1])
    offsets[dimension], shape[dimension] = offset, size
    return tuple(offsets), tuple(shape)


def _position(offsets: Sequence[int], part: Part) -> int:
    """Where in a part's storage the element of the whole with these indices lies."""
    return sum((a - b) * stride for a, b, stride in zip(offsets, part.offsets, part.stride, strict=True))


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last one of a box, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
