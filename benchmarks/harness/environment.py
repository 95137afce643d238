"""What a figure depends on besides the code: hardware, versions, filesystem, huge pages, threads, policy.

Reads only what an ordinary user may read; what cannot be found out is left out. Names neither host nor folder.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tierstore
from tierstore.cores import available
from tierstore.device import present_accelerator
from tierstore.pressure import disk_space, host_memory, huge_pages, mount_of, processor

_PACKAGES = ("aiofiles", "libaio", "numpy", "deepspeed", "torchao", "bitsandbytes", "numba")
_THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "MKL_NUM_THREADS")

_MATTERS = re.compile(
    r"(rw|discard|sync|dirsync|no(atime|diratime|barrier|cow)|(data|commit|compress\S*|barrier)=?\S*)$"
)
"""Mount options that can change how fast files are."""


def environment(folders: Sequence[Path] = (), policy: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Answer plain values; `folders` are those that swap files are in."""
    found: dict[str, Any] = {
        "hardware": _hardware(),
        "versions": _versions(),
        "huge_pages": huge_pages(),
        "threads": {
            "torch": torch.get_num_threads(),
            **{name: os.environ[name] for name in _THREADS if name in os.environ},
        },
        "storage": [storage(folder) for folder in folders],
    }
    return found if policy is None else found | {"policy": _without_folders(policy)}


def storage(folder: Path) -> dict[str, Any]:
    """The filesystem under a folder and the disk under that."""
    mount = mount_of(folder)
    return {
        "free_gb": round(disk_space(folder).free_bytes / 1e9, 1),
        "filesystem": mount.filesystem,
        "mount_options": ",".join(option for option in mount.options if _MATTERS.match(option)),
        **_disk(os.stat(folder).st_dev),
    }


def _disk(number: int) -> dict[str, Any]:
    """Name, model and queue of a block device, or of the disk it is a partition of."""
    path = Path(os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"))
    if not path.exists():
        return {}
    disk = path if (path / "queue").exists() else path.parent
    found: dict[str, Any] = {"disk": disk.name}
    for key, name in (
        ("model", "device/model"),
        ("rotational", "queue/rotational"),
        ("segments", "queue/max_segments"),
        ("max_request_kib", "queue/max_sectors_kb"),
        ("requests", "queue/nr_requests"),
    ):
        text = _read(disk / name)
        if text:
            found[key] = int(text) if text.isdigit() else text
    found["scheduler"] = _chosen(_read(disk / "queue/scheduler"))
    return found


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {
        "cpu": processor(),
        "cores": available(),
        "memory_gb": round(host_memory().total_bytes / 1e9, 1),
        "machine": platform.machine(),
        "kernel": platform.release().split("-")[0],
        "vector": torch.backends.cpu.get_cpu_capability(),
        "accelerator": None,
    }
    device = present_accelerator()
    if device is not None:
        found["accelerator"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "tierstore": tierstore.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _commit() -> str:
    """The commit that the package was imported from, with a mark if files differ from it; empty if there is none."""
    folder = Path(tierstore.__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _chosen(text: str) -> str:
    """The word in brackets of a setting such as `none [mq-deadline]`."""
    return text.split("[", 1)[1].split("]", 1)[0] if "[" in text else text


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _without_folders(policy: Mapping[str, Any]) -> dict[str, Any]:
    """A policy with the number of its folders in their stead."""
    plain: dict[str, Any] = {}
    for key, value in policy.items():
        if key == "paths" and not isinstance(value, str):
            plain[key] = f"{len(value)} folders"
        else:
            plain[key] = _without_folders(value) if isinstance(value, Mapping) else value
    return plain
