"""Where a thread cannot be started, as under a limit on processes: each one in turn. Whatever it was for goes on with
fewer, or says so; nothing hangs, nothing is left behind, and no number is another.
"""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import PATIENCE_SECONDS, FewThreads
from tests.optimizer.settings import assert_same_optimizers, backward, fused, network
from tierstore import cores
from tierstore.errors import EngineUnavailableError, NoThreadError
from tierstore.io import open_engine
from tierstore.optimizer import TieredAdamW

KIB = 1 << 10
EVERY_FAILURE = pytest.mark.parametrize("for_good", [False, True], ids=["one start fails", "so do all later ones"])


def tried(few: FewThreads, work: Callable[[], object]) -> NoThreadError | None:
    """Do work with few threads, which must not hang; return the error by which it says that there was none."""
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    are_few = threading.Event()

    def run() -> None:
        are_few.wait()
        try:
            work()
        except BaseException as error:
            outcome.put(error)
        else:
            outcome.put(None)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    with few:
        are_few.set()
        error = outcome.get(timeout=PATIENCE_SECONDS)
    worker.join()
    if error is not None and not isinstance(error, NoThreadError):
        raise error
    assert error is None or "could not be started (can't start new thread): raise the limit on processes" in str(error)
    return error


def each_failure(for_good: bool, least: int) -> Iterator[FewThreads]:
    """First no first thread, then no second one, until no such one is asked for; `least` are in any case.

    What is made in between must be closed in between: nothing may be left.
    """
    for refused in itertools.count(1):
        before, few = held(), FewThreads(refused, for_good=for_good)
        yield few
        assert held() == before, f"after start {refused} had failed"
        if not few.refused:
            assert refused > least
            return


def held() -> tuple[set[str], int]:
    """The threads of tierstore's, but those that update, and the number of descriptors."""
    cores._helpers().shutdown()
    cores._helpers.cache_clear()
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if "tierstore" in name}, len(os.listdir("/proc/self/fd"))


def made(folder: Path, engine: str = "threads", update: str = "step", model: nn.Module | None = None) -> Any:
    net = network() if model is None else model
    chunk = 24 * KIB if model is None else 1024 * KIB
    tiers = {
        "gpu": {"device": "cpu", "capacity": 3 * chunk},
        "cpu": {"capacity": 3 * chunk},
        "nvme": {"paths": [str(folder)], "io": {"engine": engine, "threads": 3}},
    }
    return net, TieredAdamW(net.parameters(), lr=1e-2, policy={"chunk_size": chunk, "update": update, "tiers": tiers})


def large_network() -> nn.Module:
    """One with a weight of several blocks of a checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(130, 10_000)
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    return model


def take_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def torchs(make: Callable[[], nn.Module], steps: int) -> torch.optim.Optimizer:
    """The same by torch."""
    net = make()
    reference = fused(net.parameters(), lr=1e-2)
    take_steps(net, reference, range(steps))
    return reference


@EVERY_FAILURE
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("engine", ["threads", "libaio", "aiofiles"])
def test_training_begins_with_the_threads_there_are_or_not_yet_and_then_goes_on_whatever_fails(
    engine: str, update: str, for_good: bool, tmp_path: Path
) -> None:
    """A step that found no thread for a copy would be broken off half-way: a store has its threads before."""
    try:
        open_engine(engine, threads=1, queue_depth=1, request_size=None).close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    reference = torchs(network, 4)
    for few in each_failure(for_good, least=3):
        net, optimizer = made(tmp_path, engine, update)
        if tried(few, partial(take_steps, net, optimizer, range(1))) is not None:
            take_steps(net, optimizer, range(1))
        assert tried(few, partial(take_steps, net, optimizer, range(1, 4))) is None
        assert_same_optimizers(optimizer, reference)
        optimizer.store.check()
        optimizer.close()


@EVERY_FAILURE
def test_a_state_dict_is_whole_or_refused(for_good: bool, tmp_path: Path) -> None:
    reference = torchs(network, 2)
    for few in each_failure(for_good, least=1):
        net, optimizer = made(tmp_path)
        take_steps(net, optimizer, range(2))
        tried(few, optimizer.state_dict)
        assert_same_optimizers(optimizer, reference)
        optimizer.store.check()
        optimizer.close()


@pytest.mark.parametrize(("waits", "for_good"), [(True, False), (True, True), (False, True)])
def test_a_save_is_complete_or_leaves_nothing(waits: bool, for_good: bool, tmp_path: Path) -> None:
    """One that handed a block to threads that could not be started, once waited for ever."""
    swap, folder = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()
    path = folder / "checkpoint"
    for few in each_failure(for_good, least=2):
        net, optimizer = made(swap, model=large_network())
        take_steps(net, optimizer, range(1))
        folder.mkdir()
        if tried(few, lambda: optimizer.save_checkpoint(path, net, wait=waits).wait()) is not None:  # noqa: B023
            assert list(folder.iterdir()) == []
            optimizer.save_checkpoint(path, net)
        other, loaded = made(swap, model=large_network())
        loaded.load_checkpoint(path, other)
        assert_same_optimizers(loaded, optimizer)
        optimizer.close()
        loaded.close()
        shutil.rmtree(folder)


@EVERY_FAILURE
def test_a_load_brings_all_or_says_so_and_can_be_repeated(for_good: bool, tmp_path: Path) -> None:
    swap, path = tmp_path / "swap", tmp_path / "checkpoint"
    swap.mkdir()
    net, optimizer = made(swap, model=large_network())
    take_steps(net, optimizer, range(2))
    optimizer.save_checkpoint(path, net)
    optimizer.close()
    reference = torchs(large_network, 3)
    for few in each_failure(for_good, least=2):
        net, optimizer = made(swap, model=large_network())
        take_steps(net, optimizer, range(5, 6))
        if tried(few, partial(optimizer.load_checkpoint, path, net)) is not None:
            optimizer.load_checkpoint(path, net)
        take_steps(net, optimizer, range(2, 3))
        assert_same_optimizers(optimizer, reference)
        optimizer.close()
