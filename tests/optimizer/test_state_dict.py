"""State dicts and copies are torch.optim.AdamW's: saved and loaded by either class, refused where they do not fit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.beside import (
    EVERY_TIERS,
    SHAPES,
    assert_same_saved,
    assert_same_state_dicts,
    cloned,
    tiered,
    trained,
)
from tests.optimizer.cases import (
    KIB,
    FourTiers,
    assert_same_parameters,
    same_bits,
    seeded,
    small_policy,
    train,
)
from tierstore.errors import CapacityError, StateDictError
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


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
@pytest.mark.parametrize("tiers", ["gpu cpu nvme", pytest.param("nvme", marks=pytest.mark.long)])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@EVERY_TIERS
def test_a_state_dict_is_plain_dicts_of_cpu_tensors(tiers: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path, tiers, dtype=dtype)
    saved = optimizer.state_dict()
    assert type(saved["state"]) is dict and list(saved["state"]) == list(range(len(parameters)))
    for number, fields in saved["state"].items():
        assert type(fields) is dict
        for name, value in fields.items():
            assert type(value) is Tensor and value.device.type == "cpu" and not value.requires_grad
            assert value.shape == (() if name == "step" else parameters[number].shape)


def test_a_load_keeps_a_groups_keys_in_the_order_they_were_saved_in(tmp_path: Path) -> None:
    """Also those that are not loaded, as `fused`: what is saved again is to be what was saved."""
    _, optimizer = trained(tmp_path)
    saved = optimizer.state_dict()
    saved["param_groups"] = [dict(reversed(group.items())) for group in saved["param_groups"]]
    optimizer.load_state_dict(saved)
    again = optimizer.state_dict()["param_groups"]
    assert [[key for key in group if key != "params"] for group in again] == [
        [key for key in group if key != "params"] for group in saved["param_groups"]
    ]


def test_fused_is_shown_as_true_where_it_was_left_out(tmp_path: Path) -> None:
    """So that torch's AdamW, given the state dict, keeps the same arithmetic."""
    _, optimizer = trained(tmp_path)
    optimizer.add_param_group({"params": seeded((9,))})
    saved = optimizer.state_dict()
    optimizer.load_state_dict(cloned(saved))
    for shown in (saved["param_groups"], optimizer.param_groups, copy.deepcopy(optimizer).param_groups):
        assert [group["fused"] for group in shown] == [True, True]
    assert optimizer.defaults["fused"] is True


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


@pytest.mark.parametrize("tiers", FourTiers.names[:2])
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
            group.pop(key, None)
    for fields in saved["state"].values():
        fields["step"] = int(fields["step"])
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    again = tiered(twins, tmp_path)
    again.load_state_dict(saved)
    defaults = torch.optim.AdamW(twins).defaults
    assert again.param_groups[0]["maximize"] is False
    assert again.param_groups[0].get("decoupled_weight_decay") is defaults.get("decoupled_weight_decay")
    train(again, twins, [3])
    train(optimizer, parameters, [3])
    assert_same_parameters(twins, parameters)
