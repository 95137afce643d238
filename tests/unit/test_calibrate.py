"""Rates of real files: within bytes and time, on written blocks, by one process at a time, and nothing left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fakes import PATIENCE_SECONDS, FaultyEngine
from tierstore import calibrate
from tierstore.calibrate import MOST_BYTES, find_rates, wait_within
from tierstore.cores import available
from tierstore.folders import disk_margin
from tierstore.gauge import DEPTH, REQUEST_SIZES, Budget, measure_machine, measure_path
from tierstore.io import Engine, Kind, Operation
from tierstore.io.threads import ThreadsEngine
from tierstore.mapping import map_host_memory
from tierstore.pressure import DiskSpace
from tierstore.ratecache import RateCache
from tierstore.rates import PathRates
from tierstore.swapfile import SwapFile

MIB = 1 << 20


class Recorder(ThreadsEngine):
    """A real engine that remembers what it was asked for."""

    def __init__(self, then: Callable[[], None] = lambda: None, **settings: int) -> None:
        self.operations: list[Operation] = []
        self._then = then
        super().__init__(**{"threads": DEPTH, "queue_depth": DEPTH, "request_size": 8 * MIB, **settings})

    def submit(self, operation: Operation) -> None:
        self.operations.append(operation)
        super().submit(operation)
        self._then()

    def bytes(self) -> int:
        return sum(len(operation.buffer) for operation in self.operations)

    def written(self) -> int:
        """How far the file was written, in order, before anything else touched it there."""
        written = 0
        for operation in self.operations:
            end = operation.offset + len(operation.buffer)
            if operation.kind is Kind.WRITE and operation.offset == written:
                written = end
            assert end <= written, f"{operation} is not on written blocks"
        return written


class Recorders:
    """Makes engines, and keeps them."""

    def __init__(self, make: Callable[..., Engine] = Recorder) -> None:
        self.made: list[Engine] = []
        self._make = make

    def __call__(self, name: str, **settings: int) -> Engine:
        self.made.append(self._make(**settings))
        return self.made[-1]


@pytest.fixture
def swap(tmp_path: Path) -> Path:
    folder = tmp_path / "swap"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> RateCache:
    return RateCache(tmp_path / "cache")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough on whatever else this machine does, and few bytes."""
    monkeypatch.setattr(calibrate, "MOST_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(calibrate, "MOST_BYTES", 32 * MIB)
    monkeypatch.setattr(calibrate, "BUFFER_BYTES", 8 * MIB)


pytestmark = pytest.mark.usefixtures("one_thread")


# -- one path ---------------------------------------------------------------------------------------------------


def measured(folder: Path, engine: Engine, budget: Budget) -> PathRates | None:
    file = SwapFile(folder, direct=None)
    try:
        if not file.direct:
            pytest.skip("no direct I/O here")
        return measure_path(file, engine, map_host_memory(64 * MIB), budget)
    finally:
        engine.close()
        file.close()


def test_a_path_is_measured_in_all_ways_within_its_bytes_on_written_blocks(swap: Path) -> None:
    engine = Recorder()
    budget = Budget(MOST_BYTES, PATIENCE_SECONDS)
    rates = measured(swap, engine, budget)
    assert rates is not None and [size.request_bytes for size in rates.sizes] == list(REQUEST_SIZES)
    assert 200 * MIB < engine.bytes() == MOST_BYTES - budget.bytes_left <= MOST_BYTES
    assert engine.written() == MOST_BYTES // 4
    assert all(operation.direct for operation in engine.operations)
    assert os.listdir(swap) == []


def test_no_two_requests_under_way_share_memory(swap: Path) -> None:
    """A filesystem with checksums takes a write whose memory changes meanwhile for a broken one."""
    busy: set[int] = set()
    lock = threading.Lock()

    class Careful(Recorder):
        def submit(self, operation: Operation) -> None:
            pages = set(range(at := _address(operation), at + len(operation.buffer), 4096))
            with lock:
                assert not busy & pages
                busy.update(pages)

            def done(error: object) -> None:
                with lock:
                    busy.difference_update(pages)
                operation.done(error)  # type: ignore[arg-type]

            super().submit(operation._replace(done=done))

    assert measured(swap, Careful(), Budget(64 * MIB, PATIENCE_SECONDS)) is not None
    assert not busy


def _address(operation: Operation) -> int:
    return torch.frombuffer(operation.buffer, dtype=torch.uint8).data_ptr()


def test_nothing_is_begun_when_the_time_is_up(swap: Path) -> None:
    """Each request takes a second of a clock that counts them; 20 fit, and a rate of every kind needs more."""
    now = [0.0]

    def tick() -> None:
        now[0] += 1.0

    engine = Recorder(tick)
    assert measured(swap, engine, Budget(MOST_BYTES, 20.0, clock=lambda: now[0])) is None
    assert 5 <= len(engine.operations) <= 20


def test_slow_disk_is_measured_on_the_blocks_there_was_time_to_write(swap: Path) -> None:
    """The first 20 requests take a second each; then it is fast, and the rest of the file stays untouched."""
    now = [0.0]

    def tick() -> None:
        now[0] += 1.0 if now[0] < 20 else 0.0

    engine = Recorder(tick)
    rates = measured(swap, engine, Budget(MOST_BYTES, 80.0, clock=lambda: now[0]))
    assert rates is not None and [size.request_bytes for size in rates.sizes] == [MIB // 2]
    assert engine.written() == 10 * MIB


@pytest.mark.parametrize("nbytes", [0, 4096, MIB])
def test_too_few_bytes_are_not_enough(nbytes: int, swap: Path, cache: RateCache) -> None:
    budget = Budget(MOST_BYTES, PATIENCE_SECONDS)
    assert not budget.part(nbytes, 1.0).take(nbytes + 1) and budget.bytes_left == MOST_BYTES
    budget.cancel()
    assert not budget.take(1) and not budget.part(10, 1.0).take(1)


# -- the machine ------------------------------------------------------------------------------------------------


def test_arithmetic_is_measured_without_touching_anybodys_threads() -> None:
    """The thread count of others, and what MKL makes of it, decide bits of the model's own arithmetic."""
    cores = available()
    torch.set_num_threads(cores)
    seen: list[int] = []
    rates = wait_within(
        PATIENCE_SECONDS, lambda: measure_machine(map_host_memory(4 * MIB), Budget(0, PATIENCE_SECONDS), threads=cores)
    )
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert rates.threads == cores and rates.elements_per_second > 0 and rates.copied_bytes_per_second > 0
    assert (rates.elements_per_second_sparing_a_core is None) == (cores == 1)
    assert [torch.get_num_threads(), *seen] == [cores, cores]


# -- the whole --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_rates_are_measured_once_for_a_filesystem_and_cached(swap: Path, cache: RateCache) -> None:
    other = swap / "other"
    other.mkdir()
    engines = Recorders()
    first = find_rates([swap, other], cache=cache, opener=engines)
    assert len(first.paths) == 1 and first.machine is not None and first.notes == ()
    again = find_rates([other], cache=RateCache(cache.folder), opener=engines)
    (name,) = again.paths
    assert name.startswith(f"{other} (") and list(again.paths.values()) == list(first.paths.values())
    assert (again.machine, again.measured_at) == (first.machine, first.measured_at)
    assert len(engines.made) == 1
    assert cache.folder is not None and len(os.listdir(cache.folder)) == 3  # path, machine, lock
    find_rates([swap], cache=cache, opener=engines, anew=True)
    assert len(engines.made) == 2
    assert os.listdir(swap) == ["other"]


def test_nothing_is_measured_unless_asked(swap: Path, cache: RateCache) -> None:
    engines = Recorders()
    rates = find_rates([swap], cache=cache, opener=engines, measure=False)
    assert (rates.paths, rates.machine, rates.notes, engines.made) == ({}, None, (), [])
    assert cache.folder is not None and not cache.folder.exists()


def test_work_that_hangs_is_not_waited_for() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def hang() -> None:
        may_end.wait(PATIENCE_SECONDS)
        has_ended.set()

    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        wait_within(0.01, hang)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(PATIENCE_SECONDS)


@pytest.mark.usefixtures("patient")
def test_stuck_disk_is_given_up_and_holds_nothing_once_it_lets_go(
    swap: Path, cache: RateCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that do not end: the caller goes on without rates; when they do end, nothing more is begun."""
    engine = FaultyEngine(threads=DEPTH, request_size=8 * MIB)
    engine.hold()
    threads: list[threading.Thread] = []

    def give_up(seconds: float, work: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=work))
        threads[0].start()
        engine.wait_until_held(DEPTH // 2)
        raise TimeoutError

    monkeypatch.setattr(calibrate, "wait_within", give_up)
    rates = find_rates([swap], cache=cache, opener=lambda *_, **__: engine)
    assert not rates.paths and f"measuring {swap} was given up" in rates.notes[-1]
    with cache.turn() as turn:
        assert turn.is_taken
    engine.release()
    threads[0].join(PATIENCE_SECONDS)
    assert engine.requests == DEPTH // 2
    with cache.turn() as turn:
        assert not turn.is_taken
    assert not [path for fd in os.listdir("/proc/self/fd") if str(swap) in (path := _target(fd))]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("nth", [1, 20])
@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_failing_disk_is_told_and_gets_no_rates(nth: int, kind: Kind, swap: Path, cache: RateCache) -> None:
    class Failing(FaultyEngine):
        def __init__(self, **_: int) -> None:
            super().__init__(threads=DEPTH, request_size=8 * MIB)
            self.fail(errno.EIO, nth=nth, kind=kind, times=None)

    rates = find_rates([swap], cache=cache, opener=Recorders(Failing))
    assert not rates.paths and len(rates.notes) == 1 and str(swap) in rates.notes[0]
    assert rates.machine is not None
    assert os.listdir(swap) == []


@pytest.mark.usefixtures("patient")
def test_disk_that_is_nearly_full_is_left_alone(swap: Path, cache: RateCache, monkeypatch: pytest.MonkeyPatch) -> None:
    space = DiskSpace(1 << 40, disk_margin(1 << 40) + 4 * MIB)
    monkeypatch.setattr("tierstore.swapfile.disk_space", lambda place: space)
    engines = Recorders()
    rates = find_rates([swap], cache=cache, opener=engines)
    assert not rates.paths and "too little free space" in rates.notes[0]
    assert not engines.made[0].operations  # type: ignore[attr-defined]


@pytest.mark.usefixtures("patient")
def test_folder_that_cannot_be_used_is_told(swap: Path, cache: RateCache) -> None:
    rates = find_rates([swap / "missing"], cache=cache)
    assert not rates.paths and "missing" in rates.notes[0]


@pytest.mark.usefixtures("patient")
def test_buffered_io_is_not_measured(swap: Path, cache: RateCache) -> None:
    for settings in ({"engine": "aiofiles"}, {"direct": False}):
        rates = find_rates([swap], cache=cache, **settings)  # type: ignore[arg-type]
        assert not rates.paths and "buffered" in rates.notes[0]


@pytest.mark.usefixtures("patient")
def test_memory_is_the_cpu_tiers(swap: Path, cache: RateCache) -> None:
    rates = find_rates([swap], cache=cache, memory_bytes=MIB)
    assert not rates.paths and rates.machine is None and "4 MiB" in rates.notes[0]
    engines = Recorders()
    assert find_rates([swap], cache=cache, memory_bytes=7 * MIB, opener=engines).paths
    operations = engines.made[0].operations  # type: ignore[attr-defined]
    starts = [_address(operation) for operation in operations]
    assert max(starts) - min(starts) < 6 * MIB


# -- several processes ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_two_processes_never_measure_at_once(swap: Path, cache: RateCache) -> None:
    """The second goes on with the defaults while the first is in the middle of it, and finds its rates afterwards."""
    find_rates([], cache=cache)  # arithmetic is known, which would need threads that a forked child has not
    is_in, may_go = os.pipe(), os.pipe()

    def in_the_middle() -> None:
        os.write(is_in[1], b"x")
        os.read(may_go[0], 1)

    child = os.fork()
    if child == 0:
        try:
            engine = Recorders(lambda **settings: Recorder(_once(in_the_middle), **settings))
            os._exit(0 if find_rates([swap], cache=cache, opener=engine).paths else 1)
        finally:
            os._exit(2)
    assert os.read(is_in[0], 1) == b"x"
    engines = Recorders()
    rates = find_rates([swap], cache=cache, opener=engines)
    assert not rates.paths and rates.notes == ("not measured: another process is measuring",) and not engines.made
    os.write(may_go[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert find_rates([swap], cache=cache, opener=engines).paths and not engines.made
    for end in (*is_in, *may_go):
        os.close(end)


def _once(work: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def first() -> None:
        if not done:
            done.append(True)
            work()

    return first


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_lock_only_who_is_alone_measures(
    ranks: int, swap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that cannot be written, as batch systems have it, holds no lock."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    (tmp_path / "file").touch()
    rates = find_rates([swap], cache=RateCache(tmp_path / "file" / "cache"))
    assert bool(rates.paths) == (ranks == 1)
    assert any("ranks cannot take turns" in note for note in rates.notes) == (ranks == 2)
