"""A store over honest devices and real files, against a dict of what every chunk and parameter should hold.

A trial does at random what optimizers and users do: steps, leases, reads, evictions, deletions, resizes. The work it
launches reads a gradient, changes a chunk's record and a parameter, as an update does. All of it is decided by the
seed, so that a trial that fails can be run again.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.simulator import Gathered
from tierstore.build import Parts, plan_plant
from tierstore.device import Device
from tierstore.errors import CapacityError, PolicyError
from tierstore.mapping import map_host_memory
from tierstore.policy import TierPolicy
from tierstore.store import ChunkInfo, ChunkStore
from tierstore.tiers import MemoryTier

RECORD_BYTES = 16384
ELEMENTS = RECORD_BYTES // 8
CHUNKS = 12


class WrongBytesError(AssertionError):
    """A chunk or a parameter does not hold what it should."""


class Trial:
    """A store of `capacity` extents per tier, whose chunks are used in `compute`."""

    def __init__(
        self,
        folder: Path,
        parts: Parts,
        seed: int,
        *,
        capacity: dict[str, int],
        compute: str,
        device: torch.device | None = None,
        delay: Callable[[], None] = lambda: None,
    ) -> None:
        self.chance = random.Random(seed)
        self._on = device or torch.device("cpu")
        self._delay = delay  # what makes an update take its time
        policy = TierPolicy.load(
            {
                "chunk_size": RECORD_BYTES,
                "order": self.chance.choice(["alternating", "fixed"]),
                "tiers": {tier: self._tier(tier, extents, folder) for tier, extents in capacity.items()},
            }
        )
        self._compute = compute
        self._chunks = list(range(CHUNKS))
        self._made = CHUNKS
        plant = plan_plant(policy, [self._on], parts)
        infos = {chunk: ChunkInfo(RECORD_BYTES, compute) for chunk in self._chunks}
        self.setup = plant.build(plant.rooms(list(infos.values()), RECORD_BYTES), RECORD_BYTES)
        self.store = ChunkStore(self.setup)
        self.store.add_chunks(infos)
        tier = self.setup.tiers[compute]
        assert isinstance(tier, MemoryTier)
        self.device: Device = tier.device
        self._gradient = torch.zeros(ELEMENTS, dtype=torch.int64, device=self._on)
        self._parameters: dict[int, Tensor] = {}
        self._records: dict[int, Tensor] = {}  # what should be
        self._parameters_expected: dict[int, Tensor] = {}
        self._into = map_host_memory(RECORD_BYTES)

    def run(self, steps: int = 6) -> None:
        """Do it all. Raises WrongBytesError, or whatever the store raises."""
        actions: list[Callable[[], None]] = [self._read, self._lease, self._shuffle, self._replace, self._resize]
        actions += [self._empty, self._adapt]
        try:
            for step in range(1, steps + 1):
                self._step(step)
                for action in self.chance.sample(actions, 2):
                    action()
                    self.store.check()
            self.store.wait()
            self._verify()
        finally:
            self.store.close()
            self.device.close()

    def _tier(self, tier: str, extents: int, folder: Path) -> dict[str, object]:
        settings: dict[str, object] = {"capacity": extents * RECORD_BYTES}
        if tier == "gpu":
            settings["device"] = str(self._on)
        if tier == "nvme":
            settings["paths"] = [str(folder)]
        return settings

    # -- what a step does ---------------------------------------------------------------------------------------

    def _step(self, step: int) -> None:
        order = self.chance.sample(self._chunks, self.chance.randint(2, len(self._chunks)))
        self._gradient.fill_(step)
        upcoming = self._chunks[:: self.chance.choice((1, -1))]
        gathered = Gathered(lambda *use: self._use(*use, step))
        if self.chance.random() < 0.5:
            self.store.run(order, upcoming, gathered.add, flush=gathered.use)
        else:
            self.store.run(order, upcoming, lambda *use: self._use(*use, step))
        if self.chance.random() < 0.5:
            self._remove(self.chance.choice(order))  # while the work that was launched on it may still be to come
            self.store.fetch(self.chance.sample(self._chunks, 4))
        self.device.finish()
        self._check_parameters()
        self._gradient.fill_(-1)

    def _use(self, chunk: int, record: Tensor, is_fresh: bool, step: int) -> None:
        if is_fresh != (chunk not in self._records):
            raise WrongBytesError(f"chunk {chunk} is {'' if is_fresh else 'not '}fresh")
        if is_fresh:
            self._parameters[chunk] = torch.zeros(ELEMENTS, dtype=torch.int64, device=self._on)
            self._parameters_expected[chunk] = torch.zeros(ELEMENTS, dtype=torch.int64)
            self._records[chunk] = torch.zeros(ELEMENTS, dtype=torch.int64)
        state, gradient, parameter = record.view(torch.int64), self._gradient, self._parameters[chunk]

        def update() -> None:
            self._delay()
            state.mul_(3).add_(gradient, alpha=chunk + 1)
            parameter.mul_(5).add_(state)

        self.device.launch(update)
        self._records[chunk].mul_(3).add_(step * (chunk + 1))
        self._parameters_expected[chunk].mul_(5).add_(self._records[chunk])
        self.store.check()

    # -- what else may happen -----------------------------------------------------------------------------------

    def _read(self) -> None:
        for chunk in self.chance.sample(self._chunks, 4):
            self._check_record(chunk)

    def _lease(self) -> None:
        chunk = self.chance.choice(self._chunks)
        if chunk not in self._records:
            return
        with self.store.lease_chunk(chunk) as record:
            self.device.launch(lambda: record.view(torch.int64).add_(7))
        self._records[chunk].add_(7)
        if self.chance.random() < 0.5:
            self._check_record(chunk)
        if self.chance.random() < 0.5:
            self.store.send_home([chunk])

    def _shuffle(self) -> None:
        self.store.send_home(self.chance.sample(self._chunks, 3))
        self.store.fetch(self.chance.sample(self._chunks, 3))

    def _replace(self) -> None:
        self._remove(self.chance.choice(self._chunks))

    def _remove(self, chunk: int) -> None:
        """Delete a chunk, and make a new one in its stead."""
        self.store.remove_chunk(chunk)
        self._records.pop(chunk, None)
        self._chunks[self._chunks.index(chunk)] = self._made
        self.store.add_chunks({self._made: ChunkInfo(RECORD_BYTES, self._compute)})
        self._made += 1

    def _resize(self) -> None:
        tier = self.chance.choice(list(self.setup.tiers))
        self.store.reload()
        extents = self.setup.tiers[tier].arena.capacity
        with contextlib.suppress(CapacityError):
            self.store.resize_tier(tier, extents - 1)
        self.store.resize_tier(tier, extents)

    def _empty(self) -> None:
        """Empty some memory tiers, and fill them again or leave that to whoever uses a chunk."""
        memory = [tier for tier in self.setup.tiers if tier != "nvme"]
        with contextlib.suppress(CapacityError, PolicyError):
            self.store.offload(self.chance.sample(memory, self.chance.randint(1, len(memory))))
            self._read()
        if self.chance.random() < 0.5:
            self.store.reload()

    def _adapt(self) -> None:
        self.store.adapt()
        with contextlib.suppress(CapacityError), self.store.yielding(self._compute, 1 << 20):
            self._shuffle()

    # -- what must be -------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        for chunk, expected in self._parameters_expected.items():
            if not torch.equal(self._parameters[chunk].cpu(), expected):
                raise WrongBytesError(f"the parameter of chunk {chunk} is wrong")

    def _check_record(self, chunk: int) -> None:
        has_bytes = self.store.read_record(chunk, self._into)
        if has_bytes != (chunk in self._records):
            raise WrongBytesError(f"chunk {chunk} is {'not ' if has_bytes else ''}fresh")
        if has_bytes and not torch.equal(self._into.view(torch.int64), self._records[chunk]):
            raise WrongBytesError(f"the record of chunk {chunk} is wrong")

    def _verify(self) -> None:
        for chunk in self._chunks:
            self._check_record(chunk)
