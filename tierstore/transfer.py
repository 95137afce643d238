"""Runs one copy between extents of two neighbouring tiers and returns a ticket. Decides nothing.

Whoever waits here gives up what hangs: a ticket whose error is a TransferTimeoutError stands for bytes that may arrive
late, so that what they would arrive in must not be used until it `is_let_go`. What they come from may: reading does no
harm.

A transfer begins when all transfers it was told to follow have succeeded; if one of them failed it never begins, and
fails with TransferCancelledError. Copies between host memory and a file are the engine's; copies between host memory
and a device run on one stream and one thread per direction, so that both directions of the link are busy. Tickets
resolve on those threads; whoever holds one may wait for it, ask it, or have the next transfer follow it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import permutations

from torch import Tensor

from tierstore.arena import Extent
from tierstore.device import Device, Event, HostDevice
from tierstore.errors import (
    TierstoreError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from tierstore.io import Engine, Kind, Operation
from tierstore.lanes import Copy, Lane
from tierstore.retries import Retries
from tierstore.stats import IoStats
from tierstore.tickets import Ticket, as_transfer_error
from tierstore.tiers import FileTier, MemoryTier, Tier
from tierstore.trace import Trace

__all__ = ["Ticket", "TransferEngine"]


@dataclass
class _Follower:
    """A transfer that waits for others; counts them down on whatever threads they end."""

    ticket: Ticket
    start: Callable[[], None]
    waiting: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: TierstoreError | None = None

    def hear(self, predecessor: Ticket) -> None:
        with self.lock:
            self.waiting -= 1
            self.failed = self.failed or predecessor.error()
            is_last = self.waiting == 0
        if not is_last:
            return
        if self.failed is None:
            _go(self.ticket, self.start)
            return
        error = TransferCancelledError(f"not begun, because a transfer it had to follow failed: {self.failed}")
        error.__cause__ = self.failed
        self.ticket.resolve(error)


def _go(ticket: Ticket, start: Callable[[], None]) -> None:
    """Begin a transfer that has nothing to wait for any more."""
    ticket.begin()
    try:
        start()
    except TierstoreError as error:
        ticket.resolve(error)
    except BaseException as error:  # a worker must go on: the ticket carries it
        ticket.resolve(as_transfer_error(error, ticket))


class TransferEngine:
    """Copies between the tiers of one store."""

    def __init__(self, io: Engine | None, accelerator: Device | None = None) -> None:
        self._io = io
        self._retries = None if io is None else Retries(io)
        self._accelerator = accelerator
        self._lanes: dict[str, Lane] = {}
        self._ended: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._trace: Trace | None = None

    def prepare(self, tiers: Iterable[Tier]) -> None:
        """Open the lanes between tiers in memory, which no step is then without. Raises NoThreadError."""
        for source, destination in permutations([tier.name for tier in tiers if isinstance(tier, MemoryTier)], 2):
            self._lane(source, destination)

    def join(self, io: Engine) -> None:
        """Take an engine for files, where there was none until now."""
        self._io, self._retries = io, Retries(io)
        io.trace = self._trace

    def tell(self, trace: Trace | None) -> None:
        """Report what workers and streams do to a trace from now on, or to nobody."""
        self._trace = trace
        if self._io is not None:
            self._io.trace = trace
        for lane in self._lanes.values():
            lane.trace = trace

    def submit(
        self,
        source: tuple[Tier, Extent],
        destination: tuple[Tier, Extent],
        nbytes: int,
        *,
        after: Sequence[Ticket] = (),
        ready: Event | None = None,
    ) -> Ticket:
        """Copy the first `nbytes` of one extent into another, after the transfers `after` and, on a device, `ready`.

        The caller guarantees that nobody writes the source, or touches the destination, until the ticket is done.
        Raises NoThreadError, with nothing begun, for the first copy within a tier in memory.
        """
        ticket = Ticket((source[0].name, destination[0].name), nbytes)
        ticket.when_done(self._ended.put)
        start = self._starter(source, destination, nbytes, ticket, ready)
        if not after:
            _go(ticket, start)
            return ticket
        follower = _Follower(ticket, start, len(after))
        for predecessor in after:
            predecessor.when_done(follower.hear)
        return ticket

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        """Get the ticket of a submitted transfer that has landed or failed, each once; one before those that follow it.

        Returns None when there is none yet, or (with `wait`) none for `timeout` seconds though files are at rest: while
        something moves between them and memory it is the engine that knows how long is too long.
        """
        while self._ended.empty():
            if not wait:
                return None
            left = self._seconds_left()
            try:
                return self._ended.get(timeout=timeout if left is None else left)
            except queue.Empty:
                if not self._goes_on(left):
                    return None
        return self._ended.get()  # which only the thread that asks takes from

    def wait_for(self, ticket: Ticket, timeout: float | None) -> None:
        """Block until a transfer has landed. Raises what stopped it, or TransferTimeoutError as `next_ended` says."""
        goes_on = True
        while goes_on:
            left = self._seconds_left()
            goes_on = not ticket.wait_until_done(timeout if left is None else left) and self._goes_on(left)
        ticket.raise_error(timeout)

    def _seconds_left(self) -> float | None:
        """How long nothing may end before it is time to look for what hangs; None while files are at rest."""
        return None if self._io is None else self._io.seconds_left()

    def _goes_on(self, left: float | None) -> bool:
        """After such a time, give up what hangs. False if files were at rest, and are: it is something else then."""
        if self._io is not None and left is not None:
            self._io.give_up()
            return True
        return self._seconds_left() is not None

    def read_out(self, source: tuple[Tier, Extent], into: Tensor, *, ready: Event | None = None) -> Ticket:
        """Copy the beginning of an extent into host memory outside all tiers (page-aligned, whole pages)."""
        tier, extent = source
        ticket = Ticket((tier.name, "host"), into.numel())
        if isinstance(tier, FileTier):
            memory = into.numpy().data
            start: Callable[[], None] = lambda: self._file(Kind.READ, tier, extent, memory, ticket, ready)  # noqa: E731
        else:
            assert isinstance(tier, MemoryTier)
            copy = Copy(into, tier.bytes_at(extent, into.numel()), ticket, ready)
            start = lambda: self._lane(*ticket.route).put(copy)  # noqa: E731
        _go(ticket, start)
        return ticket

    def io_stats(self, still: IoStats) -> IoStats:
        """Add what went wrong with files so far to what is known of them."""
        io = self._io
        if io is None or self._retries is None:
            return still
        retries = self._retries.count
        return replace(still, timed_out=io.timed_out, late=io.late, misread=io.misread, retries=retries)

    def close(self) -> None:
        """Let what was submitted end, on the accelerator too, and stop the workers. Idempotent.

        What hangs is given up; whoever owns memory and files of it must not take them from it (`SwapFile.keep_open`).
        """
        with ExitStack() as closing:  # the last one first, and all of them whatever one of them raises
            if self._accelerator is not None:
                closing.callback(self._accelerator.close)
            if self._io is not None:
                closing.callback(self._io.close)
            for lane in self._lanes.values():
                closing.callback(lane.close)

    def _starter(
        self,
        source: tuple[Tier, Extent],
        destination: tuple[Tier, Extent],
        nbytes: int,
        ticket: Ticket,
        ready: Event | None,
    ) -> Callable[[], None]:
        (one, extent), (other, place) = source, destination
        if isinstance(one, MemoryTier) and isinstance(other, MemoryTier):
            lane = self._lane(one.name, other.name)
            return lambda: lane.put(Copy(other.bytes_at(place, nbytes), one.bytes_at(extent, nbytes), ticket, ready))
        if isinstance(one, MemoryTier) and isinstance(other, FileTier):
            return lambda: self._file(Kind.WRITE, other, place, one.memory_at(extent, nbytes), ticket, ready)
        if isinstance(one, FileTier) and isinstance(other, MemoryTier):
            return lambda: self._file(Kind.READ, one, extent, other.memory_at(place, nbytes), ticket, ready)
        raise TypeError(f"no route from {one.name} to {other.name}")

    def _file(
        self, kind: Kind, tier: FileTier, extent: Extent, memory: memoryview, ticket: Ticket, ready: Event | None
    ) -> None:
        if ready is not None:
            ready.wait()
        assert self._retries is not None  # a file tier is never built without an engine
        file, offset = tier.range_at(extent)

        def done(error: TransferError | None) -> None:
            if isinstance(error, TransferTimeoutError):
                file.keep_open()
            ticket.resolve(error)

        def late(failed: TransferError | None) -> None:
            file.may_be_closed()
            ticket.let_go(failed)

        sums = tier.begin_sums(extent) if kind is Kind.WRITE else tier.sums_of(extent)
        self._retries.submit(Operation(kind, file.fd, file.path, offset, memory, file.direct, done, sums, late))

    def _lane(self, source: str, destination: str) -> Lane:
        name = f"{source}-{destination}"
        if name not in self._lanes:
            self._lanes[name] = Lane(name, self._accelerator or HostDevice())
            self._lanes[name].trace = self._trace
        return self._lanes[name]
