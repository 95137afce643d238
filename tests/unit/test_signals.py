"""Signals are handled between calls, never within; a step is never half done because of one."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
import torch

from tests.simulator import Simulation
from tierstore import TieredAdamW
from tierstore.errors import BusyStoreError, FailedStepError
from tierstore.signals import break_point, deferred, standing_in

POLICY = {"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "64KiB"}, "nvme": {}}}


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals that the process's own handler for SIGUSR1 heard."""
    numbers: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        numbers.append(number)

    before = signal.signal(signal.SIGUSR1, hear)
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_handled_when_the_outermost_block_is_over(heard: list[int]) -> None:
    with deferred():
        with deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == []
    assert heard == [signal.SIGUSR1]


def test_an_interrupt_is_raised_at_the_end_and_everything_inside_has_happened() -> None:
    done = []

    def work() -> None:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_all_noted_signals_are_delivered_though_one_raises(heard: list[int]) -> None:
    def work() -> None:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert heard == [signal.SIGUSR1]


@pytest.mark.parametrize("nth", [0, 1])
def test_an_interrupt_while_handlers_are_put_back_leaves_none_behind(heard: list[int], nth: int) -> None:
    """Only SIGINT's was back when it came once more, and raised: SIGUSR1 was noted for ever after and never handled,
    and what had been noted before was raised by some later call.
    """
    before, returned = signal.getsignal(signal.SIGUSR1), 0

    def interrupt(frame: FrameType, event: str, called: object) -> None:
        nonlocal returned
        if event == "c_return" and called is _signal.signal:
            returned += 1
            if returned == nth + 1:
                signal.raise_signal(signal.SIGINT)

    def work() -> None:
        with deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGUSR1)
            sys.setprofile(interrupt)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        sys.setprofile(None)
    assert returned == nth + 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGUSR1) is before and heard == [signal.SIGUSR1]
    with deferred():
        break_point()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] * 2


def test_a_handler_set_inside_is_kept(heard: list[int]) -> None:
    with deferred():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_second_interrupt_breaks_off_at_a_break_point() -> None:
    passed = []

    def work() -> None:
        with deferred():
            for number in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                break_point()
                passed.append(number)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert passed == [0]


def test_other_threads_defer_nothing() -> None:
    ended = threading.Event()

    def run() -> None:
        with deferred():
            ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended.is_set()


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(3000)) for _ in range(8)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


@pytest.mark.parametrize("at", [0, 3, 11])
def test_an_interrupted_step_is_a_whole_step(at: int) -> None:
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, fused=True)
    with TieredAdamW(ours, policy=POLICY) as optimizer:
        _signal_at_use(optimizer, at, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        reference.step()
        optimizer.store.check()
        optimizer.step()
        reference.step()
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        assert all(float(state["step"]) == 2 for state in optimizer.state.values())


def test_two_interrupts_break_a_step_off_between_chunks_and_say_so() -> None:
    ours = parameters()
    with TieredAdamW(ours, policy=POLICY) as optimizer:
        optimizer.step()
        saved, weights = optimizer.state_dict(), [p.detach().clone() for p in ours]
        _signal_at_use(optimizer, 5, [signal.SIGINT, signal.SIGINT])
        with pytest.raises(KeyboardInterrupt) as caught:
            optimizer.step()
        assert "Updated:" in "".join(caught.value.__notes__)
        optimizer.store.check()
        with pytest.raises(FailedStepError):
            optimizer.step()
        with torch.no_grad():
            for parameter, weight in zip(ours, weights, strict=True):
                parameter.copy_(weight)
        optimizer.load_state_dict(saved)
        optimizer.step()


def test_a_handler_that_saves_state_sees_a_whole_step(heard: list[int]) -> None:
    """SIGTERM, then state_dict() in the handler, is how jobs are told to make room for others."""
    ours = parameters()
    with TieredAdamW(ours, policy=POLICY) as optimizer:
        saved = []
        signal.signal(signal.SIGUSR1, lambda number, frame: saved.append(optimizer.state_dict()))
        _signal_at_use(optimizer, 4, [signal.SIGUSR1])
        optimizer.step()
        after = optimizer.state_dict()
        (seen,) = saved
        for key, state in after["state"].items():
            assert all(torch.equal(value, seen["state"][key][name]) for name, value in state.items())


def _signal_at_use(optimizer: TieredAdamW, at: int, numbers: list[int]) -> None:
    """Send this process signals when the next step uses its chunk number `at`."""
    execution = optimizer.store._execution
    use, count = execution._use, iter(range(1_000_000))

    def interrupted(*arguments: object) -> None:
        if next(count) == at:
            for number in numbers:
                os.kill(os.getpid(), number)
        use(*arguments)  # type: ignore[arg-type]

    execution._use = interrupted  # type: ignore[method-assign]


def test_a_store_called_from_within_its_own_run_says_so() -> None:
    simulation = Simulation({"cpu": 3, "nvme": 6}, "alternating", 0)
    simulation.add(["cpu"] * 6)
    into = torch.empty(4096, dtype=torch.uint8)

    def use(chunk: int, record: torch.Tensor, is_fresh: bool) -> None:
        with pytest.raises(BusyStoreError):
            simulation.store.read_record(chunk, into)
        with pytest.raises(BusyStoreError):
            simulation.store.close()

    simulation.store.run(range(6), (), use)
    simulation.store.check()


@pytest.mark.parametrize("stands_in", [True, False])
def test_a_second_interrupt_breaks_off_the_thread_that_the_main_one_waits_for(stands_in: bool) -> None:
    broken_off = []

    def work() -> None:
        try:
            break_point()
        except KeyboardInterrupt:
            broken_off.append(True)

    thread = threading.Thread(target=work)
    with contextlib.suppress(KeyboardInterrupt), deferred():  # which is still heard where nobody broke off
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        with standing_in(thread) if stands_in else contextlib.nullcontext():
            thread.start()
            thread.join()
    assert broken_off == [True] * stands_in
