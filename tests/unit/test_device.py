"""Devices: one contract for host memory and its honest stand-in; mapping and page-locking; how a device is opened."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contracts import DeviceContract
from tests.fakes import POISON, HonestDevice, Schedule, honest_parts
from tests.trial import Trial
from tierstore import TieredAdamW, mapping
from tierstore.build import Parts
from tierstore.device import AcceleratorDevice, Device, DeviceMemory, HostDevice, accelerator, host_for, open_device
from tierstore.errors import CapacityError, PolicyError
from tierstore.layout import HUGE_PAGE
from tierstore.mapping import map_host_memory

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

KIB = 1 << 10
SEEDS = range(8)


class TestHostDevice(DeviceContract):
    @pytest.fixture
    def device(self) -> Device:
        return HostDevice()


class TestHonestDevice(DeviceContract):
    @pytest.fixture(params=SEEDS)
    def device(self, request: pytest.FixtureRequest) -> Iterator[Device]:
        device = HonestDevice(request.param)
        yield device
        device.close()


# --- the stand-in is honest


@pytest.fixture
def lazy() -> Iterator[HonestDevice]:
    """An honest device that runs nothing of its own accord."""
    schedule = Schedule(0)
    schedule.eagerness = 0.0
    device = HonestDevice(schedule=schedule)
    yield device
    device.close()


def test_nothing_runs_before_somebody_waits(lazy: HonestDevice) -> None:
    slab, ran = lazy.allocate(4096).fill_(0), []
    stream = lazy.copy_stream("host-device")
    lazy.launch(lambda: ran.append("launched"))
    stream.copy(slab, torch.ones_like(slab))
    event, copied = lazy.record(), stream.record()
    assert not ran and not event.query() and not copied.query()
    lazy.finish()
    assert ran == ["launched"] and event.query()


def test_destination_is_poison_until_the_copy_runs(lazy: HonestDevice) -> None:
    slab = lazy.allocate(4096).fill_(0)
    stream = lazy.copy_stream("host-device")
    stream.copy(slab, torch.ones_like(slab))
    assert torch.all(slab == POISON)
    assert torch.all(slab.view(torch.float32).isnan())
    stream.record().wait()
    assert torch.all(slab == 1)


def test_discarded_bytes_are_poison_at_once(lazy: HonestDevice) -> None:
    slab = lazy.allocate(4096).fill_(0)
    lazy.launch(lambda: slab.add_(1) and None)
    lazy.discard(slab)
    assert torch.all(slab == POISON)


def test_new_memory_is_poison(lazy: HonestDevice) -> None:
    assert torch.all(lazy.allocate(4096) == POISON)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_keeps_its_order(seed: int) -> None:
    device, ran = HonestDevice(seed), []
    for number in range(20):
        device.launch(lambda number=number: ran.append(number))
    device.finish()
    assert ran == list(range(20))
    device.close()


def test_streams_are_reordered_among_each_other() -> None:
    orders = set()
    for seed in range(40):
        schedule = Schedule(seed)
        device = HonestDevice(schedule=schedule)
        streams = [device.copy_stream(name) for name in "abc"]
        slab = device.allocate(4096)
        for stream in streams:
            stream.copy(slab[:1024], slab[1024:2048])
            stream.copy(slab[:1024], slab[1024:2048])
        device.close()
        orders.add("".join(schedule.history))
    assert len(orders) >= 5
    assert any(order[0] != order[1] for order in orders)  # not only one stream after the other


def test_error_of_launched_work_is_raised_when_the_step_is_finished(lazy: HonestDevice) -> None:
    ran = []
    lazy.launch(lambda: 1 // 0)
    lazy.launch(lambda: ran.append("after the error"))
    with pytest.raises(ZeroDivisionError):
        lazy.finish()
    assert not ran
    lazy.launch(lambda: ran.append("next step"))
    lazy.finish()
    assert ran == ["next step"]


def test_error_of_a_copy_is_raised_where_its_event_is_waited_for(lazy: HonestDevice) -> None:
    stream = lazy.copy_stream("host-device")
    stream.add(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        stream.record().wait()


def test_waiting_for_what_nobody_will_do_fails_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.PATIENCE_SECONDS", 0.01)
    with pytest.raises(AssertionError, match="nobody will do"):
        Schedule(0).wait_for(lambda: False)


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    histories = []
    for _ in range(2):
        parts = honest_parts(5)
        trial = Trial(tmp_path, parts, 5, capacity={"gpu": 5, "cpu": 5, "nvme": 8}, compute="gpu")
        trial.run()
        assert isinstance(trial.device, HonestDevice)
        histories.append(trial.device.schedule.history)
    assert len(histories[0]) > 100
    assert histories[0] == histories[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("alone", [True, False], ids=["device alone", "all parts"])
def test_optimizer_has_the_bits_of_fused_adamw_on_an_honest_device(
    tmp_path: Path, seed: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(open_device=lambda wanted, on: HonestDevice(seed)) if alone else honest_parts(seed)
    monkeypatch.setattr(TieredAdamW, "parts", parts)
    tiers = {
        "gpu": {"device": "cpu", "capacity": 6 * 16 * KIB},
        "cpu": {"capacity": 6 * 16 * KIB},
        "nvme": {"capacity": 40 * 16 * KIB, "paths": [str(tmp_path)]},
    }
    torch.manual_seed(seed)
    ours = nn.Sequential(nn.Linear(100, 120), nn.Linear(120, 70))
    theirs = nn.Sequential(nn.Linear(100, 120), nn.Linear(120, 70))
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    with TieredAdamW(ours.parameters(), lr=1e-2, policy={"chunk_size": 16 * KIB, "tiers": tiers}) as optimizer:
        for step in range(3):
            inputs = torch.randn(8, 100, generator=torch.Generator().manual_seed(step))
            for model, one in ((ours, optimizer), (theirs, reference)):
                one.zero_grad()
                model(inputs).square().mean().backward()
                one.step()
            for mine, yours in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(mine, yours)
        for mine, yours in zip(
            optimizer.state_dict()["state"].values(), reference.state_dict()["state"].values(), strict=True
        ):
            assert torch.equal(mine["exp_avg"], yours["exp_avg"])
            assert torch.equal(mine["exp_avg_sq"], yours["exp_avg_sq"])


# --- mapping


def test_no_bytes_need_no_mapping() -> None:
    assert map_host_memory(0).shape == (0,)


def test_new_host_memory_is_zero() -> None:
    assert not map_host_memory(HUGE_PAGE + 4096).any()


def test_mapping_cannot_be_closed_under_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a mapping whose memory a tensor uses is a segmentation fault at the tensor's next use."""
    areas: list[mmap.mmap] = []
    real = mmap.mmap

    def remember(*arguments: Any, **options: Any) -> mmap.mmap:
        areas.append(real(*arguments, **options))
        return areas[-1]

    monkeypatch.setattr(mmap, "mmap", remember)
    slab = map_host_memory(HUGE_PAGE)
    part = slab[4096:8192]
    del slab
    with pytest.raises(BufferError):
        areas[0].close()
    assert not part.any()
    del part
    areas[0].close()


