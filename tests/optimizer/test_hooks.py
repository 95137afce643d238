"""Hooks are called as torch.optim.AdamW calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optimizer.beside import (
    tiered,
    trained,
)
from tests.optimizer.cases import (
    seeded,
    set_gradients,
    train,
)

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


def test_step_hooks_are_called_in_torchs_order(tmp_path: Path) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    calls: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre 1")),
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre 2")),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        train(optimizer, parameters, [0])
    finally:  # global hooks outlive a failure
        for handle in handles:
            handle.remove()
    assert calls == ["global pre", "pre 1", "pre 2", "post", "global post"]
    train(optimizer, parameters, [1])
    assert len(calls) == 5


def test_a_pre_hook_may_replace_the_arguments(tmp_path: Path) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: ((args[0], lambda: 42), kwargs))
    set_gradients(parameters, 0)
    assert optimizer.step() == 42


def test_state_dict_hooks_are_called_in_order_with_plain_state(tmp_path: Path) -> None:
    _, optimizer = trained(tmp_path)
    calls: list[Any] = []

    def post(name: str) -> Callable[[Any, dict[str, Any]], Any]:
        def hook(optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
            assert all(type(fields) is dict for fields in saved["state"].values())
            assert all(type(value) is Tensor for fields in saved["state"].values() for value in fields.values())
            calls.append(name)
            return {**saved, name: True}

        return hook

    handles = [
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre 2")),
        optimizer.register_state_dict_pre_hook(lambda _: calls.append("pre 1"), prepend=True),
        optimizer.register_state_dict_post_hook(post("post 2")),
        optimizer.register_state_dict_post_hook(post("post 1"), prepend=True),
    ]
    saved = optimizer.state_dict()
    assert calls == ["pre 1", "pre 2", "post 1", "post 2"]
    assert saved["post 1"] and saved["post 2"]
    for handle in handles:
        handle.remove()
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert not optimizer._optimizer_state_dict_post_hooks


def test_load_hooks_are_called_in_order_and_may_change_what_is_loaded(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    saved = optimizer.state_dict()
    calls: list[str] = []

    def pre(optimizer: Any, given: dict[str, Any]) -> dict[str, Any]:
        calls.append("pre 2")
        fields = {**given["state"][0], "exp_avg": torch.ones(3000)}
        return {**given, "state": {**given["state"], 0: fields}}

    def post(optimizer: Any) -> None:
        calls.append("post")
        assert optimizer.state[parameters[0]]["exp_avg"].mean() == 1  # the load is complete

    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("pre 1"), prepend=True)
    optimizer.register_load_state_dict_post_hook(post)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("post 0"), prepend=True)
    optimizer.load_state_dict(saved)
    assert calls == ["pre 1", "pre 2", "post 0", "post"]
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 2
