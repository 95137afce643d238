"""Nothing grows: memory, descriptors, threads are constant over steps, checkpoints, and optimizers made and ended."""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.crash import keeping
from tests.processes import call
from tierstore.optimizer import TieredAdamW

KIB = 1 << 10
CHUNK = 16 * KIB
MOST_GROWN_KIB = 2 * KIB
"""Of anonymous memory: what the allocator may take its time to use again. A leak of 1 KiB a step shows."""
COLLECTED = 100
"""Optimizers after which what is unreachable goes at the latest; how much waits for that takes hundreds to settle."""
M_ARENA_MAX = -8
"""Of glibc's mallopt."""


def long(*values: Any) -> Any:
    """A case that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


@dataclass(frozen=True)
class Taken:
    """What a process has of what must not leak."""

    anonymous_kib: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
        return cls(int(status.split()[0]), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def assert_constant(first: Taken, last: Taken) -> None:
    print(f"first {first}, last {last}")
    assert last.anonymous_kib - first.anonymous_kib < MOST_GROWN_KIB
    assert (last.descriptors, last.threads) == (first.descriptors, first.threads)


@pytest.mark.parametrize(("update", "steps"), [("step", 300), long("step", 10_000), long("backward", 10_000)])
def test_steps_take_nothing_for_good(update: str, steps: int, tmp_path: Path) -> None:
    assert_constant(*call(many_steps, tmp_path, update, steps))


@pytest.mark.parametrize("rounds", [50, long(1000)])
def test_optimizers_that_are_closed_forgotten_or_left_to_the_collector_leave_nothing(
    rounds: int, tmp_path: Path
) -> None:
    assert_constant(*call(many_optimizers, tmp_path, rounds))


@pytest.mark.parametrize("count", [long(500)])
def test_hundreds_of_checkpoints_leave_nothing_but_the_newest(count: int, tmp_path: Path) -> None:
    assert_constant(*call(many_checkpoints, tmp_path, count))


# -- in the process ---------------------------------------------------------------------------------------------


def use_one_heap() -> None:
    """Let all threads allocate from one heap; what one of many has left in its own is used again by chance only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)


def many_steps(folder: Path, update: str, steps: int) -> tuple[Taken, Taken]:
    use_one_heap()
    model, optimizer = made(folder, update)
    for step in range(steps):
        if step == min(steps // 2, 500):  # the first ones fill what is kept
            first = Taken.now()
        take_step(model, optimizer)
        if step % 50 == 0:
            optimizer.state_dict()
            optimizer.store.put("average", torch.ones(3000))
            optimizer.store.delete("average")
    last = Taken.now()
    optimizer.close()
    return first, last


def many_optimizers(folder: Path, rounds: int) -> tuple[Taken, Taken]:
    use_one_heap()
    for number in range(2 * rounds):
        if number % COLLECTED == 0:
            gc.collect()
        if number == rounds:  # it takes a while until what comes finds the memory that others have left
            first = Taken.now()
        model, optimizer = made(folder, "backward" if number % 2 else "step")
        for _ in range(3):
            take_step(model, optimizer)
        if number % 3 == 1:
            optimizer.close()
        elif number % 3 == 2:
            cycle: list[Any] = [optimizer]
            cycle.append(cycle)
            del cycle
        del model, optimizer
    return first, Taken.now()


def many_checkpoints(folder: Path, count: int) -> tuple[Taken, Taken]:
    use_one_heap()
    model, optimizer = made(folder, "step")
    kept = folder / "kept"
    kept.mkdir()
    for number in range(count):
        if number == 20:
            first = Taken.now()
        take_step(model, optimizer)
        keeping.save(kept, model, optimizer, {"number": number})
    assert len(list(kept.iterdir())) == 1
    assert keeping.load(kept, model, optimizer) == {"number": count - 1}
    last = Taken.now()
    optimizer.close()
    return first, last


def made(folder: Path, update: str) -> tuple[torch.nn.Module, TieredAdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 60))
    tiers = {"cpu": {"capacity": 6 * CHUNK}, "nvme": {"capacity": 32 * CHUNK, "paths": [str(folder)]}}
    policy = {"chunk_size": CHUNK, "tiers": tiers, "update": update}
    return model, TieredAdamW(model.parameters(), policy=policy)


def take_step(model: torch.nn.Module, optimizer: TieredAdamW) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 100)).square().mean().backward()
    optimizer.step()
