"""How fast disks, links and updates are: given, measured here before, or assumed; each speed says which.

Updates are measured by making some, of parameters and state of the kind asked about, in memory; what was measured is
kept beside the rates of disks (`ratecache`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any, Self

import torch
from torch import nn

from tierstore.build import Plant
from tierstore.cores import available, leaving_one_free
from tierstore.folders import swap_folders
from tierstore.forecast.parameters import ForecastError
from tierstore.layout import ChunkClass
from tierstore.masters import REMAINDER
from tierstore.policy import NvmeTier
from tierstore.ratecache import Key, RateCache, cache_folder, machine_key
from tierstore.rates import Amount, Rates
from tierstore.records import MASTER
from tierstore.tiered import TieredOptimizer
from tierstore.units import shown

ASSUMED_NVME = 3e9
"""Bytes per second, read and written at once, of each path that nobody measured: a drive of the middle."""
ASSUMED_LINK = 12e9
"""Bytes per second each way between an accelerator and pinned host memory: half of what PCIe 4.0 x16 carries."""
ASSUMED_GPU_ELEMENTS = 2e10
"""Float32 elements that an accelerator updates in a second, at 28 bytes each: less than 0.6 TB/s of its memory."""
ASSUMED_CPU_ELEMENTS = 5e8
SHARES = {"split": 0.5, "master": 0.65, "cast": 0.5, "float64": 0.5, "plain": 1.0}
"""Of the rate of float32 parameters, what others were measured to reach where nothing is known of the machine."""

_MEASURED_ELEMENTS = 1 << 23
_MEASURED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes or elements per second, and where the number is from: `given`, `measured` with the day, or `assumed`."""

    per_second: float
    source: str


@dataclass(frozen=True, slots=True)
class Given:
    """Speeds that the caller knows better; None: as found. Bytes per second, or elements of float32 parameters.

    `nvme` is of all swap paths together, read and written at once; `link` each way between accelerator and host.
    """

    nvme: float | None = None
    link: float | None = None
    update: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("nvme", self.nvme), ("link", self.link), ("update", self.update)):
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ForecastError(f"{name} speed: found {shown(value)}; allowed: a rate above 0, as 3.5GB")


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Of all paths together, for this process alone. `mixed` counts both directions."""

    read: float
    write: float
    mixed: float
    source: str

    @classmethod
    def of(cls, rate: float, source: str) -> Self:
        """One rate for everything."""
        return cls(rate, rate, rate, source)

    def seconds(self, nbytes_read: int, nbytes_written: int) -> float:
        """What moving takes: neither direction is faster than alone, nor both than both at once."""
        both = (nbytes_read + nbytes_written) / self.mixed
        return max(both, nbytes_read / self.read, nbytes_written / self.write)


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """Elements of one kind of parameter that are updated in a second, with every core and with one left free."""

    elements_per_second: Amount
    elements_per_second_sparing_a_core: Amount | None


def disk_speed(given: Given, plant: Plant, rates: Rates) -> DiskSpeed | None:
    """The swap paths of a plant; None without an nvme tier."""
    nvme, ranks = plant.policy.tiers.nvme, plant.parts.ranks()
    if nvme is None:
        return None
    if given.nvme is not None:
        return DiskSpeed.of(given.nvme / ranks, "given")
    paths = len(swap_folders(nvme.paths))
    if not rates.paths:
        return DiskSpeed.of(paths * ASSUMED_NVME / ranks, "assumed")
    found = rates.paths.values()
    reads, writes, mixed = (
        sum(path.read_bytes_per_second for path in found),
        sum(path.write_bytes_per_second for path in found),
        sum(path.mixed_bytes_per_second for path in found),
    )
    return DiskSpeed(reads / ranks, writes / ranks, mixed / ranks, _measured(rates.measured_at))


def link_speed(given: Given, plant: Plant, rates: Rates) -> Speed | None:
    """Each way between the gpu tier's device and the host; None without such a tier."""
    if plant.gpu is None:
        return None
    if given.link is not None:
        return Speed(given.link, "given")
    is_stand_in = plant.policy.tiers.gpu is not None and plant.policy.tiers.gpu.device == "cpu"
    if is_stand_in and rates.machine is not None:  # a copy within memory, that is read and written
        return Speed(rates.machine.copied_bytes_per_second / 2, _measured(rates.measured_at))
    return Speed(ASSUMED_LINK, "assumed")


def rates_of(plant: Plant) -> Rates:
    """What is known of the plant's disks and of this machine, or is measured where the plant may."""
    nvme = plant.policy.tiers.nvme or NvmeTier()
    folders = swap_folders(nvme.paths) if plant.policy.tiers.nvme is not None else []
    direct = None if nvme.io.direct == "auto" else nvme.io.direct
    found = plant.parts.find_rates(folders, engine=nvme.io.engine, direct=direct)
    if found.machine is None and folders:  # folders that are not here keep nobody from looking at the machine
        machine = plant.parts.find_rates([], engine=nvme.io.engine)
        day = min(filter(None, (found.measured_at, machine.measured_at)), default=None)
        return replace(found, machine=machine.machine, measured_at=day)
    return found


