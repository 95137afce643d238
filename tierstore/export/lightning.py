"""A callback for Lightning's Trainer: the statistics go to its loggers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback

from tierstore.export import scalars
from tierstore.export.wrapped import tiered_of
from tierstore.stats import Stats


class TierstoreCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Give it to the Trainer: `callbacks=[TierstoreCallback()]`.

    Every `log_every_n_steps` of the Trainer's the scalars of `tierstore.export` go to its loggers, as `tierstore/...`,
    of further optimizers as `tierstore/1/...`; `after_step`, a StepLog say, is called with the statistics of each
    optimizer after each batch.
    """

    def __init__(self, *after_step: Callable[[Stats], object]) -> None:
        self._after_step = after_step
        self._logged = -1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell and log."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        is_due = bool(every) and step % every == 0 and step != self._logged and bool(trainer.loggers)
        if not (self._after_step or is_due):
            return
        for number, optimizer in enumerate(tiered_of(trainer.optimizers)):
            stats = optimizer.store.stats()
            for tell in self._after_step:
                tell(stats)
            if is_due:
                self._logged = step
                prefix = f"tierstore/{number}/" if number else "tierstore/"
                found = {prefix + name: value for name, value in scalars(stats).items()}
                for logger in trainer.loggers:
                    logger.log_metrics(found, step=step)
