"""The two settings in which all that torch's AdamW does is tried: all state in memory, and tiers of three extents.

As classes, because torch's machinery makes its optimizers itself, from parameters and torch's own arguments.
`TinyTiers` needs `TIERSTORE_SWAP`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.cases import KIB, same_bits
from tierstore.optimizer import TieredAdamW

CHUNK = 24 * KIB


class InMemory(TieredAdamW):
    """All state in host memory."""

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(params, *arguments, **options, tiers=["cpu"])


class TinyTiers(TieredAdamW):
    """Host memory that stands in for a GPU, host memory and a file; what is in `network` does not fit the first two."""

    def __init__(self, params: Any, *arguments: Any, **options: Any) -> None:
        tiers = {"gpu": {"device": "cpu", "capacity": 3 * CHUNK}, "cpu": {"capacity": 3 * CHUNK}, "nvme": {}}
        super().__init__(params, *arguments, **options, policy={"chunk_size": CHUNK, "tiers": tiers})


Make = Callable[..., Any]
"""An optimizer class, or a function that makes one."""

SETTINGS: tuple[type[TieredAdamW], ...] = (InMemory, TinyTiers)
EVERY_SETTING = pytest.mark.parametrize("setting", SETTINGS)

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {"fused": {}, "foreach": {"foreach": True}, "for-loop": {"fused": False}}
"""torch's, and what asks for them."""
EVERY_IMPLEMENTATION = pytest.mark.parametrize("flags", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def fused(params: Any, *arguments: Any, **options: Any) -> torch.optim.AdamW:
    """What a tiered optimizer is held to: torch's AdamW with the same flags, or the fused one if no flag is given."""
    is_free = options.get("foreach") is None and options.get("fused") is None
    return torch.optim.AdamW(params, *arguments, **options, **({"fused": True} if is_free else {}))


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network of 22,271 parameters in five tensors, one of them 0-dim: eight chunks of `CHUNK`, or more."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 130), nn.Sigmoid(), nn.Linear(130, 40))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return model.to(dtype)


def backward(model: nn.Module, step: int) -> Tensor:
    """Give the parameters that want them the gradients of a step, added to those they have."""
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(8, 130, generator=generator).to(parameter.dtype)
    loss: Tensor = (model(inputs) * model.get_parameter("scale")).square().mean()
    loss.backward()
    return loss


def trained(make: Make, steps: int = 2, **options: Any) -> tuple[nn.Module, Any]:
    """A network after some steps, and its optimizer."""
    model = network()
    optimizer = make(model.parameters(), **{"lr": 1e-2, **options})
    go_on(model, optimizer, range(steps))
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps, each with its own gradients."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def assert_same_optimizers(one: torch.optim.Optimizer, other: torch.optim.Optimizer, when: object = "") -> None:
    """Compare parameters and state, to the bit."""
    pairs = zip(parameters_of(one), parameters_of(other), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        assert same_bits(mine, theirs), f"{when}: parameter {number}"
        assert_same_fields(one.state[mine], other.state[theirs], f"{when}: parameter {number}")


def assert_same_fields(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], when: object = "") -> None:
    """Compare the states of one parameter, to the bit."""
    assert list(found) == list(wanted), f"{when} has {list(found)}, wanted {list(wanted)}"
    for name, value in wanted.items():
        assert same_bits(found[name], value), f"{when}: {name}"


def parameters_of(optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """All parameters in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
