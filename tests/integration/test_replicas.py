"""Replicas on two ranks, each on its own batches: DistributedDataParallel in the ways it can be asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from tests.integration.ranks import Ranks
from tests.integration.selection import chosen
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    fused,
    loss_of,
    tiered,
    train,
)
from tests.optimizer.test_binding import step_without_room, thawed_without_room


def batches_of_this_rank(first: int, last: int) -> range:
    """Numbers of this rank's batches in some steps."""
    return range(first * 2 + dist.get_rank(), last * 2, 2)


class Skipping(TinyModel):
    """Leaves its middle out of every second pass, so that its parameters are unused there."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes % 2:
            return super().forward(x)
        return self.head(torch.tanh(self.first(x)))


def _train(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    return train(model, optimizer, batches_of_this_rank(0, 5))


def _train_without_clipping(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Gradients reach the optimizer as DDP leaves them, in its buckets or out of them, and stay there."""
    losses = []
    for number in batches_of_this_rank(0, 5):
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


def _accumulate(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Two batches without and one with an exchange of gradients, three times."""
    losses = []
    numbers = list(batches_of_this_rank(0, 9))
    for one, two, three in (numbers[:3], numbers[3:6], numbers[6:]):
        with model.no_sync():
            for number in (one, two):
                (loss_of(model, number) / 3).backward()
        (loss_of(model, three) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([parameter.detach().clone() for parameter in model.parameters()])
    return losses


Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]
RUNS: dict[str, tuple[type[TinyModel], dict[str, bool], Loop]] = {
    "plain": (TinyModel, {}, _train),
    "buckets": (TinyModel, {"gradient_as_bucket_view": True}, _train),
    "buckets that stay": (TinyModel, {"gradient_as_bucket_view": True}, _train_without_clipping),
    "static graph": (TinyModel, {"static_graph": True, "gradient_as_bucket_view": True}, _train),
    "unused parameters": (Skipping, {"find_unused_parameters": True}, _train),
    "unused parameters in buckets": (
        Skipping,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        _train_without_clipping,
    ),
    "accumulated": (TinyModel, {}, _accumulate),
    "accumulated in buckets": (TinyModel, {"gradient_as_bucket_view": True}, _accumulate),
}


def _train_replicas(folder: Path, name: str, tiers: str) -> list[float]:
    make, options, loop = RUNS[name]
    mine, reference = (DistributedDataParallel(make(), **options) for _ in range(2))
    with tiered(mine.parameters(), folder, tiers) as optimizer:
        theirs = fused(reference.parameters())
        assert_same_bits(loop(mine, optimizer), loop(reference, theirs))
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())
        assert_took_every_route(optimizer, tiers)
        return [parameter.sum().item() for parameter in mine.parameters()]


@pytest.mark.parametrize("name", chosen(RUNS, "buckets", "static graph", "unused parameters in buckets", "accumulated"))
def test_replicas_are_trained_as_by_fused_adamw(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    one, other = two_ranks.run(_train_replicas, tmp_path, name, "cpu-nvme")
    assert one == other


def test_replicas_are_trained_in_all_three_tiers(two_ranks: Ranks, tmp_path: Path) -> None:
    assert "gpu-cpu-nvme" in TIER_SETS
    two_ranks.run(_train_replicas, tmp_path, "buckets", "gpu-cpu-nvme")


def _thaw_without_room(folder: Path) -> None:
    """Parameters of which nobody knows whether they will be sharded: too early to count is not too late."""
    parameters, optimizer = thawed_without_room(folder, "gradient")
    step_without_room(optimizer, parameters)
    assert optimizer.state_dict()["state"].keys() == {0}
    parameters[1].grad = None
    optimizer.step()
    optimizer.close()


def test_all_there_is_can_be_read_though_a_parameter_was_thawed_without_room(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_thaw_without_room, tmp_path)


# -- distributed state dicts --------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "full on rank 0": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def _resume(folder: Path, way: str) -> None:
    options = StateDictOptions(**WAYS[way])
    straight, resumed = (DistributedDataParallel(TinyModel(seed=seed)) for seed in (0, 1))
    before, after = tiered(straight.parameters(), folder), tiered(resumed.parameters(), folder)
    _train(straight, before)
    model_state, state = get_state_dict(straight, before, options=options)
    model_state = {name: tensor.clone() for name, tensor in model_state.items()}
    losses = _train(straight, before)
    set_model_state_dict(resumed, model_state, options=options)
    set_optimizer_state_dict(resumed, after, state, options=options)
    assert _train(resumed, after) == losses
    assert_same_models(resumed, straight)
    assert_same_bits(after.state_dict(), before.state_dict())
    before.close()
    after.close()


@pytest.mark.parametrize("way", chosen(WAYS, "full on rank 0"))
def test_replicas_resume_from_distributed_state_dicts(two_ranks: Ranks, tmp_path: Path, way: str) -> None:
    """Names are the bare model's, and only the first rank may have the state to be loaded."""
    two_ranks.run(_resume, tmp_path, way)
