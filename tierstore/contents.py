"""What a checkpoint says of an optimizer beside the values: an entry for each parameter, and the header.

The header of a checkpoint of an optimizer is::

    algorithm     the rule's name
    is_named      whether parameters are known by names, so that entries may come in another order when they are loaded
    param_groups  [{"options": options as `checkpoint.extra` encodes a dict, "params": numbers of entries}, ...]
    model         null, or {"keys": {key: number of an entry in section `model`}, "others": encoded dict}

An entry of section `params` has the parameter's number (its place among all, those that occur again left out), the
number of its group as attribute `group`, and as fields those of its state: none if it has no state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.checkpoint import extra
from tierstore.checkpoint.entries import Entry, Whole
from tierstore.checkpoint.parts import Part
from tierstore.errors import CheckpointValueError, DamagedCheckpointError
from tierstore.layout import Field, stored_strides
from tierstore.members import Member

Groups = Sequence[Mapping[str, Any]]
Json = Any

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@dataclass(frozen=True, slots=True)
class Header:
    """A checkpoint's header, read and found to be an optimizer's. `groups`: options, and numbers of parameters."""

    algorithm: str
    is_named: bool
    groups: tuple[tuple[dict[str, Any], tuple[int, ...]], ...]
    model: Mapping[str, Json] | None

    @property
    def numbers(self) -> list[int]:
        """The numbers of all parameters in order."""
        return list(dict.fromkeys(number for _, numbers in self.groups for number in numbers))

    @classmethod
    def of(cls, path: str, header: Mapping[str, Json]) -> Header:
        """Read it. Raises DamagedCheckpointError for one that is not as `write_header` has it."""
        try:
            groups = tuple(_group(path, group) for group in header["param_groups"])
            found = cls(str(header["algorithm"]), header["is_named"] is True, groups, header["model"])
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path}: its header is not that of an optimizer ({error!r})") from error
        if found.model is not None and not _is_of_model(found.model):
            raise DamagedCheckpointError(f"{path}: its header has no keys of the model")
        return found


def write_header(
    algorithm: str, groups: Groups, position: Mapping[int, int], *, is_named: bool, model: Mapping[str, Json] | None
) -> dict[str, Json]:
    """Make the header. `position`: of parameters by id. Raises CheckpointValueError for options that are not stored."""
    written = []
    for number, group in enumerate(groups):
        options = {name: value for name, value in group.items() if name != "params"}
        where = f"param_groups[{number}]"
        written.append(
            {
                "options": extra.encode(options, _refuse_large, where),
                "params": [position[id(parameter)] for parameter in group["params"]],
            }
        )
    return {"algorithm": algorithm, "is_named": is_named, "param_groups": written, "model": model}


def encode_others(others: Mapping[str, Any]) -> Json:
    """Encode what a model's state has besides tensors. Raises CheckpointValueError for what is not stored."""
    return {key: extra.encode(value, _refuse_large, f"model.{key}") for key, value in others.items()}


def decode_others(path: str, others: Mapping[str, Json]) -> dict[str, Any]:
    """Undo `encode_others`."""
    return {key: extra.decode(value, _no_tensors, f"{path}: model.{key}") for key, value in others.items()}


def names_of(groups: Groups, model: nn.Module | None) -> dict[int, str] | None:
    """Names of all parameters by id: those the optimizer was given, else the model's; None if some have no own one."""
    named = {id(parameter): name for name, parameter in (model.named_parameters() if model is not None else ())}
    names: dict[int, str] = {}
    for group in groups:
        given: Sequence[str] = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            name = given[place] if place < len(given) else named.get(id(parameter))
            if name is None:
                return None
            names.setdefault(id(parameter), name)
    return names if len(set(names.values())) == len(names) else None


def entry_of(member: Member, name: str, fields: Sequence[Field], step: float | None) -> Entry:
    """The entry of a parameter, or of this rank's part of it, with these fields of its state, as others see them."""
    shape, strides = form_of(member)
    dtypes = {field.name: field_dtype(member, field.dtype) for field in fields}
    whole = whole_of(member.parameter)
    return Entry(name, shape, strides, member.dtype, dtypes, step, {"group": member.group}, whole)


def form_of(member: Member) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of what is stored of a parameter, in elements of its own dtype."""
    shape, strides = tuple(member.form.shape), stored_strides(member.form)
    if not member.dtype.is_complex:
        return shape, strides
    return shape[:-1], tuple(stride // 2 for stride in strides[:-1])


def part_of(member: Member) -> Part:
    """Which part of a parameter this rank holds, and how it is stored."""
    return entry_of(member, member.name, (), None).part


def whole_of(tensor: Tensor) -> Whole | None:
    """What this rank's part of a DTensor is a part of; None for what is whole here.

    Raises CheckpointValueError for one that is no single box here.
    """
    if not is_sharded(tensor):
        return None
    form = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # what torch's own checkpoints go by
    if len(chunks) != 1:
        raise CheckpointValueError(
            f"a tensor of shape {tuple(tensor.shape)} lies on this rank in {len(chunks)} boxes, and of one alone a "
            f"checkpoint is made: save it with torch.distributed.checkpoint"
        )
    (chunk,) = chunks
    if chunk.sizes == tensor.shape:
        return None
    offsets = chunk.offsets if chunk.sizes.numel() else [0] * form.dim()
    return Whole(tuple(form.shape), stored_strides(form), tuple(offsets))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which other ranks may hold other parts."""
    return hasattr(tensor, "_local_tensor")


def field_dtype(member: Member, dtype: torch.dtype) -> torch.dtype:
    """What a field of a complex parameter's state is to others, which is kept as pairs of real numbers."""
    return _COMPLEX[dtype] if member.dtype.is_complex else dtype


def _is_of_model(model: Json) -> bool:
    """Whether this says which tensors and what else a model has."""
    if not isinstance(model, dict) or not all(isinstance(model.get(name), dict) for name in ("keys", "others")):
        return False
    return all(type(number) is int for number in model["keys"].values())


def _group(path: str, group: Mapping[str, Json]) -> tuple[dict[str, Any], tuple[int, ...]]:
    options = extra.decode(group["options"], _no_tensors, f"{path}: param_groups")
    numbers = group["params"]
    if not isinstance(options, dict) or not all(type(number) is int for number in numbers):
        raise TypeError("options are no dict, or params no numbers")
    return options, tuple(numbers)


def _refuse_large(where: str, tensor: Tensor) -> int:
    raise CheckpointValueError(f"{where} is a tensor of {tuple(tensor.shape)}: there, only small ones are stored")


def _no_tensors(number: int) -> Tensor:
    raise KeyError(number)
