"""How many cores the arithmetic of one thread takes; jobs side by side, on one core each. Changes nothing for other
threads, and nothing for good but on threads of ours.

torch's own `set_num_threads` is for the whole process: threads that begin meanwhile would keep the lower number, and a
matrix product of somebody else's might be summed in another order. OpenMP's is for the calling thread alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import torch

from tierstore.crew import Calls
from tierstore.errors import NoThreadError

MOST_AT_ONCE = 16
"""Threads beyond which they would wait for Python's lock: to call operations takes a twentieth of what they take."""

_log = logging.getLogger("tierstore.cores")


@contextlib.contextmanager
def leaving_one_free() -> Iterator[None]:
    """Let torch's operations on this thread leave one core free for what reads and writes; of one core, none.

    Waiting threads of OpenMP spin, and would take it too: with one thread of two there is none that waits.
    """
    before = torch.get_num_threads()  # first: torch sets a new thread's number when it is first asked
    fewer = min(before, available() - 1)
    change = _changer()
    if change is None or not 1 <= fewer < before:
        yield
        return
    change(fewer)
    try:
        yield
    finally:
        change(before)


def shared_by(jobs: int) -> int:
    """How many threads should share so many jobs, side by side: at most as many as torch's operations would take."""
    return 1 if jobs < 2 or _changer() is None else min(jobs, torch.get_num_threads(), available(), MOST_AT_ONCE)


def side_by_side(runs: Sequence[Callable[[], None]]) -> None:
    """Run all at once, the first on the calling thread, each with one core for torch's operations; wait for all.

    Where fewer threads can be had, fewer at once; where none, all of them here. Not more than `shared_by` says, if they
    call torch's operations; without gradients. Raises an error of one that failed, once none is running any more.
    """
    change, before = _changer(), torch.get_num_threads()
    at_work = _helped(runs[1:])
    try:
        if at_work and change is not None:
            change(1)
        for run in runs[: len(runs) - len(at_work)]:
            run()
    finally:
        if at_work and change is not None:
            change(before)
        wait(at_work)
    for other in at_work:
        other.result()


def on_one_core(run: Callable[[], None]) -> None:
    """Call a function that uses torch, on one core and without gradients, on a thread that is ours for good."""
    stay_on_one_core()
    run()


def stay_on_one_core() -> None:
    """Let torch's operations on this thread, which must be ours, from now on take one core and make no graph."""
    torch.get_num_threads()  # torch sets a new thread's number when it is first asked
    if (change := _changer()) is not None:
        change(1)
    torch.set_grad_enabled(False)


def _helped(runs: Sequence[Callable[[], None]]) -> list[Future[None]]:
    """Let helping threads run what they can: all, or nothing if there are none."""
    try:
        return [_helpers().submit(on_one_core, run) for run in runs]
    except NoThreadError as error:  # of the first one, as one thread is enough for all
        _tell_alone(str(error))
        return []


@functools.cache
def _helpers() -> Calls:
    return Calls("tierstore-update", available())


@functools.cache
def _tell_alone(why: str) -> None:
    """Say so once."""
    _log.warning("updates go on with one thread: %s", why)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)  # the threads are the parent's


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _changer() -> Callable[[int], None] | None:
    """What sets the calling thread's number of threads in the OpenMP that torch runs on; None if it is not found."""
    change = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    before = torch.get_num_threads()
    if change is not None:
        change(before + 1)
        is_heard = torch.get_num_threads() == before + 1
        change(before)
        if is_heard:
            return change  # type: ignore[no-any-return]
    _log.info("torch's threads cannot be changed for one thread alone here, so no core is left free during I/O")
    return None
