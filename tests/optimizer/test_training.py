"""What drives an optimizer through a training run drives ours as it drives torch's AdamW, to the bit.

Every learning rate scheduler that torch has, averaged models, groups added at any time, and torch.compile.
"""

from __future__ import annotations

import inspect
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from tests.optimizer.beside import (
    assert_same_saved,
    assert_same_state_dicts,
    cloned,
    tiered,
    torchs,
)
from tests.optimizer.cases import assert_same_parameters, seeded, set_gradients, small_policy, train
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

Make = Callable[..., torch.optim.Optimizer]
Run = Callable[[Make], list[Any]]


def assert_as_with_torch(run: Run, folder: Path, tiers: str = "cpu nvme") -> None:
    """Compare all tensors that a run returns."""
    mine = run(lambda parameters, **options: tiered(parameters, folder, tiers, **options))
    assert_same_parameters(mine, run(torchs))


# -- schedulers -------------------------------------------------------------------------------------------------

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step), lambda step: 0.5**step]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5, eta_min=1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=3, cycle_momentum=True),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=True),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


def test_every_scheduler_that_torch_has_is_in_the_table() -> None:
    """A new one must not be forgotten."""
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize(
    ("tensor_lr", "order"), [(False, "optimizer first"), (False, "scheduler first"), (True, "optimizer first")]
)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torchs_also_when_resumed(
    name: str, tensor_lr: bool, order: str, tmp_path: Path
) -> None:
    """Rates, their types and betas of two groups over twelve steps, saved and loaded into fresh ones at the fifth."""

    def options(number: float) -> Any:
        return torch.tensor(number) if tensor_lr else number

    def begin(make: Make, parameters: list[Any], lr: float) -> tuple[torch.optim.Optimizer, Any]:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": options(2 * lr)}]
        optimizer = make(groups, lr=options(lr))
        return optimizer, SCHEDULERS[name](optimizer)

    def run(make: Make) -> tuple[list[Any], list[Any]]:
        parameters = seeded((300,), (20, 5))
        optimizer, scheduler = begin(make, parameters, 1e-2)
        seen: list[Any] = []
        for step in range(12):
            if step == 5:
                saved = cloned(optimizer.state_dict()), cloned(scheduler.state_dict())
                optimizer, scheduler = begin(make, parameters, 1.0)
                both = [(optimizer, saved[0]), (scheduler, saved[1])]
                for loading, state in both if order == "optimizer first" else both[::-1]:
                    loading.load_state_dict(state)
            set_gradients(parameters, step)
            optimizer.step()
            scheduler.step(*([1.0 + step] if name == "ReduceLROnPlateau" else []))
            seen += [(type(g["lr"]), float(g["lr"]), *map(float, g["betas"])) for g in optimizer.param_groups]
        return parameters, seen

    mine, seen = run(lambda parameters, **options: tiered(parameters, tmp_path, **options))
    theirs, wanted = run(torchs)
    assert seen == wanted and len(set(seen)) > 2
    assert_same_parameters(mine, theirs)


def test_a_rate_set_between_backward_and_step_and_after_every_load_is_that_of_the_step(tmp_path: Path) -> None:
    """By a new value, in place, and by a scheduler; each load replaces the group objects."""

    def run(make: Make) -> list[Any]:
        parameters = seeded((3000,), (40, 50))
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:], "lr": torch.tensor(0.01)}])
        for step in range(6):
            set_gradients(parameters, step)
            if step % 2:
                optimizer.load_state_dict(cloned(optimizer.state_dict()))
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] *= 0.25
            optimizer.step()
        return parameters

    assert_as_with_torch(run, tmp_path)


