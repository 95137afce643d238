"""Which of many like tests the default run takes; the others are run with the framework tests (`-m integration`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def chosen(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters for all names, of which only those `kept` are in the default run."""
    every = list(names)
    assert set(kept) <= set(every)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.integration) for name in every]
