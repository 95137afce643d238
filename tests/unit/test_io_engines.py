"""One contract for the three I/O engines, then what is particular to each."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.fakes import PATIENCE_SECONDS, FaultyEngine, Outcome
from tierstore.errors import (
    AlignmentError,
    EngineUnavailableError,
    ForkedStoreError,
    PolicyError,
    StoreClosedError,
    TransferError,
)
from tierstore.io import ALIGNMENT, Engine, Kind, Operation, open_engine
from tierstore.io.aiofiles import AiofilesEngine
from tierstore.io.base import FRUITLESS_LIMIT, Request

ENGINES = ("threads", "libaio", "aiofiles")
DIRECT_ENGINES = ("threads", "libaio")
REQUEST = 64 << 10
SIZES = (1, 511, 512, 513, 4095, 4096, 4097, 1_049_576)

Open = Callable[..., Engine]


def open_or_skip(name: str, **numbers: int | None) -> Engine:
    settings: dict[str, int | None] = {"threads": 4, "queue_depth": 8, "request_size": REQUEST}
    try:
        return open_engine(name, **{**settings, **numbers})  # type: ignore[arg-type]
    except EngineUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=ENGINES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(name: str) -> Iterator[Engine]:
    engine = open_or_skip(name)
    yield engine
    engine.close()


@pytest.fixture(params=DIRECT_ENGINES)
def direct_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = open_or_skip(str(request.param))
    yield engine
    engine.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.fixture
def direct_file(tmp_path: Path) -> Iterator[int]:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error}")
    yield fd
    os.close(fd)


def unaligned(content: bytes) -> memoryview:
    """Memory with this content at an odd address."""
    memory = memoryview(bytearray(len(content) + 2))
    odd = 1 - ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 2
    view = memory[odd : odd + len(content)]
    view[:] = content
    return view


def aligned(content: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, max(len(content), 1)))[: len(content)]
    view[:] = content
    return view


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def begin(engine: Engine, kind: Kind, fd: int, offset: int, buffer: memoryview, direct: bool = False) -> Outcome:
    outcome = Outcome()
    engine.submit(Operation(kind, fd, "the file", offset, buffer, direct, outcome))
    return outcome


def write(engine: Engine, fd: int, offset: int, content: bytes) -> TransferError | None:
    return begin(engine, Kind.WRITE, fd, offset, unaligned(content)).wait()


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def io_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore-io")]


# --- the contract


@pytest.mark.parametrize("size", SIZES)
def test_every_byte_arrives_from_odd_memory_at_odd_offsets(engine: Engine, file: int, size: int) -> None:
    """A peer's engine dropped tails that filled no block and reported success."""
    content, offset = noise(size, seed=size), 4097
    os.ftruncate(file, offset + size + 100)
    assert write(engine, file, offset, content) is None
    assert os.pread(file, size + 200, offset) == content + bytes(100)
    assert os.pread(file, offset, 0) == bytes(offset)
    back = unaligned(bytes(size))
    assert begin(engine, Kind.READ, file, offset, back).wait() is None
    assert bytes(back) == content


def test_direct_file_takes_aligned_operations(direct_engine: Engine, direct_file: int) -> None:
    content = noise(5 * REQUEST + ALIGNMENT)
    assert begin(direct_engine, Kind.WRITE, direct_file, ALIGNMENT, aligned(content), direct=True).wait() is None
    back = aligned(bytes(len(content)))
    assert begin(direct_engine, Kind.READ, direct_file, ALIGNMENT, back, direct=True).wait() is None
    assert bytes(back) == content


