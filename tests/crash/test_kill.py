"""Training that is killed at any instant is taken up from its newest checkpoint and ends with the same bits.

Some kills come at a call that is drawn from all that a phase makes, so that no place is spared for being quick; others
at a moment, so that they also fall into the middle of a write, of a kernel, of a worker's work.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.crash.conftest import Disk
from tests.crash.training import BESIDE, MODES, Appointment, Board, live
from tests.optimizer.cases import same_bits
from tests.processes import Child, call

PHASES = ("binding", "step", "checkpoint")
"""Those that kills are made in on purpose; at a moment they come in others too."""


@dataclass(frozen=True)
class Undisturbed:
    """What a run makes that nobody kills: its outcome, the calls of its phases, and how long it takes."""

    outcome: dict[str, Any]
    calls: dict[str, int]
    seconds: float


@cache
def undisturbed(mode: str) -> Undisturbed:
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        calls = call(live, Path(folder), mode, None)
        return Undisturbed(torch.load(Path(folder) / "outcome"), calls, time.perf_counter() - began)


def test_a_run_killed_while_binding_stepping_and_saving_ends_with_the_same_bits(disk: Disk) -> None:
    killed = survived(disk, "step", [(phase, True) for phase in PHASES], random.Random(1))
    assert killed == Counter(PHASES)


@pytest.mark.crash
def test_a_run_of_every_mode_survives_ten_kills_in_all(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    assert survived_in_all_modes(disk, 10, seed=2, capsys=capsys).total() == 10


@pytest.mark.long
@pytest.mark.parametrize("seed", [3])
def test_runs_survive_a_hundred_kills(disk: Disk, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    killed = survived_in_all_modes(disk, 100, seed=seed, capsys=capsys)
    assert killed.total() == 100
    assert all(killed[phase] >= 15 for phase in PHASES), killed
    assert killed[BESIDE] >= 4, killed


def survived_in_all_modes(disk: Disk, kills: int, *, seed: int, capsys: pytest.CaptureFixture[str]) -> Counter[str]:
    """Kill runs of all modes in turn, at most five times each, until there have been so many kills."""
    chance, killed, runs = random.Random(seed), Counter[str](), 0
    while killed.total() < kills:
        count = min(5 if kills > 10 else 2, kills - killed.total())
        mode = list(MODES)[runs % len(MODES)]
        phases = PHASES if MODES[mode].waits else (BESIDE, *PHASES)
        plan = [(phases[(runs + number) % len(phases)], chance.random() < 0.6) for number in range(count)]
        killed += survived(disk, mode, plan, chance)
        runs += 1
    with capsys.disabled():
        where = ", ".join(f"{count} in {phase}" for phase, count in sorted(killed.items()))
        print(f"\n{killed.total()} kills in {runs} runs, all survived: {where}")
    return killed


def survived(disk: Disk, mode: str, plan: list[tuple[str, bool]], chance: random.Random) -> Counter[str]:
    """Kill one run as planned, then let it end, and compare; return in which phases the kills fell.

    The plan has for each kill the phase, and whether it comes at a call in it or at a moment in any.
    """
    whole, killed = undisturbed(mode), Counter[str]()
    with TemporaryDirectory(dir=disk.folder) as name:
        folder = Path(name)
        for phase, is_at_call in plan:
            nth = chance.randint(1, max(1, whole.calls[phase] // (1 if phase == "binding" else 3)))
            moment = chance.uniform(0.0, 0.8 * whole.seconds)
            with Child(live, folder, mode, Appointment(phase, nth) if is_at_call else None) as life:
                life.is_over_within(60.0 if is_at_call else moment)
                life.kill()
                if life.wait() != -signal.SIGKILL:
                    break  # it ended before its time had come
            killed[Board(folder / "board").doing] += 1
            assert_nothing_is_left(disk, folder)
        call(live, folder, mode, None)
        assert_same(torch.load(folder / "outcome"), whole.outcome)
        assert_nothing_is_left(disk, folder)
        kept = [path.name for path in folder.iterdir() if not path.name.startswith("swap-")]
        assert sorted(kept) == ["board", "newest", "outcome"]  # the next save has removed what dead writers left
    return killed


def assert_nothing_is_left(disk: Disk, folder: Path) -> None:
    assert not [path for swap in folder.glob("swap-*") for path in swap.iterdir()]
    disk.assert_nothing_is_hidden()


def assert_same(mine: Any, theirs: Any, where: str = "") -> None:
    """Compare to the bit whatever nests tensors."""
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key, value in theirs.items():
            assert_same(mine[key], value, f"{where}.{key}")
    else:
        assert same_bits(mine, theirs), where
