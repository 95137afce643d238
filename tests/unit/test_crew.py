"""Crews: as many threads as can be had, jobs that are carried or lost and never forgotten, and an end."""

from __future__ import annotations

import itertools
import queue
import signal
import threading
from concurrent.futures import CancelledError, wait

import pytest

from tests.fakes import PATIENCE_SECONDS, FewThreads
from tierstore.crew import Calls, Crew
from tierstore.errors import NoThreadError


def ended(prefix: str) -> bool:
    """Whether all threads of that name have ended; they are waited for."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("there_are", [1, 2, 4])
def test_a_crew_with_fewer_threads_than_it_should_have_says_so_once_and_carries_all(
    there_are: int, caplog: pytest.LogCaptureFixture
) -> None:
    carried: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    meeting = threading.Barrier(there_are, timeout=PATIENCE_SECONDS)

    def carry(number: int) -> None:
        if number < there_are:
            meeting.wait()  # so that each thread carries one
        carried.put((number, threading.current_thread().name))

    crew = Crew(carry, lambda number, error: carried.put((number, repr(error))), "short")
    with FewThreads(there_are + 1):
        crew.grow(5)
    crew.grow(5)
    for number in range(20):
        crew.put(number)
    found = [carried.get(timeout=PATIENCE_SECONDS) for _ in range(20)]
    assert sorted(number for number, _ in found) == list(range(20))
    assert {name for _, name in found} == {f"short-{number}" for number in range(there_are)}
    assert caplog.text.count(f"short goes on with {there_are} threads of 5: the thread 'short-{there_are}'") == 1
    crew.close(leave=lambda job: False)
    assert ended("short")


def test_without_any_thread_nothing_is_taken_and_later_there_may_be_one() -> None:
    calls, made = Calls("none", 3), list[int]()
    with FewThreads() as few:
        with pytest.raises(NoThreadError, match=r"'none-0' could not be started .*pids limit"):
            calls.grow()
        with pytest.raises(NoThreadError):
            calls.submit(made.append, 1)
    assert few.refused == ["none-0", "none-0"]
    assert calls.submit(max, 1, 2).result(PATIENCE_SECONDS) == 2
    calls.shutdown()
    assert ended("none") and not made


@pytest.mark.parametrize(("calls_at_once", "begun"), [(1, 1), (2, 2), (9, 3)])
def test_there_are_no_more_threads_than_calls_at_once(calls_at_once: int, begun: int) -> None:
    calls, may_end = Calls("needed", 3), threading.Event()
    made = [calls.submit(may_end.wait, PATIENCE_SECONDS) for _ in range(calls_at_once)]
    assert sum(thread.name.startswith("needed-") for thread in threading.enumerate()) == begun
    may_end.set()
    assert all(one.result() for one in made)
    calls.shutdown()


def test_a_call_that_was_taken_back_is_not_made_and_an_error_is_its_own() -> None:
    calls, begun, may_end = Calls("calls", 1), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        raise ValueError("of this call")

    made: list[int] = []
    first, second, third = calls.submit(hold), calls.submit(made.append, 2), calls.submit(made.append, 3)
    assert begun.wait(PATIENCE_SECONDS)
    assert second.cancel() and not first.cancel()
    may_end.set()
    assert not wait((first, second, third), PATIENCE_SECONDS).not_done
    assert made == [3]
    with pytest.raises(ValueError, match="of this call"):
        first.result()
    with pytest.raises(CancelledError):
        second.result()
    calls.shutdown()


def test_threads_end_with_who_had_them() -> None:
    """Somebody forgets to close a checkpoint."""
    calls = Calls("forgotten", 3)
    made = [calls.submit(int) for _ in range(9)]
    del calls
    assert not wait(made, PATIENCE_SECONDS).not_done
    assert ended("forgotten")


def test_a_thread_whose_start_was_interrupted_ends_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+C while a thread begins: nobody knows of it, and it once took the word to end that was another's."""

    def interrupted(thread: threading.Thread) -> None:
        thread_start(thread)
        raise KeyboardInterrupt

    thread_start = threading.Thread.start
    calls = Calls("interrupted", 2)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls.grow()
    calls.grow()
    closing = threading.Thread(target=calls.shutdown, daemon=True)
    closing.start()
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert ended("interrupted")


def test_where_no_thread_could_go_on_calls_fail_and_those_taken_back_are_told_so() -> None:
    """Who waits for a call that was taken back waits until that is told."""
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait(PATIENCE_SECONDS)
        raise OSError("no buffer")

    calls = Calls("failing", 1, begin=fail)
    made = [calls.submit(int), calls.submit(int)]
    assert made[0].cancel()
    may_fail.set()
    assert not wait(made, PATIENCE_SECONDS).not_done
    assert made[0].cancelled()
    with pytest.raises(OSError, match="no buffer"):
        made[1].result()
    calls.shutdown()


def test_after_the_end_a_call_is_refused_and_no_thread_begun() -> None:
    calls = Calls("over", 2)
    calls.submit(int).result()
    calls.shutdown()
    calls.grow()
    with pytest.raises(RuntimeError, match="told to end"):
        calls.submit(int).result(PATIENCE_SECONDS)
    assert ended("over")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_ctrl_c_while_a_thread_begins_leaves_none_that_nobody_knows(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uncounted thread took the word by which a counted one was to end, and `shutdown` waited for that for ever."""
    calls, may_end, starts = Calls("interrupted", 3), threading.Event(), itertools.count(1)
    really = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        really(thread)
        if next(starts) == at:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start)
    made, interrupts = [], 0
    for _ in range(9):
        try:
            made.append(calls.submit(may_end.wait, PATIENCE_SECONDS))
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert sum(thread.name.startswith("interrupted-") for thread in threading.enumerate()) == 3
    may_end.set()
    assert all(one.result() for one in made)
    ending = threading.Thread(target=calls.shutdown, daemon=True)
    really(ending)
    ending.join(PATIENCE_SECONDS)
    assert not ending.is_alive()
    assert ended("interrupted")
