"""Replicas on two ranks, each on its own batches: DistributedDataParallel, alone and with ZeroRedundancyOptimizer."""

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
from tests.integration.tiny import (
    OPTIONS,
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    fused,
    policy,
    tiered,
    train,
)
from tierstore import TieredAdamW

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer


def _steps(first: int, last: int) -> range:
    """Numbers of this rank's batches."""
    return range(first * 2 + dist.get_rank(), last * 2, 2)


def _train_replicas(folder: Path, tiers: str) -> None:
    mine, reference = (DistributedDataParallel(TinyModel(), gradient_as_bucket_view=True) for _ in range(2))
    with tiered(mine.parameters(), folder, tiers) as optimizer:
        theirs = fused(reference.parameters())
        assert train(mine, optimizer, _steps(0, 5)) == train(reference, theirs, _steps(0, 5))
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())
        assert_took_every_route(optimizer, tiers)


@pytest.mark.parametrize("tiers", TIER_SETS)
def test_replicas_are_trained_as_by_fused_adamw(two_ranks: Ranks, tmp_path: Path, tiers: str) -> None:
    two_ranks.run(_train_replicas, tmp_path, tiers)


# -- ZeroRedundancyOptimizer --------------------------------------------------------------------------------------


def _zero(model: nn.Module, folder: Path | None, tiers: str = "cpu-nvme", **options: Any) -> ZeroRedundancyOptimizer:
    """Shard the state over ranks, by parameters: in tiers in `folder`, or with torch's AdamW."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow: only where it is used

    if folder is None:
        options = {"optimizer_class": torch.optim.AdamW, "fused": True, **options}
    else:
        options = {"optimizer_class": functools.partial(TieredAdamW, policy=policy(tiers, folder)), **options}
    return ZeroRedundancyOptimizer(model.parameters(), **OPTIONS, **options)


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
