"""What torch checks of all its optimizers, checked of ours: state dicts, copies, hooks and what is shown.

In both settings; torch's own AdamW is the judge where it can be.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from tests.optimizer.cases import same_bits, seeded, train
from tests.optimizer.settings import (
    EVERY_IMPLEMENTATION,
    EVERY_SETTING,
    Make,
    assert_same_fields,
    assert_same_optimizers,
    fused,
    go_on,
    network,
    parameters_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("swap_folder")


def assert_same_saved(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    for key, fields in wanted["state"].items():
        assert_same_fields(found["state"][key], fields, key)


# -- shown ------------------------------------------------------------------------------------------------------

SHOWN: list[dict[str, Any]] = [
    *[{}, {"lr": torch.tensor(0.1)}, {"betas": (torch.tensor(0.5), torch.tensor(0.6))}, {"weight_decay": 0.0}],
    *[{"amsgrad": True, "maximize": True}, {"foreach": True}, {"fused": False}, {"fused": True}],
]


@pytest.mark.parametrize("options", SHOWN, ids=repr)
@EVERY_SETTING
def test_it_is_printed_as_torchs_is(setting: Make, options: Any) -> None:
    def groups() -> list[dict[str, Any]]:
        return [{"params": seeded((10,)), "mine": "a key of the user's"}, {"params": seeded((10,), (3,)), "lr": 1.0}]

    wanted = fused(groups(), **options)
    assert repr(setting(groups(), **options)) == repr(wanted).replace("AdamW", setting.__name__, 1)


@EVERY_SETTING
def test_it_is_printed_before_and_after_steps_and_loads(setting: Make) -> None:
    _, optimizer = trained(setting)
    shown = repr(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert repr(optimizer) == shown == repr(setting(network().parameters(), lr=1e-2))
    assert str(optimizer.state) == "StateView(5 parameters)"


# -- state dicts ------------------------------------------------------------------------------------------------


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_a_state_dict_is_the_same_for_the_same_training(setting: Make, flags: Any) -> None:
    """Taken twice, of two optimizers, and of one that has loaded it and gone on; key by key in one order."""
    model, optimizer = trained(setting, **flags)
    twin, other = trained(setting, **flags)
    saved = optimizer.state_dict()
    assert_same_saved(optimizer.state_dict(), saved)
    assert_same_saved(other.state_dict(), saved)
    loaded = setting(twin.parameters(), lr=1e-2, **flags)
    loaded.load_state_dict(saved)
    assert_same_saved(loaded.state_dict(), saved)
    go_on(model, optimizer, range(2, 4))
    go_on(twin, loaded, range(2, 4))
    assert_same_saved(loaded.state_dict(), optimizer.state_dict())
    assert_same_optimizers(loaded, optimizer)


@pytest.mark.parametrize("by", ["torch to tiered", "tiered to torch", "tiered to tiered"])
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_training_goes_on_to_the_bit_in_another_class_with_the_same_flags(setting: Make, flags: Any, by: str) -> None:
    source, destination = (fused if name == "torch" else setting for name in by.split(" to "))
    model, optimizer = trained(source, **flags)
    twin = copy.deepcopy(model)
    resumed = destination(twin.parameters(), **flags)
    resumed.load_state_dict(optimizer.state_dict())
    go_on(model, optimizer, range(2, 5))
    go_on(twin, resumed, range(2, 5))
    assert_same_optimizers(resumed, optimizer)


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_torch_that_asked_for_nothing_continues_with_our_arithmetic(setting: Make, flags: Any) -> None:
    """What a group says of `fused` and `foreach` travels in the state dict, and torch's AdamW follows it."""
    model, optimizer = trained(setting, **flags)
    twin = copy.deepcopy(model)
    resumed = torch.optim.AdamW(twin.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    go_on(model, optimizer, range(2, 5))
    go_on(twin, resumed, range(2, 5))
    assert_same_optimizers(optimizer, resumed)


@pytest.mark.parametrize(
    "loaded", [{"foreach": True}, {"fused": False}, {"fused": True}, {"capturable": True}, {}], ids=repr
)
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_a_load_does_not_change_the_implementation(setting: Make, flags: Any, loaded: dict[str, Any]) -> None:
    """It is this optimizer's own affair, as its tiers are; `capturable` and `differentiable` it could not honour."""
    _, source = trained(torch.optim.AdamW)
    saved = source.state_dict()
    saved["param_groups"][0].update(differentiable=True, **loaded)
    optimizer = setting(network().parameters(), **flags)
    names = ("foreach", "fused", "capturable", "differentiable")
    before = {name: optimizer.param_groups[0][name] for name in names}
    optimizer.load_state_dict(saved)
    assert {name: optimizer.param_groups[0][name] for name in names} == before


@pytest.mark.parametrize("names", [(True, True), (True, False), (False, True)], ids=["both", "saved", "loaded"])
@EVERY_SETTING
def test_named_and_unnamed_state_dicts_are_exchanged(setting: Make, names: tuple[bool, bool]) -> None:
    def make(cls: Make, is_named: bool) -> tuple[torch.nn.Module, Any]:
        model = network()
        return model, cls(model.named_parameters() if is_named else model.parameters(), lr=1e-2)

    shown = []
    for cls in (setting, fused):
        model, source = make(cls, names[0])
        go_on(model, source, range(2))
        saved = source.state_dict()
        assert ("param_names" in saved["param_groups"][0]) == names[0]
        twin, loaded = make(cls, names[1])
        twin.load_state_dict(model.state_dict())
        loaded.load_state_dict(copy.deepcopy(saved))  # torch's would share the tensors
        go_on(model, source, range(2, 4))
        go_on(twin, loaded, range(2, 4))
        assert_same_optimizers(loaded, source)
        shown.append(loaded.state_dict()["param_groups"])
    assert shown[0] == shown[1]


KEYS = ["maximize", "amsgrad", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"]
ADDED = [key for key in KEYS if key in torch.optim.AdamW(seeded((1,))).defaults]  # as far as this torch has them
OLDER = pytest.mark.parametrize(
    ("missing", "step"), [*(([key], "tensor") for key in ADDED), (ADDED, "tensor"), (ADDED, "float"), (ADDED, "int")]
)


@OLDER
@EVERY_SETTING
def test_older_state_dicts_load_as_with_torch(setting: Make, missing: list[str], step: str) -> None:
    """Without keys that torch has added since, and with step counts that are numbers."""
    saved = older(trained(fused)[1].state_dict(), missing, step)
    wanted = fused(network().parameters())
    wanted.load_state_dict(copy.deepcopy(saved))
    found = setting(network().parameters())
    found.load_state_dict(saved)
    for mine, theirs in zip(parameters_of(found), parameters_of(wanted), strict=True):
        assert_same_fields(found.state[mine], wanted.state[theirs])
    mine, theirs = found.param_groups[0], wanted.param_groups[0]
    assert mine.keys() == theirs.keys()
    own = ("params", "fused", "foreach", "decoupled_weight_decay")  # the last of which torch's AdamW reads as Adam's
    assert {name: mine[name] for name in mine if name not in own} == {n: theirs[n] for n in theirs if n not in own}
    assert mine.get("decoupled_weight_decay", True) is True


def older(saved: dict[str, Any], missing: list[str], step: str) -> dict[str, Any]:
    """A state dict, or what is pickled, as an older torch would have made it."""
    groups = [{key: value for key, value in group.items() if key not in missing} for group in saved["param_groups"]]
    kind = {"tensor": lambda value: value, "float": float, "int": int}[step]
    state = {key: {**fields, "step": kind(fields["step"])} for key, fields in saved["state"].items()}
    return {**saved, "param_groups": groups, "state": state}


@OLDER
@EVERY_SETTING
def test_older_pickles_get_the_keys_they_lack(setting: Make, missing: list[str], step: str) -> None:
    model, optimizer = trained(setting)
    again = setting.__new__(setting)
    again.__setstate__(older(optimizer.__getstate__(), missing, step))
    assert again.param_groups[0].keys() == optimizer.param_groups[0].keys()
    assert {key: again.param_groups[0][key] for key in missing} == {
        key: optimizer.param_groups[0][key] for key in missing
    }
    assert_same_optimizers(again, optimizer)
    twin = copy.deepcopy(model)
    again.param_groups[0]["params"] = list(twin.parameters())
    go_on(model, optimizer, range(2, 4))
    go_on(twin, again, range(2, 4))
    assert_same_optimizers(again, optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True, "maximize": True},
        {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.8), torch.tensor(0.9))},
    ],
    ids=["numbers", "flags", "tensors"],
)
@EVERY_SETTING
def test_a_state_dict_survives_torch_load_with_weights_only(setting: Make, options: Any) -> None:
    model, optimizer = trained(setting, **options)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert_same_saved(saved, optimizer.state_dict())
    twin = copy.deepcopy(model)
    resumed = setting(twin.parameters(), lr=1.0)
    resumed.load_state_dict(saved)
    assert type(resumed.param_groups[0]["lr"]) is type(options.get("lr", 1e-2))
    go_on(model, optimizer, range(2, 4))
    go_on(twin, resumed, range(2, 4))
    assert_same_optimizers(resumed, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_the_step_count_stays_a_float32_scalar_on_the_cpu(setting: Make, flags: Any, dtype: torch.dtype) -> None:
    """Made by a step, loaded from a number, and loaded from a tensor of another dtype and shape."""
    parameters = [torch.nn.Parameter(p.detach().to(dtype)) for p in seeded((3000,), ())]
    optimizer = setting(parameters, **flags)
    train(optimizer, parameters, range(2))
    for step in (None, 2, 2.0, torch.tensor([2.0], dtype=torch.float64), torch.tensor(2)):
        if step is not None:
            saved = optimizer.state_dict()
            saved["state"] = {key: {**fields, "step": step} for key, fields in saved["state"].items()}
            optimizer.load_state_dict(saved)
        for state in [*optimizer.state.values(), *optimizer.state_dict()["state"].values()]:
            assert same_bits(state["step"], torch.tensor(2.0)) and state["step"].device.type == "cpu"
