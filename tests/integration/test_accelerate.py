"""accelerate: `prepare`, accumulation, clipping, schedulers, saved and loaded states; and its FSDP2 on two ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.ranks import Ranks
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    fused,
    tiered,
)

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[integrations]'")
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fresh_accelerate")]


class Run:
    """A prepared model, optimizer and scheduler."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        *,
        seed: int = 0,
        is_sharded: bool = False,
        mixed_precision: str = "no",
    ) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
        )
        if is_sharded:
            _shard(self.accelerator)
        model = TinyModel(seed=seed)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=40)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, first: int, last: int) -> list[float]:
        """Take two batches a step."""
        losses = []
        for number in range(2 * first, 2 * last):
            with self.accelerator.accumulate(self.model):
                loss = (self.model(batch(number)) - 1.0).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_run_is_that_of_fused_adamw(tmp_path: Path, tiers: str, mixed_precision: str) -> None:
    mine = Run(lambda parameters: tiered(parameters, tmp_path, tiers), mixed_precision=mixed_precision)
    theirs = Run(fused, mixed_precision=mixed_precision)
    assert mine.train(0, 6) == theirs.train(0, 6)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert_took_every_route(mine.optimizer.optimizer, tiers)
    mine.optimizer.optimizer.close()


def test_prepare_reserves_nothing(tmp_path: Path) -> None:
    """FSDP replaces the parameters after `prepare` has loaded what it saved: room for whole ones may not be there."""
    run = Run(lambda parameters: tiered(parameters, tmp_path))
    assert not run.optimizer.optimizer.has_state()
    assert run.optimizer.optimizer._held.binding is None


@pytest.mark.parametrize("steps_before_load", [0, 3], ids=["fresh", "stepped"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, steps_before_load: int) -> None:
    straight = Run(lambda parameters: tiered(parameters, tmp_path))
    straight.train(0, 3)
    straight.accelerator.save_state(str(tmp_path / "saved"))
    losses = straight.train(3, 6)

    resumed = Run(lambda parameters: tiered(parameters, tmp_path, "gpu-cpu-nvme"), seed=1)
    resumed.train(20, 20 + steps_before_load)
    resumed.accelerator._models, resumed.accelerator._optimizers = [resumed.model], [resumed.optimizer]
    resumed.accelerator.load_state(str(tmp_path / "saved"))
    assert resumed.train(3, 6) == losses
    assert_same_models(resumed.model, straight.model)
    for run in (straight, resumed):
        run.optimizer.optimizer.store.check()
        run.optimizer.optimizer.close()


# -- FSDP2 --------------------------------------------------------------------------------------------------------


def _shard(accelerator: Any) -> None:
    """Make `prepare` use FSDP2: accelerate offers that on accelerators only, but its code runs over gloo too."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20_000, cpu_ram_efficient_loading=False
    )
    for state in (accelerate.PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP


def _train_sharded(folder: Path) -> None:
    from accelerate.state import AcceleratorState

    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, MASTER_ADDR="localhost", MASTER_PORT="0")

    AcceleratorState._reset_state(reset_partial_state=True)
    straight = Run(lambda parameters: tiered(parameters, folder), is_sharded=True)
    theirs = Run(fused, is_sharded=True)
    assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in straight.model.parameters())
    assert straight.train(0, 3) == theirs.train(0, 3)
    assert_same_models(straight.model, theirs.model)
    straight.accelerator.save_state(str(folder / "saved"))
    losses = straight.train(3, 6)
    resumed = Run(lambda parameters: tiered(parameters, folder), seed=1, is_sharded=True)
    resumed.accelerator.load_state(str(folder / "saved"))
    assert resumed.train(3, 6) == losses
    assert_same_models(resumed.model, straight.model)
    assert_took_every_route(resumed.optimizer.optimizer, "cpu-nvme")
    straight.optimizer.optimizer.close()
    resumed.optimizer.optimizer.close()


def test_sharded_run_is_that_of_fused_adamw_and_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_train_sharded, tmp_path)
