"""Requests that do not come back, in every engine: given up once, nothing taken from them, nobody waiting for them.

And workers that die. No test waits for a clock: time passes when the test says so, and threads are waited for by state.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import PATIENCE_SECONDS, Clock, FaultyEngine, HangingEngine, Outcome
from tests.processes import run_script
from tierstore.errors import TransferError, TransferTimeoutError
from tierstore.io import Engine, Kind, Operation
from tierstore.io.aiofiles import AiofilesEngine
from tierstore.io.base import Request
from tierstore.io.libaio import LibaioEngine

TIMEOUT = 60.0
PATH, OTHER = "the slow disk", "the other disk"


class WithholdingContext:
    """A kernel's context that gets some requests only when they are released: until then they are under way."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.withheld: list[Any] = []
        self.withholds = False
        self.has_some = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def submit(self, blocks: list[Any]) -> None:
        if not self.withholds:
            self._context.submit(blocks)
            return
        self.withheld += blocks
        self.has_some.set()

    def release(self) -> None:
        self.withholds = False
        withheld, self.withheld = self.withheld, []
        if withheld:
            self._context.submit(withheld)


class Hanging:
    """An engine with one place for a request on each path, whose requests on PATH hang from `begin` to `release`."""

    def __init__(self, engine: Engine, begin: Callable[[], None], wait: Callable[[], object], release: Any) -> None:
        self.engine, self.begin, self.wait_until_held, self.release = engine, begin, wait, release
        self.clock = engine.clock = Clock()
        engine.timeout_seconds = TIMEOUT


def hanging_threads() -> Hanging:
    engine = FaultyEngine(threads=1)
    return Hanging(engine, lambda: engine.hold(times=1), engine.wait_until_held, engine.release)


def hanging_libaio() -> Hanging:
    pytest.importorskip("libaio")
    engine = LibaioEngine(queue_depth=1, request_size=1 << 20)
    engine.prepare(PATH)
    lane: Any = engine._lanes[PATH]
    context = lane._context = WithholdingContext(lane._context)

    def wait() -> None:
        assert context.has_some.wait(PATIENCE_SECONDS)

    return Hanging(engine, lambda: setattr(context, "withholds", True), wait, context.release)


def hanging_aiofiles() -> Hanging:
    hold, held, let_go = threading.Event(), threading.Event(), threading.Event()

    class HangingAiofiles(AiofilesEngine):
        async def _transfer(self, request: Request, executor: Executor) -> int:
            if hold.is_set() and request.operation.path == PATH:
                held.set()
                await self._loop.run_in_executor(executor, let_go.wait)
            return await super()._transfer(request, executor)

    engine = HangingAiofiles(threads=1, queue_depth=1, request_size=1 << 20)

    def wait() -> None:
        assert held.wait(PATIENCE_SECONDS)

    return Hanging(engine, hold.set, wait, let_go.set)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"on the disk" * 1000, 0)
    yield fd
    os.close(fd)


@pytest.fixture(params=[hanging_threads, hanging_libaio, hanging_aiofiles])
def hanging(request: pytest.FixtureRequest, file: int) -> Iterator[Hanging]:
    made = request.param()
    yield made
    made.release()
    made.engine.close()
    join_workers()
    assert io_threads() == []


class Late:
    """An operation's `late`."""

    def __init__(self) -> None:
        self.count = 0
        self.failed: TransferError | None = None
        self.called = threading.Event()

    def __call__(self, failed: TransferError | None) -> None:
        self.count += 1
        self.failed = failed
        self.called.set()

    def wait(self) -> None:
        assert self.called.wait(PATIENCE_SECONDS)


def io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tierstore-io")]


def join_workers() -> None:
    for thread in io_threads():
        thread.join(PATIENCE_SECONDS)


def begin(
    engine: Engine, kind: Kind, fd: int, buffer: memoryview, *, path: str = PATH, offset: int = 0, late: Any = Late
) -> tuple[Outcome, Late]:
    outcome, late = Outcome(), Late()
    engine.submit(Operation(kind, fd, path, offset, buffer, False, outcome, late=late))
    return outcome, late


def memory(content: bytes) -> memoryview:
    return memoryview(bytearray(content))


# --- giving up


