"""`free_gradients: true`: gradients go as the step goes on, and nothing else changes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.cases import (
    FourTiers,
    assert_same_parameters,
    laid_out,
    seeded,
    set_gradients,
    small_policy,
)
from tests.optimizer.settings import assert_same_optimizers
from tierstore.errors import FailedStepError, PolicyError
from tierstore.optimizer import TieredAdamW, TieredLAMB, TieredSGD
from tierstore.rules.adam import AdamWRule

SHAPES: list[tuple[int, ...]] = [(3000,), (40, 50), (1,), (), (0,), (7, 3), (20_000,)]


def policy(folder: Path, tiers: str = "cpu nvme", **more: Any) -> dict[str, Any]:
    return small_policy(folder, tiers.split(), **more)


@pytest.mark.parametrize("make", [TieredAdamW, TieredSGD, TieredLAMB])
@pytest.mark.parametrize("tiers", FourTiers.names)
def test_every_gradient_is_gone_after_the_step_and_the_numbers_are_the_same(
    make: Any, tiers: str, tmp_path: Path
) -> None:
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    optimizer = make(mine, lr=1e-2, policy=policy(tmp_path, tiers, free_gradients=True))
    reference = make(theirs, lr=1e-2, policy=policy(tmp_path, tiers))
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        mine[1].grad = theirs[1].grad = None
        optimizer.step()
        reference.step()
        assert all(parameter.grad is None for parameter in mine)
        assert all(parameter.grad is not None for number, parameter in enumerate(theirs) if number != 1)
    assert_same_parameters(mine, theirs)
    assert_same_optimizers(optimizer, reference)


class Watching(AdamWRule):
    """Says how many bytes of gradients are alive whenever it is called, and fails at the call told."""

    alive: ClassVar[list[int]] = []
    gradients: ClassVar[list[tuple[weakref.ref[Tensor], int]]] = []
    fails_at: ClassVar[int | None] = None

    def update(self, pieces: Any, options: Any, **more: Any) -> None:
        if self.gradients:
            if len(self.alive) == self.fails_at:
                raise RuntimeError("broken")
            self.alive.append(sum(nbytes for gradient, nbytes in self.gradients if gradient() is not None))
        super().update(pieces, options, **more)


class WatchedAdamW(TieredAdamW):
    rule = Watching()


@pytest.fixture(autouse=True)
def _nothing_watched() -> None:
    Watching.alive.clear()
    Watching.gradients.clear()
    Watching.fails_at = None


def watch(optimizer: TieredAdamW, parameters: list[nn.Parameter]) -> None:
    optimizer.store.check()  # bound, which tests the rule
    Watching.gradients[:] = [(weakref.ref(p.grad), p.grad.nbytes) for p in parameters if p.grad is not None]


def test_gradient_memory_shrinks_chunk_by_chunk(tmp_path: Path) -> None:
    """Seven parameters, two of them not dense, of 3,000 elements, one to a chunk of 24 KiB."""
    parameters = seeded(*[(3000,)] * 7)
    for number in (2, 4):
        parameters[number] = nn.Parameter(laid_out(parameters[number].detach(), "strided"))
    optimizer = WatchedAdamW(parameters, policy=policy(tmp_path, chunk=24 << 10, free_gradients=True))
    set_gradients(parameters, 0)
    watch(optimizer, parameters)
    optimizer.step()
    assert Watching.alive == [12000 * left for left in range(7, 0, -1)]


def test_the_gradient_of_a_parameter_in_several_chunks_goes_with_the_last_of_them(tmp_path: Path) -> None:
    parameters = seeded((9216,), (3072,))  # three chunks and one
    optimizer = WatchedAdamW(parameters, policy=policy(tmp_path, chunk=24 << 10, free_gradients=True))
    set_gradients(parameters, 0)
    watch(optimizer, parameters)
    optimizer.step()
    assert Watching.alive == [49152, 49152, 49152, 12288]


def test_a_scaler_that_skips_a_step_leaves_all_gradients(tmp_path: Path) -> None:
    parameters = seeded((3000,), (10,))
    optimizer = TieredAdamW(parameters, fused=True, policy=policy(tmp_path, free_gradients=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad, left in ((float("inf"), 2), (1.0, 0)):
        scaler.scale(parameters[0].sum() * bad + parameters[1].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert sum(parameter.grad is not None for parameter in parameters) == left
        optimizer.zero_grad()
    assert len(optimizer.state) == 2


def test_what_broke_off_says_that_gradients_are_gone(tmp_path: Path) -> None:
    parameters = seeded(*[(3000,)] * 3)
    optimizer = WatchedAdamW(parameters, policy=policy(tmp_path, chunk=24 << 10, free_gradients=True))
    set_gradients(parameters, 0)
    watch(optimizer, parameters)
    Watching.fails_at = 1
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step()
    assert [parameter.grad is None for parameter in parameters] == [True, False, False]
    with pytest.raises(FailedStepError, match=r"Updated: param\.0 \(whose gradients are gone: free_gradients\)"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
def test_a_parameter_twice_in_a_group_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    parameters = seeded((3000,), (10,))
    before = [parameter.detach().clone() for parameter in parameters]
    named = [("weight", parameters[0]), ("bias", parameters[1]), ("weight", parameters[0])]
    optimizer = TieredAdamW(named, policy=policy(tmp_path, free_gradients=True))
    set_gradients(parameters, 0)
    with pytest.raises(PolicyError, match=r"more than once \(weight\)"):
        optimizer.step()
    assert_same_parameters(parameters, before)
    assert all(parameter.grad is not None for parameter in parameters)


def test_gradients_kept_at_zero_are_made_anew(tmp_path: Path) -> None:
    parameters = seeded((3000,))
    optimizer = TieredAdamW(parameters, policy=policy(tmp_path, free_gradients=True))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        parameters[0].square().sum().backward()
        optimizer.step()
        assert parameters[0].grad is None
    state: Mapping[str, Tensor] = optimizer.state[parameters[0]]
    assert state["step"] == 2