@pytest.mark.parametrize(("what", "shift", "offset", "length"), [("address", 512, 0, 4096), ("offset", 0, 512, 4096)])
@pytest.mark.parametrize("kind", Kind)
def test_misaligned_direct_operation_is_refused_before_anything_moves(
    direct_engine: Engine, direct_file: int, kind: Kind, what: str, shift: int, offset: int, length: int
) -> None:
    outcome = Outcome()
    buffer = aligned(b"x" * 2 * ALIGNMENT)[shift : shift + length]
    with pytest.raises(AlignmentError, match=f"{what} .*512 over"):
        direct_engine.submit(Operation(kind, direct_file, "the file", offset, buffer, True, outcome))
    direct_engine.close()
    assert (outcome.calls, os.fstat(direct_file).st_size) == ([], 0)


@pytest.mark.parametrize("length", [1, 511, 512, 4095, 4097])
def test_direct_operation_of_a_broken_length_is_refused(direct_engine: Engine, direct_file: int, length: int) -> None:
    with pytest.raises(AlignmentError, match=f"length {length} is {length % ALIGNMENT} over"):
        begin(direct_engine, Kind.WRITE, direct_file, 0, aligned(bytes(length)), direct=True)


@pytest.mark.parametrize("seed", range(3))
def test_concurrent_operations_agree_with_a_bytearray(engine: Engine, file: int, seed: int) -> None:
    """Each round reads and writes all the pieces of a random cut of the file at once."""
    chance, size = random.Random(seed), 700_000
    model = bytearray(chance.randbytes(size))
    assert write(engine, file, 0, bytes(model)) is None
    for _ in range(8):
        cuts = [0, *sorted(chance.sample(range(1, size), 15)), size]
        reads, outcomes = [], []
        for start, end in itertools.pairwise(cuts):
            if chance.random() < 0.5:
                model[start:end] = chance.randbytes(end - start)
                outcomes.append(begin(engine, Kind.WRITE, file, start, unaligned(bytes(model[start:end]))))
            else:
                reads.append((start, end, unaligned(bytes(end - start))))
                outcomes.append(begin(engine, Kind.READ, file, start, reads[-1][2]))
        assert [outcome.wait() for outcome in outcomes] == [None] * len(outcomes)
        assert all(bytes(view) == model[start:end] for start, end, view in reads)
    assert os.pread(file, size + 1, 0) == model


def test_empty_operation_is_done_at_once(engine: Engine, file: int) -> None:
    assert begin(engine, Kind.READ, file, 0, memoryview(bytearray())).calls == [None]


def test_end_of_file_is_an_error_that_says_where(engine: Engine, file: int) -> None:
    """A swap file that something truncated must never be taken for zeros."""
    os.pwrite(file, b"x" * 1000, 0)
    error = begin(engine, Kind.READ, file, 500, unaligned(bytes(REQUEST * 2))).wait()
    assert isinstance(error, TransferError)
    assert (error.errno, error.filename) == (errno.EIO, "the file")
    assert f"read of {REQUEST * 2} bytes at offset 500" in str(error)
    assert "end of file at byte 1000" in str(error) or f"end of file at byte {500 + REQUEST}" in str(error)


def test_end_of_file_within_a_block_of_a_direct_file_is_an_error(direct_engine: Engine, direct_file: int) -> None:
    os.ftruncate(direct_file, ALIGNMENT + 512)
    error = begin(direct_engine, Kind.READ, direct_file, 0, aligned(bytes(2 * ALIGNMENT)), direct=True).wait()
    assert "end of file at byte 4608" in str(error)


def test_error_of_the_system_is_reported_with_its_numbers(engine: Engine, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "read-only", os.O_RDONLY | os.O_CREAT)
    error = begin(engine, Kind.WRITE, fd, 8192, unaligned(bytes(REQUEST * 3))).wait()
    os.close(fd)
    assert isinstance(error, TransferError)
    assert (error.errno, error.filename) == (errno.EBADF, "the file")
    assert f"write of {REQUEST * 3} bytes at offset 8192 failed at byte" in str(error)


def test_done_is_called_once_however_many_requests_fail(engine: Engine) -> None:
    outcome = begin(engine, Kind.READ, 10_000, 0, unaligned(bytes(20 * REQUEST)))
    engine.close()
    assert len(outcome.calls) == 1
    assert isinstance(outcome.calls[0], TransferError)


