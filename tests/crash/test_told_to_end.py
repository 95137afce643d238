"""Ctrl-C and SIGTERM at any call: the store stays consistent, can be saved and closed, and what is resumed is the same.

Everything happens in a process of its own, which gets real signals from itself.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from tests.crash.test_kill import assert_same
from tests.crash.training import MODES, Appointment, Board, Run, Watch
from tests.processes import call
from tierstore.errors import BusyStoreError, FailedStepError

PHASES = ("binding", "step", "checkpoint")
STEPS = 4


def cases(*modes: str) -> pytest.MarkDecorator:
    """A dozen signals in each mode before a change lands; many when asked for."""
    params = [pytest.param(mode, 12, marks=pytest.mark.crash) for mode in modes]
    params += [pytest.param(mode, 150, marks=pytest.mark.long) for mode in modes]
    return pytest.mark.parametrize(("mode", "times"), params)


class ToldToEnd(BaseException):
    """Raised by a handler; no Exception, as SystemExit and KeyboardInterrupt are none."""


@cases("split in backward", "step", "three tiers")
def test_ctrl_c_at_any_call_leaves_a_store_that_is_sound_and_can_be_closed(mode: str, times: int) -> None:
    assert set(call(interrupted, mode, times)) == set(PHASES)


@cases("split", "several paths")
def test_a_handler_of_sigterm_can_save_and_close_at_any_call(mode: str, times: int) -> None:
    assert set(call(saved_by_handler, mode, times)) == {"step", "checkpoint"}


@cases("backward", "step")
def test_a_handler_of_sigterm_that_only_notes_it_lets_an_iteration_end(mode: str, times: int) -> None:
    assert set(call(noted, mode, times)) == set(PHASES)


# -- in the process ---------------------------------------------------------------------------------------------


def interrupted(mode: str, times: int) -> list[str]:
    """Be interrupted by the default handler, look at the store, close it, and go on from the last checkpoint."""
    fell = []
    for folder, watch, phase in _appointments(mode, times, signal.SIGINT, PHASES):
        try:
            run = Run(folder, MODES[mode], watch)
            run.go_on(to=STEPS)
        except KeyboardInterrupt:
            fell.append(phase)
            _check_and_close(watch)
        else:
            assert watch.appointment is not None, "nobody heard of the signal"  # else there were fewer calls this time
            run.optimizer.close()
        _assert_ends_alike(folder, mode)
    return fell


def saved_by_handler(mode: str, times: int) -> list[str]:
    """Save in the handler itself, whatever is being done; then go on from there."""
    fell = []
    for folder, watch, phase in _appointments(mode, times, signal.SIGTERM, PHASES[1:]):

        def save(number: int, frame: FrameType | None, watch: Watch = watch) -> None:
            run = watch.run
            run.optimizer.store.check()
            run.position = int(max(state["step"] for state in run.optimizer.state.values()))
            run.keep()
            run.optimizer.close()
            raise ToldToEnd

        signal.signal(signal.SIGTERM, save)
        with pytest.raises(ToldToEnd):
            Run(folder, MODES[mode], watch).go_on(to=STEPS)
        fell.append(phase)
        _assert_ends_alike(folder, mode)
    return fell


def noted(mode: str, times: int) -> list[str]:
    """Note the signal, and end after the iteration."""
    fell = []
    for folder, watch, phase in _appointments(mode, times, signal.SIGTERM, PHASES):
        heard: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame, heard=heard: heard.append(number))
        run = Run(folder, MODES[mode], watch)
        while run.position < STEPS:
            run.go_on(to=run.position + 1)
            if heard:
                fell.append(phase)
                run.keep()
                break
        run.optimizer.store.check()
        run.optimizer.close()
        _assert_ends_alike(folder, mode)
    return fell


def _appointments(mode: str, times: int, number: int, phases: tuple[str, ...]) -> Any:
    chance, calls = random.Random(f"{mode} {number}"), _whole(mode)[1]
    for count in range(times):
        phase = phases[count % len(phases)]
        nth = chance.randint(1, calls[phase] // (1 if phase == "binding" else 2))
        with TemporaryDirectory() as name:
            yield Path(name), Watch(Board(Path(name) / "board"), Appointment(phase, nth, number)), phase
        assert _threads_of_tierstore() == []


def _check_and_close(watch: Watch) -> None:
    """Look at a store as one may after an interrupt, wherever that came; then close it."""
    optimizer = getattr(watch.run, "optimizer", None)
    if optimizer is None:
        return  # not even made
    try:
        optimizer.store.check()
        optimizer.state_dict()
    except BusyStoreError:  # it came in a backward that updates, which only its step ends
        try:
            optimizer.zero_grad()
        except FailedStepError:
            optimizer.store.check()
    optimizer.close()
    optimizer.close()


def _assert_ends_alike(folder: Path, mode: str) -> None:
    run = Run(folder, MODES[mode], Watch(Board(folder / "board"), None))
    run.go_on(to=STEPS)
    assert_same(run.outcome(), _whole(mode)[0])
    run.optimizer.close()


@cache
def _whole(mode: str) -> tuple[dict[str, Any], dict[str, int]]:
    """What a run makes that nobody interrupts, and the calls of its phases."""
    for _ in range(2):  # more is done for the first one in a process
        with TemporaryDirectory() as name:
            watch = Watch(Board(Path(name) / "board"), None)
            run = Run(Path(name), MODES[mode], watch)
            run.go_on(to=STEPS)
            outcome = run.outcome()
            run.optimizer.close()
    return outcome, watch.calls


def _threads_of_tierstore() -> list[str]:
    gc.collect()
    return [thread.name for thread in threading.enumerate() if "tierstore" in thread.name]
