"""Measures swap paths, memory and arithmetic within a second and 256 MiB, or finds what was measured before.

Everything that may hang runs on a thread of its own, which is left to itself when its time is up: whatever it holds it
gives back when the disk lets go of it, and it begins nothing more. Paths are measured as the engine uses them: direct
I/O on written blocks of an unnamed file, buffers on huge pages. Nothing is measured beside another process that is
measuring. Never raises for what it meets: `Rates.notes` say what is not known and why.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tierstore.crew import start
from tierstore.errors import DiskFullError, TierstoreError
from tierstore.folders import filesystems
from tierstore.gauge import DEPTH, REQUEST_SIZES, Budget, fill_with_noise, measure_machine, measure_path
from tierstore.io import Engine, open_engine
from tierstore.mapping import map_host_memory
from tierstore.pressure import local_ranks
from tierstore.ratecache import Key, RateCache, cache_folder, machine_key, path_key
from tierstore.rates import MachineRates, PathRates, Rates
from tierstore.swapfile import SwapFile

T = TypeVar("T")
MOST_SECONDS = 1.0
"""From the call to the answer."""
MOST_BYTES = 256 << 20
"""Of files, read and written, all paths together."""
BUFFER_BYTES = 64 << 20
LEAST_BUFFER_BYTES = 4 << 20
MACHINE_SECONDS = 0.2
"""Left for memory and arithmetic."""
LEAST_PATH_BYTES = 64 << 20
"""With less for each path, fewer paths are measured; the next run measures the others."""

_BUFFERED = "its I/O is buffered, which shows the rates of memory"


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
        wait_within(MOST_SECONDS, work)
    except TimeoutError:
        return findings.as_rates(f"{findings.doing} was given up after {MOST_SECONDS:g} s")
    except (TierstoreError, OSError, RuntimeError, MemoryError) as error:  # no thread, no memory: not worth a training
        return findings.as_rates(f"{findings.doing} failed: {getattr(error, 'strerror', None) or error}")
    finally:
        budget.cancel()
    return findings.as_rates()


def wait_within(seconds: float, work: Callable[[], T]) -> T:
    """Do work that may hang on a thread of its own, and return what it returns or raise what it raises.

    Raises TimeoutError when it is not over in time; the thread is then left to itself. NoThreadError if there is none.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    start(threading.Thread(target=run, name="tierstore-calibrate", daemon=True))
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
            fill_with_noise(memory)
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


def _name(folder: Path, key: Key) -> str:
    return f"{folder} ({key['filesystem']} on {key['source']})"
