"""Training inside a real control group, beside a process that really takes memory and gives it back."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.cases import MIB
from tests.processes import Child
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.probes import Probe

LIMIT = 256 * MIB
GROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of `LIMIT` bytes, with nobody in it."""
    for mount, limit in GROUPS:
        folder = Path(mount) / f"tierstore-test-{uuid.uuid4().hex}"
        if not Path(mount).is_dir():
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():
            (folder / limit).write_text(str(LIMIT))
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group can be made here: that takes root, and a mounted hierarchy that limits memory")


def take_memory(group: str, orders: Connection) -> None:
    """Have as many bytes as is ordered, until None is."""
    enter(group)
    held: list[mmap.mmap] = []
    while (nbytes := orders.recv()) is not None:
        for area in held:
            area.close()
        held = [mmap.mmap(-1, nbytes)] if nbytes else []
        for area in held:
            for start in range(0, nbytes, mmap.PAGESIZE):
                area[start] = 1
        orders.send("done")


def enter(group: str) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))


def train(group: str | None, folder: str, orders: Connection | None) -> tuple[list[float], list[int], list[str]]:
    """Steps with 32 MiB of state; the other process has nothing, then 120 MiB, then nothing again."""
    torch.set_num_threads(1)
    if group is not None:
        enter(group)

    class Optimizer(TieredAdamW):
        parts = Parts(open_probe=partial(Probe, clock=lambda: 0.0))

    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4 << 20))
    tiers: dict[str, Any] = {
        "cpu": {"capacity": "32MiB", "watermarks": {"high": 0.8, "low": 0.7}},
        "nvme": {"paths": [folder], "io": {"direct": True}},
    }
    optimizer = Optimizer([parameter], lr=1e-2, policy={"chunk_size": "1MiB", "tiers": tiers})
    losses, sizes = [], []
    parameter.grad = torch.empty_like(parameter)
    for step in range(16):
        if orders is not None and step in (4, 10):
            orders.send(120 * MIB if step == 4 else 0)
            assert orders.recv() == "done"
        parameter.grad.copy_(parameter.detach()).mul_(0.1)
        losses.append(float(parameter.detach().square().mean()))
        optimizer.step()
        sizes.append(optimizer.store.stats().tiers["cpu"].capacity_bytes // MIB)
    told = [f"{one.kind}: {one.what}; {one.reason}" for one in optimizer.store.stats().decisions]
    optimizer.close()
    return losses, sizes, told


def test_tiers_follow_what_another_process_takes_of_a_containers_memory(group: Path, tmp_path: Path) -> None:
    here, there = Pipe()
    with Child(take_memory, str(group), there) as other, Child(train, str(group), str(tmp_path), here) as trainer:
        losses, sizes, told = trainer.result()
        here.send(None)
        other.wait()
    with Child(train, None, str(tmp_path), None) as undisturbed:
        assert losses == undisturbed.result()[0]
    assert sizes[3] == 32 and min(sizes) <= 24 and sizes[-1] > min(sizes), (sizes, told)
    assert any(one.startswith("spill: cpu shrinks") and "cgroup" in one for one in told), told
