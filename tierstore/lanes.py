"""One direction of the link between two memories: a stream, and the thread that feeds it and hears its events.

Copies are done one after another. If the thread dies, what it had fails, and so does all that comes after.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from tierstore.crew import start
from tierstore.device import Device, Event
from tierstore.errors import StoreClosedError, TierstoreError, TransferError
from tierstore.tickets import Ticket, as_transfer_error
from tierstore.trace import Trace

COPIES_IN_FLIGHT = 2
"""Copies queued on one stream at a time: enough that the next begins while the host hears of the last."""

_log = logging.getLogger("tierstore.lanes")


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One copy to be made, after `ready` on a device."""

    destination: Tensor
    source: Tensor
    ticket: Ticket
    ready: Event | None


class Lane:
    """One direction of the link between host and device: a stream, and a thread that feeds it and hears its events."""

    def __init__(self, name: str, device: Device) -> None:
        self.trace: Trace | None = None
        self._free_seconds = 0.0  # when the last copy ended: they are done one after another
        self._stream = device.copy_stream(name)
        self._copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._under_way: dict[Copy, None] = {}  # all that were put and have not ended
        self._lock = threading.Lock()
        self._is_closed = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"tierstore-{name}", daemon=True)
        start(self._thread)

    def put(self, copy: Copy) -> None:
        with self._lock:
            if self._is_closed:
                raise StoreClosedError("the store is closed: no more copies")
            if self._death is not None:
                raise _died(self._death, copy.ticket)
            self._under_way[copy] = None
            self._copies.put(copy)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._carry()
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Hear that the thread cannot go on: end what it had, once the stream is done with it, and take no more."""
        _log.error("the copying thread %s died", self._thread.name, exc_info=error)
        with self._lock:
            self._death = error
            left, self._under_way = list(self._under_way), {}
        with contextlib.suppress(Exception):  # a stream that failed does nothing more
            self._stream.record().wait()
        for copy in left:
            copy.ticket.resolve(_died(error, copy.ticket))

    def _carry(self) -> None:
        in_flight: deque[tuple[Event, Copy]] = deque()
        is_open = True
        while is_open or in_flight:
            copy = self._next(block=not in_flight) if is_open and len(in_flight) < COPIES_IN_FLIGHT else _NOTHING_YET
            if copy is None:
                is_open = False
            elif isinstance(copy, Copy):
                self._begin(copy, in_flight)
            elif in_flight:
                self._end(*in_flight.popleft())

    def _next(self, *, block: bool) -> Copy | _NothingYet | None:
        try:
            return self._copies.get(block)
        except queue.Empty:
            return _NOTHING_YET

    def _begin(self, copy: Copy, in_flight: deque[tuple[Event, Copy]]) -> None:
        try:
            if copy.ready is not None:
                self._stream.wait(copy.ready)
            self._stream.copy(copy.destination, copy.source)
            in_flight.append((self._stream.record(), copy))
        except BaseException as error:
            self._resolve(copy, as_transfer_error(error, copy.ticket))

    def _end(self, event: Event, copy: Copy) -> None:
        try:
            event.wait()
        except BaseException as error:
            self._resolve(copy, as_transfer_error(error, copy.ticket))
        else:
            self._tell(copy.ticket)
            self._resolve(copy, None)

    def _resolve(self, copy: Copy, error: TierstoreError | None) -> None:
        with self._lock:
            self._under_way.pop(copy, None)
        copy.ticket.resolve(error)

    def _tell(self, ticket: Ticket) -> None:
        began, self._free_seconds = max(ticket.began_seconds, self._free_seconds), time.perf_counter()
        if self.trace is not None:
            self.trace.add(self._thread.name, "copy", began, self._free_seconds, bytes=ticket.nbytes)


class _NothingYet:
    """What a lane finds in an empty queue."""


_NOTHING_YET = _NothingYet()


def _died(death: BaseException, ticket: Ticket) -> TransferError:
    source, destination = ticket.route
    error = TransferError(
        errno.EIO,
        f"copying {ticket.nbytes:,} bytes from {source} to {destination} failed: the thread for it died of {death!r}; "
        f"save the state and make another optimizer",
    )
    error.__cause__ = death
    return error
