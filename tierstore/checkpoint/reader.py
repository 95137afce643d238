"""Reads one checkpoint, of ours or re-chunked by another tool. Believes nothing: what is stored is checked against the
sizes of its files before anything is allocated for it, and every block against its checksum.

Holds the folder, so that it can be read to the end when it is replaced meanwhile. Follows no symbolic link inside.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tierstore.checkpoint import extra
from tierstore.checkpoint.blocks import Buffer, Readers, checksum, decode
from tierstore.checkpoint.documents import METADATA, ArrayNode, group_attributes, load, parse_array
from tierstore.checkpoint.entries import SECTIONS, VALUES, Entry, Json, from_attributes, node_name
from tierstore.checkpoint.files import Files, resolved
from tierstore.checkpoint.geometry import CHECKSUM_BYTES, PAGE_BYTES, Geometry
from tierstore.checkpoint.kinds import as_bytes
from tierstore.checkpoint.parts import Part, Read, gather
from tierstore.checkpoint.replacement import recover, unfinished_beside
from tierstore.checkpoint.root import MOST_METADATA_BYTES, Root, parse_root
from tierstore.checkpoint.tree import Tree
from tierstore.checkpoint.wholes import RANKS, folder_of, unite
from tierstore.errors import CheckpointValueError, DamagedCheckpointError, IncompleteCheckpointError, NoCheckpointError
from tierstore.signals import deferred

_NODE = re.compile(r"(?P<section>[a-z]+)(/(?P<number>[0-9]{6,12})(/(?P<field>[A-Za-z_][A-Za-z0-9_]{0,63}))?)?")
_MISSING = 2**64 - 1
_MOST_INDEXES = 16
_SMALL_BYTES = 256 << 10

Use = Callable[[Buffer], None]
"""Takes the values of a block, as the bytes of a whole one; they are valid until it returns."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """What one writer has written, at the top or below `ranks`. Names of arrays are those from the top."""

    root: Root
    entries: Mapping[str, Mapping[int, Entry]]
    arrays: Mapping[str, ArrayNode]
    prefix: str

    def node_of(self, section: str, number: int) -> str:
        """The group of an entry."""
        return f"{self.prefix}{section}/{node_name(number)}"


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """An array of blocks of so many elements; `begin` reads the one of a number, for whoever uses it, on a thread.

    Or, with None for an answer, at once and here, if the array is so small that handing it to a thread takes longer.
    """

    elements: int
    begin: Callable[[int, Use], Future[None] | None]


class _Index:
    """Offset and length of each block of a shard, once somebody who holds the lock has read them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: npt.NDArray[np.uint64] | None = None


