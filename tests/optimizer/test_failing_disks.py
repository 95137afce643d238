"""Whole disks that fail or fill: training goes on to the bit on what is left, or says so before anything is changed."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.fakes import FaultyEngine
from tests.optimizer.cases import KIB, MIB, assert_same_parameters, same_bits, seeded, small_policy, train
from tests.unit.conftest import small_disk
from tierstore.build import Parts
from tierstore.errors import DiskFullError, PartialStateWarning, TransferError
from tierstore.io.base import Kind, Operation
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")
__all__ = ["small_disk"]

ELEMENTS = 65_000


class TwoDisks:
    """Training with its state on two disks that can be broken, beside torch's."""

    def __init__(self, folder: Path) -> None:
        self.engine = engine = FaultyEngine()
        self.folders = [folder / "one", folder / "two"]
        for each in self.folders:
            each.mkdir()

        class OnFaultyDisks(TieredAdamW):
            parts: ClassVar[Parts] = Parts(open_engine=lambda *_, **__: engine)

        policy = small_policy(folder, chunk=16 * KIB)
        policy["tiers"]["nvme"]["paths"] = [str(each) for each in self.folders]
        self.parameters: list[nn.Parameter] = seeded((ELEMENTS,), (31,))
        self.optimizer = OnFaultyDisks(self.parameters, lr=1e-2, policy=policy)
        self.theirs = seeded((ELEMENTS,), (31,))
        self.reference = torch.optim.AdamW(self.theirs, lr=1e-2, fused=True)
        self.count = 0
        self.step()
        self.step()

    def step(self) -> None:
        train(self.optimizer, self.parameters, [self.count])
        train(self.reference, self.theirs, [self.count])
        self.count += 1
        assert_same_parameters(self.parameters, self.theirs, self.count)
        self.optimizer.store.check()

    def break_second(self, code: int, kind: Kind | None = None) -> None:
        assert self.second.used_bytes > 0
        self.engine.break_path(str(self.folders[1]), code, kind=kind)

    @property
    def second(self) -> Any:
        return self.optimizer.store.stats().paths[str(self.folders[1])]

    def assert_right(self) -> None:
        found, wanted = self.optimizer.state_dict()["state"], self.reference.state_dict()["state"]
        assert all(same_bits(found[key][n], v) for key, fields in wanted.items() for n, v in fields.items())


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[TwoDisks]:
    disks = TwoDisks(tmp_path)
    yield disks
    disks.optimizer.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_chunks_leave_a_disk_that_can_only_be_read(
    disks: TwoDisks, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    disks.break_second(code, Kind.WRITE)
    for _ in range(6):
        disks.step()
    assert disks.second.is_shunned and disks.second.used_bytes == 0
    assert caplog.text.count(f"nothing more is written to {disks.folders[1]}") == 1
    disks.engine.break_path(str(disks.folders[1]), errno.ENODEV)  # it is no longer needed
    disks.step()
    disks.assert_right()


def test_a_disk_that_disappears_takes_its_chunks_and_a_load_goes_on_without_it(disks: TwoDisks) -> None:
    saved = [p.detach().clone() for p in disks.parameters], disks.optimizer.state_dict()
    disks.break_second(errno.ENODEV)
    for _ in range(2):
        with pytest.raises(TransferError, match=r"chunk \d+ \(param\.0.*cannot be read now.*offset") as caught:
            train(disks.optimizer, disks.parameters, [9])
        if disks.optimizer.store.broken_off is not None:
            break
    assert caught.value.errno == errno.ENODEV
    disks.optimizer.store.check()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state = disks.optimizer.state_dict(partial=True)["state"]
    missing = next(one.message for one in told if isinstance(one.message, PartialStateWarning)).missing
    assert "param.0" in missing and len(state) + len(missing) == 2
    assert all(str(disks.folders[1]) in why for why in missing.values())
    with torch.no_grad():
        for parameter, value in zip(disks.parameters, saved[0], strict=True):
            parameter.copy_(value)
    disks.optimizer.load_state_dict(saved[1])
    disks.step()
    disks.step()
    assert disks.second.used_bytes == 0
    disks.assert_right()


# -- disks that somebody else fills ------------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def hog(folder: Path, leave: int = 0) -> Path:
    """Fill a disk, but for so many bytes."""
    path = folder / "hog"
    with path.open("ab") as file:
        try:
            while (left := free_bytes(folder) - leave) > 0:
                os.posix_fallocate(file.fileno(), file.tell(), min(left, 4 * MIB))
                file.seek(0, os.SEEK_END)
        except OSError:
            pass  # what bookkeeping takes
    return path


NEED = 8 * MIB


def _optimizer(folder: Path, make: type[TieredAdamW] = TieredAdamW) -> tuple[list[nn.Parameter], TieredAdamW]:
    parameters = seeded((NEED // 8,))
    return parameters, make(parameters, policy=small_policy(folder, chunk=256 * KIB))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
def test_with_any_room_on_a_disk_training_is_right_or_refused_before_it_begins(small_disk: Path, step: int) -> None:
    """CASES 9, from 0 to 110 % of the need: a peer trained on with wrong losses."""
    theirs = seeded((NEED // 8,))
    train(torch.optim.AdamW(theirs, fused=True), theirs, range(2))
    outcomes = []
    margin = os.statvfs(small_disk).f_blocks * os.statvfs(small_disk).f_frsize // 20
    for room in range(0, NEED * 11 // 10 + MIB, step * MIB):
        filler = hog(small_disk, leave=room + margin)
        before = free_bytes(small_disk)
        try:
            parameters, optimizer = _optimizer(small_disk)
        except DiskFullError:
            outcomes.append("refused")
        else:
            train(optimizer, parameters, [0])
            hog(small_disk)  # and somebody takes all that is left
            train(optimizer, parameters, [1])
            assert_same_parameters(parameters, theirs)
            optimizer.store.check()
            optimizer.close()
            outcomes.append("trained")
        filler.unlink()
        assert before > 0
    assert outcomes == sorted(outcomes) and set(outcomes) == {"refused", "trained"}


def test_a_disk_filled_before_the_first_step_is_an_error_that_changes_nothing(small_disk: Path) -> None:
    parameters, optimizer = _optimizer(small_disk)
    weights = parameters[0].detach().clone()
    filler = hog(small_disk)
    with pytest.raises(DiskFullError):
        train(optimizer, parameters, [0])
    assert same_bits(parameters[0], weights)
    filler.unlink()
    theirs = seeded((NEED // 8,))
    train(optimizer, parameters, range(2))
    train(torch.optim.AdamW(theirs, fused=True), theirs, range(2))
    assert_same_parameters(parameters, theirs)
    optimizer.close()


class Filling(FaultyEngine):
    """Somebody takes all that is left of a disk just before the nth read or write from now."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self.left = 0

    def submit(self, operation: Operation) -> None:
        self.left -= 1
        if self.left == 0:
            hog(self._folder)
        super().submit(operation)


@pytest.mark.parametrize(("filled", "nth"), [(0, 1), (0, 20), (1, 1), (1, 40)])
def test_a_disk_that_is_filled_in_the_middle_of_a_step_costs_nothing(small_disk: Path, filled: int, nth: int) -> None:
    """All blocks are reserved: before the first write, while some were written once, and later."""
    engine = Filling(small_disk)
    filling = type("OnFillingDisk", (TieredAdamW,), {"parts": Parts(open_engine=lambda *_, **__: engine)})
    parameters, optimizer = _optimizer(small_disk, filling)
    theirs = seeded((NEED // 8,))
    reference = torch.optim.AdamW(theirs, fused=True)
    for step in range(4):
        engine.left = nth if step == filled else 0
        train(optimizer, parameters, [step])
        train(reference, theirs, [step])
        assert_same_parameters(parameters, theirs, step)
        optimizer.store.check()
        assert (free_bytes(small_disk) < 256 * KIB) is (step >= filled)
    stats = optimizer.store.stats()
    assert stats.tiers["nvme"].quarantined_bytes == 0 and not stats.paths[str(small_disk)].is_shunned
    with pytest.raises(DiskFullError):  # which would be mapped from a file there
        optimizer.state_dict()
    (small_disk / "hog").unlink()
    found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert all(same_bits(found[0][name], value) for name, value in wanted[0].items())
    optimizer.close()
