"""A store whose transfers end in a random order, all on one thread: what the planner and the books are tested in.

Every tier is host memory, so that the bytes can be looked at; a transfer really copies them, but only when chance picks
it among those whose predecessors have ended. Extents are poisoned when freed and at the start of a copy into them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierstore.arena import Extent
from tierstore.device import Event, HostDevice
from tierstore.errors import TierstoreError, TransferCancelledError, TransferError
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, ChunkStore, Setup
from tierstore.tiers import MemoryTier, Tier
from tierstore.transfer import Ticket, TransferEngine

RECORD_BYTES = 4096
POISON = 0xFF


class PoisoningDevice(HostDevice):
    """Host memory whose freed extents hold garbage."""

    def discard(self, extent: Tensor) -> None:
        extent.fill_(POISON)


@dataclass(eq=False)
class _Job:
    ticket: Ticket
    source: Tensor
    destination: Tensor
    after: Sequence[Ticket]


class RandomTransfer(TransferEngine):
    """Ends transfers in a random order that respects who follows whom; `fails` picks those that fail."""

    def __init__(self, chance: random.Random, fails: Callable[[Ticket], bool] = lambda _: False) -> None:
        super().__init__(None)
        self._chance = chance
        self._fails = fails
        self._jobs: list[_Job] = []

    def submit(
        self,
        source: tuple[Tier, Extent],
        destination: tuple[Tier, Extent],
        nbytes: int,
        *,
        after: Sequence[Ticket] = (),
        ready: Event | None = None,
    ) -> Ticket:
        (one, extent), (other, place) = source, destination
        assert isinstance(one, MemoryTier) and isinstance(other, MemoryTier)
        ticket = Ticket((one.name, other.name), nbytes)
        ticket.when_done(self._ended.put)
        self._jobs.append(_Job(ticket, one.bytes_at(extent, nbytes), other.bytes_at(place, nbytes), tuple(after)))
        while self._jobs and self._chance.random() < 0.3:
            self._end_one()
        return ticket

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        while wait and self._ended.empty():
            self._end_one()
        return super().next_ended(wait=False)

    def _end_one(self) -> None:
        able = [job for job in self._jobs if all(ticket.is_done() for ticket in job.after)]
        job = self._chance.choice(able)
        self._jobs.remove(job)
        job.ticket.begin()
        job.ticket.resolve(self._copy(job))

    def _copy(self, job: _Job) -> TierstoreError | None:
        if any(ticket.error() is not None for ticket in job.after):
            return TransferCancelledError("a predecessor failed")
        job.destination.fill_(POISON)
        if self._fails(job.ticket):
            return TransferError(5, "injected", "nowhere")
        job.destination.copy_(job.source)
        return None


@dataclass
class Simulation:
    """A store of `capacity` extents per tier, and what every chunk should hold."""

    capacity: Mapping[str, int]
    order: str
    seed: int
    homes: frozenset[str] = frozenset({"gpu", "cpu", "nvme"})
    fails: Callable[[Ticket], bool] = lambda _: False
    expected: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transfer = RandomTransfer(random.Random(self.seed), self.fails)
        tiers = {name: MemoryTier(name, PoisoningDevice(), RECORD_BYTES) for name in self.capacity}
        for name, extents in self.capacity.items():
            tiers[name].grow(extents, slab_extents=max(1, extents // 4))
        slabs = {name: max(1, extents // 4) for name, extents in self.capacity.items()}
        self.store = ChunkStore(
            Setup(tiers, self.homes & set(tiers), self.order, slabs, self.transfer, IoStats("none", direct=False, paths=()))
        )

    def add(self, computes: Sequence[str], named: Sequence[str | None] | None = None) -> None:
        names = named or [None] * len(computes)
        first = len(self.expected)
        infos = {first + n: ChunkInfo(RECORD_BYTES, c, t) for n, (c, t) in enumerate(zip(computes, names, strict=True))}
        self.store.add_chunks(infos)
        self.expected.update(dict.fromkeys(infos, 0))

    def step(self, order: Sequence[int], upcoming: Sequence[int]) -> None:
        """Use each chunk once, checking that it holds what it should, and everything's invariants after each."""
        self.store.run(order, upcoming, self._use)
        self.store.check()

    def _use(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        assert is_fresh == (self.expected[chunk] == 0)
        counter = record.view(torch.int64)
        assert torch.all(counter == self.expected[chunk] * 1000 + chunk if not is_fresh else counter == 0)
        self.expected[chunk] += 1
        counter.fill_(self.expected[chunk] * 1000 + chunk)
        self.store.check()

    def verify(self) -> None:
        """Check every chunk's bytes where they lie."""
        into = torch.empty(RECORD_BYTES, dtype=torch.uint8)
        for chunk, times in self.expected.items():
            assert self.store.read_record(chunk, into) == (times > 0)
            if times:
                assert torch.all(into.view(torch.int64) == times * 1000 + chunk)
