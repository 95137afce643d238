"""DTensors whose gradients or loaded states are sharded in another way than the parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.integration.ranks import Ranks
from tests.integration.tiny import assert_same_bits, assert_same_models, fused, tiered
from tierstore import TieredLAMB

WIDTH = 64


def _parallel(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(output_layouts=Replicate(), use_local_output=True),
    }
    return parallelize_module(model, mesh, plan)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    for number in range(4):
        x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(number))
        model(distribute_tensor(x, mesh, [Shard(1)])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _train_both(folder: Path) -> str:
    mesh = init_device_mesh("cpu", (2,))
    mine, reference = _parallel(mesh), _parallel(mesh)
    with tiered(mine.parameters(), folder) as optimizer:
        theirs = fused(reference.parameters())
        _train(mine, optimizer, mesh)
        _train(reference, theirs, mesh)
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())
    reference(distribute_tensor(torch.ones(2, 8, WIDTH), mesh, [Shard(1)])).sum().backward()
    return str(reference[0].weight.grad.placements)


def test_partial_gradients_of_sequence_parallelism_are_summed_over_the_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    """torch's AdamW gives a gradient the parameter's sharding; taking each rank's part of the sum would train apart."""
    assert "Partial" in two_ranks.run(_train_both, tmp_path)[0]


class _Embedded(nn.Module):
    """A vocabulary that is sharded by rows, and a DTensor of no dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(101, 48)
        self.out = nn.Linear(48, 101, bias=False)
        plan = {"table": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(self, mesh, plan)
        self.scale = nn.Parameter(distribute_tensor(torch.tensor(0.5), mesh, [Replicate()]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens)) * self.scale.to_local()


def _train_embedded(folder: Path) -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    runs = []
    for place in (folder, None):
        model = _Embedded(mesh)
        optimizer = fused(model.parameters()) if place is None else tiered(model.parameters(), place)
        for number in range(4):
            tokens = torch.randint(101, (4, 9), generator=torch.Generator().manual_seed(number))
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    (mine, optimizer), (reference, theirs) = runs
    assert_same_models(mine, reference)
    assert_same_bits(optimizer.state_dict(), theirs.state_dict())
    assert optimizer.state[mine.scale]["exp_avg"].shape == ()
    optimizer.close()
    return [parameter.to_local().numel() for parameter in mine.parameters()]


def test_sharded_vocabulary_and_a_dtensor_of_no_dimension_are_trained(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks.run(_train_embedded, tmp_path)
    assert sorted(one) == [1, 51 * 48, 51 * 48] and sorted(other) == [1, 50 * 48, 50 * 48]


PLACEMENTS = {"replicated": Replicate(), "sharded": Shard(1), "partial": Partial()}


def _values(mesh: DeviceMesh, placement: object) -> Tensor:
    whole = torch.arange(2.0 * 48 * 48).view(96, 48).flip(0)
    if isinstance(placement, Partial):
        return DTensor.from_local(whole * (dist.get_rank() == 0), mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


def _parameter(mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.ones(96, 48), mesh, [Shard(0)]))


def _step_with_gradient(folder: Path, name: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    mine, theirs = _parameter(mesh), _parameter(mesh)
    with tiered([mine], folder) as optimizer:
        for parameter, each in ((mine, optimizer), (theirs, fused([theirs]))):
            parameter.grad = _values(mesh, PLACEMENTS[name])
            each.step()
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_gradient_gets_the_sharding_of_its_parameter(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    two_ranks.run(_step_with_gradient, tmp_path, name)


def _load_state(folder: Path, name: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = _parameter(mesh)
    with tiered([parameter], folder) as optimizer:
        state = {"step": torch.tensor(3.0), "exp_avg": _values(mesh, PLACEMENTS[name])}
        state["exp_avg_sq"] = state["exp_avg"]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
        assert_same_bits(optimizer.state[parameter]["exp_avg"], _values(mesh, Shard(0)))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_loaded_state_gets_the_sharding_of_its_parameter(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    """As many elements are here in another sharding: taken as they lie, they would be in the wrong places."""
    two_ranks.run(_load_state, tmp_path, name)


def _give_whole_gradient(folder: Path) -> str:
    parameter = _parameter(init_device_mesh("cpu", (2,)))
    with tiered([parameter], folder) as optimizer:
        parameter.grad = torch.ones(96, 48)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert len(optimizer.state) == 0
    return str(caught.value)


def test_whole_gradient_of_a_sharded_parameter_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    assert "make it a DTensor" in two_ranks.run(_give_whole_gradient, tmp_path)[0]


def _refuse_part_of_a_norm(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Replicate()]))
    part = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    for parameter in (whole, part):
        parameter.grad = torch.ones_like(parameter)
    with TieredLAMB([whole], policy={"tiers": {"cpu": {}}}) as optimizer:
        optimizer.step()
        assert (whole.to_local() < 1).all()
    with (
        TieredLAMB([part], policy={"tiers": {"cpu": {}}}) as optimizer,
        pytest.raises(RuntimeError, match=r"param\.0 is sharded over ranks, and LAMB needs the norm of all of it"),
    ):
        optimizer.step()
    assert (part.to_local() == 1).all()


def test_lamb_refuses_a_parameter_of_which_it_sees_only_a_part(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_refuse_part_of_a_norm, tmp_path)
