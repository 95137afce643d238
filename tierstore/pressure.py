"""Measures how full the machine is: host memory, the container's limit, disks, and how many processes share them;
and what processor, memory and disks are, as the kernel says it.

It decides nothing and keeps nothing: every call reads the system anew. Files are read below `root`, so that recorded
trees of other machines can be measured too. A limit set on any control group above this process counts; what the
kernel can take back at once (inactive file pages) does not count as used.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_SLURM_MEMORY = {"NODE": "", "CPU": "SLURM_CPUS_ON_NODE", "GPU": "SLURM_GPUS_ON_NODE"}  # SLURM_MEM_PER_x times how many
_RANK_VARIABLES = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory as this process may use it.

    `available_bytes` are what is left of `bound_bytes`, the machine's memory or the limit that leaves least; `source`
    says which. `limit_bytes` is the least limit there is.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    source: str
    bound_bytes: int


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """A filesystem's size, and what is free on it for a process without privileges."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted filesystem: where, its type and options, which folder of it is seen there, and what it is on."""

    point: str
    filesystem: str
    options: tuple[str, ...] = ()
    shown: str = "/"
    source: str = ""


@dataclass(frozen=True, slots=True)
class _Files:
    """What the two versions of control groups call the same things."""

    version: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_V1 = _Files("v1", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("v2", ("memory.max", "memory.high"), "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class _Bound:
    """One control group's limit and what it leaves."""

    available_bytes: int
    limit_bytes: int
    source: str


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure host memory: the machine's, or less where a control group of this process allows less."""
    total, available = _machine(root)
    bounds = [bound for bound in _bounds(root) if bound.limit_bytes < total]
    limit = min((bound.limit_bytes for bound in bounds), default=None)
    tightest = min(bounds, key=lambda bound: bound.available_bytes, default=None)
    if tightest is None or tightest.available_bytes >= available:
        return HostMemory(total, available, limit, "machine", bound_bytes=total)
    return HostMemory(total, tightest.available_bytes, limit, tightest.source, bound_bytes=tightest.limit_bytes)


def disk_space(place: Path | int) -> DiskSpace:
    """Measure the filesystem of a folder or of an open file."""
    usage = shutil.disk_usage(place)
    return DiskSpace(total_bytes=usage.total, free_bytes=usage.free)


def mounts(root: Path = Path("/")) -> list[Mount]:
    """List what is mounted, in the order it was mounted: a later one hides an earlier one at the same point."""
    lines = _lines(root / "proc/self/mountinfo")
    if lines or root != Path("/"):
        return [_mount(line) for line in lines]
    disks = psutil.disk_partitions(all=True)
    return [Mount(disk.mountpoint, disk.fstype, tuple(disk.opts.split(",")), source=disk.device) for disk in disks]


def mount_of(folder: Path, root: Path = Path("/")) -> Mount:
    """Find what is mounted nearest above a folder; of an unknown filesystem if the system does not say."""
    real = Path(os.path.realpath(folder))
    nearest = Mount("", "")
    for mount in mounts(root):
        if real.is_relative_to(mount.point) and len(Path(mount.point).parts) >= len(Path(nearest.point).parts):
            nearest = mount
    return nearest


def huge_pages(root: Path = Path("/")) -> str:
    """How the kernel gives transparent huge pages: always, madvise, never, or unknown."""
    text = "".join(_lines(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return text.partition("[")[2].partition("]")[0] or "unknown"


def processor(root: Path = Path("/")) -> str:
    """The processor's model; its architecture where the kernel does not say more."""
    models = (line.partition(":")[2].strip() for line in _lines(root / "proc/cpuinfo") if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def memory_stall_percent(root: Path = Path("/")) -> float | None:
    """How much of the last ten seconds tasks waited for memory; None where the kernel does not say (PSI).

    Those of the nearest control group that says so (version 2), else all of the machine's.
    """
    groups = (folder / "memory.pressure" for files, folder in _groups(root) if files is _V2)
    for path in (*groups, root / "proc/pressure/memory"):
        for line in _lines(path):
            match = re.match(r"some avg10=([0-9.]+)", line)
            if match is not None:
                return float(match[1])
    return None


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many training processes share this machine, as the launcher said it; 1 when nobody said anything usable."""
    for name in _RANK_VARIABLES:
        ranks = _count(environment.get(name, ""))
        if ranks:
            return ranks
    return 1


def slurm_memory(environment: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of this node's memory that Slurm has given the job; None where it gave no less than all, or does not say.

    Slurm counts in MiB unless a unit is given.
    """
    for unit, number in _SLURM_MEMORY.items():
        match = re.fullmatch(r"([0-9]+)([KMGT]?)", environment.get(f"SLURM_MEM_PER_{unit}", "").upper())
        each = int(match[1]) << 10 * ("KMGT".index(match[2] or "M") + 1) if match is not None else 0
        nbytes = each * (_count(environment.get(number, "")) if number else 1)
        if nbytes:
            return nbytes
    return None


def _count(value: str) -> int:
    """The number that a variable of the environment holds; 0 where it holds anything else."""
    return int(value) if value.isascii() and value.isdigit() else 0


def _machine(root: Path) -> tuple[int, int]:
    fields = _fields(root / "proc/meminfo")
    if "MemTotal:" in fields and "MemAvailable:" in fields:
        return fields["MemTotal:"] * 1024, fields["MemAvailable:"] * 1024
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _bounds(root: Path) -> Iterator[_Bound]:
    for files, folder in _groups(root):
        bound = _bound(files, folder)
        if bound is not None:
            yield bound


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """This process's folder in each hierarchy that can limit memory, and all above it, with the names of its files."""
    mounted = _mounted_groups(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            files = _V2
        elif "memory" in controllers.split(","):
            files = _V1
        else:
            continue
        mount = mounted.get(files.version) or _usual_mount(root, files)
        top = root / mount.point.lstrip("/")
        folder = top / _below(path, mount.shown)
        while folder != top:
            yield files, folder
            folder = folder.parent
        yield files, top


def _mounted_groups(root: Path) -> dict[str, Mount]:
    """Where the hierarchy of each version that can limit memory is mounted."""
    found: dict[str, Mount] = {}
    for mount in mounts(root):
        if mount.filesystem == "cgroup2":
            found["v2"] = mount
        elif mount.filesystem == "cgroup" and "memory" in mount.options:
            found["v1"] = mount
    return found


def _usual_mount(root: Path, files: _Files) -> Mount:
    if files is _V1:
        return Mount("/sys/fs/cgroup/memory", "cgroup")
    has_unified = (root / "sys/fs/cgroup/unified").is_dir()
    return Mount("/sys/fs/cgroup/unified" if has_unified else "/sys/fs/cgroup", "cgroup2")


def _mount(line: str) -> Mount:
    """Read a line of mountinfo (proc(5)): blanks and backslashes in its paths are octal escapes."""
    before, _, after = line.partition(" - ")
    _, _, _, shown, point, *_ = (_unescape(part) for part in before.split())
    filesystem, *sources, options = after.split()
    source = _unescape(sources[0]) if sources else ""
    return Mount(point, filesystem, tuple(options.split(",")), shown, source)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _below(path: str, group: str) -> PurePosixPath:
    """The process's group relative to the mounted one; a path that leads out of it (..) counts as the mounted one."""
    own = PurePosixPath(path)
    if ".." in own.parts:
        return PurePosixPath()
    return own.relative_to(group if own.is_relative_to(group) else "/")


def _bound(files: _Files, folder: Path) -> _Bound | None:
    limits = {name: value for name in files.limits if (value := _number(folder / name)) is not None}
    used = _number(folder / files.usage)
    if not limits or used is None:
        return None
    name = min(limits, key=lambda each: limits[each])
    reclaimable = _fields(folder / "memory.stat").get(files.reclaimable, 0)
    available = max(0, limits[name] - max(0, used - reclaimable))
    return _Bound(available, limits[name], f"cgroup {files.version} {folder / name}")


def _number(path: Path) -> int | None:
    """The number in a file; None when there is no file or no limit in it (`max`)."""
    text = " ".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
