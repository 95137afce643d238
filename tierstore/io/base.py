"""Engines read and write ranges of files and decide nothing: which range, when and why is the caller's affair.

This module owns what all engines share: an operation is checked, cut into requests, each request is carried on
through short transfers and interruptions, and the operation's `done` is called once when its last request has ended.
A subclass only says how requests are run. Each path has a queue of its own, and its own workers, so that a slow disk
never holds up a fast one. The invariant: when `done` is called no byte of the buffer is touched any more by the engine,
whatever went wrong.
"""

from __future__ import annotations

import abc
import ctypes
import enum
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from tierstore.errors import AlignmentError, ForkedStoreError, StoreClosedError, TransferError
from tierstore.trace import Trace

ALIGNMENT = 4096
"""Bytes that address, offset and length of a direct transfer must be multiples of."""

FRUITLESS_LIMIT = 100
"""Calls in a row that may move nothing (EINTR, EAGAIN, less than a block) before that is an error."""

_RETRIED = {errno.EINTR, errno.EAGAIN}
_ADVICE = {
    errno.ENOSPC: "free space on this filesystem or lower tiers.nvme.capacity",
    errno.EDQUOT: "raise the quota or lower tiers.nvme.capacity",
    errno.EBADF: "the swap file was closed while it was in use",
    errno.EINVAL: "this filesystem may not support direct I/O: set tiers.nvme.io.direct to false",
}
_DEFAULT_ADVICE = "check the disk and the kernel's log, or set tiers.nvme.paths to another disk"

_log = logging.getLogger("tierstore.io")


class Kind(enum.Enum):
    """Which way the bytes go."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Operation:
    """One whole transfer between a range of a file and host memory; `path` names the file, and its queue.

    The buffer is writable, contiguous and of format 'B'; it stays untouched by the caller until `done` was called.
    `direct` says that `fd` is open with O_DIRECT. `done` is called exactly once, from any thread, and should not block.
    """

    kind: Kind
    fd: int
    path: str
    offset: int
    buffer: memoryview
    direct: bool
    done: Callable[[TransferError | None], None]


@dataclass(slots=True, eq=False)
class Progress:
    """How much of one operation is still to be done; shared by its requests."""

    operation: Operation
    requests_left: int
    error: TransferError | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: TransferError) -> None:
        """Keep the first error."""
        with self.lock:
            self.error = self.error or error

    def end_request(self) -> bool:
        """Count one request as ended; True for the last."""
        with self.lock:
            self.requests_left -= 1
            return self.requests_left == 0


@dataclass(slots=True, eq=False)
class Request:
    """A part of an operation that is handed to the system at once, and how far it has come."""

    progress: Progress
    start: int
    length: int
    moved: int = 0
    fruitless: int = 0

    @property
    def operation(self) -> Operation:
        """The operation this is a part of."""
        return self.progress.operation

    @property
    def offset(self) -> int:
        """Where in the file the rest begins, in bytes."""
        return self.operation.offset + self.start + self.moved

    @property
    def view(self) -> memoryview:
        """The memory of the rest."""
        return self.operation.buffer[self.start + self.moved : self.start + self.length]

    @property
    def is_abandoned(self) -> bool:
        """True when another request of the operation has failed already, so that this one need not run."""
        return self.progress.error is not None


class Lane(Protocol):
    """The queue of one path, and what works it off."""

    def put(self, request: Request) -> None:
        """Take a request, without blocking on I/O, and see to it that it comes to the engine's `_end`."""

    def close(self) -> None:
        """Wait for the threads to end and free what they hold; no request is left."""


