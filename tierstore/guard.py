"""Says who may call a store, and when: one thread at a time, in the process that made it, until it is closed.

Keeps outside what modes of torch a caller is in: inference mode, and a default device.
Owns the end of what a store is built from, too. No finalizer touches state: what closes the doers knows only them, does
nothing in a fork, and is handed to a thread of its own when the garbage collector happens to run on one of theirs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tierstore.crew import start
from tierstore.errors import BusyStoreError, ForkedStoreError, NoThreadError, StoreClosedError, WrongThreadError
from tierstore.signals import deferred
from tierstore.tiers import Tier
from tierstore.transfer import TransferEngine

WORKER_PREFIX = "tierstore-"
"""What the names of all threads of engines and transfers begin with."""
_left: list[Callable[[], None]] = []
"""What closes stores that nobody could: their end came on a worker, when there was no other thread to be had."""

_log = logging.getLogger("tierstore.guard")


class Guarded:
    """The guards of a store that is made of tiers and a transfer engine."""

    def __init__(self, tiers: list[Tier], transfer: TransferEngine) -> None:
        self._lock = threading.RLock()
        self._tiers_to_close = tiers
        self._is_running = False
        self._pid = os.getpid()
        self._shut = weakref.finalize(self, _shut, transfer, tiers, self._pid)
        while _left:
            _left.pop()()

    @property
    def is_closed(self) -> bool:
        """Whether the store was closed, or belongs to another process."""
        return not self._shut.alive or self._pid != os.getpid()

    def close(self) -> None:
        """Wait for what is under way and give back memory, files and threads. Idempotent."""
        if self._pid == os.getpid():
            with alone(self._lock, "the store"):
                self._refuse_nesting()
                self._shut()

    def _entered(self, *, wait: bool = False, may_nest: bool = False) -> contextlib.AbstractContextManager[None]:
        """Enter the store. `wait`: for another thread to leave it; `may_nest`: within a run, too."""
        if self._pid != os.getpid():
            raise ForkedStoreError(f"this store belongs to process {self._pid}, and this is a fork of it: make another")
        if not self._shut.alive:
            raise StoreClosedError("the store is closed and its state is gone; save state_dict() before close()")
        return _Alone(self._lock, "the store", wait, self._on_entry if may_nest else self._on_entry_outside_runs)

    def _on_entry(self) -> None:
        """What every call does first, once it is alone."""

    def _on_entry_outside_runs(self) -> None:
        self._refuse_nesting()
        self._on_entry()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Mark a run: within it, whatever else happens on this thread must leave the store alone."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _refuse_nesting(self) -> None:
        if self._is_running:
            raise BusyStoreError("the store was called in the middle of a run, on the same thread: call it afterwards")


def alone(lock: threading.RLock, what: str, *, wait: bool = False) -> contextlib.AbstractContextManager[None]:
    """Be the only thread inside `what`, with signals deferred. Raises WrongThreadError, or waits, if another one is."""
    return _Alone(lock, what, wait, lambda: None)


class _Alone(contextlib.AbstractContextManager[None]):
    """One call. `on_entry` is called when it is alone; what it raises ends the call."""

    __slots__ = ("_lock", "_modes", "_on_entry", "_signals", "_wait", "_what")

    def __init__(self, lock: threading.RLock, what: str, wait: bool, on_entry: Callable[[], None]) -> None:
        self._lock, self._what, self._wait, self._on_entry = lock, what, wait, on_entry
        self._signals = deferred()
        self._modes = None if _is_plain() else in_plain_torch()

    def __enter__(self) -> None:
        self._signals.__enter__()
        try:
            if self._modes is not None:
                self._modes.__enter__()
            try:
                self._begin()
            except BaseException:
                self._leave_modes()
                raise
        except BaseException:
            self._signals.__exit__(None, None, None)
            raise

    def _begin(self) -> None:
        if not self._lock.acquire(blocking=self._wait):
            raise WrongThreadError(
                f"thread {threading.current_thread().name!r} called {self._what} while another thread was inside: "
                f"call it from one thread at a time"
            )
        try:
            self._on_entry()
        except BaseException:
            self._lock.release()
            raise

    def _leave_modes(self) -> None:
        if self._modes is not None:
            self._modes.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        try:
            self._lock.release()
            self._leave_modes()
        finally:
            self._signals.__exit__(None, None, None)


@contextlib.contextmanager
def in_plain_torch() -> Iterator[None]:
    """Make tensors as if the caller had chosen no inference mode and no default device.

    A callback may save a checkpoint in the inference mode of an evaluation, and what it makes must serve later steps.
    """
    with contextlib.ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())  # which leaving inference mode had turned off
        if not _is_plain():
            modes.enter_context(torch.device("cpu"))
        yield


def _is_plain() -> bool:
    """Whether no inference mode is on, and no `set_default_device` or `with torch.device(...)` is in force."""
    return not torch.is_inference_mode_enabled() and torch.empty(0).device.type == "cpu"


def _shut(transfer: TransferEngine, tiers: Sequence[Tier], pid: int) -> None:
    """Give everything back; must not know the store, whose end it may be."""
    if threading.current_thread().name.startswith(WORKER_PREFIX) and pid == os.getpid():
        # the collector ran on a worker, which cannot wait for itself
        shut = partial(_shut_now, transfer, tiers, pid)
        try:
            start(threading.Thread(target=shut, name="closing tierstore"))
        except NoThreadError as error:
            _left.append(shut)
            _log.warning("a store that was forgotten is closed when the next one is made: %s", error)
    else:
        _shut_now(transfer, tiers, pid)


def _shut_now(transfer: TransferEngine, tiers: Sequence[Tier], pid: int) -> None:
    with contextlib.ExitStack() as closing:  # the last one first, and all of them whatever one of them raises
        for tier in tiers:
            closing.callback(tier.close)
        if pid == os.getpid():
            closing.callback(transfer.close)