def test_child_never_unmaps_what_took_the_place_of_an_arena() -> None:
    """The arena is not in the child, its addresses are free there; dropping the tensor unmapped whatever was there."""
    slab = map_host_memory(HUGE_PAGE)
    address = slab.data_ptr()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fixed_noreplace = 0x100000
    child = os.fork()
    if not child:
        taken = libc.mmap(address, 4096, protection, flags | fixed_noreplace, -1, 0)
        if taken != address:
            os._exit(3)
        ctypes.memset(address, 7, 4096)
        del slab
        gc.collect()
        still_there = f"{address:x}-" in Path("/proc/self/maps").read_text()
        os._exit(0 if still_there else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not slab.any()


# --- page-locking


class Locks:
    """A page lock that remembers, and looks whether the memory is still there when it is undone."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.undone = 0

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        self.held[address] = nbytes

        def undo() -> None:
            ctypes.string_at(address, nbytes)  # a segmentation fault if it has been unmapped
            del self.held[address]
            self.undone += 1

        return undo


@pytest.mark.parametrize("nbytes", [4096, HUGE_PAGE, HUGE_PAGE + 4096])
def test_exactly_the_bytes_asked_for_are_locked(nbytes: int) -> None:
    locks = Locks()
    slab = HostDevice(page_lock=locks).allocate(nbytes)
    assert locks.held == {slab.data_ptr(): nbytes}


def test_lock_is_undone_with_the_last_view_and_before_unmapping() -> None:
    """It was undone with the slab's own object, while views of it were still being copied from."""
    locks = Locks()
    slab = HostDevice(page_lock=locks).allocate(HUGE_PAGE)
    with torch.inference_mode():  # where a view does not keep the tensor it is a view of
        view = slab[:4096]
    del slab
    gc.collect()
    assert locks.held
    del view
    assert not locks.held and locks.undone == 1


def test_lock_is_not_undone_in_a_child() -> None:
    locks = Locks()
    slab = HostDevice(page_lock=locks).allocate(HUGE_PAGE)
    child = os.fork()
    if not child:
        del slab
        os._exit(locks.undone)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.held


def test_memory_that_cannot_be_locked_is_given_back() -> None:
    def refuse(address: int, nbytes: int) -> Callable[[], None]:
        raise CapacityError("injected")

    before = len(mapping._areas)
    with pytest.raises(CapacityError):
        HostDevice(page_lock=refuse).allocate(HUGE_PAGE)
    gc.collect()
    assert len(mapping._areas) == before


class Runtime:
    """CUDA's runtime, as far as page-locking needs it; the `fails_at`th call fails."""

    def __init__(self, fails_at: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._calls = 0
        self._fails_at = fails_at

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self._calls += 1
        if self._calls == self._fails_at:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices whose last error was taken away."""
    devices: list[torch.device] = []
    monkeypatch.setattr(accelerator, "_forget_cuda_error", devices.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # any context manager
    monkeypatch.setattr(accelerator, "REGISTER_PIECE", 8192)
    return devices


def test_memory_is_registered_with_cuda_in_pieces(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[torch.device]
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = host_for(torch.device("cuda:0"), pin_memory=True).allocate(20480)
    start = slab.data_ptr()
    assert runtime.registered == {start: 8192, start + 8192: 8192, start + 16384: 4096}
    del slab
    assert not runtime.registered and not forgotten


def test_registering_is_all_or_nothing_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[torch.device]
) -> None:
    """Pieces before the one that failed stayed registered, and torch blamed the failure on the user's next kernel."""
    runtime = Runtime(fails_at=3)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with pytest.raises(CapacityError, match=r"page-locked \(cudaHostRegister: error 2\).*pin_memory: false"):
        host_for(torch.device("cuda:0"), pin_memory=True).allocate(20480)
    assert not runtime.registered
    assert forgotten == [torch.device("cuda:0")]


@pytest.mark.parametrize(
    ("on", "pin_memory"), [(None, True), (torch.device("cpu"), True), (torch.device("cuda:0"), False)]
)
def test_memory_is_locked_only_for_parameters_on_an_accelerator(on: torch.device | None, pin_memory: bool) -> None:
    assert host_for(on, pin_memory=pin_memory)._page_lock is None


# --- opening


def test_host_memory_stands_in_for_an_accelerator_when_asked() -> None:
    opened = open_device("cpu", None)
    assert isinstance(opened, HostDevice) and opened.name == "stand-in"


@pytest.mark.parametrize("on", [None, torch.device("cpu"), torch.device("meta")])
def test_auto_finds_no_device_for_parameters_on_none(on: torch.device | None) -> None:
    assert open_device("auto", on) is None


def test_unknown_device_is_named() -> None:
    with pytest.raises(PolicyError, match=r"tiers\.gpu\.device: 'gpuu' is no device torch knows"):
        open_device("gpuu", None)


def test_absent_accelerator_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert open_device("cuda", None) is None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert open_device("cuda:2", None) is None


# --- an accelerator's calls, without one


class Recorder:
    """Stands in for torch's module of a device; writes down what is asked of streams and events, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = FakeStream(self, "current")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, f"stream on {device}")

    def Event(self, *, blocking: bool = False) -> FakeEvent:  # noqa: N802
        return FakeEvent(self, "blocking event" if blocking else "event")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream


class FakeStream:
    def __init__(self, module: Recorder, name: str) -> None:
        self._module, self.name = module, name

    def synchronize(self) -> None:
        self._module.calls.append(f"synchronize {self.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._module.calls.append(f"{self.name} waits for {event.name}")

    def __enter__(self) -> None:
        self._module.calls.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self._module.calls.append(f"leave {self.name}")


class FakeEvent:
    def __init__(self, module: Recorder, name: str) -> None:
        self._module, self.name = module, name

    def record(self, stream: FakeStream) -> None:
        self._module.calls.append(f"record {self.name} on {stream.name}")

    def synchronize(self) -> None:
        self._module.calls.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return False


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    module = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_new_slab_waits_for_the_stream_it_was_allocated_on(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out memory that kernels on the allocating stream may still use; copy streams do not wait for them."""
    empty = torch.empty

    def allocate(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        module.calls.append(f"allocate {shape} on {device}")
        return empty(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    AcceleratorDevice(torch.device("cuda:1")).allocate(4096)
    assert module.calls == ["allocate (4096,) on cuda:1", "synchronize current"]


class Allocator(Recorder):
    """A module with an allocator, of which `counts` is what it says; emptying its cache gives back 5 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {f"allocated_bytes.all.{name}": count for name, count in (("current", 20), ("peak", 30))}
        self.counts |= {f"reserved_bytes.all.{name}": count for name, count in (("current", 40), ("freed", 100))}

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 50, 100

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == torch.device("cuda:1")
        return self.counts

    def device(self, device: torch.device) -> FakeStream:
        return FakeStream(self, str(device))

    def empty_cache(self) -> None:
        self.calls.append("empty the cache")
        self.counts = {**self.counts, "reserved_bytes.all.freed": self.counts["reserved_bytes.all.freed"] + 5}


def accelerator_with(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> AcceleratorDevice:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return AcceleratorDevice(torch.device("cuda:1"))


def test_what_the_allocator_returns_is_told_apart_from_what_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Allocator()
    accelerator = accelerator_with(module, monkeypatch)
    assert accelerator.memory_now() == DeviceMemory(50, 100, 40, 20, 30, 100)
    for _ in range(2):
        accelerator.release_unused()
    assert accelerator.memory_now() == DeviceMemory(50, 100, 40, 20, 30, 100)
    module.empty_cache()
    assert accelerator.memory_now().returned_bytes == 105


def test_cache_is_emptied_with_its_device_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another one current, torch makes a context of it first, which takes hundreds of MiB there."""
    module = Allocator()
    accelerator_with(module, monkeypatch).release_unused()
    assert module.calls == ["enter cuda:1", "empty the cache", "leave cuda:1"]


def test_allocator_that_counts_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that the user has plugged in (RMM): it raises when it is asked for statistics."""

    class PluggedIn(Allocator):
        def memory_stats(self, device: torch.device) -> dict[str, int]:
            raise RuntimeError("does not support getDeviceStats")

    accelerator = accelerator_with(PluggedIn(), monkeypatch)
    assert accelerator.memory_now() == DeviceMemory(50, 100)
    accelerator.release_unused()


def test_module_without_statistics_or_a_cache_is_no_error(module: Recorder) -> None:
    module.mem_get_info = lambda device: (50, 100)  # type: ignore[attr-defined]
    accelerator = AcceleratorDevice(torch.device("xpu:1"))
    assert accelerator.memory_now() == DeviceMemory(50, 100)
    accelerator.release_unused()
    assert not module.calls


def test_copy_is_queued_on_its_stream_between_event_and_event(module: Recorder) -> None:
    accelerator = AcceleratorDevice(torch.device("cuda:1"))
    stream = accelerator.copy_stream("gpu-cpu")
    stream.wait(accelerator.record())
    stream.copy(torch.empty(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8))
    event = stream.record()
    event.wait()
    assert not event.query()
    name = "stream on cuda:1"
    assert module.calls == [
        "record blocking event on current",
        f"{name} waits for blocking event",
        f"enter {name}",
        f"leave {name}",
        f"record blocking event on {name}",
        "host waits for blocking event",
    ]


def test_stream_waits_on_the_host_for_an_event_of_another_device(module: Recorder) -> None:
    waited: list[str] = []

    class Foreign:
        def wait(self) -> None:
            waited.append("waited")

        def query(self) -> bool:
            return True

    AcceleratorDevice(torch.device("cuda:0")).copy_stream("cpu-gpu").wait(Foreign())
    assert waited and not module.calls
