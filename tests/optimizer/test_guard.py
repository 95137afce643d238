"""Things that must not pass unnoticed around a step: late errors, second threads, timeouts, the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import threading
import tracemalloc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import PATIENCE_SECONDS, FaultyEngine, FewThreads, HangingEngine
from tierstore import TieredAdamW, TieredStore
from tierstore.build import Parts
from tierstore.device import HostDevice
from tierstore.errors import (
    FailedStepError,
    LeaseError,
    PolicyError,
    StateDictError,
    SwapError,
    TransferError,
    TransferTimeoutError,
    WrongThreadError,
)
from tierstore.io.base import Kind, Request


def parameters(count: int = 8, elements: int = 3000) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(elements)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def policy(tmp_path: Path, **io: Any) -> dict[str, Any]:
    return {
        "chunk_size": "16KiB",
        "tiers": {"cpu": {"capacity": "64KiB"}, "nvme": {"paths": [str(tmp_path)], "io": io}},
    }


class LateDevice(HostDevice):
    """An accelerator that tells of errors of launched work only when it is waited for."""

    error: BaseException | None = None

    def finish(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("launched work failed"), "launched work failed"), (KeyboardInterrupt(), "KeyboardInterrupt")],
    ids=["words", "none"],
)
def test_an_error_told_after_the_last_chunk_breaks_the_step_off(
    tmp_path: Path, error: BaseException, told: str
) -> None:
    """What says nothing, as Ctrl-C does, is told by its class."""
    device = LateDevice("stand-in")

    class LateAdamW(TieredAdamW):
        parts = Parts(open_device=lambda wanted, on: device)

    three = policy(tmp_path)
    three["tiers"]["gpu"] = {"device": "cpu", "capacity": "64KiB"}
    with LateAdamW(parameters(), policy=three) as optimizer:
        optimizer.step()
        device.error = error
        with pytest.raises(type(error)):
            optimizer.step()
        device.error = None
        with pytest.raises(FailedStepError, match=rf"broke off \({told}\)"):
            optimizer.step()


def test_a_second_thread_cannot_step_while_the_first_one_is_in_its_step(tmp_path: Path) -> None:
    engine = FaultyEngine(threads=4)

    class HeldAdamW(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    ours = parameters()
    optimizer = HeldAdamW(ours, policy=policy(tmp_path))
    optimizer.step()
    optimizer.store.wait()
    engine.hold()
    first = threading.Thread(target=optimizer.step)
    first.start()
    engine.wait_until_held()
    errors = []
    store = optimizer.store
    for use in (optimizer.step, optimizer.state_dict, optimizer.close, store.check, lambda: store.resize("cpu", 1)):
        with pytest.raises(WrongThreadError):
            use()
        errors.append(use)
    asked = optimizer.store.request_resize("cpu", "128KiB")  # which is made for other threads
    engine.release()
    first.join(PATIENCE_SECONDS)
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())
    assert not asked.done()
    optimizer.step()
    assert asked.result(0) == 128 << 10 == optimizer.store.stats().tiers["cpu"].capacity_bytes
    optimizer.close()


@pytest.mark.parametrize("has_thread", [True, False])
def test_an_optimizer_forgotten_on_one_of_its_own_workers_is_closed_by_another_thread(
    has_thread: bool, tmp_path: Path
) -> None:
    """The collector runs on whatever thread allocates; a worker that closed its own engine would wait for itself.

    Where no other thread can be had, it is closed when the next store is made.
    """
    collected = threading.Event()

    class CollectingEngine(FaultyEngine):
        """Holds the last reference of a cycle until one of its own workers collects it."""

        collects = False

        def transfer(self, request: Request) -> int:
            moved = super().transfer(request)
            if self.collects:
                self.collects = False
                gc.collect()
                collected.set()
            return moved

    engine = CollectingEngine()

    class ForgottenAdamW(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    optimizer: Any = ForgottenAdamW(parameters(), policy=policy(tmp_path))
    optimizer.step()
    optimizer.store.wait()
    gc.collect()
    gc.disable()
    try:
        optimizer.cycle = optimizer
        gone = weakref.ref(optimizer.store)
        engine.hold()
        engine.collects = True
        optimizer.store.send_home([chunk for chunk in range(12) if optimizer.store.tier_of(chunk) == "cpu"])
        del optimizer
        with contextlib.nullcontext() if has_thread else FewThreads():
            engine.release()
            assert collected.wait(PATIENCE_SECONDS)
    finally:
        gc.enable()
    assert gone() is None
    if not has_thread:
        TieredStore(policy=policy(tmp_path)).close()
    for thread in threading.enumerate():
        if thread.name.startswith(("tierstore-io", "closing tierstore")):
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()


def test_state_read_again_after_a_timeout_is_not_what_the_late_request_brings(tmp_path: Path) -> None:
    engine = HangingEngine(threads=2)

    class SlowAdamW(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    with SlowAdamW(parameters(), policy=policy(tmp_path)) as optimizer:
        optimizer.step()
        optimizer.store.wait()
        expected = optimizer.state_dict()["state"]
        engine.hold()
        with pytest.raises(TransferTimeoutError):
            optimizer.state_dict()
        engine.release()
        found = optimizer.state_dict()["state"]
        assert all(torch.equal(found[k][name], expected[k][name]) for k in expected for name in expected[k])


def test_a_load_that_broke_off_can_be_made_again(tmp_path: Path) -> None:
    engine = FaultyEngine()

    class FaultyAdamW(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    ours = parameters()
    with FaultyAdamW(ours, policy=policy(tmp_path)) as optimizer:
        optimizer.step()
        saved = optimizer.state_dict()
        for nth in range(1, 6):
            engine.fail(nth=nth, times=2, kind=Kind.WRITE)
            try:
                optimizer.load_state_dict(saved)
                optimizer.store.wait()
            except TransferError:
                engine.heal()
                optimizer.load_state_dict(saved)
            engine.heal()
            optimizer.store.check()
            found = optimizer.state_dict()["state"]
            assert all(torch.equal(found[k][n], saved["state"][k][n]) for k in saved["state"] for n in found[k])
        optimizer.step()


def test_parameters_that_changed_lose_no_tensor_that_a_user_put_beside_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(50, 50)
    optimizer = TieredAdamW(model.parameters(), policy=policy(tmp_path))
    optimizer.store.put("mine", torch.arange(10))
    model.double()
    with pytest.raises(LeaseError, match="mine"):
        _ = optimizer.store
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_share_memory_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Tied by `.data`, one of two updates of a low-precision parameter was lost; float32 bits hung on chunk ends."""
    shared = torch.randn(6000).to(dtype)
    names = {"first": shared, "between": torch.randn(10).to(dtype), "second": shared[1000:3000]}
    with pytest.raises(PolicyError, match="first and second share memory"):
        TieredAdamW([(n, torch.nn.Parameter(t)) for n, t in names.items()], policy=policy(tmp_path))


