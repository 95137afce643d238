"""What torch.distributed.checkpoint does to an optimizer around saving and loading, on two ranks.

`test_fsdp2` resumes runs from every kind of distributed state dict; here is what must not happen meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from tests.integration.ranks import Ranks
from tests.integration.selection import chosen, trains_shards
from tests.integration.test_fsdp2 import WAYS, copies, sharded, states_of
from tests.integration.tiny import (
    TinyModel,
    assert_same_bits,
    assert_same_models,
    batch,
    fused,
    tiered,
    train,
)
from tierstore import TieredAdamW

LOADS = {"fresh": 0, "stepped": 2}
"""Steps that an optimizer has taken before it loads."""

# -- a save is no step --------------------------------------------------------------------------------------------


def _watched(optimizer: torch.optim.Optimizer) -> list[str]:
    """A list that grows with every call of `step` and of its hooks."""
    calls: list[str] = []
    step = optimizer.step

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append("step")
        return step(*arguments, **options)

    optimizer.step = call
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre hook"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post hook"))
    return calls


def _one_row(*, seed: int = 0) -> nn.Module:
    """All of it is on the first rank."""
    torch.manual_seed(seed)
    return fully_shard(nn.Linear(33, 1, bias=False))


def _half_frozen(*, seed: int = 0) -> TinyModel:
    model = sharded(seed=seed)
    model.middle.requires_grad_(False)
    return model


MODELS = {"sharded": sharded, "half of it frozen": _half_frozen, "all on one rank": _one_row}


def _save_with_state(folder: Path, name: str) -> None:
    model = MODELS[name]()
    with tiered(model.parameters(), folder) as optimizer:
        train(model, optimizer, range(2))
        calls = _watched(optimizer)
        parameters, state = copies(dict(model.named_parameters())), optimizer.state_dict()
        for way in WAYS.values():
            get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**way))
        states = states_of(model, optimizer)
        dcp.save(states, checkpoint_id=folder / "checkpoint")
        dcp.load(states, checkpoint_id=folder / "checkpoint")
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
        assert calls == []
        assert_same_bits(copies(dict(model.named_parameters())), parameters)
        assert_same_bits(optimizer.state_dict(), state)
        assert all(parameter.grad is None for parameter in model.parameters())


@trains_shards
@pytest.mark.parametrize("model", chosen(MODELS, "all on one rank", "half of it frozen"))
def test_save_and_load_with_state_run_no_step_and_change_nothing(two_ranks: Ranks, tmp_path: Path, model: str) -> None:
    """A rank that has only empty shards would otherwise step alone, and count a step that was none."""
    two_ranks.run(_save_with_state, tmp_path, model)


ODD_VALUES = [-0.0, 0.0, 1e-42, -1e-42, 1e-40, 3e38, float("inf"), -float("inf"), 1.0, -1.17e-38, 6e-8, float("nan")]


class Odd(nn.Module):
    """Parameters of values that arithmetic is not kind to."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.tensor(ODD_VALUES).repeat(500)
        self.weight = nn.Parameter(values.view(-1, 6).to(dtype))
        self.row = nn.Parameter(values.view(1, -1).to(dtype))


def _save_before_first_step(folder: Path, dtype: torch.dtype, tensor_lr: bool) -> list[list[str]]:
    options = {"lr": torch.tensor(0.1) if tensor_lr else 0.1, "weight_decay": 0.3}
    mine, theirs = fully_shard(Odd(dtype)), fully_shard(Odd(dtype))
    before = copies(dict(mine.named_parameters()))
    optimizer, reference = tiered(mine.parameters(), folder, **options), fused(theirs.parameters(), **options)
    calls = [_watched(optimizer), _watched(reference)]
    found = get_optimizer_state_dict(mine, optimizer)
    expected = get_optimizer_state_dict(theirs, reference)
    assert_same_bits(copies(dict(mine.named_parameters())), before)
    for name, state in found["state"].items():
        assert_same_bits(state["step"], expected["state"][name]["step"])
    assert [group["lr"] for group in optimizer.param_groups] == [options["lr"]]
    assert all(parameter.grad is None for parameter in mine.parameters())
    again = get_optimizer_state_dict(mine, optimizer)
    assert_same_bits(again, found)
    optimizer.close()
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["number", "tensor"])
def test_zero_step_of_a_save_before_the_first_step_changes_no_bit_of_a_parameter(
    two_ranks: Ranks, tmp_path: Path, dtype: torch.dtype, tensor_lr: bool
) -> None:
    """torch makes state to be saved by one step with zero gradients and lr 0; it does so once, as for its own AdamW."""
    for mine, theirs in two_ranks.run(_save_before_first_step, tmp_path, dtype, tensor_lr):
        assert mine == theirs and mine.count("step") == 1


