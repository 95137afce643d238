"""A model, batches and policies so small that a run takes a blink, and so tight that state takes every route."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tierstore import TieredAdamW

FEATURES = 157
CHUNK_BYTES = 16 << 10

OPTIONS = {"lr": 3e-3, "weight_decay": 0.05}
"""What the optimizers under test and torch's are both given."""

TIER_SETS: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "cpu-nvme": {"cpu": {"capacity": 3 * CHUNK_BYTES}, "nvme": {"capacity": "1MiB"}},
    "gpu-cpu-nvme": {
        "gpu": {"device": "cpu", "capacity": 3 * CHUNK_BYTES},
        "cpu": {"capacity": 3 * CHUNK_BYTES},
        "nvme": {"capacity": "1MiB"},
    },
}
ROUTES = {
    "cpu-nvme": {"cpu->nvme", "nvme->cpu"},
    "gpu-cpu-nvme": {"gpu->cpu", "cpu->gpu", "cpu->nvme", "nvme->cpu"},
}


def policy(tiers: str, folder: Path) -> dict[str, Any]:
    """Settings under which most of the tiny model's state is in swap files in `folder`."""
    settings = {name: dict(tier) for name, tier in TIER_SETS[tiers].items()}
    settings["nvme"]["paths"] = [str(folder)]
    return {"chunk_size": CHUNK_BYTES, "tiers": settings}


class TinyModel(nn.Module):
    """Weights of several chunks and of one row, a norm, biases: 55,000 parameters."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(33, FEATURES)
            self.middle = nn.Linear(FEATURES, FEATURES)
            self.norm = nn.LayerNorm(FEATURES)
            self.last = nn.Linear(FEATURES, FEATURES)
            self.head = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.last(torch.tanh(self.norm(self.middle(x))))
        return self.head(x)


def batch(number: int, *, size: int = 8) -> Tensor:
    """Inputs that depend on their number alone."""
    return torch.randn(size, 33, generator=torch.Generator().manual_seed(1000 + number))


def loss_of(model: nn.Module, number: int) -> Tensor:
    """The loss of one batch."""
    return (model(batch(number)) - 1.0).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Take plain steps with clipping; return the losses."""
    losses = []
    for number in steps:
        loss = loss_of(model, number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fused(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """Make the reference."""
    return torch.optim.AdamW(parameters, **{**OPTIONS, **options}, fused=True)


class UnscaledAdamW(torch.optim.AdamW):
    """The reference where a GradScaler unscales before the step, as it does where nobody said `fused=True`."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **{**options, "fused": True})
        del self._step_supports_amp_scaling


def fused_without_scaling(parameters: Any) -> torch.optim.AdamW:
    """Make the reference for an optimizer that is fused without anybody having said so."""
    return UnscaledAdamW(parameters, **OPTIONS)


def scaler_that_overflows() -> torch.amp.GradScaler:
    """Make a scaler with which several of the first ten steps are skipped, late ones too."""
    return torch.amp.GradScaler(
        "cpu", init_scale=2.0**24, backoff_factor=2.0**-3, growth_factor=2.0**5, growth_interval=3
    )


def use_scaler_on_cpu(accelerator: Any) -> None:
    """Make fp16 what it is on an accelerator: on the CPU accelerate takes the word and trains in fp32, unscaled."""
    assert accelerator.scaler is None and not accelerator.native_amp
    accelerator.scaler, accelerator.native_amp = scaler_that_overflows(), True


def tiered(parameters: Any, folder: Path, tiers: str = "cpu-nvme", **options: Any) -> TieredAdamW:
    """Make the optimizer under test."""
    state = options.pop("state", {})
    return TieredAdamW(parameters, **{**OPTIONS, **options}, policy={**policy(tiers, folder), "state": state})


def tell_accelerate_of_ranks() -> None:
    """Set what a launcher sets; with one thread each, where accelerate would take what spins on the others' cores."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update(launched, OMP_NUM_THREADS="1")


def steps_counted(optimizer: torch.optim.Optimizer) -> int:
    """The step that all parameters are at."""
    (step,) = {int(state["step"]) for state in optimizer.state.values()}
    return step


# -- what must be equal -------------------------------------------------------------------------------------------


def assert_same_bits(one: Any, other: Any, what: str = "") -> None:
    """Compare nested containers of tensors and plain values: types, shapes, dtypes, devices, sharding and every bit."""
    if isinstance(one, Tensor):
        assert type(one) is type(other), f"{what}: {type(one)} and {type(other)}"
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device), f"{what}: not alike"
        assert getattr(one, "placements", None) == getattr(other, "placements", None), f"{what}: sharded differently"
        assert torch.equal(_bits(one), _bits(other)), f"{what}: values differ"
    elif isinstance(one, Mapping):
        assert list(one) == list(other), f"{what}: keys {list(one)} and {list(other)}"
        for key in one:
            assert_same_bits(one[key], other[key], f"{what}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), f"{what}: lengths {len(one)} and {len(other)}"
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(a, b, f"{what}[{number}]")
    else:
        assert one == other, f"{what}: {one!r} and {other!r}"


def assert_same_models(one: nn.Module, other: nn.Module) -> None:
    """Compare all parameters."""
    assert_same_bits(dict(one.named_parameters()), dict(other.named_parameters()), "parameters")


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """The largest absolute difference of any two weights; NaN if there is one."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    differences = [(_local(a).double() - _local(b).double()).abs().max() for a, b in pairs if _local(a).numel()]
    return float(torch.stack(differences).max())


def _bits(tensor: Tensor) -> Tensor:
    local = _local(tensor)
    return local.contiguous().view(torch.uint8) if local.dim() else local.reshape(1).view(torch.uint8)


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def assert_took_every_route(optimizer: TieredAdamW, tiers: str) -> None:
    """Check that the run was what it was meant to be: state moved between all neighbours, and no invariant broke."""
    moved = {name for name, route in optimizer.store.stats().to_dict()["routes"].items() if route["moves"]}
    assert moved >= ROUTES[tiers], f"only {moved}"
    optimizer.store.check()
