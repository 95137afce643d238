"""Lightning: Fabric's wrapper, the moving of state between devices, and a Trainer with checkpoint and resume."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    fused,
    loss_of,
    tiered,
    train,
)
from tierstore import TieredAdamW
from tierstore.errors import StateDictError

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("ERROR", "lightning")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


# -- Fabric -------------------------------------------------------------------------------------------------------


class FabricRun:
    """A model and optimizer set up by Fabric."""

    def __init__(self, make: Make, *, seed: int = 0, precision: Any = "32-true") -> None:
        self.fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
        model = TinyModel(seed=seed)
        self.inner = make(model.parameters())
        self.model, self.optimizer = self.fabric.setup(model, self.inner)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            loss = loss_of(self.model, number)
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_run_is_that_of_fused_adamw(tmp_path: Path, tiers: str, precision: str) -> None:
    mine = FabricRun(lambda parameters: tiered(parameters, tmp_path, tiers), precision=precision)
    theirs = FabricRun(fused, precision=precision)
    assert mine.train(0, 5) == theirs.train(0, 5)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert_took_every_route(mine.inner, tiers)
    mine.optimizer.close()


def test_fabric_resumes_from_what_it_saved(tmp_path: Path) -> None:
    straight = FabricRun(lambda parameters: tiered(parameters, tmp_path))
    straight.train(0, 3)
    straight.fabric.save(tmp_path / "saved.ckpt", {"model": straight.model, "optimizer": straight.optimizer})
    losses = straight.train(3, 6)
    resumed = FabricRun(lambda parameters: tiered(parameters, tmp_path, "gpu-cpu-nvme"), seed=1)
    resumed.train(20, 22)
    resumed.fabric.load(tmp_path / "saved.ckpt", {"model": resumed.model, "optimizer": resumed.optimizer})
    assert resumed.train(3, 6) == losses
    assert_same_models(resumed.model, straight.model)
    straight.inner.close()
    resumed.inner.close()


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


class TinyTask(lightning.LightningModule):
    """The tiny model with its loss, its optimizer and a scheduler."""

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
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)}


def _fit(task: TinyTask, folder: Path, epochs: int, resume: Path | None = None) -> Any:
    callback = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    batches = DataLoader([batch(number) for number in range(6)], batch_size=None)
    trainer.fit(task, batches, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("tiers", TIER_SETS)
def test_trainer_run_is_that_of_fused_adamw_and_resumes(tmp_path: Path, tiers: str) -> None:
    def make(parameters: Any) -> TieredAdamW:
        return tiered(parameters, tmp_path, tiers)

    mine, theirs, resumed = TinyTask(make), TinyTask(fused), TinyTask(make, seed=1)
    trainer = _fit(mine, tmp_path / "mine", 3)
    _fit(theirs, tmp_path / "theirs", 3)
    assert mine.losses == theirs.losses
    assert_same_models(mine.model, theirs.model)
    (optimizer,) = trainer.optimizers
    assert_took_every_route(optimizer, tiers)

    again = _fit(resumed, tmp_path / "resumed", 3, resume=tmp_path / "mine" / "epoch=0.ckpt")
    assert resumed.losses == mine.losses[6:]
    assert_same_models(resumed.model, mine.model)
    assert_same_bits(again.optimizers[0].state_dict(), optimizer.state_dict())
    for each in (optimizer, again.optimizers[0]):
        each.close()


def test_checkpoint_of_a_trainer_with_adamw_is_taken_over(tmp_path: Path) -> None:
    theirs = TinyTask(fused)
    mine = TinyTask(lambda parameters: tiered(parameters, tmp_path), seed=1)
    _fit(theirs, tmp_path / "theirs", 2)
    trainer = _fit(mine, tmp_path / "mine", 2, resume=tmp_path / "theirs" / "epoch=0.ckpt")
    assert mine.losses == theirs.losses[6:]
    assert_same_models(mine.model, theirs.model)
    trainer.optimizers[0].close()
