"""The two hooks that make torch's own `state_dict` and `load_state_dict` work on views of a store.

Saving replaces the views by plain dicts of CPU tensors, each chunk read once. Loading checks everything before anything
changes, and wraps each parameter's state so that torch does not cast it to the parameter's dtype and device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

from torch import Tensor

from tierstore.errors import StateDictError
from tierstore.state_view import unwrap_view
from tierstore.states import check_state, materialise

OWN_OPTIONS = ("tier", "fused", "foreach", "capturable", "differentiable")
"""Where state lives and how it is computed is an optimizer's own affair: a load leaves it as it is."""


class Loaded:
    """Carries a parameter's state through torch's load, which would cast it to the parameter's dtype and device."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    def __deepcopy__(self, memo: dict[int, Any]) -> Loaded:
        return self


def unwrap(state: Any) -> Any:
    """What a loaded state, or a view of one, holds now."""
    if isinstance(state, Loaded):
        return state.state
    return unwrap_view(state)


def materialise_entries(optimizer: Any, state_dict: dict[str, Any], *, is_partial: bool = False) -> dict[str, Any]:
    """Turn the views in a state dict into plain dicts of tensors, reading each chunk once."""
    if optimizer.has_state():
        binding, handed = optimizer.bound()
        states = materialise(binding, handed, is_partial=is_partial)
        ids = _ids(optimizer.param_groups, state_dict["param_groups"])
        state_dict["state"] = {
            ids[id(binding.members[position].parameter)]: state for position, state in states.items()
        }
    return state_dict


def _ids(groups: Sequence[Mapping[str, Any]], packed: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The number that torch has given each parameter in `packed`; of one that occurs twice, not always the first."""
    pairs = zip(groups, packed, strict=True)
    return {id(p): key for group, numbers in pairs for p, key in zip(group["params"], numbers["params"], strict=True)}


def check_and_wrap(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Refuse state that does not fit, before anything changes; wrap what fits.

    Groups keep their `OWN_OPTIONS`, or that they have none.
    """
    rule, present, saved = optimizer.rule, optimizer.param_groups, state_dict["param_groups"]
    _check_form(state_dict["state"], saved)
    _check_counts(present, saved)
    for number, packed in enumerate(saved):
        _check_options(f"param_groups.{number}", packed, rule.needed_options)
    by_key: dict[Any, tuple[Tensor, str]] = {}
    for group, packed in zip(present, saved, strict=True):
        names = group.get("param_names", [f"parameter {key}" for key in packed["params"]])
        by_key |= dict(zip(packed["params"], zip(group["params"], names, strict=False), strict=False))
    wrapped: dict[Any, Any] = {}
    for key, state in state_dict["state"].items():
        if key not in by_key:
            raise StateDictError(f"the state dict has state for {key!r}, which is in none of its param_groups")
        check_state(rule, *by_key[key], state, is_whole=True)
        wrapped[key] = Loaded(state)
    groups = [_with_own_of(group, packed) for group, packed in zip(present, saved, strict=True)]
    loaded = [{**packed, "params": group["params"]} for group, packed in zip(present, groups, strict=True)]
    optimizer.check_fits(loaded, {by_key[key][0]: state for key, state in state_dict["state"].items() if state})
    return {**state_dict, "state": wrapped, "param_groups": groups}


def _with_own_of(group: Mapping[str, Any], packed: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in packed.items() if key not in OWN_OPTIONS or key in group}  # in their order
    return {**kept, **{key: group[key] for key in OWN_OPTIONS if key in group}}


def _check_form(states: Any, groups: Any) -> None:
    """Refuse what is not a mapping of states and a list of groups."""
    if not isinstance(states, Mapping):
        raise StateDictError(f"`state` is a {type(states).__name__}, not a mapping of parameters to their states")
    if not isinstance(groups, list | tuple):
        raise StateDictError(f"`param_groups` is a {type(groups).__name__}, not a list of groups")
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise StateDictError(f"param_groups.{number} is a {type(group).__name__}, not a mapping of options")
        if "params" not in group:
            raise StateDictError(f"param_groups.{number} has no params")
        if not isinstance(group["params"], list | tuple):
            raise StateDictError(f"param_groups.{number}.params is a {type(group['params']).__name__}, not a list")


def _check_counts(present: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse other counts of groups or of their parameters, as torch would, with the numbers."""
    if len(saved) != len(present):
        raise StateDictError(
            f"loaded state dict has a different number of parameter groups: it has {len(saved)}, the optimizer "
            f"{len(present)}"
        )
    for number, (group, packed) in enumerate(zip(present, saved, strict=True)):
        if len(packed["params"]) != len(group["params"]):
            raise StateDictError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"param_groups.{number} has {len(packed['params'])} parameters, the optimizer's {len(group['params'])}"
            )


def _check_options(where: str, packed: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Refuse options that are missing or no numbers. Their ranges are left alone, as by torch.

    A rate that a scheduler took down to zero may well have ended just below it.
    """
    if missing := [option for option in needed if option not in packed]:
        raise StateDictError(f"{where} has no {', '.join(missing)}: this is another optimizer's state")
    for option in needed:
        value = packed[option]
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        numbers = value if option == "betas" and is_pair else [value]
        if (option == "betas") != is_pair or not all(map(_is_number, numbers)):
            raise StateDictError(
                f"{where}.{option} is {value!r}, not {'a pair of numbers' if option == 'betas' else 'a number'}"
            )


def _is_number(value: Any) -> bool:
    """Whether a value is one real number, and not NaN."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        return False
    try:
        return isinstance(value, Tensor | SupportsFloat) and not math.isnan(float(value))
    except OverflowError:
        return False