def test_done_that_raises_hurts_nobody_else(engine: Engine, file: int, caplog: pytest.LogCaptureFixture) -> None:
    def raise_it(error: TransferError | None) -> None:
        raise RuntimeError("from the callback")

    for _ in range(10):
        engine.submit(Operation(Kind.WRITE, file, "the file", 0, unaligned(b"abc"), False, raise_it))
    assert write(engine, file, 0, b"def") is None
    engine.close()
    assert caplog.text.count("from the callback") >= 10


def test_done_may_submit(engine: Engine, file: int) -> None:
    outcome = Outcome()

    def go_on(error: TransferError | None) -> None:
        engine.submit(Operation(Kind.WRITE, file, "the file", 3, unaligned(b"def"), False, outcome))

    engine.submit(Operation(Kind.WRITE, file, "the file", 0, unaligned(b"abc"), False, go_on))
    assert outcome.wait() is None
    assert os.pread(file, 6, 0) == b"abcdef"


def test_close_waits_for_what_was_submitted(engine: Engine, file: int) -> None:
    outcomes = [begin(engine, Kind.WRITE, file, 0, unaligned(noise(20 * REQUEST))) for _ in range(4)]
    engine.close()
    assert [outcome.calls for outcome in outcomes] == [[None]] * 4


def test_submit_after_close_is_refused(engine: Engine, file: int) -> None:
    engine.close()
    engine.close()
    with pytest.raises(StoreClosedError, match=f"{engine.name} engine is closed: write of 3 bytes"):
        write(engine, file, 0, b"abc")


def test_threads_and_descriptors_are_gone_after_close(name: str, file: int) -> None:
    open_or_skip(name).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        engine = open_or_skip(name)
        assert write(engine, file, 0, noise(3 * REQUEST)) is None
        engine.close()
    assert io_threads() == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("buffer", [memoryview(b"read-only"), memoryview(bytearray(8))[::2]])
def test_unusable_buffer_is_refused(engine: Engine, file: int, buffer: memoryview) -> None:
    with pytest.raises(ValueError, match="writable, contiguous buffer of format 'B'"):
        begin(engine, Kind.WRITE, file, 0, buffer)


@pytest.mark.parametrize("queue_depth", [1, 2])
def test_small_queue_carries_many_requests(name: str, file: int, queue_depth: int) -> None:
    engine = open_or_skip(name, queue_depth=queue_depth, request_size=ALIGNMENT)
    content = noise(50 * ALIGNMENT + 7)
    assert write(engine, file, 0, content) is None
    engine.close()
    assert os.pread(file, len(content) + 1, 0) == content


@pytest.mark.parametrize("name", DIRECT_ENGINES)
def test_a_path_that_is_stuck_holds_up_no_other(name: str, file: int) -> None:
    """The worker of the one path does not come back from `done`; all else must have gone through meanwhile."""
    engine = open_or_skip(name, threads=1, queue_depth=1, request_size=ALIGNMENT)
    stuck, release = threading.Event(), threading.Event()

    def never_back(error: TransferError | None) -> None:
        stuck.set()
        release.wait(PATIENCE_SECONDS)

    engine.submit(Operation(Kind.WRITE, file, "the slow disk", 0, unaligned(b"slow"), False, never_back))
    assert stuck.wait(PATIENCE_SECONDS)
    behind = Outcome()
    engine.submit(Operation(Kind.WRITE, file, "the slow disk", 8, unaligned(b"slow"), False, behind))
    try:
        assert write(engine, file, ALIGNMENT, noise(20 * ALIGNMENT)) is None
        assert not behind.is_done
    finally:
        release.set()
    assert behind.wait() is None
    engine.close()


