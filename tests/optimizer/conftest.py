"""One thread for torch, unless a test says otherwise: a second one spins when the machine is busy. A swap folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def swap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that policies without one swap to."""
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    return tmp_path
