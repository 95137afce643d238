"""The tests' stand-ins for hardware and its faults, in one place.

Each behaves as the real thing until told otherwise, so that a test shows in its own lines what goes wrong.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.arena import Extent
from tierstore.build import Parts
from tierstore.checkpoint.files import Files
from tierstore.checkpoint.writer import Writer
from tierstore.device import Device, DeviceMemory, Event, HostDevice
from tierstore.errors import CapacityError, CheckpointFileError, TransferError
from tierstore.io.base import Engine, Kind, Lane, Operation, Progress, Request
from tierstore.io.threads import ThreadsEngine
from tierstore.mapping import map_host_memory
from tierstore.ranks import Ranks
from tierstore.stats import Pressure
from tierstore.store import ChunkStore
from tierstore.tiers import FileTier, Tier
from tierstore.transfer import Ticket, TransferEngine

PATIENCE_SECONDS = 60.0
"""How long a test waits for a state before it fails; never waited out when the code is right."""
KILLED = 86
"""The exit status of a process that an `EndingFiles` ended."""

# --- io

SHORT = -1
"""Among errnos: no error, but a transfer of one block."""


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


def _strikes(faults: list[_Fault], kind: Kind) -> int | None:
    """The code of the fault that a request of a kind meets; None without one."""
    for fault in faults:
        if fault.kind not in (None, kind) or fault.times == 0:
            continue
        if fault.skip:
            fault.skip -= 1
            continue
        fault.times = None if fault.times is None else fault.times - 1
        return fault.code
    return None


class FaultyEngine(ThreadsEngine):
    """A real engine whose requests can be made to fail, to be interrupted, to fall short, to lie, or to wait.

    `requests` counts the system calls that were begun. With one thread, the default, requests run strictly in order.
    """

    def __init__(self, *, threads: int = 1, queue_depth: int = 8, request_size: int = 1 << 20) -> None:
        self.requests = 0
        self._control = threading.Condition()
        self._faults: list[_Fault] = []
        self._lies: list[_Fault] = []
        self._spoilt: list[tuple[_Fault, set[tuple[int, Kind, int]]]] = []  # and where each has struck
        self._broken: dict[str, tuple[int, Kind | None]] = {}
        self._most_bytes: int | None = None
        self._to_hold: list[_Fault] = []
        self.held: list[Request] = []
        super().__init__(threads=threads, queue_depth=queue_depth, request_size=request_size)

    def fail(self, code: int = errno.EIO, *, nth: int = 1, times: int | None = 1, kind: Kind | None = None) -> None:
        """Let the nth request from now (of `kind`) fail with an errno, and `times` in all; None: all from there on."""
        with self._control:
            self._faults.append(_Fault(code, kind, nth - 1, times))

    def spoil(self, code: int = errno.EIO, *, nth: int = 1, times: int | None = 1, kind: Kind | None = None) -> None:
        """As `fail`, and for good: what was hit fails each time it is tried again at its place in the file."""
        with self._control:
            self._spoilt.append((_Fault(code, kind, nth - 1, times), set()))

    def interrupt(self, times: int, *, kind: Kind | None = None) -> None:
        """Let the next requests be interrupted (EINTR) before they move anything."""
        self.fail(errno.EINTR, times=times, kind=kind)

    def lie(self, *, nth: int = 1, times: int | None = 1, kind: Kind) -> None:
        """Let requests succeed with other bytes: those that arrive in the file, or that a read brings."""
        with self._control:
            self._lies.append(_Fault(0, kind, nth - 1, times))

    def break_path(self, folder: str, code: int, *, kind: Kind | None = None) -> None:
        """Let every request in a folder fail, or every one of a kind."""
        with self._control:
            self._broken[folder] = code, kind

    @property
    def has_struck(self) -> bool:
        """Whether some fault has hit a request."""
        return any(fault.times == 0 for fault in (*self._faults, *(fault for fault, _ in self._spoilt)))

    def shorten(self, most_bytes: int | None) -> None:
        """Let each request move at most so many bytes; None ends that. 0 is what an end of file looks like."""
        with self._control:
            self._most_bytes = most_bytes

    def heal(self) -> None:
        """Forget every fault."""
        with self._control:
            self._faults.clear()
            self._lies.clear()
            self._spoilt.clear()
            self._broken.clear()
            self._most_bytes = None

    def hold(self, *, nth: int = 1, times: int | None = None, kind: Kind | None = None) -> None:
        """Let requests wait from now on, each before it moves anything, until `release`."""
        with self._control:
            self._to_hold.append(_Fault(1, kind, nth - 1, times))

    def release(self) -> None:
        """Let go of the requests that wait."""
        with self._control:
            self._to_hold.clear()
            self.held.clear()
            self._control.notify_all()

    def release_one(self) -> None:
        """Let go of the request that has waited for longest."""
        with self._control:
            self.held.pop(0)
            self._control.notify_all()

    def wait_until_held(self, count: int = 1) -> None:
        """Wait until so many requests are being held; never more than there are threads."""
        with self._control:
            enough = self._control.wait_for(lambda: len(self.held) >= count, PATIENCE_SECONDS)
            assert enough, f"{len(self.held)} are held"

    def wait_until_back(self) -> None:
        """Wait until everything that was given up has come back, once it was let go of."""
        with self._control:
            is_back = self._control.wait_for(lambda: self.late == self.timed_out, PATIENCE_SECONDS)
            assert is_back, f"{self.late} of {self.timed_out} are back"

    def _come_late(self, operation: Operation, failed: TransferError | None) -> None:
        super()._come_late(operation, failed)
        with self._control:
            self._control.notify_all()

    def transfer(self, request: Request) -> int:
        kind = request.operation.kind
        with self._control:
            self.requests += 1
            if _strikes(self._to_hold, kind):
                self._wait_for_release(request)
            code = _strikes(self._faults, kind) or self._strikes_again(request)
            lies = _strikes(self._lies, kind) is not None
            most_bytes = self._most_bytes
        if code == SHORT:
            return self._move(request, 4096)
        if code:
            raise OSError(code, os.strerror(code))
        return self._move_falsely(request) if lies else self._move(request, most_bytes)

    def _strikes_again(self, request: Request) -> int | None:
        operation = request.operation
        place = operation.fd, operation.kind, operation.offset + request.start
        for folder, (code, kind) in self._broken.items():
            if operation.path.startswith(folder) and kind in (None, operation.kind):
                return code
        for fault, places in self._spoilt:
            if place in places:
                return fault.code
            if _strikes([fault], operation.kind) is not None:
                places.add(place)
                return fault.code
        return None

    def _wait_for_release(self, request: Request) -> None:
        self.held.append(request)
        self._control.notify_all()
        self._control.wait_for(lambda: request not in self.held)

    def _move_falsely(self, request: Request) -> int:
        fd, view = request.operation.fd, request.view
        if request.operation.kind is Kind.READ:
            moved = os.preadv(fd, [view], request.offset)
            view[moved // 2] ^= 1
            return moved
        false = memoryview(mmap.mmap(-1, len(view)))
        false[:] = view
        false[len(view) // 2] ^= 1
        return os.pwritev(fd, [false], request.offset)

    def _move(self, request: Request, most_bytes: int | None) -> int:
        if most_bytes == 0:
            return 0
        call = os.preadv if request.operation.kind is Kind.READ else os.pwritev
        return call(request.operation.fd, [request.view[:most_bytes]], request.offset)


class HangingEngine(FaultyEngine):
    """A real engine whose requests are overdue as soon as they are held, and never otherwise.

    Who waits looks again every few milliseconds whether any is held.
    """

    def seconds_left(self) -> float | None:
        return None if super().seconds_left() is None else 0.002

    def _quiet_seconds(self, progress: Progress, now: float) -> float:
        return math.inf if any(request.progress is progress for request in self.held) else 0.0


class Clock:
    """Stands still unless it is told that time has passed."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TokenBucketEngine(ThreadsEngine):
    """A real engine whose paths have rates: requests of a path take their turns at so many bytes per second.

    `rates` gives them by the beginning of a path. A bucket holds a `burst` of seconds, to make up for late threads.
    """

    def __init__(self, rates: Mapping[str, float], *, request_size: int = 256 << 10, burst: float = 0.02) -> None:
        super().__init__(threads=4, queue_depth=4, request_size=request_size)
        self.rates = dict(rates)
        self._burst = burst
        self._full_at: dict[str, float] = {}  # when each path's bucket has filled up again
        self._turn = threading.Condition()

    def transfer(self, request: Request) -> int:
        self._wait_for_tokens(request)
        return super().transfer(request)

    def _wait_for_tokens(self, request: Request) -> None:
        path = next(path for path in self.rates if request.operation.path.startswith(path))
        with self._turn:
            now = time.perf_counter()
            begin = max(self._full_at.get(path, 0.0), now - self._burst)
            self._full_at[path] = begin + len(request.view) / self.rates[path]
            self._turn.wait_for(lambda: False, self._full_at[path] - now)


