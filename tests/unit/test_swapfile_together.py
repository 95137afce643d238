"""Processes that reserve swap space on one disk in the same moment: they neither fill it nor lose anything."""

from __future__ import annotations

import errno
import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from tierstore.errors import DiskFullError
from tierstore.pressure import disk_space
from tierstore.swapfile import SwapFile, disk_margin

MIB = 1 << 20
LIMIT_SECONDS = 60.0
BOOKKEEPING_BYTES = 64 << 10
"""What ext4 takes for the files themselves."""

Meeting = Literal["before looking", "before reserving", "after reserving"]
"""Where the processes wait for each other; the last ones both before and after."""

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


class Outcome(NamedTuple):
    """What one process got."""

    is_reserved: bool
    size_bytes: int
    error: str = ""
    code: int = 0


def _reserve(folder: Path, nbytes: int, number: int, meeting: Meeting, barrier: Barrier, there: Connection) -> None:
    """Reserve, fill with a pattern, and when told to look whether it is still there."""
    warnings.simplefilter("ignore")
    real = os.posix_fallocate

    def reserve(fd: int, offset: int, length: int) -> None:
        if meeting != "before looking":
            barrier.wait(LIMIT_SECONDS)
        try:
            real(fd, offset, length)
        finally:
            if meeting == "after reserving":
                barrier.wait(LIMIT_SECONDS)

    os.posix_fallocate = reserve
    file = SwapFile(folder, direct=False)
    pattern = bytes([number + 1]) * nbytes
    try:
        if meeting == "before looking":
            barrier.wait(LIMIT_SECONDS)
        file.grow(nbytes)
        os.pwrite(file.fd, pattern, 0)
        outcome = Outcome(True, os.fstat(file.fd).st_size)
    except DiskFullError as error:
        outcome = Outcome(False, os.fstat(file.fd).st_size, str(error), error.errno or 0)
    there.send(outcome)
    there.recv()
    there.send(not outcome.is_reserved or os.pread(file.fd, nbytes, 0) == pattern)
    there.recv()  # killed here, as a training process may be


class Together:
    """Processes that each reserve as many bytes in one folder; ended with the context."""

    def __init__(self, folder: Path, count: int, nbytes: int, meeting: Meeting) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.test_swapfile_together"])
        self._barrier = context.Barrier(count)  # kept: the processes open it by name
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            here, there = context.Pipe()
            arguments = (folder, nbytes, number, meeting, self._barrier, there)
            process = context.Process(target=_reserve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()

    def answers(self) -> list[Any]:
        """What each process has to say."""
        assert all(connection.poll(LIMIT_SECONDS) for connection in self._connections)
        return [connection.recv() for connection in self._connections]

    def go_on(self) -> None:
        """Let each process do what comes next."""
        for connection in self._connections:
            connection.send("go on")


class Case(NamedTuple):
    """How many processes ask at once, all but so many margins of what is free, and how many may have it."""

    count: int
    margins_left: float
    may_fit: int  # so many at most
    meeting: Meeting


CASES = {
    "all fit": Case(2, 1.1, 2, "after reserving"),
    "all but a part of the margin is left": Case(2, 0.5, 1, "after reserving"),
    "one fits": Case(2, -5.0, 1, "before reserving"),
    "three of four fit": Case(4, 0.5, 3, "after reserving"),
    "three of four fit, in any order": Case(4, 0.5, 3, "before looking"),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_reserve_at_once_leave_the_disk_its_margin(small_disk: Path, case: str) -> None:
    """All looked at the free space before any reserved, and each found enough."""
    count, margins_left, may_fit, meeting = CASES[case]
    kept = small_disk / "kept"
    kept.write_bytes(b"k" * MIB)
    os.sync()
    space = disk_space(small_disk)
    margin = disk_margin(space.total_bytes)
    nbytes = int(space.free_bytes - margins_left * margin) // count // 4096 * 4096

    with Together(small_disk, count, nbytes, meeting) as together:
        outcomes = together.answers()
        assert disk_space(small_disk).free_bytes >= margin - BOOKKEEPING_BYTES
        fitted = sum(outcome.is_reserved for outcome in outcomes)
        assert fitted == count if may_fit == count else fitted <= may_fit
        for outcome in outcomes:
            assert outcome.size_bytes == (nbytes if outcome.is_reserved else 0)
            assert outcome.is_reserved or (outcome.code == errno.ENOSPC and "tiers.nvme.capacity" in outcome.error)
        together.go_on()
        assert together.answers() == [True] * count

    os.sync()
    assert kept.read_bytes() == b"k" * MIB
    assert disk_space(small_disk).free_bytes == space.free_bytes
    alone = SwapFile(small_disk, direct=False)
    assert alone.grow(nbytes) == 0
    alone.close()