def _go_on_after_early_save(folder: Path, way: dict[str, bool], name: str) -> None:
    mine, theirs = MODELS[name](), MODELS[name]()
    with tiered(mine.parameters(), folder) as optimizer:
        reference = fused(theirs.parameters())
        found = [
            get_optimizer_state_dict(model, each, options=StateDictOptions(**way))
            for model, each in ((mine, optimizer), (theirs, reference))
        ]
        assert_same_bits(*found)
        assert train(mine, optimizer, range(3)) == train(theirs, reference, range(3))
        assert_same_models(mine, theirs)
        assert_same_bits(optimizer.state_dict(), reference.state_dict())


@trains_shards
@pytest.mark.parametrize("model", ["half of it frozen", "all on one rank"])
@pytest.mark.parametrize("way", chosen(["sharded", "full"], "sharded"))
def test_training_goes_on_after_a_save_before_the_first_step(
    two_ranks: Ranks, tmp_path: Path, way: str, model: str
) -> None:
    two_ranks.run(_go_on_after_early_save, tmp_path, WAYS[way], model)


# -- as users write it --------------------------------------------------------------------------------------------


class AppState(Stateful):
    """What torch's documentation tells users to save: DCP calls it to save and to load."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def _resume_app(folder: Path, is_async: bool, steps_before_load: int) -> None:
    straight, resumed = sharded(), sharded(seed=1)
    before, after = tiered(straight.parameters(), folder), tiered(resumed.parameters(), folder)
    train(straight, before, range(3))
    if is_async:
        aside = dist.new_group()
        saving = dcp.async_save(
            {"app": AppState(straight, before)}, checkpoint_id=folder / "checkpoint", process_group=aside
        )
        losses = train(straight, before, range(3, 6))
        saving.result()
    else:
        dcp.save({"app": AppState(straight, before)}, checkpoint_id=folder / "checkpoint")
        losses = train(straight, before, range(3, 6))
    train(resumed, after, range(50, 50 + steps_before_load))
    dcp.load({"app": AppState(resumed, after)}, checkpoint_id=folder / "checkpoint")
    assert train(resumed, after, range(3, 6)) == losses
    assert_same_models(resumed, straight)
    assert_same_bits(after.state_dict(), before.state_dict())
    before.close()
    after.close()


@trains_shards
@pytest.mark.parametrize("when", chosen(LOADS, "stepped"))
@pytest.mark.parametrize("call", chosen(["save", "async_save"], "async_save"))
def test_stateful_application_resumes(two_ranks: Ranks, tmp_path: Path, call: str, when: str) -> None:
    two_ranks.run(_resume_app, tmp_path, call == "async_save", LOADS[when])


# -- torch's bfloat16 checkpoints ---------------------------------------------------------------------------------


def _low(*, seed: int = 0) -> TinyModel:
    model = TinyModel(seed=seed).to(torch.bfloat16)
    fully_shard(model)
    return model


def _train_low(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        (model(batch(number).bfloat16()) - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _without_masters(state: dict[str, Any]) -> dict[str, Any]:
    if "state" not in state:
        return {key: value for key, value in state.items() if not key.endswith(".master")}
    kept = {
        name: {field: value for field, value in fields.items() if field != "master"}
        for name, fields in state["state"].items()
    }
    return {**state, "state": kept}


def _assert_is_theirs(mine: nn.Module, optimizer: TieredAdamW, theirs: nn.Module, reference: Any) -> None:
    assert_same_models(mine, theirs)
    for parameter, saved in zip(mine.parameters(), theirs.parameters(), strict=True):
        state, other = optimizer.state[parameter], reference.state[saved]
        assert_same_bits(state["master"].to_local(), saved.to_local().detach().float())
        assert state["step"].item() == other["step"].item()
        for field in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(state[field].to_local(), other[field].to_local().float())


def _load_low_checkpoint(folder: Path, flattened: bool, steps_before_load: int) -> None:
    options = {"flatten_optimizer_state_dict": flattened}
    theirs, mine = _low(), _low(seed=1)
    reference = fused(theirs.parameters())
    _train_low(theirs, reference, range(3))
    dcp.save(states_of(theirs, reference, **options), checkpoint_id=folder / "checkpoint")
    with tiered(mine.parameters(), folder) as optimizer:
        _train_low(mine, optimizer, range(90, 90 + steps_before_load))
        states = states_of(mine, optimizer, **options)
        dcp.load(states, checkpoint_id=folder / "checkpoint", planner=DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(mine, states["model"])
        set_optimizer_state_dict(
            mine, optimizer, _without_masters(states["optimizer"]), options=StateDictOptions(**options)
        )
        _assert_is_theirs(mine, optimizer, theirs, reference)


@trains_shards
@pytest.mark.parametrize("when", chosen(LOADS, "fresh"))
@pytest.mark.parametrize("form", chosen(["nested", "flattened"], "nested"))
def test_bfloat16_checkpoint_of_adamw_loads_without_masters(
    two_ranks: Ranks, tmp_path: Path, form: str, when: str
) -> None:
    two_ranks.run(_load_low_checkpoint, tmp_path, form == "flattened", LOADS[when])


def _load_low_full(folder: Path, way: dict[str, bool], steps_before_load: int) -> None:
    """A full state dict on the CPU, as `torch.save` keeps it: the masters are those that were made on the way."""
    options = StateDictOptions(**way)
    theirs, mine = _low(), _low(seed=1)
    reference = fused(theirs.parameters())
    _train_low(theirs, reference, range(3))
    model_state = get_model_state_dict(theirs, options=options)
    state = get_optimizer_state_dict(theirs, reference, options=options)
    with tiered(mine.parameters(), folder) as optimizer:
        _train_low(mine, optimizer, range(90, 90 + steps_before_load))
        if steps_before_load:
            optimizer.state = {}
        set_model_state_dict(mine, model_state, options=options)
        set_optimizer_state_dict(mine, optimizer, state, options=options)
        _assert_is_theirs(mine, optimizer, theirs, reference)


@trains_shards
@pytest.mark.parametrize("when", chosen(LOADS, "stepped"))
@pytest.mark.parametrize("way", chosen(["full", "full on rank 0"], "full on rank 0"))
def test_full_bfloat16_state_of_adamw_loads(two_ranks: Ranks, tmp_path: Path, way: str, when: str) -> None:
    two_ranks.run(_load_low_full, tmp_path, WAYS[way], LOADS[when])


def _keep_stale_masters(folder: Path) -> None:
    theirs, mine = _low(), _low(seed=1)
    reference = fused(theirs.parameters())
    _train_low(theirs, reference, range(3))
    dcp.save(states_of(theirs, reference), checkpoint_id=folder / "checkpoint")
    with tiered(mine.parameters(), folder) as optimizer:
        states = states_of(mine, optimizer)
        dcp.load(states, checkpoint_id=folder / "checkpoint", planner=DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(mine, states["model"])
        set_optimizer_state_dict(mine, optimizer, states["optimizer"])
        loaded = [parameter.to_local().detach().clone() for parameter in mine.parameters()]
        for parameter in mine.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        for parameter, values in zip(mine.parameters(), loaded, strict=True):
            assert_same_bits(parameter.to_local().detach(), values)
            assert_same_bits(optimizer.state[parameter]["master"].to_local().bfloat16(), values)


@trains_shards
def test_masters_left_from_other_weights_follow_loaded_ones_at_the_next_step(two_ranks: Ranks, tmp_path: Path) -> None:
    """Who forgets to take `master` out of the state to be loaded does not get the old weights back."""
    two_ranks.run(_keep_stale_masters, tmp_path)
