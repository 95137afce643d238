"""Disks that fail: never a silently wrong number, nothing lost that can still be read, and a way on to the bit.

A fault is told of by an error that names chunk, parameter, file and errno; the step can be repeated, or it has broken
off half-way and is refused until parameters and state are loaded.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import FaultyEngine
from tests.optimizer.cases import (
    KIB,
    MIB,
    assert_same_parameters,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    train,
)
from tierstore.build import Parts
from tierstore.device import HostDevice
from tierstore.errors import DiskFullError, FailedStepError, TierstoreError, TransferError
from tierstore.io.base import Kind
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

SHAPES: list[tuple[int, ...]] = [(19_000,), (50,), (13_000,), (31,)]
TIERS = pytest.mark.parametrize("tiers", ["cpu nvme", "gpu cpu nvme"])


class Run:
    """A training run on an engine that can be made to fail, beside torch's, which cannot."""

    engine_class: ClassVar[type[FaultyEngine]] = FaultyEngine
    io: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, tiers: str = "cpu nvme", threads: int = 1) -> None:
        engines: list[FaultyEngine] = []

        def open_engine(*_: Any, **__: Any) -> FaultyEngine:
            engines.append(self.engine_class(threads=threads, request_size=16 * KIB))
            return engines[-1]

        class OnFaultyDisk(TieredAdamW):
            parts: ClassVar[Parts] = Parts(open_engine=open_engine)

        self.parameters: list[nn.Parameter] = seeded(*SHAPES)
        policy = small_policy(folder, tiers.split())
        policy["tiers"]["nvme"]["io"] = self.io
        self.optimizer = OnFaultyDisk(self.parameters, lr=1e-2, policy=policy)
        self.theirs = seeded(*SHAPES)
        self.reference = torch.optim.AdamW(self.theirs, lr=1e-2, fused=True)
        self.count = 0
        self.step()
        self.step()
        self.engine = engines[0]
        self.optimizer.store.wait()

    def step(self) -> None:
        """Take the next step; it counts for the reference when it is done."""
        set_gradients(self.parameters, self.count)
        self.optimizer.step()
        set_gradients(self.theirs, self.count)
        self.reference.step()
        self.count += 1
        self.optimizer.store.check()

    def save(self) -> tuple[list[Tensor], dict[str, Any]]:
        return [parameter.detach().clone() for parameter in self.parameters], self.optimizer.state_dict()

    def resume(self, saved: tuple[list[Tensor], dict[str, Any]]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, saved[0], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(saved[1])

    def assert_right(self) -> None:
        assert_same_parameters(self.parameters, self.theirs, f"after {self.count} steps")
        found, wanted = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
        assert all(same_bits(found[key][n], v) for key, fields in wanted.items() for n, v in fields.items())
        self.optimizer.store.check()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.engine.heal()
    made.engine.release()
    made.optimizer.close()


def assert_telling(error: BaseException, folder: Path, code: int = errno.EIO) -> None:
    """The error names chunk, parameters, file, errno and what has become of the bytes."""
    assert isinstance(error, TransferError) and isinstance(error, OSError)
    assert error.errno == code and str(folder) in str(error.filename)
    assert re.search(r"chunk \d+ \(param\.\d\[\d+:\d+\]", str(error)), error
    assert re.search(r"from (nvme|cpu) to (cpu|nvme|host)", str(error)), error


def attempt(run: Run) -> TierstoreError | None:
    """Take a step; give its error if it has one."""
    try:
        run.step()
    except TierstoreError as error:
        return error
    return None


# -- reads --------------------------------------------------------------------------------------------------------


def test_a_step_whose_first_read_fails_has_changed_nothing_and_can_be_repeated(run: Run, tmp_path: Path) -> None:
    send_all_home(run)
    run.optimizer.store.wait()
    before = run.save()
    run.engine.spoil(kind=Kind.READ)
    for _ in range(2):  # as long as it cannot be read
        error = attempt(run)
    assert error is not None and run.optimizer.store.broken_off is None
    assert_telling(error, tmp_path)
    run.engine.heal()
    after = run.save()
    assert_same_parameters(after[0], before[0])
    assert all(same_bits(after[1]["state"][k][n], v) for k, f in before[1]["state"].items() for n, v in f.items())
    run.step()
    run.assert_right()


@TIERS
def test_requests_that_move_only_a_part_are_continued(tiers: str, tmp_path: Path) -> None:
    run = Run(tmp_path, tiers)
    for most in (4096, 8192, 12288):
        run.engine.shorten(most)
        run.step()
    run.engine.interrupt(5)
    run.step()
    run.assert_right()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENODEV])
