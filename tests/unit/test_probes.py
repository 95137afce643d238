"""What the probes make of numbers that devices, kernels and disks tell, and how seldom they ask."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import CurveDevice
from tierstore.device import DeviceMemory, HostDevice
from tierstore.pressure import HostMemory, disk_space, host_memory
from tierstore.probes import WINDOW, Probe

GIB = 1 << 30
TOTAL = 80 * GIB
FEW = HostMemory(64 * GIB, 3 * GIB, 16 * GIB, "cgroup v2 /a/memory.max", bound_bytes=16 * GIB)


def at(*, tensors: int, cached: int, peak: int, others: int = 10, returned: int = 0) -> DeviceMemory:
    """A device of 80 GiB as it is between two steps, in GiB; `cached`: reserved, and in no tensor."""
    free = 80 - others - tensors - cached
    return DeviceMemory(*(each * GIB for each in (free, 80, tensors + cached, tensors, peak, returned)))


def used(*curve: DeviceMemory) -> list[float]:
    """What a probe says of each point is used, in GiB, a step before each."""
    probe = Probe(gpu=CurveDevice(curve), folders=(), host=lambda: FEW, clock=lambda: 0.0)
    found = [probe.measure() for _ in curve]
    return [each["gpu"].used_bytes / GIB for each in found if each is not None]


# --- a device


def test_device_without_an_allocators_counts_is_as_full_as_its_driver_says() -> None:
    assert used(DeviceMemory(30 * GIB, TOTAL)) == [50]


def test_step_in_passing_counts_between_steps_and_the_cache_beyond_its_peak_does_not() -> None:
    """Between steps the activations are gone: by what is allocated then, the device would look empty."""
    assert used(at(tensors=20, cached=30, peak=45)) == [10 + 45]


def test_peak_of_longer_sequences_is_heard_of_at_once() -> None:
    assert used(at(tensors=20, cached=20, peak=40), at(tensors=20, cached=35, peak=55)) == [50, 65]


def test_less_is_used_as_soon_as_chunks_have_left_the_device() -> None:
    """The peak that torch counts never falls: by that alone a device would stay full, however much had left it."""
    before, after = at(tensors=30, cached=20, peak=50), at(tensors=18, cached=0, peak=50)
    a_step_later = at(tensors=18, cached=20, peak=50)
    assert used(before, after, a_step_later) == [60, 48, 48]


def test_more_is_used_as_soon_as_chunks_have_come() -> None:
    assert used(at(tensors=0, cached=20, peak=20), at(tensors=12, cached=20, peak=20)) == [30, 42]


def test_peak_is_forgotten_when_the_steps_of_the_window_had_a_lower_one() -> None:
    """A long sequence, or the loading of a model: all of it was returned to the device before the steps after it."""
    once = at(tensors=10, cached=40, peak=50)
    small = at(tensors=10, cached=5, peak=50)
    assert used(once, *[small] * WINDOW) == [60] * WINDOW + [25]


def test_cache_that_the_user_empties_after_each_step_was_needed_in_it() -> None:
    curve = [at(tensors=10, cached=0, peak=50, returned=40 * step) for step in range(3 * WINDOW)]
    assert used(*curve[1:]) == [60] * (3 * WINDOW - 1)


def test_peak_that_the_user_reset_says_nothing_and_the_cache_stands_for_it() -> None:
    usual = at(tensors=10, cached=30, peak=35)
    reset = replace(usual, peak_bytes=10 * GIB)
    assert used(reset, replace(reset, peak_bytes=9 * GIB)) == [20, 50]
    assert used(usual, *[reset] * (WINDOW + 1))[-2:] == [50, 20]


def test_steps_are_not_forgotten_by_measuring_while_none_passes() -> None:
    """All was released for something else, which asked again and again what is free: then chunks took the room."""
    a_step = at(tensors=30, cached=20, peak=50)
    released = at(tensors=5, cached=0, peak=50)
    probe = Probe(gpu=CurveDevice([a_step, *[released] * (2 * WINDOW + 1)]), folders=(), clock=lambda: 0.0)
    assert probe.measure()
    for _ in range(2 * WINDOW):
        assert probe.measure_now()["gpu"].used_bytes == 35 * GIB
    found = probe.measure()
    assert found is not None and found["gpu"].used_bytes == 35 * GIB


class Allocator:
    """Keeps what tensors leave, as torch's does, and the statistics that torch keeps."""

    def __init__(self) -> None:
        self.tensors = self.reserved = self.peak = self.returned = 0
        self.peak_since = 0

    def take(self, nbytes: int) -> None:
        self.tensors += nbytes
        self.reserved = max(self.reserved, self.tensors)
        self.peak, self.peak_since = max(self.peak, self.tensors), max(self.peak_since, self.tensors)

    def leave(self, nbytes: int) -> None:
        self.tensors -= min(nbytes, self.tensors)

    def empty(self, _: int) -> None:
        self.returned += self.reserved - self.tensors
        self.reserved = self.tensors

    def now(self) -> DeviceMemory:
        self.peak_since = self.tensors
        return DeviceMemory(TOTAL - self.reserved, TOTAL, self.reserved, self.tensors, self.peak, self.returned)


