"""Disks that do not answer: the step says so, nobody waits for them, and nothing is used in which they may write."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.fakes import PATIENCE_SECONDS, FaultyEngine, HangingEngine
from tests.optimizer.cases import (
    KIB,
    assert_same_parameters,
    assert_state_is_lost,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
)
from tests.optimizer.test_faults import Run, assert_telling
from tierstore.errors import (
    CapacityError,
    EngineUnavailableError,
    FailedStepError,
    TierstoreError,
    TransferTimeoutError,
)
from tierstore.io import open_engine
from tierstore.io.base import Kind
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


class HangingRun(Run):
    """A training run on an engine whose requests hang when they are held, and never else."""

    engine_class: ClassVar[type[FaultyEngine]] = HangingEngine

    def step_to_the_end(self) -> None:
        """Take a step, and wait for what it moved."""
        self.step()
        self.optimizer.store.wait()

    def quarantined(self) -> dict[str, int]:
        tiers = self.optimizer.store.stats().tiers
        return {name: tier.quarantined_bytes // (16 * KIB) for name, tier in tiers.items() if tier.quarantined_bytes}

    def finish(self, saved: Any) -> None:
        """Go on after a hang, as a user would, until a step is done."""
        for tier in self.quarantined():  # tiers of no more than it takes
            extents = self.optimizer.store.setup.tiers[tier].arena.capacity + 1
            self.optimizer.store.resize(tier, extents * 16 * KIB)
        try:
            self.step()
        except TierstoreError:
            self.optimizer.store.check()
            self.resume(saved)
            self.step()

    def come_back(self) -> None:
        """Let go of what hangs, and wait until the system has."""
        self.engine.release()
        self.engine.wait_until_back()

    def wait_until_late(self, count: int) -> None:
        """Let go of what hangs and wait until it has come back."""
        workers = [one for one in threading.enumerate() if one.name.startswith("tierstore-io")]
        self.engine.release()
        for worker in workers:
            worker.join(PATIENCE_SECONDS)
        assert self.engine.late == count


def attempt(use: Callable[[], None]) -> TierstoreError | None:
    """Do something; give its error if it has one."""
    try:
        use()
    except TierstoreError as error:
        return error
    return None


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HangingRun]:
    made = HangingRun(tmp_path, threads=3)
    yield made
    made.engine.release()
    made.optimizer.close()


@pytest.mark.parametrize(
    ("tiers", "every"),
    [
        ("cpu nvme", 5),
        pytest.param("cpu nvme", 1, marks=pytest.mark.long),
        pytest.param("gpu cpu nvme", 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("kind", Kind)
def test_whichever_request_of_a_step_hangs_nothing_is_lost_and_training_goes_on(
    kind: Kind, tiers: str, every: int, tmp_path: Path
) -> None:
    """The request comes back only after all else, with what it should have brought long ago, and harms nobody."""
    nth, hung = 1, 0
    while nth == 1 + hung * every:
        run = HangingRun(tmp_path, tiers, threads=3)
        saved = run.save()
        run.engine.hold(nth=nth, times=1, kind=kind)
        error = attempt(run.step_to_the_end)
        run.optimizer.store.check()
        hung += (has_hung := run.optimizer.store.stats().io.timed_out)
        if has_hung:
            assert run.quarantined() == {"nvme" if kind is Kind.WRITE else "cpu": 1}
        if error is None:  # of a write that hung, what others had answered since: it was done elsewhere
            assert kind is Kind.WRITE or not has_hung
        else:
            assert isinstance(error, TransferTimeoutError)
            assert_telling(error, tmp_path, errno.ETIMEDOUT)
            run.finish(saved)
            run.assert_right()
            io = run.optimizer.store.stats().io
            assert (io.timed_out, io.late) == (1, 0)
        run.optimizer.close()
        run.wait_until_late(has_hung)
        nth += every
    assert nth > 9


def test_late_read_arrives_where_nobody_is(run: HangingRun, tmp_path: Path) -> None:
    saved = run.save()
    run.engine.hold(times=1, kind=Kind.READ)
    with pytest.raises(TransferTimeoutError):
        run.step_to_the_end()
    (request,) = run.engine.held
    request.operation.buffer[:] = b"\x77" * len(request.operation.buffer)
    run.finish(saved)
    run.finish(saved)
    assert bytes(request.operation.buffer) == b"\x77" * len(request.operation.buffer), "its extent was used"
    run.come_back()
    run.finish(saved)
    run.assert_right()
    assert run.quarantined() == {}


def test_late_write_arrives_where_nobody_is(run: HangingRun) -> None:
    saved = run.save()
    run.engine.hold(times=1, kind=Kind.WRITE)
    error = attempt(run.step_to_the_end)  # None where it was done elsewhere
    assert error is None or isinstance(error, TransferTimeoutError)
    (request,) = run.engine.held
    operation, length = request.operation, len(request.operation.buffer)
    run.finish(saved)
    run.optimizer.store.wait()
    before = pread_unaligned(operation.fd, length, operation.offset)
    for _ in range(3):
        run.finish(saved)
        run.optimizer.store.wait()
        assert pread_unaligned(operation.fd, length, operation.offset) == before, "its extent was used"
    run.come_back()
    run.finish(saved)
    run.assert_right()
    assert run.quarantined() == {}


@pytest.mark.parametrize("kind", Kind)
def test_what_a_hang_has_cost_is_there_again_once_its_request_is_back(run: HangingRun, kind: Kind) -> None:
    """Tiers of no more than it takes stayed too small for a step for good, and files one extent short for each hang."""
    before = {name: tier.capacity_bytes for name, tier in run.optimizer.store.stats().tiers.items()}
    saved = run.save()
    run.engine.hold(times=1, kind=kind)
    error = attempt(run.step_to_the_end)
    assert isinstance(error, TransferTimeoutError) or (error is None and kind is Kind.WRITE)
    if kind is Kind.READ:
        assert isinstance(attempt(lambda: run.resume(saved)), CapacityError)
    run.come_back()
    if run.optimizer.store.broken_off is not None:
        run.resume(saved)
    for _ in range(3):
        run.step()
    run.assert_right()
    after = {name: tier.capacity_bytes for name, tier in run.optimizer.store.stats().tiers.items()}
    assert run.quarantined() == {} and all(after[name] >= before[name] for name in before)
    assert after["cpu"] == before["cpu"]


def test_a_load_for_which_a_hang_has_left_no_room_is_made_again_before_any_step(
    run: HangingRun, tmp_path: Path
) -> None:
    """It left no state, and the next step that found room began it anew, to other numbers."""
    run.optimizer.save_checkpoint(tmp_path / "saved")
    saved = [parameter.detach().clone() for parameter in run.parameters]
    run.engine.hold(times=1, kind=Kind.READ)
    with pytest.raises(TransferTimeoutError):
        run.step_to_the_end()
    with torch.no_grad():
        for parameter, value in zip(run.parameters, saved, strict=True):
            parameter.copy_(value)
    with pytest.raises(CapacityError):
        run.optimizer.load_checkpoint(tmp_path / "saved")
    run.come_back()
    with pytest.raises(FailedStepError, match=r"loading .*saved broke off"):
        run.step()
    with pytest.raises(FailedStepError):
        run.optimizer.save_checkpoint(tmp_path / "saved")
    assert all(map(torch.equal, run.parameters, saved))
    run.optimizer.load_checkpoint(tmp_path / "saved")
    run.step()
    run.assert_right()


@pytest.mark.parametrize("way_out", ["load_checkpoint", "load_state_dict"])
def test_state_that_a_load_without_room_has_lost_is_not_passed_off_as_none(
    run: HangingRun, tmp_path: Path, way_out: str
) -> None:
    """Who caught the error and saved the state dict replaced a good file by an empty one."""
    run.optimizer.save_checkpoint(tmp_path / "saved")
    saved = run.save()
    run.engine.hold(times=1, kind=Kind.READ)
    with pytest.raises(TransferTimeoutError):
        run.step_to_the_end()
    with pytest.raises(CapacityError):
        run.optimizer.load_checkpoint(tmp_path / "saved")
    assert_state_is_lost(run.optimizer, r"loading .*saved broke off .* load a checkpoint or a state dict")
    run.come_back()
    if way_out == "load_checkpoint":
        with torch.no_grad():
            for parameter, value in zip(run.parameters, saved[0], strict=True):
                parameter.copy_(value)
        run.optimizer.load_checkpoint(tmp_path / "saved")
    else:
        run.resume(saved)
    run.assert_right()
    run.step()
    run.assert_right()


def pread_unaligned(fd: int, length: int, offset: int) -> bytes:
    """Read a file that is open for direct I/O, past its descriptor."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        return os.pread(other, length, offset)
    finally:
        os.close(other)


