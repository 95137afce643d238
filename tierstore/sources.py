"""Reads tensors of a checkpoint, or parts of them, in the storage order of whoever takes them, bit by bit.

Who wants a bit says where it goes, and bits that lie together are read at once, in a **window**. Where a part is stored
as it is wanted, that is a block: threads read it, check it and copy each bit to its place, while the next bits are
asked for. Reading straight to the places would save a copy; but weights lie on small pages, in which a disk brings a
block up to twice as slowly as into the readers' buffers. What must be put together of several parts is read where it is
asked for. Where the order is another one, what is wanted of the tensor is read and reordered at once, one tensor at a
time, in memory or, if it is large, in a mapped file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore.checkpoint.blocks import Buffer
from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.parts import Part, Read, gather, is_same_order, strides_in_order_of
from tierstore.checkpoint.reader import StoredBlocks
from tierstore.mapping import map_host_memory
from tierstore.results import Results

WINDOW_BYTES = 4 << 20
"""Read at once for what is smaller, where windows are not blocks."""
GRAIN = 8
"""Bits of a block end where a block does, or at what was asked for: split masters are put in place by eights."""

Put = Callable[[int, Tensor], None]
"""Takes values, 1-D, which are those from an element of what was asked for on. They are valid until it returns."""
Place = Tensor | Callable[[Tensor], None]
"""Where a bit belongs, 1-D and without gaps; or what takes it."""


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

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> StoredBlocks | None:
        """What reads a part of a field block by block, if it is stored as such, and in blocks."""


class Window:
    """Elements from `first` on, at most up to `end`, read at once: when all are asked for, or when `begin` is called.

    For the thread that asks, but for `wait`.
    """

    def __init__(self, first: int, end: int, read: Callable[[Window], Future[None] | None]) -> None:
        self.first = first
        self.next = first
        self.end = end
        self.is_begun = first == end
        self._read = read
        self._bits: list[tuple[int, int, Place]] = []
        self._reading: Future[None] | None = None

    def add(self, count: int, place: Place) -> None:
        """Hear where the next elements go. Raises what goes wrong if they are the last, and are read here."""
        self._bits.append((self.next - self.first, count, place))
        self.next += count
        if self.next == self.end:
            self.begin()

    def begin(self) -> None:
        """Read what was asked for so far, if that has not begun. Raises what goes wrong if it is read here."""
        if not self.is_begun:
            self.is_begun = True
            self._reading = self._read(self)

    def deal(self, values: Tensor) -> None:
        """Give each bit its values; these begin with the window's first element."""
        for start, count, place in self._bits:
            if isinstance(place, Tensor):
                place.copy_(values[start : start + count])
            else:
                place(values[start : start + count])

    def wait(self) -> None:
        """Wait until all bits are in their places, which must have begun. Raises what went wrong."""
        if self._reading is not None:
            self._reading.result()


