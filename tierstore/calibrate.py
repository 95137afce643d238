"""Measures swap paths, memory and arithmetic within a second and 256 MiB, or finds what was measured before.

Everything that may hang runs on a thread of its own, which is left to itself when its time is up: whatever it holds it
gives back when the disk lets go of it, and it begins nothing more. Paths are measured as the engine uses them: direct
I/O on written blocks of an unnamed file, buffers on huge pages. Nothing is measured beside another process that is
measuring. Never raises for what it meets: `Rates.notes` say what is not known and why.
"""

from __future__ import annotations

import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tierstore.cores import leaving_one_free
from tierstore.device import map_host_memory
from tierstore.errors import DiskFullError, TierstoreError, TransferError
from tierstore.io import Engine, Kind, Operation, open_engine
from tierstore.pressure import local_ranks
from tierstore.ratecache import Key, RateCache, cache_folder, machine_key, path_key
from tierstore.rates import MachineRates, PathRates, Rates, SizeRates
from tierstore.swapfile import SwapFile, filesystems

T = TypeVar("T")
Clock = Callable[[], float]

MOST_SECONDS = 1.0
"""From the call to the answer."""
MOST_BYTES = 256 << 20
"""Of files, read and written, all paths together."""
BUFFER_BYTES = 64 << 20
LEAST_BUFFER_BYTES = 4 << 20
REQUEST_SIZES = (512 << 10, 2 << 20, 4 << 20, 8 << 20)
SMALL = 4096
DEPTH = 8
"""Requests on their way at once when rates are measured."""
MACHINE_SECONDS = 0.2
"""Left for memory and arithmetic."""
SHARE = 0.12
"""Of a path's time, what one rate may take."""
LEAST_PATH_BYTES = 64 << 20
"""With less for each path, fewer paths are measured; the next run measures the others."""

_BUFFERED = "its I/O is buffered, which shows the rates of memory"


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


class Findings:
    """What a measuring thread has found so far; the caller may look at any time."""

    def __init__(self) -> None:
        self.paths: dict[str, PathRates] = {}
        self.machine: MachineRates | None = None
        self.dates: list[str] = []
        self.notes: list[str] = []
        self.doing = "looking at swap folders"

    def as_rates(self, *further: str) -> Rates:
        """What there is now."""
        return Rates(dict(self.paths), self.machine, min(self.dates, default=None), (*self.notes, *further))


def find_rates(
    folders: Sequence[Path],
    *,
    engine: str = "auto",
    direct: bool | None = None,
    memory_bytes: int | None = None,
    measure: bool = True,
    anew: bool = False,
    cache: RateCache | None = None,
    opener: Callable[..., Engine] = open_engine,
) -> Rates:
    """Find the rates of the machine and of the filesystems that folders lie on; measure what is not known.

    `direct` False: files are to be buffered, which is not measured. `memory_bytes`: host memory that may be used
    meanwhile, 64 MiB at most. `measure` False: only what is cached; `anew`: measure it all.
    """
    if direct is False:
        return Rates({}, None, None, (f"not measured: {_BUFFERED}",))
    budget, findings = Budget(MOST_BYTES, MOST_SECONDS * 0.9), Findings()
    threads, ranks = torch.get_num_threads(), local_ranks()
    known = RateCache(cache_folder()) if cache is None else cache

    def work() -> None:
        finder = _Finder(findings, budget, known, engine, opener)
        missing = finder.look(folders, threads, anew=anew)
        if measure and missing.any():
            finder.measure_in_turn(missing, threads, memory_bytes, ranks)

    try:
        within(MOST_SECONDS, work)
    except TimeoutError:
        return findings.as_rates(f"{findings.doing} was given up after {MOST_SECONDS:g} s")
    except (TierstoreError, OSError, RuntimeError, MemoryError) as error:  # no thread, no memory: not worth a training
        return findings.as_rates(f"{findings.doing} failed: {getattr(error, 'strerror', None) or error}")
    finally:
        budget.cancel()
    return findings.as_rates()


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do work that may hang on a thread of its own, and return what it returns or raise what it raises.

    Raises TimeoutError when it is not over in time; the thread is then left to itself.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="tierstore-calibrate", daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Missing:
    """What is in no cache: a path with its key for each filesystem, and the machine's key."""

    paths: list[tuple[Path, Key]]
    machine: Key | None

    def any(self) -> bool:
        return bool(self.paths) or self.machine is not None