def test_state_is_read_again_where_the_late_request_does_not_arrive(run: HangingRun, tmp_path: Path) -> None:
    run.optimizer.store.wait()
    run.engine.hold(times=1)
    with pytest.raises(TransferTimeoutError) as caught:
        run.optimizer.state_dict()
    assert "from nvme to host failed; nothing is lost" in str(caught.value) and "chunk" in str(caught.value)
    (request,) = run.engine.held
    late = request.operation.buffer
    late[:] = b"\x77" * len(late)
    run.assert_right()
    assert bytes(late) == b"\x77" * len(late), "it was read into again"
    run.engine.release()
    run.assert_right()


def test_closing_leaves_file_and_memory_to_a_request_that_hangs_until_it_is_back(run: HangingRun) -> None:
    run.engine.hold(times=1)
    run.optimizer.store.send_home([chunk for chunk in range(12) if run.optimizer.store.tier_of(chunk) == "cpu"])
    run.engine.wait_until_held()
    (request,) = run.engine.held
    fd, path = request.operation.fd, request.operation.path
    run.optimizer.close()
    assert os.fstat(fd).st_nlink == 0 and path in request.operation.path
    assert len(bytes(request.operation.buffer)) == len(request.operation.buffer)
    del request
    run.wait_until_late(1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_tier_is_not_made_smaller_than_what_may_still_be_written_to(run: HangingRun) -> None:
    store = run.optimizer.store
    store.resize("cpu", 12 * 16 * KIB)
    store.send_home(range(12))
    store.wait()
    run.engine.hold(nth=12, times=1, kind=Kind.READ)
    store.fetch(range(12))
    with pytest.raises(TransferTimeoutError):
        store.wait()
    with pytest.raises(CapacityError, match="tier cpu stays 12 extents large instead of 4"):
        store.resize("cpu", 4 * 16 * KIB)
    store.check()
    run.finish(run.save())
    run.assert_right()


# -- a real disk that does not answer


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a filesystem of its own, which is thawed in the end."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    commands = [["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]]
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no filesystem can be mounted here: {error}")
    thaws = "timeout 60 cat; fsfreeze -u $0"  # whatever becomes of this process, which could not even be killed
    with subprocess.Popen(["sh", "-c", thaws, str(folder)], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL):
        yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


