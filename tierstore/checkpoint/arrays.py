"""Writes one array, a part at a time, in any order: parts become blocks, full blocks go to their files.

Every element is given exactly once. A block of which only a part is known waits in memory that its owner provides, and
is written from there if it can be. Of a small array that is all there is; others go to shards directly, and a shard is
synced when its index, which is the last of it, is written.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierstore.checkpoint.blocks import Blocks, Buffer, checksum, encode, map_buffers
from tierstore.checkpoint.documents import ArrayNode
from tierstore.checkpoint.files import Files
from tierstore.checkpoint.geometry import BLOCK_BYTES, PAGE_BYTES
from tierstore.errors import CheckpointValueError
from tierstore.layout import round_up
from tierstore.results import Results

GRANTED_BYTES = 32 << 20
MAPPED_AT_ONCE = 4
"""Mapped together, so that most of their memory lies on huge pages."""
_MISSING = np.uint64(2**64 - 1)
"""In an index: a block that the array does not have."""


@dataclass(slots=True)
class _Partial:
    """A block of which not all elements have been given: its bytes, and the ranges of elements that are there."""

    memory: Memory
    ranges: list[tuple[int, int]]
    missing: int


@dataclass(slots=True)
class _Shard:
    """A shard being written: its index so far, how many blocks are to come, where the next compressed one goes."""

    index: npt.NDArray[np.uint64]
    missing: int
    end: int


class Memory(NamedTuple):
    """Where a block waits; it is written from there if that is ordinary memory."""

    buffer: Buffer
    is_ordinary: bool


class Waiting:
    """Memory for blocks of which only a part is known: ordinary up to GRANTED_BYTES, mapped from `folder` beyond."""

    def __init__(self, folder: Path) -> None:
        self._mapped = Results(0, folder)
        self._free: list[Memory] = []
        self._left = GRANTED_BYTES // BLOCK_BYTES

    def take(self) -> Memory:
        """Take memory for a block."""
        if not self._free and self._left:
            count = min(self._left, MAPPED_AT_ONCE)
            self._left -= count
            self._free += [Memory(buffer, True) for buffer in map_buffers(BLOCK_BYTES, count)]
        if not self._free:
            return Memory(self._mapped.allocate(BLOCK_BYTES, torch.uint8).numpy(), False)
        return self._free.pop()

    def give_back(self, memory: Memory) -> None:
        """Let another block have it."""
        self._free.append(memory)


class Array:
    """One array at `path`, a folder that exists. `direct`: files are written past the page cache."""

    def __init__(self, path: str, node: ArrayNode, files: Files, blocks: Blocks, *, direct: bool) -> None:
        self._path = path
        self._node = node
        self._files = files
        self._blocks = blocks
        self._direct = direct
        self._begun = np.zeros(node.geometry.blocks, np.bool_)
        self._partials: dict[int, _Partial] = {}
        self._shards: dict[int, _Shard] = {}
        self._lock = threading.Lock()
        self.missing = node.geometry.elements

    def write(self, start: int, values: Buffer, waiting: Waiting) -> None:
        """Take over elements from `start` on, given as their bytes. They have been copied when this returns."""
        geometry = self._node.geometry
        count = len(values) // geometry.itemsize
        if start < 0 or start + count > geometry.elements:
            raise CheckpointValueError(
                f"{self._path}: elements {start:,} to {start + count:,} were given of {geometry.elements:,}"
            )
        for number in geometry.blocks_of(start, count):
            begin, end = geometry.range_of(number)
            first, last = max(begin, start), min(end, start + count)
            part = values[(first - start) * geometry.itemsize : (last - start) * geometry.itemsize]
            if (first, last) == (begin, end):
                self._begin(number)
                buffer = self._blocks.wait_for_buffer()
                buffer[: len(part)] = part
                self._finish(number, buffer, len(part))
            else:
                self._fill(number, first - begin, part, end - begin, waiting)
        self.missing -= count

    def _begin(self, number: int) -> None:
        if self._begun[number]:
            begin, end = self._node.geometry.range_of(number)
            raise CheckpointValueError(f"{self._path}: some of the elements {begin:,} to {end:,} were given twice")
        self._begun[number] = True

    def _fill(self, number: int, first: int, part: Buffer, elements: int, waiting: Waiting) -> None:
        """Add a part to a block; `first` counts from the block's first element."""
        itemsize = self._node.geometry.itemsize
        if (partial := self._partials.get(number)) is None:
            self._begin(number)
            partial = self._partials[number] = _Partial(waiting.take(), [], elements)
        memory = partial.memory.buffer
        last = first + len(part) // itemsize
        if any(first < end and begin < last for begin, end in partial.ranges):
            raise CheckpointValueError(f"{self._path}: some elements of block {number} were given twice")
        partial.ranges.append((first, last))
        memory[first * itemsize : last * itemsize] = part
        partial.missing -= last - first
        if partial.missing == 0:
            del self._partials[number]
            buffer, nbytes = self._blocks.wait_for_buffer(), elements * itemsize
            if partial.memory.is_ordinary:  # the two change places, and nothing is copied
                waiting.give_back(Memory(buffer, True))
                buffer = memory
            else:
                buffer[:nbytes] = memory[:nbytes]
                waiting.give_back(partial.memory)
            self._finish(number, buffer, nbytes)

    def _finish(self, number: int, buffer: Buffer, nbytes: int) -> None:
        """Let a block be written that begins a buffer, and give that back."""
        geometry = self._node.geometry
        try:
            self._blocks.check()
            buffer[nbytes : geometry.block_bytes] = 0  # the last block's rest
            if geometry.shard_blocks:
                self._blocks.submit(lambda filled: self._store(number, filled), buffer)
                return
            size = encode(geometry, buffer)
            self._files.create(f"{self._path}/{self._node.file_of(0)}", buffer[:size].tobytes())
        except BaseException:
            self._blocks.give_back(buffer)
            raise
        self._blocks.give_back(buffer)

    def _store(self, number: int, buffer: Buffer) -> None:
        """Write a block to its shard, on a thread; the last one writes the index."""
        geometry = self._node.geometry
        size = encode(geometry, buffer)
        padded = round_up(size, PAGE_BYTES)
        buffer[size:padded] = 0
        shard_number, place = geometry.place_of(number)
        path = f"{self._path}/{self._node.file_of(shard_number)}"
        with self._lock:
            shard = self._shards.get(shard_number) or self._make_shard(shard_number, path)
            offset = place * geometry.slot_bytes if geometry.compression == "none" else shard.end
            shard.end += padded
            shard.index[place] = offset, size
        self._files.put(path, buffer[:padded], offset, direct=self._direct)
        with self._lock:
            shard.missing -= 1
            if is_last := shard.missing == 0:
                del self._shards[shard_number]
        if is_last:
            index = shard.index.astype("<u8").tobytes()
            self._files.put(path, index + checksum(index), shard.end, direct=False)
            self._files.sync(path)

    def _make_shard(self, number: int, path: str) -> _Shard:
        geometry = self._node.geometry
        count = geometry.blocks_in(number)
        room = count * geometry.slot_bytes + geometry.index_bytes if geometry.compression == "none" else 0
        self._files.reserve(path, room)
        shard = _Shard(np.full((geometry.shard_blocks, 2), _MISSING, np.uint64), count, 0)
        self._shards[number] = shard
        return shard
