"""The raw device: what a loop of `preadv` and `pwritev` threads over huge pages gets out of the same folders.

It shares nothing with tierstore but the way to get huge pages (`map_host_memory`): no tier, no engine, no ticket. Each
block has memory of its own, so that after a pass every byte that was moved can be compared. Blocks are dealt to the
folders in turn. A first pass that is not timed writes every block, so that no later one writes into reserved blocks
that were never written, which costs the filesystem more.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import Any, Literal, Self

from torch import Tensor

from benchmarks.harness.pattern import fill, verify
from benchmarks.harness.rounds import percentile
from tierstore.io import ALIGNMENT
from tierstore.mapping import map_host_memory

Kind = Literal["read", "write", "mixed"]
KINDS: tuple[Kind, ...] = ("read", "write", "mixed")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed pass: `bytes` moved in `seconds`, with the CPU time of the whole process, and each move's seconds."""

    bytes: int
    seconds: float
    cpu_seconds: float
    latencies: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, float | int]:
        """What reports say of it."""
        return {
            "gb_per_s": self.rate / 1e9,
            "p50_ms": percentile(self.latencies, 50) * 1e3,
            "p95_ms": percentile(self.latencies, 95) * 1e3,
            "p99_ms": percentile(self.latencies, 99) * 1e3,
            "max_ms": max(self.latencies, default=0.0) * 1e3,
            "cpu_s_per_gb": self.cpu_seconds / self.bytes * 1e9 if self.bytes else 0.0,
            "moves": len(self.latencies),
        }