class _Windows:
    """A field whose elements are read in windows of up to `size`; straight to their place, by `straight`, if more."""

    def __init__(
        self, numel: int, size: int, read: Callable[[Window], Future[None] | None], straight: Read | None
    ) -> None:
        self._numel = numel
        self._size = size
        self._read = read
        self._straight = straight
        self._last = Window(0, 0, read)

    def want(self, start: int, count: int, into: Tensor | Put) -> list[Window]:
        if self._straight is not None and isinstance(into, Tensor) and count >= self._size:
            self._straight(start, into)
            return []
        windows, done = [], 0
        while done < count:
            window = self._window_from(start + done)
            bit = min(count - done, window.end - window.next)
            window.add(bit, into[done : done + bit] if isinstance(into, Tensor) else partial(into, done))
            windows.append(window)
            done += bit
        return windows

    def begin(self) -> None:
        self._last.begin()

    def _window_from(self, start: int) -> Window:
        """The window whose next element this is; a new one if the last one has begun, or ends elsewhere."""
        if self._last.is_begun or self._last.next != start:
            self._last.begin()
            self._last = Window(start, min((start // self._size + 1) * self._size, self._numel), self._read)
        return self._last


class _Reordered:
    """A field that was read whole, in the order in which it is wanted."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def want(self, start: int, count: int, into: Tensor | Put) -> list[Window]:
        values = self._values[start : start + count]
        if isinstance(into, Tensor):
            into.copy_(values)
        else:
            into(0, values)
        return []

    def begin(self) -> None:
        pass


class Source:
    """Tensors of one checkpoint, for one thread at a time. `results` gives the memory of those that are reordered."""

    def __init__(self, reader: Readable, results: Results) -> None:
        self.reader = reader
        self._results = results
        self._of: tuple[str, int, Part] | None = None
        self._fields: dict[str, _Windows | _Reordered] = {}  # of what was asked for last
        self._memory: Tensor | None = None

    def again(self) -> Source:
        """Another one of the same checkpoint, which goes through it in an order of its own; for the same thread."""
        return Source(self.reader, self._results)

    def read(self, section: str, number: int, field: str, part: Part, start: int, into: Tensor) -> None:
        """Read elements of a part from `start` on, in its storage order, into a 1-D CPU tensor of the dtype."""
        for window in self.want(section, number, field, part, start, len(into), into):
            window.begin()
            window.wait()

    def want(
        self, section: str, number: int, field: str, part: Part, start: int, count: int, into: Tensor | Put
    ) -> list[Window]:
        """Ask for elements of a part from `start` on, in its storage order; return the windows in which they lie.

        They are in `into`, a 1-D CPU tensor of the dtype, once all windows were begun and waited for; or `into` takes
        them, bit by bit, in any order, on any threads. Windows of another tensor, or part, begin with this call.
        """
        if self._of != (section, number, part):
            for one in self._fields.values():
                one.begin()
            self._fields.clear()
            self._of = section, number, part
        if field not in self._fields:
            self._fields[field] = self._found(section, number, field, part)
        return self._fields[field].want(start, count, into)

    def _found(self, section: str, number: int, field: str, part: Part) -> _Windows | _Reordered:
        """How a field is read."""
        entry, stored = self.reader.entries(section)[number], self.reader.parts(section, number, field)
        dtype, in_order = entry.fields[field], strides_in_order_of(part.shape, entry.stride)
        if not is_same_order(part.shape, part.stride, in_order):
            return _Reordered(self._reorder(Part(part.offsets, part.shape, in_order), part, stored, dtype))
        blocks = self.reader.blocks(section, number, field, part)
        if blocks is not None and (blocks.elements % GRAIN == 0 or blocks.elements >= part.numel):
            return _Windows(part.numel, blocks.elements, partial(_begin_block, blocks, dtype), None)
        straight = partial(gather, part, stored)
        size = WINDOW_BYTES // dtype.itemsize
        return _Windows(part.numel, size, partial(self._read_here, straight, dtype), straight)

    def _read_here(self, read: Read, dtype: torch.dtype, window: Window) -> None:
        """Read a window on this thread, in memory that serves the next one too: touching new one takes longer."""
        if self._memory is None:
            self._memory = map_host_memory(WINDOW_BYTES)
        values = self._memory.view(dtype)[: window.next - window.first]
        read(window.first, values)
        window.deal(values)

    def _reorder(
        self, as_stored: Part, wanted: Part, stored: Sequence[tuple[Part, Read]], dtype: torch.dtype
    ) -> Tensor:
        values = self._results.allocate(as_stored.numel, dtype)
        gather(as_stored, stored, 0, values)
        reordered = self._results.allocate(wanted.numel, dtype)
        reordered.as_strided(wanted.shape, wanted.stride).copy_(values.as_strided(wanted.shape, as_stored.stride))
        return reordered


def _begin_block(blocks: StoredBlocks, dtype: torch.dtype, window: Window) -> Future[None] | None:
    number, skipped = divmod(window.first, blocks.elements)

    def deal(stored: Buffer) -> None:
        values = torch.from_numpy(stored)
        if values.data_ptr() % dtype.itemsize:  # another tool's, anywhere in its file
            values = values.clone()
        window.deal(values.view(dtype)[skipped:])

    return blocks.begin(number, deal)
