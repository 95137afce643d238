"""Looks at swap folders, each on a thread that may hang without the doctor hanging too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore.calibrate import wait_within
from tierstore.demo.words import size
from tierstore.doctor.finding import Finding, fail, ok, warn
from tierstore.errors import TierstoreError
from tierstore.folders import FolderKind, check_space, describe_folder, disk_margin, swap_folders
from tierstore.policy import NvmeTier, TierPolicy
from tierstore.pressure import disk_space, mount_of
from tierstore.swapfile import SwapFile

PATIENCE_SECONDS = 5.0
"""How long a folder may take to answer."""
LITTLE_BYTES = 1 << 30

_ROOT = Path("/")


def folders_of(policy: TierPolicy, *, is_asked_for: bool) -> tuple[list[Path], list[Finding]]:
    """The swap folders of a policy; none, and why, if there is none that can be used without being named.

    That is a failure only where files are asked for: the default policy does without while memory suffices.
    """
    nvme = policy.tiers.nvme
    if nvme is None:
        return [], []
    try:
        return swap_folders(nvme.paths, allows_shared=nvme.allow_shared_folder), []
    except TierstoreError as error:
        text = getattr(error, "strerror", None) or str(error)
        tell = fail if is_asked_for else warn
        return [], [tell("swap", text, "name a folder on a local disk: TIERSTORE_SWAP, tiers.nvme.paths or --path")]


def swap_findings(folder: Path, nvme: NvmeTier, root: Path = _ROOT) -> list[Finding]:
    """Look at one folder. `root`: where the kernel's files are."""
    name = str(folder)
    try:
        return wait_within(PATIENCE_SECONDS, lambda: list(_look(name, folder, nvme, root)))
    except TimeoutError:
        return [fail(name, f"the disk did not answer within {PATIENCE_SECONDS:g} s", "use another: this one hangs")]
    except (OSError, TierstoreError) as error:
        text = getattr(error, "strerror", None) or str(error)
        return [fail(name, text, "name another folder in tiers.nvme.paths, or put this one right")]


def capacity_findings(policy: TierPolicy, folders: Sequence[Path]) -> Iterator[Finding]:
    """Whether the folders have the bytes that the policy gives the nvme tier; nothing is said of `auto`."""
    nvme = policy.tiers.nvme
    if nvme is None or not isinstance(nvme.capacity, int) or not folders:
        return
    share = -(-nvme.capacity // len(folders))
    try:
        wait_within(PATIENCE_SECONDS, lambda: check_space(dict.fromkeys(folders, share)))
    except TimeoutError:
        return  # the folder that hangs is told of
    except TierstoreError as error:
        text = getattr(error, "strerror", None) or str(error)
        yield fail("capacity", text, "set tiers.nvme.capacity: auto, to take what the state needs")
    else:
        yield ok("capacity", f"tiers.nvme.capacity of {size(nvme.capacity)} fits the disks")


def _look(name: str, folder: Path, nvme: NvmeTier, root: Path) -> Iterator[Finding]:
    file = SwapFile(folder, direct=None, warns=False)  # raises SwapError where no swap file can be made
    try:
        yield _filesystem(name, folder, root)
        yield _space(name, folder)
        yield _direct(name, file.direct, is_required=nvme.io.direct is True)
        yield _unnamed(name, folder)
    finally:
        file.close()


def _filesystem(name: str, folder: Path, root: Path) -> Finding:
    mount, kind = mount_of(folder, root), describe_folder(folder, root=root)
    text = f"{mount.filesystem or 'an unknown filesystem'} on {mount.source or 'an unknown device'}"
    advice = "set tiers.nvme.paths or TIERSTORE_SWAP to a folder on a local disk"
    if kind is FolderKind.MEMORY:
        return warn(name, f"{text} is memory: state there saves none", advice)
    if kind is FolderKind.NETWORK:
        return warn(name, f"{text} is a network: slow, and gone with it", advice)
    return ok(name, text)


def _space(name: str, folder: Path) -> Finding:
    space = disk_space(folder)
    room = space.free_bytes - disk_margin(space.total_bytes)
    text = f"{size(space.free_bytes)} of {size(space.total_bytes)} are free, {size(max(0, room))} of them for state"
    if room <= 0:
        return fail(name, text, "free space, or name a folder on another disk")
    if room < LITTLE_BYTES:
        return warn(name, text, "free space, or add a folder on another disk")
    return ok(name, text)


def _direct(name: str, is_direct: bool, *, is_required: bool) -> Finding:
    if is_direct:
        return ok(name, "O_DIRECT works: reads and writes pass by the page cache")
    text = "O_DIRECT does not work: swap files are buffered, and the page cache takes memory"
    if is_required:
        return fail(name, text, "set tiers.nvme.io.direct: auto, or name a folder on another filesystem")
    return warn(name, text, "name a folder on ext4 or xfs")


def _unnamed(name: str, folder: Path) -> Finding:
    try:
        os.close(os.open(folder, os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, 0o600))
    except (OSError, AttributeError) as error:
        text = f"O_TMPFILE does not work ({getattr(error, 'strerror', error)})"
        return warn(name, text, "swap files have a name for a moment; a crash just then leaves an empty one behind")
    return ok(name, "O_TMPFILE works: swap files never have a name")
