"""Memory given back on demand and taken again: the state stays what it was, and the memory is really returned."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import FaultyEngine
from tests.optimizer.cases import KIB, MIB, assert_same_parameters, seeded, set_gradients
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.device import HostDevice
from tierstore.errors import BusyStoreError, CapacityError, DiskFullError, LeaseError, PolicyError, StoreClosedError
from tierstore.io.base import Kind
from tierstore.placement import ENOUGH_EXTENTS
from tierstore.swapfile import SwapFile

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

CHUNK = 16 * KIB
SHAPES = ((300, 200), (70_000,), (5,))


def policy(folder: Path, gpu: int = 6, cpu: int | str = 12, nvme: Any = "auto", **settings: Any) -> dict[str, Any]:
    cpu_bytes = cpu if isinstance(cpu, str) else cpu * CHUNK
    tiers = {
        "gpu": {"device": "cpu", "capacity": gpu * CHUNK},
        "cpu": {"capacity": cpu_bytes},
        "nvme": {"paths": [str(folder)], "capacity": nvme},
    }
    return {"chunk_size": CHUNK, "adapt": False, "tiers": tiers, **settings}


class Twins:
    """An optimizer, and torch's that does the same."""

    def __init__(self, folder: Path, make: type[TieredAdamW] = TieredAdamW, **options: Any) -> None:
        self.parameters, self.others = seeded(*SHAPES), seeded(*SHAPES)
        self.mine = make(self.parameters, lr=1e-2, policy=policy(folder, **options))
        self.theirs = torch.optim.AdamW(self.others, lr=1e-2, fused=True)
        self.steps = 0

    def step(self, times: int = 2) -> None:
        for _ in range(times):
            set_gradients(self.parameters, self.steps)
            set_gradients(self.others, self.steps)
            self.mine.step()
            self.theirs.step()
            self.steps += 1
        self.check()

    def check(self) -> None:
        self.mine.store.check()
        assert_same_parameters(self.parameters, self.others)

    def sizes(self) -> dict[str, int]:
        return {name: tier.capacity_bytes // CHUNK for name, tier in self.mine.store.stats().tiers.items()}


EMPTIED: list[tuple[list[str], str | None]] = [
    (["gpu"], None),
    (["gpu"], "cpu"),
    (["gpu"], "nvme"),
    (["cpu"], None),
    (["gpu", "cpu"], None),
    (["cpu", "gpu"], "nvme"),
]


@pytest.mark.parametrize("order", ["alternating", "fixed"])
@pytest.mark.parametrize(("tiers", "to"), EMPTIED)
def test_state_goes_down_and_comes_back(tmp_path: Path, tiers: list[str], to: str | None, order: str) -> None:
    twins = Twins(tmp_path, cpu=40, order=order)
    twins.step()
    before = twins.sizes()
    done = twins.mine.offload(to, tiers)
    twins.check()
    assert done.memory_bytes == sum(before[tier] for tier in tiers) * CHUNK and done.seconds > 0
    assert [twins.sizes()[tier] for tier in tiers] == [0] * len(tiers)
    back = twins.mine.reload()
    twins.check()
    assert back.memory_bytes >= done.memory_bytes and twins.sizes() == before
    assert twins.mine.reload().bytes_moved == 0
    twins.step()
    kinds = [decision.kind for decision in twins.mine.store.stats().decisions]
    assert kinds.count("offload") == kinds.count("reload") == 1


@pytest.mark.parametrize("master", ["float32", "split"])
def test_low_precision_state_comes_back_too(tmp_path: Path, master: str) -> None:
    kept = []
    for is_offloaded in (False, True):
        parameters = [p.detach().bfloat16().requires_grad_() for p in seeded(*SHAPES)]
        optimizer = TieredAdamW(parameters, lr=1e-2, policy=policy(tmp_path, state={"master": master}))
        for step in range(4):
            set_gradients(parameters, step)
            optimizer.step()
            if is_offloaded:
                optimizer.offload("nvme", ["gpu", "cpu"])
        kept.append((parameters, optimizer.state_dict()["state"]))
        optimizer.close()
    assert_same_parameters(kept[0][0], kept[1][0])
    for one, other in zip(kept[0][1].values(), kept[1][1].values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("capacity", ["auto", 12])
@pytest.mark.parametrize("order", ["alternating", "fixed"])
@pytest.mark.parametrize(("tiers", "to"), EMPTIED)
@pytest.mark.parametrize("emptied_before", [None, ["cpu"], ["gpu"]])
def test_what_is_emptied_finds_room_to_pass_in_tiers_that_are_full(
    tmp_path: Path, emptied_before: list[str] | None, tiers: list[str], to: str | None, order: str, capacity: int | str
) -> None:
    """A cpu tier of just the homes there are had no extent to pass through, nor had one that was emptied already."""
    twins = Twins(tmp_path, cpu=capacity, order=order)
    twins.step()
    before = twins.sizes()
    if emptied_before is not None:
        twins.mine.offload("nvme", emptied_before)
    twins.mine.offload(to, tiers)
    twins.check()
    assert [twins.sizes()[tier] for tier in tiers] == [0] * len(tiers)
    twins.mine.reload()
    assert {tier: extents for tier, extents in twins.sizes().items() if extents} == before
    twins.step()


@pytest.mark.parametrize(("tiers", "at_once"), [(["gpu"], ENOUGH_EXTENTS), (["gpu", "cpu"], 8)])
def test_what_leaves_is_written_side_by_side(tmp_path: Path, tiers: list[str], at_once: int) -> None:
    """What came from gpu passed a cpu tier full of guests one after another, and the cpu tier waited until it had."""
    engine = FaultyEngine(threads=at_once)

    class Optimizer(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    twins = Twins(tmp_path, Optimizer)
    twins.step()
    twins.mine.store.wait()
    engine.hold(kind=Kind.WRITE)
    with ThreadPoolExecutor(1) as pool:
        emptied = pool.submit(twins.mine.offload, "nvme", tiers)
        try:
            engine.wait_until_held(at_once)
        finally:
            engine.release()
        assert emptied.result().bytes_moved > 0
    twins.step()


USES: dict[str, Callable[[Twins], Any]] = {
    "a step": lambda twins: twins.step(1),
    "a load": lambda twins: twins.mine.load_state_dict(twins.mine.state_dict()),
    "a write": lambda twins: twins.mine.state[twins.parameters[0]]["exp_avg"].mul_(1.0),
    "a tensor put beside": lambda twins: twins.mine.store.put("x", torch.ones(3)),
    "a resize": lambda twins: twins.mine.store.resize("cpu", 20 * CHUNK),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_chunk_brings_memory_back(tmp_path: Path, use: str) -> None:
    twins = Twins(tmp_path)
    twins.step()
    twins.mine.offload("nvme", ["gpu", "cpu"])
    assert twins.mine.store.is_offloaded
    USES[use](twins)
    if use == "a write":
        twins.step(1)  # what was handed out is written then
    assert not twins.mine.store.is_offloaded and twins.sizes()["gpu"] == 6
    twins.step()


def test_state_can_be_read_and_saved_meanwhile(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.step()
    with twins.mine.offloaded("gpu", "cpu") as done:
        assert done.memory_bytes == 18 * CHUNK
        states = twins.mine.state_dict()["state"], twins.theirs.state_dict()["state"]
        for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq"))
        twins.mine.save_checkpoint(tmp_path / "one.zarr")
        saving = twins.mine.save_checkpoint(tmp_path / "two.zarr", wait=False)
        saving.wait()
        copy.deepcopy(twins.mine).close()
        assert twins.sizes()["gpu"] == twins.sizes()["cpu"] == 0
    assert twins.sizes()["gpu"] == 6
    twins.mine.load_checkpoint(tmp_path / "two.zarr")
    twins.step()


def test_blocks_within_blocks_end_with_the_outer_one(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.step()
    with twins.mine.offloaded("gpu", to="nvme"):
        with twins.mine.offloaded("cpu"):
            assert twins.sizes()["gpu"] == twins.sizes()["cpu"] == 0
        assert twins.sizes()["gpu"] == twins.sizes()["cpu"] == 0
    assert (twins.sizes()["gpu"], twins.sizes()["cpu"]) == (6, 12)
    twins.step()


def test_a_block_may_close_the_optimizer(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.step()
    with twins.mine.offloaded():
        twins.mine.close()
    with pytest.raises(StoreClosedError):
        twins.mine.offload()


def test_before_there_is_state_and_without_the_tier_there_is_nothing_to_give(tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    optimizer = TieredAdamW(parameters, lr=1e-2, policy=policy(tmp_path))
    assert optimizer.reload().memory_bytes == 0
    assert optimizer.offload().memory_bytes == 6 * CHUNK
    optimizer.close()
    optimizer = TieredAdamW(parameters, lr=1e-2, tiers=["gpu", "cpu"])
    set_gradients(parameters, 1)
    with pytest.warns(UserWarning, match="the gpu tier is left out"):
        optimizer.step()
    assert optimizer.offload().memory_bytes == 0
    optimizer.close()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tiers": ["disk"]}, "found the tiers ['disk']; allowed: one or more of gpu, cpu, nvme"),
    ({"tiers": ["nvme"]}, "found tier 'nvme'; allowed: a memory tier of this store (gpu, cpu)"),
    ({"tiers": ["gpu"], "to": "gpu"}, "gpu cannot be emptied into 'gpu'; allowed: cpu, nvme"),
    ({"tiers": ["gpu", "cpu"], "to": "cpu"}, "gpu, cpu cannot be emptied into 'cpu'; allowed: nvme"),
    ({"tiers": ["gpu"], "to": "disk"}, "gpu cannot be emptied into 'disk'; allowed: cpu, nvme"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    twins = Twins(tmp_path)
    twins.step()
    before = twins.sizes()
    with pytest.raises(PolicyError, match=re.escape(message)):
        twins.mine.offload(**options)
    assert twins.sizes() == before
    twins.step()


def test_without_room_below_nothing_moves(tmp_path: Path) -> None:
    twins = Twins(tmp_path, gpu=40, cpu=6, nvme=80 * CHUNK)
    twins.step()
    before = twins.sizes()
    with pytest.raises(CapacityError, match=r"raise tiers\.cpu\.capacity to at least [0-9,]+ bytes"):
        twins.mine.offload("cpu")
    assert twins.sizes() == before and not twins.mine.store.is_offloaded
    twins.step()
    twins.mine.offload()  # into nvme
    twins.step()


def test_a_disk_that_is_full_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(tmp_path, gpu=40)
    twins.step()
    before = twins.sizes()
    grow = SwapFile.grow

    def refuse(*_: object) -> int:
        raise DiskFullError(28, "No space left on device")

    monkeypatch.setattr(SwapFile, "grow", refuse)
    with pytest.raises(DiskFullError):
        twins.mine.offload("nvme")
    assert twins.sizes() == before and not twins.mine.store.is_offloaded
    twins.step()
    monkeypatch.setattr(SwapFile, "grow", grow)
    twins.mine.offload("nvme")
    twins.step()
    assert twins.sizes() == before


def test_leased_chunks_are_not_emptied(tmp_path: Path) -> None:
    twins = Twins(tmp_path)
    twins.mine.store.put("mine", torch.ones(10))
    with twins.mine.store.lease("mine"), pytest.raises(LeaseError, match="gpu cannot be emptied"):
        twins.mine.store.offload(["gpu"])
    twins.mine.store.delete("mine")
    twins.step()


class Stingy(HostDevice):
    """Memory that is there once, and again when it is let."""

    def __init__(self) -> None:
        super().__init__("stand-in")
        self.is_empty = False

    def allocate(self, nbytes: int) -> Tensor:
        if self.is_empty:
            raise CapacityError(f"{nbytes} bytes are not there: lower tiers.gpu.capacity")
        return super().allocate(nbytes)


def test_a_reload_without_room_leaves_state_where_it_is(tmp_path: Path) -> None:
    device = Stingy()

    class Optimizer(TieredAdamW):
        parts = Parts(open_device=lambda *_: device)

    twins = Twins(tmp_path, Optimizer)
    twins.step()
    before = twins.sizes()
    twins.mine.offload("nvme", ["gpu", "cpu"])
    device.is_empty = True
    with pytest.raises(CapacityError, match=r"lower tiers\.gpu\.capacity"):
        twins.mine.reload()
    set_gradients(twins.parameters, 9)
    with pytest.raises(CapacityError):
        twins.mine.step()
    twins.check()
    assert twins.mine.store.is_offloaded and twins.sizes()["gpu"] == twins.sizes()["cpu"] == 0
    device.is_empty = False
    twins.step()
    assert twins.sizes() == before


def test_it_waits_for_a_step_beside_backward(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(5000))
    optimizer = TieredAdamW([parameter], lr=1e-2, policy=policy(tmp_path, update="backward"))
    for number in range(4):
        (parameter * 2).sum().backward()
        if number:  # the first one is only watched
            with pytest.raises(BusyStoreError, match="call step\\(\\) first"):
                optimizer.offload()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.offload()
        assert optimizer.store.is_offloaded
    optimizer.close()


def anonymous_bytes() -> int:
    """What the process has in memory of its own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_host_memory_is_really_returned(tmp_path: Path) -> None:
    """Of 96 MiB in two tiers at least 95 % leave the process, and are there again after a step."""
    parameters = [torch.nn.Parameter(torch.zeros(4 << 20)) for _ in range(4)]
    tiers = {
        "gpu": {"device": "cpu", "capacity": "32MiB"},
        "cpu": {"capacity": "64MiB"},
        "nvme": {"paths": [str(tmp_path)]},
    }
    optimizer = TieredAdamW(parameters, lr=1e-2, policy={"chunk_size": "2MiB", "adapt": False, "tiers": tiers})
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.step()
    held = anonymous_bytes()
    done = optimizer.offload("nvme", ["gpu", "cpu"])
    returned = held - anonymous_bytes()
    assert done.memory_bytes == 96 * MIB and returned >= 0.95 * done.memory_bytes
    optimizer.step()
    assert anonymous_bytes() - (held - returned) >= 0.9 * done.memory_bytes
    optimizer.close()
