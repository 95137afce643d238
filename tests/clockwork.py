"""A store over paths of given rates, under a clock that only the transfers turn: what spreading is measured in.

Every tier is memory and no bytes are copied. Each path carries one transfer after another, reads and writes, in the
order in which they could begin; when a transfer ends is arithmetic. So a rate is exact, and the same in every run.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tests.fakes import PoisoningDevice
from tests.simulator import RECORD_BYTES, DistantTier, TimedTicket
from tierstore.arena import Extent
from tierstore.device import Event
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, ChunkStore, Setup
from tierstore.tiers import MemoryTier, Tier
from tierstore.transfer import Ticket, TransferEngine

Rate = Callable[[int, float], float]
"""Chunks per second of a path at a time."""


@dataclass(eq=False)
class _Job:
    ticket: TimedTicket
    path: int
    waiting: int
    followers: list[_Job] = field(default_factory=list)


class Clockwork(TransferEngine):
    """Transfers that take as long as their paths need."""

    def __init__(self, rate: Rate) -> None:
        super().__init__(None)
        self.now = 0.0
        self.busy: dict[int, float] = {}  # seconds of work by path
        self._rate = rate
        self._free_at: dict[int, float] = {}
        self._jobs: dict[Ticket, _Job] = {}
        self._ends: list[tuple[float, int, float, _Job]] = []
        self._count = itertools.count()

    def submit(
        self,
        source: tuple[Tier, Extent],
        destination: tuple[Tier, Extent],
        nbytes: int,
        *,
        after: Sequence[Ticket] = (),
        ready: Event | None = None,
    ) -> Ticket:
        tier, extent = next(place for place in (source, destination) if isinstance(place[0], DistantTier))
        ticket = TimedTicket((source[0].name, destination[0].name), nbytes)
        ticket.when_done(self._ended.put)
        job = _Job(ticket, tier.arena.path_of(extent.slab), sum(not one.is_done() for one in after))
        self._jobs[ticket] = job
        for one in after:
            if not one.is_done():
                self._jobs[one].followers.append(job)
        if not job.waiting:
            self._begin(job, self.now)
        return ticket

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        while wait and self._ended.empty():
            self.turn_to(self._ends[0][0])
        return super().next_ended(wait=False)

    def turn_to(self, time: float) -> None:
        """Let time pass, and end what ends meanwhile."""
        while self._ends and self._ends[0][0] <= time:
            end, _, began, job = heapq.heappop(self._ends)
            del self._jobs[job.ticket]
            job.ticket.times = began, end
            job.ticket.resolve(None)
            for follower in job.followers:
                follower.waiting -= 1
                if not follower.waiting:
                    self._begin(follower, end)
        self.now = max(self.now, time)

    def _begin(self, job: _Job, time: float) -> None:
        start = max(time, self._free_at.get(job.path, 0.0))
        seconds = 1 / self._rate(job.path, start)
        self.busy[job.path] = self.busy.get(job.path, 0.0) + seconds
        self._free_at[job.path] = start + seconds
        heapq.heappush(self._ends, (start + seconds, next(self._count), time, job))


@dataclass
class Outcome:
    """What some steps came to: chunks moved per second, and how many chunks lie on each path at the end."""

    moved_per_second: float
    chunks: list[int]
    reserved: list[int]


class Machine:
    """A store of `chunks` in swap files on some paths, used through a cpu tier of a few extents, step after step."""

    def __init__(
        self, rate: Rate, *, paths: int, chunks: int, cpu: int, nvme: int, update_seconds: float = 0.0, slab: int = 0
    ) -> None:
        self.clock = Clockwork(rate)
        self.update_seconds = update_seconds
        self.nvme = DistantTier("nvme", RECORD_BYTES, paths)
        tiers: dict[str, Tier] = {"cpu": MemoryTier("cpu", PoisoningDevice(), RECORD_BYTES), "nvme": self.nvme}
        slabs = {"cpu": cpu, "nvme": slab or max(1, nvme // (16 * paths))}
        for name, extents in (("cpu", cpu), ("nvme", nvme)):
            tiers[name].grow(extents, slab_extents=slabs[name])
        io = IoStats("none", direct=False, paths=())
        self.store = ChunkStore(Setup(tiers, frozenset(tiers), "alternating", slabs, self.clock, io))
        self.store.add_chunks({chunk: ChunkInfo(RECORD_BYTES, "cpu", "nvme") for chunk in range(chunks)})
        self._order = list(range(chunks))

    def use(self, chunks: Iterable[int]) -> None:
        """Use only these from now on."""
        self._order = list(chunks)

    def steps(self, count: int) -> Outcome:
        """Use every chunk so many times, in alternating order."""
        began, moved = self.clock.now, self.moved
        for _ in range(count):
            upcoming = self._order[::-1]
            self.store.run(self._order, upcoming, self._use)
            self._order = upcoming
        self.store.check()
        paths = self.store.stats().paths.values()
        return Outcome(
            (self.moved - moved) / max(self.clock.now - began, 1e-9),
            [path.used_bytes // RECORD_BYTES for path in paths],
            [path.capacity_bytes // RECORD_BYTES for path in paths],
        )

    @property
    def moved(self) -> int:
        """Moves from and to paths that have ended."""
        return sum(path.bytes_read + path.bytes_written for path in self.store.stats().paths.values()) // RECORD_BYTES

    def _use(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        self.clock.turn_to(self.clock.now + self.update_seconds)
