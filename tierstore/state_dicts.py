"""The two hooks that make torch's own `state_dict` and `load_state_dict` work on views of a store.

Saving replaces the views by plain dicts of CPU tensors, each chunk read once. Loading checks everything before anything
changes, and wraps each parameter's state so that torch does not cast it to the parameter's dtype and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tierstore.errors import StateDictError
from tierstore.state_view import ParameterState, check_state, materialise

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
    return dict(state) if isinstance(state, ParameterState) else state


def materialise_entries(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Turn the views in a state dict into plain dicts of tensors, reading each chunk once."""
    if optimizer.has_state():
        binding, handed = optimizer.bound()
        states = materialise(binding, handed)
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
    """Refuse state that does not fit, before anything changes; wrap what fits. torch checks the counts of groups.

    Groups keep their `OWN_OPTIONS`, or that they have none.
    """
    rule, present, saved = optimizer.rule, optimizer.param_groups, state_dict["param_groups"]
    if [len(group["params"]) for group in present] != [len(group["params"]) for group in saved]:
        return state_dict
    for number, packed in enumerate(saved):
        if missing := [option for option in rule.needed_options if option not in packed]:
            raise StateDictError(
                f"param_groups.{number} has no {', '.join(missing)}: this is another optimizer's state"
            )
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
    optimizer.check_fits(loaded, [by_key[key][0] for key, state in state_dict["state"].items() if state])
    return {**state_dict, "state": wrapped, "param_groups": groups}


def _with_own_of(group: Mapping[str, Any], packed: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in packed.items() if key not in OWN_OPTIONS or key in group}  # in their order
    return {**kept, **{key: group[key] for key in OWN_OPTIONS if key in group}}
