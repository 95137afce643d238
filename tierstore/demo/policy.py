"""Where the demo's state lives: under the user's policy, or under one made so small that every tier is needed.

The policy made here suits the model, not the machine: about 64 chunks or more, a few of which fit in gpu and cpu, the
rest on nvme. It is for watching all routes at work, not for speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.demo.options import Options
from tierstore.errors import PolicyError, SwapError
from tierstore.folders import FolderKind, describe_folder, swap_folders
from tierstore.policy import TIER_NAMES, TierPolicy
from tierstore.units import MIN_CHUNK_BYTES

CHUNKS = 64
"""At least so many chunks, unless they would be smaller than a chunk may be."""
MOST_CHUNK_BYTES = 64 << 20
GPU_CHUNKS = 8
CPU_CHUNKS = 12
PERSISTENT = Path("/var/tmp")
"""On a disk where the temporary folder is memory, by the Filesystem Hierarchy Standard."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A policy, and in words where it comes from."""

    policy: TierPolicy
    origin: str


def choose_policy(options: Options, *, state_bytes: int, on_accelerator: bool) -> Chosen:
    """Load the user's policy or make one. Raises PolicyError, or SwapError if there is no disk to swap to."""
    if options.policy is not None:
        policy = TierPolicy.load(options.policy, tiers=options.tiers)
        return Chosen(_with_folders(policy, options.swap), str(options.policy))
    settings = small_policy(state_bytes, options.tiers, device="auto" if on_accelerator else "cpu")
    policy = _with_folders(TierPolicy.load(settings, tiers=options.tiers), options.swap)
    origin = "made to fit this model"
    if policy.tiers.nvme is not None and policy.tiers.nvme.paths == "auto":
        folder = _instead_of_temporary()
        if folder is not None:
            return Chosen(_with_folders(policy, (folder,)), f"{origin}; {folder}, as the temporary folder is no disk")
    return Chosen(policy, origin)


def small_policy(state_bytes: int, tiers: tuple[str, ...] | None = None, *, device: str) -> dict[str, Any]:
    """Make the settings for so much state: the slowest of `tiers` gets what it needs, the faster ones a few chunks."""
    chunk_bytes = _chunk_bytes(state_bytes)
    chunks = math.ceil(state_bytes / chunk_bytes)
    settings: dict[str, dict[str, Any]] = {
        "gpu": {"device": device, "capacity": chunk_bytes * max(4, min(GPU_CHUNKS, chunks // 8)), "required": True},
        "cpu": {"capacity": chunk_bytes * max(4, min(CPU_CHUNKS, chunks // 5))},
        "nvme": {},
    }
    slowest = [name for name in TIER_NAMES if tiers is None or name in tiers][-1:]
    for name in slowest:
        settings[name]["capacity"] = "auto"
    return {"chunk_size": chunk_bytes, "tiers": settings}


def _chunk_bytes(state_bytes: int) -> int:
    """The largest power of two of which the state fills CHUNKS."""
    power = 1 << max(0, (state_bytes // CHUNKS).bit_length() - 1)
    return max(MIN_CHUNK_BYTES, min(MOST_CHUNK_BYTES, power))


def _with_folders(policy: TierPolicy, folders: tuple[Path, ...]) -> TierPolicy:
    """Put swap files in `folders`, if there are any."""
    if not folders:
        return policy
    if policy.tiers.nvme is None:
        raise PolicyError(f"--swap {folders[0]}: the tiers are {', '.join(policy.tiers.names)}, so nothing is swapped")
    settings = policy.model_dump(exclude_none=True)
    settings["tiers"]["nvme"]["paths"] = list(folders)
    return TierPolicy.load(settings)


def _instead_of_temporary() -> Path | None:
    """A folder on a disk, when the temporary folder is none and the user has named no other."""
    try:
        swap_folders("auto")
    except SwapError:
        if PERSISTENT.is_dir() and describe_folder(PERSISTENT) is FolderKind.DISK:
            return PERSISTENT
    return None