class _Finder:
    """One search, on its thread."""

    def __init__(
        self, findings: Findings, budget: Budget, cache: RateCache, engine: str, opener: Callable[..., Engine]
    ) -> None:
        self._found, self._budget, self._cache = findings, budget, cache
        self._engine_name, self._opener = engine, opener

    def look(self, folders: Sequence[Path], threads: int, *, anew: bool) -> _Missing:
        """Take what is cached, unless it is to be measured `anew`; return the rest. Raises SwapError or OSError."""
        missing = []
        for same in filesystems(folders):
            key = path_key(same[0], engine=self._engine_name)
            entry = None if anew else self._cache.load(PathRates, key)
            if entry is None:
                missing.append((same[0], key))
            else:
                self._found.paths[_name(same[0], key)] = entry.rates
                self._found.dates.append(entry.measured_at)
        key = machine_key(threads)
        machine = None if anew else self._cache.load(MachineRates, key)
        if machine is None:
            return _Missing(missing, key)
        self._found.machine = machine.rates
        self._found.dates.append(machine.measured_at)
        return _Missing(missing, None)

    def measure_in_turn(self, missing: _Missing, threads: int, memory_bytes: int | None, ranks: int) -> None:
        """Measure if no other process is at it. Raises OSError or TierstoreError."""
        size = min(BUFFER_BYTES, BUFFER_BYTES if memory_bytes is None else memory_bytes)
        if size < LEAST_BUFFER_BYTES:
            self._found.notes.append(f"not measured: it takes {LEAST_BUFFER_BYTES >> 20} MiB of the cpu tier's memory")
            return
        with self._cache.turn() as turn:
            if turn.is_taken or (turn.without and ranks > 1):
                why = "another process is measuring" if turn.is_taken else f"ranks cannot take turns: {turn.without}"
                self._found.notes.append(f"not measured: {why}")
                return
            memory = map_host_memory(size // (2 << 20) * (2 << 20))
            _fill(memory)
            self._measure_paths(missing.paths, memory)
            if missing.machine is not None:
                self._measure_machine(memory, threads, missing.machine)

    def _measure_machine(self, memory: Tensor, threads: int, key: Key) -> None:
        self._found.doing = "measuring memory and arithmetic"
        if not self._budget.seconds_left:
            self._found.notes.append("memory and arithmetic are not measured: there was no time left")
            return
        rates = measure_machine(memory, self._budget, threads)
        self._found.machine = rates
        self._found.dates.append(self._cache.save(rates, key).measured_at)

    def _measure_paths(self, paths: Sequence[tuple[Path, Key]], memory: Tensor) -> None:
        most = max(1, MOST_BYTES // LEAST_PATH_BYTES)
        for number, (folder, key) in enumerate(paths[:most]):
            self._found.doing = f"measuring {folder}"
            parts = min(len(paths), most) - number
            seconds = (self._budget.seconds_left - MACHINE_SECONDS) / parts
            budget = self._budget.part(self._budget.bytes_left // parts, seconds)
            rates = self._measure_path(folder, memory, budget)
            if rates is not None:
                self._found.paths[_name(folder, key)] = rates
                self._found.dates.append(self._cache.save(rates, key).measured_at)
        for folder, _ in paths[most:]:
            self._found.notes.append(f"{folder} is not measured this time: {most} others were")

    def _measure_path(self, folder: Path, memory: Tensor, budget: Budget) -> PathRates | None:
        try:
            with ExitStack() as closing:
                file = SwapFile(folder, direct=None, warns=False)
                closing.callback(file.close)
                engine = self._opener(
                    self._engine_name, threads=DEPTH, queue_depth=DEPTH, request_size=max(REQUEST_SIZES)
                )
                closing.callback(engine.close)
                if not (file.direct and engine.supports_direct):
                    self._found.notes.append(f"{folder} is not measured: {_BUFFERED}")
                    return None
                rates = measure_path(file, engine, memory, budget)
        except DiskFullError:
            self._found.notes.append(f"{folder} is not measured: there is too little free space")
            return None
        except (OSError, TierstoreError) as error:
            self._found.notes.append(f"{folder} is not measured: {getattr(error, 'strerror', None) or error}")
            return None
        if rates is None or not self._budget.seconds_left:  # what ends after that has met with something unusual
            self._found.notes.append(f"{folder} is not measured: it is too slow for the time there is")
            return None
        return rates


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


def _fill(memory: Tensor) -> None:
    """Fill with bytes that neither a filesystem nor a drive can shorten; torch's threads would cost more here."""
    noise, view = os.urandom(1 << 20), memory.numpy().data
    for start in range(0, len(view), len(noise)):
        view[start : start + len(noise)] = noise[: len(view) - start]


def _name(folder: Path, key: Key) -> str:
    return f"{folder} ({key['filesystem']} on {key['source']})"
