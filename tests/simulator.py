"""A store whose transfers end in a random order, all on one thread: what the planner and the books are tested in.

Every tier is memory, so that the bytes can be looked at; a transfer really copies them, but only when chance picks
it among those whose predecessors have ended. Extents are poisoned when freed and at the start of a copy into them.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.fakes import POISON, PoisoningDevice
from tierstore.arena import Arena, Extent
from tierstore.device import Event
from tierstore.errors import CapacityError, DiskFullError, TierstoreError, TransferCancelledError, TransferError
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, ChunkStore, Setup, Use
from tierstore.tiers import MemoryTier, Tier
from tierstore.transfer import Ticket, TransferEngine

RECORD_BYTES = 4096


class DistantTier(Tier):
    """Memory that behaves as swap files do: slabs on several paths, no kernels, no move from it to itself."""

    def __init__(self, name: str, extent_bytes: int, paths: int = 1) -> None:
        super().__init__(name, Arena(name, extent_bytes), [f"/swap{path}" for path in range(paths)])
        self.most: dict[int, int] = {}  # extents that a path has room for, if not for any number
        self.refusals = 0
        self._slabs: dict[int, Tensor] = {}

    def bytes_at(self, extent: Extent, nbytes: int) -> Tensor:
        """View the first `nbytes` of an extent."""
        return self._slabs[extent.slab][extent.offset : extent.offset + nbytes]

    def release(self, extent: Extent) -> None:
        self.bytes_at(extent, extent.length).fill_(POISON)
        super().release(extent)

    def close(self) -> None:
        self._slabs.clear()

    def _reserve(self, nbytes: int, path: int) -> None:
        if self.arena.reserved_on(path) + nbytes // self.arena.extent_bytes > self.most.get(path, 1 << 30):
            self.refusals += 1
            raise DiskFullError(errno.ENOSPC, "injected", self.paths[path])
        self._slabs[self.arena.next_slab] = torch.full((nbytes,), POISON, dtype=torch.uint8)

    def _give_back(self, nbytes: int, path: int) -> None:
        gone = [slab for slab in self._slabs if not self.arena.has_slab(slab)]
        assert sum(self._slabs.pop(slab).numel() for slab in gone) == nbytes


class TimedTicket(Ticket):
    """A ticket whose times are told, not measured, so that nothing depends on the machine."""

    times = 0.0, 0.0

    @property
    def span(self) -> tuple[float, float]:
        return self.times


@dataclass(eq=False)
class _Job:
    ticket: TimedTicket
    source: Tensor
    destination: Tensor
    after: Sequence[Ticket]
    seconds: float


class RandomTransfer(TransferEngine):
    """Ends transfers in a random order that respects who follows whom; `fails` picks those that fail."""

    def __init__(self, chance: random.Random, fails: Callable[[Ticket], bool] = lambda _: False) -> None:
        super().__init__(None)
        self._chance = chance
        self._fails = fails
        self._times = random.Random(1)
        self._clock = 0.0
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
        assert isinstance(one, MemoryTier | DistantTier) and isinstance(other, MemoryTier | DistantTier)
        assert isinstance(one, MemoryTier) or isinstance(other, MemoryTier)
        ticket = TimedTicket((one.name, other.name), nbytes)
        ticket.when_done(self._ended.put)
        paths = [tier.arena.path_of(at.slab) for tier, at in (source, destination) if isinstance(tier, DistantTier)]
        seconds = self._times.random() * 10.0 ** max(paths, default=0)  # later paths are slower, so that room moves
        self._jobs.append(
            _Job(ticket, one.bytes_at(extent, nbytes), other.bytes_at(place, nbytes), tuple(after), seconds)
        )
        while self._jobs and self._chance.random() < 0.3:
            self._end_one()
        return ticket

    def read_out(self, source: tuple[Tier, Extent], into: Tensor, *, ready: Event | None = None) -> Ticket:
        tier, extent = source
        assert isinstance(tier, MemoryTier | DistantTier)
        into.copy_(tier.bytes_at(extent, into.numel()))
        ticket = Ticket((tier.name, "host"), into.numel())
        ticket.resolve(None)
        return ticket

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        while wait and self._ended.empty():
            self._end_one()
        return super().next_ended(wait=False)

    def end_all(self) -> None:
        """End everything that was submitted."""
        while self._jobs:
            self._end_one()

    def _end_one(self) -> None:
        able = [job for job in self._jobs if all(ticket.is_done() for ticket in job.after)]
        job = self._chance.choice(able)
        self._jobs.remove(job)
        job.ticket.times = self._clock, self._clock + job.seconds
        self._clock += job.seconds
        job.ticket.resolve(self._copy(job))

    def _copy(self, job: _Job) -> TierstoreError | None:
        if any(ticket.error() is not None for ticket in job.after):
            return TransferCancelledError("a predecessor failed")
        job.destination.fill_(POISON)
        if self._fails(job.ticket):
            return TransferError(5, "injected", "nowhere")
        job.destination.copy_(job.source)
        return None


class Gathered:
    """Uses of chunks that are done when they are to be launched."""

    def __init__(self, use: Use) -> None:
        self._use = use
        self._gathered: list[tuple[int, Tensor, bool]] = []

    def add(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        """Put a use off."""
        self._gathered.append((chunk, record, is_fresh))

    def use(self) -> None:
        """Do what was put off."""
        gathered, self._gathered = self._gathered, []
        for one in gathered:
            self._use(*one)


@dataclass
class Simulation:
    """A store of `capacity` extents per tier, and what every chunk should hold.

    Every operation ends with `store.check()`.
    """

    capacity: Mapping[str, int]
    order: str
    seed: int
    homes: frozenset[str] = frozenset({"gpu", "cpu", "nvme"})
    fails: Callable[[Ticket], bool] = lambda _: False
    expected: dict[int, int] = field(default_factory=dict)  # times that each chunk was used

    def __post_init__(self) -> None:
        self.transfer = RandomTransfer(random.Random(self.seed), self.fails)
        self.computes: dict[int, str] = {}
        self.leased: Counter[int] = Counter()
        self._chance = random.Random(self.seed + 2)
        self._next_number = 0
        tiers: dict[str, Tier] = {
            name: MemoryTier(name, PoisoningDevice(), RECORD_BYTES) for name in self.capacity if name != "nvme"
        }
        if "nvme" in self.capacity:
            tiers["nvme"] = DistantTier("nvme", RECORD_BYTES, paths=1 + self.seed % 3)
        slabs = {name: max(1, extents // (16 if name == "nvme" else 4)) for name, extents in self.capacity.items()}
        for name, extents in self.capacity.items():
            tiers[name].grow(extents, slab_extents=slabs[name])
        io = IoStats("none", direct=False, paths=())
        self.store = ChunkStore(Setup(tiers, self.homes & set(tiers), self.order, slabs, self.transfer, io))

    def add(self, computes: Sequence[str], named: Sequence[str | None] | None = None) -> None:
        """Enter chunks; on an error nothing has changed."""
        names = named or [None] * len(computes)
        first = self._next_number
        infos = {first + n: ChunkInfo(RECORD_BYTES, c, t) for n, (c, t) in enumerate(zip(computes, names, strict=True))}
        try:
            self.store.add_chunks(infos)
        finally:
            self.store.check()
        self._next_number += len(infos)
        self.expected.update(dict.fromkeys(infos, 0))
        self.computes.update(zip(infos, computes, strict=True))

    def remove(self, chunk: int) -> None:
        """Delete a chunk."""
        self.store.remove_chunk(chunk)
        del self.expected[chunk], self.computes[chunk]
        self.store.check()

    def step(self, order: Sequence[int], upcoming: Sequence[int]) -> None:
        """Use each chunk as often as it occurs; check what it holds and everything's invariants each time."""
        try:
            if self._chance.random() < 0.5:
                self.store.run(order, upcoming, self._use)
            else:
                gathered = Gathered(self._use)
                self.store.run(order, upcoming, gathered.add, flush=gathered.use)
        finally:
            self.store.check()

    @contextlib.contextmanager
    def lease(self, chunk: int) -> Iterator[None]:
        """Use a chunk and hold it meanwhile."""
        with self.store.lease_chunk(chunk) as record:
            self._use(chunk, record, self.expected[chunk] == 0)
            self.leased[chunk] += 1
            try:
                yield
            finally:
                self.leased[chunk] -= 1

    def settle(self) -> int:
        """Wait until nothing is under way; return 1 if some of it failed."""
        try:
            self.store.wait()
        except TransferError:
            return 1
        finally:
            self.store.check()
        self.store.wait()
        return 0

    def _use(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        assert is_fresh == (self.expected[chunk] == 0)
        counter = record.view(torch.int64)
        assert torch.all(counter == (0 if is_fresh else self._content(chunk)))
        self.expected[chunk] += 1
        counter.fill_(self._content(chunk))
        self.store.check()

    def verify(self) -> None:
        """Check every chunk's bytes where they lie, and that no chunk is faster than where it is used."""
        into = torch.empty(RECORD_BYTES, dtype=torch.uint8)
        line = list(self.capacity)
        for chunk, times in self.expected.items():
            assert line.index(self.store.home_of(chunk)) >= line.index(self.computes[chunk])
            assert self.store.read_record(chunk, into) == (times > 0)
            if times:
                assert torch.all(into.view(torch.int64) == self._content(chunk))

    def _content(self, chunk: int) -> int:
        return self.expected[chunk] * 1_000_000 + chunk


class RandomLife:
    """A random store that goes through random operations; `capacity_errors` counts those refused with nothing changed.

    Tiers, capacities from the least that placement accepts, homes by rule and by placement, chunks used on either side,
    orders, chunks that skip steps, chunks added and removed, tiers resized, leases held, moves that fail.
    """

    def __init__(self, seed: int, failure_rate: float = 0.0) -> None:
        self.chance = random.Random(seed)
        self.is_alternating = self.chance.random() < 0.5
        fault = random.Random(seed + 1)
        self.capacity, homes = self._draw_tiers()
        self.simulation = Simulation(
            self.capacity,
            "alternating" if self.is_alternating else "fixed",
            seed,
            homes=frozenset(homes),
            fails=lambda _: fault.random() < failure_rate,
        )
        self.homes = homes
        self.share_on_gpu = self.chance.choice([0.0, 0.5, 0.9, 1.0]) if "gpu" in self.capacity else 0.0
        self.share_named = self.chance.choice([0.0, 0.0, 0.2, 0.6])
        self.share_used = self.chance.choice([0.5, 0.9, 1.0])
        self.steps = self.capacity_errors = self.failures = 0

    def _draw_tiers(self) -> tuple[dict[str, int], list[str]]:
        line, staging = self.chance.choice(
            [
                (["cpu"], ""),
                (["cpu", "nvme"], ""),
                (["cpu", "nvme"], ""),
                (["gpu", "cpu"], ""),
                (["gpu", "cpu", "nvme"], ""),
                (["gpu", "cpu", "nvme"], ""),
                (["gpu", "cpu", "nvme"], ""),
                (["gpu", "cpu", "nvme"], "cpu"),
                (["cpu", "nvme"], "cpu"),
            ]
        )
        largest = {tier: self.chance.choice([4, 8, 16]) for tier in line[:-1]} | {line[-1]: self.chance.choice([8, 32])}
        return {tier: self.chance.randint(1, most) for tier, most in largest.items()}, [t for t in line if t != staging]

    def live(self, operations: int) -> None:
        """Do so many random things, checking everything after each."""
        self._grow()
        for _ in range(operations):
            act = self.chance.choice(
                [
                    *[self._step] * 6,
                    *(self._grow, self._fill, self._shed),
                    *(self._resize, self._squeeze),
                    *(self._hold, self._hint),
                ]
            )
            try:
                act()
            except TransferError:
                self.failures += 1
                self.simulation.store.forgive()
            self.simulation.store.check()
            self.simulation.verify()
        self.failures += self.simulation.settle()
        assert self.simulation.store.stats().tiers.keys() == self.capacity.keys()
        self.simulation.verify()

    # -- operations ---------------------------------------------------------------------------------------------

    def _step(self) -> None:
        order = list(self.simulation.expected)
        if self.chance.random() < 0.2:
            self.chance.shuffle(order)
        if self.is_alternating and self.steps % 2:
            order.reverse()
        self.steps += 1
        participating = [chunk for chunk in order if self.chance.random() < self.share_used]
        if self.chance.random() < 0.2:  # some are visited twice
            participating += [chunk for chunk in reversed(participating) if self.chance.random() < 0.6]
        self.simulation.step(participating, order[::-1] if self.is_alternating else order)

    def _grow(self) -> None:
        self._add(self.chance.randint(1, 12))

    def _fill(self) -> None:
        """Add one chunk after another until there is no more room, or there are many."""
        refused = self.capacity_errors
        while self.capacity_errors == refused and len(self.simulation.expected) < 40:
            self._add(1)

    def _add(self, count: int) -> None:
        computes = ["gpu" if self.chance.random() < self.share_on_gpu else "cpu" for _ in range(count)]
        named = [self._draw_name(compute) if self.chance.random() < self.share_named else None for compute in computes]
        with self._all_or_nothing():
            self.simulation.add(computes, named)

    def _draw_name(self, compute: str) -> str | None:
        line = list(self.capacity)
        slower = [tier for tier in self.homes if line.index(tier) >= line.index(compute)]
        return self.chance.choice(slower) if slower else None

    def _shed(self) -> None:
        for chunk in list(self.simulation.expected):
            if self.chance.random() < 0.2:
                self.simulation.remove(chunk)

    def _resize(self) -> None:
        tier = self.chance.choice(list(self.capacity))
        with self._all_or_nothing():
            self.simulation.store.resize_tier(tier, self.chance.randint(0, 2 * self.capacity[tier]))

    def _squeeze(self) -> None:
        """Make a tier smaller until it cannot be."""
        tier = self.chance.choice(list(self.capacity))
        refused = self.capacity_errors
        while self.capacity_errors == refused and (capacity := self._arrangement()[1][tier]) > 0:
            with self._all_or_nothing():
                self.simulation.store.resize_tier(tier, capacity - 1)
            if self._arrangement()[1][tier] == capacity:  # it goes by whole slabs
                return

    def _hint(self) -> None:
        some = [chunk for chunk in self.simulation.expected if self.chance.random() < 0.3]
        if self.chance.random() < 0.5:
            self.simulation.store.fetch(some)
        else:
            self.simulation.store.send_home(some)

    def _hold(self) -> None:
        """Hold a chunk or two during a step; when leases leave too little room, it is refused before anything moved."""
        chunks = list(self.simulation.expected)
        before = None
        with contextlib.ExitStack() as held:
            try:
                for chunk in self.chance.sample(chunks, min(len(chunks), self.chance.randint(1, 2))):
                    held.enter_context(self.simulation.lease(chunk))
                before = dict(self.simulation.expected)
                self._step()
            except CapacityError:
                assert self._least_spare() < 2
                assert before in (None, self.simulation.expected)
                self.capacity_errors += 1

    def _least_spare(self) -> int:
        """Extents of the tightest tier that are neither homes nor held by a lease away from home."""
        store = self.simulation.store
        taken = Counter(store.home_of(chunk) for chunk in self.simulation.expected)
        for chunk in self.simulation.expected:
            if self.simulation.leased[chunk] and store.home_of(chunk) != self.simulation.computes[chunk]:
                taken[self.simulation.computes[chunk]] += 1
        return min(store.setup.tiers[tier].arena.lasting - taken[tier] for tier in self.capacity)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        before = self._arrangement()
        try:
            yield
        except CapacityError:
            assert self._arrangement() == before
            self.capacity_errors += 1

    def _extents_of(self, tier: str) -> int:
        """The extents of a tier, with those that failed writes have cost and that are still to be made up for."""
        store = self.simulation.store
        striping = store._traffic.striping.get(tier)
        return store.setup.tiers[tier].arena.lasting + (striping.owed if striping is not None else 0)

    def _arrangement(self) -> tuple[dict[int, str], dict[str, int]]:
        store = self.simulation.store
        return (
            {chunk: store.home_of(chunk) for chunk in self.simulation.expected},
            {tier: self._extents_of(tier) for tier in self.capacity},
        )