STEP = st.lists(st.tuples(st.sampled_from(["take", "leave", "empty"]), st.integers(0, 30)))


@given(st.lists(STEP, min_size=1, max_size=3 * WINDOW))
def test_what_a_step_took_is_never_taken_to_be_free(steps: list[list[tuple[str, int]]]) -> None:
    allocator = Allocator()
    curve, took = [], []
    for step in steps:
        for action, nbytes in step:
            getattr(allocator, action)(nbytes)
        took.append(allocator.peak_since - allocator.tensors)
        curve.append(allocator.now())
    for number, found in enumerate(used(*curve)):
        least = curve[number].allocated_bytes + max(took[max(0, number - WINDOW + 1) : number + 1])
        assert round(found * GIB) >= least


def test_no_more_is_used_than_there_is() -> None:
    """Others came, and took the memory that a step needs."""
    assert used(at(tensors=10, cached=50, peak=60), at(tensors=10, cached=0, peak=60, others=60)) == [70, 80]


def test_what_is_told_of_a_device_has_its_numbers() -> None:
    probe = Probe(gpu=CurveDevice([at(tensors=20, cached=30, peak=45)], name="xpu:1"), folders=())
    found = probe.measure_now()["gpu"]
    assert found.total_bytes == TOTAL and found.stall_percent is None
    for words in ("xpu:1", "20,480 MiB of 81,920 MiB free", "reserved 51,200 MiB", "46,080 MiB at the peak"):
        assert words in found.source


def test_host_memory_can_stand_in_for_a_device() -> None:
    found = Probe(gpu=HostDevice("stand-in"), folders=()).measure_now()["gpu"]
    assert 0 < found.used_bytes < found.total_bytes
    assert found.source.startswith("stand-in: ") and "torch" not in found.source


# --- the host


def test_host_is_as_full_as_what_bounds_it() -> None:
    found = Probe(gpu=None, folders=(), host=lambda: FEW, stall=lambda: 12.5).measure_now()
    assert found.keys() == {"cpu"}
    cpu = found["cpu"]
    assert (cpu.used_bytes, cpu.total_bytes, cpu.stall_percent) == (13 * GIB, 16 * GIB, 12.5)
    assert "cgroup v2 /a/memory.max" in cpu.source and "3,072 MiB of 16,384 MiB" in cpu.source


def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    found = Probe(gpu=None, folders=[tmp_path]).measure_now()
    assert found["cpu"].total_bytes == host_memory().bound_bytes
    assert all(0 < each.share < 1 for each in found.values())


# --- disks


def disk_bytes(*folders: Path) -> int:
    """What a probe says there is in all."""
    return Probe(gpu=None, folders=folders).measure_now()["nvme"].total_bytes


def test_folders_on_one_filesystem_count_once(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert disk_bytes(tmp_path, tmp_path / "other") == disk_space(tmp_path).total_bytes


def test_filesystems_count_together(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or os.stat(memory).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second filesystem here")
    assert disk_bytes(tmp_path, memory) == disk_space(tmp_path).total_bytes + disk_space(memory).total_bytes


def test_folder_that_fails_is_left_out(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert disk_bytes(gone, tmp_path) == disk_space(tmp_path).total_bytes
    assert "nvme" not in Probe(gpu=None, folders=[gone]).measure_now()


# --- how often


class Times:
    """A clock that goes on by a second whenever it is read within a measurement."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def measured(self) -> HostMemory:
        self.now += 1.0
        return FEW


def test_measurements_take_a_hundredth_of_the_time() -> None:
    times = Times()
    probe = Probe(gpu=None, folders=(), host=times.measured, clock=times)
    assert probe.measure() is not None and times.now == 1.0
    for times.now in (1.0, 50.0, 100.9):
        assert probe.measure() is None
    times.now = 101.0
    assert probe.measure() is not None and times.now == 102.0
    assert probe.measure() is None


def test_measurement_now_is_made_whenever_and_the_next_one_waits_for_it() -> None:
    times = Times()
    probe = Probe(gpu=None, folders=(), host=times.measured, clock=times)
    for _ in range(3):
        assert probe.measure_now()
    times.now = 102.9
    assert probe.measure() is None
    times.now = 103.0
    assert probe.measure() is not None


def test_nothing_is_read_when_nothing_is_told() -> None:
    reads = count()
    times = Times()
    curve = CurveDevice([at(tensors=1, cached=0, peak=1), at(tensors=2, cached=0, peak=2)])

    def host() -> HostMemory:
        next(reads)
        return times.measured()

    probe = Probe(gpu=curve, folders=(), host=host, clock=times)
    for _ in range(5):
        probe.measure()
    assert next(reads) == 1 and curve.memory_now().allocated_bytes == 2 * GIB