# --- device

POISON = 0xFF
"""What every byte that is worth nothing is set to: as a float it is NaN."""


class PoisoningDevice(HostDevice):
    """Host memory that is garbage when it is new and when it was given up."""

    def allocate(self, nbytes: int) -> Tensor:
        return super().allocate(nbytes).fill_(POISON)

    def discard(self, extent: Tensor) -> None:
        extent.fill_(POISON)


class CurveDevice(HostDevice):
    """Host memory that stands in for an accelerator, whose memory is what a recorded curve says, point by point.

    Each `memory_now` takes the next point; the last one stays.
    """

    def __init__(self, curve: Sequence[DeviceMemory], name: str = "curve") -> None:
        super().__init__(name)
        self.released = 0  # calls of `release_unused`
        self._curve = deque(curve)

    def memory_bytes(self) -> tuple[int, int]:
        return self._curve[0].free_bytes, self._curve[0].total_bytes

    def memory_now(self) -> DeviceMemory:
        return self._curve.popleft() if len(self._curve) > 1 else self._curve[0]

    def release_unused(self) -> None:
        self.released += 1


class Schedule:
    """Chooses by a seed which piece of queued work is run next, and runs none before somebody waits for something.

    Each stream has a thread and a rank drawn at random, and changed at random now and then; the first stream that is
    able runs its next piece, one piece at a time. A seed may also be eager: then some pieces run as soon as more is
    queued. A `leader` (HonestTransfer) tells when the thread that called the store waits, and when all others have
    done what they can without it; the lanes then wait for their events without hurrying anybody, and what happens
    depends on the seed alone. Without a leader every wait hurries.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.eagerness = self.chance.choice((0.0, 0.0, 0.1, 0.4))
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.history: list[str] = []  # whose piece was run, in order
        self.leaders: list[HonestTransfer] = []
        self._streams: list[HonestStream] = []
        self._running = 0
        self._patient: dict[threading.Thread, Callable[[], bool]] = {}  # lanes that wait, and until when

    def enter(self, stream: HonestStream) -> None:
        """Take part from now on."""
        with self.changed:
            self._streams.append(stream)
            stream.rank = self.chance.random()

    def leave(self, stream: HonestStream) -> None:
        """Take part no more."""
        with self.changed:
            self._streams.remove(stream)

    def wait_for(self, is_enough: Callable[[], bool]) -> None:
        """Block until something is true; run what is queued until it is, unless a leader sees to that."""
        thread = threading.current_thread()
        with self.changed:
            if self.leaders and thread.name.startswith("tierstore-"):
                self._patient[thread] = is_enough
                self.changed.notify_all()
                self._await(is_enough)
                del self._patient[thread]
            else:
                self._hurry(is_enough, is_piece=any(stream.thread is thread for stream in self._streams))

    def settle(self) -> None:
        """Wait until every thread but this one has done what it can without another piece being run."""
        with self.changed:
            self._await(self._is_quiet)

    def tempt(self) -> None:
        """Let chance run a few pieces, as a real device would at any time."""
        while self.chance.random() < self.eagerness:
            with self.changed:
                self._await(self._is_quiet)
                self._run_one()

    def is_patient(self, lane: str) -> bool:
        """Whether a lane's thread is waiting for something that has not come."""
        return any(thread.name == f"tierstore-{lane}" and not has_come() for thread, has_come in self._patient.items())

    def _hurry(self, is_enough: Callable[[], bool], *, is_piece: bool) -> None:
        """Run piece after piece until something is true; a piece that waits does not count as running meanwhile."""
        self._running -= is_piece
        try:
            while not is_enough():
                if self._is_quiet() and self._run_one():
                    continue
                if not is_enough():
                    assert self.changed.wait(PATIENCE_SECONDS), "somebody waits for what nobody will do"
        finally:
            self._running += is_piece

    def _is_quiet(self) -> bool:
        return not self._running and all(leader.is_quiet() for leader in self.leaders)

    def _run_one(self) -> bool:
        able = [stream for stream in self._streams if stream.is_able]
        if not able:
            return False
        stream = min(able, key=lambda stream: stream.rank)
        if self.chance.random() < 0.1:
            stream.rank = self.chance.random()
        self._running += 1
        self.history.append(stream.purpose)
        stream.has_turn = True
        stream.called.notify()
        self._await(lambda: not stream.has_turn)
        return True

    def end_piece(self, stream: HonestStream) -> None:
        """Hear that a stream has run its piece."""
        with self.changed:
            self._running -= 1
            stream.done += 1
            stream.has_turn = False
            self.changed.notify_all()

    def _await(self, is_enough: Callable[[], bool]) -> None:
        assert self.changed.wait_for(is_enough, PATIENCE_SECONDS), "somebody waits for what nobody will do"


