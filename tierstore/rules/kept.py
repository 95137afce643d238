"""The options of an optimizer's groups as its rule reads them, kept from step to step.

Reading them costs as much as updating a small model. They are read anew when a group holds another value under some
key, and at every step while it holds one that may change in place: a Tensor, a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from tierstore.rules.base import Rule

_NO_OPTIONS = ("params", "param_names")
_FIXED = (float, int, str, type(None))


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """A group's options, and whether the rule's formula goes by memory alone with them."""

    numbers: Any
    takes_any_shape: bool

    @classmethod
    def of(cls, rule: Rule, numbers: Any) -> GroupOptions:
        """Ask the rule about options that it has read."""
        return cls(numbers, rule.takes_any_shape(numbers))


class KeptOptions:
    """The options of groups, by their place."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._kept: dict[int, tuple[list[str], list[Any], GroupOptions]] = {}

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[GroupOptions]:
        """Read the options of all groups, or find them unchanged."""
        return [self._of(number, group) for number, group in enumerate(groups)]

    def _of(self, number: int, group: Mapping[str, Any]) -> GroupOptions:
        names, values = list(group), list(group.values())
        kept = self._kept.get(number)
        if kept is not None and kept[0] == names and all(map(is_, kept[1], values)):
            return kept[2]
        options = GroupOptions.of(self._rule, self._rule.options(group))
        if all(name in _NO_OPTIONS or _is_fixed(value) for name, value in group.items()):
            self._kept[number] = names, values, options
        else:
            self._kept.pop(number, None)
        return options


def _is_fixed(value: object) -> bool:
    return isinstance(value, _FIXED) or (type(value) is tuple and all(isinstance(item, _FIXED) for item in value))
