"""Reads tensors of a checkpoint, or parts of them, in the storage order of whoever takes them, bit by bit.

Where that is the order in which they are stored, a bit is read straight into its place, whatever parts it lies in. Else
what is wanted of the tensor is read and reordered at once, one tensor at a time, in memory or, if it is large, in a
mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.parts import Part, Read, gather, is_same_order, strides_in_order_of
from tierstore.mapping import map_host_memory
from tierstore.results import Results

WINDOW_BYTES = 4 << 20
"""Of a field, read at once for what is smaller."""


class Readable(Protocol):
    """A checkpoint that can be read, whatever its format."""

    path: str

    @property
    def header(self) -> Mapping[str, Any]:
        """What its writer had to say of the whole."""

    def entries(self, section: str) -> Mapping[int, Entry]:
        """What there is in a section, by number."""

    def parts(self, section: str, number: int, field: str) -> Sequence[tuple[Part, Read]]:
        """The parts in which a field is stored, and what reads elements of each in its own storage order."""


class Source:
    """Tensors of one checkpoint. `results` gives the memory of those that must be reordered."""

    def __init__(self, reader: Readable, results: Results) -> None:
        self.reader = reader
        self._results = results
        self._reordered: dict[str, Tensor] = {}  # fields of what was read last
        self._windows: dict[str, tuple[int, Tensor]] = {}  # the same: elements from one on
        self._buffers: dict[str, Tensor] = {}
        self._of: tuple[str, int, Part] | None = None

    def read(self, section: str, number: int, field: str, part: Part, start: int, into: Tensor) -> None:
        """Read elements of a part from `start` on, in its storage order, into a 1-D CPU tensor of the dtype."""
        entry = self.reader.entries(section)[number]
        if self._of != (section, number, part):
            self._reordered.clear()
            self._windows.clear()
            self._of = section, number, part
        in_order = strides_in_order_of(part.shape, entry.stride)
        stored = self.reader.parts(section, number, field)
        if is_same_order(part.shape, part.stride, in_order):
            self._read_in_windows(part, stored, field, start, into)
            return
        if field not in self._reordered:
            as_stored = Part(part.offsets, part.shape, in_order)
            self._reordered[field] = self._reorder(as_stored, part, stored, entry.fields[field])
        into.copy_(self._reordered[field][start : start + len(into)])

    def _read_in_windows(
        self, part: Part, stored: Sequence[tuple[Part, Read]], field: str, start: int, into: Tensor
    ) -> None:
        """Read small bits from what was read at once: else every block would be read once for each of them."""
        size = WINDOW_BYTES // into.dtype.itemsize
        if len(into) >= size:
            gather(part, stored, start, into)
            return
        done = 0
        while done < len(into):
            begin, values = self._windows.get(field, (0, into[:0]))
            first = start + done - begin
            if not 0 <= first < len(values):
                begin, first = start + done, 0
                self._windows.pop(field, None)  # whose memory is filled anew, or only in part if that fails
                values = self._memory(field).view(into.dtype)[: min(size, part.numel - begin)]
                gather(part, stored, begin, values)
                self._windows[field] = begin, values
            count = min(len(into) - done, len(values) - first)
            into[done : done + count].copy_(values[first : first + count])
            done += count

    def _memory(self, field: str) -> Tensor:
        """Of a field's window, used again for the next: new memory takes longer to touch than to read."""
        if field not in self._buffers:
            self._buffers[field] = map_host_memory(WINDOW_BYTES)
        return self._buffers[field]

    def _reorder(
        self, as_stored: Part, wanted: Part, stored: Sequence[tuple[Part, Read]], dtype: torch.dtype
    ) -> Tensor:
        values = self._results.allocate(as_stored.numel, dtype)
        gather(as_stored, stored, 0, values)
        reordered = self._results.allocate(wanted.numel, dtype)
        reordered.as_strided(wanted.shape, wanted.stride).copy_(values.as_strided(wanted.shape, as_stored.stride))
        return reordered