class Reader:
    """A complete checkpoint, open for reading. A context manager; used by one thread, which others read for.

    Raises NoCheckpointError, IncompleteCheckpointError, or DamagedCheckpointError, before anything large is allocated.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolved(path)
        self.tree = _open(self.path)
        self._readers: Readers | None = None
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._lock = threading.Lock()
        try:
            document = load(f"{self.path}/{METADATA}", self.tree.read(METADATA, MOST_METADATA_BYTES))
            self.root = parse_root(self.path, document)
            self._folders = [self._survey(*found) for found in self._documents(document)]
            self._arrays = {name: array for folder in self._folders for name, array in folder.arrays.items()}
            self._entries: dict[str, dict[int, Entry]] = {section: {} for section in SECTIONS}
            self._stored: dict[tuple[str, int], list[tuple[str, Part]]] = {}
            self._unite()
            self._check_counts(self.root, self._entries)
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

    @property
    def ranks(self) -> int:
        """How many ranks have written it."""
        return len(self._folders)

    @property
    def prefixes(self) -> list[str]:
        """What the names of nodes begin with, of each rank."""
        return [folder.prefix for folder in self._folders]

    def entries(self, section: str) -> Mapping[int, Entry]:
        """The entries of a section, by number, in order."""
        return MappingProxyType(self._entries.get(section, {}))

    def read(self, section: str, number: int, field: str, start: int, into: Tensor) -> None:
        """Read elements of a field from `start` on into a 1-D contiguous CPU tensor of the field's dtype.

        Raises DamagedCheckpointError for a block that is not what was written; `into` then holds anything.
        """
        entry = self._entries.get(section, {}).get(number)
        if entry is None or field not in entry.fields:
            raise CheckpointValueError(f"{self.path} has no {section}/{node_name(number)}/{field}")
        name, dtype = f"{section}/{node_name(number)}/{field}", entry.fields[field]
        if into.dim() != 1 or into.dtype != dtype or into.device.type != "cpu" or not into.is_contiguous():
            raise CheckpointValueError(f"{name} is read into 1-D contiguous CPU tensors of {dtype}")
        if start < 0 or start + len(into) > entry.numel:
            raise CheckpointValueError(
                f"{name} has {entry.numel:,} elements, not those from {start:,} to {start + len(into):,}"
            )
        gather(entry.part, self.parts(section, number, field), start, into)

    def parts(self, section: str, number: int, field: str) -> list[tuple[Part, Read]]:
        """The parts in which a field is stored, and what reads elements of each in its own storage order."""
        return [(part, partial(self._read, f"{node}/{field}")) for node, part in self._stored[section, number]]

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> StoredBlocks | None:
        """What reads a part of a field block by block, if it is stored as such."""
        for node, part in self._stored[section, number]:
            if part.is_like(wanted):
                name = f"{node}/{field}"
                geometry = self._arrays[name].geometry
                is_small = geometry.blocks == 1 and geometry.block_bytes <= _SMALL_BYTES
                self._expect_indexes(name)
                return StoredBlocks(geometry.block_elements, partial(self._now if is_small else self._begin, name))
        return None

    def extra(self, rank: int = 0) -> Any:
        """What the writer was told to keep, with the types it had; of a rank there was none of, what rank 0 kept.

        Tensors are on the CPU.
        """
        folder = self._folders[rank if rank < len(self._folders) else 0]
        return extra.decode(folder.root.extra, partial(self._tensor, folder))

    def _tensor(self, folder: _Folder, number: int) -> Tensor:
        entry = folder.entries["extra"].get(number) if type(number) is int else None
        if entry is None or dict(entry.fields) != {VALUES: entry.dtype}:
            raise DamagedCheckpointError(f"{self.path}: extra has no tensor {str(number)[:40]}")
        flat = torch.empty(entry.numel, dtype=entry.dtype)
        self._read(f"{folder.node_of('extra', number)}/{VALUES}", 0, flat)
        return flat.as_strided(entry.shape, entry.stride)

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None
        self.tree.close()

    def _read(self, name: str, start: int, into: Tensor) -> None:
        """Read elements of one array."""
        if not len(into):
            return
        geometry, target = self._arrays[name].geometry, as_bytes(into).numpy()
        first, *others = geometry.blocks_of(start, len(target) // geometry.itemsize)
        if not others:
            self._now(name, first, partial(_copy, geometry, first, start, target))
            return
        under_way: list[Future[None]] = []
        try:
            with deferred():  # none begins that is not noted
                for number in (first, *others):
                    under_way.append(self._begin(name, number, partial(_copy, geometry, number, start, target)))
            for reading in under_way:
                reading.result()
        finally:
            for reading in under_way:
                reading.cancel()
            wait(under_way)  # whatever happens, nothing is written into the caller's memory afterwards

    def _now(self, name: str, number: int, use: Use) -> None:
        """Read one block here, and give `use` its values."""
        self._threads().work_here(self._work(name, number, use))

    def _begin(self, name: str, number: int, use: Use) -> Future[None]:
        """Let a thread do that."""
        return self._threads().submit(self._work(name, number, use))

    def _work(self, name: str, number: int, use: Use) -> Callable[[Buffer], None]:
        """What reads one block into a buffer and gives its values to `use`, on any thread."""
        array = self._arrays[name]

        def work(buffer: Buffer) -> None:
            file, offset, nbytes = self._place(name, array, number)
            begin, end = array.geometry.range_of(number)
            stored = self.tree.read_into(file, offset, nbytes, buffer)
            use(decode(f"{self.path}/{file}, elements {begin:,} to {end:,}", array.geometry, stored))

        return work

    def _threads(self) -> Readers:
        if self._readers is None:
            self._readers = Readers(max(array.geometry.block_bytes for array in self._arrays.values()))
        return self._readers

    def _place(self, name: str, array: ArrayNode, number: int) -> tuple[str, int, int]:
        """Where a block lies: file, offset and length, checked against the file's size."""
        geometry = array.geometry
        shard, place = geometry.place_of(number)
        file = f"{name}/{array.file_of(shard)}"
        size = self.tree.size(file)
        offset, nbytes = 0, size
        if geometry.shard_blocks:
            offset, nbytes = (int(value) for value in self._index(file, array, size)[place])
        most = geometry.block_bytes + (CHECKSUM_BYTES if geometry.compression == "none" else PAGE_BYTES)
        if offset == _MISSING or offset + nbytes > size or nbytes > most:
            raise DamagedCheckpointError(
                f"{self.path}/{file} has chunk {place} of {name} at {offset}, {nbytes} bytes, in a file of {size:,}"
            )
        return file, offset, nbytes

    def _index(self, file: str, array: ArrayNode, size: int) -> npt.NDArray[np.uint64]:
        """The index of a shard, read by the first thread that asks for it; the last few are kept."""
        with self._lock:
            index = self._indexes.setdefault(file, _Index())
            if len(self._indexes) > _MOST_INDEXES:
                self._indexes.popitem(last=False)
        with index.lock:
            if index.entries is None:
                index.entries = self._read_index(file, array.geometry, size)
            return index.entries

    def _expect_indexes(self, name: str) -> None:
        """Let the kernel read the first indexes of an array meanwhile, so that no thread has to wait for one."""
        array = self._arrays[name]
        geometry = array.geometry
        for shard in range(min(geometry.shards, _MOST_INDEXES) if geometry.shard_blocks else 0):
            file = f"{name}/{array.file_of(shard)}"
            self.tree.expect(file, geometry.index_offset(self.tree.size(file)), geometry.index_bytes)

    def _read_index(self, file: str, geometry: Geometry, size: int) -> npt.NDArray[np.uint64]:
        nbytes = geometry.index_bytes
        if size < nbytes:
            raise DamagedCheckpointError(f"{self.path}/{file} has {size:,} bytes, less than its index of {nbytes:,}")
        stored = self.tree.read_range(file, geometry.index_offset(size), nbytes)
        if geometry.has_index_checksum:
            stored, wanted = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
            if checksum(stored) != wanted:
                raise DamagedCheckpointError(f"{self.path}/{file} is damaged: the checksum of its index is wrong")
        return np.frombuffer(stored, "<u8").reshape(-1, 2)

    def _documents(self, document: Mapping[str, Json]) -> Iterator[tuple[str, Root, Mapping[str, Json]]]:
        """The folders of writers: their prefixes, their topmost groups, and the documents of all nodes in each."""
        if not self.root.ranks:
            yield "", self.root, _nodes(self.path, self.tree, "", document)
        for rank in range(self.root.ranks):
            name = folder_of(rank)
            if not self.tree.has(f"{name}/{METADATA}"):
                raise IncompleteCheckpointError(f"{self.path}/{name} is missing: the checkpoint is not complete")
            its = load(f"{self.path}/{name}", self.tree.read(f"{name}/{METADATA}", MOST_METADATA_BYTES))
            root = parse_root(f"{self.path}/{name}", its)
            if root.ranks:
                raise DamagedCheckpointError(f"{self.path}/{name} is of ranks itself, which no checkpoint is")
            yield f"{name}/", root, _nodes(self.path, self.tree, name, its)

    def _unite(self) -> None:
        """Say of each tensor what it is as a whole, and where its parts are stored."""
        if not self.root.ranks:
            (folder,) = self._folders
            for section, entries in folder.entries.items():
                self._entries[section] = dict(entries)
                self._stored |= {(section, n): [(folder.node_of(section, n), e.part)] for n, e in entries.items()}
            return
        for section in ("params", "model"):
            united = unite(self.path, section, [folder.entries[section] for folder in self._folders])
            for number, (whole, parts) in united.items():
                self._entries[section][number] = whole
                self._stored[section, number] = [
                    (self._folders[rank].node_of(section, number), entry.part) for rank, entry in parts
                ]
        for folder in self._folders:  # what each has kept for itself, numbered anew
            for number, entry in folder.entries["extra"].items():
                self._stored["extra", len(self._entries["extra"])] = [(folder.node_of("extra", number), entry.part)]
                self._entries["extra"][len(self._entries["extra"])] = entry

    def _survey(self, prefix: str, root: Root, nodes: Mapping[str, Json]) -> _Folder:
        """Read all entries and arrays of one writer from the documents."""
        entries: dict[str, dict[int, Entry]] = {section: {} for section in SECTIONS}
        arrays: dict[str, ArrayNode] = {}
        wanted: set[str] = set()
        for name in sorted(nodes):
            match = _NODE.fullmatch(name)
            where = f"{self.path}/{prefix}{name}"
            if match is None or match["section"] not in SECTIONS or not isinstance(nodes[name], dict):
                raise DamagedCheckpointError(f"{self.path}/{prefix} has a node {name[:100]!r}, which no checkpoint has")
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
                    raise IncompleteCheckpointError(f"{where}/{field} is missing: the checkpoint is not complete")
                arrays[prefix + path] = parse_array(f"{where}/{field}", nodes[path], entry.numel, dtype)
                wanted.add(path)
        if unknown := [name for name in nodes if name.count("/") == 2 and name not in wanted]:
            raise DamagedCheckpointError(f"{self.path}/{prefix}{unknown[0]} is an array that its group does not name")
        in_order = {section: dict(sorted(found.items())) for section, found in entries.items()}
        self._check_counts(root, in_order)
        return _Folder(root, in_order, arrays, prefix)

    def _check_counts(self, root: Root, entries: Mapping[str, Mapping[int, Entry]]) -> None:
        for section in SECTIONS:
            found, wanted = len(entries[section]), root.counts.get(section, 0)
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


