"""The two hooks that make torch's own `state_dict` and `load_state_dict` work on views of a store.

Saving replaces the views by plain dicts of CPU tensors, each chunk read once. Loading checks everything before anything
changes, and wraps each parameter's state so that torch does not cast it to the parameter's dtype and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tierstore.errors import StateDictError
from tierstore.state_view import check_state, materialise


class Loaded:
    """Carries a parameter's state through torch's load, which would cast it to the parameter's dtype and device."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state

    def __deepcopy__(self, memo: dict[int, Any]) -> Loaded:
        return self


def unwrap(state: Any) -> Mapping[str, Any]:
    return state.state if isinstance(state, Loaded) else state


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
    """Refuse state that does not fit, before anything changes; wrap what fits. torch checks the counts of groups."""
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    present = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", group["params"])]
    if len(saved) != len(present):
        return state_dict
    by_key = {key: (parameter, name) for key, parameter, name in zip(saved, present, names, strict=True)}
    wrapped: dict[Any, Any] = {}
    for key, state in state_dict["state"].items():
        if key not in by_key:
            raise StateDictError(f"the state dict has state for {key!r}, which is in none of its param_groups")
        parameter, name = by_key[key]
        check_state(parameter, name if isinstance(name, str) else f"parameter {key}", state, is_whole=True)
        wrapped[key] = Loaded(state)
    return {**state_dict, "state": wrapped}
