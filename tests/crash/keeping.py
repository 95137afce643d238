"""How a training run is kept and taken up again: the one place that knows what a checkpoint is made of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierstore.optimizer import TieredAdamW


def save(folder: Path, model: nn.Module, optimizer: TieredAdamW, extra: dict[str, Any]) -> None:
    """Write a checkpoint, in place of the last one once it is complete."""
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": extra}
    beside = folder / f"beside-{os.getpid()}"
    with open(beside, "wb") as file:
        torch.save(kept, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / "newest")


def load(folder: Path, model: nn.Module, optimizer: TieredAdamW) -> dict[str, Any] | None:
    """Load the newest complete checkpoint; None, and nothing loaded, if there is none."""
    try:
        kept = torch.load(folder / "newest", weights_only=True)
    except FileNotFoundError:
        return None
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    extra: dict[str, Any] = kept["extra"]
    return extra
