"""Which of many like tests the default run takes; the others are run with the framework tests (`-m integration`).

And which of them the installed torch is able to run at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

trains_shards = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="FSDP2 of this torch trains on no CPU, whatever the optimizer: torch.cpu.Stream lacks record_event",
)
"""Marks tests that train what `fully_shard` has sharded."""


def chosen(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters for all names, of which only those `kept` are in the default run."""
    every = list(names)
    assert set(kept) <= set(every)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.integration) for name in every]
