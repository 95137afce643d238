"""Lightning's Trainer: AMP, clipping, accumulation, checkpoints inside an epoch, callbacks that touch the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.integration.conftest import AssertResumed, Make, Pair
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    scaler_that_overflows,
    steps_counted,
)

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")
from lightning.pytorch.plugins import precision as trainer_precision  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("ERROR", "lightning")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


# -- Trainer ------------------------------------------------------------------------------------------------------

BATCHES = 7
STEPS_SAVED = 6
BATCHES_SAVED = 11
"""Two batches a step, and the last one of an epoch alone: step 6 is the second of the second epoch."""


class TinyTask(lightning.LightningModule):
    """The tiny model with its loss, its optimizer and a scheduler that sets betas too."""

    def __init__(self, make: Make, *, seed: int = 0) -> None:
        super().__init__()
        self.model = TinyModel(seed=seed)
        self.make = make
        self.losses: list[float] = []
        self.validations = 0

    def training_step(self, x: Tensor, _: int) -> Tensor | None:
        loss = (self.model(x) - 1.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x: Tensor, _: int) -> None:
        self.model(x)
        self.validations += 1

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class UnfreezingTask(TinyTask):
    """Trains what is not frozen when it starts; the rest is for a callback to add."""

    def configure_optimizers(self) -> Any:
        return self.make([parameter for parameter in self.model.parameters() if parameter.requires_grad])


class TwoModelsTask(TinyTask):
    """Steps two optimizers by itself, each for its model."""

    def __init__(self, make: Make, *, seed: int = 0) -> None:
        super().__init__(make)
        self.model = nn.ModuleList([TinyModel(seed=2 * seed), TinyModel(seed=2 * seed + 1)])
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [self.make(model.parameters()) for model in self.model]

    def training_step(self, x: Tensor, _: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = (self.model[0](x) * self.model[1](x) - 1.0).square().mean()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.losses.append(loss.item())


class Batches:
    """The batches of an epoch; goes on where it was, as Lightning asks of a loader to resume inside an epoch."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Tensor]:
        start, self.position = self.position % BATCHES, self.position % BATCHES
        for number in range(start, BATCHES):
            self.position = number + 1
            yield batch(number)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TrainerRun:
    """What Lightning's Trainer made of the tiny task."""

    def __init__(
        self,
        make: Make,
        folder: Path,
        *,
        seed: int = 0,
        kind: Any = "32-true",
        clip: str | None = "norm",
        resume: Path | None = None,
        callbacks: Iterable[Any] = (),
        task: type[TinyTask] = TinyTask,
        steps_saved: int = STEPS_SAVED,
        is_validated: bool = False,
    ) -> None:
        """Train three epochs. `resume`: the folder of a run, to go on from its step `steps_saved`."""
        is_automatic = task is not TwoModelsTask
        saving = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=folder, filename="{step}", every_n_train_steps=steps_saved, save_top_k=-1
        )
        # with the word alone the Trainer takes bf16 instead of fp16 on the CPU
        plugin = trainer_precision.MixedPrecision("16-mixed", "cpu", scaler_that_overflows())
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            accumulate_grad_batches=2 if is_automatic else 1,
            gradient_clip_algorithm=clip if is_automatic else None,
            gradient_clip_val={"norm": 0.5, "value": 0.01}.get(clip or "") if is_automatic else None,
            callbacks=[saving, *callbacks],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **({"plugins": plugin} if kind == "16-mixed" else {"precision": kind}),
        )
        self.task = task(make, seed=seed)
        checkpoint = None if resume is None else resume / f"step={steps_saved}.ckpt"
        validation = [batch(50)] if is_validated else None
        self.trainer.fit(self.task, Batches(), validation, ckpt_path=checkpoint, weights_only=True)

    @property
    def inner(self) -> Any:
        return self.trainer.optimizers[0]

    @property
    def losses(self) -> list[float]:
        return self.task.losses


