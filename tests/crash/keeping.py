"""How a training run is kept and taken up again: the one place that knows what a checkpoint is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from tierstore.errors import NoCheckpointError
from tierstore.optimizer import TieredAdamW


def save(folder: Path, model: nn.Module, optimizer: TieredAdamW, extra: dict[str, Any], *, wait: bool = True) -> None:
    """Write a checkpoint, in place of the last one once it is complete; without `wait`, while training goes on."""
    optimizer.save_checkpoint(folder / "newest", model, extra, wait=wait)


def load(folder: Path, model: nn.Module, optimizer: TieredAdamW) -> dict[str, Any] | None:
    """Load the checkpoint, whatever a kill has left beside it; None, and nothing loaded, if there is none."""
    try:
        extra: dict[str, Any] = optimizer.load_checkpoint(folder / "newest", model)
    except NoCheckpointError:  # or the first one was never finished
        return None
    return extra
