"""Constructing, adding groups, and what torch's tools look at: as torch.optim.AdamW, or refused in its words."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import tierstore
from tests.optimizer.cases import assert_same_parameters, seeded, train
from tests.optimizer.settings import (
    EVERY_SETTING,
    InMemory,
    Make,
    assert_same_optimizers,
    backward,
    fused,
    go_on,
    network,
    parameters_of,
    trained,
)
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.usefixtures("swap_folder")


# -- arguments --------------------------------------------------------------------------------------------------


def test_the_signature_is_torchs_and_two_keywords_more() -> None:
    found = dict(inspect.signature(TieredAdamW).parameters)
    wanted = dict(inspect.signature(torch.optim.AdamW).parameters)
    added = [found.pop(name) for name in ("policy", "tiers")]
    assert all(one.kind is one.KEYWORD_ONLY and one.default is None for one in added)
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert (found[name].kind, found[name].default) == (parameter.kind, parameter.default), name
    positional = [name for name, one in wanted.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert list(found)[: len(positional)] == positional


@EVERY_SETTING
def test_options_may_be_given_by_position(setting: Make) -> None:
    options = (0.1, (0.8, 0.9), 1e-6, 0.3, True)
    assert setting(seeded((3,)), *options).defaults == fused(seeded((3,)), *options).defaults


LINEAR = nn.Linear(30, 40)
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "generator": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "tuple": lambda model: tuple(model.parameters()),
    "dict's values": lambda model: dict(model.named_parameters()).values(),
    "filter": lambda model: filter(lambda parameter: parameter.requires_grad, model.parameters()),
    "named": lambda model: model.named_parameters(),
    "named list": lambda model: list(model.named_parameters()),
    "groups": lambda model: [{"params": model.weight, "lr": 0.5}, {"params": [model.bias]}],
    "groups of generators": lambda model: [{"params": model.parameters(), "mine": 3}],
    "groups of names": lambda model: ({"params": [pair], "lr": 0.5} for pair in model.named_parameters()),
    "a group without parameters": lambda model: [{"params": []}, {"params": model.parameters()}],
    "ParameterList": lambda model: nn.ParameterList(model.parameters()),
}


@pytest.mark.parametrize("kind", GIVEN)
@EVERY_SETTING
def test_parameters_may_be_given_in_every_way_that_torch_takes(setting: Make, kind: str) -> None:
    mine, theirs = nn.Linear(30, 40), nn.Linear(30, 40)
    theirs.load_state_dict(mine.state_dict())
    optimizer, reference = setting(GIVEN[kind](mine)), fused(GIVEN[kind](theirs))
    assert [shown(group) for group in optimizer.param_groups] == [shown(group) for group in reference.param_groups]
    for one in (optimizer, reference):
        train(one, parameters_of(one), range(2))
    assert_same_optimizers(optimizer, reference)


def shown(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": len(group["params"])}


WRONG: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.zeros(3),
    "a parameter": lambda: nn.Parameter(torch.zeros(3)),
    "a set": lambda: [{"params": {nn.Parameter(torch.zeros(3))}}],
    "nothing": lambda: [],
    "an empty generator": lambda: iter(()),
    "no leaf": lambda: [nn.Parameter(torch.zeros(3)) * 2],
    "no leaf with a name": lambda: [("a", nn.Parameter(torch.zeros(3)) * 2)],
    "no tensor": lambda: [3],
    "no tensor with a name": lambda: [("a", 3)],
    "a group without params": lambda: [{"lr": 1.0}],
    "names for some": lambda: [("a", nn.Parameter(torch.zeros(3))), nn.Parameter(torch.zeros(3))],
    "one in two groups": lambda: [{"params": [LINEAR.weight]}, {"params": LINEAR.parameters()}],
    "groups and parameters": lambda: [{"params": [LINEAR.weight]}, LINEAR.bias],
    "not iterable": lambda: 3,
}


def told(act: Callable[[], Any]) -> tuple[type[Exception], str]:
    """The class and words of the error that something ends with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            act()
        except Exception as error:
            return type(error), str(error)
    raise AssertionError("this is not refused")


@pytest.mark.parametrize("kind", WRONG)
@EVERY_SETTING
def test_parameters_that_torch_refuses_are_refused_in_its_words(setting: Make, kind: str) -> None:
    assert told(lambda: setting(WRONG[kind]())) == told(lambda: fused(WRONG[kind]()))


NAN = float("nan")


