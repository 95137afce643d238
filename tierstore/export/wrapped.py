"""Finds tiered optimizers within the wrappers that frameworks put around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tierstore.errors import FailedStepError
from tierstore.tiered import TieredOptimizer


def tiered_of(optimizers: Iterable[Any]) -> Iterator[TieredOptimizer]:
    """Unwrap optimizers, and give those that are tiered and have state."""
    for optimizer in optimizers:
        while not isinstance(optimizer, TieredOptimizer) and optimizer is not None:
            optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is not None and _has_state(optimizer):
            yield optimizer


def _has_state(optimizer: TieredOptimizer) -> bool:
    """Not after a load that has lost it: to say so is a step's business, not that of who writes curves."""
    try:
        return optimizer.has_state()
    except FailedStepError:
        return False
