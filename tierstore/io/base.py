"""Engines read and write ranges of files and decide nothing: which range, when and why is the caller's affair.

This module owns what all engines share: an operation is checked, cut into requests, each request is carried on
through short transfers and interruptions, and the operation's `done` is called once when its last request has ended.
A subclass only says how requests are run. Each path has a queue of its own, and its own workers, so that a slow disk
never holds up a fast one. The invariant: when `done` is called no byte of the buffer is touched any more by the engine,
whatever went wrong, with one exception.

That is an operation that hangs: one that the system has had for `timeout_seconds`, in which nothing at all came back on
its path. Who waits, or closes, gives it up; the system may touch its buffer and file until it comes back late, if ever,
and neither is taken from it: the worker holds on to the buffer, and its owner to the file. A queue that is merely long
is no hang, as long as anything in it ends.
"""

from __future__ import annotations

import abc
import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

from tierstore.errors import AlignmentError, ForkedStoreError, StoreClosedError, TransferError
from tierstore.io.checksum import checksum
from tierstore.io.requests import (
    ALIGNMENT,
    Ending,
    Kind,
    Operation,
    Progress,
    Request,
    Sums,
    describe,
    failure,
    not_begun,
    nothing_moved,
    split,
    wrong_bytes,
)
from tierstore.trace import Trace

__all__ = ["ALIGNMENT", "Engine", "Kind", "Lane", "Operation", "Progress", "Request"]

FRUITLESS_LIMIT = 100
"""Calls in a row that may move nothing (EINTR, EAGAIN, less than a block) before that is an error."""

_RETRIED = {errno.EINTR, errno.EAGAIN}

_log = logging.getLogger("tierstore.io")


class Lane(Protocol):
    """The queue of one path, and what works it off."""

    @property
    def is_stuck(self) -> bool:
        """Whether all that could carry a request is at requests that were given up and have not come back."""

    def put(self, request: Request) -> None:
        """Take a request, without blocking on I/O, and see to it that it comes to the engine's `_end`."""

    def close(self) -> None:
        """Wait for the threads to end and free what they hold; no request is left but such as were given up.

        A thread that has one of those is not waited for: it ends when that comes back.
        """


