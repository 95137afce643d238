"""Chunks in real tiers, moved along a route by the real transfer engine, without a store's plans: one copy, timed.

Tiers and engine are built from a policy as `build` builds them for an optimizer. Each chunk has an extent of its own in
each tier of the route, and is filled with a pattern that names it; after the move all of them are compared.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.pattern import fill, verify
from benchmarks.harness.rawdevice import Sample, timed
from tierstore.arena import Extent
from tierstore.build import Parts, plan_plant
from tierstore.device import present_accelerator, wait_for_all_work
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.tiers import MemoryTier, Tier
from tierstore.transfer import Ticket


def policy_for(
    tiers: Sequence[str], chunk_bytes: int, folders: Sequence[Path], io: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A policy with these tiers, `io` those of its files; host memory stands in for a gpu where there is none."""
    stand_in = {} if present_accelerator() is not None else {"device": "cpu"}
    settings: dict[str, dict[str, Any]] = {
        "gpu": stand_in,
        "cpu": {},
        "nvme": {"paths": [str(folder) for folder in folders], "io": dict(io or {})},
    }
    return {"chunk_size": chunk_bytes, "tiers": {name: settings[name] for name in tiers}}


class Stage:
    """`chunks` chunks of `chunk_bytes` in the tiers `names`, files as `io` says; give it back with `close`."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        chunk_bytes: int,
        chunks: int,
        folders: Sequence[Path],
        io: Mapping[str, Any],
        parts: Parts | None = None,
    ) -> None:
        self._device = present_accelerator() or torch.device("cpu")
        self._chunk_bytes = chunk_bytes
        policy = TierPolicy.load(policy_for(names, chunk_bytes, folders, io))
        plant = plan_plant(policy, [self._device], parts)
        self._setup = plant.build({name: Room(chunks) for name in names}, chunk_bytes)
        self._places: dict[str, list[tuple[Tier, Extent]]] = {
            name: [(tier, tier.arena.take()) for _ in range(chunks)] for name, tier in self._setup.tiers.items()
        }
        self._salt = 0
        self.verified_bytes = 0
        for places in self._places.values():
            for tier, extent in places:
                if isinstance(tier, MemoryTier):
                    tier.bytes_at(extent, chunk_bytes).zero_()
        if "nvme" in names:  # blocks that were never written cost the filesystem more
            self._move_all(("cpu", "nvme"), 8, [])
        self._drain()

    @property
    def is_direct(self) -> bool:
        """Whether swap files are read and written past the page cache."""
        return self._setup.io.direct

    def close(self) -> None:
        """Give memory, files and threads back."""
        self._setup.transfer.close()
        for tier in self._setup.tiers.values():
            tier.close()

    def move(self, route: Sequence[str], depth: int) -> Sample:
        """Move every chunk from the first to the last tier of the route, hop by hop, `depth` of them at a time.

        A chunk's latency is from handing in its first hop to the landing of its last. Raises VerificationError.
        """
        self._salt += len(self._places[route[0]])
        self._prepare(route)
        latencies: list[float] = []
        count = len(self._places[route[0]])
        sample = timed(lambda: self._move_all(route, depth, latencies), count * self._chunk_bytes, latencies)
        self._verify(route)
        return sample

    def copy_raw(self, source: str, destination: str) -> Sample:
        """The same copies between two memory tiers by plain calls of torch: nothing of tierstore runs."""
        latencies: list[float] = []
        pairs = [
            (self._memory(destination, number), self._memory(source, number))
            for number in range(len(self._places[source]))
        ]
        self._salt += len(pairs)
        self._prepare((source, destination))
        sample = timed(lambda: self._copy_all(pairs, latencies), len(pairs) * self._chunk_bytes, latencies)
        self._verify((source, destination))
        return sample

    def _copy_all(self, pairs: Sequence[tuple[Tensor, Tensor]], latencies: list[float]) -> None:
        for to, come in pairs:
            began = time.perf_counter()
            to.copy_(come, non_blocking=True)
            latencies.append(time.perf_counter() - began)
        wait_for_all_work(self._device)

    def _move_all(self, route: Sequence[str], depth: int, latencies: list[float]) -> None:
        landed: queue.SimpleQueue[tuple[Ticket, float]] = queue.SimpleQueue()
        began: dict[Ticket, float] = {}
        numbers = iter(range(len(self._places[route[0]])))
        for number in itertools.islice(numbers, depth):
            self._begin(route, number, began, landed)
        while began:
            ticket, moment = landed.get()
            ticket.wait(None)  # raises what stopped it
            latencies.append(moment - began.pop(ticket))
            for number in itertools.islice(numbers, 1):
                self._begin(route, number, began, landed)

    def _begin(
        self,
        route: Sequence[str],
        number: int,
        began: dict[Ticket, float],
        landed: queue.SimpleQueue[tuple[Ticket, float]],
    ) -> None:
        now, before = time.perf_counter(), list[Ticket]()
        for source, destination in itertools.pairwise(route):
            places = self._places[source][number], self._places[destination][number]
            before = [self._setup.transfer.submit(*places, self._chunk_bytes, after=before)]
        began[before[0]] = now
        before[0].when_done(lambda ticket: landed.put((ticket, time.perf_counter())))

    def _prepare(self, route: Sequence[str]) -> None:
        """Put the patterns into the first tier of the route and nothing into the others."""
        first = "cpu" if route[0] == "nvme" else route[0]
        for number in range(len(self._places[first])):
            fill(self._memory(first, number), number + self._salt)
        if route[0] == "nvme":
            self._move_all(("cpu", "nvme"), 8, [])
        for name in route[1:]:
            if name != "nvme":
                self._zero(name)
        self._drain()

    def _verify(self, route: Sequence[str]) -> None:
        """Compare what is in the last tier of the route; what is in a file is read back first."""
        last = "cpu" if route[-1] == "nvme" else route[-1]
        if route[-1] == "nvme":
            self._zero("cpu")
            self._move_all(("nvme", "cpu"), 8, [])
        self._drain()
        what = f"{'->'.join(route)} with {self._setup.io.engine}"
        for number in range(len(self._places[last])):
            self.verified_bytes += verify(self._memory(last, number), number + self._salt, what)

    def _zero(self, name: str) -> None:
        for number in range(len(self._places[name])):
            self._memory(name, number).zero_()

    def _drain(self) -> None:
        """Forget the tickets of moves that are over, and let the device come to rest."""
        wait_for_all_work(self._device)
        while self._setup.transfer.next_ended(wait=False) is not None:
            pass

    def _memory(self, name: str, number: int) -> Tensor:
        tier, extent = self._places[name][number]
        assert isinstance(tier, MemoryTier)
        return tier.bytes_at(extent, self._chunk_bytes)
