"""Forks, exits and neighbours: whoever else is there, and however it ends, training goes on to the bit."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.fakes import FaultyEngine
from tests.optimizer.cases import same_bits
from tests.processes import Child, call, exit_as_a_script_does
from tierstore.build import Parts
from tierstore.errors import BusyStoreError, ForkedStoreError, StoreClosedError, WrongThreadError
from tierstore.optimizer import TieredAdamW

KIB = 1 << 10
CHUNK = 16 * KIB
STEPS = 4


def crash(*values: Any) -> Any:
    """A case that runs before a change lands, with those that kill processes."""
    return pytest.param(*values, marks=pytest.mark.crash)


class HeldAdamW(TieredAdamW):
    """One whose reads and writes can be held."""

    engine: Any = None


def held_class() -> type[HeldAdamW]:
    """A class with an engine of its own."""
    engine = FaultyEngine(threads=4)
    return type("Held", (HeldAdamW,), {"engine": engine, "parts": Parts(open_engine=lambda *_, **__: engine)})


def policy(folder: Path, update: str = "step") -> dict[str, Any]:
    tiers = {"cpu": {"capacity": 4 * CHUNK}, "nvme": {"paths": [str(folder)]}}
    return {"chunk_size": CHUNK, "tiers": tiers, "update": update}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 100), nn.GELU(), nn.Linear(100, 100))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return list(torch.randn(STEPS, 8, 100, generator=generator))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def assert_trained(model: nn.Module, seed: int = 0) -> None:
    """Compare with torch's own optimizer, to the bit."""
    reference = network(seed)
    optimizer = torch.optim.AdamW(reference.parameters(), fused=True)
    for batch in batches():
        take_step(reference, optimizer, batch)
    assert all(same_bits(one, two) for one, two in zip(model.parameters(), reference.parameters(), strict=True))


# -- forks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "update"),
    [("fork", "backward"), crash("fork", "step"), crash("spawn", "step"), crash("spawn", "backward")],
)
def test_training_on_batches_of_worker_processes_has_torchs_bits(start: str, update: str, tmp_path: Path) -> None:
    """They are made after the optimizer, anew for each pass, and end while it trains."""
    call(train_with_workers, tmp_path, start, update)


def train_with_workers(folder: Path, start: str, update: str) -> None:
    model, flat = network(), torch.cat(batches())
    loader = DataLoader(TensorDataset(flat), batch_size=8, num_workers=2, multiprocessing_context=start)
    with TieredAdamW(model.parameters(), policy=policy(folder, update)) as optimizer:
        optimizer.store.check()
        passes = 1 if start == "spawn" else 2
        for _ in range(passes):
            with torch.no_grad():
                for parameter, fresh in zip(model.parameters(), network().parameters(), strict=True):
                    parameter.copy_(fresh)
            optimizer.state.clear()
            for (batch,) in loader:
                take_step(model, optimizer, batch)
            assert_trained(model)
        optimizer.store.check()


@pytest.mark.parametrize("ending", ["as a script does", crash("at once"), crash("closing"), crash("by an error")])
def test_a_child_forked_while_writes_are_under_way_ends_and_the_parent_trains_on(ending: str, tmp_path: Path) -> None:
    call(fork_in_flight, tmp_path, ending)


def fork_in_flight(folder: Path, ending: str) -> None:
    model, cls = network(), held_class()
    optimizer = cls(model.parameters(), policy=policy(folder))
    for number, batch in enumerate(batches()):
        take_step(model, optimizer, batch)
        if number == 1:
            optimizer.store.wait()
            cls.engine.hold()
            chunks = range(len(optimizer.bound()[0].layout.chunks))
            optimizer.store.send_home([chunk for chunk in chunks if optimizer.store.tier_of(chunk) == "cpu"])
            cls.engine.wait_until_held()
            child = os.fork()
            if not child:
                _end_child(optimizer, ending)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (1 if ending == "by an error" else 0)
            cls.engine.release()
    assert_trained(model)
    optimizer.store.check()
    optimizer.close()
    assert not list(folder.iterdir())


def _end_child(optimizer: TieredAdamW, ending: str) -> None:
    with contextlib.suppress(ForkedStoreError):
        optimizer.step()
        os._exit(3)
    if ending == "at once":
        os._exit(0)
    if ending == "closing":
        optimizer.close()
        del optimizer
        gc.collect()
        os._exit(0)
    exit_as_a_script_does(1 if ending == "by an error" else 0)


# -- exits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", ["a backward begun", crash("writes under way"), crash("a cycle"), crash("a store and a second one")]
)
def test_an_interpreter_that_ends_in_the_middle_of_things_ends_well(what: str, tmp_path: Path) -> None:
    with Child(exit_with, tmp_path, what) as child:
        assert child.wait() == 0
    assert not list(tmp_path.iterdir())


def exit_with(folder: Path, what: str) -> None:
    model = network()
    optimizer: Any = TieredAdamW(
        model.parameters(), policy=policy(folder, "backward" if "backward" in what else "step")
    )
    for batch in batches():
        take_step(model, optimizer, batch)
    keep: list[Any] = [optimizer, model]
    if what == "a backward begun":
        optimizer.zero_grad()
        list(model.children())[2](torch.ones(1, 100)).sum().backward()
    elif what == "a cycle":
        optimizer.cycle = optimizer
        keep.clear()
    elif what == "a store and a second one":
        keep.append(TieredAdamW(network(1).parameters(), policy=policy(folder)))
        keep[-1].store.put("one", torch.ones(3000))
    sys.modules[__name__].__dict__["kept"] = keep  # torn down with the module, last of all
    exit_as_a_script_does()


