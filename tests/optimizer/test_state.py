"""`optimizer.state`, state dicts and everything that hangs on an optimizer behave as torch.optim.AdamW's do."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optimizer.cases import (
    KIB,
    MIB,
    FourTiers,
    assert_same_parameters,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    train,
)
from tierstore.errors import CapacityError, StateDictError
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

SHAPES: list[tuple[int, ...]] = [(3000,), (40, 50), (1,), (), (7, 3)]
EVERY_TIERS = pytest.mark.parametrize("tiers", FourTiers.names)


def tiered(parameters: Any, folder: Path, tiers: str = "cpu nvme", **options: Any) -> TieredAdamW:
    return TieredAdamW(parameters, **{"lr": 1e-2, **options}, policy=small_policy(folder, tiers.split()))


def trained(folder: Path, tiers: str = "cpu nvme", steps: int = 3, **options: Any) -> tuple[list[Any], TieredAdamW]:
    parameters = seeded(*SHAPES, dtype=options.pop("dtype", torch.float32))
    optimizer = tiered(parameters, folder, tiers, **options)
    train(optimizer, parameters, range(steps))
    return parameters, optimizer


def assert_same_saved(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for key, fields in one["state"].items():
        assert fields.keys() == other["state"][key].keys()
        assert all(same_bits(value, other["state"][key][name]) for name, value in fields.items()), key


def cloned(saved: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(saved)


# -- views ------------------------------------------------------------------------------------------------------


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


def assert_same_state_dicts(optimizer: TieredAdamW, reference: torch.optim.Optimizer) -> None:
    found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for key, fields in wanted.items():
        assert all(same_bits(found[key][name], value) for name, value in fields.items()), key


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
    with pytest.raises(TypeError, match="cannot be deleted alone"):
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
    with pytest.raises(KeyError):
        optimizer.state[stranger] = {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    with pytest.raises(StateDictError):
        optimizer.state = {stranger: {"step": 1, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}}
    assert_same_saved(optimizer.state_dict(), before)


# -- state dicts ------------------------------------------------------------------------------------------------


@EVERY_TIERS
@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_continues_from_our_state_dict_to_the_bit(tiers: str, amsgrad: bool, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, tiers, amsgrad=amsgrad)
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    reference = torch.optim.AdamW(theirs, lr=0.5)  # all of its options come from the state dict
    reference.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_same_parameters(parameters, theirs)


@EVERY_TIERS
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": False}, {"fused": True}, {"capturable": False}])
def test_we_continue_from_torchs_state_dict_to_the_bit(tiers: str, options: Any, tmp_path: Path) -> None:
    theirs = seeded(*SHAPES)
    reference = torch.optim.AdamW(theirs, lr=1e-2, **{"fused": True, **options})
    train(reference, theirs, range(3))
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in theirs]
    optimizer = tiered(parameters, tmp_path, tiers, lr=0.5)
    optimizer.load_state_dict(cloned(reference.state_dict()))
    train(optimizer, parameters, range(3, 6))
    train(reference, theirs, range(3, 6))
    assert_same_parameters(parameters, theirs)
    assert_same_state_dicts(optimizer, reference)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": False}])
def test_state_loaded_from_an_unfused_adamw_goes_back_with_our_arithmetic(options: Any, tmp_path: Path) -> None:
    """What torch continues with must be the fused kernel again, whatever kind of AdamW the state first came from."""
    theirs = seeded(*SHAPES)
    source = torch.optim.AdamW(theirs, lr=1e-2, **options)
    train(source, theirs, range(2))
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in theirs]
    optimizer = tiered(parameters, tmp_path)
    optimizer.load_state_dict(cloned(source.state_dict()))
    back = [nn.Parameter(parameter.detach().clone()) for parameter in theirs]
    reference = torch.optim.AdamW(back)
    reference.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(2, 5))
    train(reference, back, range(2, 5))
    assert_same_parameters(parameters, back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@EVERY_TIERS
def test_a_checkpoint_on_disk_continues_to_the_bit(tiers: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """CASES 22 without the new process: saved, loaded with `weights_only`, in another tier set, with 512 elements."""
    shapes = [*SHAPES, (512,)]

    def start(names: str) -> tuple[list[Any], TieredAdamW]:
        parameters = seeded(*shapes, dtype=dtype)
        return parameters, tiered(parameters, tmp_path, names)

    straight, reference = start(tiers)
    train(reference, straight, range(9))
    parameters, optimizer = start(tiers)
    for steps in (range(2), range(2, 5)):  # the same name written twice
        train(optimizer, parameters, steps)
        torch.save((parameters, optimizer.state_dict()), tmp_path / "checkpoint.pt")
    loaded, saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for names in FourTiers.names:
        resumed, again = start(names)
        for one, other in zip(resumed, loaded, strict=True):
            one.data.copy_(other)
        again.load_state_dict(saved)
        train(again, resumed, range(5, 9))
        assert_same_parameters(resumed, straight, names)
        again.close()


def test_a_state_dict_is_not_changed_by_later_steps_and_two_differ(tmp_path: Path) -> None:
    """CASES 23."""
    parameters, optimizer = trained(tmp_path, "gpu cpu nvme")
    first = optimizer.state_dict()
    copied = cloned(first)
    train(optimizer, parameters, [7])
    second = optimizer.state_dict()
    assert_same_saved(first, copied)
    assert first["state"][0]["step"] == 3 and second["state"][0]["step"] == 4
    assert not torch.equal(first["state"][0]["exp_avg"], second["state"][0]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("master", ["left out", None, {}])
def test_a_master_that_is_missing_is_derived_from_the_parameter(
    dtype: torch.dtype, master: Any, tmp_path: Path
) -> None:
    parameters, optimizer = trained(tmp_path, dtype=dtype)
    saved = optimizer.state_dict()
    for fields in saved["state"].values():
        assert fields["master"].dtype == fields["exp_avg"].dtype == torch.float32
        fields.pop("master")
        if master != "left out":
            fields["master"] = master
    optimizer.load_state_dict(saved)
    for parameter in parameters:
        assert same_bits(optimizer.state[parameter]["master"], parameter.detach().float())
    optimizer.store.check()


def test_torchs_bfloat16_state_is_loaded_into_float32_fields(tmp_path: Path) -> None:
    theirs = seeded(*SHAPES, dtype=torch.bfloat16)
    reference = torch.optim.AdamW(theirs, fused=True)
    train(reference, theirs, range(2))
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in theirs]
    optimizer = tiered(parameters, tmp_path)
    optimizer.load_state_dict(reference.state_dict())
    for parameter, other in zip(parameters, theirs, strict=True):
        assert same_bits(optimizer.state[parameter]["exp_avg"], reference.state[other]["exp_avg"].float())
    torch.optim.AdamW(theirs).load_state_dict(optimizer.state_dict())  # a key that torch does not know stays harmless


@pytest.mark.parametrize("key", ["group", "rule"])
def test_loading_leaves_tier_and_dtype_as_they_are(key: str, tmp_path: Path) -> None:
    """CASES 25: also when the state dict is torch's, or was saved under other tiers."""
    theirs = seeded((3000,), (2000,), dtype=torch.bfloat16)
    reference = torch.optim.AdamW(theirs, fused=True)
    train(reference, theirs, range(2))

    def make(tier: str) -> TieredAdamW:
        parameters = seeded((3000,), (2000,), dtype=torch.bfloat16)
        rule = [{"params": "param.*", "tier": tier}] if key == "rule" else []
        groups = [{"params": parameters, **({"tier": tier} if key == "group" else {})}]
        return TieredAdamW(groups, policy=small_policy(tmp_path, extents=20, placement=rule))

    for source in (reference.state_dict(), _stepped(make("nvme")).state_dict()):
        optimizer = make("cpu")
        assert (homes := _homes(optimizer)) == {"cpu"}
        optimizer.load_state_dict(source)
        assert _homes(optimizer) == homes
        assert ("tier" in optimizer.param_groups[0]) == (key == "group")
        for state in optimizer.state.values():
            assert {value.dtype for value in state.values()} == {torch.float32}
        _stepped(optimizer)
        assert _homes(optimizer) == homes


