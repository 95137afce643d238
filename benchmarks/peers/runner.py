"""One peer's process: takes a job as a line of JSON on standard input, then orders, and answers each with a line.

Orders: `{"do": "steps", "count": n}` takes steps and tells their seconds and bytes; `memory` takes steps and tells the
most memory there was; `{"do": "finish", "reference": path}` compares the weights and ends. Whatever a peer prints goes
to standard error. Bytes are the kernel's count for this process of what reached a block device; memory is anonymous and
shared memory that is resident, sampled, since the kernel keeps a peak only of both and file pages together. Sampling
takes time, so that no step is timed beside it, this process's or another's.
"""

from __future__ import annotations

import ctypes
import json
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from benchmarks.peers.on_cuda import Bitsandbytes, Torchao
from benchmarks.peers.swapped import Mapped, Saved
from benchmarks.peers.systems import AbsentError, InMemory, Job, System, Tierstore
from benchmarks.peers.work import Work, compare
from benchmarks.peers.zero3 import ZeroThree

SYSTEMS: dict[str, type[System]] = {
    "tierstore": Tierstore,
    "deepspeed": ZeroThree,
    "torch": InMemory,
    "saved": Saved,
    "mapped": Mapped,
    "torchao": Torchao,
    "bitsandbytes": Bitsandbytes,
}
SAMPLING_SECONDS = 0.01


def main() -> None:
    """Serve until told to finish, or until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    runner = Runner(json.loads(sys.stdin.readline()))
    for line in _and_then(sys.stdin):
        order = json.loads(line)
        answers.write(json.dumps(runner.obey(order)) + "\n")
        if order["do"] == "finish":
            return


def _and_then(orders: Iterable[str]) -> Iterator[str]:
    """Give the order to begin before all others."""
    yield json.dumps({"do": "begin"})
    yield from orders


class Runner:
    """Makes a system, drives it, and measures."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = Job(
            job["system"], Work(**job["work"]), job["budget_bytes"], Path(job["folder"]), dict(job["options"])
        )
        self._system: System | None = None
        self._bytes_before = 0

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order; a system's error is an answer too."""
        try:
            what = {key: value for key, value in order.items() if key != "do"}
            answer: dict[str, Any] = getattr(self, f"_{order['do']}")(**what)
        except AbsentError as error:
            answer = {"absent": str(error)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        _give_free_memory_back()
        return answer

    def _begin(self) -> dict[str, Any]:
        """Make the system, and answer what it took."""
        system, began = SYSTEMS[self._job.system], time.perf_counter()
        system.load(self._job)
        loaded = time.perf_counter()
        self._bytes_before = resident_bytes()
        self._system = system(self._job)
        return {"load_seconds": loaded - began, "begin_seconds": time.perf_counter() - loaded}

    def _memory(self, count: int) -> dict[str, Any]:
        """Take `count` steps, each after a backward; answer the most memory there was in one.

        Over that before the beginning, and over one copy of parameters and gradients where those are on the host.
        """
        system = self._made()
        with PeakMemory() as memory:
            for _ in range(count):
                system.backward()
                system.step()
        system.settle()
        return {"taken": count, "seen_bytes": memory.peak_bytes - self._bytes_before - self._job.work.given_bytes}

    def _steps(self, count: int) -> dict[str, Any]:
        """Take `count` steps back to back, then as many each after a backward; `taken` tells how many in all.

        A system that writes on after a step takes one more before either, which is not counted: the time then goes from
        the end of one step to the end of another, and leaves out no byte of a whole step.
        """
        system = self._made()
        taken = self._lead_in()
        begun, backward_seconds, backward_moved, seconds = Moved.now(), 0.0, Moved(), []
        for _ in range(count):
            if system.needs_backward:
                before = Moved.now()
                backward_seconds += self._timed(system.backward)
                backward_moved += Moved.now() - before
            seconds.append(self._timed(system.step))
        moved = Moved.now() - begun - backward_moved
        system.settle()
        taken += count
        iterations_seconds = sum(seconds) + backward_seconds
        if not system.needs_backward:
            taken += self._lead_in() + count
            iterations_seconds = sum(self._timed(system.backward) + self._timed(system.step) for _ in range(count))
            system.settle()
        return {
            "taken": taken,
            "seconds": seconds,
            "iteration_seconds": iterations_seconds / count,
            "step": moved.per(count),
            "backward": backward_moved.per(count),
        }

    def _finish(self, reference: str) -> dict[str, Any]:
        """Compare every weight with the reference's, and close."""
        system = self._made()
        found = compare(system.weights(), torch.load(reference, mmap=True), self._job.work)
        answer = {"promise": system.promise, "compared": found, "described": system.described()}
        system.close()
        return answer

    def _lead_in(self) -> int:
        """Take the step that is not counted; answer how many that were."""
        system = self._made()
        if not system.writes_on:
            return 0
        if system.needs_backward:
            system.backward()
        system.step()
        return 1

    def _timed(self, work: Callable[[], None]) -> float:
        began = time.perf_counter()
        work()
        if self._job.work.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - began

    def _made(self) -> System:
        if self._system is None:
            raise RuntimeError("the system was not made")
        return self._system


def _give_free_memory_back() -> None:
    """Let the C library return what is free, so that memory that was used before does not count as used now."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that went to and from block devices, and CPU seconds, of this process."""

    bytes_read: float = 0
    bytes_written: float = 0
    cpu_seconds: float = 0

    @classmethod
    def now(cls) -> Self:
        """Read the counters."""
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return cls(int(lines["read_bytes"]), int(lines["write_bytes"]), time.process_time())

    def __sub__(self, other: Self) -> Self:
        return self._with(other, operator.sub)

    def __add__(self, other: Self) -> Self:
        return self._with(other, operator.add)

    def per(self, count: int) -> dict[str, float]:
        """Answer what one of `count` steps moved."""
        return {name: value / count for name, value in asdict(self).items()}

    def _with(self, other: Self, combine: Callable[[float, float], float]) -> Self:
        return type(self)(*(combine(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


class PeakMemory:
    """Samples how much anonymous and shared memory this process has, from a thread of its own."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        is_over = False
        while not is_over:
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            is_over = self._stop.wait(SAMPLING_SECONDS)


def resident_bytes() -> int:
    """Anonymous and shared memory of this process that is resident now: no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


if __name__ == "__main__":
    main()