@pytest.mark.parametrize("engine", ["threads", "libaio", "aiofiles"])
def test_a_disk_that_is_frozen_holds_nobody_up_and_goes_on_when_it_thaws(frozen_disk: Path, engine: str) -> None:
    open_or_skip(engine)
    back = Returned()
    policy = small_policy(frozen_disk)
    policy["tiers"]["nvme"]["io"] = {"engine": engine, "timeout": "0.2s"}
    ours, theirs = seeded((40_000,)), seeded((40_000,))
    optimizer, reference = TieredAdamW(ours, lr=1e-2, policy=policy), torch.optim.AdamW(theirs, lr=1e-2, fused=True)

    def step(count: int) -> None:
        set_gradients(theirs, count)
        reference.step()
        set_gradients(ours, count)
        optimizer.step()

    def send_all_home() -> None:
        store = optimizer.store
        store.send_home([chunk for chunk in range(20) if store.holds(chunk) and store.tier_of(chunk) == "cpu"])

    step(0)
    optimizer.store.wait()
    freeze(frozen_disk)
    send_all_home()
    with pytest.raises(TransferTimeoutError, match=r"chunk \d+ \(param\.0\[.*nothing is lost"):
        optimizer.store.wait()
    optimizer.store.check()
    assert optimizer.store.stats().tiers["nvme"].quarantined_bytes > 0
    thaw(frozen_disk)
    back.wait(optimizer.store.stats().io.timed_out)
    assert optimizer.store.stats().tiers["nvme"].quarantined_bytes == 0
    step(1)
    found, wanted = optimizer.state_dict()["state"][0], reference.state_dict()["state"][0]
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
    assert_same_parameters(ours, theirs)
    freeze(frozen_disk)
    send_all_home()
    optimizer.close()
    assert any(thread.name.startswith("tierstore-io") for thread in threading.enumerate())
    thaw(frozen_disk)
    join_workers()


class Returned(logging.Handler):
    """Hears of requests that have come back late."""

    def __init__(self) -> None:
        super().__init__()
        self._back = threading.Semaphore(0)
        logging.getLogger("tierstore.io").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "has come back after all" in record.getMessage():
            self._back.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._back.acquire(timeout=PATIENCE_SECONDS)
        logging.getLogger("tierstore.io").removeHandler(self)


def open_or_skip(engine: str) -> None:
    try:
        open_engine(engine, threads=None, queue_depth=None, request_size=None).close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))


def freeze(folder: Path) -> None:
    subprocess.run(["fsfreeze", "-f", str(folder)], check=True)


def thaw(folder: Path) -> None:
    subprocess.run(["fsfreeze", "-u", str(folder)], check=True)


def join_workers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tierstore-io"):
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
