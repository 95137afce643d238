"""Tickets: what the one who begins a transfer holds, and what others wait for, ask or follow."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

from tierstore.errors import TierstoreError, TransferError, TransferTimeoutError


class Ticket:
    """The handle of one transfer."""

    def __init__(self, route: tuple[str, str], nbytes: int) -> None:
        self.route = route
        self.nbytes = nbytes
        self.began_seconds = 0.0  # when it could begin, by `time.perf_counter`; 0 until then
        self.seconds = 0.0  # from then to the moment its bytes had landed
        self.is_let_go = False  # though it was given up, the system touches neither memory nor file of it any more
        self.failed_late: TransferError | None = None  # what it came back with then
        self._error: TierstoreError | None = None
        self._is_done = False
        self._lock = threading.Lock()
        self._heard: list[Callable[[Ticket], None]] = []  # empty once it is done: what they hold is memory of tiers

    def is_done(self) -> bool:
        """Whether it has landed or failed."""
        return self._is_done

    def error(self) -> TierstoreError | None:
        """Why a done transfer failed, or None."""
        assert self.is_done()
        return self._error

    @property
    def span(self) -> tuple[float, float]:
        """When a done transfer could begin, and when its bytes had landed, as `time.perf_counter` tells them."""
        return self.began_seconds, self.began_seconds + self.seconds

    def wait(self, timeout: float | None) -> None:
        """Block until it has landed. Raises what stopped it, or TransferTimeoutError after `timeout` seconds."""
        self.wait_until_done(timeout)
        self.raise_error(timeout)

    def raise_error(self, timeout: float | None) -> None:
        """Raise what stopped it, or TransferTimeoutError if it has not ended, which somebody waited for so long."""
        if not self.is_done():
            raise TransferTimeoutError(
                errno.ETIMEDOUT,
                f"moving {self.nbytes:,} bytes from {self.route[0]} to {self.route[1]} took longer than {timeout} s "
                f"(tiers.nvme.io.timeout)",
            )
        if self._error is not None:
            raise self._error

    def wait_until_done(self, timeout: float | None) -> bool:
        """Block until it has landed or failed; False if it has not after `timeout` seconds."""
        done = threading.Event()  # made here: most tickets are asked or heard of, and an event costs as much as they
        self.when_done(lambda _: done.set())
        return done.wait(timeout)

    def when_done(self, heard: Callable[[Ticket], None]) -> None:
        """Call `heard`, which must not raise, once it is done, on whatever thread that is; at once if it is done."""
        with self._lock:
            if not self.is_done():
                self._heard.append(heard)
                return
        heard(self)

    def begin(self) -> None:
        """Start its clock."""
        self.began_seconds = time.perf_counter()

    def let_go(self, failed: TransferError | None) -> None:
        """Say that the system has come back from what was given up, and how; on whatever thread that is."""
        self.failed_late = failed
        self.is_let_go = True

    def resolve(self, error: TierstoreError | None) -> None:
        """Say that it has landed, or why it failed."""
        self.seconds = time.perf_counter() - self.began_seconds if self.began_seconds else 0.0
        self._error = error
        with self._lock:
            self._is_done = True
            heard, self._heard = self._heard, []
        for one in heard:
            one(self)


def as_transfer_error(error: BaseException, ticket: Ticket) -> TierstoreError:
    """Say that something stopped a ticket's transfer."""
    source, destination = ticket.route
    failed = TransferError(f"copying {ticket.nbytes:,} bytes from {source} to {destination} failed: {error!r}")
    failed.__cause__ = error
    return failed