@dataclass
class _Work:
    run: Callable[[], None]
    after: HonestEvent | None = None


class HonestStream:
    """A stream that is a thread; its work is run in order, each piece when the schedule chooses it."""

    def __init__(self, schedule: Schedule, purpose: str) -> None:
        self.purpose = purpose
        self.rank = 0.0
        self.queued = self.done = 0
        self.has_turn = False
        self.called = threading.Condition(schedule.lock)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self._schedule = schedule
        self._work: deque[_Work] = deque()
        schedule.enter(self)

    @property
    def is_able(self) -> bool:
        """Whether its next piece may run."""
        if not self._work or self.has_turn:
            return False
        after = self._work[0].after
        return after is None or after.query()

    def copy(self, destination: Tensor, source: Tensor) -> None:
        assert destination.shape == source.shape and destination.dtype == source.dtype == torch.uint8
        destination.fill_(POISON)
        self.add(lambda: destination.copy_(source))

    def wait(self, event: Event) -> None:
        if isinstance(event, HonestEvent):
            self.add(lambda: None, after=event)
        else:
            event.wait()

    def record(self) -> HonestEvent:
        return HonestEvent(self._schedule, self, self.queued, tells_errors=True)

    def add(self, run: Callable[[], object], *, after: HonestEvent | None = None) -> None:
        """Queue a piece of work."""
        with self._schedule.changed:
            self._work.append(_Work(run, after))
            self.queued += 1
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=f"honest-{self.purpose}", daemon=True)
                self.thread.start()
            self._schedule.changed.notify_all()

    def close(self) -> None:
        """Run what is queued and end the thread; more work starts another."""
        self._schedule.wait_for(lambda: self.done == self.queued)
        with self._schedule.changed:
            thread, self.thread = self.thread, None
            self.called.notify()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        myself = threading.current_thread()
        while True:
            with self._schedule.lock:
                self.called.wait_for(lambda: self.has_turn or self.thread is not myself)
                if self.thread is not myself:
                    return
                work = self._work.popleft()
            try:
                if self.error is None:  # after an error a stream does nothing more, as a real one
                    work.run()
            except BaseException as error:
                self.error = error
            self._schedule.end_piece(self)


