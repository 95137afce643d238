"""ZeroRedundancyOptimizer on two ranks: each steps a part of the parameters, with state in its own tiers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integration.ranks import Ranks
from tests.integration.selection import chosen
from tests.integration.test_replicas import batches_of_this_rank as _steps
from tests.integration.tiny import (
    OPTIONS,
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    fused,
    policy,
    train,
)
from tierstore import TieredAdamW

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def _zero(model: nn.Module, folder: Path | None, tiers: str = "cpu-nvme", **options: Any) -> ZeroRedundancyOptimizer:
    """Shard the state over ranks, by parameters: in tiers in `folder`, or with torch's AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow: only where it is used

    if folder is None:
        options = {"optimizer_class": torch.optim.AdamW, "fused": True, **options}
    else:
        options = {"optimizer_class": functools.partial(TieredAdamW, policy=policy(tiers, folder)), **options}
    parameters = options.pop("parameters", None)
    return ZeroRedundancyOptimizer(model.parameters() if parameters is None else parameters, **OPTIONS, **options)


def _consolidated(optimizer: ZeroRedundancyOptimizer) -> Any:
    """The state of all ranks, on all ranks."""
    optimizer.consolidate_state_dict(to=0)
    held = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    return held[0]


def _train_sharded_state(folder: Path, tiers: str, bucketed: bool) -> None:
    mine, reference, plain = (DistributedDataParallel(TinyModel()) for _ in range(3))
    optimizer = _zero(mine, folder, tiers, parameters_as_bucket_view=bucketed)
    theirs, alone = _zero(reference, None, parameters_as_bucket_view=bucketed), fused(plain.parameters())
    losses = train(mine, optimizer, _steps(0, 5))
    assert losses == train(reference, theirs, _steps(0, 5)) == train(plain, alone, _steps(0, 5))
    assert_same_models(mine, plain)
    state = _consolidated(optimizer)["state"]
    assert_same_bits(state, _consolidated(theirs)["state"])
    assert_same_bits(state, alone.state_dict()["state"])
    assert_took_every_route(optimizer.optim, tiers)
    optimizer.optim.close()


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("bucketed", [False, True], ids=["single", "bucketed"])
def test_sharded_state_trains_as_fused_adamw(two_ranks: Ranks, tmp_path: Path, tiers: str, bucketed: bool) -> None:
    two_ranks.run(_train_sharded_state, tmp_path, tiers, bucketed)


def _resume_sharded_state(folder: Path, steps_before_load: int) -> None:
    straight, resumed = DistributedDataParallel(TinyModel()), DistributedDataParallel(TinyModel(seed=1))
    before, after = _zero(straight, folder), _zero(resumed, folder)
    train(straight, before, _steps(0, 3))
    torch.save(_consolidated(before), folder / f"{dist.get_rank()}.pt")
    model_state = {name: tensor.clone() for name, tensor in straight.state_dict().items()}
    losses = train(straight, before, _steps(3, 6))

    train(resumed, after, _steps(50, 50 + steps_before_load))
    resumed.load_state_dict(model_state)
    after.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True))
    assert train(resumed, after, _steps(3, 6)) == losses
    assert_same_models(resumed, straight)
    assert_same_bits(_consolidated(after), _consolidated(before))
    before.optim.close()
    after.optim.close()


@pytest.mark.parametrize("steps_before_load", [0, 2], ids=["fresh", "stepped"])
def test_sharded_state_resumes(two_ranks: Ranks, tmp_path: Path, steps_before_load: int) -> None:
    two_ranks.run(_resume_sharded_state, tmp_path, steps_before_load)


def _train_one_weight(folder: Path) -> None:
    mine, reference = (DistributedDataParallel(nn.Linear(33, 1, bias=False)) for _ in range(2))
    reference.load_state_dict(mine.state_dict())
    made = functools.partial(TieredAdamW, policy=policy("cpu-nvme", folder))  # so that the policy is in no state dict
    optimizer = _zero(mine, None, optimizer_class=made)
    assert train(mine, optimizer, _steps(0, 3)) == train(reference, fused(reference.parameters()), _steps(0, 3))
    assert_same_models(mine, reference)
    assert list(_consolidated(optimizer)["state"]) == [0]
    optimizer.optim.close()


def test_rank_without_parameters_takes_part(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_train_one_weight, tmp_path)


def _train_low_precision(folder: Path) -> None:
    straight, resumed = TinyModel().to(torch.bfloat16), TinyModel(seed=1).to(torch.bfloat16)
    before, after = _zero(straight, folder), _zero(resumed, folder)
    _step_on_ones(straight, before, 3)
    state = _consolidated(before)
    assert all(entry["master"].dtype == torch.float32 for entry in state["state"].values())
    resumed.load_state_dict(straight.state_dict())
    after.load_state_dict(state)
    _step_on_ones(straight, before, 3)
    _step_on_ones(resumed, after, 3)
    assert_same_models(resumed, straight)
    assert_same_bits(_consolidated(after)["state"], _consolidated(before)["state"])
    before.optim.close()
    after.optim.close()


