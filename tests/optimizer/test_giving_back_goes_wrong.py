"""Memory given back and taken again while something goes wrong: nothing is lost, and what heals can be used again."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes import CurveProbe, FaultyEngine, HangingEngine
from tests.optimizer.cases import assert_same_parameters, seeded, set_gradients
from tests.optimizer.test_offload import SHAPES, Stingy, Twins, policy
from tests.optimizer.test_pressure import CHUNK, MARKS, Job, OnDevice, steady, undisturbed
from tierstore import TieredAdamW, TieredStore
from tierstore.build import Parts
from tierstore.errors import CapacityError, PolicyError, TransferError
from tierstore.execution import Execution
from tierstore.io.base import Kind

__all__ = ["undisturbed"]
pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


def made_with(**parts: Any) -> type[TieredAdamW]:
    return type("Optimizer", (TieredAdamW,), {"parts": Parts(**parts)})


# -- nothing is lost --------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_loaded_for_want_of_memory_leaves_the_state(tmp_path: Path) -> None:
    """Somebody else has what was offloaded. All state was gone, a save saved none, and the next step began afresh."""
    device = Stingy()
    twins = Twins(tmp_path, made_with(open_device=lambda *_: device))
    twins.step()
    twins.mine.save_checkpoint(tmp_path / "one.zarr")
    twins.mine.offload("nvme", ["gpu", "cpu"])
    device.is_empty = True
    with pytest.raises(CapacityError):
        twins.mine.load_checkpoint(tmp_path / "one.zarr")
    assert len(twins.mine.state_dict()["state"]) == len(SHAPES)
    device.is_empty = False
    twins.step()


# -- what heals can be used again -------------------------------------------------------------------------------------


def test_a_bad_place_in_files_that_joined_does_not_keep_a_tier_empty_for_ever(tmp_path: Path) -> None:
    """They were to have their old size again, none at all, and the bad place could not be given back."""
    engine = FaultyEngine()
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    tiers = {"cpu": {}, "nvme": {"paths": [str(tmp_path)]}}
    make = made_with(open_engine=lambda *_, **__: engine)
    optimizer = make(mine, lr=1e-2, policy={"chunk_size": CHUNK, "adapt": False, "tiers": tiers})
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)

    def step(number: int) -> None:
        for each, parameters in ((optimizer, mine), (reference, theirs)):
            set_gradients(parameters, number)
            each.step()
        assert_same_parameters(mine, theirs)

    step(0)
    engine.spoil(errno.EIO, kind=Kind.WRITE, nth=3)
    optimizer.offload("nvme", ["cpu"])  # over another place
    engine.heal()
    step(1)
    optimizer.close()


@pytest.mark.parametrize("tiers", [["gpu"], ["gpu", "cpu"]])
def test_a_disk_that_could_not_be_read_during_reloads_is_read_once_it_can_be(tmp_path: Path, tiers: list[str]) -> None:
    """It is shunned by then, and room elsewhere was looked for in tiers that are empty for now."""
    engine = FaultyEngine()
    twins = Twins(tmp_path, made_with(open_engine=lambda *_, **__: engine))
    twins.step()
    twins.mine.offload("nvme", tiers)
    engine.break_path(str(tmp_path), errno.EIO, kind=Kind.READ)
    for _ in range(3):
        with pytest.raises(TransferError):
            twins.mine.reload()
    engine.heal()
    twins.mine.reload()
    twins.step()


def test_state_can_be_loaded_onto_a_disk_that_answers_again(tmp_path: Path) -> None:
    """What was given up has cost room. Whether the disk answers is found out by reading a chunk; a load leaves none."""
    engine = HangingEngine()
    twins = Twins(tmp_path, made_with(open_engine=lambda *_, **__: engine), gpu=3, cpu=12, nvme=55 * CHUNK)
    twins.step()
    engine.hold(nth=2, times=1, kind=Kind.WRITE)
    set_gradients(twins.parameters, 9)
    with pytest.raises(TransferError):
        twins.mine.step()
    engine.release()
    engine.wait_until_back()
    with torch.no_grad():
        for mine, other in zip(twins.parameters, twins.others, strict=True):
            mine.copy_(other)
    twins.mine.load_state_dict(twins.theirs.state_dict())
    twins.step()


# -- yielding ---------------------------------------------------------------------------------------------------------


BLOCKS: dict[str, Callable[[TieredStore], AbstractContextManager[Any]]] = {
    "yielding": lambda store: store.yielding("gpu", CHUNK),
    "a lease": lambda store: store.lease("small"),
    "a lease of many chunks": lambda store: store.lease("large"),
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_body_that_ends_between_backward_and_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str
) -> None:
    """With `update: backward` a run waits for gradients or `step()`; the end of the block waited for that run."""
    begun = threading.Event()
    step = Execution.step

    def telling(*arguments: Any, **options: Any) -> Any:
        begun.set()
        return step(*arguments, **options)

    used, unused = nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(50_000))
    optimizer = TieredAdamW([used, unused], lr=1e-2, policy=policy(tmp_path, update="backward", nvme=100 * CHUNK))
    for _ in range(2):
        (used.sum() + unused.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    store = optimizer.store
    sizes = {"small": 10, "large": 3 * CHUNK // 4}
    for name, size in sizes.items():
        store.put(name, torch.zeros(size))
    monkeypatch.setattr(Execution, "step", telling)

    def body() -> None:
        with BLOCKS[block](store) as lent:
            if lent is not None:
                lent.fill_(1)
            used.sum().backward()
            assert begun.wait(10)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    optimizer.step()
    (used.sum() + unused.sum()).backward()
    optimizer.step()
    store.check()
    kept = {name: store.get(name).sum().item() for name in sizes}
    changed = {"a lease": "small", "a lease of many chunks": "large"}.get(block)
    assert kept == {name: size if name == changed else 0 for name, size in sizes.items()}
    for name in sizes:
        store.delete(name)
    optimizer.offload("nvme", ["gpu", "cpu"])
    optimizer.close()


def nested(folder: Path) -> tuple[Job, OnDevice]:
    on = OnDevice(100)
    gpu = {"device": "cpu", "capacity": 40 * CHUNK, "watermarks": {"high": 0.95, "low": 0.85}}
    return Job(folder, {"gpu": gpu, "cpu": {"capacity": 60 * CHUNK}, "nvme": {}}, on.parts).train(3), on


def test_a_tier_stays_small_until_the_last_block_is_over(tmp_path: Path) -> None:
    job, _ = nested(tmp_path)
    with job.optimizer.store.yielding("gpu", 80 * CHUNK):
        with job.optimizer.store.yielding("gpu", 90 * CHUNK):
            pass
        job.train(3)
        assert job.extents("gpu")[-1] <= 20
    assert job.optimizer.store.stats().tiers["gpu"].capacity_bytes == 40 * CHUNK


def test_blocks_may_end_in_any_order(tmp_path: Path) -> None:
    job, _ = steady(tmp_path, 50)
    store = job.train(2).optimizer.store
    first, second = store.yielding("gpu", 30 * CHUNK), store.yielding("gpu", 40 * CHUNK)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert store.stats().tiers["gpu"].capacity_bytes <= 10 * CHUNK
    second.__exit__(None, None, None)
    assert store.stats().tiers["gpu"].capacity_bytes == 30 * CHUNK


def test_a_tier_that_is_offloaded_while_it_yields_has_its_size_again(tmp_path: Path) -> None:
    job, _ = steady(tmp_path, 50)
    job.train(2)
    with job.optimizer.store.yielding("gpu", 40 * CHUNK):
        job.optimizer.offload("nvme", ["gpu", "cpu"])
    job.train(1)
    assert job.extents("gpu")[-1] == 30


def test_a_tier_that_yields_while_it_is_offloaded_stays_empty(tmp_path: Path) -> None:
    job, _ = steady(tmp_path, 50)
    store = job.train(2).optimizer.store
    job.optimizer.offload("nvme", ["gpu"])
    with store.yielding("gpu", 45 * CHUNK):
        job.train(1)
        assert job.extents("gpu")[-1] <= 5


def test_a_size_given_in_the_body_lasts(tmp_path: Path) -> None:
    job, _ = steady(tmp_path, 50)
    store = job.train(2).optimizer.store
    with store.yielding("gpu", 40 * CHUNK):
        store.resize("gpu", 8 * CHUNK)
    assert store.stats().tiers["gpu"].capacity_bytes == 8 * CHUNK


def test_ctrl_c_while_room_is_made_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, device = steady(tmp_path, 50)
    store = job.train(2).optimizer.store
    monkeypatch.setattr(device, "release_unused", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), store.yielding("gpu", 40 * CHUNK):
        pytest.fail("the body must not run")
    assert store.stats().tiers["gpu"].capacity_bytes == 30 * CHUNK


# -- where chunks go --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [["cpu"], ["cpu", "nvme"]])
def test_a_device_that_held_everything_can_give_some_of_it(
    tmp_path: Path, undisturbed: list[float], slower: list[str]
) -> None:
    """A cpu tier of `auto` is one extent where all fits the device, and chunks could neither stay in it nor pass."""
    on = OnDevice(100)
    job = Job(tmp_path, {"gpu": {"device": "cpu", "capacity": 40 * CHUNK}} | {name: {} for name in slower}, on.parts)
    job.train(8, before=lambda step: on.device.activate((10 if step < 2 else 60) * CHUNK))
    assert job.losses == undisturbed[: len(job.losses)]
    assert job.extents("gpu")[-1] < 40


def test_state_is_not_put_where_there_is_no_memory_for_it(tmp_path: Path) -> None:
    """Without `to`, the fastest tier with room was a cpu tier without a limit, on a machine that was full."""
    probe = CurveProbe(100 * CHUNK, [99 * CHUNK])
    tiers = {"gpu": {"device": "cpu", "capacity": 40 * CHUNK}, "cpu": {}, "nvme": {}}
    job = Job(tmp_path, tiers, Parts(open_probe=lambda **_: probe)).train(2)
    job.optimizer.offload()
    assert job.optimizer.store.stats().tiers["nvme"].chunks > 0


def test_a_full_disk_is_not_asked_at_every_step(tmp_path: Path) -> None:
    probe = CurveProbe(100 * CHUNK, [90 * CHUNK])
    job = Job(tmp_path, {"cpu": {"watermarks": MARKS}, "nvme": {}}, Parts(open_probe=lambda **_: probe))
    probe.store = job.optimizer.store
    asked: list[int] = []

    def refuse() -> Any:
        asked.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    job.optimizer.store.setup.later["nvme"] = refuse  # type: ignore[index]
    job.train(30)
    assert len(asked) == 1


# -- wrong arguments --------------------------------------------------------------------------------------------------


def _yield(job: Job, tier: Any, nbytes: Any) -> None:
    with job.optimizer.store.yielding(tier, nbytes):
        pass


WRONG: list[tuple[Callable[..., Any], Sequence[Any]]] = [
    *[(_yield, ("gpu", found)) for found in ("4 pounds", None, -5, float("nan"))],
    (_yield, (["gpu"], 1)),
    (lambda job, tier: job.optimizer.store.resize(tier, "1MiB"), (["gpu"],)),
    (lambda job, tier: job.optimizer.store.request_resize(tier, "1MiB"), ({},)),
    *[(lambda job, tiers: job.optimizer.offload(tiers=tiers), (found,)) for found in (None, 5, [])],
]


@pytest.mark.parametrize(("call", "arguments"), WRONG)
def test_arguments_that_cannot_be_meant_are_refused_with_what_was_found(
    tmp_path: Path, call: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    job, _ = steady(tmp_path, 500)
    job.train(1)
    with pytest.raises(PolicyError, match="found"):
        call(job, *arguments)