def test_schedulers_do_not_see_a_step_that_did_not_happen(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(optimizer, parameters, [0])
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_scheduler_that_steps_first_warns_as_with_torch(tmp_path: Path) -> None:
    optimizer = tiered(seeded((10,)), tmp_path)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


@pytest.mark.parametrize("name", ["StepLR", "MultiplicativeLR", "SequentialLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_a_group_added_under_a_scheduler_has_the_effect_it_has_with_torch(name: str, tmp_path: Path) -> None:
    """Most schedulers count their groups when made, and raise then; the error is torch's."""

    def run(make: Make) -> tuple[list[Any], list[float], str]:
        parameters = seeded((300,), (20, 5), (9,))
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:2]}])
        scheduler = SCHEDULERS[name](optimizer)
        rates, said = [], ""
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": parameters[2:], "lr": 0.02, "initial_lr": 0.02})
            set_gradients(parameters, step)
            optimizer.step()
            try:
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            except Exception as error:
                said += f"{type(error).__name__}: {error}"
            rates += [group["lr"] for group in optimizer.param_groups]
        return parameters, rates, said

    mine, *seen = run(lambda parameters: tiered(parameters, tmp_path))
    theirs, *wanted = run(torchs)
    assert seen == wanted
    assert_same_parameters(mine, theirs)


# -- averaged models --------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 3))


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(torch.randn(8, 30, generator=torch.Generator().manual_seed(step))).square().mean()
    return loss


AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "avg_fn": {"avg_fn": lambda average, value, count: 0.7 * average + 0.3 * value},
    "multi EMA": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "multi SWA": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
}


@pytest.mark.parametrize("average", AVERAGES)
def test_averaged_models_are_those_of_a_run_with_torch(average: str, tmp_path: Path) -> None:
    """With SWALR, update_bn, and the averaged weights put into the model in the middle, to train on from there."""

    def run(make: Make) -> list[Any]:
        model = make_model()
        optimizer = make(model.parameters())
        averaged = swa_utils.AveragedModel(model, **AVERAGES[average])
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            averaged.update_parameters(model)
            scheduler.step()
            if step == 3:
                model.load_state_dict(averaged.module.state_dict())
        swa_utils.update_bn([torch.randn(8, 30, generator=torch.Generator().manual_seed(99))], averaged)
        return [*model.parameters(), *averaged.parameters(), *(b.float() for b in averaged.buffers())]

    assert_as_with_torch(run, tmp_path)


