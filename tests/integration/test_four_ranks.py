"""What needs more than two ranks: meshes of two dimensions, checkpoints that are loaded on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.test_fsdp2 import WAYS, load, load_saved_elsewhere, save_trained, sharded, states_of
from tests.integration.test_fsdp2_training import train_parameters_with_few_rows
from tests.integration.tiny import TinyModel, assert_same_bits, assert_same_models, fused, tiered, train
from tierstore import TieredAdamW

pytestmark = [pytest.mark.integration, trains_shards]


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in a gloo group."""
    ranks = Ranks(4)
    yield ranks
    ranks.end()


def test_checkpoint_of_two_ranks_loads_on_four(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_trained, tmp_path, True)
    four_ranks.run(load_saved_elsewhere, tmp_path)


def test_checkpoint_of_four_ranks_loads_on_two(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(save_trained, tmp_path, True)
    two_ranks.run(load_saved_elsewhere, tmp_path)


def _train_replicas_of_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    mine, reference = (fully_shard(TinyModel(), mesh=mesh) for _ in range(2))
    with tiered(mine.parameters(), folder) as optimizer:
        theirs = fused(reference.parameters())
        assert train(mine, optimizer, range(4)) == train(reference, theirs, range(4))
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())


def test_replicas_of_shards_are_trained_as_by_fused_adamw(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_train_replicas_of_shards, tmp_path)


def test_parameters_with_fewer_rows_than_ranks_are_trained(four_ranks: Ranks, tmp_path: Path) -> None:
    sizes = four_ranks.run(train_parameters_with_few_rows, tmp_path)
    assert sizes[3] == [0, 0, 0, 0, 0, 0, 1 * 999]


# -- one run on two ranks, then on one, then on four --------------------------------------------------------------


def _run_stage(folder: Path, stage: int, flattened: bool) -> None:
    """Load what the stage before has saved, train, save; the same with torch's fused AdamW beside it."""
    options = {"flatten_optimizer_state_dict": flattened}
    is_alone = not torch.distributed.is_initialized()
    mine, theirs = (TinyModel(seed=seed) if is_alone else sharded(seed=seed) for seed in (stage, stage + 10))
    if stage == 0:
        theirs = sharded()
    optimizer, reference = tiered(mine.parameters(), folder), fused(theirs.parameters())
    for name, model, each in (("mine", mine, optimizer), ("theirs", theirs, reference)):
        if stage:
            load(model, each, folder / f"{name}-{stage - 1}", **options)
    assert_same_models(mine, theirs)
    steps = range(3 * stage, 3 * stage + 3)
    assert train(mine, optimizer, steps) == train(theirs, reference, steps)
    assert_same_models(mine, theirs)
    assert_same_bits(optimizer.state_dict(), reference.state_dict())
    for name, model, each in (("mine", mine, optimizer), ("theirs", theirs, reference)):
        dcp.save(states_of(model, each, **options), checkpoint_id=folder / f"{name}-{stage}")
    optimizer.close()


@pytest.mark.parametrize("flattened", [False, True], ids=["nested", "flattened"])
def test_run_goes_from_two_ranks_to_one_to_four(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, flattened: bool
) -> None:
    two_ranks.run(_run_stage, tmp_path, 0, flattened)
    _run_stage(tmp_path, 1, flattened)
    four_ranks.run(_run_stage, tmp_path, 2, flattened)


# -- shards of tensor-parallel parameters -------------------------------------------------------------------------


def _two_dimensional(*, seed: int = 0) -> nn.Module:
    """FSDP2 over one dimension of the mesh, tensor parallelism over the other; the head is not parallel."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "parallel"))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 157), nn.LayerNorm(157), nn.Linear(157, 1))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["parallel"], plan)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
    losses = []
    for number in steps:
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - 1.0).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(list(model.parameters())[:2], 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train_two_dimensional(folder: Path) -> set[str]:
    mine, reference = _two_dimensional(), _two_dimensional()
    with tiered(mine.parameters(), folder) as optimizer:
        theirs = fused(reference.parameters())
        assert _step(mine, optimizer, range(4)) == _step(reference, theirs, range(4))
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())
        for way in ("sharded", "full"):
            options = StateDictOptions(**WAYS[way])
            assert_same_bits(
                get_optimizer_state_dict(mine, optimizer, options=options),
                get_optimizer_state_dict(reference, theirs, options=options),
            )
    return {str(parameter.placements) for parameter in mine.parameters()}


def test_shards_of_tensor_parallel_parameters_are_trained(four_ranks: Ranks, tmp_path: Path) -> None:
    placements = four_ranks.run(_train_two_dimensional, tmp_path)[0]
    assert any("StridedShard" in each for each in placements) and len(placements) > 2


def _resume_two_dimensional(folder: Path, flattened: bool) -> None:
    options = {"flatten_optimizer_state_dict": flattened}
    straight, resumed = _two_dimensional(), _two_dimensional(seed=1)
    before, after = tiered(straight.parameters(), folder), tiered(resumed.parameters(), folder)
    _step(straight, before, range(3))
    dcp.save(states_of(straight, before, **options), checkpoint_id=folder / "checkpoint")
    losses = _step(straight, before, range(3, 6))
    load(resumed, after, folder / "checkpoint", **options)
    assert _step(resumed, after, range(3, 6)) == losses
    assert_same_models(resumed, straight)
    assert_same_bits(after.state_dict(), before.state_dict())
    for optimizer in (before, after):
        assert isinstance(optimizer, TieredAdamW)
        optimizer.store.check()
        optimizer.close()


@pytest.mark.parametrize("flattened", [False, True], ids=["nested", "flattened"])
def test_shards_of_tensor_parallel_parameters_resume(four_ranks: Ranks, tmp_path: Path, flattened: bool) -> None:
    four_ranks.run(_resume_two_dimensional, tmp_path, flattened)