def assert_same_runs(one: TrainerRun, other: TrainerRun) -> None:
    """Compare weights, the optimizers' states and losses, of which a resumed run has the later ones only."""
    count = min(len(one.losses), len(other.losses))
    assert count in (3 * BATCHES, 3 * BATCHES - BATCHES_SAVED)
    assert one.losses[-count:] == other.losses[-count:]
    assert_same_models(one.task.model, other.task.model)
    for mine, theirs in zip(one.trainer.optimizers, other.trainer.optimizers, strict=True):
        assert_same_bits(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize(
    ("kind", "clip"),
    [("32-true", "norm"), ("32-true", "value"), ("bf16-mixed", "norm"), ("16-mixed", "norm"), ("16-mixed", "value")],
)
def test_run_is_that_of_fused_adamw(tmp_path: Path, pair: Pair, tiers: str, kind: str, clip: str) -> None:
    make, make_reference = pair(tiers)
    mine = TrainerRun(make, tmp_path / "mine", kind=kind, clip=clip)
    theirs = TrainerRun(make_reference, tmp_path / "theirs", kind=kind, clip=clip)
    assert_same_runs(mine, theirs)
    assert_took_every_route(mine.inner, tiers)
    assert steps_counted(mine.inner) in (range(3, 9) if kind == "16-mixed" else [12])


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_run_resumed_inside_an_epoch_is_the_uninterrupted_one(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, kind: str
) -> None:
    straight = TrainerRun(pair()[0], tmp_path / "straight", kind=kind)
    resumed = TrainerRun(
        pair("gpu-cpu-nvme")[0],
        tmp_path / "resumed",
        kind=kind,
        seed=1,
        resume=tmp_path / "straight",
    )
    assert_resumed(resumed.task.model, straight.task.model)
    assert_same_runs(resumed, straight)
    assert len(resumed.losses) == 3 * BATCHES - BATCHES_SAVED
    assert_took_every_route(resumed.inner, "gpu-cpu-nvme")


@pytest.mark.parametrize("is_ours_first", [False, True], ids=["to us", "from us"])
def test_checkpoint_is_taken_over(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, is_ours_first: bool
) -> None:
    first, second = pair() if is_ours_first else reversed(pair())
    straight = TrainerRun(first, tmp_path / "straight")
    resumed = TrainerRun(second, tmp_path / "resumed", seed=1, resume=tmp_path / "straight")
    assert_resumed(resumed.task.model, straight.task.model)
    assert_same_runs(resumed, straight)


# -- explicitly fused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "clip"), [("32-true", "norm"), ("bf16-mixed", None), ("16-mixed", None)])
def test_explicitly_fused_run_is_that_of_fused_adamw(tmp_path: Path, pair: Pair, kind: str, clip: str | None) -> None:
    make, make_reference = pair(fused=True)
    mine = TrainerRun(make, tmp_path / "mine", kind=kind, clip=clip)
    theirs = TrainerRun(make_reference, tmp_path / "theirs", kind=kind, clip=clip)
    assert_same_runs(mine, theirs)


@pytest.mark.parametrize("kind", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_of_an_explicitly_fused_one_is_refused_as_for_adamw(
    tmp_path: Path, pair: Pair, kind: str, clip: str
) -> None:
    makes = pair(fused=True)
    for make, name in zip(makes, ["TieredAdamW", "AdamW"], strict=True):
        with pytest.raises(RuntimeError, match=f" {name}, does not allow for gradient clipping"):
            TrainerRun(make, tmp_path, kind=kind, clip=clip)


# -- averages of weights ------------------------------------------------------------------------------------------


def test_run_with_averaged_weights_is_that_of_fused_adamw_and_resumes(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed
) -> None:
    """Lightning puts the average in the model's place at the end, and loads the average before the model on resume."""

    def run(name: str, make: Make, **options: Any) -> TrainerRun:
        average = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)
        return TrainerRun(make, tmp_path / name, callbacks=[average], **options)

    make, make_reference = pair()
    mine, theirs = run("mine", make), run("theirs", make_reference)
    assert_same_runs(mine, theirs)
    resumed = run("resumed", make, seed=1, resume=tmp_path / "mine")
    assert_resumed(resumed.task.model, mine.task.model)
    assert_same_runs(resumed, mine)


@pytest.mark.parametrize("kind", ["32-true", "bf16-true"])
def test_swapping_in_averages_for_validation_changes_no_state(tmp_path: Path, pair: Pair, kind: str) -> None:
    """The average takes the weights' place through `.data`, and gives it back: a master must not notice.

    The average itself does: Lightning keeps it in float32 and rounds it when it swaps. The weights are it in the
    end, and so the high half of a split master: this is about whole ones.
    """

    def run(name: str, **options: Any) -> TrainerRun:
        average = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)
        make = pair(state={"master": "float32"})[0]
        return TrainerRun(make, tmp_path / name, kind=kind, callbacks=[average], **options)

    validated, straight = run("validated", is_validated=True), run("straight")
    assert validated.task.validations > straight.task.validations == 0
    assert validated.losses == straight.losses
    assert_same_bits(validated.inner.state_dict(), straight.inner.state_dict())


