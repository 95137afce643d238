"""Checkpoints into files of torch's, and back; and into n-dimensional arrays for tools that know neither.

Part by part, with no copy in memory: what torch.save takes whole lies in mapped files.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.checkpoint.entries import SECTIONS, VALUES, Entry, node_name, to_attributes
from tierstore.checkpoint.examine import Source, Tell, parts, shaped
from tierstore.checkpoint.extra import decode
from tierstore.checkpoint.files import Files, resolved, told
from tierstore.checkpoint.geometry import Compression
from tierstore.checkpoint.kinds import dtype_name
from tierstore.checkpoint.writer import Writer
from tierstore.errors import CheckpointFileError, CheckpointValueError, DamagedCheckpointError, SwapError
from tierstore.results import Results

ND_FORMAT = "tierstore arrays"
GRANTED_BYTES = 64 << 20
ND_ROWS_BYTES = 16 << 20


def to_checkpoint(source: Source, target: str | os.PathLike[str], *, compression: Compression, tell: Tell) -> None:
    """Write everything that `source` holds as a checkpoint at `target`, replacing one that stands there."""
    with Writer(target, header=source.header, compression=compression) as writer:
        for section in ("params", "model"):
            for number, entry in source.entries(section).items():
                writer.add(section, number, entry)
                for field in entry.fields:
                    for start, part in parts(source, section, number, field):
                        writer.write(section, number, field, start, part)
                        tell(part.nbytes)
        writer.keep(source.extra())
        writer.commit()


def to_torch(source: Source, target: str | os.PathLike[str], *, tell: Tell) -> None:
    """Write a file that torch.load reads: an optimizer's state dict under `optimizer`, a model's under `model`.

    A checkpoint of one of them alone, without anything kept beside it, becomes that state dict itself.
    """
    path = resolved(target)
    if os.path.lexists(path):  # which may be anything
        raise CheckpointValueError(f"{path} exists: name a new file, or remove it")
    results = Results(GRANTED_BYTES, Path(path).parent)
    content: dict[str, Any] = {}
    if "param_groups" in source.header or source.entries("params"):
        content["optimizer"] = _optimizer(source, results, tell)
    if source.header.get("model") or source.entries("model"):
        content["model"] = _model(source, results, tell)
    if (extra := source.extra()) is not None and extra != {}:
        content["extra"] = extra
    _write_torch(path, next(iter(content.values())) if list(content) in (["optimizer"], ["model"]) else content)


def to_arrays(source: Source, target: str | os.PathLike[str], *, tell: Tell) -> None:
    """Write a Zarr v3 hierarchy with an array of the tensor's own shape for each field, for tools that want those.

    What Zarr has no type for becomes float32, which has all its values. It is no checkpoint: it cannot be loaded.
    """
    import zarr

    path = resolved(target)
    if os.path.lexists(path):
        raise CheckpointValueError(f"{path} exists: name a new folder")
    files = Files()
    beside = f"{path}.{secrets.token_hex(4)}"
    files.make_folder(beside)
    try:
        with told(path, "the arrays cannot be written", makes=True):
            group = zarr.create_group(beside, attributes={"format": ND_FORMAT, "header": dict(source.header)})
            for section in SECTIONS:
                for number, entry in source.entries(section).items():
                    node = group.create_group(f"{section}/{node_name(number)}", attributes=to_attributes(entry))
                    for field in entry.fields:
                        _write_nd(node, source, section, number, field, entry, tell)
        files.rename(beside, path)
    finally:
        if os.path.lexists(beside):
            files.remove_tree(beside)


def _write_nd(node: Any, source: Source, section: str, number: int, field: str, entry: Entry, tell: Tell) -> None:
    """Write one array, chunk by chunk: of several at once zarr goes on with the others when one has failed."""
    dtype, shape = entry.fields[field], entry.shape
    row = entry.numel // shape[0] if entry.numel and shape else 1
    rows = max(1, ND_ROWS_BYTES // (row * dtype.itemsize))
    chunk = (min(rows, shape[0]), *shape[1:]) if shape else ()
    array = node.create_array(
        field, shape=shape, chunks=tuple(max(1, size) for size in chunk),
        dtype=str(_native(torch.empty(0, dtype=dtype)).dtype), compressors=None,
        attributes={"dtype": dtype_name(dtype)}, dimension_names=[f"dim_{axis}" for axis in range(len(shape))],
    )  # fmt: skip
    if not entry.numel:
        return
    row_major = torch.empty(shape, device="meta").stride()
    is_row_major = all(s <= 1 or a == b for s, a, b in zip(shape, entry.stride, row_major, strict=True))
    if not shape:
        array[...] = _native(shaped(source, section, number, field))
        tell(dtype.itemsize)
        return
    whole = None if is_row_major else shaped(source, section, number, field)
    for first in range(0, shape[0], rows):
        if whole is None:
            values = torch.empty(min(rows, shape[0] - first) * row, dtype=dtype)
            source.read(section, number, field, first * row, values)
            values = values.view(-1, *shape[1:])
        else:
            values = whole[first : first + rows]
        array[first : first + rows] = _native(values)
        tell(values.nbytes)


def _native(values: Tensor) -> np.ndarray[Any, Any]:
    try:
        return values.numpy()
    except TypeError:
        return values.to(torch.complex64 if values.is_complex() else torch.float32).numpy()


def _optimizer(source: Source, results: Results, tell: Tell) -> dict[str, Any]:
    states = {}
    for number, entry in source.entries("params").items():
        step = {} if entry.step is None else {"step": torch.tensor(float(entry.step))}
        fields = {field: _taken(source, "params", number, field, results, tell) for field in entry.fields}
        if step or fields:
            states[number] = {**step, **fields}
    groups = source.header.get("param_groups")
    if groups is None:
        groups = [{"options": {}, "params": list(source.entries("params"))}]
    try:
        return {
            "state": states,
            "param_groups": [
                {**decode(group["options"], _no_tensor, "param_groups"), "params": list(group["params"])}
                for group in groups
            ],
        }
    except (KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{source.path}: its header is not that of an optimizer ({error!r})") from error


def _model(source: Source, results: Results, tell: Tell) -> dict[str, Any]:
    """The state dict; a tensor that several keys mean is in it several times, and stored once."""
    entries = source.entries("model")
    header = source.header.get("model")
    if header is None:
        header = {"keys": {entry.name or node_name(number): number for number, entry in entries.items()}, "others": {}}
    try:
        tensors = {number: _taken(source, "model", number, VALUES, results, tell) for number in entries}
        found = {key: tensors[number] for key, number in header["keys"].items()}
        others = {key: decode(value, _no_tensor, key) for key, value in header["others"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{source.path}: its header is not that of a model ({error!r})") from error
    return {**found, **others}


def _taken(source: Source, section: str, number: int, field: str, results: Results, tell: Tell) -> Tensor:
    entry = source.entries(section)[number]
    try:
        memory = results.allocate(entry.numel, entry.fields[field])
    except SwapError as error:
        raise CheckpointFileError(
            error.errno, "torch.save takes all tensors at once, and there is no room for a mapped copy", error.filename
        ) from error
    values = shaped(source, section, number, field, memory)
    tell(values.nbytes)
    return values


def _write_torch(path: str, content: Any) -> None:
    """Save beside the path, sync, rename."""
    files = Files()
    beside = f"{path}.{secrets.token_hex(4)}"
    try:
        with told(path, "the file cannot be written", makes=True), open(beside, "xb") as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:  # torch's, that the archive has no end, in place of why
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from error
                raise
        files.sync(beside)
        files.rename(beside, path)
        files.sync(os.path.dirname(path))
    finally:
        if os.path.lexists(beside):
            files.remove_file(beside)


def _no_tensor(number: int) -> Tensor:
    raise KeyError(number)