def test_a_disk_that_is_gone_and_comes_back_can_be_trained_on_again(code: int, run: Run, tmp_path: Path) -> None:
    saved = run.save()
    run.engine.fail(code, times=None)
    errors = [attempt(run) for _ in range(4)]
    for error in errors:
        assert error is not None
        if not isinstance(error, FailedStepError):
            assert_telling(error, tmp_path, code)
    run.engine.heal()
    if run.optimizer.store.broken_off is not None:
        run.resume(saved)
    while attempt(run) is not None:  # what had failed in the meantime is told once
        pass
    run.assert_right()


def test_an_end_of_file_where_bytes_should_be_is_an_error(run: Run, tmp_path: Path) -> None:
    """CASES 10: a swap file that is shorter than it should be."""
    saved = run.save()
    run.engine.shorten(0)
    error = attempt(run)
    assert error is not None
    assert_telling(error, tmp_path)
    run.engine.heal()
    if run.optimizer.store.broken_off is not None:
        run.resume(saved)
    while attempt(run) is not None:
        pass
    run.assert_right()


@TIERS
def test_a_truncated_swap_file_is_an_error_and_loading_puts_it_right(tiers: str, tmp_path: Path) -> None:
    """The old bytes are gone for good: a load that looked at them first could never succeed."""
    run = Run(tmp_path, tiers)
    saved = run.save()
    send_all_home(run)  # so that nothing is written, which would lengthen the file again, before it is read
    run.optimizer.store.wait()
    os.ftruncate(run.optimizer.store.setup.tiers["nvme"].files[0].fd, 0)  # type: ignore[attr-defined]
    for _ in range(3):
        error = attempt(run)
        assert isinstance(error, TransferError | FailedStepError)
    with pytest.raises(TransferError):
        run.optimizer.state_dict()
    run.resume(saved)
    run.step()
    run.step()
    run.assert_right()


# -- write-backs ------------------------------------------------------------------------------------------------


def send_all_home(run: Run) -> None:
    binding, _ = run.optimizer.bound()
    run.optimizer.store.send_home([chunk.number for chunk in binding.layout.chunks])


