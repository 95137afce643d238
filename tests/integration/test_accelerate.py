"""accelerate: `prepare`, accumulation, clipping, schedulers, a scaler, saved and loaded states; and two ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import AssertResumed, Make, NoteDifference, Pair
from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    fused,
    largest_difference,
    steps_counted,
    tell_accelerate_of_ranks,
    tiered,
    use_scaler_on_cpu,
)
from tierstore import TieredAdamW

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[integrations]'")
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fresh_accelerate")]


KINDS = ["no", "bf16", "fp16", "fp16 fused", "bf16 parameters"]
"""What `mixed_precision` is. fp16 comes with a scaler; "fused": one that leaves unscaling to the optimizer."""


class Run:
    """A prepared model, optimizer and scheduler."""

    def __init__(
        self, make: Make, *, seed: int = 0, kind: str = "no", clip: str | None = "norm", way: str = "alone"
    ) -> None:
        mixed_precision = "no" if kind == "bf16 parameters" else kind.split()[0]
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision
        )
        if mixed_precision == "fp16":
            use_scaler_on_cpu(self.accelerator)
        if way == "sharded":
            _shard(self.accelerator)
        self.clip = clip
        model = TinyModel(seed=seed).to(torch.bfloat16 if kind == "bf16 parameters" else torch.float32)
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=60)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.skipped: list[bool] = []

    @property
    def inner(self) -> Any:
        """The optimizer that `prepare` has wrapped."""
        return self.optimizer.optimizer

    def train(self, first: int, last: int) -> list[float]:
        """Take two batches a step."""
        losses = []
        for number in range(2 * first, 2 * last):
            with self.accelerator.accumulate(self.model):
                x = batch(number).to(next(self.model.parameters()).dtype)
                loss = (self.model(x) - 1.0).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.skipped.append(self.optimizer.step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def _clip(self) -> None:
        if self.clip == "norm":
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
        elif self.clip == "value":
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)


def options_of(kind: str) -> dict[str, bool]:
    return {"fused": True} if kind == "fp16 fused" else {}


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        *[("no", "norm"), ("no", "value"), ("bf16", "norm"), ("fp16", "norm"), ("fp16", "value"), ("fp16", None)],
        *[("fp16 fused", "norm"), ("fp16 fused", None)],
    ],
)
def test_run_is_that_of_fused_adamw(pair: Pair, tiers: str, kind: str, clip: str | None) -> None:
    make, make_reference = pair(tiers, **options_of(kind))
    mine, theirs = Run(make, kind=kind, clip=clip), Run(make_reference, kind=kind, clip=clip)
    assert mine.train(0, 10) == theirs.train(0, 10)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert mine.skipped == theirs.skipped
    assert_took_every_route(mine.inner, tiers)


@pytest.mark.parametrize("kind", ["fp16", "fp16 fused"])
@pytest.mark.parametrize("clip", ["norm", None])
def test_skipped_steps_do_not_advance_step(pair: Pair, kind: str, clip: str | None) -> None:
    run = Run(pair(**options_of(kind))[0], kind=kind, clip=clip)
    taken, skipped = 0, 0
    for number in range(10):
        before = [parameter.clone() for parameter in run.model.parameters()]
        run.train(number, number + 1)
        changed = [not torch.equal(*each) for each in zip(before, run.model.parameters(), strict=True)]
        assert any(changed) == all(changed)
        taken, skipped = taken + all(changed), skipped + (not any(changed))
        assert (steps_counted(run.inner) if run.inner.state else 0) == taken
    assert taken > 2 and skipped > 2
    if kind == "fp16":  # with explicit fused=True the step is called, and skips by itself: accelerate cannot see that
        assert sum(run.skipped) == skipped


def test_batches_that_are_only_accumulated_do_not_step(pair: Pair) -> None:
    run = Run(pair()[0])
    run.train(0, 3)
    assert steps_counted(run.inner) == 3


def test_prepare_reserves_nothing(pair: Pair) -> None:
    """FSDP replaces the parameters after `prepare` has loaded what it saved: room for whole ones may not be there."""
    run = Run(pair()[0])
    assert not run.inner.has_state()
    assert run.inner._held.binding is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepare_keeps_state_of_an_optimizer_that_has_stepped(tmp_path: Path, dtype: torch.dtype) -> None:
    """`prepare` puts the state dict through `load_state_dict`."""
    models = [TinyModel().to(dtype) for _ in range(2)]
    with tiered(models[0].parameters(), tmp_path) as first, tiered(models[1].parameters(), tmp_path) as second:
        for model, optimizer in zip(models, (first, second), strict=True):
            _step(model, optimizer, range(3))
        model, optimizer = accelerate.Accelerator(cpu=True).prepare(models[0], first)
        _step(model, optimizer, range(3, 6))
        _step(models[1], second, range(3, 6))
        assert_same_models(*models)
        assert_same_bits(first.state_dict(), second.state_dict())


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
    for number in numbers:
        x = batch(number).to(next(model.parameters()).dtype)
        (model(x) - 1.0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- saved and loaded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "steps_before_load"), [*((kind, 0) for kind in KINDS), ("no", 3), ("bf16 parameters", 3)]
)
def test_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, kind: str, steps_before_load: int
) -> None:
    straight = Run(pair(**options_of(kind))[0], kind=kind)
    straight.train(0, 5)
    straight.accelerator.save_state(tmp_path / "saved")
    losses = straight.train(5, 10)

    resumed = Run(pair("gpu-cpu-nvme", **options_of(kind))[0], kind=kind, seed=1)
    resumed.train(20, 20 + steps_before_load)
    resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.train(5, 10) == losses
    assert_resumed(resumed.model, straight.model)
    assert_same_bits(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert_took_every_route(straight.inner, "cpu-nvme")
    assert_took_every_route(resumed.inner, "gpu-cpu-nvme")


@pytest.mark.parametrize("is_ours_first", [False, True], ids=["to us", "from us"])
def test_saved_state_is_taken_over(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, is_ours_first: bool
) -> None:
    first, second = pair() if is_ours_first else reversed(pair())
    straight = Run(first)
    straight.train(0, 3)
    straight.accelerator.save_state(tmp_path / "saved")
    losses = straight.train(3, 6)
    resumed = Run(second, seed=1)
    resumed.accelerator.load_state(tmp_path / "saved")
    assert resumed.train(3, 6) == losses
    assert_resumed(resumed.model, straight.model)
    assert_same_bits(resumed.optimizer.state_dict(), straight.optimizer.state_dict())


# -- several ranks ------------------------------------------------------------------------------------------------


def _shard(accelerator: Any) -> None:
    """Make `prepare` use FSDP2: accelerate offers that on accelerators only, but its code runs over gloo too."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20_000, cpu_ram_efficient_loading=False
    )
    for state in (accelerate.PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP


def _train_on_ranks(folder: Path, way: str, kind: str) -> float:
    from accelerate.state import AcceleratorState

    tell_accelerate_of_ranks()
    AcceleratorState._reset_state(reset_partial_state=True)

    def make(parameters: Any) -> TieredAdamW:
        return tiered(parameters, folder)

    straight = Run(make, way=way, kind=kind)
    if kind != "bf16 parameters":
        theirs = Run(fused, way=way, kind=kind)
        assert straight.train(0, 3) == theirs.train(0, 3)
        assert_same_models(straight.model, theirs.model)
    else:
        straight.train(0, 3)
    first = next(straight.model.parameters())
    assert first.dtype == (torch.bfloat16 if kind == "bf16 parameters" else torch.float32)
    assert isinstance(first, torch.distributed.tensor.DTensor) == (way == "sharded")
    assert isinstance(straight.model, torch.nn.parallel.DistributedDataParallel) == (way == "replicated")
    straight.accelerator.save_state(folder / "saved")
    losses = straight.train(3, 6)
    resumed = Run(make, way=way, kind=kind, seed=1)
    resumed.accelerator.load_state(folder / "saved")
    assert resumed.train(3, 6) == losses
    assert_same_models(resumed.model, straight.model)
    assert_took_every_route(resumed.inner, "cpu-nvme")
    straight.inner.close()
    resumed.inner.close()
    return largest_difference(resumed.model, straight.model)


@pytest.mark.parametrize("way", [pytest.param("sharded", marks=trains_shards), "replicated"])
@pytest.mark.parametrize("kind", ["no", "bf16 parameters"])
def test_run_on_two_ranks_is_that_of_fused_adamw_and_resumes(
    two_ranks: Ranks, tmp_path: Path, note_difference: NoteDifference, way: str, kind: str
) -> None:
    for difference in two_ranks.run(_train_on_ranks, tmp_path, way, kind):
        note_difference(difference)
