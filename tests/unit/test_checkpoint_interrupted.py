"""Ctrl-C while a checkpoint is read, which nothing holds back there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.checkpoint import Entry, Reader, Writer
from tierstore.checkpoint.blocks import Readers

ELEMENTS = 3_000_000


class Unread(Future[None]):
    """A block that no thread ever comes to; taking it back is noted at once."""

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        self.set_running_or_notify_cancel()
        return is_cancelled


@pytest.mark.parametrize("at", [1, 3, 5])
def test_every_block_that_was_begun_is_taken_back_or_waited_for(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was begun just before was forgotten, and written into the caller's memory at some time afterwards."""
    values = torch.arange(ELEMENTS, dtype=torch.float32)
    with Writer(tmp_path / "saved", header={}) as writer:
        writer.add("params", 0, Entry("p", (ELEMENTS,), (1,), torch.float32, {"exp_avg": torch.float32}))
        writer.write("params", 0, "exp_avg", 0, values)
        writer.commit()
    begun: list[Future[Any]] = []
    submit = Readers.submit

    def begin(readers: Readers, work: Callable[..., None]) -> Future[None]:
        begun.append(Unread() if len(begun) + 1 == at else submit(readers, work))
        if len(begun) == at:
            signal.raise_signal(signal.SIGINT)
        return begun[-1]

    with Reader(tmp_path / "saved") as reader:
        read = torch.zeros(ELEMENTS)
        with monkeypatch.context() as patched:
            patched.setattr(Readers, "submit", begin)
            with pytest.raises(KeyboardInterrupt):
                reader.read("params", 0, "exp_avg", 0, read)
        assert len(begun) >= at and all(one.done() for one in begun)
        reader.read("params", 0, "exp_avg", 0, read)
    assert read.equal(values)
