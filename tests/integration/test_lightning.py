"""Lightning: Fabric's wrapper, the moving of state between devices, and its Trainer, resumed inside an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.conftest import AssertResumed
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    fused,
    fused_without_scaling,
    loss_of,
    scaler_that_overflows,
    tiered,
    train,
)
from tierstore import TieredAdamW
from tierstore.errors import StateDictError

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")
from lightning.fabric.plugins import precision as fabric_precision  # noqa: E402
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # noqa: E402
from lightning.pytorch.plugins import precision as trainer_precision  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("ERROR", "lightning")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def optimizers(folder: Path, tiers: str, **options: Any) -> tuple[Make, Make]:
    """What makes the optimizer under test, and the reference for it."""
    reference = fused if "fused" in options else fused_without_scaling
    return (lambda parameters: tiered(parameters, folder, tiers, **options)), reference


def steps_counted(optimizer: torch.optim.Optimizer) -> float:
    (steps,) = {float(state["step"]) for state in optimizer.state.values()}
    return steps


@pytest.fixture
def closed() -> Iterator[Callable[[Any], Any]]:
    """Close the tiered optimizers of runs in the end."""
    runs: list[Any] = []
    yield lambda run: runs.append(run) or run
    for run in runs:
        if isinstance(run.inner, TieredAdamW):
            run.inner.close()


# -- Fabric -------------------------------------------------------------------------------------------------------


class FabricRun:
    """A model and optimizer set up by Fabric."""

    def __init__(self, make: Make, *, seed: int = 0, kind: Any = "32-true", clip: str | None = "max_norm") -> None:
        if kind == "16-mixed":  # else Fabric takes bf16 instead on the CPU
            plugin = fabric_precision.MixedPrecision("16-mixed", "cpu", scaler_that_overflows())
            self.fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        else:
            self.fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=kind)
        self.clip = clip
        model = TinyModel(seed=seed).to(torch.bfloat16 if kind == "bf16-true" else torch.float32)
        self.inner = make(model.parameters())
        self.model, self.optimizer = self.fabric.setup(model, self.inner)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            loss = loss_of(self.model, number)
            self.fabric.backward(loss)
            if self.clip is not None:
                limit: dict[str, Any] = {self.clip: 0.5}
                self.fabric.clip_gradients(self.model, self.optimizer, **limit, error_if_nonfinite=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", ["max_norm", "clip_val"])
def test_fabric_run_is_that_of_fused_adamw(tmp_path: Path, closed: Any, tiers: str, kind: str, clip: str) -> None:
    make, make_reference = optimizers(tmp_path, tiers)
    mine, theirs = closed(FabricRun(make, kind=kind, clip=clip)), FabricRun(make_reference, kind=kind, clip=clip)
    assert mine.train(0, 10) == theirs.train(0, 10)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert_took_every_route(mine.inner, tiers)
    assert steps_counted(mine.inner) in (range(3, 8) if kind == "16-mixed" else [10])


def test_fabric_has_explicitly_fused_one_unscale_by_itself(tmp_path: Path, closed: Any) -> None:
    """As with torch's: the steps are the same, and clipping, before which Fabric would have to unscale, is refused."""
    make, make_reference = optimizers(tmp_path, "cpu-nvme", fused=True)
    mine, theirs = [closed(FabricRun(each, kind="16-mixed", clip=None)) for each in (make, make_reference)]
    assert mine.train(0, 10) == theirs.train(0, 10)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    for run in (mine, theirs):
        run.clip = "max_norm"
        with pytest.raises(NotImplementedError, match="handling the unscaling"):
            run.train(10, 11)


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric_resumes_from_what_it_saved(
    tmp_path: Path, closed: Any, assert_resumed: AssertResumed, kind: str
) -> None:
    straight = closed(FabricRun(optimizers(tmp_path, "cpu-nvme")[0], kind=kind))
    straight.train(0, 3)
    straight.fabric.save(tmp_path / "saved.ckpt", {"model": straight.model, "optimizer": straight.optimizer})
    losses = straight.train(3, 6)
    resumed = closed(FabricRun(optimizers(tmp_path, "gpu-cpu-nvme")[0], kind=kind, seed=1))
    resumed.train(20, 22)
    states = {"model": resumed.model, "optimizer": resumed.optimizer}
    resumed.fabric.load(tmp_path / "saved.ckpt", states, weights_only=True)
    assert resumed.train(3, 6) == losses
    assert_resumed(resumed.model, straight.model)
    assert_same_bits(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert_took_every_route(resumed.inner, "gpu-cpu-nvme")


def test_wrapper_of_fabric_sees_the_state_and_store_of_the_optimizer_it_wraps(tmp_path: Path) -> None:
    """The wrapper is of our class, but without its constructor: asked before the first step, it must make no store."""
    run = FabricRun(lambda parameters: tiered(parameters, tmp_path))
    first = next(iter(run.model.parameters()))
    assert dict(run.optimizer.state[first]) == {}
    store = run.optimizer.store
    run.train(0, 2)
    assert run.optimizer.store is run.inner.store is store
    assert_same_bits(dict(run.optimizer.state[first]), dict(run.inner.state[first]))
    assert float(run.inner.state[first]["exp_avg"].abs().sum()) > 0
    run.optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        run.train(2, 3)


# -- state from device to device ----------------------------------------------------------------------------------


def test_moving_state_leaves_it_in_its_tiers(tmp_path: Path) -> None:
    """Lightning moves all but `step`, at set-up, resume and teardown."""
    model = TinyModel()
    with tiered(model.parameters(), tmp_path) as optimizer:
        _optimizers_to_device([optimizer], torch.device("cpu"))  # nothing there yet
        train(model, optimizer, range(3))
        before, moved = optimizer.state_dict(), optimizer.store.stats().to_dict()["routes"]
        _optimizers_to_device([optimizer], torch.device("cpu"))
        assert optimizer.store.stats().to_dict()["routes"] == moved
        assert_same_bits(optimizer.state_dict(), before)


def test_moving_state_to_where_there_are_no_values_changes_nothing(tmp_path: Path) -> None:
    model = TinyModel()
    with tiered(model.parameters(), tmp_path) as optimizer:
        train(model, optimizer, range(3))
        before = optimizer.state_dict()
        with pytest.raises(StateDictError, match="no values"):
            _optimizers_to_device([optimizer], torch.device("meta"))
        assert_same_bits(optimizer.state_dict(), before)
        train(model, optimizer, range(3, 4))


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

    def training_step(self, x: Tensor, _: int) -> Tensor:
        loss = (self.model(x) - 1.0).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.model.parameters())
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


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
    ) -> None:
        """Train three epochs. `resume`: the folder of a run, to go on from its step `STEPS_SAVED`."""
        saving = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=folder, filename="{step}", every_n_train_steps=STEPS_SAVED, save_top_k=-1
        )
        # with the word alone the Trainer takes bf16 instead of fp16 on the CPU
        plugin = trainer_precision.MixedPrecision("16-mixed", "cpu", scaler_that_overflows())
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=3,
            accumulate_grad_batches=2,
            gradient_clip_algorithm=clip,
            gradient_clip_val=None if clip is None else {"norm": 0.5, "value": 0.01}[clip],
            callbacks=[saving, *callbacks],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            **({"plugins": plugin} if kind == "16-mixed" else {"precision": kind}),
        )
        self.task = TinyTask(make, seed=seed)
        checkpoint = None if resume is None else resume / f"step={STEPS_SAVED}.ckpt"
        self.trainer.fit(self.task, Batches(), ckpt_path=checkpoint, weights_only=True)

    @property
    def inner(self) -> Any:
        return self.trainer.optimizers[0]

    @property
    def losses(self) -> list[float]:
        return self.task.losses