def test_a_path_that_is_stuck_takes_no_slot_of_another_with_aiofiles(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_or_skip("aiofiles", threads=1, queue_depth=1)
    release = threading.Event()
    transfer = AiofilesEngine._transfer

    async def get_stuck(self: AiofilesEngine, request: Request, executor: Executor) -> int:
        if request.operation.path == "the slow disk":
            await self._loop.run_in_executor(executor, release.wait, PATIENCE_SECONDS)
        return await transfer(self, request, executor)

    monkeypatch.setattr(AiofilesEngine, "_transfer", get_stuck)
    slow, fd = Outcome(), os.dup(file)  # never used at once: the slow one's turn comes after the other has ended
    engine.submit(Operation(Kind.WRITE, fd, "the slow disk", 0, unaligned(b"slow"), False, slow))
    try:
        assert write(engine, file, ALIGNMENT, b"fast") is None
        assert not slow.is_done
    finally:
        release.set()
    assert slow.wait() is None
    engine.close()
    os.close(fd)


def test_memory_lives_as_long_as_its_operation(engine: Engine, file: int) -> None:
    """The caller drops its only reference to the buffer right after `submit`."""
    contents = [noise(3 * REQUEST, seed) for seed in range(8)]
    outcomes = [
        begin(engine, Kind.WRITE, file, number * len(content), unaligned(content))
        for number, content in enumerate(contents)
    ]
    assert [outcome.wait() for outcome in outcomes] == [None] * 8
    assert os.pread(file, 8 * 3 * REQUEST, 0) == b"".join(contents)


def test_forked_child_may_not_submit_and_may_close(engine: Engine, file: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            write(engine, file, 0, b"abc")
        except ForkedStoreError:
            engine.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert write(engine, file, 0, b"abc") is None


# --- results that lie, for every engine


class Lies:
    """Replaces what the system said about the next calls; a count is only ever made smaller, which asks for more."""

    def __init__(self, engine: Engine, *lies: int) -> None:
        self.heard: list[int] = []
        self._lies = list(lies)
        self._truth = engine._accept
        engine._accept = self  # type: ignore[method-assign]

    def __call__(self, request: Request, result: int) -> bool:
        self.heard.append(result)
        return self._truth(request, min(self._lies.pop(0), result) if self._lies else result)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("lies", [(1,), (100, 1, 4000), (-errno.EINTR,) * 3, (-errno.EAGAIN, 7, -errno.EINTR, 1)])
def test_short_and_interrupted_transfers_are_continued(engine: Engine, file: int, kind: Kind, lies: tuple[int]) -> None:
    content = noise(10_000)
    os.pwrite(file, content if kind is Kind.READ else bytes(10_000), 3)
    buffer = unaligned(content if kind is Kind.WRITE else bytes(10_000))
    heard = Lies(engine, *lies).heard
    assert begin(engine, kind, file, 3, buffer).wait() is None
    assert (bytes(buffer), os.pread(file, 10_001, 3)) == (content, content)
    assert len(heard) == len(lies) + 1


def test_how_long_to_wait_is_a_time_at_every_line_of_a_request_that_begins_and_ends(name: str, file: int) -> None:
    """Asked between the lines by which a worker counts a request, an engine said: for ever, which no wait takes."""
    asked: list[float | None] = []

    def ask(frame: FrameType, event: str, _: object) -> Any:
        if event == "call" and frame.f_code.co_name not in ("begin_request", "end_request"):
            return None
        asked.append(engine.seconds_left())
        return ask

    threading.settrace(ask)
    try:
        engine = open_or_skip(name)
        engine.timeout_seconds = 60.0
        assert write(engine, file, 0, noise(4 * REQUEST)) is None
        engine.close()
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert len(asked) > 4 * 8
    assert all(left is None or 0.0 <= left <= PATIENCE_SECONDS for left in asked)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_late_error_is_reported_and_the_engine_goes_on(engine: Engine, file: int, code: int) -> None:
    Lies(engine, 1, 1, -code)
    error = write(engine, file, 0, noise(2 * REQUEST))
    assert isinstance(error, TransferError)
    assert error.errno == code
    assert os.strerror(code) in str(error)
    assert write(engine, file, 0, b"abc") is None


def test_endless_interruption_is_an_error_and_no_hang(engine: Engine, file: int) -> None:
    Lies(engine, *[-errno.EAGAIN] * FRUITLESS_LIMIT)
    error = write(engine, file, 0, b"abc")
    assert isinstance(error, TransferError)
    assert error.errno == errno.EAGAIN


def test_interruptions_between_which_bytes_move_are_no_error(engine: Engine, file: int) -> None:
    content = noise(10_000)
    Lies(engine, *([-errno.EINTR] * (FRUITLESS_LIMIT // 2) + [1]) * 4)
    assert write(engine, file, 0, content) is None
    assert os.pread(file, 10_001, 0) == content


def test_write_of_nothing_is_an_error(engine: Engine, file: int) -> None:
    Lies(engine, 2, 0)
    assert "the system wrote nothing at byte 12" in str(write(engine, file, 10, b"abcdef"))


def test_short_direct_transfer_continues_at_a_whole_block(direct_engine: Engine, direct_file: int) -> None:
    """A direct transfer may stop in the middle of a block, where the next one cannot begin."""
    content = noise(3 * ALIGNMENT)
    heard = Lies(direct_engine, ALIGNMENT + 512, 512).heard
    assert begin(direct_engine, Kind.WRITE, direct_file, 0, aligned(content), direct=True).wait() is None
    assert heard == [3 * ALIGNMENT, 2 * ALIGNMENT, 2 * ALIGNMENT]
    back = aligned(bytes(len(content)))
    assert begin(direct_engine, Kind.READ, direct_file, 0, back, direct=True).wait() is None
    assert bytes(back) == content


# --- faults, held requests


@pytest.fixture
def faulty() -> Iterator[FaultyEngine]:
    engine = FaultyEngine(request_size=ALIGNMENT)
    yield engine
    engine.release()
    engine.close()


@pytest.mark.parametrize("nth", [1, 3, 5])
def test_nth_request_fails_and_the_rest_is_not_begun(faulty: FaultyEngine, file: int, nth: int) -> None:
    faulty.fail(errno.EIO, nth=nth)
    error = write(faulty, file, 0, noise(5 * ALIGNMENT))
    assert f"write of {5 * ALIGNMENT} bytes at offset 0 failed at byte {(nth - 1) * ALIGNMENT}" in str(error)
    assert faulty.requests == nth


def test_fault_of_one_kind_spares_the_other(faulty: FaultyEngine, file: int) -> None:
    faulty.fail(kind=Kind.READ, times=None)
    assert write(faulty, file, 0, b"abc") is None
    assert begin(faulty, Kind.READ, file, 0, unaligned(bytes(3))).wait() is not None
    faulty.heal()
    assert begin(faulty, Kind.READ, file, 0, unaligned(bytes(3))).wait() is None


def test_every_call_short_and_some_interrupted_moves_every_byte(faulty: FaultyEngine, file: int) -> None:
    faulty.shorten(1000)
    faulty.interrupt(5)
    content = noise(3 * ALIGNMENT + 11)
    assert write(faulty, file, 0, content) is None
    assert os.pread(file, len(content) + 1, 0) == content
    assert faulty.requests == 5 + 3 * 5 + 1


def test_something_else_than_a_system_error_is_reported_too(file: int) -> None:
    class Broken(FaultyEngine):
        def transfer(self, request: Request) -> int:
            raise MemoryError("none left")

    engine = Broken()
    error = write(engine, file, 0, b"abc")
    engine.close()
    assert isinstance(error, TransferError)
    assert isinstance(error.__cause__, MemoryError)


def test_close_waits_for_a_held_request(faulty: FaultyEngine, file: int) -> None:
    order: list[str] = []
    faulty.hold()
    buffer = unaligned(b"abc")
    faulty.submit(Operation(Kind.WRITE, file, "the file", 0, buffer, False, lambda error: order.append("done")))
    faulty.wait_until_held()
    closer = threading.Thread(target=lambda: (faulty.close(), order.append("closed")))
    closer.start()
    assert order == []
    faulty.release()
    closer.join(PATIENCE_SECONDS)
    assert order == ["done", "closed"]


def test_operations_begin_in_the_order_they_were_submitted(faulty: FaultyEngine, file: int) -> None:
    ended: list[int] = []
    faulty.hold()
    for number in range(10):
        buffer = unaligned(b"x")
        done = lambda error, number=number: ended.append(number)  # noqa: E731
        faulty.submit(Operation(Kind.WRITE, file, "the file", 0, buffer, False, done))
    faulty.release()
    faulty.close()
    assert ended == list(range(10))


def test_operation_is_not_done_while_a_request_of_it_may_touch_its_memory(file: int) -> None:
    """One request fails at once while three of the same operation are still on their way."""
    engine = FaultyEngine(threads=4, request_size=ALIGNMENT)
    engine.hold()
    outcome = begin(engine, Kind.WRITE, file, 0, unaligned(noise(4 * ALIGNMENT)))
    engine.wait_until_held(4)
    engine.fail()
    assert not outcome.is_done
    engine.release()
    assert outcome.wait() is not None
    engine.close()
    assert engine.requests == 4


# --- opening by name


def test_auto_is_threads_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tierstore.io"):
        engine = open_or_skip("auto")
    engine.close()
    assert engine.name == "threads"
    assert "io engine auto: threads" in caplog.text


def test_auto_is_aiofiles_without_positioned_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, file: int
) -> None:
    monkeypatch.delattr(os, "preadv")
    with caplog.at_level(logging.INFO, "tierstore.io"):
        engine = open_or_skip("auto")
    assert write(engine, file, 5, b"abc") is None
    engine.close()
    assert engine.name == "aiofiles"
    assert "io engine auto: aiofiles" in caplog.text
    with pytest.raises(EngineUnavailableError, match="preadv"):
        open_engine("threads", threads=1, queue_depth=1, request_size=None)


@pytest.mark.parametrize(("given", "meant"), [("thread", "threads"), ("aio", "libaio"), ("aiofile", "aiofiles")])
def test_unknown_engine_names_the_nearest(given: str, meant: str) -> None:
    with pytest.raises(PolicyError, match=f"tiers.nvme.io.engine is '{given}'.*'{meant}'"):
        open_or_skip(given)


@pytest.mark.parametrize(
    "numbers",
    [{"threads": 0}, {"queue_depth": 0}, {"request_size": 0}, {"request_size": 5000}, {"request_size": -4096}],
)
def test_number_out_of_range_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(PolicyError, match=f"tiers.nvme.io.{next(iter(numbers))} is {next(iter(numbers.values()))}"):
        open_or_skip("threads", **numbers)


def test_defaults_carry_an_operation(name: str, file: int) -> None:
    engine = open_or_skip(name, threads=None, queue_depth=None, request_size=None)
    assert write(engine, file, 0, b"abc") is None
    engine.close()


def test_aiofiles_refuses_direct_operations(direct_file: int) -> None:
    engine = open_or_skip("aiofiles")
    with pytest.raises(PolicyError, match=r"tiers\.nvme\.io\.direct"):
        begin(engine, Kind.WRITE, direct_file, 0, aligned(bytes(ALIGNMENT)), direct=True)
    engine.close()


# --- libaio that is missing or exhausted


def test_libaio_without_its_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libaio", None)
    with pytest.raises(EngineUnavailableError, match="pip install"):
        open_engine("libaio", threads=None, queue_depth=8, request_size=None)


def test_libaio_without_the_systems_library_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libaio.py").write_text("raise OSError('libaio.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "libaio", raising=False)
    with pytest.raises(EngineUnavailableError, match=r"install libaio1.*engine to threads"):
        open_engine("libaio", threads=None, queue_depth=8, request_size=None)


def test_libaio_beyond_the_kernels_limit_is_a_clear_error() -> None:
    open_or_skip("libaio").close()
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    with pytest.raises(EngineUnavailableError, match=rf"of {limit} are in use.*fs\.aio-max-nr"):
        open_engine("libaio", threads=None, queue_depth=limit + 1, request_size=None)
    assert io_threads() == []


class Reluctant:
    """A kernel's context that refuses some submissions; `in_kernel` notes how many requests it had at each."""

    def __init__(self, engine: Engine, *codes: int) -> None:
        self.in_kernel: list[int] = []
        engine.prepare("the file")
        self._lane: Any = engine._lanes["the file"]
        self._codes = list(codes)
        self._submit = self._lane._context.submit
        self._lane._context.submit = self

    def __call__(self, blocks: list[object]) -> int:
        self.in_kernel.append(len(self._lane._in_kernel))
        if self._codes and (code := self._codes.pop(0)):
            raise OSError(code, "io_submit")
        return int(self._submit(blocks))


def test_libaio_never_has_more_in_the_kernel_than_its_queue_is_deep(file: int) -> None:
    engine = open_or_skip("libaio", queue_depth=3, request_size=ALIGNMENT)
    reluctant = Reluctant(engine)
    assert write(engine, file, 0, noise(40 * ALIGNMENT)) is None
    engine.close()
    assert max(reluctant.in_kernel) <= 3


@pytest.mark.parametrize("codes", [(errno.EAGAIN,), (0, errno.EAGAIN, 0, 0, errno.EAGAIN), (errno.EAGAIN,) * 5])
def test_libaio_whose_kernel_has_no_room_tries_again(file: int, codes: tuple[int, ...]) -> None:
    engine = open_or_skip("libaio", request_size=ALIGNMENT)
    Reluctant(engine, *codes)
    content = noise(20 * ALIGNMENT + 5)
    assert write(engine, file, 0, content) is None
    engine.close()
    assert os.pread(file, len(content) + 1, 0) == content


@pytest.mark.parametrize("codes", [(errno.EINVAL,), (0, 0, errno.EBADF), (errno.EAGAIN,) * FRUITLESS_LIMIT])
def test_libaio_whose_kernel_refuses_reports_it(file: int, codes: tuple[int, ...]) -> None:
    engine = open_or_skip("libaio", request_size=ALIGNMENT, queue_depth=1)
    Reluctant(engine, *codes)
    error = write(engine, file, 0, noise(5 * ALIGNMENT))
    assert isinstance(error, TransferError)
    assert error.errno == codes[-1]
    assert write(engine, file, 0, b"abc") is None
    engine.close()


def test_importing_the_engines_imports_no_optional_package() -> None:
    code = "import sys, tierstore.io; print({'libaio', 'aiofiles', 'asyncio'} & set(sys.modules))"
    assert run(code).stdout == "set()\n"


@pytest.mark.parametrize("ending", ["", "engine.close()", "os.fork()", "engine.close(); os.fork()"])
def test_process_ends_in_silence_with_an_engine_in_use(name: str, tmp_path: Path, ending: str) -> None:
    """Forgotten, closed or forked: no hang, no message, no abort."""
    open_or_skip(name).close()
    code = f"""
import os
from tierstore.io import *
fd = os.open({str(tmp_path / "file")!r}, os.O_RDWR | os.O_CREAT)
engine = open_engine({name!r}, threads=2, queue_depth=4, request_size=4096)
for _ in range(20):
    engine.submit(Operation(Kind.WRITE, fd, "", 0, memoryview(bytearray(40960)), False, lambda error: None))
{ending}
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")
