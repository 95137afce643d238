"""Policy to devices, tiers, store: the one place where names become objects and `auto` becomes a number.

A `Plant` is a policy as this machine can carry it out: which tiers there are, which device stands behind gpu, where a
parameter is computed. `Plant.build` reserves memory and disk for a list of chunks, or fails with both as they were.
`Parts` holds the makers of everything that touches hardware, so that tests can hand in stand-ins.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch

from tierstore.calibrate import find_rates
from tierstore.device import Device, HostDevice, host_for, open_device
from tierstore.errors import PolicyError, TierstoreError
from tierstore.folders import check_space, filesystems
from tierstore.growth import slab_extents_of, slab_extents_of_memory
from tierstore.io import Engine, open_engine
from tierstore.placement import (
    LARGEST_CHUNK,
    PIPELINE_EXTENTS,
    UNHURRIED_CHUNK,
    Asked,
    Need,
    Room,
    auto_chunk_bytes,
    even_chunk_bytes,
    place_homes,
    size_tiers,
    whole_pages,
    with_choice,
)
from tierstore.policy import CpuTier, GpuTier, Percent, TierPolicy
from tierstore.pressure import disk_space, host_memory, local_ranks
from tierstore.probes import Probe
from tierstore.rates import Rates
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, Setup
from tierstore.swapping import folders_of, io_stats, open_file_tier, open_nvme_engine, tell_rates, wants_direct
from tierstore.tiers import FileTier, MemoryTier, Tier
from tierstore.transfer import TransferEngine
from tierstore.tuning import Tuning, tune

EXTENTS_GROWN = 16
BYTES_GROWN = 4 << 20
"""A tier that grows chunk by chunk begins with slabs of so many extents, of no more than so many bytes."""

TUNED_ABOVE_BYTES = 1 << 30
"""Of state whose home is in files, from which on rates are measured: a step moves twice that."""

_log = logging.getLogger("tierstore.build")


@dataclass(frozen=True, slots=True)
class Parts:
    """The makers of what touches hardware."""

    open_device: Callable[[str, torch.device | None], Device | None] = open_device
    host_for: Callable[..., Device] = host_for
    open_engine: Callable[..., Engine] = open_engine
    open_transfer: Callable[[Engine | None, Device | None], TransferEngine] = TransferEngine
    find_rates: Callable[..., Rates] = find_rates
    open_probe: Callable[..., Probe] = Probe
    ranks: Callable[[], int] = local_ranks  # processes that share this machine


@dataclass(frozen=True, slots=True)
class Plant:
    """A policy on this machine, for parameters on one accelerator or none."""

    policy: TierPolicy
    names: tuple[str, ...]  # the tiers that may be homes, fastest first
    gpu: Device | None
    parameters_on: torch.device | None
    parts: Parts = Parts()
    tuning: Tuning | None = None  # what is chosen where the policy says `auto`; None: the defaults

    @property
    def order(self) -> str:
        """The order of updates, `auto` resolved."""
        if self.policy.order != "auto":
            return self.policy.order
        return "fixed" if self.policy.update == "backward" else "alternating"

    def compute_tier(self, device: torch.device) -> str:
        """The tier in which the update of a parameter on `device` is computed.

        Raises PolicyError if `compute: device` is asked for but the device has no tier.
        """
        has_tier = self.gpu is not None and self.gpu.torch_device == device
        if self.policy.compute == "cpu" or (not has_tier and device.type == "cpu"):
            return "cpu"
        if not has_tier and self.policy.compute == "device":
            raise PolicyError(
                f"compute: device needs a gpu tier on {device}, and the tiers are {', '.join(self.names)}"
            )
        return "gpu" if has_tier else "cpu"

    def tell_what_is_missing(self) -> None:
        """Warn of a gpu tier that the policy has and this machine, or the parameters, have no accelerator for."""
        if self.policy.tiers.gpu is not None and self.gpu is None:
            warnings.warn(
                f"tierstore: {_why_no_gpu(self.policy.tiers.gpu)}, so the gpu tier is left out; tiers in use: "
                f"{', '.join(self.names)}",
                UserWarning,
                stacklevel=2,
            )

    def launch(self, tier: str, work: Callable[[], None]) -> None:
        """Run tensor operations on the device of the tier that computes."""
        if tier == "gpu" and self.gpu is not None:
            self.gpu.launch(work)
        else:
            work()

    def finish(self) -> None:
        """Make the results of launched work visible to whoever uses the tensors next."""
        if self.gpu is not None:
            self.gpu.finish()

    def device_of_gradients(self) -> Device:
        """The device on whose streams the parameters' gradients are made."""
        if self.gpu is not None:
            return self.gpu
        device = None if self.parameters_on is None else self.parts.open_device("auto", self.parameters_on)
        return device or HostDevice()

    def chunk_bytes(self, state_bytes: int, largest_element: int, *, classes: int | None) -> int:
        """Bytes of one extent: what the policy says, in whole pages, or what suits state and the tier that computes.

        `classes`: of so many classes is all state there will be; None: more of it may come, or some has its home
        elsewhere.
        """
        if self.policy.chunk_size != "auto":
            return whole_pages(self.policy.chunk_size)
        asked = self.given_bytes("gpu" if self.gpu is not None else "cpu")
        smallest = max(1 << 14, whole_pages(1024 * largest_element + 4095))
        largest = LARGEST_CHUNK if self.tuning is None else self.tuning.chunk_size.value
        if classes == 1 and state_bytes > UNHURRIED_CHUNK and self.policy.update == "step":
            even = even_chunk_bytes(state_bytes)  # beside backward smaller ones can begin earlier
            if self._keeps(state_bytes + even, asked):
                return even
        stays = classes is not None and self._keeps(state_bytes + classes * UNHURRIED_CHUNK, asked)
        return auto_chunk_bytes(state_bytes, asked, largest=largest, smallest=smallest, stays=stays)

    def _keeps(self, nbytes: int, given: int | None) -> bool:
        """Whether the tier that computes, of a `given` capacity or none, is sure to take so many bytes."""
        if given is None and self.gpu is not None:
            return self.names == ("gpu",)  # else chunks only stream through it
        if given is None:
            given = self._free_host_memory() if "cpu" in self.names else 0
        return nbytes <= given

    def tuned(self, infos: Sequence[ChunkInfo], extent_bytes: int) -> Plant:
        """This plant with what is `auto` set by measured rates, if so much of these chunks has its home in files.

        Raises CapacityError if not all chunks find a home.
        """
        nvme, state_bytes = self.policy.tiers.nvme, sum(info.record_bytes for info in infos)
        if nvme is None or state_bytes <= TUNED_ABOVE_BYTES or self._in_files(infos, extent_bytes) <= TUNED_ABOVE_BYTES:
            return self
        given = self.given_bytes("cpu")
        rates = self.parts.find_rates(
            folders_of(nvme), engine=nvme.io.engine, direct=wants_direct(nvme), memory_bytes=given
        )
        capacity = self.given_bytes("gpu") if self.gpu is not None else given
        tuning = tune(rates, self.policy, state_bytes=state_bytes, capacity_bytes=capacity)
        tell_rates(rates, tuning)
        return replace(self, tuning=tuning)

    def _in_files(self, infos: Sequence[ChunkInfo], extent_bytes: int) -> int:
        """Bytes of chunks whose home is in files."""
        homes = self.homes(infos, self.rooms(infos, extent_bytes), extent_bytes)
        return sum(info.record_bytes for info, home in zip(infos, homes, strict=True) if home == "nvme")

    def rooms(self, infos: Sequence[ChunkInfo], extent_bytes: int) -> dict[str, Room]:
        """Extents of each tier for these chunks, `auto` resolved; checks that all find a home. Reserves nothing."""
        rooms = self.sizes(infos, extent_bytes)
        self.homes(infos, rooms, extent_bytes)
        return rooms

    def homes(self, infos: Sequence[ChunkInfo], rooms: Mapping[str, Room], extent_bytes: int) -> list[str]:
        """The home of each chunk. Raises CapacityError if not all find one."""
        needs = [Need(info.compute, info.named) for info in infos]
        return place_homes(needs, rooms, order=self.order, extent_bytes=extent_bytes)

    def sizes(self, infos: Sequence[ChunkInfo], extent_bytes: int) -> dict[str, Room]:
        """As `rooms`, but whether or not there is enough of it."""
        needs = [Need(info.compute, info.named) for info in infos]
        asked = self.asked(any(need.compute == "cpu" for need in needs), extent_bytes)
        rooms = size_tiers(needs, asked, order=self.order)
        if "nvme" in asked and asked["nvme"].extents is None:
            rooms["nvme"] = with_choice(rooms["nvme"], self._paths("nvme", rooms["nvme"]))
        return {name: rooms[name] for name in ("gpu", "cpu", "nvme") if name in rooms}

    def asked(self, computes_on_cpu: bool, extent_bytes: int) -> dict[str, Asked]:
        """What the policy asks of each tier; a cpu tier for staging joins where chunks must pass through it."""
        asked = {name: self._asked(name, extent_bytes) for name in self.names}
        if "cpu" not in asked and (self.gpu is None or "nvme" in self.names or computes_on_cpu):
            asked["cpu"] = Asked(None, homes=False, pipeline=self._pipeline)
        return {name: asked[name] for name in ("gpu", "cpu", "nvme") if name in asked}

    def check_disk(self, rooms: Mapping[str, Room], extent_bytes: int) -> None:
        """Check that swap folders are usable and have the bytes for the nvme tier; makes and reserves nothing.

        Raises SwapError or DiskFullError, as `build` would.
        """
        nvme, room = self.policy.tiers.nvme, rooms.get("nvme", Room(0))
        if nvme is None or not room.extents:
            return
        folders = folders_of(nvme)
        dealt = FileTier.dealt(room.extents, slab_extents_of(room.extents, len(folders)), len(folders))
        check_space({folder: count * extent_bytes for folder, count in zip(folders, dealt, strict=True)})

    def build(self, rooms: Mapping[str, Room], extent_bytes: int, *, growing: Collection[str] = ()) -> Setup:
        """Reserve memory and disk. Raises CapacityError, SwapError, DiskFullError or NoThreadError, with nothing left.

        Tiers that are `growing` are opened even if they have no extents yet.
        """
        nvme = self.policy.tiers.nvme
        self.check_disk(rooms, extent_bytes)
        uses_files = nvme is not None and "nvme" in rooms and (rooms["nvme"].extents > 0 or "nvme" in growing)
        with ExitStack() as undo:
            engine = None
            if uses_files and nvme is not None:
                engine = open_nvme_engine(nvme, self.parts.open_engine, self.tuning)
                undo.callback(engine.close)
            tiers: dict[str, Tier] = {}
            slabs = {name: self._slab_extents(name, room, extent_bytes) for name, room in rooms.items()}
            slabs |= dict.fromkeys(growing, max(1, min(EXTENTS_GROWN, BYTES_GROWN // extent_bytes)))
            for name, room in rooms.items():
                if name == "nvme" and not uses_files:
                    continue
                tiers[name] = self._make_tier(name, extent_bytes, engine)
                undo.callback(tiers[name].close)
                tiers[name].grow(room.extents, slab_extents=slabs[name])
            transfer = self.parts.open_transfer(engine, self.gpu)
            undo.callback(transfer.close)
            transfer.prepare(tiers.values())
            undo.pop_all()
        self._tell(rooms, extent_bytes)
        later = {} if nvme is None or "nvme" in tiers else {"nvme": partial(self._open_nvme, extent_bytes, transfer)}
        return Setup(
            tiers=tiers,
            homes=frozenset(name for name, room in rooms.items() if room.homes and name in {*tiers, *later}),
            order=self.order,
            slab_extents=slabs,
            transfer=transfer,
            io=io_stats(engine, tiers.get("nvme")),
            timeout_seconds=nvme.io.timeout if nvme is not None else None,
            decided=self._decided(rooms, extent_bytes),
            later=later,
            probe=self._probe(),
            marks=self._marks(),
            low_of_cpu=(self.policy.tiers.cpu or CpuTier()).watermarks.low,
            adapts=self.policy.adapt,
            absent=frozenset(self.policy.tiers.names) - {*self.names},
            given={name: given // extent_bytes for name in self.names if (given := self.given_bytes(name)) is not None},
            processes=self.parts.ranks(),
        )

    def _open_nvme(self, extent_bytes: int, transfer: TransferEngine) -> tuple[Tier, IoStats]:
        """Open the nvme tier of a store that did without one. Raises PolicyError or SwapError."""
        nvme = self.policy.tiers.nvme
        assert nvme is not None
        engine = open_nvme_engine(nvme, self.parts.open_engine, self.tuning)
        try:
            tier = open_file_tier(nvme, engine, extent_bytes)
        except BaseException:
            engine.close()
            raise
        transfer.join(engine)
        return tier, io_stats(engine, tier)

    def _probe(self) -> Probe:
        """What measures pressure. Swap folders that cannot be used are told of when they are."""
        nvme = self.policy.tiers.nvme
        with contextlib.suppress(TierstoreError, OSError):
            return self.parts.open_probe(gpu=self.gpu, folders=[] if nvme is None else folders_of(nvme))
        return self.parts.open_probe(gpu=self.gpu, folders=[])

    def _marks(self) -> dict[str, tuple[float, float]]:
        """The watermarks of the tiers that heed pressure: all but the slowest, which has nowhere to send chunks."""
        tiers = {"gpu": self.policy.tiers.gpu, "cpu": self.policy.tiers.cpu}
        heeding = {name: tiers[name] for name in self.names[:-1]}
        return {name: (tier.watermarks.high, tier.watermarks.low) for name, tier in heeding.items() if tier is not None}

    def _decided(self, rooms: Mapping[str, Room], extent_bytes: int) -> tuple[tuple[str, str, str], ...]:
        """What was decided on the way to a store, and why."""
        asked = f"order: {self.policy.order}, update: {self.policy.update}"
        sizes = ", ".join(f"{name} {room.extents:,}" for name, room in rooms.items())
        found = [("order", f"updates are in {self.order} order", asked)]
        found.append(
            ("size", f"extents of {extent_bytes:,} bytes: {sizes}", "what the policy asks for and chunks need")
        )
        if self.tuning is not None:
            found += [("tuning", f"{choice.key}: {choice.shown}", choice.why) for choice in self.tuning]
        return tuple(found)

    def _make_tier(self, name: str, extent_bytes: int, engine: Engine | None) -> Tier:
        if name == "gpu":
            assert self.gpu is not None
            return MemoryTier(name, self.gpu, extent_bytes)
        if name == "cpu":
            return MemoryTier(
                name, self.parts.host_for(self.parameters_on, pin_memory=self._pins_memory()), extent_bytes
            )
        nvme = self.policy.tiers.nvme
        assert nvme is not None and engine is not None
        return open_file_tier(nvme, engine, extent_bytes)

    def _slab_extents(self, name: str, room: Room, extent_bytes: int) -> int:
        if name == "nvme":
            return slab_extents_of(room.extents, self._paths(name, room))
        return slab_extents_of_memory(room.extents, extent_bytes)

    def _paths(self, name: str, room: Room) -> int:
        """On how many paths a tier lies."""
        nvme = self.policy.tiers.nvme
        return len(folders_of(nvme)) if name == "nvme" and nvme is not None and room.extents else 1

    def _pins_memory(self) -> bool:
        cpu = self.policy.tiers.cpu
        return True if cpu is None or cpu.pin_memory == "auto" else cpu.pin_memory

    def _asked(self, name: str, extent_bytes: int) -> Asked:
        given = self.given_bytes(name)
        if given is not None:
            return Asked(given // extent_bytes)
        if name != "cpu":
            return Asked(None)
        limit = max(1, self._free_host_memory() // extent_bytes)
        return Asked(None, limit=limit, pipeline=self._pipeline)

    @property
    def _pipeline(self) -> int:
        return PIPELINE_EXTENTS if self.tuning is None else self.tuning.prefetch.value

    def given_bytes(self, name: str) -> int | None:
        """The capacity that the policy gives a tier; None for `auto` and for a tier left out.

        A share of a gpu is one of the device's memory. Of what the processes on this machine have in common, the memory
        that machine and container allow and the swap paths' disks, this one takes its part of the share. Raises
        SwapError if a swap folder cannot be used.
        """
        tier = getattr(self.policy.tiers, name)
        capacity: int | Percent | str = "auto" if tier is None else tier.capacity
        if not isinstance(capacity, Percent):
            return None if isinstance(capacity, str) else capacity
        if name == "gpu" and self.gpu is not None:
            return int(self.gpu.memory_bytes()[1] * capacity.fraction)
        if name == "cpu":
            memory = host_memory()
            total = memory.limit_bytes or memory.total_bytes
        else:
            assert self.policy.tiers.nvme is not None
            disks = filesystems(folders_of(self.policy.tiers.nvme))
            total = sum(disk_space(folders[0]).total_bytes for folders in disks)
        return int(total * capacity.fraction) // self.parts.ranks()

    def _free_host_memory(self) -> int:
        """Bytes that a cpu tier may take which finds its size by itself: half of what is left, for each local rank."""
        return host_memory().available_bytes // 2 // self.parts.ranks()

    def _tell(self, rooms: Mapping[str, Room], extent_bytes: int) -> None:
        for name, room in rooms.items():
            staging = (
                "" if room.homes else ", for staging only: the policy has no such tier, but chunks pass through it"
            )
            _log.info("%s: %d extents of %d bytes%s", name, room.extents, extent_bytes, staging)


def plan_plant(policy: TierPolicy, devices: Sequence[torch.device], parts: Parts | None = None) -> Plant:
    """See what of a policy this machine has, for parameters on `devices`.

    A gpu tier without an accelerator is left out: `Plant.tell_what_is_missing` warns of it. Raises PolicyError if the
    policy requires one or has no other tier, and when parameters lie on two accelerators.
    """
    parts = parts or Parts()
    accelerators = list(dict.fromkeys(device for device in devices if device.type not in ("cpu", "meta")))
    if len(accelerators) > 1:
        raise PolicyError(
            f"parameters on {len(accelerators)} accelerators ({', '.join(map(str, accelerators))}): one optimizer "
            f"serves one; make one TieredAdamW for each"
        )
    parameters_on = accelerators[0] if accelerators else None
    gpu_tier = policy.tiers.gpu
    gpu = None if gpu_tier is None else parts.open_device(gpu_tier.device, parameters_on)
    names = tuple(name for name in policy.tiers.names if name != "gpu" or gpu is not None)
    if gpu_tier is not None and gpu is None and (gpu_tier.required or not names):
        raise PolicyError(
            f"tiers.gpu has no accelerator ({_why_no_gpu(gpu_tier)}): move the model there before the optimizer is "
            f"used, or let `device: cpu` stand in for one"
        )
    return Plant(policy, names, gpu, parameters_on, parts)


def _why_no_gpu(gpu_tier: GpuTier) -> str:
    return "the parameters are on the CPU" if gpu_tier.device == "auto" else f"there is no {gpu_tier.device} here"
