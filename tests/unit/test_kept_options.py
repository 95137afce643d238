"""Options of groups that are kept from step to step: as good as read anew, whatever is done to a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierstore.rules.adam import AdamWRule
from tierstore.rules.kept import KeptOptions

Group = dict[str, Any]


def group(**changes: Any) -> Group:
    fixed = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
    return {"params": [], **fixed, "fused": True, **changes}


class CountingRule(AdamWRule):
    """Counts how often options were read."""

    reads = 0

    def options(self, group: Any) -> Any:
        self.reads += 1
        return super().options(group)


def test_options_are_read_once_while_a_group_holds_the_same_values() -> None:
    rule, groups = CountingRule(), [group(), group(lr=0.2)]
    kept = KeptOptions(rule)
    first = kept.of(groups)
    assert (kept.of(groups), [one.numbers.lr for one in first]) == (first, [0.1, 0.2])
    assert rule.reads == 2


CHANGES: dict[str, tuple[Group, Callable[[Group], object]]] = {
    "another rate": (group(), lambda one: one.update(lr=0.5)),
    "a tensor in place": (group(lr=torch.tensor(0.1)), lambda one: one["lr"].fill_(0.5)),
    "a list in place": (group(betas=[0.9, 0.99]), lambda one: one["betas"].__setitem__(0, 0.5)),
    "a tensor in a tuple": (group(betas=(torch.tensor(0.9), 0.99)), lambda one: one["betas"][0].fill_(0.5)),
    "two values that change places": (
        group(eps=1e-8, weight_decay=0.1),
        lambda one: one.update(eps=one["weight_decay"], weight_decay=one["eps"]),
    ),
    "a key that goes": (group(foreach=None), lambda one: (one.pop("fused"), one.update(foreach=True))),
}


@pytest.mark.parametrize(("found", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_to_a_group_is_seen_by_the_next_step(found: Group, change: Callable[[Group], object]) -> None:
    kept = KeptOptions(AdamWRule())
    before = kept.of([found])[0].numbers
    change(found)
    after = kept.of([found])[0].numbers
    assert after == AdamWRule().options(found) != before