# -- neighbours -------------------------------------------------------------------------------------------------


def test_two_processes_that_train_in_one_folder_at_once_have_torchs_bits_each(tmp_path: Path) -> None:
    with Child(train_alone, tmp_path, 1) as one, Child(train_alone, tmp_path, 2) as two:
        one.result()
        two.result()
    assert not list(tmp_path.iterdir())


def train_alone(folder: Path, seed: int) -> None:
    model = network(seed)
    with TieredAdamW(model.parameters(), policy=policy(folder)) as optimizer:
        for batch in batches():
            take_step(model, optimizer, batch)
        optimizer.store.check()
    assert_trained(model, seed)


def test_two_optimizers_take_turns_on_one_model_as_torchs_do(tmp_path: Path) -> None:
    """With updates in backward, each has hooks on the same parameters."""
    ours, theirs = network(), network()
    pair = [TieredAdamW(ours.parameters(), lr=lr, policy=policy(tmp_path, "backward")) for lr in (1e-3, 1e-2)]
    reference = [torch.optim.AdamW(theirs.parameters(), lr=lr, fused=True) for lr in (1e-3, 1e-2)]
    for optimizers, model in ((pair, ours), (reference, theirs)):
        for number, batch in enumerate(batches()):
            with contextlib.ExitStack() as others:
                if optimizers is pair:
                    others.enter_context(pair[1 - number % 2].accumulating())
                take_step(model, optimizers[number % 2], batch)
    assert all(same_bits(one, two) for one, two in zip(ours.parameters(), theirs.parameters(), strict=True))
    for optimizer in pair:
        optimizer.store.check()
        optimizer.close()


# -- close, wherever it is called -------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("heard")
def test_close_in_a_signal_handler_waits_for_the_step(tmp_path: Path) -> None:
    model = network()
    optimizer = TieredAdamW(model.parameters(), policy=policy(tmp_path))
    for batch in batches()[:-1]:
        take_step(model, optimizer, batch)
    signal.signal(signal.SIGUSR1, lambda number, frame: optimizer.close())
    optimizer.zero_grad()
    model(batches()[-1]).square().mean().backward()
    execution = optimizer._held.binding.store._execution  # type: ignore[union-attr]
    inner = execution.begin_use

    def begin_use(chunk: int, **how: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return inner(chunk, **how)

    execution.begin_use = begin_use  # type: ignore[method-assign]
    optimizer.step()
    assert_trained(model)
    with pytest.raises(StoreClosedError):
        optimizer.step()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("where", ["pre", "post"])
def test_close_in_a_hook_of_the_step_ends_it_or_follows_it(where: str, update: str, tmp_path: Path) -> None:
    model = network()
    optimizer = TieredAdamW(model.parameters(), policy=policy(tmp_path, update))
    for batch in batches()[:-1]:
        take_step(model, optimizer, batch)

    def hook(*_: object) -> None:
        optimizer.close()

    if where == "pre":
        optimizer.register_step_pre_hook(hook)
        with pytest.raises(StoreClosedError):
            take_step(model, optimizer, batches()[-1])
    else:
        optimizer.register_step_post_hook(hook)
        take_step(model, optimizer, batches()[-1])
        assert_trained(model)
    with pytest.raises(StoreClosedError):
        optimizer.state_dict()


CALLS: dict[str, Callable[[TieredAdamW], object]] = {
    "state_dict": TieredAdamW.state_dict,
    "store": lambda optimizer: optimizer.store,
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called_in_a_hook_of_backward_is_refused_and_the_step_is_whole(name: str, tmp_path: Path) -> None:
    model = network()
    with TieredAdamW(model.parameters(), policy=policy(tmp_path, "backward")) as optimizer:
        for batch in batches()[:-1]:
            take_step(model, optimizer, batch)
        optimizer.zero_grad()
        refused: list[type[BaseException]] = []

        def hook(_: Tensor) -> None:
            try:
                CALLS[name](optimizer)
            except BusyStoreError as error:
                refused.append(type(error))

        first = next(model.parameters())
        handle = first.register_hook(hook)  # the last gradient to come: a run is under way
        model(batches()[-1]).square().mean().backward()
        handle.remove()
        optimizer.step()
        assert refused == [BusyStoreError]
        assert_trained(model)
        optimizer.store.check()


def test_closing_on_another_thread_during_a_step_is_refused_and_the_step_is_whole(tmp_path: Path) -> None:
    model, cls = network(), held_class()
    optimizer = cls(model.parameters(), policy=policy(tmp_path))
    for batch in batches()[:-1]:
        take_step(model, optimizer, batch)
    optimizer.store.wait()
    cls.engine.hold()
    stepping = threading.Thread(target=take_step, args=(model, optimizer, batches()[-1]))
    stepping.start()
    cls.engine.wait_until_held()
    with pytest.raises(WrongThreadError):
        optimizer.close()
    cls.engine.release()
    stepping.join()
    assert_trained(model)
    optimizer.close()
