"""Reads one checkpoint, of ours or re-chunked by another tool. Believes nothing: what is stored is checked against the
sizes of its files before anything is allocated for it, and every block against its checksum.

Holds the folder, so that it can be read to the end when it is replaced meanwhile. Follows no symbolic link inside.
"""

from __future__ import annotations

import errno
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.checkpoint import extra
from tierstore.checkpoint.blocks import Blocks, Buffer, checksum, decode
from tierstore.checkpoint.documents import METADATA, ArrayNode, group_attributes, load, parse_array
from tierstore.checkpoint.entries import SECTIONS, VALUES, Entry, Json, from_attributes, node_name
from tierstore.checkpoint.files import Files, resolved
from tierstore.checkpoint.geometry import CHECKSUM_BYTES, PAGE_BYTES
from tierstore.checkpoint.replacement import recover, unfinished_beside
from tierstore.checkpoint.root import MOST_METADATA_BYTES, parse_root
from tierstore.checkpoint.tree import Tree
from tierstore.checkpoint.writer import as_bytes
from tierstore.errors import (
    CheckpointValueError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    NoCheckpointError,
)

_NODE = re.compile(r"(?P<section>[a-z]+)(/(?P<number>[0-9]{6,12})(/(?P<field>[A-Za-z_][A-Za-z0-9_]{0,63}))?)?")
_MISSING = 2**64 - 1
_MOST_INDEXES = 16


