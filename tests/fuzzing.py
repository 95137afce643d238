"""Damaged input: a few tries in the default run, as many as there is time for in the run marked `fuzz`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

SEED = int(os.environ.get("TIERSTORE_FUZZ_SEED", "0"))
SECONDS = float(os.environ.get("TIERSTORE_FUZZ_SECONDS", "20"))


def timed() -> Iterator[int]:
    """Count tries until the time of one fuzz test is over."""
    ends, count = time.monotonic() + SECONDS, 0
    while time.monotonic() < ends:
        yield count
        count += 1


def tell(capsys: pytest.CaptureFixture[str], what: str, outcomes: dict[str, int]) -> None:
    """Say how many inputs were tried, and what became of them."""
    found = ", ".join(f"{count} {name}" for name, count in outcomes.items())
    with capsys.disabled():
        print(f"\n{sum(outcomes.values())} {what} tried in {SECONDS:g} s with seed {SEED}: {found}")