@pytest.mark.parametrize("kind", Kind)
def test_request_that_hangs_is_given_up_once_and_may_come_back_late(hanging: Hanging, file: int, kind: Kind) -> None:
    engine = hanging.engine
    hanging.begin()
    outcome, late = begin(engine, kind, file, memory(b"x" * 10), offset=11)
    hanging.wait_until_held()
    assert engine.give_up() == 0
    hanging.clock.now += TIMEOUT
    assert (engine.seconds_left(), engine.give_up()) == (0.0, 1)
    error = outcome.wait()
    assert isinstance(error, TransferTimeoutError) and error.errno == errno.ETIMEDOUT and error.filename == PATH
    assert f"{kind.value} of 10 bytes at offset 11 is given up" in str(error) and "for 60 s" in str(error)
    assert (engine.give_up(), engine.seconds_left(), late.count) == (0, None, 0)
    hanging.release()
    late.wait()
    assert (engine.timed_out, engine.late, late.count, late.failed, len(outcome.calls)) == (1, 1, 1, None, 1)
    again, _ = begin(engine, Kind.WRITE, file, memory(b"as before"), offset=5)
    assert again.wait() is None
    assert os.pread(file, 9, 5) == b"as before"


def test_one_that_comes_back_with_an_error_says_which(hanging: Hanging, file: int) -> None:
    engine = hanging.engine
    hanging.begin()
    outcome, late = begin(engine, Kind.READ, file, memory(bytes(10)), offset=1 << 20)
    hanging.wait_until_held()
    hanging.clock.now += TIMEOUT
    assert engine.give_up() == 1 and isinstance(outcome.wait(), TransferTimeoutError)
    hanging.release()
    late.wait()
    assert late.count == 1 and "unexpected end of file" in str(late.failed)


def test_what_waits_behind_a_hang_is_not_begun_and_may_be_used_again(
    hanging: Hanging, file: int, tmp_path: Path
) -> None:
    """With every worker in the kernel nobody would ever have begun it, nor what was submitted afterwards."""
    engine = hanging.engine
    hanging.begin()
    begin(engine, Kind.WRITE, file, memory(b"hangs"))
    hanging.wait_until_held()
    behind, its_late = begin(engine, Kind.WRITE, file, memory(b"waits"))
    hanging.clock.now += TIMEOUT
    assert engine.give_up() == 2
    after, _ = begin(engine, Kind.WRITE, file, memory(b"comes"))
    for outcome in (behind, after):
        error = outcome.wait()
        assert isinstance(error, TransferError) and not isinstance(error, TransferTimeoutError)
        assert "was not begun" in str(error) and error.filename == PATH
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    elsewhere, _ = begin(engine, Kind.WRITE, other, memory(b"elsewhere"), path=OTHER)
    assert elsewhere.wait() is None
    os.close(other)
    assert (engine.timed_out, engine.late, its_late.count) == (1, 0, 0)


def test_closing_waits_neither_for_a_request_that_hangs_nor_for_its_worker(hanging: Hanging, file: int) -> None:
    engine = hanging.engine
    hanging.begin()
    outcome, late = begin(engine, Kind.READ, file, memory(bytes(11)))
    hanging.wait_until_held()
    hanging.clock.now += TIMEOUT
    engine.close()
    assert isinstance(outcome.wait(), TransferTimeoutError)
    assert io_threads() != []
    hanging.release()
    late.wait()
    join_workers()
    assert io_threads() == []


def test_memory_is_there_as_long_as_a_request_that_was_given_up_may_touch_it(hanging: Hanging, file: int) -> None:
    engine = hanging.engine
    area = mmap.mmap(-1, 4096)
    is_there = weakref.ref(area)
    hanging.begin()
    _, late = begin(engine, Kind.READ, file, memoryview(area)[:11])
    hanging.wait_until_held()
    del area
    hanging.clock.now += TIMEOUT
    assert engine.give_up() == 1
    engine.close()
    gc.collect()
    assert is_there() is not None
    hanging.release()
    late.wait()
    join_workers()
    gc.collect()
    assert is_there() is None


# --- what is no hang


@pytest.fixture
def faulty(file: int) -> Iterator[FaultyEngine]:
    engine = FaultyEngine(threads=2, request_size=4096)
    engine.clock, engine.timeout_seconds = Clock(), TIMEOUT
    yield engine
    engine.release()
    engine.close()