@pytest.mark.parametrize("next_call", ["step", "wait"])
def test_a_write_back_that_fails_after_the_step_is_done_elsewhere_by_the_next_call(
    next_call: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.step()
    run.optimizer.store.wait()
    run.engine.hold()
    run.engine.spoil(kind=Kind.WRITE)
    send_all_home(run)
    run.engine.wait_until_held()
    run.engine.release()
    if next_call == "step":
        run.step()
    else:
        run.optimizer.store.wait()
    assert "nothing is lost" in caplog.text and "extents more in" in caplog.text
    assert run.optimizer.store.setup.tiers["nvme"].arena.quarantined == 1
    run.assert_right()


def test_state_can_be_read_and_saved_while_a_write_back_fails(run: Run, tmp_path: Path) -> None:
    before = run.save()
    run.engine.fail(kind=Kind.WRITE, times=None)
    send_all_home(run)
    after = run.save()
    assert all(same_bits(after[1]["state"][k][n], v) for k, f in before[1]["state"].items() for n, v in f.items())
    run.engine.heal()
    error = attempt(run)
    assert error is None or run.optimizer.store.broken_off is None
    while error is not None:
        assert_telling(error, tmp_path)
        error = attempt(run)
    run.assert_right()


def test_a_load_that_fails_on_the_way_is_made_again_before_anything_else(run: Run) -> None:
    saved = run.save()
    run.step()
    run.optimizer.store.wait()
    run.engine.fail(times=None)
    with pytest.raises(TransferError):
        run.resume(saved)
    for _ in range(2):
        with pytest.raises(TransferError):
            run.optimizer.step()  # not a step on half of two states
    run.engine.heal()
    assert len(run.optimizer.state) == len(SHAPES)
    resumed = run.optimizer.state_dict()["state"]
    assert all(same_bits(resumed[k][n], v) for k, fields in saved[1]["state"].items() for n, v in fields.items())


# -- steps that break off ---------------------------------------------------------------------------------------


class Interrupting(HostDevice):
    """A stand-in whose nth launch raises what Ctrl-C raises."""

    def __init__(self) -> None:
        super().__init__("stand-in")
        self.left: int | None = None

    def launch(self, work: Callable[[], None]) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        super().launch(work)


def test_an_interrupted_step_says_what_was_done_and_is_not_passed_off_as_done(tmp_path: Path) -> None:
    device = Interrupting()

    class Interrupted(TieredAdamW):
        parts: ClassVar[Parts] = Parts(open_device=lambda *_: device)

    parameters, theirs = seeded(*SHAPES), seeded(*SHAPES)
    names = ["wide", "short", "long", "tiny"]
    policy = small_policy(tmp_path, ["gpu", "cpu", "nvme"], order="fixed")
    optimizer = Interrupted(zip(names, parameters, strict=True), lr=1e-2, policy=policy)
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(optimizer, parameters, range(2))
    train(reference, theirs, range(2))
    weights, saved = [parameter.detach().clone() for parameter in parameters], optimizer.state_dict()
    device.left = 2  # launches, each of a few chunks: as many as have landed by then
    set_gradients(parameters, 2)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    assert "Updated:" in caught.value.__notes__[0]
    device.left = None
    with pytest.raises(FailedStepError) as refused:
        optimizer.step()
    story = str(refused.value)
    updated = [name for name, now, was in zip(names, parameters, weights, strict=True) if not torch.equal(now, was)]
    told = set(re.findall(r"wide|short|long|tiny", story.split("all others not")[0]))
    assert updated and set(updated) <= told
    optimizer.store.check()
    with torch.no_grad():
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(saved)
    train(optimizer, parameters, range(2, 4))
    train(reference, theirs, range(2, 4))
    assert_same_parameters(parameters, theirs)


def test_parameters_may_not_be_changed_while_a_step_is_broken_off(run: Run) -> None:
    saved = run.save()
    run.engine.fail(times=None, nth=6)
    while run.optimizer.store.broken_off is None:
        assert attempt(run) is not None
    run.engine.heal()
    run.optimizer.param_groups[0]["amsgrad"] = True
    set_gradients(run.parameters, 9)
    with pytest.raises(FailedStepError, match="load parameters and state"):
        run.optimizer.step()
    run.optimizer.param_groups[0]["amsgrad"] = False
    run.resume(saved)
    run.step()
    run.assert_right()


# -- full disks -------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts filesystems of a size, or skips."""
    mounted: list[Path] = []

    def mount(nbytes: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def used(folder: Path) -> int:
    space = os.statvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def _sizes(need: int) -> Sequence[int]:
    return [need * percent // 100 // 4096 * 4096 for percent in (5, 50, 90, 100, 104, 106, 110, 130)]


def test_a_disk_too_small_for_the_state_is_refused_before_training_and_left_as_it_was(
    small_disk: Callable[[int], Path],
) -> None:
    """CASES 9: a peer went on training with silently wrong losses."""
    theirs = seeded((400_000,))
    train(torch.optim.AdamW(theirs, fused=True), theirs, range(2))
    outcomes = []
    for size in _sizes(400_000 * 8):
        folder = small_disk(size)
        before = used(folder)
        parameters = seeded((400_000,))
        weights = parameters[0].detach().clone()
        optimizer, story = None, None
        try:
            optimizer = TieredAdamW(parameters, policy=small_policy(folder, chunk=64 * KIB))
        except DiskFullError as error:
            story = str(error)
        outcomes.append("trained" if story is None else "refused")
        if optimizer is not None:
            train(optimizer, parameters, range(2))
            assert_same_parameters(parameters, theirs)
            optimizer.close()
        else:
            assert story is not None
            numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", story)]
            assert size - before in numbers and max(numbers) > 3 * MIB, story  # free, and needed
            assert used(folder) == before
            assert same_bits(parameters[0], weights)
        assert used(folder) == before
    assert outcomes == sorted(outcomes) and {"refused", "trained"} == set(outcomes)


def test_a_disk_too_small_for_results_does_not_stop_training(small_disk: Callable[[int], Path]) -> None:
    """The state lies there, but a copy of it would not: saving fails with the numbers, and training goes on."""
    folder = small_disk(5 * MIB)
    parameters, theirs = seeded((400_000,)), seeded((400_000,))
    reference = torch.optim.AdamW(theirs, fused=True)
    optimizer = TieredAdamW(parameters, policy=small_policy(folder, chunk=64 * KIB))
    train(optimizer, parameters, range(2))
    before = used(folder)
    with pytest.raises(DiskFullError):
        optimizer.state_dict()
    assert used(folder) == before
    optimizer.store.check()
    train(optimizer, parameters, [2])
    train(reference, theirs, range(3))
    assert_same_parameters(parameters, theirs)