class Reader:
    """A complete checkpoint, open for reading. A context manager; used by one thread.

    Raises NoCheckpointError, IncompleteCheckpointError, or DamagedCheckpointError, before anything large is allocated.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolved(path)
        self.tree = _open(self.path)
        self._blocks: Blocks | None = None
        self._indexes: OrderedDict[tuple[str, int], npt.NDArray[np.uint64]] = OrderedDict()
        try:
            document = load(f"{self.path}/{METADATA}", self.tree.read(METADATA, MOST_METADATA_BYTES))
            self.root = parse_root(self.path, document)
            self._entries, self._arrays = self._survey(_nodes(self.path, self.tree, document))
            self._check_counts()
            for name, array in self._arrays.items():
                self._check_files(name, array)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def header(self) -> Mapping[str, Json]:
        """What the writer was given as header."""
        return self.root.header

    def entries(self, section: str) -> Mapping[int, Entry]:
        """The entries of a section, by number, in order."""
        return MappingProxyType(self._entries.get(section, {}))

    def read(self, section: str, number: int, field: str, start: int, into: Tensor) -> None:
        """Read elements of a field from `start` on into a 1-D contiguous CPU tensor of the field's dtype.

        Raises DamagedCheckpointError for a block that is not what was written; `into` then holds anything.
        """
        name = f"{section}/{node_name(number)}/{field}"
        if name not in self._arrays:
            raise CheckpointValueError(f"{self.path} has no {name}")
        array, dtype = self._arrays[name], self._entries[section][number].fields[field]
        if into.dim() != 1 or into.dtype != dtype or into.device.type != "cpu" or not into.is_contiguous():
            raise CheckpointValueError(f"{name} is read into 1-D contiguous CPU tensors of {dtype}")
        if start < 0 or start + len(into) > array.geometry.elements:
            raise CheckpointValueError(
                f"{name} has {array.geometry.elements:,} elements, not those from {start:,} to {start + len(into):,}"
            )
        if len(into):
            self._read(name, array, start, as_bytes(into).numpy())

    def extra(self) -> Any:
        """What the writer was told to keep, with the types it had. Tensors are on the CPU."""
        return extra.decode(self.root.extra, self._tensor)

    def _tensor(self, number: int) -> Tensor:
        entry = self._entries["extra"].get(number) if type(number) is int else None
        if entry is None or dict(entry.fields) != {VALUES: entry.dtype}:
            raise DamagedCheckpointError(f"{self.path}: extra has no tensor {str(number)[:40]}")
        flat = torch.empty(entry.numel, dtype=entry.dtype)
        self.read("extra", number, VALUES, 0, flat)
        return flat.as_strided(entry.shape, entry.stride)

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        self.tree.close()

    def _read(self, name: str, array: ArrayNode, start: int, target: Buffer) -> None:
        geometry, blocks = array.geometry, self._buffers()
        blocks.forget_error()
        numbers = geometry.blocks_of(start, len(target) // geometry.itemsize)
        try:
            for number in numbers:
                place = self._place(name, array, number)
                work = partial(self._read_block, name, array, number, place, start, target)
                if len(numbers) == 1:
                    blocks.work_here(work)  # handing it to a thread takes longer than the rest of it
                else:
                    blocks.submit(work, blocks.wait_for_buffer())
        finally:
            blocks.wait()  # whatever happens, nothing is written into the caller's memory afterwards
        blocks.check()

    def _read_block(
        self,
        name: str,
        array: ArrayNode,
        number: int,
        place: tuple[int, int],
        start: int,
        target: Buffer,
        buffer: Buffer,
    ) -> None:
        """Read one block and copy what is wanted of it, on a thread."""
        geometry = array.geometry
        shard, _ = geometry.place_of(number)
        stored = self.tree.read_into(f"{name}/{array.file_of(shard)}", *place, buffer)
        begin, end = geometry.range_of(number)
        values = decode(f"{self.path}/{name}/{array.file_of(shard)}, elements {begin:,} to {end:,}", geometry, stored)
        count = len(target) // geometry.itemsize
        first, last = max(begin, start), min(end, start + count)
        part = slice((first - begin) * geometry.itemsize, (last - begin) * geometry.itemsize)
        target[(first - start) * geometry.itemsize : (last - start) * geometry.itemsize] = values[part]

    def _buffers(self) -> Blocks:
        if self._blocks is None:
            self._blocks = Blocks(max(array.geometry.block_bytes for array in self._arrays.values()))
        return self._blocks

    def _place(self, name: str, array: ArrayNode, number: int) -> tuple[int, int]:
        """Where a block lies in its file: offset and length, checked against the file's size."""
        geometry = array.geometry
        shard, place = geometry.place_of(number)
        file = f"{name}/{array.file_of(shard)}"
        size = self.tree.size(file)
        offset, nbytes = 0, size
        if geometry.shard_blocks:
            offset, nbytes = (int(value) for value in self._index(file, array, shard, size)[place])
        most = geometry.block_bytes + (CHECKSUM_BYTES if geometry.compression == "none" else PAGE_BYTES)
        if offset == _MISSING or offset + nbytes > size or nbytes > most:
            raise DamagedCheckpointError(
                f"{self.path}/{file} has chunk {place} of {name} at {offset}, {nbytes} bytes, in a file of {size:,}"
            )
        return offset, nbytes

    def _index(self, file: str, array: ArrayNode, shard: int, size: int) -> npt.NDArray[np.uint64]:
        """The index of a shard; the last few are kept."""
        if (index := self._indexes.get((file, shard))) is not None:
            return index
        geometry = array.geometry
        nbytes = geometry.index_bytes
        if size < nbytes:
            raise DamagedCheckpointError(f"{self.path}/{file} has {size:,} bytes, less than its index of {nbytes:,}")
        stored = self.tree.read_range(file, 0 if geometry.is_index_first else size - nbytes, nbytes)
        if geometry.has_index_checksum:
            stored, wanted = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
            if checksum(stored) != wanted:
                raise DamagedCheckpointError(f"{self.path}/{file} is damaged: the checksum of its index is wrong")
        index = np.frombuffer(stored, "<u8").reshape(-1, 2)
        self._indexes[file, shard] = index
        if len(self._indexes) > _MOST_INDEXES:
            self._indexes.popitem(last=False)
        return index

    def _survey(self, nodes: Mapping[str, Json]) -> tuple[dict[str, dict[int, Entry]], dict[str, ArrayNode]]:
        """Read all entries and arrays from the documents."""
        entries: dict[str, dict[int, Entry]] = {section: {} for section in SECTIONS}
        arrays: dict[str, ArrayNode] = {}
        wanted: set[str] = set()
        for name in sorted(nodes):
            match = _NODE.fullmatch(name)
            where = f"{self.path}/{name}"
            if match is None or match["section"] not in SECTIONS or not isinstance(nodes[name], dict):
                raise DamagedCheckpointError(f"{self.path} has a node {name[:100]!r}, which no checkpoint has")
            if match["field"] is not None:
                continue
            attributes = group_attributes(where, nodes[name])
            if match["number"] is None:
                continue
            number = int(match["number"])
            if node_name(number) != match["number"]:
                raise DamagedCheckpointError(f"{where} is not how number {number} is written")
            entry = entries[match["section"]][number] = from_attributes(where, attributes)
            for field, dtype in entry.fields.items():
                path = f"{name}/{field}"
                if path not in nodes:
                    raise IncompleteCheckpointError(f"{self.path}/{path} is missing: the checkpoint is not complete")
                arrays[path] = parse_array(f"{self.path}/{path}", nodes[path], entry.numel, dtype)
                wanted.add(path)
        if unknown := [name for name in nodes if name.count("/") == 2 and name not in wanted]:
            raise DamagedCheckpointError(f"{self.path} has an array {unknown[0]!r} that its group does not name")
        return {section: dict(sorted(found.items())) for section, found in entries.items()}, arrays

    def _check_counts(self) -> None:
        for section in SECTIONS:
            found, wanted = len(self._entries[section]), self.root.counts.get(section, 0)
            if found != wanted:
                raise IncompleteCheckpointError(
                    f"{self.path} has {found:,} entries in {section}, saved were {wanted:,}: it is not complete"
                )

    def _check_files(self, name: str, array: ArrayNode) -> None:
        """Require as many stored bytes as the array's shape needs."""
        geometry = array.geometry
        for shard in range(geometry.shards):
            file = f"{name}/{array.file_of(shard)}"
            size = self.tree.size(file)
            each = geometry.block_bytes if geometry.compression == "none" else 1
            least = geometry.index_bytes + geometry.blocks_in(shard) * each
            if size < least:
                raise IncompleteCheckpointError(
                    f"{self.path}/{file} has {size:,} bytes, its array needs {least:,}: it is not complete"
                )