def test_long_queue_on_a_slow_disk_is_no_hang(file: int) -> None:
    """Each request takes just less than the timeout, and the last one is eighteen timeouts old when it ends."""
    engine = FaultyEngine(threads=1)
    clock = engine.clock = Clock()
    engine.timeout_seconds = TIMEOUT
    engine.hold()
    outcomes = [begin(engine, Kind.WRITE, file, memory(b"x"))[0] for _ in range(20)]
    for outcome in outcomes:
        engine.wait_until_held()
        clock.now += 0.9 * TIMEOUT
        assert (engine.give_up(), outcome.is_done) == (0, False)
        engine.release_one()
        assert outcome.wait() is None
    engine.release()
    engine.close()
    assert engine.timed_out == 0


def test_one_that_goes_on_request_by_request_is_no_hang(file: int) -> None:
    engine = FaultyEngine(threads=1, request_size=4096)
    clock = engine.clock = Clock()
    engine.timeout_seconds = TIMEOUT
    engine.hold()
    outcome, _ = begin(engine, Kind.WRITE, file, memory(b"x" * 4096 * 10))
    for _ in range(10):
        engine.wait_until_held()
        clock.now += 0.9 * TIMEOUT
        assert engine.give_up() == 0
        engine.release_one()
    assert outcome.wait() is None
    engine.release()
    engine.close()


def test_only_what_has_been_under_way_for_so_long_is_given_up(faulty: FaultyEngine, file: int) -> None:
    faulty.hold()
    first, _ = begin(faulty, Kind.WRITE, file, memory(b"first"))
    faulty.wait_until_held()
    faulty.clock.now += TIMEOUT / 2  # type: ignore[attr-defined]
    second, _ = begin(faulty, Kind.WRITE, file, memory(b"second"))
    faulty.wait_until_held(2)
    assert faulty.seconds_left() == TIMEOUT / 2
    faulty.clock.now += TIMEOUT / 2  # type: ignore[attr-defined]
    assert faulty.give_up() == 1
    assert first.is_done and not second.is_done
    faulty.release()
    assert second.wait() is None


def test_an_error_before_the_hang_is_told_when_all_is_back(faulty: FaultyEngine, file: int) -> None:
    faulty.hold()
    outcome, late = begin(faulty, Kind.WRITE, file, memory(bytes(8192)))
    faulty.wait_until_held(2)
    faulty.fail(errno.EIO)
    faulty.release_one()
    begin(faulty, Kind.WRITE, file, memory(b"next"))
    faulty.wait_until_held(2)  # so the one that failed is over
    faulty.clock.now += TIMEOUT  # type: ignore[attr-defined]
    assert faulty.give_up() == 2 and isinstance(outcome.wait(), TransferTimeoutError)
    faulty.release()
    late.wait()
    assert late.failed is not None and late.failed.errno == errno.EIO


def test_without_a_timeout_nothing_is_given_up(faulty: FaultyEngine, file: int) -> None:
    faulty.timeout_seconds = None
    faulty.hold()
    outcome, _ = begin(faulty, Kind.WRITE, file, memory(b"x"))
    faulty.wait_until_held()
    faulty.clock.now += 1e9  # type: ignore[attr-defined]
    assert (faulty.seconds_left(), faulty.give_up()) == (None, 0)
    faulty.release()
    assert outcome.wait() is None


# --- ending a process

EXIT = """
import os, time
from tests.unit.test_hangs import *
for number, make in enumerate((hanging_threads, hanging_libaio, hanging_aiofiles) * 2):
    hanging = make()
    engine, engine.timeout_seconds, engine.clock = hanging.engine, 0.05, time.monotonic
    hanging.begin()
    begin(engine, Kind.READ, os.open(f"{folder}/file", os.O_RDWR | os.O_CREAT), memory(bytes(11)))
    hanging.wait_until_held()
    if number > 2:
        engine.close()
print("the end")
"""


def test_process_ends_in_silence_while_requests_hang_in_engines_closed_and_forgotten(tmp_path: Path) -> None:
    pytest.importorskip("libaio")
    assert run_script(EXIT, tmp_path, to_its_end=True) == "the end\n"


# --- workers that die


def kill(thread: threading.Thread) -> None:
    """Let a thread meet SystemExit as soon as it runs Python again; one that sleeps does when it is woken."""
    assert thread.ident is not None
    killed = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    assert killed == 1


