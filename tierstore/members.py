"""What a parameter is to an optimizer: its local part, its place in the groups, and what must not change unnoticed.

A `Member` describes one parameter as it was when it was looked at. It holds no state and no storage of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product, repeat, zip_longest
from operator import attrgetter, eq, is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import PolicyError
from tierstore.layout import as_real, is_dense
from tierstore.rules import Rule

UPDATED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

WithState = Mapping[Any, Collection[str]]
"""Parameters that must have room for state, frozen or not, and the names in their states (a state itself will do)."""
NONE: WithState = MappingProxyType({})

Needs = Callable[[Tensor], bool]
"""Whether a parameter without state needs room for it now."""

ORDINARY = (Tensor, torch.nn.Parameter)
"""Types of tensors that are all there is to them."""
_UPDATED_PAIRS = frozenset(
    pair for pair in product(UPDATED_DTYPES, repeat=2) if pair[0].is_complex == pair[1].is_complex
)


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter at one position (its first, if it occurs more than once), as it was at binding."""

    parameter: Tensor
    group: int
    name: str
    is_covered: bool  # has room for state
    moments: tuple[str, ...]  # the fields that its group's options ask for, and those that its state has besides
    dtype: torch.dtype
    form: Tensor  # shape, strides and dtype of `local_of(parameter)`; on meta, and not changed when the parameter is
    outline: tuple[Any, ...]
    tier: str | None
    is_plain: bool  # an ordinary tensor of real numbers, dense

    @classmethod
    def of(
        cls,
        parameter: Tensor,
        number: int,
        *,
        name: str,
        is_covered: bool,
        moments: tuple[str, ...],
        tier: str | None,
    ) -> Member:
        """Describe a parameter of the group numbered `number`, whose options ask for `moments` and `tier`."""
        local = local_of(parameter)
        return cls(
            parameter,
            number,
            name,
            is_covered,
            moments,
            getattr(parameter, "_local_tensor", parameter).dtype,
            torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta"),
            outline_of(parameter),
            tier,
            type(parameter) in ORDINARY and not parameter.is_complex() and is_dense(local),
        )


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, as real numbers: a DTensor's shard, a complex tensor's pairs."""
    if type(tensor) in ORDINARY and not tensor.is_complex():  # as nearly all are: spare them the questions
        return tensor.detach() if tensor.requires_grad else tensor
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(local, "wait"):  # what a collective that may still be under way will give
        local = local.wait()
    return as_real(local.detach() if local.requires_grad else local)


def sharded_like(parameter: Tensor, values: Tensor) -> Tensor:
    """Shard values of the parameter's shape as the parameter is, if both are DTensors.

    A collective unless they are sharded alike already (gradients under sequence parallelism are partial sums, say): all
    ranks call it for the same parameters in the same order.
    """
    if is_sharded_like(parameter, values):
        return values
    wanted: Any = parameter._spec  # type: ignore[attr-defined]
    sharded: Tensor = values.to(parameter.device).redistribute(wanted.mesh, wanted.placements)  # type: ignore[attr-defined]
    return sharded


def is_sharded_like(parameter: Tensor, values: Tensor) -> bool:
    """Whether values of the parameter's shape need no collective to be sharded as the parameter is."""
    if type(parameter) in ORDINARY:
        return True
    wanted, found = getattr(parameter, "_spec", None), getattr(values, "_spec", None)
    return wanted is None or found is None or (wanted.placements, wanted.mesh) == (found.placements, found.mesh)


def may_still_be_sharded(parameter: Tensor) -> bool:
    """Whether FSDP may yet replace the parameter by a shard: it is whole, and there are other ranks."""
    if hasattr(parameter, "_local_tensor") or not torch.distributed.is_available():
        return False
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def refuse_what_no_rule_updates(parameter: Tensor, gradient: Tensor) -> None:
    """Raise for a parameter without values, or with values or a gradient of another kind than state's.

    RuntimeError, for a dtype NotImplementedError, which is one.
    """
    if (parameter.dtype, gradient.dtype) in _UPDATED_PAIRS and not parameter.is_meta:
        return
    if parameter.is_meta:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient and is on the meta device, where it has no "
            f"values: give the model values (`to_empty`, then initialise or load it) before the first step"
        )
    if parameter.dtype not in UPDATED_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in UPDATED_DTYPES)
        raise NotImplementedError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient and is {parameter.dtype}, but cannot be "
            f"updated: keep it without a gradient, or in one of {allowed}"
        )
    raise RuntimeError(f"a gradient of {gradient.dtype} cannot update a parameter of {parameter.dtype}")


def needs_state(parameter: Tensor) -> bool:
    """Whether a step may update the parameter."""
    return (parameter.requires_grad or parameter.grad is not None) and parameter.dtype in UPDATED_DTYPES


