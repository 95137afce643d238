"""`optimizer.state` reads and writes through to the store, as the dict that torch.optim.AdamW has would."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.calls import calls_of
from tests.optimizer.beside import (
    EVERY_TIERS,
    SHAPES,
    assert_same_saved,
    assert_same_state_dicts,
    tiered,
    trained,
)
from tests.optimizer.cases import (
    assert_same_parameters,
    same_bits,
    seeded,
    train,
)
from tierstore.errors import StateDictError
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


@EVERY_TIERS
def test_the_state_of_these_tests_travels(tiers: str, tmp_path: Path) -> None:
    """Else nothing here would be said of a tier set but that it is accepted."""
    _, optimizer = trained(tmp_path, tiers)
    moved = {name for name, route in optimizer.store.stats().to_dict()["routes"].items() if route["moves"]}
    names = tiers.split()
    path = names if "cpu" in names or len(names) == 1 else [names[0], "cpu", names[1]]  # by staging
    assert moved >= {f"{a}->{b}" for one, other in itertools.pairwise(path) for a, b in ((one, other), (other, one))}
    assert bool(moved) == (tiers != "cpu")


def test_state_of_a_fresh_parameter_is_an_empty_mapping_that_adds_nothing(tmp_path: Path) -> None:
    parameters = seeded((10,), (20,))
    optimizer = tiered(parameters, tmp_path)
    assert not optimizer.state and len(optimizer.state) == 0 and list(optimizer.state) == []
    view = optimizer.state[parameters[0]]
    assert len(view) == 0 and dict(view) == {} and "exp_avg" not in view and view.get("step") is None
    assert parameters[0] not in optimizer.state and optimizer.state.get(parameters[0]) is None
    with pytest.raises(KeyError):
        view["exp_avg"]
    assert optimizer.state_dict()["state"] == {}


def test_a_view_got_before_the_first_step_shows_the_state_after_it(tmp_path: Path) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    view, states = optimizer.state[parameters[0]], optimizer.state
    train(optimizer, parameters, range(2))
    assert list(view) == ["step", "exp_avg", "exp_avg_sq"] and view["step"] == 2
    assert list(states) == parameters


@EVERY_TIERS
def test_views_show_what_torch_has(tiers: str, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, tiers, amsgrad=True)
    theirs = seeded(*SHAPES)
    reference = torch.optim.AdamW(theirs, lr=1e-2, amsgrad=True, fused=True)
    train(reference, theirs, range(3))
    assert optimizer.state and len(optimizer.state) == len(SHAPES)
    assert list(optimizer.state) == parameters == list(optimizer.state.keys())
    assert object() not in optimizer.state and nn.Parameter(torch.zeros(3000)) not in optimizer.state
    for parameter, other in zip(parameters, theirs, strict=True):
        assert parameter in optimizer.state
        state, wanted = optimizer.state[parameter], reference.state[other]
        assert list(state) == list(wanted) and len(state) == len(wanted)
        assert all(same_bits(state[name], value) for name, value in wanted.items())
        assert all(state[name].stride() == value.stride() for name, value in wanted.items())
        assert all(name in repr(state) for name in wanted)
    for view, wanted in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert {name: value.sum() for name, value in view.items()} == {n: v.sum() for n, v in wanted.items()}
    optimizer.store.check()


def test_step_is_a_cpu_float32_scalar_per_parameter(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, dtype=torch.bfloat16)
    for parameter in parameters:
        step = optimizer.state[parameter]["step"]
        assert (step.shape, step.dtype, step.device.type) == ((), torch.float32, "cpu") and step == 3
        assert optimizer.state[parameter]["step"] is step


def test_a_tensor_handed_out_is_the_same_object_until_the_next_step(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    first = optimizer.state[parameters[0]]["exp_avg"]
    optimizer.state_dict()
    assert optimizer.state[parameters[0]]["exp_avg"] is first
    value = first.clone()
    train(optimizer, parameters, [9])
    assert same_bits(first, value)  # a later step does not write into it
    assert optimizer.state[parameters[0]]["exp_avg"] is not first


@EVERY_TIERS
@pytest.mark.parametrize("looked_at_by", ["step", "state_dict", "view", "deepcopy"])
def test_changes_in_place_to_what_was_handed_out_are_seen(tiers: str, looked_at_by: str, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, tiers)
    theirs = seeded(*SHAPES)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(reference, theirs, range(3))
    for state, parameter in ((optimizer.state, parameters[0]), (reference.state, theirs[0])):
        state[parameter]["exp_avg"].mul_(0.5)
        state[parameter]["exp_avg_sq"][10:20] = 1.0
        state[parameter]["step"].fill_(7)
    if looked_at_by == "state_dict":
        assert_same_state_dicts(optimizer, reference)
    if looked_at_by == "view":
        assert same_bits(optimizer.state[parameters[0]]["exp_avg"], reference.state[theirs[0]]["exp_avg"])
    if looked_at_by == "deepcopy":
        parameters, optimizer = copy.deepcopy((parameters, optimizer))
    train(optimizer, parameters, [5])
    train(reference, theirs, [5])
    assert_same_parameters(parameters, theirs)
    assert_same_state_dicts(optimizer, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_assigning_an_item_sets_it(dtype: torch.dtype, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    value = torch.linspace(0, 1, 2000).reshape(50, 40).t().to(dtype)  # other strides, other dtype
    optimizer.state[parameters[1]]["exp_avg"] = value
    assert same_bits(optimizer.state[parameters[1]]["exp_avg"], value.float())
    optimizer.state[parameters[1]]["step"] = 12
    assert same_bits(optimizer.state[parameters[1]]["step"], torch.tensor(12.0))
    optimizer.state[parameters[1]]["step"] = torch.tensor([13.0], dtype=torch.float64)
    assert same_bits(optimizer.state[parameters[1]]["step"], torch.tensor(13.0))
    optimizer.store.check()


def test_assigning_one_item_does_not_lose_a_change_in_place_to_another(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    state = optimizer.state[parameters[0]]
    second = state["exp_avg_sq"]
    state["exp_avg"] = torch.zeros(3000)
    assert state["exp_avg_sq"] is second
    second.fill_(2.0)
    assert same_bits(optimizer.state_dict()["state"][0]["exp_avg_sq"], torch.full((3000,), 2.0))


def test_assigning_a_parameters_whole_state_replaces_it(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    replacement = {"step": 5, "exp_avg": torch.ones(3000), "exp_avg_sq": torch.full((3000,), 2.0)}
    optimizer.state[parameters[0]] = replacement
    assert {name: value.mean() for name, value in optimizer.state[parameters[0]].items()} == {
        "step": 5,
        "exp_avg": 1,
        "exp_avg_sq": 2,
    }
    optimizer.state[parameters[0]] = optimizer.state[parameters[0]]  # itself
    assert optimizer.state[parameters[0]]["exp_avg"].mean() == 1


def test_assigning_state_to_a_fresh_parameter_makes_it(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer loads by writing into `state`, parameter by parameter."""
    _, optimizer = trained(tmp_path)
    saved = optimizer.state_dict()
    theirs = seeded(*SHAPES)
    fresh = tiered(theirs, tmp_path)
    for number, parameter in enumerate(theirs):
        fresh.state[parameter] = saved["state"][number]
    assert_same_saved(fresh.state_dict(), saved)