# -- groups added at any time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", ["gpu cpu nvme", "nvme"])
@pytest.mark.parametrize("when", ["before steps", "between steps", "before step", "in closure", "after load", "often"])
def test_groups_may_be_added_at_any_time(when: str, tiers: str, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((3000,), (50,), (40, 30), (20_000,))
        optimizer = make(parameters[:1])

        def add(number: int, **options: Any) -> None:
            optimizer.add_param_group({"params": parameters[number : number + 1], **options})

        if when == "before steps":
            add(1, lr=0.1)
            add(2, amsgrad=True, betas=(0.5, 0.6))
        train(optimizer, parameters, range(2))
        if when == "between steps":
            add(1, maximize=True)
            add(3)
        if when == "after load":
            optimizer.load_state_dict(cloned(optimizer.state_dict()))
            add(2, weight_decay=0.5)
        set_gradients(parameters, 2)
        if when == "before step":  # gradients are there already
            add(2, lr=0.1)
        optimizer.step((lambda: add(3, eps=1e-3)) if when == "in closure" else None)
        for number in (1, 2, 3) if when == "often" else ():
            add(number)
            train(optimizer, parameters, [2 + number])
        train(optimizer, parameters, range(6, 8))
        saved = cloned(optimizer.state_dict())
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        again = make(groups)
        again.load_state_dict(saved)
        train(again, parameters, [8])
        return [*parameters, *(again.state[p]["exp_avg"] for group in groups for p in group["params"])]

    assert_as_with_torch(run, tmp_path, tiers)


def test_a_group_that_is_refused_is_not_added_and_changes_nothing(tmp_path: Path) -> None:
    parameters = seeded((3000,), (40,))
    optimizer = tiered(parameters[:1], tmp_path)
    train(optimizer, parameters[:1], range(2))
    saved = optimizer.state_dict()
    for wrong in ({"params": parameters[:1]}, {"params": parameters[1:], "tier": "moon"}, {"params": {parameters[1]}}):
        with pytest.raises((TypeError, ValueError)):
            optimizer.add_param_group(wrong)
    assert_same_saved(optimizer.state_dict(), saved)
    optimizer.add_param_group({"params": parameters[1:]})
    train(optimizer, parameters, [2])
    assert len(optimizer.state) == 2


# -- torch.compile ----------------------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Any:
    """torch.compile with nothing compiled before or after."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.compile
    torch._dynamo.reset()


class Compiled:
    """A training run of which a part is compiled: the whole step, the model, the optimizer's step, or nothing."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 7))
        self.parameters = list(self.model.parameters())
        self.optimizer = make(self.parameters)
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.optimizer_step: Callable[[], Any] = self.optimizer.step
        self.step: Callable[[Tensor], Tensor] = self.train_step

    def compile(self, part: str, **options: Any) -> None:
        if part == "step":
            self.step = torch.compile(self.train_step, **options)
        elif part == "model":
            self.model = torch.compile(self.model, **options)
        elif part == "optimizer":
            self.optimizer_step = torch.compile(self.optimizer.step, **options)

    def train_step(self, inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer_step()
        return loss.detach()

    def run(self) -> list[Any]:
        losses = []
        for number in range(3):
            losses.append(self.step(torch.randn(8, 40, generator=torch.Generator().manual_seed(number))))
            self.scheduler.step()
        return [*losses, *self.parameters]


def compiled_run(make: Make, part: str, **options: Any) -> tuple[list[Any], torch.optim.Optimizer]:
    run = Compiled(make)
    run.compile(part, **options)
    return run.run(), run.optimizer


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["step", "model", "optimizer"])
def test_a_compiled_run_has_the_bits_of_one_that_is_not(part: str, backend: str, compiler: Any, tmp_path: Path) -> None:
    found, optimizer = compiled_run(lambda parameters: tiered(parameters, tmp_path), part, backend=backend)
    wanted, reference = compiled_run(torchs, "nothing")
    assert_same_parameters(found, wanted)
    assert_same_state_dicts(optimizer, reference)


@pytest.mark.parametrize("part", ["step", "optimizer"])
def test_a_step_inside_one_full_graph_is_refused_by_torch_naming_what_is_not_traced(
    part: str, compiler: Any, tmp_path: Path
) -> None:
    """torch's own AdamW is refused alike: it breaks the graph too."""
    for make in (torchs, lambda parameters: tiered(parameters, tmp_path)):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            compiled_run(make, part, backend="eager", fullgraph=True)
    assert re.search(r"Optimizer\.zero_grad\b" if part == "step" else r"Optimizer\.step\b", str(caught.value))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_model_compiled_as_one_full_graph_is_trained_outside_it(dynamic: bool, compiler: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    found, _ = compiled_run(lambda parameters: tiered(parameters, tmp_path), "model", **options)
    wanted, _ = compiled_run(torchs, "nothing")
    assert_same_parameters(found, wanted)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="inductor compiles C++")
@pytest.mark.parametrize("part", ["step", "model"])
def test_a_run_compiled_by_inductor_has_the_bits_of_the_same_with_torch(
    part: str, compiler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled model rounds otherwise than the plain one, but alike for both optimizers."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    found, _ = compiled_run(lambda parameters: tiered(parameters, tmp_path), part, backend="inductor")
    torch._dynamo.reset()
    wanted, _ = compiled_run(torchs, part, backend="inductor")
    assert_same_parameters(found, wanted)


def test_a_compiled_run_may_be_resumed_uncompiled(compiler: Any, tmp_path: Path) -> None:
    first = Compiled(lambda parameters: tiered(parameters, tmp_path))
    first.compile("step", backend="eager")
    first.run()
    second = Compiled(lambda parameters: TieredAdamW(parameters, lr=0.5, policy=small_policy(tmp_path, ["nvme"])))
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    assert_same_parameters(second.run(), first.run())
