"""Runs functions on several ranks: processes with a gloo group, kept from test to test, because starting them is slow.

A function is called on every rank with the same arguments and returns something small; it must be importable. If it
raises anywhere, or takes too long, all ranks end, the error shows each rank's traceback, and the next call starts anew.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 90.0
GRACE_SECONDS = 3.0
"""How long other ranks may take to tell what went wrong with them after the first one has."""

_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tierstore.optimizer",
]


class Ranks:
    """`count` processes of one group."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Any]:
        """Call a function on every rank and return the results in the order of ranks."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, arguments)))
        results, failures = self._collect(limit_seconds)
        if failures:
            self.end()
            told = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
            raise AssertionError(f"{function.__name__} failed\n" + "\n".join(told))
        return [results[rank] for rank in range(self.count)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context(
            "forkserver"
        )  # ranks are forked from a process that imported all this once
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(self.count):
            here, there = context.Pipe()
            arguments = (rank, self.count, str(Path(self._folder.name) / "rendezvous"), there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def _collect(self, limit_seconds: float) -> tuple[dict[int, Any], dict[int, str]]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + limit_seconds
        while len(results) + len(failures) < self.count:
            open_ranks = [rank for rank in range(self.count) if rank not in results and rank not in failures]
            ready = wait([self._connections[rank] for rank in open_ranks], max(0.0, end - time.monotonic()))
            if not ready:
                failures.update(dict.fromkeys(open_ranks, f"no answer after {limit_seconds:g} s"))
            for rank in open_ranks:
                if self._connections[rank] in ready:
                    was_done, value = self._receive(rank)
                    (results if was_done else failures)[rank] = value
            if failures:
                end = min(end, time.monotonic() + GRACE_SECONDS)
        return results, failures

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            was_done, value = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(GRACE_SECONDS)
            return False, f"the process ended with exit code {self._processes[rank].exitcode}"
        return was_done, value

    def end(self) -> None:
        """End all processes, whatever they are doing."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()


def _serve(rank: int, count: int, rendezvous: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=LIMIT_SECONDS),
    )
    while True:
        function, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