class RawDevice:
    """Unnamed files in `folders` with `nbytes` in all; measures on them until it is closed.

    `direct` says whether O_DIRECT works there (else it is buffered, and not the device that is measured).
    """

    def __init__(self, folders: Sequence[Path], nbytes: int) -> None:
        nbytes = max(4 * ALIGNMENT, nbytes // ALIGNMENT * ALIGNMENT)
        self._memory = map_host_memory(nbytes)
        self._memory.zero_()
        self._files = [_open(folder) for folder in folders]
        self.direct = all(direct for _, direct in self._files)
        share = -(-nbytes // len(folders))
        for fd, _ in self._files:
            os.posix_fallocate(fd, 0, share + nbytes // 4)
        self._verified = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        for fd, _ in self._files:
            os.close(fd)

    @property
    def verified_bytes(self) -> int:
        """How many bytes were compared so far."""
        return self._verified

    def measure(self, kind: Kind, request_bytes: int, depth: int) -> Sample:
        """Move every block once with `depth` threads; `mixed` reads one half while it writes the other.

        Raises VerificationError if a block is not on the device, or in memory, as it must be.
        """
        request = request_of(request_bytes, self._memory.numel())
        blocks = self._memory.numel() // request
        for number in range(blocks):
            fill(self._block(number, request), number)
        self._pass([("write", number) for number in range(blocks)], request, depth)
        reads = [number for number in range(blocks) if self._is_read(kind, number)]
        writes = [number for number in range(blocks) if not self._is_read(kind, number)]
        for number in reads:
            self._block(number, request).zero_()
        for number in writes:
            fill(self._block(number, request), number + blocks)
        jobs = [("read" if self._is_read(kind, number) else "write", number) for number in range(blocks)]
        sample = self._pass(jobs, request, depth)
        self._check(reads, request, 0, f"raw {kind}, what was read")
        if writes:
            for number in writes:
                self._block(number, request).zero_()
            self._pass([("read", number) for number in writes], request, depth)
            self._check(writes, request, blocks, f"raw {kind}, what was written")
        return sample

    def measure_first_write(self, request_bytes: int, depth: int) -> Sample:
        """Write every block of a device that was just opened, so that all are reserved and none was ever written.

        Raises VerificationError if a block is not on the device afterwards.
        """
        request = request_of(request_bytes, self._memory.numel())
        blocks = range(self._memory.numel() // request)
        for number in blocks:
            fill(self._block(number, request), number)
        sample = self._pass([("write", number) for number in blocks], request, depth)
        self._memory.zero_()
        self._pass([("read", number) for number in blocks], request, depth)
        self._check(blocks, request, 0, "raw first write, what was written")
        return sample

    def _is_read(self, kind: Kind, number: int) -> bool:
        """Whether a block is one to read; of mixed ones every other block of each file is."""
        return kind == "read" or (kind == "mixed" and number // len(self._files) % 2 == 0)

    def _check(self, numbers: Sequence[int], request: int, base: int, what: str) -> None:
        self._verified += sum(verify(self._block(number, request), number + base, what) for number in numbers)

    def _block(self, number: int, request: int) -> Tensor:
        return self._memory[number * request : (number + 1) * request]

    def _pass(self, jobs: Sequence[tuple[str, int]], request: int, depth: int) -> Sample:
        memory = self._memory.numpy().data
        waiting: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        for job in (*jobs, *[None] * depth):
            waiting.put(job)
        latencies: list[float] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while (job := waiting.get()) is not None:
                    kind, number = job
                    fd, _ = self._files[number % len(self._files)]
                    view = memory[number * request : (number + 1) * request]
                    began = time.perf_counter()
                    _move(kind, fd, view, number // len(self._files) * request)
                    latencies.append(time.perf_counter() - began)
            except BaseException as error:
                errors.append(error)

        return timed(lambda: _in_threads(work, depth, errors), len(jobs) * request, latencies)


def request_of(request_bytes: int, nbytes: int) -> int:
    """Bytes of the requests that are made where `request_bytes` are asked for: whole pages, four in `nbytes`."""
    return max(ALIGNMENT, min(request_bytes, nbytes // 4) // ALIGNMENT * ALIGNMENT)


def timed(work: Callable[[], None], nbytes: int, latencies: list[float]) -> Sample:
    """Run something that moves `nbytes` and appends to `latencies`; measure wall and CPU time of the process."""
    cpu, began = time.process_time(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return Sample(nbytes, seconds, time.process_time() - cpu, tuple(latencies))


def fio_entries(
    folder: Path, kinds: Sequence[Kind], request_bytes: int, depth: int, nbytes: int
) -> tuple[dict[str, Any], ...]:
    """What a report says of fio's rates for the same requests: an entry for each kind, none where it is not installed.

    One that failed has no rate, and stderr says why: minutes of other measurements are not lost for it.
    """
    request = request_of(request_bytes, nbytes)
    entries: list[dict[str, Any]] = []
    for kind in kinds:
        shape = {"request": request, "in_flight": depth}
        try:
            rates = fio_rates(folder, kind, request, depth, nbytes)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"fio: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
            entries.append({"kind": f"fio {kind}, failed", **shape})
            continue
        if rates is not None:
            entries.append({"kind": f"fio {kind}", **shape, **rates})
    return tuple(entries)


def fio_rates(folder: Path, kind: Kind, request_bytes: int, depth: int, nbytes: int) -> dict[str, Any] | None:
    """What fio measures for the same requests, after it has checked what it wrote; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    mode = {"read": "read", "write": "write", "mixed": "rw"}[kind]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        common = ["fio", "--name=raw", f"--filename={place}/file", f"--size={nbytes}", f"--bs={request_bytes}"]
        common += [f"--iodepth={depth}", "--ioengine=libaio", "--direct=1", "--thread", "--output-format=json"]
        _run_fio([*common, "--rw=write", "--verify=crc32c", "--do_verify=1", "--verify_state_save=0"])
        found = _run_fio([*common, f"--rw={mode}"])
    moved = found["read"]["io_bytes"] + found["write"]["io_bytes"]
    milliseconds = max(1, found["read"]["runtime"], found["write"]["runtime"])
    return {"gb_per_s": moved / milliseconds / 1e6, "bytes": moved}


def _run_fio(command: Sequence[str]) -> Any:
    """Run fio with its buffers on huge pages, where the C library can be told so; answer what it says of its job."""
    here = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    job = loads(subprocess.run(command, check=True, capture_output=True, text=True, env=here).stdout)["jobs"][0]
    if job["error"]:
        raise OSError(job["error"], f"fio failed: {os.strerror(job['error'])}")
    return job


def _in_threads(work: Callable[[], None], count: int, errors: list[BaseException]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _move(kind: str, fd: int, view: memoryview, offset: int) -> None:
    call = os.preadv if kind == "read" else os.pwritev
    moved = 0
    while moved < len(view):
        count = call(fd, [view[moved:]], offset + moved)
        if count == 0:
            raise OSError(f"raw {kind} at {offset + moved}: the system moved nothing")
        moved += count


def _open(folder: Path) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_DIRECT, 0o600), True
    except OSError:
        return os.open(folder, flags, 0o600), False