class HonestEvent:
    """Comes when its stream has done all that was queued when it was recorded."""

    def __init__(self, schedule: Schedule, stream: HonestStream, count: int, *, tells_errors: bool) -> None:
        self._schedule = schedule
        self._stream = stream
        self._count = count
        self._tells_errors = tells_errors

    def query(self) -> bool:
        return self._stream.done >= self._count

    def wait(self) -> None:
        self._schedule.wait_for(self.query)
        if self._tells_errors and self._stream.error is not None:
            raise self._stream.error


class HonestDevice:
    """Host memory that behaves as an accelerator does at its worst.

    Copies and launched work run on threads, as late as they may; what a copy is to fill is garbage from the moment the
    copy is queued, and a discarded extent from that moment. Work that fails is heard of in `finish`.
    """

    torch_device = torch.device("cpu")
    takes_memory_at_once = False

    def __init__(self, seed: int = 0, *, schedule: Schedule | None = None, name: str = "honest") -> None:
        self.name = name
        self.schedule = schedule or Schedule(seed)
        self._compute = HonestStream(self.schedule, f"{name}-compute")
        self._copies: list[HonestStream] = []

    def allocate(self, nbytes: int) -> Tensor:
        return map_host_memory(nbytes).fill_(POISON)

    def copy_stream(self, purpose: str) -> HonestStream:
        self._copies.append(HonestStream(self.schedule, purpose))
        return self._copies[-1]

    def discard(self, extent: Tensor) -> None:
        extent.fill_(POISON)

    def launch(self, work: Callable[[], None]) -> None:
        self._compute.add(work)
        self.schedule.tempt()

    def record(self) -> HonestEvent:
        event = HonestEvent(self.schedule, self._compute, self._compute.queued, tells_errors=False)
        self.schedule.tempt()
        return event

    def wait(self, event: Event) -> None:
        self._compute.wait(event)
        self.schedule.tempt()

    def keep(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        self.record().wait()
        error, self._compute.error = self._compute.error, None
        if error is not None:
            raise error

    def memory_bytes(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def memory_now(self) -> DeviceMemory:
        return DeviceMemory(*self.memory_bytes())

    def release_unused(self) -> None:
        pass

    def close(self) -> None:
        for stream in (self._compute, *self._copies):
            stream.close()


class _HonestLane:
    is_stuck = False

    def __init__(self, carry: Callable[[Request], None], schedule: Schedule) -> None:
        self._carry = carry
        self._schedule = schedule
        self._streams = [HonestStream(schedule, f"io-{number}") for number in range(4)]

    def put(self, request: Request) -> None:
        # by what it is, not by chance: requests come from several threads, whose order no seed decides
        turn = request.offset // 4096 + (request.operation.kind is Kind.WRITE)
        self._streams[turn % len(self._streams)].add(lambda: self._carry(request))

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
            self._schedule.leave(stream)


class HonestEngine(ThreadsEngine):
    """Real reads and writes of real files, each request when the schedule chooses it, in any order."""

    def __init__(self, schedule: Schedule, *, request_size: int = 8192) -> None:
        Engine.__init__(self, request_size=request_size)
        self.under_way = 0  # operations wholly queued and not over
        self._schedule = schedule

    def submit(self, operation: Operation) -> None:
        if operation.kind is Kind.READ:
            operation.buffer[:] = bytes([POISON]) * len(operation.buffer)
        super().submit(operation)
        with self._schedule.changed:
            self.under_way += 1
            self._schedule.changed.notify_all()

    def close(self) -> None:
        self._schedule.wait_for(lambda: not self._under_way)
        super().close()

    def _finish(self, progress: Progress) -> None:
        super()._finish(progress)
        with self._schedule.changed:
            self.under_way -= 1

    def _open_lane(self, path: str) -> Lane:
        return _HonestLane(self._carry, self._schedule)


class HonestTransfer(TransferEngine):
    """The real transfers; tells the schedule when the thread that called the store waits, and when all is quiet."""

    def __init__(self, io: Engine | None, accelerator: Device | None, *, schedule: Schedule) -> None:
        super().__init__(io, accelerator)
        self._schedule = schedule
        self._unheard: dict[Ticket, tuple[Sequence[Ticket], str | None]] = {}  # what each follows, and its lane
        schedule.leaders.append(self)

    def submit(
        self,
        source: tuple[Tier, Extent],
        destination: tuple[Tier, Extent],
        nbytes: int,
        *,
        after: Sequence[Ticket] = (),
        ready: Event | None = None,
    ) -> Ticket:
        ticket = super().submit(source, destination, nbytes, after=after, ready=ready)
        is_file = any(isinstance(tier, FileTier) for tier, _ in (source, destination))
        self._follow(ticket, after, is_file)
        self._schedule.tempt()
        return ticket

    def read_out(self, source: tuple[Tier, Extent], into: Tensor, *, ready: Event | None = None) -> Ticket:
        ticket = super().read_out(source, into, ready=ready)
        self._follow(ticket, (), isinstance(source[0], FileTier))
        return ticket

    def wait_for(self, ticket: Ticket, timeout: float | None) -> None:
        self._schedule.wait_for(ticket.is_done)
        super().wait_for(ticket, timeout)

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        if wait:
            self._schedule.wait_for(lambda: not self._ended.empty())
        return super().next_ended(wait=False)

    def close(self) -> None:
        self._schedule.wait_for(lambda: not self._unheard)
        super().close()
        if self in self._schedule.leaders:
            self._schedule.leaders.remove(self)

    def is_quiet(self) -> bool:
        """Whether every transfer that could begin is a queued piece, or behind one that its lane waits for."""
        at_files = 0
        for after, lane in self._unheard.values():
            if not all(ticket.is_done() for ticket in after):
                continue
            if lane is None:
                at_files += 1
            elif not self._schedule.is_patient(lane):
                return False
        return not isinstance(self._io, HonestEngine) or at_files <= self._io.under_way

    def _follow(self, ticket: Ticket, after: Sequence[Ticket], is_file: bool) -> None:
        with self._schedule.changed:
            self._unheard[ticket] = tuple(after), None if is_file else "-".join(ticket.route)
        ticket.when_done(self._hear)
        self._schedule.settle()

    def _hear(self, ticket: Ticket) -> None:
        with self._schedule.changed:
            del self._unheard[ticket]
            self._schedule.changed.notify_all()


def honest_parts(seed: int, *, asynchronous_host: bool = False) -> Parts:
    """Every maker's honest stand-in, all under one schedule: what a store does depends on the seed alone.

    `asynchronous_host`: updates computed in the cpu tier run late too, which its protocol allows.
    """
    schedule = Schedule(seed)

    def host_for(_: torch.device | None, *, pin_memory: bool) -> Device:
        return HonestDevice(schedule=schedule, name="host") if asynchronous_host else PoisoningDevice()

    return Parts(
        open_probe=lambda **_: RandomProbe(seed),
        open_device=lambda wanted, on: HonestDevice(schedule=schedule),
        host_for=host_for,
        open_engine=lambda *_, **__: HonestEngine(schedule),
        open_transfer=lambda io, accelerator: HonestTransfer(io, accelerator, schedule=schedule),
    )


# --- pressure


class CurveProbe:
    """Measures memory of `total` bytes: a tier has what it has, and others have what a curve says, step by step.

    It stands for `Probe`; the last point of the curve stays. `store` is set once there is one.
    """

    def __init__(self, total: int, curve: Sequence[int], tier: str = "cpu") -> None:
        self.store: ChunkStore | None = None
        self.seen: list[float] = []  # the shares that were measured
        self._total = total
        self._curve = deque(curve)
        self._tier = tier

    def measure(self) -> dict[str, Pressure]:
        """What is used at the next point of the curve."""
        if len(self._curve) > 1:
            self._curve.popleft()
        return self.measure_now()

    def measure_now(self) -> dict[str, Pressure]:
        """What is used at this point."""
        used = self._curve[0]
        if self.store is not None:
            used += self.store.stats().tiers[self._tier].capacity_bytes
        self.seen.append(used / self._total)
        disk = Pressure(0, 1 << 40, "an empty disk")
        return {self._tier: Pressure(used, self._total, "as a curve says"), "nvme": disk}


class RandomProbe:
    """Measures anything, for the tiers there may be. It stands for `Probe`."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def measure(self) -> dict[str, Pressure]:
        """Another pressure each time; the disks are empty."""
        found = {tier: Pressure(self._chance.randint(0, 1 << 40), 1 << 40, "drawn") for tier in ("gpu", "cpu")}
        return {**found, "nvme": Pressure(0, 1 << 40, "an empty disk")}

    measure_now = measure


class ActivationDevice(HostDevice):
    """Host memory that stands in for an accelerator of `total` bytes, with an allocator that keeps what is freed.

    `activate` is a forward and backward that needs so many bytes beside what is there.
    """

    def __init__(self, total: int) -> None:
        super().__init__("stand-in")
        self._total = total
        self._slabs: list[weakref.ref[Tensor]] = []
        self.releases = 0
        self._kept = 0  # by the allocator, free to use again
        self._peak = 0

    @property
    def allocated(self) -> int:
        """Bytes of slabs that are there."""
        return sum(slab.numel() for one in self._slabs if (slab := one()) is not None)

    def allocate(self, nbytes: int) -> Tensor:
        if self.allocated + nbytes > self._total:
            raise CapacityError(f"{self._total - self.allocated} bytes are free, and {nbytes} are asked for")
        self._kept = min(max(0, self._kept - nbytes), self._total - self.allocated - nbytes)
        slab = super().allocate(nbytes)
        self._slabs.append(weakref.ref(slab))
        return slab

    def activate(self, nbytes: int) -> None:
        """Have `nbytes` more for a moment. Raises OutOfMemoryError as a device does."""
        at_peak = self.allocated + nbytes
        if at_peak > self._total:
            raise torch.OutOfMemoryError(f"tried to allocate {nbytes} bytes, {self._total - self.allocated} are free")
        self._peak = max(self._peak, at_peak)
        self._kept = max(self._kept, nbytes)

    def memory_now(self) -> DeviceMemory:
        allocated = self.allocated
        reserved = allocated + self._kept
        return DeviceMemory(self._total - reserved, self._total, reserved, allocated, self._peak)

    def release_unused(self) -> None:
        self.releases += 1
        self._kept = 0


# --- checkpoints


class HeldWriters:
    """Opens real writers of checkpoints, all of which can be made to wait and to fail."""

    def __init__(self) -> None:
        self.fault: BaseException | None = None
        self._is_free = threading.Event()
        self._is_free.set()
        self._is_held = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Writer:
        return _HeldWriter(self, *arguments, **options)

    def hold(self) -> None:
        """Let what is written from now on wait until `release`."""
        self._is_free.clear()

    def release(self) -> None:
        """Let it go on."""
        self._is_free.set()

    def wait_until_held(self) -> None:
        """Wait until something waits."""
        assert self._is_held.wait(PATIENCE_SECONDS), "nothing was written"

    def meet(self) -> None:
        """Wait or fail, as told."""
        self._is_held.set()
        assert self._is_free.wait(PATIENCE_SECONDS), "nobody let the writer go on"
        if self.fault is not None:
            raise self.fault


class _HeldWriter(Writer):
    def __init__(self, owner: HeldWriters, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._owner = owner

    def write(self, section: str, number: int, field: str, start: int, values: Tensor) -> None:
        if section != "extra":
            self._owner.meet()
        super().write(section, number, field, start, values)

    def commit(self, **options: Any) -> None:
        self._owner.meet()
        super().commit(**options)


class EndingFiles(Files):
    """The filesystem until its nth call, in place of which the process ends, as if it had been killed.

    `can_exchange` False: folders cannot change names, as on some network filesystems.
    """

    def __init__(self, nth: int, *, can_exchange: bool = True) -> None:
        self.left = nth
        self.can_exchange = can_exchange

    def __getattribute__(self, name: str) -> object:
        if hasattr(Files, name):
            self.left -= 1
            if self.left == 0:
                os._exit(KILLED)
        return super().__getattribute__(name)

    def exchange(self, one: str, other: str) -> bool:
        return self.can_exchange and super().exchange(one, other)


class VanishingFiles(Files):
    """The first folder that is made is gone at once: another saver took it, not locked yet, for a dead one's."""

    has_vanished = False

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        if not self.has_vanished:
            self.has_vanished = True
            self.remove_folder(path)


class UnsyncedFiles(Files):
    """Cannot sync a folder any more once names have changed in it."""

    has_exchanged = False

    def exchange(self, one: str, other: str) -> bool:
        self.has_exchanged = super().exchange(one, other)
        return self.has_exchanged

    def sync(self, path: str) -> None:
        if self.has_exchanged:
            raise CheckpointFileError(errno.EIO, "Input/output error", path)
        super().sync(path)


class RecordingFiles(Files):
    """Notes what was written, and not synced since, when anything is renamed."""

    def __init__(self) -> None:
        self.unsynced: set[str] = set()
        self.at_renames: list[set[str]] = []

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        self.unsynced |= {path, os.path.dirname(path)}

    def create(self, path: str, content: bytes) -> None:
        super().create(path, content)
        self.unsynced |= {path, os.path.dirname(path)}

    def reserve(self, path: str, nbytes: int) -> None:
        super().reserve(path, nbytes)
        self.unsynced |= {path, os.path.dirname(path)}

    def put(self, path: str, content: Any, offset: int, *, direct: bool) -> None:
        super().put(path, content, offset, direct=direct)
        self.unsynced.add(path)

    def remove_file(self, path: str) -> None:
        super().remove_file(path)
        self.unsynced.discard(path)

    def sync(self, path: str) -> None:
        super().sync(path)
        self.unsynced.discard(path)

    def sync_filesystem(self, path: str) -> None:
        super().sync_filesystem(path)
        self.unsynced.clear()

    def rename(self, source: str, target: str) -> None:
        self.at_renames.append(set(self.unsynced))
        super().rename(source, target)

    def exchange(self, one: str, other: str) -> bool:
        self.at_renames.append(set(self.unsynced))
        return super().exchange(one, other)


class FailingFiles(Files):
    """The filesystem until its nth call, which fails, as on a disk that has just broken for a moment.

    Syncs nothing really, which takes most of the time of many small files.
    """

    def __init__(self, nth: int) -> None:
        self.left = nth

    def sync(self, path: str) -> None:
        pass

    def __getattribute__(self, name: str) -> object:
        if hasattr(Files, name):
            self.left -= 1
            if self.left == 0:
                raise CheckpointFileError(errno.EIO, "Input/output error", name)
        return super().__getattribute__(name)


class FewThreads:
    """While it is entered, refuses the start of thread number `first`, from 1, and (`for_good`) of all later ones."""

    def __init__(self, first: int = 1, *, for_good: bool = True) -> None:
        self.refused: list[str] = []
        self._first = first
        self._for_good = for_good
        self._numbers = itertools.count(1)
        self._start = threading.Thread.start

    def __enter__(self) -> FewThreads:
        def start(thread: threading.Thread) -> None:
            self._start_or_refuse(thread)

        threading.Thread.start = start  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        threading.Thread.start = self._start  # type: ignore[method-assign]

    def _start_or_refuse(self, thread: threading.Thread) -> None:
        number = next(self._numbers)
        if number == self._first or (self._for_good and number > self._first):
            self.refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        self._start(thread)


class ThreadRanks:
    """Ranks that are threads of this process: one group of `count`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=PATIENCE_SECONDS)
        self._told: list[Any] = [None] * count

    def run(self, work: Callable[[Ranks], object]) -> list[object]:
        """Do `work` as each rank; return the results, or what was raised, in order."""
        results: list[object] = [None] * self.count

        def be(rank: int) -> None:
            try:
                results[rank] = work(Ranks(rank, self.count, lambda value: self._gather(rank, value)))
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def lose(self) -> None:
        """Let this rank be gone: whoever waits for it hears so, and whoever will."""
        self._barrier.abort()

    def _gather(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told
