"""One operation of an engine and the requests it is cut into: what is asked, how far it has come, how it ends.

An operation ends once, whatever happens: with its last request, or by being given up. After that none of its requests
begins; one that the system still has may come back late, which ends nothing a second time.
"""

from __future__ import annotations

import enum
import errno
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tierstore.errors import ChecksumError, TransferError, TransferNotBegunError, TransferTimeoutError

ALIGNMENT = 4096
"""Bytes that address, offset and length of a direct transfer must be multiples of."""

Sums = dict[int, int]
"""What a record's parts add up to: a checksum for each request of its write, by where in the record that begins."""

_ADVICE = {
    errno.ENOSPC: "free space on this filesystem or lower tiers.nvme.capacity",
    errno.EDQUOT: "raise the quota or lower tiers.nvme.capacity",
    errno.EBADF: "the swap file was closed while it was in use",
    errno.EINVAL: "this filesystem may not support direct I/O: set tiers.nvme.io.direct to false",
}
_DEFAULT_ADVICE = "check the disk and the kernel's log, or set tiers.nvme.paths to another disk"


class Kind(enum.Enum):
    """Which way the bytes go."""

    READ = "read"
    WRITE = "write"


def _nothing(failed: TransferError | None) -> None:
    pass


class Operation(NamedTuple):
    """One whole transfer between a range of a file and host memory; `path` names the file, and its queue.

    The buffer is writable, contiguous and of format 'B'; it stays untouched by the caller until `done` was called.
    `direct` says that `fd` is open with O_DIRECT. `done` is called exactly once, from any thread, and should not block.
    If it hears of a TransferTimeoutError the system may go on reading from, or writing to, buffer and file, until
    `late` is called, with what went wrong in the end; of any other error, or none, it does not. `sums` are filled by a
    write and checked by a read.
    (A tuple, as two are made for each transfer, in a third of the time of a frozen dataclass.)
    """

    kind: Kind
    fd: int
    path: str
    offset: int
    buffer: memoryview
    direct: bool
    done: Callable[[TransferError | None], None]
    sums: Sums | None = None
    late: Callable[[TransferError | None], None] = _nothing


class Ending(enum.Enum):
    """What the end of a request means for its operation."""

    NONE = "others go on"
    LAST = "the operation is over"
    LATE = "the operation was given up, and now the system has let go of it"


@dataclass(slots=True, eq=False)
class Progress:
    """How much of one operation is still to be done; shared by its requests."""

    operation: Operation
    requests_left: int
    error: TransferError | None = None
    failed: TransferError | None = None  # the same, but that time was up
    running: int = 0  # requests that the system has
    began_seconds: float = math.inf  # when the first of them began
    is_given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: TransferError) -> None:
        """Keep the first error."""
        with self.lock:
            self.failed = self.failed or error
            self.error = self.error or error

    def begin_request(self, request: Request, now: float) -> bool:
        """Count a request as begun; False if there is no need for it any more, as others failed or time was up."""
        with self.lock:
            if self.error is not None:
                return False
            if not request.has_begun:
                request.has_begun = True
                self.began_seconds = min(self.began_seconds, now)
                self.running += 1  # last: who sees that it runs, without the lock, finds since when
            return True

    def end_request(self, request: Request) -> Ending:
        """Count a request as ended, once."""
        with self.lock:
            if request.has_ended:
                return Ending.NONE
            request.has_ended = True
            self.running -= request.has_begun
            self.requests_left -= 1
            if self.is_given_up:
                return Ending.LATE if request.has_begun and not self.running else Ending.NONE
            return Ending.NONE if self.requests_left else Ending.LAST

    def give_up(self, seconds: float) -> bool:
        """End the operation as one that nothing was heard of for so long. False if it is over already.

        The error is a TransferTimeoutError if the system has some of it, and may touch its memory or file yet.
        """
        with self.lock:
            if self.is_given_up or not self.requests_left:
                return False
            self.is_given_up = True
            self.error = _hung(self.operation, seconds) if self.running else not_begun(self.operation)
            return True

    @property
    def is_lost(self) -> bool:
        """Whether it was given up while the system had some of it."""
        return self.is_given_up and isinstance(self.error, TransferTimeoutError)


@dataclass(slots=True, eq=False)
class Request:
    """A part of an operation that is handed to the system at once, and how far it has come."""

    progress: Progress
    start: int
    length: int
    moved: int = 0
    fruitless: int = 0
    has_begun: bool = False
    has_ended: bool = False
    wrong_sum: int | None = None  # what was read the first time, if that was not what was written

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
    def whole(self) -> memoryview:
        """The memory of all of it."""
        return self.operation.buffer[self.start : self.start + self.length]


def split(operation: Operation, request_size: int) -> list[tuple[int, int]]:
    """Cut an operation into requests: where each begins in it, and its length."""
    total = len(operation.buffer)
    return [(start, min(request_size, total - start)) for start in range(0, total, request_size)]


# -- words ------------------------------------------------------------------------------------------------------------


def describe(operation: Operation) -> str:
    """Words for an operation in errors."""
    return f"{operation.kind.value} of {len(operation.buffer)} bytes at offset {operation.offset}"


def failure(request: Request, code: int, because: str | None = None) -> TransferError:
    """Say that a request failed with an errno."""
    text = f"{describe(request.operation)} failed at byte {request.offset}: {because or os.strerror(code)}"
    return TransferError(code, f"{text}; {_ADVICE.get(code, _DEFAULT_ADVICE)}", request.operation.path)


def nothing_moved(request: Request, partial: int) -> TransferError:
    """Say that the system moved nothing and gave no reason."""
    end = request.offset + partial
    if request.operation.kind is Kind.READ:
        what = f"unexpected end of file at byte {end}: something else truncated the file, what was behind that is lost"
    else:
        what = f"the system wrote nothing at byte {end} and gave no reason; {_DEFAULT_ADVICE}"
    return TransferError(errno.EIO, f"{describe(request.operation)}: {what}", request.operation.path)


def not_begun(operation: Operation) -> TransferNotBegunError:
    """Say that a path's workers are all at requests that do not come back."""
    text = (
        f"{describe(operation)} was not begun: everything that could carry it is at requests that this path has not "
        f"answered within tiers.nvme.io.timeout; {_DEFAULT_ADVICE}"
    )
    return TransferNotBegunError(errno.ETIMEDOUT, text, operation.path)


def wrong_bytes(request: Request, expected: int, found: int) -> ChecksumError:
    """Say that a read has twice brought other bytes than were written."""
    again = "both times" if found == request.wrong_sum else f"and {request.wrong_sum:016x} the time before"
    begin = request.operation.offset + request.start
    text = (
        f"{describe(request.operation)}: the {request.length} bytes from byte {begin} on are not those that were "
        f"written: their checksum (xxh3) is {found:016x} {again}, and was {expected:016x}; {_DEFAULT_ADVICE}"
    )
    return ChecksumError(errno.EBADMSG, text, request.operation.path)


def _hung(operation: Operation, seconds: float) -> TransferTimeoutError:
    text = (
        f"{describe(operation)} is given up: nothing was heard of it, nor of anything else on this path, for "
        f"{seconds:g} s (tiers.nvme.io.timeout); {_DEFAULT_ADVICE}, or raise the timeout if the disk is that slow"
    )
    return TransferTimeoutError(errno.ETIMEDOUT, text, operation.path)
