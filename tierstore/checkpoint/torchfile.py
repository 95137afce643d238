"""A file that torch.save wrote, seen as a checkpoint: an optimizer's state dict, a model's, or a dict with both in it.

Loaded with `weights_only=True`, so that nothing in it is run, and mapped, so that it takes no memory until it is read.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor

from tierstore.checkpoint.entries import VALUES, Entry, Json, check_entry
from tierstore.checkpoint.extra import encode
from tierstore.checkpoint.files import resolved, told
from tierstore.checkpoint.parts import Part, Read
from tierstore.errors import CheckpointFileError, CheckpointValueError, DamagedCheckpointError
from tierstore.layout import in_storage_order_of, is_dense

OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
MOST_EXPANDED_BYTES = 16 << 20
"""Of a tensor whose elements lie in the same places: what is stored of it says little of what it takes."""


class TorchFile:
    """One file, read as a `Reader` is. Its `header` is like that of a checkpoint of an optimizer.

    That has `param_groups`, each with encoded `options` and the numbers of its `params`; `is_named`; and `model`, which
    is None or has the number of the entry that each of `keys` means, and encoded `others`. `algorithm` is not known.
    A parameter without state has no entry: the file does not say what it is.

    Raises DamagedCheckpointError for what is no such file, or holds neither an optimizer's state nor a model's.
    """

    ranks: ClassVar = 1
    """How many have written it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = resolved(path)
        content = _load(self.path)
        states, weights, others = _sort(self.path, content)
        self._others = others["extra"] if list(others) == ["extra"] else others or None  # as `convert` writes it
        self._tensors: dict[tuple[str, int, str], Tensor] = {}
        self._entries: dict[str, dict[int, Entry]] = {"params": {}, "model": {}}
        self._header: dict[str, Any] = {}
        if states is not None:
            groups, is_named = self._take_states(states)
            self._header |= {"algorithm": "unknown", "is_named": is_named, "param_groups": groups}
        self._header["model"] = None if weights is None else self._take_weights(weights)

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def header(self) -> Mapping[str, Any]:
        """What the whole is, as docs/CHECKPOINTS.md says of checkpoints of optimizers."""
        return self._header

    def entries(self, section: str) -> Mapping[int, Entry]:
        """The entries of a section, by number, in order."""
        return MappingProxyType(self._entries.get(section, {}))

    def read(self, section: str, number: int, field: str, start: int, into: Tensor) -> None:
        """Read elements of a field from `start` on into a 1-D contiguous CPU tensor of the field's dtype."""
        if (tensor := self._tensors.get((section, number, field))) is None:
            raise CheckpointValueError(f"{self.path} has no {section} {number} {field}")
        if into.dim() != 1 or into.dtype != tensor.dtype or start < 0 or start + len(into) > tensor.numel():
            raise CheckpointValueError(
                f"{section} {number} {field} has {tensor.numel():,} elements of {tensor.dtype}, not those from "
                f"{start:,} to {start + len(into):,} of {into.dtype}"
            )
        entry = self._entries[section][number]
        like = torch.empty_strided(entry.shape, entry.stride, dtype=tensor.dtype, device="meta")
        into.copy_(in_storage_order_of(like, tensor)[start : start + len(into)])

    def parts(self, section: str, number: int, field: str) -> list[tuple[Part, Read]]:
        """The one part in which a field is stored: all of it."""
        return [(self._entries[section][number].part, partial(self.read, section, number, field))]

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> None:
        """There are none."""

    def extra(self, rank: int = 0) -> Any:
        """What else is in the file, beside the optimizer's and the model's part; of that, `extra` if it is all.

        The same for all ranks.
        """
        return self._others

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._tensors.clear()

    def _take_states(self, states: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
        """Note the state of each parameter; return the groups as a header has them, and whether all have names."""
        groups = []
        is_named = True
        for number, group in enumerate(states["param_groups"]):
            names = group.get("param_names")
            is_named = is_named and isinstance(names, list) and len(names) == len(group["params"])
            for place, key in enumerate(group["params"]):
                if type(key) is not int:
                    raise DamagedCheckpointError(f"{self.path}: parameter {str(key)[:100]!r} is no number")
                if state := states["state"].get(key):
                    self._take_state(key, str(names[place]) if is_named else "", number, state)
            where = f"{self.path}: param_groups[{number}]"
            options = {option: value for option, value in group.items() if option != "params"}
            groups.append({"options": _encoded(where, options), "params": list(group["params"])})
        return groups, is_named

    def _take_state(self, key: int, name: str, group: int, state: Mapping[str, Any]) -> None:
        step = state.get("step")
        fields = {field: value for field, value in state.items() if field != "step" and isinstance(value, Tensor)}
        if not fields:
            return
        first = next(iter(fields.values()))
        if any(value.shape != first.shape for value in fields.values()):
            shapes = {field: tuple(value.shape) for field, value in fields.items()}
            raise DamagedCheckpointError(f"{self.path}: the state of parameter {key} has fields of shapes {shapes}")
        try:
            steps = None if step is None else float(step)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise DamagedCheckpointError(f"{self.path}: the step of parameter {key} is no number ({error})") from error
        entry = _entry(name, first, {field: value.dtype for field, value in fields.items()}, steps, {"group": group})
        self._add("params", key, entry, fields)

    def _take_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        keys: dict[str, int] = {}
        others: dict[str, Any] = {}
        numbers: dict[tuple[Any, ...], int] = {}  # tied weights, which torch stores once, are one entry
        for key, value in weights.items():
            if not isinstance(value, Tensor):
                others[key] = _encoded(f"{self.path}: {key}", value)
                continue
            has_memory = value.layout is torch.strided and value.numel()
            alike = (value.data_ptr(), value.dtype, value.shape, value.stride()) if has_memory else (key,)
            if alike not in numbers:
                numbers[alike] = len(numbers)
                self._add("model", numbers[alike], _entry(key, value, {VALUES: value.dtype}, None, {}), {VALUES: value})
            keys[key] = numbers[alike]
        return {"keys": keys, "others": others}

    def _add(self, section: str, number: int, entry: Entry, fields: Mapping[str, Tensor]) -> None:
        for field, value in fields.items():
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise DamagedCheckpointError(f"{self.path}: {field} of {entry.name or number} is not a dense tensor")
            if value.nbytes > max(value.untyped_storage().nbytes(), MOST_EXPANDED_BYTES):
                raise DamagedCheckpointError(
                    f"{self.path}: {field} of {entry.name or number} has shape {tuple(value.shape)}, {value.nbytes:,} "
                    f"bytes made of {value.untyped_storage().nbytes():,} that are stored"
                )
            self._tensors[section, number, field] = value
        try:
            check_entry(f"{self.path}: {section} {number}", entry)
        except CheckpointValueError as error:
            raise DamagedCheckpointError(str(error)) from error
        self._entries[section][number] = entry


def first_damaged(path: str) -> str | None:
    """The first part of a file of torch's whose checksum is wrong, if one is; torch itself does not look."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip()
    except Exception as error:  # whatever Python's reader of archives stumbles over
        return str(error)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether something is a file, as torch's checkpoints are, and not a folder."""
    return os.path.isfile(resolved(path))


def _load(path: str) -> Any:
    try:
        with told(path, "the file cannot be read"):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointFileError:
        raise
    except Exception as error:  # whatever torch's unpickler stumbles over
        raise DamagedCheckpointError(f"{path} cannot be read: {_why(path, str(error))}") from error


def _why(path: str, text: str) -> str:
    """What is wrong with a file, without torch's advice, which is for others: here nothing is run, ever."""
    if not _is_archive(path):
        return "it is no file that torch.save wrote (a zip archive, since torch 1.6), or it is cut off"
    if (found := re.search(r"GLOBAL (\S+)", text)) is not None:
        return f"it holds a {found[1][:100]}, and only tensors and plain values are read: save it without"
    found = re.search(r"WeightsUnpickler error: (.+)", text)
    return f"it is damaged, or holds more than tensors and plain values: {(found[1] if found else text)[:200]}"


def _is_archive(path: str) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except Exception:  # it has the end of one, which says what cannot be
        return True


def _sort(path: str, content: Any) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None, dict[Any, Any]]:
    """Find an optimizer's state, a model's, and the rest."""
    if _is_optimizers(content):
        return content, None, {}
    if not isinstance(content, Mapping):
        raise DamagedCheckpointError(f"{path} holds a {type(content).__name__}, no state dict")
    states, weights = None, None
    others = dict(content)
    for key in OPTIMIZER_KEYS:
        found = content.get(key)
        if isinstance(found, Sequence) and len(found) == 1:
            found = found[0]
        if states is None and _is_optimizers(found):
            states = found
            del others[key]
    for key in MODEL_KEYS:
        if weights is None and _is_models(content.get(key)):
            weights = others.pop(key)
    if states is None and weights is None and _is_models(content):
        return None, content, {}
    if states is None and weights is None:
        raise DamagedCheckpointError(
            f"{path} holds {sorted(map(str, content))[:8]}: neither an optimizer's state dict nor a model's, nor a "
            f"dict with one of them under {', '.join((*OPTIMIZER_KEYS, *MODEL_KEYS))}"
        )
    return states, weights, others


def _is_optimizers(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and isinstance(content.get("state"), Mapping)
        and isinstance(content.get("param_groups"), list)
        and all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in content["param_groups"])
        and all(isinstance(state, Mapping) for state in content["state"].values())
    )


def _is_models(content: Any) -> bool:
    return isinstance(content, Mapping) and any(isinstance(value, Tensor) for value in content.values())


def _entry(
    name: str, like: Tensor, fields: Mapping[str, torch.dtype], step: float | None, attributes: Mapping[str, Any]
) -> Entry:
    stride = like.stride() if is_dense(like) else torch.empty(like.shape, device="meta").stride()
    return Entry(name, tuple(like.shape), stride, like.dtype, dict(fields), step, attributes)


def _encoded(where: str, value: Any) -> Json:
    try:
        return encode(value, _refuse_large, where)
    except CheckpointValueError as error:
        raise DamagedCheckpointError(str(error)) from error


def _refuse_large(where: str, tensor: Tensor) -> int:
    raise CheckpointValueError(f"{where} is a tensor of shape {tuple(tensor.shape)} where only small values belong")
