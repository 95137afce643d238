"""Finds tiered optimizers within the wrappers that frameworks put around them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tierstore.tiered import TieredOptimizer


def tiered_of(optimizers: Iterable[Any]) -> Iterator[TieredOptimizer]:
    """Unwrap optimizers, and give those that are tiered and have state."""
    for optimizer in optimizers:
        while not isinstance(optimizer, TieredOptimizer) and optimizer is not None:
            optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is not None and optimizer.has_state():
            yield optimizer