def assert_same_runs(one: TrainerRun, other: TrainerRun) -> None:
    """Compare losses, weights and the optimizer's state, of which a resumed run has the later losses only."""
    count = min(len(one.losses), len(other.losses))
    assert count in (3 * BATCHES, 3 * BATCHES - BATCHES_SAVED)
    assert one.losses[-count:] == other.losses[-count:]
    assert_same_models(one.task.model, other.task.model)
    assert_same_bits(one.inner.state_dict(), other.inner.state_dict())


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_trainer_run_is_that_of_fused_adamw(tmp_path: Path, closed: Any, tiers: str, kind: str, clip: str) -> None:
    make, make_reference = optimizers(tmp_path, tiers)
    mine = closed(TrainerRun(make, tmp_path / "mine", kind=kind, clip=clip))
    theirs = TrainerRun(make_reference, tmp_path / "theirs", kind=kind, clip=clip)
    assert_same_runs(mine, theirs)
    assert_took_every_route(mine.inner, tiers)
    assert steps_counted(mine.inner) in (range(3, 9) if kind == "16-mixed" else [12])


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_trainer_resumes_inside_an_epoch(tmp_path: Path, closed: Any, assert_resumed: AssertResumed, kind: str) -> None:
    straight = closed(TrainerRun(optimizers(tmp_path, "cpu-nvme")[0], tmp_path / "straight", kind=kind))
    resumed = closed(
        TrainerRun(
            optimizers(tmp_path, "gpu-cpu-nvme")[0],
            tmp_path / "resumed",
            kind=kind,
            seed=1,
            resume=tmp_path / "straight",
        )
    )
    assert_resumed(resumed.task.model, straight.task.model)
    assert_same_runs(resumed, straight)
    assert len(resumed.losses) == 3 * BATCHES - BATCHES_SAVED
    assert_took_every_route(resumed.inner, "gpu-cpu-nvme")


