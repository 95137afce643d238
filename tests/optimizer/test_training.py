"""TRAIN"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.optimizer.beside import (
    EVERY_TIERS,
    cloned,
    tiered,
)
from tests.optimizer.cases import (
    assert_same_parameters,
    seeded,
    set_gradients,
    small_policy,
    train,
)
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torchs_also_after_a_load(name: str, tensor_lr: bool, tmp_path: Path) -> None:
    def run(make: Callable[[Any, Any], torch.optim.Optimizer]) -> tuple[list[Any], list[float]]:
        parameters = seeded((300,), (20, 5))
        lr = torch.tensor(1e-2) if tensor_lr else 1e-2
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": lr}], lr)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []
        for step in range(8):
            if step == 4:
                saved = cloned(optimizer.state_dict()), cloned(scheduler.state_dict())
                optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}], 1.0)
                scheduler = SCHEDULERS[name](optimizer)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
            rates += [float(group["lr"]) for group in optimizer.param_groups]
        return parameters, rates

    def ours(groups: Any, lr: Any) -> torch.optim.Optimizer:
        return TieredAdamW(groups, lr=lr, policy=small_policy(tmp_path))

    theirs, wanted = run(lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True))
    parameters, rates = run(ours)
    assert rates == wanted
    assert_same_parameters(parameters, theirs)


def test_schedulers_do_not_see_a_step_that_did_not_happen(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, parameters, [0])
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@EVERY_TIERS
def test_groups_may_be_added_before_and_after_steps(tiers: str, tmp_path: Path) -> None:
    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Any]:
        parameters = seeded((3000,), (50,), (40, 30), (5000,))
        optimizer = make(parameters[:1])
        optimizer.add_param_group({"params": parameters[1:2], "lr": 0.1})
        train(optimizer, parameters[:2], range(3))
        optimizer.add_param_group({"params": parameters[2:3], "amsgrad": True, "betas": (0.5, 0.6)})
        train(optimizer, parameters[:3], range(3, 5))
        optimizer.add_param_group({"params": parameters[3]})
        train(optimizer, parameters, range(5, 8))
        return parameters

    wanted = run(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
    found = run(lambda parameters: tiered(parameters, tmp_path, tiers))
    assert_same_parameters(found, wanted)


def test_zero_grad_and_the_closure_are_torchs(tmp_path: Path) -> None:
    (parameter,) = seeded((10,))
    optimizer = tiered([parameter], tmp_path)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        assert torch.is_grad_enabled()
        return loss

    with torch.no_grad():
        first, second = optimizer.step(closure), optimizer.step(closure=closure)
    assert second < first and optimizer.state[parameter]["step"] == 2
    optimizer.zero_grad(set_to_none=False)
    assert parameter.grad is not None and not parameter.grad.any()
    optimizer.zero_grad()
    assert parameter.grad is None
    assert optimizer.step() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [None, True])
@EVERY_TIERS
def test_grad_scaler_scales_and_skips_as_with_torch(
    tiers: str, fused: bool | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    def run(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Any], list[float]]:
        parameters = seeded((3000,), (40, 50), dtype=dtype)
        optimizer = make(parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            set_gradients(parameters, step, scale=scaler.get_scale())
            if step in (0, 3):
                parameters[1].grad[3, 4] = float("inf")
            scaler.scale(torch.zeros(1))  # the scaler makes its tensors at the first loss
            if step == 4:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
            if step == 3:
                before = [parameter.detach().clone() for parameter in parameters]
                counts = [float(optimizer.state[parameter]["step"]) for parameter in parameters]
            scaler.step(optimizer)
            if step == 3:
                assert_same_parameters(parameters, before)
                assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == counts
            scaler.update()
            scales.append(scaler.get_scale())
        return parameters, scales

    parameters, scales = run(lambda p: tiered(p, tmp_path, tiers, fused=fused))
    if dtype == torch.float32:
        theirs, wanted = run(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        assert scales == wanted
        assert_same_parameters(parameters, theirs)
    assert hasattr(tiered(seeded((1,)), tmp_path, fused=fused), "_step_supports_amp_scaling") == (fused is True)


def test_found_inf_at_the_first_step_makes_no_state_and_changes_nothing(tmp_path: Path) -> None:
    parameters = seeded((3000,))
    optimizer = tiered(parameters, tmp_path, fused=True)
    before = [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, 0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0]), torch.tensor([1.0])
    optimizer.step()
    assert_same_parameters(parameters, before)
    assert not optimizer.state
    optimizer.found_inf = torch.tensor([0.0])
    optimizer.step()
    (theirs,) = seeded((3000,))
    set_gradients([theirs], 0)
    theirs.grad /= 2
    torch.optim.AdamW([theirs], lr=1e-2, fused=True).step()
    assert_same_parameters(parameters, [theirs])
