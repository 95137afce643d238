"""The tests' stand-ins for hardware and its faults, in one place.

Each behaves as the real thing until told otherwise, so that a test shows in its own lines what goes wrong.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass

from tierstore.errors import TransferError
from tierstore.io.base import Kind, Request
from tierstore.io.threads import ThreadsEngine

PATIENCE_SECONDS = 60.0
"""How long a test waits for a state before it fails; never waited out when the code is right."""

# --- io


class Outcome:
    """An operation's `done`: remembers every call, and waits for the first."""

    def __init__(self) -> None:
        self.calls: list[TransferError | None] = []
        self._called = threading.Event()

    def __call__(self, error: TransferError | None) -> None:
        self.calls.append(error)
        self._called.set()

    @property
    def is_done(self) -> bool:
        return self._called.is_set()

    def wait(self) -> TransferError | None:
        """Wait until the operation is over and return its error."""
        assert self._called.wait(PATIENCE_SECONDS), "the operation never ended"
        return self.calls[0]


@dataclass
class _Fault:
    code: int
    kind: Kind | None
    skip: int
    times: int | None


class FaultyEngine(ThreadsEngine):
    """A real engine whose requests can be made to fail, to be interrupted, to fall short, or to wait.

    `requests` counts the system calls that were begun. With one thread, the default, requests run strictly in order.
    """

    def __init__(self, *, threads: int = 1, queue_depth: int = 8, request_size: int = 1 << 20) -> None:
        self.requests = 0
        self._control = threading.Condition()
        self._faults: list[_Fault] = []
        self._most_bytes: int | None = None
        self._is_holding = False
        self._held = 0
        super().__init__(threads=threads, queue_depth=queue_depth, request_size=request_size)

    def fail(self, code: int = errno.EIO, *, nth: int = 1, times: int | None = 1, kind: Kind | None = None) -> None:
        """Let the nth request from now (of `kind`) fail with an errno, and `times` in all; None: all from there on."""
        with self._control:
            self._faults.append(_Fault(code, kind, nth - 1, times))

    def interrupt(self, times: int, *, kind: Kind | None = None) -> None:
        """Let the next requests be interrupted (EINTR) before they move anything."""
        self.fail(errno.EINTR, times=times, kind=kind)

    def shorten(self, most_bytes: int | None) -> None:
        """Let each request move at most so many bytes; None ends that. 0 is what an end of file looks like."""
        with self._control:
            self._most_bytes = most_bytes

    def heal(self) -> None:
        """Forget every fault."""
        with self._control:
            self._faults.clear()
            self._most_bytes = None

    def hold(self) -> None:
        """Let requests wait from now on, each before it moves anything, until `release`."""
        with self._control:
            self._is_holding = True

    def release(self) -> None:
        """Let go of the requests that wait."""
        with self._control:
            self._is_holding = False
            self._control.notify_all()

    def wait_until_held(self, count: int = 1) -> None:
        """Wait until so many requests are being held; never more than there are threads."""
        with self._control:
            assert self._control.wait_for(lambda: self._held >= count, PATIENCE_SECONDS), f"{self._held} are held"

    def transfer(self, request: Request) -> int:
        with self._control:
            self.requests += 1
            self._wait_for_release()
            code = self._next_fault(request.operation.kind)
            most_bytes = self._most_bytes
        if code:
            raise OSError(code, os.strerror(code))
        return self._move(request, most_bytes)

    def _wait_for_release(self) -> None:
        self._held += 1
        self._control.notify_all()
        self._control.wait_for(lambda: not self._is_holding)
        self._held -= 1

    def _next_fault(self, kind: Kind) -> int:
        for fault in self._faults:
            if fault.kind not in (None, kind) or fault.times == 0:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times = None if fault.times is None else fault.times - 1
            return fault.code
        return 0

    def _move(self, request: Request, most_bytes: int | None) -> int:
        if most_bytes == 0:
            return 0
        call = os.preadv if request.operation.kind is Kind.READ else os.pwritev
        return call(request.operation.fd, [request.view[:most_bytes]], request.offset)
