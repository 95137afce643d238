"""When a run leaves a core free: while files hold it up, and where that was found to be faster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tierstore.sparing import STEPS_BETWEEN_TRIALS, Sparing
from tierstore.stats import StepStats

Way = tuple[float, float]
"""Seconds of update and of waiting."""


def decisions(all_cores: Callable[[int], Way], one_free: Callable[[int], Way], runs: int) -> str:
    """What is decided for each of so many runs, the first included: `a` for all cores, `f` for one left free."""
    sparing, made = Sparing(), ""
    for number in range(runs):
        made += "f" if sparing.is_on else "a"
        update, waiting = (one_free if sparing.is_on else all_cores)(number)
        sparing.hear(StepStats(1, update, waiting / 2, waiting / 2, 4096, 4096))
    return made


@pytest.mark.parametrize(
    ("all_cores", "one_free", "made"),
    [
        pytest.param((1.0, 0.1), (2.0, 0.0), "aaaaaa", id="nothing to wait for"),
        pytest.param((1.0, 2.0), (1.5, 1.0), "afffff", id="held up either way"),
        pytest.param((1.0, 2.0), (2.1, 1.0), "afffff", id="held up either way, and hardly slower"),
        pytest.param((1.0, 2.0), (4.0, 0.5), "afaaaa", id="held up either way, and clearly slower"),
        pytest.param((1.0, 0.5), (1.4, 0.1), "afffff", id="faster with one free"),
        pytest.param((1.0, 0.5), (1.6, 0.1), "afaaaa", id="faster with all"),
    ],
)
def test_the_faster_way_is_kept(all_cores: Way, one_free: Way, made: str) -> None:
    assert decisions(lambda _: all_cores, lambda _: one_free, 6) == made


def test_the_slower_way_is_tried_again_after_a_while() -> None:
    made = decisions(lambda _: (1.0, 0.5), lambda number: (1.6 if number < 10 else 1.2, 0.1), 60)
    assert made == "af" + "a" * STEPS_BETWEEN_TRIALS + "f" * (58 - STEPS_BETWEEN_TRIALS)


def test_all_cores_are_taken_again_once_files_hold_nothing_up() -> None:
    made = decisions(
        lambda number: (1.0, 2.0) if number < 5 else (1.0, 0.0),
        lambda number: (1.5, 1.0) if number < 5 else (1.5, 0.0),
        STEPS_BETWEEN_TRIALS + 10,
    )
    assert made.rstrip("a") == "a" + "f" * STEPS_BETWEEN_TRIALS


def test_a_run_that_reads_nothing_tells_nothing() -> None:
    """A first step makes its chunks, which takes its own time, and only writes."""
    sparing = Sparing()
    sparing.hear(StepStats(1, 1.0, 0.0, 5.0, 0, 4096))
    assert not sparing.is_on