def test_run_with_stochastic_weight_averaging_is_that_of_fused_adamw(tmp_path: Path, pair: Pair) -> None:
    """It puts a scheduler of its own in the place of the task's."""

    def run(name: str, make: Make) -> TrainerRun:
        average = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        return TrainerRun(make, tmp_path / name, callbacks=[average])

    make, make_reference = pair()
    assert_same_runs(run("mine", make), run("theirs", make_reference))


# -- groups and optimizers, more than one -------------------------------------------------------------------------


class Unfreezing(lightning.pytorch.callbacks.BaseFinetuning):
    """Adds a layer to the optimizer at the start of the second epoch, and another at that of the third."""

    def freeze_before_training(self, task: Any) -> None:
        self.freeze([task.model.first, task.model.middle])

    def finetune_function(self, task: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        layers = {1: task.model.middle, 2: task.model.first}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer, lr=1e-3)


@pytest.mark.parametrize("steps_saved", [6, 10], ids=["two groups", "three groups"])
def test_groups_added_by_a_callback_train_and_resume_as_with_fused_adamw(
    tmp_path: Path, pair: Pair, steps_saved: int
) -> None:
    """On resume the callback sets `param_groups` anew. It leaves frozen what it had unfrozen, so the reference for a
    resumed run is torch's resumed one."""

    def run(name: str, make: Make, **options: Any) -> TrainerRun:
        callbacks = [Unfreezing()]
        options |= {"task": UnfreezingTask, "steps_saved": steps_saved, "callbacks": callbacks}
        return TrainerRun(make, tmp_path / name, **options)

    make, make_reference = pair()
    mine, theirs = run("mine", make), run("theirs", make_reference)
    assert len(mine.inner.param_groups) == 3
    assert_same_runs(mine, theirs)
    mine = run("mine resumed", make, seed=1, resume=tmp_path / "mine")
    theirs = run("theirs resumed", make_reference, seed=1, resume=tmp_path / "theirs")
    assert mine.losses == theirs.losses
    assert_same_models(mine.task.model, theirs.task.model)
    assert_same_bits(mine.inner.state_dict(), theirs.inner.state_dict())


@pytest.mark.parametrize("kind", ["32-true", "16-mixed"])
def test_two_optimizers_stepped_by_the_task_train_as_fused_adamw_and_resume(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, kind: str
) -> None:
    options = {"kind": kind, "task": TwoModelsTask, "steps_saved": 2 * BATCHES_SAVED}
    make, make_reference = pair()
    mine = TrainerRun(make, tmp_path / "mine", **options)
    assert_same_runs(mine, TrainerRun(make_reference, tmp_path / "theirs", **options))
    resumed = TrainerRun(make, tmp_path / "resumed", seed=1, resume=tmp_path / "mine", **options)
    assert_resumed(resumed.task.model, mine.task.model)
    assert_same_runs(resumed, mine)