def test_deleting_a_parameters_state_makes_it_fresh(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    del optimizer.state[parameters[0]]
    assert parameters[0] not in optimizer.state and len(optimizer.state) == len(SHAPES) - 1
    with pytest.raises(KeyError):
        del optimizer.state[parameters[0]]
    with pytest.raises(TypeError, match="cannot be taken away alone"):
        del optimizer.state[parameters[1]]["exp_avg"]
    before = parameters[0].detach().clone()
    train(optimizer, parameters, [4])
    (fresh,) = [nn.Parameter(before)]
    fresh.grad = parameters[0].grad
    torch.optim.AdamW([fresh], lr=1e-2, fused=True).step()
    assert_same_parameters([parameters[0]], [fresh])
    assert optimizer.state[parameters[0]]["step"] == 1


@pytest.mark.parametrize("reset", [{}, defaultdict(dict)])
def test_replacing_state_wholesale_with_nothing_resets(reset: Any, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    optimizer.state = reset
    assert not optimizer.state and optimizer.state_dict()["state"] == {}
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    train(optimizer, parameters, [0])
    train(torch.optim.AdamW(theirs, lr=1e-2, fused=True), theirs, [0])
    assert_same_parameters(parameters, theirs)


def test_replacing_state_wholesale_loads_it(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    wanted = {p: {name: value.clone() for name, value in state.items()} for p, state in optimizer.state.items()}
    saved = optimizer.state_dict()
    train(optimizer, parameters, [8])
    optimizer.state = wanted
    assert_same_saved(optimizer.state_dict(), saved)
    optimizer.state.clear()
    assert not optimizer.state


@pytest.mark.parametrize(
    "wrong",
    [
        {"exp_avg": torch.zeros(3000), "step": 1},
        {"exp_avg": torch.zeros(3000), "exp_avg_sq": torch.zeros(2999), "step": 1},
        {"exp_avg": torch.zeros(3000), "exp_avg_sq": torch.zeros(3000), "step": torch.zeros(2)},
        {"exp_avg": torch.zeros(3000), "exp_avg_sq": torch.zeros(3000), "step": "one"},
        {"momentum_buffer": torch.zeros(3000)},
        {"exp_avg": [0.0] * 3000, "exp_avg_sq": torch.zeros(3000), "step": 1},
        7,
    ],
)
@pytest.mark.parametrize("by", ["item", "attribute", "load"])
def test_wrong_state_is_refused_and_changes_nothing(wrong: Any, by: str, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    before = optimizer.state_dict()
    groups = [dict(group) for group in optimizer.param_groups]
    attempts: dict[str, Callable[[], Any]] = {
        "item": lambda: optimizer.state.__setitem__(parameters[0], wrong),
        "attribute": lambda: setattr(optimizer, "state", {parameters[0]: wrong}),
        "load": lambda: optimizer.load_state_dict({**before, "state": {**before["state"], 0: wrong}}),
    }
    with pytest.raises(StateDictError):
        attempts[by]()
    assert_same_saved(optimizer.state_dict(), before)
    assert optimizer.param_groups == groups
    optimizer.store.check()
    train(optimizer, parameters, [3])


def test_state_of_a_parameter_that_is_not_the_optimizers_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    _, optimizer = trained(tmp_path)
    before = optimizer.state_dict()
    stranger = nn.Parameter(torch.zeros(3))
    with pytest.raises(StateDictError, match=r"a tensor of shape \(3,\) is in none of the param_groups"):
        optimizer.state[stranger] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    with pytest.raises(StateDictError):
        optimizer.state = {stranger: {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    assert_same_saved(optimizer.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EVERY_TIERS
def test_state_that_a_framework_casts_or_moves_stays_in_its_tier_and_dtype(
    tiers: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Lightning moves each tensor by assigning to it; what is cast on the way has lost its bits, no more."""
    parameters, optimizer = trained(tmp_path, tiers, dtype=dtype)
    saved, homes = optimizer.state_dict(), _homes(optimizer)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to("cpu", copy=True)
    assert_same_saved(optimizer.state_dict(), saved)
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(torch.bfloat16)
    for number, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            assert same_bits(value, saved["state"][number][name].to(torch.bfloat16).float()), name
    assert _homes(optimizer) == homes
    train(optimizer, parameters, [5])
    optimizer.store.check()


def _homes(optimizer: TieredAdamW) -> list[str]:
    binding, _ = optimizer.bound()
    return [optimizer.store.home_of(chunk.number) for chunk in binding.layout.chunks]


# -- what torch and its tools look at ---------------------------------------------------------------------------


def test_it_is_a_torch_optimizer_in_every_respect_that_is_looked_at(tmp_path: Path) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, torch.optim.AdamW)
    wanted = torch.optim.AdamW(seeded((10,)), lr=1e-2, fused=True)
    assert optimizer.defaults == wanted.defaults
    assert repr(optimizer) == repr(wanted).replace("AdamW", "TieredAdamW")
    assert hasattr(optimizer.step, "__func__")
    assert optimizer.param_groups[0].keys() == wanted.param_groups[0].keys()


def test_thousands_of_parameters_are_saved_loaded_and_looked_at_with_work_that_grows_with_their_number(
    tmp_path: Path,
) -> None:
    """Every look at a parameter's state must not look at all parameters."""

    def calls(count: int) -> int:
        parameters = seeded(*[(4,)] * count)
        optimizer = tiered(parameters, tmp_path)
        train(optimizer, parameters, [0])

        def use() -> None:
            optimizer.load_state_dict(optimizer.state_dict())
            assert sum(float(state["step"]) for state in optimizer.state.values()) == count

        return calls_of(use)

    assert calls(800) < 5 * calls(200)  # squares would be 16 times
