"""What a user of `TieredStore` waits for: a tensor that is swapped in on demand, or that was announced before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Column, Table, fill, verify
from benchmarks.harness.rounds import percentile
from tierstore import TieredStore

ANNOUNCED = 3


def store_table(tensor_bytes: int, count: int, folders: Sequence[Path]) -> tuple[Table, int]:
    """Lease `count` tensors in turn, of which a quarter (4 at least) fit in memory.

    Answers the table and the bytes that were compared.
    """
    policy: Mapping[str, Any] = {
        "chunk_size": tensor_bytes,
        "tiers": {"cpu": {"capacity": max(4, count // 4) * tensor_bytes}, "nvme": {"paths": [str(f) for f in folders]}},
    }
    with TieredStore(policy) as store:
        for number in range(count):
            tensor = torch.empty(tensor_bytes, dtype=torch.uint8)
            fill(tensor, number)
            store.put(str(number), tensor)
        ways = {"on demand": 0, f"announced {ANNOUNCED} ahead": ANNOUNCED}
        seconds = {way: list(_leases(store, count, ahead)) for way, ahead in ways.items()}
    rows = tuple(
        {
            "way": way,
            "size": tensor_bytes,
            **{name: percentile(own, q) for name, q in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100))},
            "leases": len(own),
        }
        for way, own in seconds.items()
    )
    columns = (
        Column("way", "lease of a tensor on nvme"),
        Column("size", "size", "bytes"),
        *(Column(name, name, "seconds") for name in ("p50", "p95", "p99", "max")),
        Column("leases", "leases"),
    )
    return Table("through TieredStore: waiting for a lease", columns, rows), 2 * count * tensor_bytes


def _leases(store: TieredStore, count: int, ahead: int) -> Iterator[float]:
    """Seconds until each tensor could be used; comparing it is what is done meanwhile."""
    for number in range(count):
        if ahead:
            store.prefetch([str(other % count) for other in range(number, number + 1 + ahead)])
        began = time.perf_counter()
        with store.lease(str(number)) as tensor:
            waited = time.perf_counter() - began
            verify(tensor, number, "a tensor that was leased")
        yield waited