def _stepped(optimizer: TieredAdamW) -> TieredAdamW:
    train(optimizer, optimizer.param_groups[0]["params"], [0])
    return optimizer


def _homes(optimizer: TieredAdamW) -> set[str]:
    binding, _ = optimizer.bound()
    return {optimizer.store.home_of(chunk.number) for chunk in binding.layout.chunks}


def test_state_dicts_that_do_not_fit_are_refused_with_everything_unchanged(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    before = optimizer.state_dict()
    _, other = trained(tmp_path, steps=1)

    def spoil(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        saved = cloned(other.state_dict())
        change(saved)
        return saved

    wrong = [
        spoil(lambda saved: saved["param_groups"].append(dict(saved["param_groups"][0]))),
        spoil(lambda saved: saved["param_groups"][0]["params"].pop()),
        spoil(lambda saved: saved["state"][0].pop("exp_avg")),
        spoil(lambda saved: saved["state"][0].update(exp_avg=saved["state"][0]["exp_avg"][:-1])),
        spoil(lambda saved: saved["state"][1].update(exp_avg_sq=saved["state"][1]["exp_avg_sq"].t())),
        spoil(lambda saved: saved["state"].update({17: saved["state"][0]})),
        spoil(lambda saved: saved["state"].update({0: torch.zeros(3)})),
        spoil(lambda saved: saved["state"][4].update(momentum_buffer=torch.zeros(7, 3))),
        spoil(lambda saved: saved.pop("state")),
        spoil(lambda saved: saved.pop("param_groups")),
    ]
    for number, saved in enumerate(wrong):
        with pytest.raises((ValueError, KeyError)):
            optimizer.load_state_dict(saved)
        assert_same_saved(optimizer.state_dict(), before)
        optimizer.store.check()
        assert optimizer.state[parameters[0]]["step"] == 3, number
    with pytest.raises(StateDictError, match=r"parameter 0 has shape \(2999,\), the parameter \(3000,\)"):
        optimizer.load_state_dict(wrong[3])


def test_a_load_that_needs_more_room_than_there_is_leaves_everything_unchanged(tmp_path: Path) -> None:
    """A state dict may turn amsgrad on, which needs another field for each element."""
    theirs = seeded((20_000,))
    source = torch.optim.AdamW(theirs, amsgrad=True, fused=True)
    train(source, theirs, range(2))
    (parameter,) = seeded((20_000,))
    policy = small_policy(tmp_path)
    policy["tiers"]["nvme"]["capacity"] = 15 * 16 * KIB
    optimizer = TieredAdamW([parameter], policy=policy)
    train(optimizer, [parameter], range(2))
    before = optimizer.state_dict()
    with pytest.raises(CapacityError, match=r"raise tiers\.\w+\.capacity"):
        optimizer.load_state_dict(source.state_dict())
    assert_same_saved(optimizer.state_dict(), before)
    train(optimizer, [parameter], [2])


def test_names_are_keys_too(tmp_path: Path) -> None:
    """torch.distributed.checkpoint gives state dicts whose keys are fully qualified names."""
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    optimizer = tiered(model.named_parameters(), tmp_path)
    train(optimizer, list(model.parameters()), range(2))
    saved = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    assert saved["param_groups"][0]["param_names"] == names
    renamed = {
        "state": {names[key]: fields for key, fields in saved["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]} for group in saved["param_groups"]
        ],
    }
    twin = copy.deepcopy(model)
    again = tiered(twin.named_parameters(), tmp_path)
    again.load_state_dict(renamed)
    assert_same_saved(again.state_dict(), saved)
    renamed["state"]["0.weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(StateDictError, match=r"exp_avg of 0\.weight has shape"):
        again.load_state_dict(renamed)


def test_loading_replaces_the_group_objects_and_later_changes_to_the_new_ones_count(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    old = optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    new = optimizer.param_groups[0]
    assert new is not old
    old["lr"] = 100.0
    new["lr"] = 0.0
    before = [parameter.detach().clone() for parameter in parameters]
    train(optimizer, parameters, [4])
    assert_same_parameters(parameters, before)


def test_a_group_keeps_the_users_own_keys(tmp_path: Path) -> None:
    parameters = seeded((10,), (20,))
    optimizer = tiered([{"params": parameters[:1], "mine": "yes"}, {"params": parameters[1:]}], tmp_path)
    assert optimizer.param_groups[0]["mine"] == "yes" and "mine" not in optimizer.param_groups[1]
    assert optimizer.state_dict()["param_groups"][0]["mine"] == "yes"
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["mine"] == "yes"


@EVERY_TIERS
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_the_optimizer_goes_on_by_itself(tiers: str, how: str, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, tiers, dtype=torch.bfloat16)
    handles = [optimizer.register_step_pre_hook(lambda *_: pytest.fail("a copy has no hooks"))]
    if how == "deepcopy":
        twins, twin = copy.deepcopy((parameters, optimizer))
    elif how == "pickle":
        handles.pop().remove()
        twins, twin = pickle.loads(pickle.dumps((parameters, optimizer)))
    else:
        handles.pop().remove()
        buffer = io.BytesIO()
        torch.save((parameters, optimizer), buffer)
        buffer.seek(0)
        twins, twin = torch.load(buffer, weights_only=False)
    for handle in handles:
        handle.remove()
    assert type(twin) is TieredAdamW and twin.param_groups[0]["params"][0] is twins[0]
    saved = optimizer.state_dict()
    train(twin, twins, range(3, 6))
    assert_same_saved(optimizer.state_dict(), saved)
    train(optimizer, parameters, range(3, 6))
    assert_same_parameters(parameters, twins)
    assert_same_saved(twin.state_dict(), optimizer.state_dict())
    assert twin.store.stats().tiers.keys() == optimizer.store.stats().tiers.keys()
    twin.close()
    optimizer.store.check()


def test_a_copy_of_an_optimizer_that_never_stepped_is_fresh_and_reserves_nothing(tmp_path: Path) -> None:
    parameters = seeded((10,))
    twins, twin = copy.deepcopy((parameters, tiered(parameters, tmp_path)))
    assert twin._held.binding is None and not twin.state
    train(twin, twins, [0])


def test_an_older_pickle_without_some_keys_gets_torchs_defaults(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    saved = cloned(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in (
            "maximize",
            "foreach",
            "capturable",
            "differentiable",
            "fused",
            "amsgrad",
            "decoupled_weight_decay",
        ):
            del group[key]
    for fields in saved["state"].values():
        fields["step"] = int(fields["step"])
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    again = tiered(twins, tmp_path)
    again.load_state_dict(saved)
    assert again.param_groups[0]["maximize"] is False and again.param_groups[0]["decoupled_weight_decay"] is True
    train(again, twins, [3])
    train(optimizer, parameters, [3])
    assert_same_parameters(twins, parameters)


# -- memory of results ------------------------------------------------------------------------------------------


def run_alone(code: str, folder: Path) -> str:
    """Run Python code in a process of its own, with `folder` defined; return what it prints."""
    script = f"folder = {str(folder)!r}\n" + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_state_beyond_the_grant_is_returned_as_mappings_of_an_unnamed_file(tmp_path: Path) -> None:
    """Invariant 6 and CASES 24: 48 MiB of state come out of a 1 MiB cpu tier, and are saved, in a few MiB of memory."""
    printed = run_alone(
        """
        import os, torch
        from tierstore.optimizer import TieredAdamW

        def anonymous_kib():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

        parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(6)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        policy = {"chunk_size": "128KiB", "tiers": {"cpu": {"capacity": "1MiB"}, "nvme": {"paths": [folder]}}}
        optimizer = TieredAdamW(parameters, policy=policy)
        optimizer.step()
        optimizer.state_dict()
        torch.save({"warm": torch.zeros(10)}, folder + "/warm")
        before = anonymous_kib()
        saved = optimizer.state_dict()
        tensors = [value for fields in saved["state"].values() for name, value in fields.items() if name != "step"]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len(storages) == len(tensors) == 12
        assert all(tensor.untyped_storage().nbytes() == tensor.numel() * 4 for tensor in tensors)
        torch.save(saved, folder + "/saved")
        print(anonymous_kib() - before, os.path.getsize(folder + "/saved") >> 20)
        for _ in range(2):
            optimizer.step()
        assert all(float(tensor.view(-1)[5]) == float(tensors[0].view(-1)[5]) for tensor in tensors[::2])
        loaded = torch.load(folder + "/saved", weights_only=True, mmap=True)
        assert all(torch.equal(loaded["state"][k][n], v) for k, f in saved["state"].items() for n, v in f.items())
        """,
        tmp_path,
    )
    grown_kib, file_mib = map(int, printed.split())
    assert grown_kib < 12 * KIB and file_mib >= 48
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "warm"]


@pytest.mark.parametrize("tiers", [{"cpu": {"capacity": "1GiB"}}, {"cpu": {}}, {}], ids=["large", "auto", "none"])
def test_results_take_no_second_cpu_tier_of_memory(tiers: dict[str, Any], tmp_path: Path) -> None:
    """Invariant 6: the cpu tier's capacity is what the user can spare, so a checkpoint must not take it once more.

    96 MiB of state, saved whole or read field by field: with 1 GiB of cpu tier all of it would come on top.
    """
    printed = run_alone(
        f"""
        import torch
        from tierstore.optimizer import TieredAdamW

        def anonymous_kib():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

        parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(12)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        tiers = {{**{tiers!r}, "nvme": {{"paths": [folder]}}}}
        optimizer = TieredAdamW(parameters, policy={{"chunk_size": "1MiB", "tiers": tiers}})
        optimizer.step()
        float(optimizer.state[parameters[0]]["exp_avg"][0])
        optimizer.store.wait()
        before = anonymous_kib()
        saved = optimizer.state_dict()
        print(anonymous_kib() - before)
        del saved
        read = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        print(anonymous_kib() - before)
        """,
        tmp_path,
    )
    saving_kib, reading_kib = map(int, printed.split())
    assert saving_kib < 8 * KIB  # known to be more than the grant, so all of it is mapped
    assert 32 * KIB < reading_kib < 72 * KIB  # the grant, then mappings


def test_results_file_takes_no_more_disk_than_the_state(tmp_path: Path) -> None:
    parameters = seeded((70_000,))
    policy = small_policy(tmp_path)
    optimizer = TieredAdamW(parameters, policy=policy)
    train(optimizer, parameters, [0])
    optimizer.store.wait()
    saved = optimizer.state_dict()
    assert 0 < _mapped_bytes(tmp_path) <= 2 * MIB
    del saved
    assert _mapped_bytes(tmp_path) == 0


def _mapped_bytes(folder: Path) -> int:
    """Bytes of files in the folder, unnamed ones too, that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{folder}/" in line and "tierstore" not in line.rsplit("/", 1)[-1]:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            total += last - first
    return total


# -- hooks ------------------------------------------------------------------------------------------------------


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
    train(optimizer, parameters, [0])
    assert calls == ["global pre", "pre 1", "pre 2", "post", "global post"]
    for handle in handles:
        handle.remove()
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


# -- schedulers, scalers, closures ------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torchs_also_after_a_load(name: str, tensor_lr: bool, tmp_path: Path) -> None:
    def run(make: Callable[[Any, Any], torch.optim.Optimizer]) -> tuple[list[Any], list[float]]:
        parameters = seeded((300,), (20, 5))
        lr = torch.tensor(1e-2) if tensor_lr else 1e-2
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": lr}], lr)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for step in range(8):
            if step == 4:
                saved = cloned(optimizer.state_dict()), cloned(scheduler.state_dict())
                optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}], 1.0)
                scheduler = SCHEDULERS[name](optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
            rates += [float(group["lr"]) for group in optimizer.param_groups]
        return parameters, rates

    def ours(groups: Any, lr: Any) -> torch.optim.Optimizer:
        return TieredAdamW(groups, lr=lr, policy=small_policy(tmp_path))

    theirs, wanted = run(lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True))
    parameters, rates = run(ours)
    assert rates == wanted
    assert_same_parameters(parameters, theirs)


def test_schedulers_do_not_see_a_step_that_did_not_happen(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, parameters, [0])
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@EVERY_TIERS
def test_groups_may_be_added_before_and_after_steps(tiers: str, tmp_path: Path) -> None:
    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Any]:
        parameters = seeded((3000,), (50,), (40, 30), (5000,))
        optimizer = make(parameters[:1])
        optimizer.add_param_group({"params": parameters[1:2], "lr": 0.1})
        train(optimizer, parameters[:2], range(3))
        optimizer.add_param_group({"params": parameters[2:3], "amsgrad": True, "betas": (0.5, 0.6)})
        train(optimizer, parameters[:3], range(3, 5))
        optimizer.add_param_group({"params": parameters[3]})
        train(optimizer, parameters, range(5, 8))
        return parameters

    wanted = run(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
    found = run(lambda parameters: tiered(parameters, tmp_path, tiers))
    assert_same_parameters(found, wanted)


def test_zero_grad_and_the_closure_are_torchs(tmp_path: Path) -> None:
    (parameter,) = seeded((10,))
    optimizer = tiered([parameter], tmp_path)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        assert torch.is_grad_enabled()
        return loss

    with torch.no_grad():
        first, second = optimizer.step(closure), optimizer.step(closure=closure)
    assert second < first and optimizer.state[parameter]["step"] == 2
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None and not parameter.grad.any()
    optimizer.zero_grad()
    assert parameter.grad is None
    assert optimizer.step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, True])
@EVERY_TIERS
def test_grad_scaler_scales_and_skips_as_with_torch(
    tiers: str, fused: bool | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    def run(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Any], list[float]]:
        parameters = seeded((3000,), (40, 50), dtype=dtype)
        optimizer = make(parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            set_gradients(parameters, step, scale=scaler.get_scale())
            if step in (0, 3):
                parameters[1].grad[3, 4] = float("inf")
            scaler.scale(torch.zeros(1))  # the scaler makes its tensors at the first loss
            if step == 4:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            if step == 3:
                before = [parameter.detach().clone() for parameter in parameters]
                counts = [float(optimizer.state[parameter]["step"]) for parameter in parameters]
            scaler.step(optimizer)
            if step == 3:
                assert_same_parameters(parameters, before)
                assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == counts
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters, scales

    parameters, scales = run(lambda p: tiered(p, tmp_path, tiers, fused=fused))
    if dtype == torch.float32:
        theirs, wanted = run(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        assert scales == wanted
        assert_same_parameters(parameters, theirs)
    assert hasattr(tiered(seeded((1,)), tmp_path, fused=fused), "_step_supports_amp_scaling") == (fused is True)


def test_found_inf_at_the_first_step_makes_no_state_and_changes_nothing(tmp_path: Path) -> None:
    parameters = seeded((3000,))
    optimizer = tiered(parameters, tmp_path, fused=True)
    before = [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, 0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0]), torch.tensor([1.0])
    optimizer.step()
    assert_same_parameters(parameters, before)
    assert not optimizer.state
    optimizer.found_inf = torch.tensor([0.0])
    optimizer.step()
    (theirs,) = seeded((3000,))
    set_gradients([theirs], 0)
    theirs.grad /= 2
    torch.optim.AdamW([theirs], lr=1e-2, fused=True).step()
    assert_same_parameters(parameters, [theirs])


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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"betas": (0.9, torch.tensor(0.9))}, "betas must be either both floats or both Tensors"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ],
)
def test_wrong_options_are_refused_in_torchs_words(options: Any, error: str, tmp_path: Path) -> None:
    for make in (torch.optim.AdamW, TieredAdamW):
        with pytest.raises(ValueError, match=error):
            make(seeded((10,)), **options)


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        (torch.zeros(3), TypeError),
        ([{"params": {nn.Parameter(torch.zeros(3))}}], TypeError),
        ([], ValueError),
        ([nn.Parameter(torch.zeros(3)) * 2], ValueError),
        ([3], TypeError),
        ([("a", nn.Parameter(torch.zeros(3))), nn.Parameter(torch.zeros(3))], ValueError),
    ],
)
def test_wrong_parameters_are_refused_as_torch_refuses_them(parameters: Any, kind: type[Exception]) -> None:
    stories = []
    for make in (torch.optim.AdamW, TieredAdamW):
        with pytest.raises(kind) as caught:
            make(parameters)
        stories.append(str(caught.value))
    assert stories[0] == stories[1]


def test_a_parameter_in_two_groups_is_refused_and_one_twice_in_a_group_warns(tmp_path: Path) -> None:
    (parameter,) = seeded((10,))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        tiered([{"params": [parameter]}, {"params": [parameter]}], tmp_path)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        tiered([parameter, parameter], tmp_path)


def test_thousands_of_parameters_are_saved_loaded_and_looked_at_in_time_that_grows_with_their_number(
    tmp_path: Path,
) -> None:
    """Every look at a parameter's state must not look at all parameters."""

    def seconds(count: int) -> float:
        parameters = seeded(*[(4,)] * count)
        optimizer = tiered(parameters, tmp_path)
        train(optimizer, parameters, [0])
        began = time.process_time()
        optimizer.load_state_dict(optimizer.state_dict())
        assert sum(float(state["step"]) for state in optimizer.state.values()) == count
        return time.process_time() - began

    seconds(10)
    assert seconds(1600) < 10 * (seconds(400) + 0.02)  # squares would be 16 times