def _open(path: str) -> Tree:
    """Open the folder of a checkpoint, after finishing a replacement that was broken off."""
    if not os.path.lexists(path):
        recover(path, Files(), wait=True)
    if not os.path.lexists(path):
        left = unfinished_beside(path)
        hint = f"; {left[0]} beside it was never finished, and cannot be loaded" if left else ""
        raise NoCheckpointError(errno.ENOENT, f"there is no checkpoint{hint}", path)
    tree = Tree(path)
    if not tree.has(METADATA):
        tree.close()
        is_left = any(os.path.isdir(os.path.join(path, section)) for section in SECTIONS)
        if is_left:
            raise IncompleteCheckpointError(f"{path} was never finished: it has no {METADATA}; it cannot be loaded")
        raise NoCheckpointError(2, f"this is no checkpoint: it has no {METADATA}", path)
    return tree


def _nodes(path: str, tree: Tree, document: Mapping[str, Json]) -> Mapping[str, Json]:
    """The documents of all nodes: from the topmost one, or from each node's own where it has none."""
    inline = document.get("consolidated_metadata")
    if inline is None:
        return dict(_walk(path, tree, ""))
    nodes = inline.get("metadata") if isinstance(inline, dict) else None
    if not isinstance(nodes, dict):
        raise DamagedCheckpointError(f"{path}/{METADATA}: its consolidated_metadata has no metadata")
    return nodes


def _walk(path: str, tree: Tree, folder: str) -> Iterator[tuple[str, Json]]:
    for name in tree.folders(folder):
        node = f"{folder}/{name}" if folder else name
        if not tree.has(f"{node}/{METADATA}"):
            continue  # chunks of an array
        document = load(f"{path}/{node}/{METADATA}", tree.read(f"{node}/{METADATA}", MOST_METADATA_BYTES))
        yield node, document
        if node.count("/") < 2:
            yield from _walk(path, tree, node)
