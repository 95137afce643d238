"""The accelerator's half of `test_device`, `test_tiers`, `test_waits`: real streams, events, page-locked memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contracts import DeviceContract, MemoryTierContract
from tests.trial import Trial, WrongBytesError
from tests.unit.test_waits import without_copy_waiting_for_the_update
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.device import AcceleratorDevice, Device, host_for, open_device
from tierstore.device.accelerator import _register_with_cuda
from tierstore.errors import CapacityError
from tierstore.layout import HUGE_PAGE
from tierstore.mapping import map_host_memory
from tierstore.probes import Probe
from tierstore.tiers import MemoryTier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the swap folder:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

MIB = 1 << 20
LONG = 400_000_000
"""Cycles that a kernel sleeps: far longer than the host needs for what a test does meanwhile."""
SHORT = 200_000
CAPACITY = {"gpu": 5, "cpu": 5, "nvme": 8}


def on() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu() -> Iterator[AcceleratorDevice]:
    device = AcceleratorDevice(on())
    yield device
    device.close()


class TestAcceleratorDevice(DeviceContract):
    @pytest.fixture
    def device(self, gpu: AcceleratorDevice) -> Device:
        return gpu

    @pytest.fixture
    def too_much(self, gpu: AcceleratorDevice) -> int:
        return 2 * gpu.memory_bytes()[1]


class TestMemoryTierOfAnAccelerator(MemoryTierContract):
    @pytest.fixture
    def device(self, gpu: AcceleratorDevice) -> Device:
        return gpu

    def test_device_too_small_for_a_tier_is_as_it_was(self, gpu: AcceleratorDevice) -> None:
        before = torch.cuda.memory_allocated()
        tier = MemoryTier("gpu", gpu, 64 * MIB)
        total = gpu.memory_bytes()[1]
        with pytest.raises(CapacityError, match=r"lower tiers\.gpu\.capacity"):
            tier.grow(2 * total // (64 * MIB), slab_extents=total // (256 * MIB))
        assert tier.arena.capacity == 0
        assert torch.cuda.memory_allocated() == before
        tier.grow(1, slab_extents=1)
        tier.close()


# --- streams and events


def test_host_does_not_wait_for_launched_work(gpu: AcceleratorDevice) -> None:
    gpu.launch(lambda: torch.cuda._sleep(LONG))
    event = gpu.record()
    assert not event.query()
    event.wait()
    assert event.query()


def test_copies_run_beside_kernels_and_beside_each_other(gpu: AcceleratorDevice) -> None:
    slab, locked = gpu.allocate(8192), host_for(on(), pin_memory=True).allocate(8192)
    held, free = gpu.copy_stream("gpu-cpu"), gpu.copy_stream("cpu-gpu")
    locked.fill_(5)
    gpu.launch(lambda: torch.cuda._sleep(LONG))
    computed = gpu.record()
    held.wait(computed)
    held.copy(locked[4096:], slab[4096:])
    free.copy(slab[:4096], locked[:4096])
    free.record().wait()
    assert not computed.query() and not held.record().query()
    computed.wait()


def test_copy_waits_on_its_stream_for_a_slow_update(gpu: AcceleratorDevice) -> None:
    slab, locked = gpu.allocate(4096), host_for(on(), pin_memory=True).allocate(4096)
    stream = gpu.copy_stream("gpu-cpu")

    def update() -> None:
        torch.cuda._sleep(LONG)
        slab.fill_(7)

    gpu.launch(update)
    ready = gpu.record()
    stream.wait(ready)
    stream.copy(locked, slab)
    assert not ready.query()  # the host waited for neither
    stream.record().wait()
    assert torch.all(locked == 7)


def test_work_is_launched_and_recorded_on_the_current_stream(gpu: AcceleratorDevice) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu.launch(lambda: torch.cuda._sleep(LONG))
        there = gpu.record()
    here = gpu.record()
    here.wait()
    assert not there.query()
    there.wait()


def test_new_slab_is_free_of_work_queued_on_its_former_owner(gpu: AcceleratorDevice) -> None:
    former = torch.empty(32 * MIB, dtype=torch.uint8, device=on())
    torch.cuda._sleep(LONG)
    former.fill_(1)
    event = gpu.record()
    del former
    slab = gpu.allocate(32 * MIB)
    assert event.query()
    del slab


# --- page-locked memory


@pytest.mark.parametrize("nbytes", [4096, HUGE_PAGE + 4096])
def test_cpu_tier_is_page_locked_where_parameters_are_on_an_accelerator(nbytes: int) -> None:
    slab = host_for(on(), pin_memory=True).allocate(nbytes)
    assert slab.is_pinned() and slab[-4096:].is_pinned()
    assert not host_for(on(), pin_memory=False).allocate(nbytes).is_pinned()


def test_exactly_the_bytes_asked_for_are_registered() -> None:
    memory = map_host_memory(3 * 4096)
    undo = _register_with_cuda(on(), memory.data_ptr() + 4096, 4096)
    assert [memory[start : start + 4096].is_pinned() for start in (0, 4096, 8192)] == [False, True, False]
    undo()
    assert not memory[4096:8192].is_pinned()


def test_memory_is_registered_until_its_last_view_goes() -> None:
    slab = host_for(on(), pin_memory=True).allocate(HUGE_PAGE)
    view = slab[4096:8192]
    del slab
    gc.collect()
    assert view.is_pinned()


def test_failed_registration_leaves_no_error_for_the_next_kernel() -> None:
    memory = map_host_memory(2 * 4096)
    undo = _register_with_cuda(on(), memory.data_ptr(), 4096)
    with pytest.raises(CapacityError, match="cudaHostRegister"):
        _register_with_cuda(on(), memory.data_ptr(), 8192)
    assert torch.ones(3, device=on()).sum().item() == 3
    undo()


# --- what memory is used for


def test_unused_memory_goes_back_to_the_device_and_used_memory_stays(gpu: AcceleratorDevice) -> None:
    gpu.release_unused()
    slab, unused = gpu.allocate(64 * MIB), gpu.allocate(256 * MIB)
    before = gpu.memory_now()
    del unused
    cached = gpu.memory_now()
    assert cached.reserved_bytes == before.reserved_bytes
    assert cached.allocated_bytes == before.allocated_bytes - 256 * MIB
    gpu.release_unused()
    after = gpu.memory_now()
    assert after.reserved_bytes <= before.reserved_bytes - 256 * MIB
    assert after.allocated_bytes == cached.allocated_bytes >= len(slab)


def test_memory_that_the_user_returns_is_counted_and_what_is_released_is_not(gpu: AcceleratorDevice) -> None:
    gpu.release_unused()
    before = gpu.memory_now()
    unused = gpu.allocate(256 * MIB)
    del unused
    gpu.release_unused()
    assert gpu.memory_now().returned_bytes == before.returned_bytes
    unused = gpu.allocate(256 * MIB)
    del unused
    torch.cuda.empty_cache()
    assert gpu.memory_now().returned_bytes >= before.returned_bytes + 256 * MIB


def test_probe_sees_a_step_that_has_passed_and_chunks_that_have_left(gpu: AcceleratorDevice) -> None:
    """After a step its activations are gone, and so is the arena's slab after a spill; no peak is reset meanwhile."""

    def step() -> None:
        torch.empty(512 * MIB, dtype=torch.uint8, device=on())

    gpu.release_unused()
    probe = Probe(gpu=gpu, folders=())
    slab = gpu.allocate(256 * MIB)
    step()
    peak = torch.cuda.max_memory_allocated()
    full = probe.measure_now()["gpu"]
    assert full.used_bytes >= torch.cuda.memory_allocated() + 512 * MIB
    del slab
    gpu.release_unused()
    step()
    emptier = probe.measure_now()["gpu"]
    assert abs(full.used_bytes - emptier.used_bytes - 256 * MIB) < 32 * MIB
    assert torch.cuda.max_memory_allocated() == peak


