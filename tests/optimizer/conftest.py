"""One thread for torch, unless a test says otherwise: a second one spins when the machine is busy. A swap folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In every test here."""


@pytest.fixture
def swap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that policies without one swap to."""
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    return tmp_path