@pytest.mark.parametrize("is_ours_first", [False, True], ids=["to us", "from us"])
def test_checkpoint_is_taken_over(
    tmp_path: Path, closed: Any, assert_resumed: AssertResumed, is_ours_first: bool
) -> None:
    makes: list[Make] = [fused, lambda parameters: tiered(parameters, tmp_path)]
    first, second = reversed(makes) if is_ours_first else makes
    straight = closed(TrainerRun(first, tmp_path / "straight"))
    resumed = closed(TrainerRun(second, tmp_path / "resumed", seed=1, resume=tmp_path / "straight"))
    assert_resumed(resumed.task.model, straight.task.model)
    assert_same_runs(resumed, straight)


# -- explicitly fused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "clip"), [("32-true", "norm"), ("bf16-mixed", None), ("16-mixed", None)])
def test_explicitly_fused_run_is_that_of_fused_adamw(tmp_path: Path, closed: Any, kind: str, clip: str | None) -> None:
    make, make_reference = optimizers(tmp_path, "cpu-nvme", fused=True)
    mine = closed(TrainerRun(make, tmp_path / "mine", kind=kind, clip=clip))
    theirs = TrainerRun(make_reference, tmp_path / "theirs", kind=kind, clip=clip)
    assert_same_runs(mine, theirs)


@pytest.mark.parametrize("kind", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_of_an_explicitly_fused_one_is_refused_as_for_adamw(tmp_path: Path, kind: str, clip: str) -> None:
    makes = optimizers(tmp_path, "cpu-nvme", fused=True)
    for make, name in zip(makes, ["TieredAdamW", "AdamW"], strict=True):
        with pytest.raises(RuntimeError, match=f" {name}, does not allow for gradient clipping"):
            TrainerRun(make, tmp_path, kind=kind, clip=clip)


# -- averages of weights ------------------------------------------------------------------------------------------


def test_run_with_averaged_weights_is_that_of_fused_adamw_and_resumes(
    tmp_path: Path, closed: Any, assert_resumed: AssertResumed
) -> None:
    """Lightning puts the average in the model's place at the end, and loads the average before the model on resume."""

    def run(name: str, make: Make, **options: Any) -> TrainerRun:
        average = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.5)
        return closed(TrainerRun(make, tmp_path / name, callbacks=[average], **options))

    make, make_reference = optimizers(tmp_path, "cpu-nvme")
    mine, theirs = run("mine", make), run("theirs", make_reference)
    assert_same_runs(mine, theirs)
    resumed = run("resumed", make, seed=1, resume=tmp_path / "mine")
    assert_resumed(resumed.task.model, mine.task.model)
    assert_same_runs(resumed, mine)


def test_run_with_stochastic_weight_averaging_is_that_of_fused_adamw(tmp_path: Path, closed: Any) -> None:
    """It puts a scheduler of its own in the place of the task's."""

    def run(name: str, make: Make) -> TrainerRun:
        average = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        return closed(TrainerRun(make, tmp_path / name, callbacks=[average]))

    make, make_reference = optimizers(tmp_path, "cpu-nvme")
    assert_same_runs(run("mine", make), run("theirs", make_reference))