class UpdateSpeeds:
    """How fast kinds of parameters are updated by an optimizer of `kind`."""

    def __init__(
        self,
        kind: Callable[..., TieredOptimizer],
        plant: Plant,
        given: Given,
        rates: Rates,
        *,
        measure: bool,
        cache: RateCache | None = None,
    ) -> None:
        self._kind, self._plant, self._given, self._rates, self._measure = kind, plant, given, rates, measure
        self._cache = RateCache(cache_folder()) if cache is None else cache

    def of(self, cls: ChunkClass) -> tuple[Speed, Speed]:
        """Elements of a class in a second: with every core, and with one left free for reading and writing."""
        ranks = self._plant.parts.ranks()
        if self._given.update is not None:
            speed = Speed(self._given.update * _share_of(cls), "given")
            return speed, speed
        if cls.compute == "gpu" and not self._is_stand_in():
            speed = Speed(ASSUMED_GPU_ELEMENTS * _share_of(cls), "assumed")
            return speed, speed
        found = self._measured(cls)
        if found is not None:
            rates, source = found
        elif self._rates.machine is not None:
            machine = self._rates.machine
            spared, share = machine.elements_per_second_sparing_a_core, _share_of(cls)
            rates = UpdateRates(share * machine.elements_per_second, None if spared is None else share * spared)
            source = f"{_measured(self._rates.measured_at)} for float32 in caches, {share:g} of it assumed"
        else:
            rates, source = UpdateRates(ASSUMED_CPU_ELEMENTS * _share_of(cls), None), "assumed"
        every, spared = rates.elements_per_second, rates.elements_per_second_sparing_a_core
        return Speed(every / ranks, source), Speed((spared or every) / ranks, source)

    def _is_stand_in(self) -> bool:
        gpu = self._plant.policy.tiers.gpu
        return gpu is not None and gpu.device == "cpu"

    def _measured(self, cls: ChunkClass) -> tuple[UpdateRates, str] | None:
        """What was measured for a class, now if it may be."""
        policy = self._plant.policy
        master = "split" if REMAINDER in cls.fields else "float32"
        if MASTER not in (field.name for field in cls.fields) and master != "split":
            master = "none"
        moments = [field.dtype for field in cls.fields if field.name != MASTER and field != REMAINDER]
        is_own = cls.dtype in (torch.bfloat16, torch.float16) and cls.dtype in moments
        state = {"master": master, "moments": "parameter" if is_own else "float32"}
        key: Key = {
            **machine_key(torch.get_num_threads()),
            **{"optimizer": getattr(self._kind, "__name__", "optimizer"), "dtype": str(cls.dtype), **state},
            **{"check": policy.check_parameters, "fields": ",".join(field.name for field in cls.fields)},
            "numba": find_spec("numba") is not None,
        }
        entry = None if self._measure else self._cache.load(UpdateRates, key)
        if entry is None and self._measure:
            settings = {"state": state, "check_parameters": policy.check_parameters, "tiers": {"cpu": {}}}
            entry = self._cache.save(measure_updates(self._kind, cls.dtype, settings), key)
        return None if entry is None else (entry.rates, _measured(entry.measured_at))


def measure_updates(kind: Callable[..., TieredOptimizer], dtype: torch.dtype, policy: Mapping[str, Any]) -> UpdateRates:
    """Update parameters of a dtype in memory, under a policy without files; takes about a second and 200 MB."""
    generator = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        shape = (_MEASURED_ELEMENTS // 4,)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    parameters = [nn.Parameter(values()) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = values()
    elements = sum(parameter.numel() for parameter in parameters)
    optimizer = kind(parameters, policy={**policy, "chunk_size": 16 << 20})
    try:
        optimizer.step()

        def rate(cores: AbstractContextManager[None]) -> float:
            with cores:
                marks = [time.perf_counter()]
                for _ in range(_MEASURED_STEPS):
                    optimizer.step()
                    marks.append(time.perf_counter())
            return elements / median(end - begin for begin, end in itertools.pairwise(marks))

        every = rate(nullcontext())
        spared = rate(leaving_one_free()) if min(torch.get_num_threads(), available() - 1) >= 1 else None
    finally:
        optimizer.close()
    return UpdateRates(every, spared)


def _share_of(cls: ChunkClass) -> float:
    names: Sequence[str] = [field.name for field in cls.fields]
    if REMAINDER.name in names:
        return SHARES["split"]
    if MASTER in names:
        return SHARES["master"]
    if cls.dtype in (torch.bfloat16, torch.float16):
        return SHARES["cast"]
    return SHARES["float64"] if cls.dtype is torch.float64 else SHARES["plain"]


def _measured(day: str | None) -> str:
    return f"measured {day.partition('T')[0]}" if day else "measured"
