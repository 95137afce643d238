"""`update: backward` and graphs used more than once: torch's bits, or autograd's own error; never other numbers.

Weights change while the graph is still gone through, so that what has kept one for later must not find another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.optimizer.cases import assert_same_parameters, small_policy
from tierstore.optimizer import TieredAdamW


class Net(nn.Module):
    """A weight that stands last, whose gradient is there first, and may be used before the others once more."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between = nn.Parameter(torch.randn(60)), nn.Linear(60, 60)
        self.weight = nn.Parameter(torch.randn(60, 60) / 8)
        self.to(dtype)

    def forward(self, step: int, again: Callable[[Tensor, Tensor], Tensor] = lambda hidden, _: hidden) -> Tensor:
        inputs = torch.randn(4, 60, generator=torch.Generator().manual_seed(step)).to(self.first.dtype)
        return self.between(again(self.first * inputs, self.weight)) @ self.weight


def tiered(net: Net, folder: Path, **more: Any) -> TieredAdamW:
    return TieredAdamW(net.parameters(), lr=1e-2, policy=small_policy(folder, update="backward", **more))


# -- torch's bits -----------------------------------------------------------------------------------------------


def one_after_another(net: Net, optimizer: Any, step: int) -> None:
    output = net(step)
    accumulating = getattr(optimizer, "accumulating", contextlib.nullcontext)
    with accumulating():
        output.square().mean().backward(retain_graph=True)
    output.abs().mean().backward()


def at_once(net: Net, _: Any, step: int) -> None:
    output = net(step)
    torch.autograd.backward([output.square().mean(), output.abs().mean()])


def penalized(net: Net, _: Any, step: int) -> None:
    loss = net(step).square().mean()
    (gradient,) = torch.autograd.grad(loss, [net.weight], create_graph=True)
    (loss + gradient.square().sum()).backward()


def stepped_in_a_hook(net: Net, optimizer: Any, step: int) -> None:
    """A step of what has arrived so far."""
    handle = net.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
    net(step).square().mean().backward()
    handle.remove()


@pytest.mark.parametrize("run_backward", [one_after_another, at_once, penalized, stepped_in_a_hook])
def test_graphs_used_more_than_once_have_torchs_bits(
    run_backward: Callable[[Net, Any, int], None], tmp_path: Path
) -> None:
    mine, theirs = Net(), Net()
    optimizer = tiered(mine, tmp_path)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    for net, one in ((mine, optimizer), (theirs, reference)):
        for step in range(4):
            one.zero_grad()
            run_backward(net, one, step)
            one.step()
    assert_same_parameters(list(mine.parameters()), list(theirs.parameters()))
    optimizer.store.check()
    optimizer.close()


# -- autograd's error -------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """Keeps a weight itself."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(weight)
        return hidden * weight[0]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0] * context.saved_tensors[0][0], None


LATER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "in a product": lambda hidden, weight: hidden @ weight.detach(),
    "in a layer": lambda hidden, weight: functional.linear(hidden, weight.detach()),
    "a part of it": lambda hidden, weight: hidden * weight.detach()[0],
    "in a function of the user's": lambda hidden, weight: Scaled.apply(hidden, weight.detach()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("later", LATER.values(), ids=LATER)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_weight_used_after_its_gradient_is_there_is_an_error_at_every_step(
    steps: int, later: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Such gradients were of weights half updated, and nobody was told."""
    net = Net(dtype)
    optimizer = tiered(net, tmp_path)
    for step in range(steps):
        optimizer.zero_grad()
        net(step).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(steps, later).square().mean().backward()
    optimizer.close()


def test_such_an_error_in_the_first_backward_has_changed_nothing(tmp_path: Path) -> None:
    net, untouched = Net(), Net()
    optimizer = tiered(net, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(0, LATER["in a product"]).square().mean().backward()
    assert_same_parameters(list(net.parameters()), list(untouched.parameters()))
    optimizer.zero_grad()
    net(0).square().mean().backward()
    optimizer.step()
    assert float(optimizer.state[net.weight]["step"]) == 1
    optimizer.close()


def test_a_retained_graph_cannot_be_gone_through_again_after_the_step(tmp_path: Path) -> None:
    net = Net()
    optimizer = tiered(net, tmp_path)
    run_backward = partial(net(0).square().mean().backward, retain_graph=True)
    run_backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_backward()
    optimizer.close()
