"""Processes that reserve swap space when told to; apart from their tests, so that they import little."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tierstore.errors import DiskFullError
from tierstore.swapfile import SwapFile

LIMIT_SECONDS = 60.0

Meeting = Literal["before looking", "before reserving", "after reserving"]
"""Where the processes wait for each other; the last ones both before and after."""


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
        context.set_forkserver_preload(["tests.unit.reserving"])
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
