"""Between two steps anything may change that a step takes for granted of the last: each change has torch's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.cases import same_bits
from tierstore import TieredAdamW, TieredSGD, mapping
from tierstore.rules import base

POLICIES = {
    "in memory": {"tiers": {"cpu": {"capacity": "4MiB"}}},
    "in files": {"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "64KiB"}, "nvme": {"capacity": "4MiB"}}},
}


def parameters(seed: int = 0) -> list[nn.Parameter]:
    """Whole in one chunk and cut into several; 0-dim, 1-D, a matrix, channels last, one of 17 elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40, 30), (), (17,), (5000,), (4, 3, 5, 6), (100,), (1, 7)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[4] = tensors[4].to(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in tensors]


Odd = Callable[[Tensor], Tensor]


class Pair:
    """The same training by torch and by a tiered optimizer."""

    def __init__(self, policy: Any, kind: tuple[Any, Any] = (torch.optim.AdamW, TieredAdamW), **options: Any) -> None:
        self.sides = [parameters(), parameters()]
        theirs, mine = kind
        self.optimizers = [
            theirs(self.sides[0], lr=0.01, fused=True, **options),
            mine(self.sides[1], lr=0.01, policy=policy, **options),
        ]

    def train(self, steps: int, seed: int, odd: Odd | None = None) -> None:
        """Step both with the same gradients; those of the tiered optimizer are what `odd` makes of them.

        torch reads a gradient's memory as if it were laid out as the parameter's, so its side gets the values that way.
        """
        for step in range(steps):
            for number, (side, optimizer) in enumerate(zip(self.sides, self.optimizers, strict=True)):
                generator = torch.Generator().manual_seed(seed + step)
                for parameter in side:
                    plain = (
                        torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator)).detach()
                    )
                    given = plain if odd is None else odd(plain)
                    parameter.grad = given if number == 1 else torch.empty_like(plain).copy_(given)
                optimizer.step()

    def both(self, change: Callable[[list[nn.Parameter], Any], None]) -> None:
        """Change something on both sides."""
        for side, optimizer in zip(self.sides, self.optimizers, strict=True):
            change(side, optimizer)

    def are_same(self) -> bool:
        """Whether all parameters have the same bits."""
        return all(same_bits(theirs, mine) for theirs, mine in zip(*self.sides, strict=True))


def _other_memory(side: list[nn.Parameter], optimizer: Any) -> None:
    for parameter in side:
        parameter.data = parameter.data.clone() * 1.5


def _overwritten(side: list[nn.Parameter], optimizer: Any) -> None:
    for parameter in side:
        parameter.data.mul_(0.5)


def _other_options(side: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.003, weight_decay=0.2, betas=(0.8, 0.99))


def _one_frozen(side: list[nn.Parameter], optimizer: Any) -> None:
    side[0].requires_grad_(False)
    side[2].requires_grad_(False)


def _one_in_a_group_of_its_own(side: list[nn.Parameter], optimizer: Any) -> None:
    moved = optimizer.param_groups[0]["params"].pop(2)
    optimizer.add_param_group(
        {**{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}, "params": [moved]}
    )
    optimizer.param_groups[1]["lr"] = 0.5


def _other_step_counts(side: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[side[0]]["step"].fill_(20.0)
    optimizer.state[side[3]]["step"] = torch.tensor(7.0)


def _other_moments(side: list[nn.Parameter], optimizer: Any) -> None:
    for parameter in side:
        optimizer.state[parameter]["exp_avg"].mul_(3)


def _reloaded(side: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


CHANGES = [
    _other_memory,
    _overwritten,
    _other_options,
    _one_frozen,
    _one_in_a_group_of_its_own,
    _other_step_counts,
    _other_moments,
    _reloaded,
]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_between_two_steps_is_what_the_next_one_starts_from(
    policy: Any, change: Callable[[list[nn.Parameter], Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    pair = Pair(policy)
    pair.train(2, seed=1)
    pair.both(change)
    pair.train(2, seed=10)
    assert pair.are_same()


def _in_other_strides(values: Tensor) -> Tensor:
    return values.mT.contiguous().mT if values.dim() > 1 else values.repeat_interleave(2)[::2].view(values.shape)


def _expanded(values: Tensor) -> Tensor:
    return values.flatten()[0].expand(values.shape)


def _negated_lazily(values: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(values), values).conj().imag


def _of_a_subclass(values: Tensor) -> Tensor:
    return nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("odd", [_in_other_strides, _expanded, _negated_lazily, _of_a_subclass])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_gradient_of_another_make_than_the_last_one_counts_by_its_values(
    policy: Any, odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    pair = Pair(policy)
    pair.train(2, seed=1)
    pair.train(1, seed=10, odd=odd)
    pair.train(1, seed=20)
    assert pair.are_same()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_many_parameters_of_two_groups_have_torchs_bits_with_and_without_state(momentum: float) -> None:
    pair = Pair(POLICIES["in memory"], (torch.optim.SGD, TieredSGD), momentum=momentum, weight_decay=0.1)
    pair.both(_one_in_a_group_of_its_own)
    pair.train(3, seed=1)
    pair.both(_one_frozen)
    pair.train(1, seed=10)
    assert pair.are_same()


def test_a_kernel_that_compares_shapes_is_given_flat_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's on an accelerator does; on the CPU a later one may."""
    kernel, shapes = torch._fused_adamw_, []

    def strict(parameters: list[Tensor], gradients: list[Tensor], moments: list[Tensor], *others: Any, **numbers: Any):
        shapes.extend(parameter.shape for parameter in parameters)
        if any(one.shape != other.shape for one, other in zip(parameters, moments, strict=True)):
            raise RuntimeError("of different shapes")
        kernel(parameters, gradients, moments, *others, **numbers)

    monkeypatch.setattr(base, "_GO_BY_MEMORY", {})
    monkeypatch.setattr(torch, "_fused_adamw_", strict)
    mine = parameters()
    optimizer = TieredAdamW(mine, lr=0.01, policy=POLICIES["in memory"])
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    shapes.clear()
    optimizer.step()
    assert len(shapes) > len(mine)
    assert optimizer.state[mine[0]]["step"] == 1


def test_a_step_count_that_was_given_out_counts_on_in_place_and_alone() -> None:
    mine = parameters()
    optimizer = TieredAdamW(mine, lr=0.01, policy=POLICIES["in memory"])
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    given = optimizer.state[mine[0]]["step"]
    given.fill_(9.0)
    optimizer.step()
    assert given.item() == 10
    assert [optimizer.state[parameter]["step"].item() for parameter in mine[1:]] == [2.0] * (len(mine) - 1)


def test_views_of_a_record_do_not_outlive_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is kept to make steps fast may hold memory that a tier has given back."""
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    mine = parameters()
    policy = {"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "512KiB"}, "nvme": {"capacity": "4MiB"}}}
    optimizer = TieredAdamW(mine, lr=0.01, policy=policy)
    for parameter in mine:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    before = len(mapping._areas)
    optimizer.store.resize("cpu", "64KiB")
    after = len(mapping._areas)
    assert after < before
    optimizer.close()
    assert len(mapping._areas) < after
