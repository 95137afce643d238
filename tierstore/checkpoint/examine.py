"""What a checkpoint holds, whether it is sound, and in what two of them differ. Reads part by part, changes nothing."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tierstore.checkpoint.compare import differing
from tierstore.checkpoint.documents import METADATA, load
from tierstore.checkpoint.entries import SECTIONS, Entry, node_name
from tierstore.checkpoint.extra import encode
from tierstore.checkpoint.opening import open_checkpoint
from tierstore.checkpoint.reader import Reader
from tierstore.checkpoint.root import MOST_METADATA_BYTES
from tierstore.checkpoint.torchfile import TorchFile, first_damaged
from tierstore.errors import CheckpointError
from tierstore.forms import take_apart

PART_ELEMENTS = 2 << 20
"""Read at once."""

Source = Reader | TorchFile
Tell = Callable[[int], None]
"""Hears how many bytes more have been read."""


@dataclass(frozen=True, slots=True)
class Values:
    """What the values of one field are like. `norm`: the Euclidean one of those that are finite."""

    dtype: str
    nbytes: int
    norm: float | None
    not_finite: int | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ, at `place`; of values how far at most, and how many."""

    place: str
    text: str
    max_abs: float | None = None
    elements: int | None = None


def total_bytes(source: Source) -> int:
    """Bytes of all values."""
    return sum(entry.nbytes for section in SECTIONS for entry in source.entries(section).values())


def values_of(source: Source, section: str, number: int, *, norms: bool, tell: Tell) -> dict[str, Values]:
    """Describe the fields of an entry; with `norms`, by reading them."""
    entry = source.entries(section)[number]
    found = {}
    for field, dtype in entry.fields.items():
        squares, not_finite = 0.0, 0
        if norms:
            for _, part in parts(source, section, number, field):
                exact = _exact(part)
                is_finite = exact.isfinite()
                not_finite += int((~is_finite).sum())
                squares += float(exact.where(is_finite, 0.0).square().sum())
                tell(part.nbytes)
        name = str(dtype).removeprefix("torch.")
        norm = math.sqrt(squares) if norms else None
        found[field] = Values(name, entry.numel * dtype.itemsize, norm, not_finite if norms else None)
    return found


def problems(path: str | os.PathLike[str], tell: Tell) -> Iterator[str]:
    """Read everything, and say what is wrong, one after the other. Raises CheckpointError if it cannot be opened."""
    with open_checkpoint(path) as source:
        if isinstance(source, Reader):
            yield from _strange_documents(source)
        elif (damaged := first_damaged(source.path)) is not None:
            yield f"{source.path} is damaged: {damaged}"
        for section in SECTIONS:
            for number, entry in source.entries(section).items():
                for field in entry.fields:
                    yield from _damage(source, section, number, field, entry, tell)
        for rank in range(source.ranks):
            try:
                source.extra(rank)
            except CheckpointError as error:
                yield str(error)


def differences(one: Source, other: Source, tell: Tell) -> Iterator[Difference]:
    """Say in what two checkpoints differ: entries by name where all have one of their own, else by number."""
    headers = [dict(source.header) for source in (one, other)]
    if any(header.get("algorithm") == "unknown" for header in headers):  # a file of torch's does not say
        headers = [{key: value for key, value in header.items() if key != "algorithm"} for header in headers]
    extras = [encode(_extra_of(source), _digest) for source in (one, other)]
    for found in (*differing("header", *headers), *differing("extra", *extras)):
        yield Difference(*found)
    for section in ("params", "model"):
        left, right = _keyed(one.entries(section), other.entries(section))
        for mine, theirs, path in ((left, right, one.path), (right, left, other.path)):
            yield from (Difference(f"{section}/{key}", f"only in {path}") for key in mine if key not in theirs)
        for key in left:
            if key in right:
                yield from _in_entries(f"{section}/{key}", one, other, section, (left[key], right[key]), tell)


def parts(source: Source, section: str, number: int, field: str) -> Iterator[tuple[int, Tensor]]:
    """The values of a field, part by part, in one buffer: what is yielded holds until the next one."""
    entry = source.entries(section)[number]
    buffer = torch.empty(min(entry.numel, PART_ELEMENTS), dtype=entry.fields[field])
    for start in range(0, entry.numel, PART_ELEMENTS):
        part = buffer[: entry.numel - start]
        source.read(section, number, field, start, part)
        yield start, part


def shaped(source: Source, section: str, number: int, field: str, into: Tensor | None = None) -> Tensor:
    """A field as a tensor of the entry's shape and strides, read into the 1-D `into` if that is given."""
    entry = source.entries(section)[number]
    flat = torch.empty(entry.numel, dtype=entry.fields[field]) if into is None else into
    source.read(section, number, field, 0, flat)
    return flat.as_strided(entry.shape, entry.stride)