@pytest.mark.parametrize(
    "options",
    [
        *[{"lr": -1.0}, {"lr": NAN}, {"lr": torch.tensor(-1.0)}, {"lr": torch.tensor([1.0, 2.0])}, {"lr": "fast"}],
        *[{"eps": -1.0}, {"eps": NAN}, {"weight_decay": -1.0}, {"weight_decay": NAN}],
        *[{"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"betas": (NAN, 0.9)}],
        *[{"betas": (0.9, torch.tensor(0.9))}, {"betas": (torch.ones(2) / 2, torch.ones(2) / 2)}, {"betas": (0.9,)}],
        *[{"betas": (torch.tensor(0.5), torch.ones(2) / 2)}, {"betas": (0, 0.9)}, {"betas": 0.9}],
        *[{"fused": True, "foreach": True}, {"fused": True, "differentiable": True}, {"momentum": 0.9}],
        *[
            {"foreach": True, "lr": torch.tensor(0.1)},
            {"foreach": True, "betas": (torch.tensor(0.5), torch.tensor(0.6))},
        ],
    ],
    ids=repr,
)
@EVERY_SETTING
def test_options_that_torch_refuses_are_refused_in_its_words(setting: Make, options: Any) -> None:
    kind, story = told(lambda: fused(seeded((10,)), **options))
    found, words = told(lambda: setting(seeded((10,)), **options))
    assert found is kind
    assert words.replace("TieredAdamW", "AdamW").replace("TieredOptimizer", "AdamW") == story or "momentum" in words


@pytest.mark.parametrize("flag", ["differentiable", "capturable"])
@pytest.mark.parametrize("by", ["argument", "group", "added group"])
@EVERY_SETTING
def test_what_cannot_be_honoured_is_refused_with_the_reason(setting: Make, by: str, flag: str) -> None:
    reason = {"differentiable": "autograd", "capturable": "reads and writes files"}[flag]
    group = {"params": seeded((3,)), flag: True}
    attempts: dict[str, Callable[[], Any]] = {
        "argument": lambda: setting(seeded((3,)), **{flag: True}),
        "group": lambda: setting([group]),
        "added group": lambda: setting(seeded((3,))).add_param_group(group),
    }
    with pytest.raises(RuntimeError, match=f"does not support `{flag}`: .*{reason}"):
        attempts[by]()


SHOWN: list[tuple[dict[str, Any], tuple[Any, Any]]] = [
    ({}, (None, True)),
    ({"fused": True}, (None, True)),
    ({"foreach": False, "fused": True}, (False, True)),
    ({"foreach": True}, (True, None)),
    ({"foreach": True, "fused": False}, (True, False)),
    ({"fused": False}, (None, False)),
    ({"foreach": False, "fused": False}, (False, False)),
]


@pytest.mark.parametrize(("options", "shown"), SHOWN, ids=repr)
@EVERY_SETTING
def test_groups_show_what_was_asked_for_or_that_it_is_fused(setting: Make, options: Any, shown: Any) -> None:
    """In defaults, groups, added groups and state dicts; and as torch shows it, where something was asked for."""
    optimizer, reference = setting(seeded((3,)), **options), torch.optim.AdamW(seeded((3,)), **options)
    for one in (optimizer, reference):
        one.add_param_group({"params": seeded((4,))})
    groups = [optimizer.defaults, *optimizer.param_groups, *optimizer.state_dict()["param_groups"]]
    assert {(group["foreach"], group["fused"]) for group in groups} == {shown}
    if options:
        assert optimizer.defaults == reference.defaults
    assert hasattr(optimizer, "_step_supports_amp_scaling") == hasattr(reference, "_step_supports_amp_scaling")


# -- groups added later -----------------------------------------------------------------------------------------

ADDED: dict[str, Callable[[Any], Any]] = {
    "no dict": lambda optimizer: [nn.Parameter(torch.zeros(3))],
    "a set": lambda optimizer: {"params": {nn.Parameter(torch.zeros(3))}},
    "one that is there": lambda optimizer: {"params": parameters_of(optimizer)[0]},
    "no leaf": lambda optimizer: {"params": [nn.Parameter(torch.zeros(3)) * 2]},
    "no tensor": lambda optimizer: {"params": [3]},
    "a name": lambda optimizer: {"params": [("a", nn.Parameter(torch.zeros(3)))]},
}


@pytest.mark.parametrize("kind", ADDED)
@EVERY_SETTING
def test_a_group_that_torch_refuses_is_refused_in_its_words_and_changes_nothing(setting: Make, kind: str) -> None:
    model, optimizer = trained(setting)
    twin, reference = trained(fused)
    assert told(lambda: optimizer.add_param_group(ADDED[kind](optimizer))) == told(
        lambda: reference.add_param_group(ADDED[kind](reference))
    )
    assert len(optimizer.param_groups) == 1
    go_on(model, optimizer, range(2, 4))
    go_on(twin, reference, range(2, 4))
    assert_same_optimizers(optimizer, reference)


# -- gradients that cannot be used ------------------------------------------------------------------------------

UNUSABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "int": (lambda: torch.ones(10, dtype=torch.int64), r"int64, but cannot be updated: .*float32"),
    "bool": (lambda: torch.ones(10, dtype=torch.bool), r"bool, but cannot be updated: .*float32"),
    "float8": (lambda: torch.zeros(10).to(torch.float8_e5m2), r"float8_e5m2, but cannot be updated: .*float32"),
    "meta": (lambda: torch.zeros(10, device="meta"), r"meta device, where it has no values: .*to_empty"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@EVERY_SETTING
def test_gradients_of_parameters_that_cannot_be_updated_are_refused_before_anything_moves(
    setting: Make, kind: str
) -> None:
    """As torch's fused AdamW refuses them, but saying which parameter it is. Without a gradient they may stay."""
    make, story = UNUSABLE[kind]
    odd = nn.Parameter(make(), requires_grad=False)
    (plain,) = seeded((4000,))
    optimizer = setting([plain, odd])
    train(optimizer, [plain], [0])
    before = plain.detach().clone()
    odd.grad = torch.zeros_like(odd)
    with pytest.raises(RuntimeError, match=rf"shape \(10,\) has a gradient and is .*{story}"):
        optimizer.step()
    assert_same_parameters([plain], [before])
    assert optimizer.state[plain]["step"] == 1 and odd not in optimizer.state
    with pytest.raises(RuntimeError):
        torch.optim.AdamW([odd], fused=True).step()
    odd.grad = None
    train(optimizer, [plain], [1])


def test_a_sparse_parameter_is_refused_as_such() -> None:
    parameter = nn.Parameter(torch.ones(3, 4).to_sparse())
    with pytest.raises(RuntimeError, match=r"param\.0 is torch\.sparse_coo"):
        InMemory([parameter])


# -- what torch's tools do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_fused", [None, True])
@EVERY_SETTING
def test_a_grad_scaler_refuses_what_it_refuses_with_torchs(setting: Make, is_fused: bool | None) -> None:
    """A closure; and a step without gradients, which must not be gone before it looks, unless asked to be fused."""

    def refused(make: Make) -> list[tuple[type[Exception], str]]:
        parameters, scaler = seeded((10,)), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = make(parameters, fused=is_fused)
        scaler.scale(torch.zeros(1))  # it makes its tensors at the first loss
        stories = [told(lambda: scaler.step(optimizer, closure=lambda: 7.0))]
        if is_fused:
            assert scaler.step(optimizer) is None
            return stories
        return [*stories, told(lambda: scaler.step(optimizer))]

    assert refused(setting) == refused(torch.optim.AdamW)


@EVERY_SETTING
def test_a_compiled_training_step_trains_as_an_uncompiled_one(setting: Make) -> None:
    """And compiles the model alone: what `step` does with files cannot be traced."""
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    optimizers = []
    for is_compiled in (True, False):
        model = network()
        optimizers.append(setting(model.parameters(), lr=1e-2))

        def train_step(model: nn.Module = model, optimizer: Any = optimizers[-1]) -> None:
            optimizer.zero_grad()
            backward(model, 1)
            optimizer.step()

        run = torch.compile(train_step, backend=backend) if is_compiled else train_step
        for _ in range(3):
            run()
    assert_same_optimizers(*optimizers)
    assert any("model(inputs)" in where for where in traced)
    assert not any(str(Path(tierstore.__file__).parent) in where for where in traced)


@EVERY_SETTING
def test_a_step_inside_a_graph_capture_is_refused_and_changes_nothing(
    setting: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(setting)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.tiered.is_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            optimizer.step()
    assert_same_parameters(list(model.parameters()), before)
    go_on(model, optimizer, range(2, 3))


@EVERY_SETTING
def test_a_scheduler_counts_on_what_torchs_optimizers_have(setting: Make) -> None:
    """It writes `initial_lr` and rates in place, wants one value for each group, and cycles betas."""
    optimizer = setting([{"params": seeded((10,))}, {"params": seeded((20,)), "lr": torch.tensor(0.5)}], lr=1e-2)
    rate = optimizer.param_groups[1]["lr"]
    lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10, cycle_momentum=True)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.95, 0.95]
    assert all("initial_lr" in group for group in optimizer.param_groups)
    assert optimizer.param_groups[1]["lr"] is rate and rate == pytest.approx(0.2 / 25)
    with pytest.raises(KeyError, match="initial_lr"):
        lr_scheduler.StepLR(setting(seeded((3,))), 1, last_epoch=3)
