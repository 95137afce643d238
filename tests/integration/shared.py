"""Models divided over ranks in several ways, and what they hold as whole tensors, so that it can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration.tiny import OPTIONS, TinyModel, assert_same_bits, loss_of, policy
from tierstore import TieredAdamW

PLAN = {"middle": ColwiseParallel(), "last": RowwiseParallel()}


class Parallel(nn.Module):
    """Two layers that tensor parallelism cuts by rows and by columns, and a norm that it leaves alone."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(33)
            self.middle = nn.Linear(33, 304)
            self.last = nn.Linear(304, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.norm(x))))


def plain(*, seed: int = 0) -> nn.Module:
    """Not divided."""
    return TinyModel(seed=seed)


def rows(*, seed: int = 0) -> nn.Module:
    """FSDP2 over all ranks: some have less of a parameter than others, or nothing."""
    model = TinyModel(seed=seed)
    fully_shard(model.middle)
    return fully_shard(model)


def replicas_of_shards(*, seed: int = 0) -> nn.Module:
    """FSDP2 within pairs of four ranks, and replicas between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return fully_shard(TinyModel(seed=seed), mesh=mesh)


def plain_parallel(*, seed: int = 0) -> nn.Module:
    """Not divided."""
    return Parallel(seed=seed)


def tensor_parallel(*, seed: int = 0) -> nn.Module:
    """Rows, columns, replicated biases, and a norm that is no DTensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(Parallel(seed=seed), mesh, PLAN)


def sharded_parallel(*, seed: int = 0) -> nn.Module:
    """FSDP2 of tensor-parallel layers on four ranks: rows of rows, rows of columns, and rows over one dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "parallel"))
    return fully_shard(parallelize_module(Parallel(seed=seed), mesh["parallel"], PLAN), mesh=mesh["shard"])


Make = Callable[..., nn.Module]


def tiered(model: nn.Module, folder: Path, **options: Any) -> TieredAdamW:
    """The optimizer under test, which knows names."""
    return TieredAdamW(model.named_parameters(), **{**OPTIONS, **options}, policy=policy("cpu-nvme", folder))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    """Take steps on batches that are the same on all ranks, so that a divided model trains like a whole one."""
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Any) -> Any:
    """A copy of all of a tensor; of a DTensor a collective."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone() if isinstance(full, Tensor) else full


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and state as whole tensors, by name."""
    named = dict(model.named_parameters())
    return {
        "weights": {name: whole(parameter) for name, parameter in named.items()},
        "state": {
            name: {field: whole(value) for field, value in dict(optimizer.state[parameter]).items()}
            for name, parameter in named.items()
            if parameter in optimizer.state
        },
    }


def save(folder: Path, make: Make, **options: Any) -> None:
    """Train, save a checkpoint, and put down beside it what it should hold."""
    model = make()
    with tiered(model, folder) as optimizer:
        step(model, optimizer, range(3))
        optimizer.save_checkpoint(folder / "saved", model, **options)
        found = wholes(model, optimizer)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(found, folder / "wholes")
    if dist.is_initialized():
        dist.barrier()  # a rank that goes on to read what was put down finds all of it


def load(folder: Path, make: Make) -> None:
    """Load that checkpoint into another model, trained already, compare it, and train on as what it was saved from."""
    wanted = torch.load(folder / "wholes")
    model = make(seed=1)
    with tiered(model, folder) as optimizer:
        step(model, optimizer, range(90, 92))
        optimizer.load_checkpoint(folder / "saved", model)
        found = wholes(model, optimizer)
        for kind in ("weights", "state"):
            assert_same_bits(found[kind], wanted[kind], kind)
        optimizer.store.check()
        step(model, optimizer, range(3, 5))
