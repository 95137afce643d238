"""The callbacks for Trainer and Lightning, in real runs: the statistics arrive where the framework reports its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.integration.tiny import TinyModel, batch, policy, tiered
from tierstore.seen import read_picture
from tierstore.stats import Stats

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fresh_accelerate")]

STEPS = 4


class Task(nn.Module):
    """The tiny model as transformers wants one."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.model(x) - labels).square().mean()}


@pytest.fixture
def heard() -> list[Stats]:
    return []


def test_trainer_logs_statistics_beside_its_own(tmp_path: Path, heard: list[Stats]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[integrations]'")
    from tierstore.export.trainer import TierstoreCallback

    task = Task()
    data = [{"x": batch(number, size=1)[0], "labels": torch.ones(1)} for number in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=STEPS, logging_steps=2,
        per_device_train_batch_size=2, save_strategy="no",
    )  # fmt: skip
    with tiered(task.named_parameters(), tmp_path) as optimizer:
        trainer = transformers.Trainer(
            task, arguments, train_dataset=data, callbacks=[TierstoreCallback(heard.append)],
            optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        )  # fmt: skip
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [stats.step.count for stats in heard] == [1, 2, 3, 4]
        assert [entry["tierstore/route/cpu-nvme/bytes"] for entry in entries] == [
            heard[number].routes["cpu->nvme"].bytes for number in (1, 3)
        ]


def test_trainer_with_another_optimizer_is_left_alone(tmp_path: Path, heard: list[Stats]) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[integrations]'")
    from tierstore.export.trainer import TierstoreCallback

    data = [{"x": batch(number, size=1)[0], "labels": torch.ones(1)} for number in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1, logging_steps=1,
        save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(Task(), arguments, train_dataset=data, callbacks=[TierstoreCallback(heard.append)])
    trainer.train()
    assert not heard and not any("tierstore" in key for entry in trainer.state.log_history for key in entry)


def test_lightning_loggers_get_statistics(tmp_path: Path, heard: list[Stats]) -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")
    from lightning.pytorch.loggers import CSVLogger

    from tierstore.export.lightning import TierstoreCallback

    class TinyTask(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyModel()

        def training_step(self, x: Tensor, _: int) -> Tensor:
            return (self.model(x) - 1.0).square().mean()

        def configure_optimizers(self) -> Any:
            self.made = tiered(self.named_parameters(), tmp_path)
            return self.made

    task, logger = TinyTask(), CSVLogger(tmp_path / "logs")
    trainer = lightning.Trainer(
        accelerator="cpu", logger=logger, max_steps=STEPS, log_every_n_steps=2, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[TierstoreCallback(heard.append)],
    )  # fmt: skip
    trainer.fit(task, DataLoader([batch(number) for number in range(STEPS)], batch_size=None))
    task.made.close()
    assert [stats.step.count for stats in heard] == [1, 2, 3, 4]
    head, *rows = [row.split(",") for row in Path(logger.log_dir, "metrics.csv").read_text().splitlines()]
    column = head.index("tierstore/route/cpu-nvme/bytes")
    assert [float(row[column]) for row in rows] == [heard[number].routes["cpu->nvme"].bytes for number in (1, 3)]


def test_real_tensorboard_takes_the_scalars(tmp_path: Path) -> None:
    board = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard", exc_type=ImportError)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tierstore.export import add_scalars

    model = TinyModel()
    with tiered(model.named_parameters(), tmp_path) as optimizer, board.SummaryWriter(tmp_path / "board") as writer:
        model(batch(0)).sum().backward()
        optimizer.step()
        stats = optimizer.store.stats()
        add_scalars(writer, stats)
    events = EventAccumulator(str(tmp_path / "board")).Reload()
    (point,) = events.Scalars("tierstore/tier/cpu/used_bytes")
    assert (point.step, point.value) == (1, stats.tiers["cpu"].used_bytes)


def test_policy_of_a_trainer_may_name_a_monitor(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[integrations]'")
    from tierstore import TieredAdamW

    data = [{"x": batch(number, size=1)[0], "labels": torch.ones(1)} for number in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=STEPS, save_strategy="no"
    )
    settings = {**policy("cpu-nvme", tmp_path), "monitor": str(tmp_path / "live.json")}
    given = (TieredAdamW, {"policy": settings, "lr": 1e-3})
    trainer = transformers.Trainer(Task(), arguments, train_dataset=data, optimizer_cls_and_kwargs=given)
    trainer.train()
    trainer.optimizer.optimizer.close()
    picture = read_picture(tmp_path / "live.json")
    assert (picture.step, picture.ended) == (STEPS, True)
