"""What is written behind: a disk that hangs holds nobody up, and one that only takes its time is waited for."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
import torch

from tests.fakes import PATIENCE_SECONDS
from tierstore.behind import MOST_BUFFERS, WriteBehind
from tierstore.errors import CheckpointFileError

SECONDS = 0.05


class Disk:
    """A writer of a checkpoint that waits until it is let go, and remembers what was done with it."""

    def __init__(self, *, hangs: bool = True) -> None:
        self.done: list[str] = []
        self.is_left = threading.Event()
        self._may_go_on = threading.Event()
        if not hangs:
            self.let_go()

    def let_go(self) -> None:
        self._may_go_on.set()

    def write(self, *what: Any) -> None:
        assert self._may_go_on.wait(PATIENCE_SECONDS)
        self.done.append("written")

    def commit(self, *, keep_last: int | None = None) -> None:
        self.is_left.wait(4 * SECONDS)  # nobody leaves it before: so long does it take
        self.done.append("committed")

    def __exit__(self, *_: object) -> None:
        self.is_left.set()


def begin(disk: Disk) -> WriteBehind:
    return WriteBehind(disk, path="/the/path", buffer_bytes=4096, keep_last=None, timeout_seconds=SECONDS)


def put(behind: WriteBehind) -> None:
    buffer, _ = behind.wait_for_buffer()
    behind.put(buffer, lambda sink: sink.write("params", 0, "exp_avg", 0, torch.zeros(1)), 4096)


def assert_hung(error: BaseException | None) -> None:
    assert isinstance(error, CheckpointFileError)
    assert (error.errno, error.filename) == (errno.ETIMEDOUT, "/the/path")
    assert "nothing was written for 0.05 s" in str(error) and "tiers.nvme.io.timeout" in str(error)


def assert_abandoned_once_it_is_back(disk: Disk) -> None:
    disk.let_go()
    assert disk.is_left.wait(PATIENCE_SECONDS)
    assert disk.done == ["written"]  # what hung; nothing after it


def test_who_waits_for_a_buffer_gives_a_disk_up_that_hangs() -> None:
    disk = Disk()
    behind = begin(disk)
    for _ in range(MOST_BUFFERS):
        put(behind)
    with pytest.raises(CheckpointFileError) as caught:
        behind.wait_for_buffer()
    assert_hung(caught.value)
    assert behind.error is caught.value and behind.is_over
    behind.wait_until_over()  # at once
    assert_abandoned_once_it_is_back(disk)


def test_who_waits_for_the_end_gives_a_disk_up_that_hangs() -> None:
    disk = Disk()
    behind = begin(disk)
    put(behind)
    behind.complete()
    behind.wait_until_over()
    assert_hung(behind.error)
    assert_abandoned_once_it_is_back(disk)


def test_bringing_all_to_the_disk_may_take_longer() -> None:
    disk = Disk(hangs=False)
    behind = begin(disk)
    put(behind)
    behind.complete()
    behind.wait_until_over()
    assert behind.error is None and disk.done == ["written", "committed"]