def test_operations_go_on_when_one_of_two_workers_dies(file: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = FaultyEngine(threads=2)
    engine.prepare(PATH)
    dying, other = io_threads()
    kill(dying)
    for number in range(10):
        outcome, _ = begin(engine, Kind.WRITE, file, memory(b"%d" % number), offset=number)
        assert outcome.wait() is None
    dying.join(PATIENCE_SECONDS)
    assert other.is_alive()
    assert os.pread(file, 10, 0) == b"0123456789"
    engine.close()
    assert f"{dying.name} died, 1 of its lane are left" in caplog.text


class DeadlyTrace:
    """Kills the first worker that tells it of a request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, *_: object, **__: object) -> None:
        self._engine.trace = None
        raise SystemExit("shot")


def test_a_worker_that_dies_at_a_request_fails_its_operation_alone(file: int) -> None:
    engine = FaultyEngine(threads=2)
    engine.trace = DeadlyTrace(engine)  # type: ignore[assignment]
    outcome, _ = begin(engine, Kind.WRITE, file, memory(b"abc"))
    error = outcome.wait()
    assert isinstance(error, TransferError) and "died of SystemExit('shot')" in str(error)
    outcome, _ = begin(engine, Kind.WRITE, file, memory(b"abc"))
    assert outcome.wait() is None
    engine.close()


def engines_with_one_worker() -> list[Callable[[], Engine]]:
    return [lambda: FaultyEngine(threads=1), lambda: LibaioEngine(queue_depth=4, request_size=4096)]


@pytest.mark.parametrize("make", engines_with_one_worker(), ids=["threads", "libaio"])
def test_path_whose_last_worker_died_says_so_and_nobody_waits(make: Callable[[], Engine], file: int) -> None:
    pytest.importorskip("libaio")
    engine = make()
    engine.prepare(PATH)
    (worker,) = io_threads()
    kill(worker)
    for _ in range(3):
        outcome, _ = begin(engine, Kind.WRITE, file, memory(bytes(10_000)))
        error = outcome.wait()
        assert isinstance(error, TransferError) and "its worker, or the last one of this path, died" in str(error)
    elsewhere, _ = begin(engine, Kind.WRITE, file, memory(b"elsewhere"), path=OTHER)
    assert elsewhere.wait() is None
    engine.close()
    assert io_threads() == []


def test_what_waits_for_the_last_worker_fails_with_it(file: int) -> None:
    engine = FaultyEngine(threads=1)
    engine.trace = DeadlyTrace(engine)  # type: ignore[assignment]
    engine.hold()
    outcomes = [begin(engine, Kind.WRITE, file, memory(b"x"))[0] for _ in range(4)]
    engine.release()
    assert all(isinstance(outcome.wait(), TransferError) for outcome in outcomes)
    engine.close()
    assert engine.requests == 1


def test_aiofiles_goes_on_when_its_loop_is_interrupted(file: int) -> None:
    engine = AiofilesEngine(threads=2, queue_depth=2, request_size=4096)
    engine.prepare(PATH)
    (loop,) = (thread for thread in io_threads() if thread.name.endswith("loop"))
    interrupted = threading.Event()

    def interrupt() -> None:
        interrupted.set()
        raise SystemExit

    engine._loop.call_soon_threadsafe(interrupt)
    assert interrupted.wait(PATIENCE_SECONDS)
    outcome, _ = begin(engine, Kind.WRITE, file, memory(b"abc"))
    assert outcome.wait() is None
    assert loop.is_alive()
    engine.close()


def test_aiofiles_worker_that_dies_fails_its_call_alone(file: int) -> None:
    engine = AiofilesEngine(threads=1, queue_depth=2, request_size=4096)
    engine.prepare(PATH)
    (worker,) = (thread for thread in io_threads() if not thread.name.endswith("loop"))
    kill(worker)
    for _ in range(2):
        outcome, _ = begin(engine, Kind.WRITE, file, memory(b"abc"))
        assert isinstance(outcome.wait(), TransferError)
    engine.close()
    assert io_threads() == []


def test_hang_in_one_request_of_many_gives_up_the_whole_operation_and_begins_no_more_of_it(file: int) -> None:
    engine = HangingEngine(threads=1, request_size=4096)
    engine.timeout_seconds = TIMEOUT
    engine.hold(nth=3)
    outcome, late = begin(engine, Kind.WRITE, file, memory(b"x" * 4096 * 8))
    engine.wait_until_held()
    assert engine.give_up() == 1
    assert isinstance(outcome.wait(), TransferTimeoutError)
    engine.release()
    late.wait()
    engine.close()
    assert engine.requests == 3
