"""Measures, between two steps, how full the memory is that each tier lies in: of a device, at the peak of a step.

It decides nothing and changes nothing, least of all the statistics of torch's allocator, which are the user's. A
measurement may cost a hundredth of the time at most: who asks sooner is told nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore.device import Device, DeviceMemory
from tierstore.pressure import DiskSpace, HostMemory, disk_space, host_memory, memory_stall_percent
from tierstore.stats import Pressure

PAUSE = 100
"""The next measurement is made after so many times as long as the last one took."""
WINDOW = 8
"""What a step takes in passing counts in so many measurements."""


class Probe:
    """Measures the pressure on a device, on the host, and on the filesystems of some folders."""

    def __init__(
        self,
        *,
        gpu: Device | None,
        folders: Sequence[Path],
        host: Callable[[], HostMemory] = host_memory,
        stall: Callable[[], float | None] = memory_stall_percent,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._gpu = gpu
        self._folders = tuple(folders)
        self._host = host
        self._stall = stall
        self._clock = clock
        self._not_before = -math.inf
        self._last = DeviceMemory(0, 0)
        self._passing: deque[int] = deque(maxlen=WINDOW - 1)

    def measure(self) -> dict[str, Pressure] | None:
        """Measure between two steps, by tier: `cpu` always, `gpu` and `nvme` where there are any.

        None so soon after the last time that it would cost time.
        """
        return self._measure(ends_step=True) if self._clock() >= self._not_before else None

    def measure_now(self) -> dict[str, Pressure]:
        """Measure at any time. What is known of the last steps stays as it is: none need have passed."""
        return self._measure(ends_step=False)

    def _measure(self, *, ends_step: bool) -> dict[str, Pressure]:
        begin = self._clock()
        found = {} if self._gpu is None else {"gpu": self._measure_device(self._gpu, ends_step=ends_step)}
        found["cpu"] = self._measure_host()
        spaces = self._disk_spaces()
        if spaces:
            found["nvme"] = _of_disks(spaces)
        end = self._clock()
        self._not_before = end + PAUSE * (end - begin)
        return found

    def _measure_device(self, device: Device, *, ends_step: bool) -> Pressure:
        """What is used at the peak of the last steps: by others, by our tensors now, and by those of a step in passing.

        Between two steps the activations are gone, and the allocator's cache is what is left of them: the next step
        needs it again, and only what is cached beyond the peak is spare. The peak that torch counts is of all time
        until the user resets it, which is not for us to do. So what a step takes in passing is what tensors took at
        most since the measurement before, above what they take now, and the most of that in the last measurements.
        It says nothing of chunks, which are there between the steps too: once some have left, less is used.
        """
        now = device.memory_now()
        passing = max(0, _most_allocated(now, self._last) - now.allocated_bytes)
        at_peak = now.allocated_bytes + max((passing, *self._passing))
        if ends_step:
            self._passing.append(passing)
            self._last = now
        used = min(now.total_bytes, now.total_bytes - now.free_bytes - now.reserved_bytes + at_peak)
        source = f"{device.name}: {_mib(now.free_bytes)} of {_mib(now.total_bytes)} free"
        if now.reserved_bytes:
            source += (
                f"; torch has reserved {_mib(now.reserved_bytes)}, {_mib(now.allocated_bytes)} of them for tensors, "
                f"{_mib(at_peak)} at the peak of the last steps"
            )
        return Pressure(used, now.total_bytes, source)

    def _measure_host(self) -> Pressure:
        memory = self._host()
        source = f"{memory.source}: {_mib(memory.available_bytes)} of {_mib(memory.bound_bytes)} available"
        return Pressure(memory.bound_bytes - memory.available_bytes, memory.bound_bytes, source, self._stall())

    def _disk_spaces(self) -> list[DiskSpace]:
        """The space of each filesystem once. A folder that fails is left out: its reads and writes tell of it."""
        found = {}
        for folder in self._folders:
            try:
                found[os.stat(folder).st_dev] = disk_space(folder)
            except OSError:
                continue
        return list(found.values())


def _most_allocated(now: DeviceMemory, before: DeviceMemory) -> int:
    """At most so much tensors have taken since the measurement before.

    Not more than the peak of all time, nor than the allocator has reserved now and returned since; the peak says
    nothing when it has fallen, as the user has reset it then.
    """
    reserved = now.reserved_bytes + max(0, now.returned_bytes - before.returned_bytes)
    return reserved if now.peak_bytes < before.peak_bytes else min(now.peak_bytes, reserved)


def _of_disks(spaces: Sequence[DiskSpace]) -> Pressure:
    free, total = sum(space.free_bytes for space in spaces), sum(space.total_bytes for space in spaces)
    where = "1 filesystem" if len(spaces) == 1 else f"{len(spaces)} filesystems"
    return Pressure(total - free, total, f"{_mib(free)} of {_mib(total)} free on {where}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
