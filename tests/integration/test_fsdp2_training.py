"""Training under FSDP2 in the ways its users vary: offloading, resharding, accumulation, clipping, tiny parameters.

Every run is taken twice, with torch's fused AdamW and with state in swap files, and must end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.integration.ranks import Ranks
from tests.integration.selection import chosen, trains_shards
from tests.integration.tiny import (
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    fused,
    loss_of,
    tiered,
    train,
)
from tierstore import TieredAdamW

pytestmark = trains_shards

LAYERS = ("first", "middle", "last")


def _sharded(**options: Any) -> TinyModel:
    model = TinyModel()
    for name in LAYERS:
        fully_shard(getattr(model, name), **options)
    fully_shard(model, **options)
    return model


Loop = Callable[[Any, torch.optim.Optimizer], list[Any]]
"""Trains a model; returns what must be the same with both optimizers."""


def _assert_same_runs(folder: Path, make: Callable[[], nn.Module], loop: Loop) -> TieredAdamW:
    """Run a loop with both optimizers and compare results, parameters and states; return the tiered one, open."""
    mine, reference = make(), make()
    optimizer, theirs = tiered(mine.parameters(), folder), fused(reference.parameters())
    assert_same_bits(loop(mine, optimizer), loop(reference, theirs))
    assert_same_models(mine, reference)
    assert_same_bits(optimizer.state_dict(), theirs.state_dict())
    return optimizer


# -- how it is sharded --------------------------------------------------------------------------------------------

OFFLOADS = {"kept": OffloadPolicy(), "offloaded": CPUOffloadPolicy(pin_memory=False)}


def _train_offloaded(folder: Path, offload: str, reshards: bool) -> None:
    def make() -> nn.Module:
        return _sharded(offload_policy=OFFLOADS[offload], reshard_after_forward=reshards)

    optimizer = _assert_same_runs(folder, make, lambda model, optimizer: train(model, optimizer, range(4)))
    assert_took_every_route(optimizer, "cpu-nvme")
    optimizer.close()


@pytest.mark.parametrize("offload", chosen(OFFLOADS, "offloaded"))
@pytest.mark.parametrize("after_forward", ["resharded", "kept whole"])
def test_offload_and_resharding_change_no_bit(
    two_ranks: Ranks, tmp_path: Path, offload: str, after_forward: str
) -> None:
    two_ranks.run(_train_offloaded, tmp_path, offload, after_forward == "resharded")


# -- what is done to gradients ------------------------------------------------------------------------------------


def _accumulate(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Three batches a step, of which gradients are reduced at the last one."""
    losses = []
    for step in range(3):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_is_last_backward(part == 2)
            loss = loss_of(model, 6 * step + 2 * part + dist.get_rank())
            (loss / 3).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _clip_norm(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Clip by a norm that is over all ranks."""
    norms = []
    for number in range(4):
        loss_of(model, 2 * number + dist.get_rank()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=[None, True, False, None][number])
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor())
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
    assert all(norm > 0.05 for norm in norms)  # there was something to clip
    return norms


def _clip_value(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    for number in range(3):
        loss_of(model, number).backward()
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return []


def _lose_gradients(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Some ranks take a step without some gradients, the second one even without any."""
    for number in range(4):
        loss_of(model, number).backward()
        if number == 1 + dist.get_rank():
            model.middle.weight.grad = model.norm.bias.grad = None
        if number == 2 and dist.get_rank() == 1:
            model.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return [state["step"].item() for state in optimizer.state.values()]


LOOPS: dict[str, Loop] = {
    "accumulated": _accumulate,
    "clipped by norm": _clip_norm,
    "clipped by value": _clip_value,
    "missing on some ranks": _lose_gradients,
}


def _train_in(folder: Path, loop: str) -> None:
    optimizer = _assert_same_runs(folder, _sharded, LOOPS[loop])
    assert_took_every_route(optimizer, "cpu-nvme")
    optimizer.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_of_shards_are_taken_as_they_are_left(two_ranks: Ranks, tmp_path: Path, loop: str) -> None:
    two_ranks.run(_train_in, tmp_path, loop)


# -- parameters with fewer rows than ranks ------------------------------------------------------------------------

SHAPES = [(1,), (3,), (1, 40), (5, 1), (2, 3, 4), (1, 3000), (7, 999)]


class Crumbs(nn.Module):
    """Parameters of which some ranks have little or nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(part * x).sin().sum() for part in self.parts]).sum()


def _train_crumbs(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    losses = []
    for number in range(4):
        loss = model(torch.tensor(1.0 + number + dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_parameters_with_few_rows(folder: Path) -> list[int]:
    """Train with both optimizers; return how many elements of each parameter are on this rank."""
    with _assert_same_runs(folder, lambda: fully_shard(Crumbs()), _train_crumbs) as optimizer:
        parameters = optimizer.param_groups[0]["params"]
        assert len(optimizer.state) == len(parameters)  # a shard without elements has state too
        optimizer.store.check()
        return [parameter.to_local().numel() for parameter in parameters]


def test_parameters_with_fewer_rows_than_ranks_are_trained(two_ranks: Ranks, tmp_path: Path) -> None:
    sizes = two_ranks.run(train_parameters_with_few_rows, tmp_path)
    assert sizes[0] == [1, 2, 40, 3, 12, 3000, 4 * 999]
    assert sizes[1] == [0, 1, 0, 2, 12, 0, 3 * 999]


class Scaled(nn.Module):
    """A layer and a 0-dim parameter, which FSDP2 refuses to shard: it stays whole, its user reduces its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(33, 157), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def _train_scalar_beside_shards(folder: Path) -> None:
    runs = []
    for place in (folder, None):
        model = Scaled()
        fully_shard(model, ignored_params={model.scale})
        groups = [{"params": model.layer.parameters()}, {"params": [model.scale]}]
        optimizer = fused(groups) if place is None else tiered(groups, place)
        for _ in range(3):
            model(torch.ones(2, 33)).square().mean().backward()
            dist.all_reduce(model.scale.grad)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer.state_dict()))
        if isinstance(optimizer, TieredAdamW):
            optimizer.close()
    assert_same_models(runs[0][0], runs[1][0])
    assert_same_bits(runs[0][1], runs[1][1])


def test_whole_parameter_of_no_dimension_is_trained_beside_shards(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_train_scalar_beside_shards, tmp_path)