def _extra_of(source: Source) -> object:
    """What was kept beside; nothing is nothing, as None or as an empty dict."""
    extra = source.extra()
    return None if isinstance(extra, dict) and not extra else extra


def _exact(values: Tensor) -> Tensor:
    """Values as float64, complex ones as pairs."""
    return (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64)


def _damage(source: Source, section: str, number: int, field: str, entry: Entry, tell: Tell) -> Iterator[str]:
    """Read a field whole; go on behind what is damaged."""
    size = entry.fields[field].itemsize
    buffer = torch.empty(min(entry.numel, PART_ELEMENTS), dtype=entry.fields[field])
    for start in range(0, entry.numel, PART_ELEMENTS):
        part = buffer[: entry.numel - start]
        try:
            source.read(section, number, field, start, part)
        except CheckpointError as error:
            yield f"{entry.name or node_name(number)}, {field}: {error}"
        tell(len(part) * size)


def _strange_documents(source: Reader) -> Iterator[str]:
    """Find nodes whose own documents are missing, or not what the topmost one says of them."""
    for prefix in source.prefixes:
        document = load(source.path, source.tree.read(f"{prefix}{METADATA}", MOST_METADATA_BYTES))
        inline = document.get("consolidated_metadata")
        for name, wanted in (inline["metadata"] if isinstance(inline, dict) else {}).items():
            node = f"{prefix}{name}"
            try:
                found = load(f"{source.path}/{node}", source.tree.read(f"{node}/{METADATA}", MOST_METADATA_BYTES))
            except CheckpointError as error:
                yield str(error)
                continue
            if found != wanted:
                yield f"{source.path}/{node}/{METADATA} is not what {prefix}{METADATA} says of it"


def _digest(where: str, tensor: Tensor) -> int:
    """A number that stands for a tensor's form and values."""
    form, content = take_apart(tensor)
    digest = hashlib.sha256(repr((form.shape, form.stride, form.dtype)).encode())
    digest.update(content.numpy().data)
    return int.from_bytes(digest.digest()[:6])


def _keyed(*sides: Mapping[int, Entry]) -> list[dict[str, int]]:
    """Numbers by name, or by themselves if not all entries of all sides have a name of their own there."""
    named = [{entry.name: number for number, entry in side.items() if entry.name} for side in sides]
    if all(len(names) == len(side) for names, side in zip(named, sides, strict=True)):
        return named
    return [{str(number): number for number in side} for side in sides]


def _in_entries(
    place: str, one: Source, other: Source, section: str, numbers: tuple[int, int], tell: Tell
) -> Iterator[Difference]:
    left, right = one.entries(section)[numbers[0]], other.entries(section)[numbers[1]]
    for what in ("shape", "dtype", "step"):
        a, b = getattr(left, what), getattr(right, what)
        if a != b:
            yield Difference(place, f"{what} {a} and {b}")
    if dict(left.fields) != dict(right.fields):
        yield Difference(place, f"fields {_shown(left)} and {_shown(right)}")
    if left.shape != right.shape:
        return
    for field in left.fields:
        if left.fields[field] == right.fields.get(field):
            found = _in_values(one, other, section, numbers, field, tell)
            if found[1]:
                text = f"{found[1]:,} of {left.numel:,} elements differ, by at most {found[0]:.3g}"
                yield Difference(f"{place}/{field}", text, *found)


def _in_values(
    one: Source, other: Source, section: str, numbers: tuple[int, int], field: str, tell: Tell
) -> tuple[float, int]:
    """The largest absolute difference, and how many elements have other bits."""
    left, right = one.entries(section)[numbers[0]], other.entries(section)[numbers[1]]
    if any(size > 1 and a != b for size, a, b in zip(left.shape, left.stride, right.stride, strict=True)):
        pair = shaped(one, section, numbers[0], field), shaped(other, section, numbers[1], field)  # other orders
        tell(pair[0].nbytes)
        return _compare(pair[0].contiguous().view(-1), pair[1].contiguous().view(-1))
    largest, count = 0.0, 0
    both = zip(parts(one, section, numbers[0], field), parts(other, section, numbers[1], field), strict=True)
    for (_, a), (_, b) in both:
        part_largest, part_count = _compare(a, b)
        largest, count = max(largest, part_largest), count + part_count
        tell(a.nbytes)
    return largest, count


def _compare(one: Tensor, other: Tensor) -> tuple[float, int]:
    size = one.dtype.itemsize
    has_other_bits = (one.view(torch.uint8) != other.view(torch.uint8)).view(-1, size).any(1)
    count = int(has_other_bits.sum())
    if not count:
        return 0.0, 0
    distances = (_exact(one[has_other_bits]) - _exact(other[has_other_bits])).abs()
    return float(distances.nan_to_num(math.inf, math.inf).max()), count


def _shown(entry: Entry) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in entry.fields.items())