def test_parameters_side_by_side_in_one_buffer_are_not_shared_memory(tmp_path: Path) -> None:
    buffer = torch.randn(6000)
    halves = [
        torch.nn.Parameter(buffer[:3000]),
        torch.nn.Parameter(buffer[3000:]),
        torch.nn.Parameter(buffer[3000:3000]),
    ]
    TieredAdamW(halves, policy=policy(tmp_path)).close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda saved: saved["state"][0].update(exp_avg=saved["state"][0]["exp_avg"].to_sparse()),
        lambda saved: saved["state"][0].update(step=torch.tensor(1j)),
        lambda saved: saved["param_groups"][0].pop("betas"),
    ],
)
def test_a_load_that_is_refused_leaves_the_state_as_it_was(tmp_path: Path, spoil: Any) -> None:
    with TieredAdamW(parameters(), policy=policy(tmp_path)) as optimizer:
        optimizer.step()
        saved, before = optimizer.state_dict(), optimizer.state_dict()
        spoil(saved)
        with pytest.raises(StateDictError):
            optimizer.load_state_dict(saved)
        found = optimizer.state_dict()["state"]
        assert all(torch.equal(found[k][n], before["state"][k][n]) for k in found for n in found[k])


def test_a_store_whose_warning_is_an_error_leaves_no_threads() -> None:
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(UserWarning, match="gpu tier is left out"):
                TieredStore()
    assert threading.active_count() == before


def test_a_tier_far_larger_than_its_state_costs_nothing(tmp_path: Path) -> None:
    """Extents were made one by one at the start: seconds, and hundreds of megabytes, for tiers with nothing in them."""
    large = {"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "8GiB"}}}
    with TieredAdamW(parameters(1), policy=large) as optimizer:
        tracemalloc.start()
        optimizer.step()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        optimizer.store.check()


def test_an_expanded_parameter_is_refused_before_anything_moves(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="expanded"):
        TieredAdamW([torch.nn.Parameter(torch.ones(5).expand(4, 5))], policy=policy(tmp_path))


def test_a_lazy_parameter_is_looked_at_once_it_has_a_shape(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.LazyLinear(30)
    with TieredAdamW(model.parameters(), policy=policy(tmp_path)) as optimizer:
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 2


def test_a_swap_folder_of_nobody_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_SWAP", "~nobody-of-that-name/swap")
    with pytest.raises(SwapError, match="TIERSTORE_SWAP"):
        TieredStore({"tiers": {"nvme": {}}})