def _step_on_ones(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 33, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_masters_of_sharded_low_precision_state_are_kept(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_train_low_precision, tmp_path)


# -- as users construct it ----------------------------------------------------------------------------------------


def _bound(folder: Path) -> dict[str, Any]:
    return {"optimizer_class": functools.partial(TieredAdamW, policy=policy("cpu-nvme", folder))}


def _by_keyword(folder: Path) -> dict[str, Any]:
    return {"optimizer_class": TieredAdamW, "policy": policy("cpu-nvme", folder)}


MANNERS = {"bound to the class": _bound, "by keyword": _by_keyword}


def _construct(folder: Path, manner: str) -> None:
    """Train, save, and load into a fresh one, made in the same manner."""
    straight, resumed, plain = (DistributedDataParallel(TinyModel(seed=seed)) for seed in (0, 1, 0))
    before, after = (_zero(model, None, fused=True, **MANNERS[manner](folder)) for model in (straight, resumed))
    assert isinstance(before.optim, TieredAdamW)
    assert train(straight, before, _steps(0, 3)) == train(plain, fused(plain.parameters()), _steps(0, 3))
    torch.save(_consolidated(before), folder / f"{dist.get_rank()}.pt")
    resumed.load_state_dict(straight.state_dict())
    after.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True))
    assert train(resumed, after, _steps(3, 6)) == train(straight, before, _steps(3, 6))
    assert_same_models(resumed, straight)
    assert_same_bits(_consolidated(after), _consolidated(before))
    before.optim.close()
    after.optim.close()


@pytest.mark.parametrize("manner", chosen(MANNERS, "by keyword"))
def test_settings_may_be_bound_to_the_class_or_given_by_keyword(two_ranks: Ranks, tmp_path: Path, manner: str) -> None:
    two_ranks.run(_construct, tmp_path, manner)


# -- groups -------------------------------------------------------------------------------------------------------


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """A group of one parameter, of which one rank has nothing."""
    weight = model.module.middle.weight
    others = [parameter for parameter in model.parameters() if parameter is not weight]
    return [{"params": [weight], "lr": 1e-2}, {"params": others, "weight_decay": 0.0}]


def _train_groups(folder: Path, bucketed: bool) -> list[list[int]]:
    mine, reference = (DistributedDataParallel(TinyModel()) for _ in range(2))
    optimizer, theirs = (
        _zero(model, place, parameters=_groups(model), parameters_as_bucket_view=bucketed)
        for model, place in ((mine, folder), (reference, None))
    )
    assert train(mine, optimizer, _steps(0, 4)) == train(reference, theirs, _steps(0, 4))
    assert_same_models(mine, reference)
    assert_same_bits(_consolidated(optimizer)["state"], _consolidated(theirs)["state"])
    sizes = [len(group["params"]) for group in optimizer.optim.param_groups]
    optimizer.optim.close()
    return sizes


@pytest.mark.parametrize("form", chosen(["single", "bucketed"], "bucketed"))
def test_group_that_is_empty_on_one_rank_is_trained(two_ranks: Ranks, tmp_path: Path, form: str) -> None:
    sizes = two_ranks.run(_train_groups, tmp_path, form == "bucketed")
    assert sorted(size[0] for size in sizes) == [0, 1]


def _add_group(folder: Path, bucketed: bool) -> None:
    """A layer is frozen for two steps, then joins."""
    runs = []
    for place in (folder, None):
        model = DistributedDataParallel(TinyModel(), find_unused_parameters=True)
        late = [*model.module.middle.parameters(), *model.module.norm.parameters()]
        ids = set(map(id, late))
        early = [parameter for parameter in model.parameters() if id(parameter) not in ids]
        optimizer = _zero(model, place, parameters=early, parameters_as_bucket_view=bucketed)
        losses = train(model, optimizer, _steps(0, 2))
        model.zero_grad()
        optimizer.add_param_group({"params": late, "lr": 1e-2})
        losses += train(model, optimizer, _steps(2, 5))
        runs.append((losses, model, optimizer))
    (losses, mine, optimizer), (expected, reference, theirs) = runs
    assert losses == expected
    assert_same_models(mine, reference)
    assert_same_bits(_consolidated(optimizer)["state"], _consolidated(theirs)["state"])
    optimizer.optim.store.check()
    optimizer.optim.close()


@pytest.mark.parametrize("form", chosen(["single", "bucketed"], "bucketed"))
def test_group_may_be_added_after_steps(two_ranks: Ranks, tmp_path: Path, form: str) -> None:
    two_ranks.run(_add_group, tmp_path, form == "bucketed")


def _exchange(folder: Path) -> None:
    """States go both ways between the two classes under ZeRO."""
    mine, reference = (DistributedDataParallel(TinyModel()) for _ in range(2))
    optimizer, theirs = _zero(mine, folder), _zero(reference, None)
    train(mine, optimizer, _steps(0, 2))
    train(reference, theirs, _steps(0, 2))
    from_mine, from_theirs = _consolidated(optimizer), _consolidated(theirs)
    optimizer.load_state_dict(from_theirs)
    theirs.load_state_dict(from_mine)
    assert train(mine, optimizer, _steps(2, 4)) == train(reference, theirs, _steps(2, 4))
    assert_same_models(mine, reference)
    optimizer.optim.close()


def test_consolidated_state_is_exchanged_with_adamw_both_ways(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_exchange, tmp_path)