# --- a store


@pytest.mark.parametrize("seed", range(6))
def test_store_computes_what_a_dict_computes_with_slow_kernels(tmp_path: Path, seed: int) -> None:
    trial = Trial(
        tmp_path, Parts(), seed, capacity=CAPACITY, compute="gpu", device=on(), delay=lambda: torch.cuda._sleep(SHORT)
    )
    host = trial.setup.tiers["cpu"]
    assert isinstance(host, MemoryTier) and all(slab.is_pinned() for slab in host._slabs)
    trial.run()


def test_store_computes_what_a_dict_computes_on_another_stream(tmp_path: Path) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        Trial(
            tmp_path, Parts(), 1, capacity=CAPACITY, compute="gpu", device=on(), delay=lambda: torch.cuda._sleep(SHORT)
        ).run()


def test_without_copies_waiting_for_updates_numbers_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_copy_waiting_for_the_update(monkeypatch)
    trial = Trial(
        tmp_path, Parts(), 0, capacity=CAPACITY, compute="gpu", device=on(), delay=lambda: torch.cuda._sleep(20 * SHORT)
    )
    with pytest.raises(WrongBytesError):
        trial.run()


def test_users_peak_statistics_are_not_reset(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    large = torch.empty(256 * MIB, dtype=torch.uint8, device=on())
    peak = torch.cuda.max_memory_allocated()
    del large
    Trial(tmp_path, Parts(), 2, capacity=CAPACITY, compute="gpu", device=on()).run()
    assert torch.cuda.max_memory_allocated() >= peak


def test_device_is_given_back_when_the_store_closes(tmp_path: Path) -> None:
    before = torch.cuda.memory_allocated()
    trial = Trial(tmp_path, Parts(), 3, capacity=CAPACITY, compute="gpu", device=on())
    trial.run()
    del trial
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("compute", ["device", "cpu"])
def test_optimizer_trains_on_an_accelerator_as_torchs_fused_adamw_does(tmp_path: Path, compute: str) -> None:
    """The kernels of one device and the other round differently: on the CPU the reference is the CPU's."""
    chunk = 64 << 10
    policy = {
        "chunk_size": chunk,
        "compute": compute,
        "tiers": {
            "gpu": {"capacity": 6 * chunk},
            "cpu": {"capacity": 8 * chunk},
            "nvme": {"capacity": 64 * chunk, "paths": [str(tmp_path)]},
        },
    }
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200)).to(on())
    theirs = nn.Sequential(nn.Linear(200, 300), nn.Linear(300, 200))
    theirs.load_state_dict(ours.state_dict())
    theirs.to(on() if compute == "device" else "cpu")
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with TieredAdamW(ours.parameters(), lr=1e-2, policy=policy) as optimizer:
        for step in range(4):
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).to(on())
                other.grad = parameter.grad.to(other.device)
            optimizer.step()
            reference.step()
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(parameter.to(other.device), other)


# --- opening


def test_accelerator_is_found_by_name_and_by_the_parameters() -> None:
    for wanted, parameters_on in (("auto", on()), ("cuda", None), ("cuda", on()), (str(on()), None)):
        opened = open_device(wanted, parameters_on)
        assert isinstance(opened, AcceleratorDevice) and opened.torch_device == on()
    assert open_device(f"cuda:{torch.cuda.device_count()}", None) is None
