"""The machine that a plan is for: this one, or as much of another as was said of it. Nothing here is reserved.

Parameters on the meta device have no place yet. Where the plan has a gpu tier they are taken to be there, which a
`PlannedDevice` stands for; it gives no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tierstore.blueprint import beyond_memory
from tierstore.build import Parts, Plant
from tierstore.calibrate import find_rates
from tierstore.demo.words import size
from tierstore.device import Device, HostDevice, open_device, present_accelerator
from tierstore.errors import CapacityError, PolicyError, SwapError
from tierstore.folders import swap_folders
from tierstore.placement import Room
from tierstore.policy import NvmeTier, TierPolicy

PLANNED_FOLDER = Path("/planned-nvme")
"""Stands for the swap folder of a machine that is not here."""


class PlannedDevice(HostDevice):
    """An accelerator that parameters on the meta device will be on. Has a size, if one is known, and no memory."""

    def __init__(self, name: str, total_bytes: int | None) -> None:
        super().__init__(name)
        self.torch_device = torch.device("meta")
        self._total_bytes = total_bytes

    def allocate(self, nbytes: int) -> Tensor:
        raise CapacityError(f"{self.name} is planned and has no memory for {nbytes:,} bytes")

    def memory_bytes(self) -> tuple[int, int]:
        """Raises PolicyError where the device is not here."""
        if self._total_bytes is None:
            raise PolicyError("tiers.gpu.capacity is a share of an accelerator that is not here: give a size, as 24GiB")
        return self._total_bytes, self._total_bytes


def planned_parts(policy: TierPolicy, devices: Sequence[torch.device], ranks: int | None, *, measure: bool) -> Parts:
    """What a plant is made with, for parameters on `devices`: none reserves; rates are measured if told."""
    are_placed = any(device.type != "meta" for device in devices)
    parts = Parts(
        open_device=open_device if are_placed else partial(_plan_device, policy),
        find_rates=partial(find_rates, measure=measure, anew=measure),
    )
    return parts if ranks is None else replace(parts, ranks=lambda: ranks)


def _plan_device(policy: TierPolicy, wanted: str, parameters_on: torch.device | None) -> Device | None:
    """The gpu tier's device for parameters without a place: there if the policy gives it a size, else if it is here."""
    if wanted == "cpu":
        return PlannedDevice("stand-in", HostDevice().memory_bytes()[1])
    present = present_accelerator()
    here = open_device("auto", present) if present is not None else None
    gpu = policy.tiers.gpu
    if here is None and gpu is not None and gpu.capacity == "auto" and not gpu.required:
        return None
    return PlannedDevice("gpu", None if here is None else here.memory_bytes()[1])


def with_folders(policy: TierPolicy) -> tuple[TierPolicy, list[str]]:
    """The policy with swap folders it can name, and a warning where it must make one up."""
    nvme = policy.tiers.nvme
    if nvme is None or nvme.paths != "auto":
        return policy, []
    try:
        swap_folders("auto")
    except SwapError as error:
        warning = f"{error.strerror or error}; this plan takes one swap folder for granted"
        return with_nvme(policy, nvme.model_copy(update={"paths": (PLANNED_FOLDER,)})), [warning]
    return policy, []


def with_nvme(policy: TierPolicy, nvme: NvmeTier | None) -> TierPolicy:
    """The policy with another nvme tier, or with none."""
    return policy.model_copy(update={"tiers": policy.tiers.model_copy(update={"nvme": nvme})})


def beyond_this_machine(plant: Plant, rooms: dict[str, Room], chunk_bytes: int) -> Iterator[str]:
    """Warnings of given capacities that are more than this machine has: a plan may be for another."""
    policy, present = plant.policy, present_accelerator()
    gpu, nvme = policy.tiers.gpu, policy.tiers.nvme
    if gpu is not None and plant.gpu is None:
        yield "no accelerator is here and tiers.gpu has no size, so the gpu tier is left out: give it one, as 24GiB"
    if gpu is not None and isinstance(plant.gpu, PlannedDevice) and gpu.device != "cpu":
        if present is None:
            yield "no accelerator is here: the gpu tier, and parameters on it, are taken for granted"
        elif isinstance(gpu.capacity, int) and gpu.capacity > plant.gpu.memory_bytes()[1]:
            has = size(plant.gpu.memory_bytes()[1])
            yield f"tiers.gpu.capacity of {size(gpu.capacity)} is more than {present} has ({has})"
    if (beyond := beyond_memory(plant)) is not None:
        ranks = plant.parts.ranks()
        whose = "" if ranks == 1 else f" for each of {ranks} processes"
        yield f"tiers.cpu.capacity of {size(beyond[0])} is more than this machine has{whose} ({size(beyond[1])})"
    if nvme is not None and isinstance(nvme.capacity, int):
        try:
            plant.check_disk(rooms, chunk_bytes)
        except SwapError as error:
            yield f"not on the disks of this machine: {error.strerror or error}"


def check_this_disk(plant: Plant, rooms: dict[str, Room], chunk_bytes: int) -> None:
    """Where an nvme tier finds its size by itself it is this machine's disks that must have it. Raises SwapError."""
    nvme = plant.policy.tiers.nvme
    if nvme is not None and not isinstance(nvme.capacity, int) and nvme.paths != (PLANNED_FOLDER,):
        plant.check_disk(rooms, chunk_bytes)