def needs_state_now(parameter: Tensor) -> bool:
    """Whether the next step updates the parameter."""
    return parameter.grad is not None and parameter.dtype in UPDATED_DTYPES


def nothing_needs(parameter: Tensor) -> bool:
    """As `needs_state`, for who only looks at the state there is."""
    return False


def refuse_shared_memory(members: Sequence[Member]) -> None:
    """Raise PolicyError if two parameters, or elements of one, are the same memory: bits would hang on chunk ends.

    RuntimeError for a parameter that is not dense.
    """
    spans = []
    for member in members:
        if member.parameter.layout is not torch.strided:
            raise RuntimeError(f"parameter {member.name} is {member.parameter.layout}: keep it dense, as its state is")
        local = local_of(member.parameter)
        if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
            raise PolicyError(f"parameter {member.name} is an expanded tensor, whose elements share memory: clone() it")
        if local.numel() and local.device.type != "meta" and is_dense(local):
            spans.append((str(local.device), local.data_ptr(), local.nbytes, member.name))
    for (device, begin, nbytes, name), (other_device, other, _, other_name) in pairwise(sorted(spans)):
        if device == other_device and other < begin + nbytes:
            raise PolicyError(
                f"parameters {name} and {other_name} share memory, so that whichever is updated first changes numbers: "
                f"tie weights by using one Parameter in both places"
            )


def survey(
    groups: Sequence[Mapping[str, Any]], rule: Rule, with_state: WithState = NONE, *, needs: Needs = needs_state
) -> list[Member]:
    """List the distinct parameters of all groups in order."""
    held = {id(parameter): names for parameter, names in with_state.items()}
    members: dict[int, Member] = {}
    for number, group in enumerate(groups):
        asked, tier = rule.moments_of(group), group.get("tier")
        for parameter, name in zip_longest(group["params"], group.get("param_names", ())[: len(group["params"])]):
            if id(parameter) in members:
                continue
            members[id(parameter)] = Member.of(
                parameter,
                number,
                name=name or f"param.{len(members)}",
                is_covered=needs(parameter) or id(parameter) in held,
                moments=tuple(name for name in rule.moments if name in asked or name in held.get(id(parameter), ())),
                tier=tier,
            )
    return list(members.values())


class Unchanged:
    """Finds all parameters as they were bound, and a gradient like each of them, with no loop in Python.

    So it is in nearly all steps of nearly all models, and looking at one after the other costs more than updating them.
    """

    def __init__(self, members: Sequence[Member], groups: Sequence[Mapping[str, Any]], rule: Rule) -> None:
        self._rule = rule
        self.parameters = [member.parameter for member in members]
        self._outlines = [member.outline for member in members]
        self._groups = [self._of_group(group) for group in groups]
        self._is_possible = bool(members) and all(
            member.is_plain
            and member.is_covered
            and member.dtype in UPDATED_DTYPES
            and not member.parameter.is_meta
            and set(self._groups[member.group][0]) <= set(member.moments)
            for member in members
        )

    def gradients(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
        """The gradients of all parameters, in their order. None if one is missing, or anything is not as it was, or
        was never plain: then each must be looked at.
        """
        parameters = list(chain.from_iterable(map(itemgetter("params"), groups)))
        if (
            not self._is_possible
            or len(parameters) != len(self.parameters)
            or not all(map(is_, parameters, self.parameters))
            or [self._of_group(group) for group in groups] != self._groups
        ):
            return None
        gradients = list(map(_GRADIENT, parameters))
        if (
            all(map(is_, map(type, gradients), repeat(Tensor)))
            and all(map(ORDINARY.__contains__, map(type, parameters)))
            and all(map(is_, map(_LAYOUT, gradients), repeat(torch.strided)))
            and all(map(eq, _outlines(parameters), self._outlines))
            and all(map(eq, _outlines(gradients), self._outlines))
            and not any(map(Tensor.is_neg, gradients))
        ):
            return gradients
        return None

    def _of_group(self, group: Mapping[str, Any]) -> tuple[tuple[str, ...], object, int]:
        return tuple(self._rule.moments_of(group)), group.get("tier"), len(group["params"])


_GRADIENT, _LAYOUT, _DTYPE, _DEVICE, _SHAPE = map(attrgetter, ("grad", "layout", "dtype", "device", "shape"))


def _outlines(tensors: Sequence[Tensor]) -> Iterator[tuple[Any, ...]]:
    """As `outline_of`, of ordinary tensors."""
    return zip(
        map(_DTYPE, tensors), map(_DEVICE, tensors), map(_SHAPE, tensors), map(Tensor.stride, tensors), strict=True
    )


def outline_of(parameter: Tensor) -> tuple[Any, ...]:
    """What must stay the same for a layout to stay right."""
    local = parameter if type(parameter) in ORDINARY else getattr(parameter, "_local_tensor", parameter)
    return (local.dtype, local.device, local.shape, local.stride())
