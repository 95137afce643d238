"""Measures one swap file, or memory and arithmetic, within a budget of bytes and seconds.

A file is measured as an engine uses it: on blocks written before, through buffers that no other request touches. When
the budget is spent nothing more is begun, and what was measured by then is given only if it is of every kind.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tierstore.cores import leaving_one_free
from tierstore.errors import TransferError
from tierstore.io import Engine, Kind, Operation
from tierstore.rates import MachineRates, PathRates, SizeRates
from tierstore.swapfile import SwapFile

Clock = Callable[[], float]

REQUEST_SIZES = (512 << 10, 2 << 20, 4 << 20, 8 << 20)
SMALL = 4096
DEPTH = 8
"""Requests on their way at once when rates are measured."""
SHARE = 0.12
"""Of a path's time, what one rate may take."""


class Budget:
    """Bytes and seconds that may still be spent. `cancel`, from any thread, leaves none."""

    def __init__(self, nbytes: int, seconds: float, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.bytes_left = nbytes
        self.deadline = clock() + seconds
        self._is_cancelled = threading.Event()

    @property
    def seconds_left(self) -> float:
        """Never below zero."""
        return 0.0 if self._is_cancelled.is_set() else max(0.0, self.deadline - self.clock())

    def take(self, nbytes: int) -> bool:
        """Spend bytes, unless there are too few or the time is up."""
        if nbytes > self.bytes_left or not self.seconds_left:
            return False
        self.bytes_left -= nbytes
        return True

    def part(self, nbytes: int, seconds: float) -> Budget:
        """A budget within this one: what it spends is spent here too."""
        return _Part(self, nbytes, seconds)

    def cancel(self) -> None:
        """Let nothing more be begun."""
        self._is_cancelled.set()


class _Part(Budget):
    def __init__(self, whole: Budget, nbytes: int, seconds: float) -> None:
        super().__init__(nbytes, min(seconds, whole.seconds_left), whole.clock)
        self._whole = whole

    @property
    def seconds_left(self) -> float:
        return min(super().seconds_left, self._whole.seconds_left)

    def take(self, nbytes: int) -> bool:
        return nbytes <= self.bytes_left and self._whole.take(nbytes) and super().take(nbytes)


def measure_path(file: SwapFile, engine: Engine, memory: Tensor, budget: Budget) -> PathRates | None:
    """Measure a file through an engine; None if bytes or time do not suffice.

    Ends when the last request has. Raises TransferError, SwapError or DiskFullError.
    """
    whole, seconds = budget.bytes_left, budget.seconds_left
    file.grow(whole // 4 // REQUEST_SIZES[0] * REQUEST_SIZES[0])
    pump = _Pump(file, engine, memory)
    begun = pump.run((Kind.WRITE,), REQUEST_SIZES[0], DEPTH // 2, budget.part(file.size_bytes, 0.25 * seconds))
    if begun is None:
        return None
    pump.file_bytes = begun.nbytes  # from here on only written blocks are touched
    at_once = min(begun.nbytes, memory.numel(), int(SHARE * seconds * begun.rate))
    sizes = [size for size in REQUEST_SIZES if DEPTH * size <= at_once]
    latency = pump.alone(SMALL, 16, budget.part(16 * SMALL, 0.05 * seconds))
    reads = []
    for size, share in zip(sizes, (32, 16, 8, 16 / 3), strict=False):
        times = max(1, (4 << 20) // size)
        alone = pump.alone(size, times, budget.part(times * size, 0.05 * seconds))
        together = pump.run((Kind.READ,), size, DEPTH, budget.part(int(whole / share), SHARE * seconds))
        if alone is not None and together is not None:
            reads.append(SizeRates(size, alone, together.rate))
    if latency is None or not reads:
        return None
    size = max(size for size in sizes if DEPTH * size <= max(whole // 8, DEPTH * sizes[0]))
    written = pump.run((Kind.WRITE,), size, DEPTH, budget.part(whole // 8, SHARE * seconds))
    mixed = pump.run((Kind.READ, Kind.WRITE), size, DEPTH, budget.part(whole // 8, SHARE * seconds))
    if written is None or mixed is None:
        return None
    return PathRates(latency, written.rate, mixed.rate, tuple(reads))


class _Moved:
    """Bytes that were moved, and the time from the first request to the end of the last."""

    def __init__(self, nbytes: int, seconds: float) -> None:
        self.nbytes, self.rate = nbytes, nbytes / max(seconds, 1e-9)


class _Pump:
    """Keeps so many requests on their way as long as a budget lasts."""

    def __init__(self, file: SwapFile, engine: Engine, memory: Tensor) -> None:
        self.file_bytes = file.size_bytes
        self._file, self._engine = file, engine
        self._memory = memory.numpy().data
        self._ended: queue.SimpleQueue[tuple[int, TransferError | None]] = queue.SimpleQueue()

    def run(self, kinds: Sequence[Kind], size: int, depth: int, budget: Budget) -> _Moved | None:
        """Move requests of one size, their kinds in turn; None if none was allowed.

        Raises the first error, when all have ended.
        """
        began, begun, error = budget.clock(), 0, None
        free = list(range(0, depth * size, size))  # where in memory no request is
        while True:
            while free and error is None and budget.take(size):
                self._submit(kinds[begun % len(kinds)], begun * size, size, free.pop())
                begun += 1
            if len(free) == depth:
                break
            at, failure = self._ended.get()
            free.append(at)
            error = error or failure
        if error is not None:
            raise error
        return _Moved(begun * size, budget.clock() - began) if begun else None

    def alone(self, size: int, times: int, budget: Budget) -> float | None:
        """Seconds of a read with nothing beside it, the median of several; None if none was allowed."""
        rates = [self.run((Kind.READ,), size, 1, budget.part(size, budget.seconds_left)) for _ in range(times)]
        seconds = [size / moved.rate for moved in rates if moved is not None]
        return statistics.median(seconds) if seconds else None

    def _submit(self, kind: Kind, position: int, size: int, at: int) -> None:
        file, offset = self._file, position % (self.file_bytes // size * size)
        memory = self._memory[at : at + size]
        done = lambda error: self._ended.put((at, error))  # noqa: E731
        self._engine.submit(Operation(kind, file.fd, file.path, offset, memory, file.direct, done))


def measure_machine(memory: Tensor, budget: Budget, threads: int) -> MachineRates:
    """Measure copies and fused AdamW within `memory`, which caches speed up, with `threads` and with a core left free.

    Runs on a pool of the calling thread's own; nobody else's number of threads changes.
    """
    half = memory.numel() // 2
    copied = _seconds_of(lambda: memory[:half].copy_(memory[half : 2 * half]), budget.part(0, budget.seconds_left / 3))
    values = memory[: memory.numel() // 16 * 16].view(torch.float32).fill_(0.5)
    parameter, gradient, first, second = values.chunk(4)
    step = torch.tensor(8.0)

    def update() -> None:
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
        torch._fused_adamw_(  # type: ignore[call-overload]
            [parameter], [gradient], [first], [second], [], [step], **options, amsgrad=False, maximize=False
        )

    elements = parameter.numel()
    with torch.no_grad():
        every = elements / _seconds_of(update, budget.part(0, budget.seconds_left / 2))
        with leaving_one_free():
            is_fewer = torch.get_num_threads() < threads
            spared = elements / _seconds_of(update, budget) if is_fewer else None
    return MachineRates(2 * half / copied, threads, every, spared)


def _seconds_of(work: Callable[[], object], budget: Budget) -> float:
    """The median of up to five times, at least one, after one that is not counted."""
    work()
    return statistics.median(_timed(work, budget))


def _timed(work: Callable[[], object], budget: Budget) -> Iterator[float]:
    for number in range(5):
        if number and not budget.seconds_left:
            return
        began = budget.clock()
        work()
        yield max(budget.clock() - began, 1e-9)


def fill_with_noise(memory: Tensor) -> None:
    """Fill with bytes that neither a filesystem nor a drive can shorten; torch's threads would cost more here."""
    noise, view = os.urandom(1 << 20), memory.numpy().data
    for start in range(0, len(view), len(noise)):
        view[start : start + len(noise)] = noise[: len(view) - start]