class Engine(abc.ABC):
    """Runs operations, any number at a time, those of one path in the order they were submitted as far as they begin.

    `submit` never blocks on I/O and may be called from any thread, from `done` too. `close` is the owner's to call,
    never from `done`: it waits for every operation.
    """

    name: ClassVar[str]
    supports_direct: ClassVar[bool]

    def __init__(self, *, request_size: int) -> None:
        self.trace: Trace | None = None  # hears of every request of an engine that has workers
        self._request_size = request_size
        self._pid = os.getpid()
        self._state = threading.Condition()
        self._operations = 0
        self._is_closed = False
        self._lanes: dict[str, Lane] = {}

    def prepare(self, path: str) -> None:
        """Open a path's queue, which `submit` does too, if it is to be known beforehand whether that can be.

        Raises EngineUnavailableError.
        """
        with self._state:
            self._lane(path)

    def submit(self, operation: Operation) -> None:
        """Begin an operation; its `done` tells the end.

        Raises AlignmentError, ValueError or StoreClosedError before anything has happened; `done` is then not called.
        """
        _check(operation)
        self._refuse_fork()
        with self._state:
            if self._is_closed:
                raise StoreClosedError(f"the {self.name} engine is closed: {_describe(operation)} was not begun")
            lane = self._lane(operation.path)
            self._operations += 1
        progress = Progress(operation, requests_left=-(-len(operation.buffer) // self._request_size))
        if not progress.requests_left:
            self._finish(progress)
        for request in _split(progress, self._request_size):
            lane.put(request)

    def close(self) -> None:
        """Wait for what was submitted, then end the threads. Idempotent; in a forked child it does nothing."""
        if self._pid != os.getpid():
            return
        with self._state:
            first, self._is_closed = not self._is_closed, True
            self._state.wait_for(lambda: self._operations == 0)
        if first:
            self._stop()

    @abc.abstractmethod
    def _open_lane(self, path: str) -> Lane:
        """Make the queue of a path. Raises EngineUnavailableError."""

    def _stop(self) -> None:
        """Wait for the engine's threads to end and free what it holds; no request is left."""
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, path: str) -> Lane:
        if path not in self._lanes:
            self._lanes[path] = self._open_lane(path)
        return self._lanes[path]

    def _accept(self, request: Request, result: int) -> bool:
        """Note what one system call returned, a count or a negative errno; True when the request needs no more calls.

        Every engine passes every result through here.
        """
        operation = request.operation
        if -result in _RETRIED:
            return self._is_fruitless(request, -result)
        if result < 0:
            request.progress.fail(_failure(request, -result))
            return True
        if result == 0:
            request.progress.fail(_nothing_moved(request, 0))
            return True
        whole = result - (request.offset + result) % ALIGNMENT if operation.direct else result
        if whole <= 0:
            return self._is_fruitless(request, 0, partial=result)
        request.moved += whole
        request.fruitless = 0
        return request.moved >= request.length

    def _is_fruitless(self, request: Request, code: int, partial: int = 0) -> bool:
        """Count a call that moved nothing; True, with an error noted, when there were too many in a row."""
        request.fruitless += 1
        if request.fruitless < FRUITLESS_LIMIT:
            return False
        request.progress.fail(_failure(request, code) if code else _nothing_moved(request, partial))
        return True

    def _fail(self, request: Request, error: BaseException) -> None:
        """Note something else than a system call's result that stopped a request."""
        failure = _failure(request, errno.EIO, because=repr(error))
        failure.__cause__ = error
        request.progress.fail(failure)

    def _end(self, request: Request) -> None:
        """Say that a request is over and its memory no longer touched."""
        if request.progress.end_request():
            self._finish(request.progress)

    def _finish(self, progress: Progress) -> None:
        try:
            progress.operation.done(progress.error)
        except Exception:
            _log.exception("the callback of a %s raised", _describe(progress.operation))
        finally:
            with self._state:
                self._operations -= 1
                if not self._operations:
                    self._state.notify_all()  # who closes waits for the last one

    def _refuse_fork(self) -> None:
        if self._pid != os.getpid():
            raise ForkedStoreError(
                f"the {self.name} engine belongs to process {self._pid} and this is its child {os.getpid()}, "
                "where its threads do not exist: make another one here"
            )


def _split(progress: Progress, request_size: int) -> Iterator[Request]:
    total = len(progress.operation.buffer)
    for start in range(0, total, request_size):
        yield Request(progress, start, min(request_size, total - start))


def _check(operation: Operation) -> None:
    buffer = operation.buffer
    if buffer.readonly or buffer.format != "B" or not buffer.c_contiguous:
        raise ValueError(
            f"a {_describe(operation)} needs a writable, contiguous buffer of format 'B', "
            f"not readonly={buffer.readonly}, format={buffer.format!r}, contiguous={buffer.c_contiguous}"
        )
    if operation.direct:
        _check_alignment(operation)


def _check_alignment(operation: Operation) -> None:
    found = {"address": _address(operation.buffer), "offset": operation.offset, "length": len(operation.buffer)}
    wrong = [f"{name} {value} is {value % ALIGNMENT} over" for name, value in found.items() if value % ALIGNMENT]
    if wrong:
        raise AlignmentError(
            f"a direct {_describe(operation)} of {operation.path} must be aligned to {ALIGNMENT} bytes: "
            f"{', '.join(wrong)}; align it, or open the file without O_DIRECT (tiers.nvme.io.direct: false)"
        )


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


def _describe(operation: Operation) -> str:
    return f"{operation.kind.value} of {len(operation.buffer)} bytes at offset {operation.offset}"


def _failure(request: Request, code: int, because: str | None = None) -> TransferError:
    text = f"{_describe(request.operation)} failed at byte {request.offset}: {because or os.strerror(code)}"
    return TransferError(code, f"{text}; {_ADVICE.get(code, _DEFAULT_ADVICE)}", request.operation.path)


def _nothing_moved(request: Request, partial: int) -> TransferError:
    end = request.offset + partial
    if request.operation.kind is Kind.READ:
        what = f"unexpected end of file at byte {end}: something else truncated the file, what was behind that is lost"
    else:
        what = f"the system wrote nothing at byte {end} and gave no reason; {_DEFAULT_ADVICE}"
    return TransferError(errno.EIO, f"{_describe(request.operation)}: {what}", request.operation.path)
