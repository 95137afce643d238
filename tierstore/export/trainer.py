"""A callback for Hugging Face's Trainer: the statistics beside its own figures, wherever it reports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tierstore.export import scalars
from tierstore.export.wrapped import tiered_of
from tierstore.stats import Stats


class TierstoreCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Give it to the Trainer: `callbacks=[TierstoreCallback()]`.

    Each entry of the Trainer's `state.log_history` gets the scalars of `tierstore.export`, as `tierstore/...`.
    `after_step`, a StepLog or a collector's `update` say, is called with the statistics after each step of the
    optimizer. The Trainer's own reports, TensorBoard's for one, are made before a user's callback is called: for a
    curve there give it `lambda stats: add_scalars(writer, stats)`.
    """

    def __init__(self, *after_step: Callable[[Stats], object]) -> None:
        self._after_step = after_step
        self._optimizer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the optimizer."""
        self._optimizer = kwargs.get("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the statistics."""
        for optimizer in tiered_of([self._optimizer]) if self._after_step else ():
            for tell in self._after_step:
                tell(optimizer.store.stats())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add to the entry."""
        if logs is None:
            return
        for optimizer in tiered_of([self._optimizer]):
            found = {f"tierstore/{name}": value for name, value in scalars(optimizer.store.stats()).items()}
            logs.update(found)  # for callbacks that come later, as what prints them
            if state.log_history:  # a copy of them, made before
                state.log_history[-1].update(found)