class Engine(abc.ABC):
    """Runs operations, any number at a time, those of one path in the order they were submitted as far as they begin.

    `submit` never blocks on I/O and may be called from any thread, from `done` too. `close` is the owner's to call,
    never from `done`: it waits for every operation, at most until those that hang count as such.
    """

    name: ClassVar[str]
    supports_direct: ClassVar[bool]

    def __init__(self, *, request_size: int) -> None:
        self.trace: Trace | None = None  # hears of every request of an engine that has workers
        self.timeout_seconds: float | None = None  # of silence on a path, after which what the system has is given up
        self.clock: Callable[[], float] = time.monotonic
        self.timed_out = self.late = 0  # operations given up while the system had them; those of them that came back
        self.misread = 0  # requests whose bytes were right only when they were read once more
        self._request_size = request_size
        self._pid = os.getpid()
        self._state = threading.RLock()
        self._all_over = threading.Condition(self._state)
        self._under_way: dict[Progress, None] = {}  # the oldest first
        self._heard: dict[str, float] = {}  # when anything last came back on a path
        self._is_closed = False
        self._lanes: dict[str, Lane] = {}

    def prepare(self, path: str) -> None:
        """Open a path's queue, which `submit` does too, if it is to be known beforehand whether that can be.

        Raises EngineUnavailableError or NoThreadError.
        """
        with self._state:
            self._lane(path)

    def submit(self, operation: Operation) -> None:
        """Begin an operation; its `done` tells the end.

        Raises AlignmentError, ValueError or StoreClosedError, or what `prepare` does, before anything has happened;
        `done` is then not called.
        """
        _check(operation)
        self._refuse_fork()
        with self._state:
            if self._is_closed:
                raise StoreClosedError(f"the {self.name} engine is closed: {describe(operation)} was not begun")
            lane = self._lane(operation.path)
            error = not_begun(operation) if self.timed_out > self.late and lane.is_stuck else None
            requests = [] if error is not None else split(operation, self._request_size)
            progress = Progress(operation, len(requests), error)
            self._under_way[progress] = None
        if not requests:
            self._finish(progress)
        for start, length in requests:
            lane.put(Request(progress, start, length))

    def close(self) -> None:
        """Wait for what was submitted, then end the threads. Idempotent; in a forked child it does nothing."""
        if self._pid != os.getpid():
            return
        with self._state:
            first, self._is_closed = not self._is_closed, True
        while not self._wait_until_all_over(self.seconds_left()):
            self.give_up()
        if first:
            self._stop()

    # -- what hangs ---------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """For how long to wait before it is time to `give_up`. None: for ever, or until there is something to do."""
        with self._state:
            under_way = list(self._under_way)
        if self.timeout_seconds is None or not under_way:
            return None
        now = self.clock()
        quiet = max((self._quiet_seconds(progress, now) for progress in under_way if progress.running), default=0.0)
        return max(0.0, self.timeout_seconds - quiet)

    def give_up(self) -> int:
        """End the operations that hang, and those that nobody is left to begin; return how many."""
        if self.timeout_seconds is None:
            return 0
        now, seconds = self.clock(), self.timeout_seconds
        with self._state:
            under_way = list(self._under_way)
        overdue = [one for one in under_way if one.running and self._quiet_seconds(one, now) >= seconds]
        ended = [progress for progress in overdue if progress.give_up(seconds)]
        stuck = {path for path in {one.operation.path for one in under_way} if self._lanes[path].is_stuck}
        ended += [one for one in under_way if one.operation.path in stuck and not one.running and one.give_up(seconds)]
        for progress in ended:
            self.timed_out += progress.is_lost
            self._finish(progress)
        return len(ended)

    def _quiet_seconds(self, progress: Progress, now: float) -> float:
        """For how long the system has had an operation and nothing has come back on its path."""
        return now - max(progress.began_seconds, self._heard.get(progress.operation.path, progress.began_seconds))

    def _wait_until_all_over(self, timeout: float | None) -> bool:
        with self._state:
            return self._all_over.wait_for(lambda: not self._under_way, timeout)

    # -- for subclasses -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open_lane(self, path: str) -> Lane:
        """Make the queue of a path. Raises EngineUnavailableError, or NoThreadError with nothing left of it."""

    def _stop(self) -> None:
        """Wait for the engine's threads to end and free what it holds; no request is left but such as were given up."""
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, path: str) -> Lane:
        if path not in self._lanes:
            self._lanes[path] = self._open_lane(path)
        return self._lanes[path]

    def _begin(self, request: Request) -> bool:
        """Ask leave for a system call; False if the request must go no further, and is to be ended.

        Every engine asks before every call, on one of its workers.
        """
        is_first = not request.has_begun
        if not request.progress.begin_request(request, self.clock()):
            return False
        if is_first and (operation := request.operation).sums is not None and operation.kind is Kind.WRITE:
            operation.sums[request.start] = checksum(request.whole)
        return True

    def _accept(self, request: Request, result: int) -> bool:
        """Note what one system call returned, a count or a negative errno; True when the request needs no more calls.

        Every engine passes every result through here.
        """
        operation = request.operation
        self._heard[operation.path] = self.clock()
        if result <= 0:
            return self._is_over_without_bytes(request, -result)
        whole = result - (request.offset + result) % ALIGNMENT if operation.direct else result
        if whole <= 0:
            return self._is_fruitless(request, 0, partial=result)
        request.moved += whole
        request.fruitless = 0
        return request.moved >= request.length and (operation.sums is None or self._is_right(request, operation.sums))

    def _is_over_without_bytes(self, request: Request, code: int) -> bool:
        """Note a call that failed with an errno, or (0) moved nothing; True when that ends the request."""
        if code in _RETRIED:
            return self._is_fruitless(request, code)
        request.progress.fail(failure(request, code) if code else nothing_moved(request, 0))
        return True

    def _is_right(self, request: Request, sums: Sums) -> bool:
        """Whether a request that moved all its bytes needs no second reading: the first may have gone wrong on its way.

        The second one that brings other bytes than were written is an error.
        """
        if request.operation.kind is Kind.WRITE or request.progress.error is not None:
            return True
        found, expected = checksum(request.whole), sums[request.start]
        if found == expected:
            if request.wrong_sum is not None:
                with self._state:
                    self.misread += 1
            return True
        if request.wrong_sum is None:
            request.wrong_sum, request.moved = found, 0
            return False
        request.progress.fail(wrong_bytes(request, expected, found))
        return True

    def _is_fruitless(self, request: Request, code: int, partial: int = 0) -> bool:
        """Count a call that moved nothing; True, with an error noted, when there were too many in a row."""
        request.fruitless += 1
        if request.fruitless < FRUITLESS_LIMIT:
            return False
        request.progress.fail(failure(request, code) if code else nothing_moved(request, partial))
        return True

    def _fail(self, request: Request, error: BaseException) -> None:
        """Note something else than a system call's result that stopped a request."""
        failed = failure(request, errno.EIO, because=repr(error))
        failed.__cause__ = error
        request.progress.fail(failed)

    def _end(self, request: Request) -> None:
        """Say that a request is over and its memory no longer touched. Saying so again changes nothing."""
        ending = request.progress.end_request(request)
        if ending is Ending.LAST:
            self._finish(request.progress)
        elif ending is Ending.LATE:
            self._come_late(request.operation, request.progress.failed)

    def _lose(self, request: Request, error: BaseException) -> None:
        """End a request whose worker died, or found none."""
        self._fail(request, RuntimeError(f"its worker, or the last one of this path, died of {error!r}"))
        self._end(request)

    def _come_late(self, operation: Operation, failed: TransferError | None) -> None:
        with self._state:
            self.late += 1
        operation.late(failed)
        what = "has come back after all" if failed is None else f"has failed in the end: {failed}"
        _log.warning("a %s of %s, given up long ago, %s", describe(operation), operation.path, what)

    def _finish(self, progress: Progress) -> None:
        try:
            progress.operation.done(progress.error)
        except Exception:
            _log.exception("the callback of a %s raised", describe(progress.operation))
        finally:
            with self._state:
                del self._under_way[progress]
                if not self._under_way:
                    self._all_over.notify_all()  # who closes waits for the last one

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise ForkedStoreError(
                f"the {self.name} engine belongs to process {self._pid} and this is its child {os.getpid()}, "
                "where its threads do not exist: make another one here"
            )


def _check(operation: Operation) -> None:
    buffer = operation.buffer
    if buffer.readonly or buffer.format != "B" or not buffer.c_contiguous:
        raise ValueError(
            f"a {describe(operation)} needs a writable, contiguous buffer of format 'B', "
            f"not readonly={buffer.readonly}, format={buffer.format!r}, contiguous={buffer.c_contiguous}"
        )
    if operation.direct and (_address(buffer) | operation.offset | len(buffer)) % ALIGNMENT:
        raise _misaligned(operation)


def _misaligned(operation: Operation) -> AlignmentError:
    found = {"address": _address(operation.buffer), "offset": operation.offset, "length": len(operation.buffer)}
    wrong = [f"{name} {value} is {value % ALIGNMENT} over" for name, value in found.items() if value % ALIGNMENT]
    return AlignmentError(
        f"a direct {describe(operation)} of {operation.path} must be aligned to {ALIGNMENT} bytes: "
        f"{', '.join(wrong)}; align it, or open the file without O_DIRECT (tiers.nvme.io.direct: false)"
    )


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0
