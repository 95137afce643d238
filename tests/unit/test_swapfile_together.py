"""Processes that reserve swap space on one disk in the same moment: they neither fill it nor lose anything."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.unit.reserving import Meeting, Together
from tierstore.folders import disk_margin
from tierstore.pressure import disk_space
from tierstore.swapfile import SwapFile

MIB = 1 << 20
BOOKKEEPING_BYTES = 64 << 10
"""What ext4 takes for the files themselves."""

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


class Case(NamedTuple):
    """How many processes ask at once, all but so many margins of what is free, and how many may have it."""

    count: int
    margins_left: float
    may_fit: int  # so many at most
    meeting: Meeting


CASES = {
    "all fit": Case(2, 1.1, 2, "after reserving"),
    "all but a part of the margin is left": Case(2, 0.5, 1, "after reserving"),
    "one fits": Case(2, -5.0, 1, "before reserving"),
    "three of four fit": Case(4, 0.5, 3, "after reserving"),
    "three of four fit, in any order": Case(4, 0.5, 3, "before looking"),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_that_reserve_at_once_leave_the_disk_its_margin(small_disk: Path, case: str) -> None:
    """All looked at the free space before any reserved, and each found enough."""
    count, margins_left, may_fit, meeting = CASES[case]
    kept = small_disk / "kept"
    kept.write_bytes(b"k" * MIB)
    os.sync()
    space = disk_space(small_disk)
    margin = disk_margin(space.total_bytes)
    nbytes = int(space.free_bytes - margins_left * margin) // count // 4096 * 4096

    with Together(small_disk, count, nbytes, meeting) as together:
        outcomes = together.answers()
        assert disk_space(small_disk).free_bytes >= margin - BOOKKEEPING_BYTES
        fitted = sum(outcome.is_reserved for outcome in outcomes)
        assert fitted == count if may_fit == count else fitted <= may_fit
        for outcome in outcomes:
            assert outcome.size_bytes == (nbytes if outcome.is_reserved else 0)
            assert outcome.is_reserved or (outcome.code == errno.ENOSPC and "tiers.nvme.capacity" in outcome.error)
        together.go_on()
        assert together.answers() == [True] * count

    os.sync()
    assert kept.read_bytes() == b"k" * MIB
    assert disk_space(small_disk).free_bytes == space.free_bytes
    alone = SwapFile(small_disk, direct=False)
    assert alone.grow(nbytes) == 0
    alone.close()
