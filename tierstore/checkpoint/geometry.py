"""How the elements of one array lie in blocks, and blocks in files. Pure arithmetic.

A **block** is what is checksummed, compressed and read at once: an inner chunk, in Zarr's words. Blocks lie in
**shards**, files with an index at the end; a small array is a single block, a file of its own without an index. Every
block in a shard is stored whole, the last one padded with zeros. Without compression each block has a known place in
its shard, at a multiple of a page, so that blocks can be written in any order and directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierstore.layout import CUT_ELEMENTS, round_up

PAGE_BYTES = 4096
BLOCK_BYTES = 2 << 20
"""At most, of a block that is written here. With half of it threads take twice as many turns at the interpreter; twice
of it no longer stays in a core's own cache while it is copied and summed. Both take longer.
"""
SINGLE_BYTES = 1 << 20
"""At most, of an array that is written as a file of one block; larger ones are written past the page cache."""
SHARD_BLOCKS = 256
CHECKSUM_BYTES = 4
_INDEX_ENTRY_BYTES = 16

Compression = Literal["none", "zstd"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of one array. `shard_blocks` 0: not sharded, each block is a file."""

    elements: int
    itemsize: int
    block_elements: int
    shard_blocks: int
    compression: Compression = "none"
    has_checksum: bool = True
    is_index_first: bool = False
    has_index_checksum: bool = True

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.elements // self.block_elements)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block's values."""
        return self.block_elements * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Room for a block and its checksum, where they are written here without compression."""
        return round_up(self.block_bytes + CHECKSUM_BYTES, PAGE_BYTES)

    @property
    def shards(self) -> int:
        """How many files there are."""
        return -(-self.blocks // (self.shard_blocks or 1))

    @property
    def index_bytes(self) -> int:
        """Bytes of a shard's index; it has an entry for each of `shard_blocks`, also where the array ends before."""
        if not self.shard_blocks:
            return 0
        return self.shard_blocks * _INDEX_ENTRY_BYTES + (CHECKSUM_BYTES if self.has_index_checksum else 0)

    def index_offset(self, shard_bytes: int) -> int:
        """Where the index of a shard of so many bytes begins."""
        return 0 if self.is_index_first else max(0, shard_bytes - self.index_bytes)

    def blocks_in(self, shard: int) -> int:
        """How many blocks of the array lie in a shard."""
        width = self.shard_blocks or 1
        return min(width, self.blocks - shard * width)

    def place_of(self, block: int) -> tuple[int, int]:
        """The shard of a block and its number there."""
        return divmod(block, self.shard_blocks or 1)

    def range_of(self, block: int) -> tuple[int, int]:
        """The elements of the array that a block holds: begin and end."""
        begin = block * self.block_elements
        return begin, min(begin + self.block_elements, self.elements)

    def blocks_of(self, start: int, count: int) -> range:
        """The blocks that hold any of `count` elements from `start` on."""
        if count == 0:
            return range(0)
        return range(start // self.block_elements, (start + count - 1) // self.block_elements + 1)


def geometry_for(elements: int, itemsize: int, compression: Compression) -> Geometry:
    """Choose the geometry of an array to be written: blocks alike, of at most BLOCK_BYTES, cut where spans are."""
    if elements * itemsize <= SINGLE_BYTES:
        return Geometry(elements, itemsize, max(elements, 1), 0, compression)
    count = -(-elements * itemsize // BLOCK_BYTES)
    block = round_up(-(-elements // count), CUT_ELEMENTS)
    blocks = -(-elements // block)
    return Geometry(elements, itemsize, block, min(blocks, SHARD_BLOCKS), compression)
