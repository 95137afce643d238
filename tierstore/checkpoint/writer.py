"""Writes one checkpoint: entries and their values, in any order, in bounded memory. Nothing appears before `commit`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from tierstore.checkpoint.arrays import Array, Waiting
from tierstore.checkpoint.blocks import Blocks
from tierstore.checkpoint.documents import (
    METADATA,
    array_document,
    consolidated,
    dump,
    group_document,
    parse_array,
)
from tierstore.checkpoint.entries import SECTIONS, VALUES, Entry, Json, check_entry, node_name, to_attributes
from tierstore.checkpoint.extra import encode
from tierstore.checkpoint.files import Files, resolved, told
from tierstore.checkpoint.geometry import BLOCK_BYTES, Compression, geometry_for
from tierstore.checkpoint.kinds import as_bytes
from tierstore.checkpoint.reader import Reader
from tierstore.checkpoint.replacement import begin, check_keep_last, prune, replace
from tierstore.checkpoint.root import root_now
from tierstore.checkpoint.wholes import RANKS, folder_of, unite
from tierstore.errors import CheckpointError, CheckpointValueError
from tierstore.forms import take_apart
from tierstore.signals import deferred

MOST_SINGLE_SYNCS = 256
"""Files and folders that are synced one by one; of more, the filesystem is as a whole."""

_log = logging.getLogger("tierstore.checkpoint")


class Writer:
    """A checkpoint being written, for `path`, which changes only with `commit`. A context manager: leaving it abandons.

    `header` is any plain JSON of the caller's, kept at the top. Used by one thread at a time. Raises
    CheckpointValueError for what cannot be stored or was not announced, CheckpointFileError for what the disk refuses;
    after the latter nothing but leaving is of use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        header: Mapping[str, Json],
        compression: Compression = "none",
        files: Files | None = None,
    ) -> None:
        if compression not in ("none", "zstd"):
            raise CheckpointValueError(f"compression is {compression!r}: give none or zstd")
        dump("the header", header)  # now, not after all has been written
        self._header = dict(header)
        self._compression = compression
        self._files = files or Files()
        self._site = begin(resolved(path), self._files)
        self._is_open = True
        try:
            self._direct = self._files.takes_direct(self._site.path)
            self._blocks = Blocks(BLOCK_BYTES)
        except BaseException:
            self._abandon()
            raise
        self._waiting = Waiting(Path(self._site.path))
        self._entries: dict[tuple[str, int], Entry] = {}
        self._arrays: dict[tuple[str, int, str], Array] = {}
        self._nodes: dict[str, Json] = {}
        self._extra: Json = None
        self._ranks = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def add(self, section: str, number: int, entry: Entry) -> None:
        """Announce an entry. Its values are to be written before `commit`."""
        self._check_open()
        where = f"{section}/{node_name(number)}"
        if section not in SECTIONS or number < 0 or (section, number) in self._entries:
            raise CheckpointValueError(f"{where} is there already, or its section is none of {', '.join(SECTIONS)}")
        check_entry(where, entry)
        if section not in self._nodes:
            self._make_group(section, {})
        self._make_group(where, to_attributes(entry))
        self._entries[section, number] = entry
        for name, dtype in entry.fields.items():
            self._make_array(section, number, name, entry.numel, dtype)

    def write(self, section: str, number: int, field: str, start: int, values: Tensor) -> None:
        """Write elements of a field from `start` on: a 1-D CPU tensor of the field's dtype.

        Parts come in any order, each element once. The values have been copied when this returns.
        """
        self._check_open()
        if (array := self._arrays.get((section, number, field))) is None:
            raise CheckpointValueError(f"{section}/{node_name(number)}/{field} was not announced")
        dtype = self._entries[section, number].fields[field]
        if values.dim() != 1 or values.dtype != dtype or values.device.type != "cpu":
            raise CheckpointValueError(
                f"{section}/{node_name(number)}/{field} takes 1-D CPU tensors of {dtype}, not a {values.dim()}-D one "
                f"of {values.dtype} on {values.device}"
            )
        array.write(start, as_bytes(values).numpy(), self._waiting)

    def keep(self, extra: object) -> None:
        """Keep whatever else belongs to the checkpoint: plain values, lists, tuples, dicts, bytes, tensors, arrays.

        Raises CheckpointValueError, with the key's path, for anything else.
        """
        self._check_open()
        self._extra = encode(extra, self._keep_tensor)

    def _keep_tensor(self, name: str, tensor: Tensor) -> int:
        number = sum(section == "extra" for section, _ in self._entries)
        form, content = take_apart(tensor)
        self.add("extra", number, Entry(name, form.shape, form.stride, form.dtype, {VALUES: form.dtype}))
        self.write("extra", number, VALUES, 0, content.view(form.dtype))
        return number

    def make_room(self, ranks: int) -> str:
        """Let this be a checkpoint of what several ranks write; return where, each committing at its `folder_of`.

        Nothing else may be added here. `commit` is for when all have committed, and requires it.
        """
        self._check_open()
        self._make_group(RANKS, {})
        self._ranks = ranks
        return self._site.path

    def commit(self, *, keep_last: int | None = None) -> None:
        """Let the checkpoint stand at its path, complete and on the disk, in one instant.

        With `keep_last`, remove the oldest others of its series afterwards, so that so many stay: those in the same
        folder whose names differ from this one's in their last number only.
        Raises CheckpointValueError if values are missing.
        """
        self._check_open()
        check_keep_last(keep_last)
        self._check_complete()
        self._blocks.wait()
        self._blocks.check()
        root = group_document(root_now(self._counts(), self._header, self._extra, self._ranks).to_attributes())
        document = root if self._ranks else consolidated(root, self._nodes)  # each rank's has its own nodes
        self._files.create(f"{self._site.path}/{METADATA}", dump("the metadata", document))
        self._sync()
        built = os.stat(self._site.path)
        with deferred():
            try:
                replace(self._site, self._files)
            except BaseException:
                if not _is_still(self._site.path, built):  # it stands at its path; what stood there is kept beside it
                    self._is_open = False
                    self._release()
                raise
            self._is_open = False
        self._release()
        if keep_last is not None:
            prune(self._site.target, keep_last, self._files)

    def close(self) -> None:
        """Abandon what has not been committed. Idempotent."""
        if self._is_open:
            self._abandon()

    def _abandon(self) -> None:
        self._is_open = False
        try:
            if hasattr(self, "_blocks"):
                self._blocks.wait()
            self._files.remove_tree(self._site.path)
        except CheckpointError as error:
            _log.warning("%s stays until the next save beside it: %s", self._site.path, error)
        finally:
            self._release()

    def _release(self) -> None:
        if hasattr(self, "_blocks"):
            self._blocks.close()
        self._site.leave()

    def _make_group(self, name: str, attributes: Mapping[str, Json]) -> None:
        self._make_node(name, group_document(attributes))

    def _make_array(self, section: str, number: int, field: str, elements: int, dtype: torch.dtype) -> None:
        geometry = geometry_for(elements, dtype.itemsize, self._compression)
        name = f"{section}/{node_name(number)}/{field}"
        document = array_document(geometry, dtype)
        self._make_node(name, document)
        node = parse_array(name, document, elements, dtype)
        path = f"{self._site.path}/{name}"
        self._arrays[section, number, field] = Array(path, node, self._files, self._blocks, direct=self._direct)

    def _make_node(self, name: str, document: Mapping[str, Json]) -> None:
        content = dump(name, document)
        self._files.make_folder(f"{self._site.path}/{name}")
        self._files.create(f"{self._site.path}/{name}/{METADATA}", content)
        self._nodes[name] = document

    def _check_complete(self) -> None:
        for (section, number, field), array in self._arrays.items():
            if array.missing:
                entry = self._entries[section, number]
                raise CheckpointValueError(
                    f"{section}/{node_name(number)}/{field} ({entry.name!r}): {array.missing:,} of {entry.numel:,} "
                    f"elements were never written"
                )

    def _counts(self) -> dict[str, int]:
        """How many entries there are in each section; of ranks, when all they have written has been found complete."""
        if not self._ranks:
            return {section: sum(of == section for of, _ in self._entries) for section in SECTIONS}
        by_rank: list[dict[str, dict[int, Entry]]] = []
        for rank in range(self._ranks):
            with Reader(f"{self._site.path}/{folder_of(rank)}") as reader:
                by_rank.append({section: dict(reader.entries(section)) for section in SECTIONS})
        whole = {s: unite(self._site.target, s, [of[s] for of in by_rank]) for s in ("params", "model")}
        extra = sum(len(of["extra"]) for of in by_rank)
        return {"params": len(whole["params"]), "model": len(whole["model"]), "extra": extra}

    def _sync(self) -> None:
        """Let everything reach the disk; shards have already, and what ranks have committed."""
        if 2 * len(self._nodes) > MOST_SINGLE_SYNCS:
            self._files.sync_filesystem(self._site.path)
            return
        for node in (*reversed(self._nodes), ""):
            folder = f"{self._site.path}/{node}".rstrip("/")
            with told(folder, "the folder cannot be listed"):
                names = os.listdir(folder)
            for name in names:
                if not os.path.isdir(f"{folder}/{name}"):
                    self._files.sync(f"{folder}/{name}")
            self._files.sync(folder)

    def _check_open(self) -> None:
        if not self._is_open:
            raise CheckpointValueError(f"{self._site.target}: this writer has been committed or closed")


def _is_still(path: str, built: os.stat_result) -> bool:
    """Whether what was built is still where it was built."""
    try:
        return os.path.samestat(os.stat(path), built)
    except OSError:
        return False
