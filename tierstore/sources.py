"""Reads tensors of a checkpoint in the storage order of whoever takes them, part by part.

Where that is the order in which they are stored, a part is read straight into its place. Else the tensor is read and
reordered as a whole, one at a time, in memory or, if it is large, in a mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from tierstore.checkpoint.entries import Entry
from tierstore.mapping import map_host_memory
from tierstore.results import Results

WINDOW_BYTES = 4 << 20
"""Of a field, read at once for parts that are smaller."""


class Readable(Protocol):
    """A checkpoint that can be read, whatever its format."""

    path: str

    @property
    def header(self) -> Mapping[str, Any]:
        """What its writer had to say of the whole."""

    def entries(self, section: str) -> Mapping[int, Entry]:
        """What there is in a section, by number."""

    def read(self, section: str, number: int, field: str, start: int, into: Tensor) -> None:
        """Read elements of a field, in the entry's storage order, into a 1-D contiguous CPU tensor of its dtype."""


class Source:
    """Tensors of one checkpoint. `results` gives the memory of those that must be reordered."""

    def __init__(self, reader: Readable, results: Results) -> None:
        self.reader = reader
        self._results = results
        self._windows: dict[str, tuple[int, Tensor]] = {}  # the same: elements from one on
        self._buffers: dict[str, Tensor] = {}
        self._reordered: dict[str, Tensor] = {}  # fields of the tensor that was read last
        self._of: tuple[str, int, tuple[int, ...]] | None = None

    def read(self, section: str, number: int, field: str, strides: Sequence[int], start: int, into: Tensor) -> None:
        """Read elements from `start` on, in the order of dense `strides`, into a 1-D CPU tensor of the dtype."""
        entry = self.reader.entries(section)[number]
        if self._of != (section, number, tuple(strides)):
            self._reordered.clear()
            self._windows.clear()
            self._of = section, number, tuple(strides)
        if is_same_order(entry.shape, entry.stride, strides):
            self._read_in_windows(entry, section, number, field, start, into)
            return
        if field not in self._reordered:
            self._reordered[field] = self._reorder(section, number, field, entry, strides)
        into.copy_(self._reordered[field][start : start + len(into)])

    def _read_in_windows(self, entry: Entry, section: str, number: int, field: str, start: int, into: Tensor) -> None:
        """Read small parts from what was read at once: else every block would be read once for each part of it."""
        size = WINDOW_BYTES // into.dtype.itemsize
        if len(into) >= size:
            self.reader.read(section, number, field, start, into)
            return
        done = 0
        while done < len(into):
            begin, values = self._windows.get(field, (0, into[:0]))
            first = start + done - begin
            if not 0 <= first < len(values):
                begin, first = start + done, 0
                self._windows.pop(field, None)  # whose memory is filled anew, or only in part if that fails
                values = self._memory(field).view(into.dtype)[: min(size, entry.numel - begin)]
                self.reader.read(section, number, field, begin, values)
                self._windows[field] = begin, values
            count = min(len(into) - done, len(values) - first)
            into[done : done + count].copy_(values[first : first + count])
            done += count

    def _memory(self, field: str) -> Tensor:
        """Of a field's window, used again for the next: new memory takes longer to touch than to read."""
        if field not in self._buffers:
            self._buffers[field] = map_host_memory(WINDOW_BYTES)
        return self._buffers[field]

    def _reorder(self, section: str, number: int, field: str, entry: Entry, strides: Sequence[int]) -> Tensor:
        stored = self._results.allocate(entry.numel, entry.fields[field])
        self.reader.read(section, number, field, 0, stored)
        wanted = self._results.allocate(entry.numel, entry.fields[field])
        wanted.as_strided(entry.shape, tuple(strides)).copy_(stored.as_strided(entry.shape, entry.stride))
        return wanted


def is_same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether dense strides of one shape mean one order of elements."""
    return all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))