def _copy(geometry: Geometry, number: int, start: int, target: Buffer, values: Buffer) -> None:
    """Copy what is wanted of a block; `target` begins with the array's element `start`."""
    begin, end = geometry.range_of(number)
    first, last = max(begin, start), min(end, start + len(target) // geometry.itemsize)
    part = slice((first - begin) * geometry.itemsize, (last - begin) * geometry.itemsize)
    target[(first - start) * geometry.itemsize : (last - start) * geometry.itemsize] = values[part]


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
        is_left = any(os.path.isdir(os.path.join(path, folder)) for folder in (*SECTIONS, RANKS))
        if is_left:
            raise IncompleteCheckpointError(f"{path} was never finished: it has no {METADATA}; it cannot be loaded")
        raise NoCheckpointError(2, f"this is no checkpoint: it has no {METADATA}", path)
    return tree


def _nodes(path: str, tree: Tree, folder: str, document: Mapping[str, Json]) -> Mapping[str, Json]:
    """The documents of all nodes in a folder: from its topmost one, or from each node's own where it has none."""
    inline = document.get("consolidated_metadata")
    if inline is None:
        return dict(_walk(path, tree, folder, ""))
    nodes = inline.get("metadata") if isinstance(inline, dict) else None
    if not isinstance(nodes, dict):
        raise DamagedCheckpointError(f"{path}/{folder}: its consolidated_metadata has no metadata")
    return nodes


def _walk(path: str, tree: Tree, folder: str, node: str) -> Iterator[tuple[str, Json]]:
    """The nodes below one, by their names from the folder on."""
    for name in tree.folders("/".join(filter(None, (folder, node)))):
        below = f"{node}/{name}" if node else name
        file = "/".join(filter(None, (folder, below, METADATA)))
        if not tree.has(file):
            continue  # chunks of an array
        yield below, load(f"{path}/{file}", tree.read(file, MOST_METADATA_BYTES))
        if below.count("/") < 2:
            yield from _walk(path, tree, folder, below)
