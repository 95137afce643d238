"""Recorded trees of /proc and /sys, as machines and containers show them."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import pytest

from tierstore.pressure import (
    HostMemory,
    disk_space,
    host_memory,
    huge_pages,
    local_ranks,
    memory_stall_percent,
    mount_of,
    mounts,
    processor,
    slurm_memory,
)

GIB = 1 << 30
MEMINFO = "MemTotal:       65536000 kB\nMemFree:         1000000 kB\nMemAvailable:   32768000 kB\n"
TOTAL, AVAILABLE = 65536000 * 1024, 32768000 * 1024
V2_MOUNT = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def record(root: Path, files: dict[str, str | int]) -> Path:
    """Lay down a tree of files."""
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n" if isinstance(content, int) else content)
    return root


def group(folder: str, *, usage: int, inactive: int = 0, **limits: int | str) -> dict[str, str | int]:
    """The files of a version 2 control group; limits by their last name."""
    return {
        f"{folder}/memory.current": usage,
        f"{folder}/memory.stat": f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file 7\n",
        **{f"{folder}/memory.{name}": value for name, value in limits.items()},
    }


def group_v1(folder: str, *, usage: int, limit: int, inactive: int = 0) -> dict[str, str | int]:
    return {
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.stat": f"inactive_file 5\ntotal_inactive_file {inactive}\n",
    }


def test_machine_without_limits(tmp_path: Path) -> None:
    assert host_memory(record(tmp_path, {})) == HostMemory(TOTAL, AVAILABLE, None, "machine", TOTAL)


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", usage=GIB, max="max\n", high="max\n")}
    assert host_memory(record(tmp_path, files)) == HostMemory(TOTAL, AVAILABLE, None, "machine", TOTAL)


def test_container_sees_only_its_own_root(tmp_path: Path) -> None:
    """Version 2 with a namespace: the limit is far below the machine's memory and must be believed."""
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT,
        **group("sys/fs/cgroup", usage=3 * GIB, inactive=GIB, max=4 * GIB),
    }
    found = host_memory(record(tmp_path, files))
    assert (found.total_bytes, found.available_bytes, found.limit_bytes) == (TOTAL, 2 * GIB, 4 * GIB)
    assert (found.bound_bytes, found.source) == (4 * GIB, f"cgroup v2 {tmp_path}/sys/fs/cgroup/memory.max")


def test_limit_of_any_group_above_counts(tmp_path: Path) -> None:
    """The own group has room, the one above it has not: others in it use the memory."""
    files = {
        "proc/self/cgroup": "0::/top/middle/own\n",
        **group("sys/fs/cgroup/top", usage=8 * GIB, max=9 * GIB),
        **group("sys/fs/cgroup/top/middle", usage=7 * GIB, max="max\n"),
        **group("sys/fs/cgroup/top/middle/own", usage=GIB, max=6 * GIB),
    }
    found = host_memory(record(tmp_path, files))
    assert (found.available_bytes, found.bound_bytes, found.limit_bytes) == (GIB, 9 * GIB, 6 * GIB)
    assert "/top/memory.max" in found.source


def test_throttling_limit_counts_like_a_hard_one(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", usage=GIB, max=8 * GIB, high=3 * GIB)}
    found = host_memory(record(tmp_path, files))
    assert (found.available_bytes, found.limit_bytes) == (2 * GIB, 3 * GIB)
    assert found.source.endswith("memory.high")


@pytest.mark.parametrize(("usage", "inactive", "left"), [(5 * GIB, 0, 0), (4 * GIB, 5 * GIB, 4 * GIB), (0, 0, 4 * GIB)])
def test_what_is_left_is_never_below_nothing_nor_above_the_limit(
    tmp_path: Path, usage: int, inactive: int, left: int
) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", usage=usage, inactive=inactive, max=4 * GIB)}
    assert host_memory(record(tmp_path, files)).available_bytes == left


def test_limit_that_leaves_more_than_the_machine_has(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", usage=GIB, max=50 * GIB)}
    assert host_memory(record(tmp_path, files)) == HostMemory(TOTAL, AVAILABLE, 50 * GIB, "machine", TOTAL)


def test_version_1_container_without_a_namespace(tmp_path: Path) -> None:
    """/proc names the group as the host sees it, while the mount shows the container's own group as its root."""
    files = {
        "proc/self/cgroup": "9:name=systemd:/docker/abc\n4:cpu,memory:/docker/abc/sub\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT.format(shown="/docker/abc"),
        **group_v1("sys/fs/cgroup/memory", usage=6 * GIB, limit=8 * GIB, inactive=GIB),
        **group_v1("sys/fs/cgroup/memory/sub", usage=GIB, limit=2 * GIB),
    }
    found = host_memory(record(tmp_path, files))
    assert (found.available_bytes, found.limit_bytes) == (GIB, 2 * GIB)
    assert found.source.startswith("cgroup v1 ") and "/memory/sub/" in found.source


def test_version_1_group_that_cannot_be_seen_falls_to_the_one_above(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        **group_v1("sys/fs/cgroup/memory", usage=6 * GIB, limit=8 * GIB, inactive=GIB),
    }
    found = host_memory(record(tmp_path, files))
    assert (found.available_bytes, found.bound_bytes, found.limit_bytes) == (3 * GIB, 8 * GIB, 8 * GIB)


def test_version_1_says_no_limit_with_a_huge_number(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a\n",
        **group_v1("sys/fs/cgroup/memory/a", usage=GIB, limit=9223372036854771712),
    }
    assert host_memory(record(tmp_path, files)).limit_bytes is None


def test_hybrid_machine_counts_both_versions(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a\n0::/a\n",
        **group_v1("sys/fs/cgroup/memory/a", usage=GIB, limit=4 * GIB),
        **group("sys/fs/cgroup/unified/a", usage=GIB, max=3 * GIB),
    }
    assert host_memory(record(tmp_path, files)).available_bytes == 2 * GIB


@pytest.mark.parametrize("path", ["/../other", "/gone", "/a b"])
def test_group_outside_the_namespace_falls_to_the_mounted_one(tmp_path: Path, path: str) -> None:
    files = {"proc/self/cgroup": f"0::{path}\n", **group("sys/fs/cgroup", usage=GIB, max=3 * GIB)}
    assert host_memory(record(tmp_path, files)).available_bytes == 2 * GIB


def test_half_a_group_is_no_limit(tmp_path: Path) -> None:
    files: dict[str, str | int] = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": GIB}
    assert host_memory(record(tmp_path, files)).limit_bytes is None


def test_machine_without_proc_is_asked_through_psutil(tmp_path: Path) -> None:
    assert host_memory(tmp_path).total_bytes == psutil.virtual_memory().total


def test_this_machine_can_be_measured() -> None:
    found = host_memory()
    assert 0 <= found.available_bytes <= found.total_bytes == psutil.virtual_memory().total
    assert any(mount.point == "/" for mount in mounts())


def test_processor_is_the_model_or_the_architecture(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\n\nprocessor\t: 1\nmodel name\t: Another\n"
    assert processor(record(tmp_path / "named", {"proc/cpuinfo": cpuinfo})) == "Some CPU @ 2.0 GHz"
    assert processor(tmp_path / "silent") in (platform.processor(), platform.machine())


def test_free_disk_is_what_an_unprivileged_process_may_fill(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    assert disk_space(tmp_path).total_bytes == space.f_blocks * space.f_frsize
    assert abs(disk_space(tmp_path).free_bytes - space.f_bavail * space.f_frsize) < GIB


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "4"}, 8),
        ({"LOCAL_WORLD_SIZE": "0", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "-3"}, 1),
        ({"LOCAL_WORLD_SIZE": "many"}, 1),
        ({"LOCAL_WORLD_SIZE": ""}, 1),
        ({"LOCAL_WORLD_SIZE": "2.5"}, 1),
        ({"LOCAL_WORLD_SIZE": "²"}, 1),
    ],
)
def test_local_ranks_believes_the_launcher_and_ignores_nonsense(environment: dict[str, str], ranks: int) -> None:
    assert local_ranks(environment) == ranks


@pytest.mark.parametrize(
    ("environment", "nbytes"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "4096"}, 4 * GIB),
        ({"SLURM_MEM_PER_NODE": "4g"}, 4 * GIB),
        ({"SLURM_MEM_PER_NODE": "1048576K"}, GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_NODE": "much"}, None),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "8"}, 8 * GIB),
        ({"SLURM_MEM_PER_CPU": "1024"}, None),
        ({"SLURM_MEM_PER_GPU": "2T", "SLURM_GPUS_ON_NODE": "2"}, 4096 * GIB),
    ],
)
def test_memory_that_slurm_gave_a_job(environment: dict[str, str], nbytes: int | None) -> None:
    assert slurm_memory(environment) == nbytes


def test_nearest_mount_above_a_folder_is_the_last_one_there(tmp_path: Path) -> None:
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/root rw\n",
        "2 1 8:2 / /data rw - xfs /dev/below rw\n",
        "3 2 8:3 / /data rw - ext4 /dev/my\\040disk rw\n",
        "4 2 8:4 / /data/deeper rw - nfs host:/x rw\n",
    ]
    root = record(tmp_path, {"proc/self/mountinfo": "".join(lines)})
    found = {folder: mount_of(Path(folder), root) for folder in ("/data/a", "/data2", "/data/deeper/b")}
    assert [mount.source for mount in found.values()] == ["/dev/my disk", "/dev/root", "host:/x"]
    assert [mount.filesystem for mount in found.values()] == ["ext4", "ext4", "nfs"]
    assert mount_of(Path("/data"), tmp_path / "none").filesystem == ""


def test_what_the_kernel_says_of_pages_and_stalls(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/pressure/memory": "some avg10=1.25 avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00 avg60=0.00\n",
    }
    root = record(tmp_path, files)
    assert (huge_pages(root), memory_stall_percent(root)) == ("madvise", 1.25)
    assert (huge_pages(tmp_path / "none"), memory_stall_percent(tmp_path / "none")) == ("unknown", None)


def stalled(percent: float) -> str:
    return f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"


@pytest.mark.parametrize(
    ("cgroup", "who_says", "percent"),
    [
        ("0::/top/own\n", "sys/fs/cgroup/top/own", 2.5),
        ("0::/top/own\n", "sys/fs/cgroup/top", 2.5),  # where the own group's is turned off
        ("0::/\n", "sys/fs/cgroup", 2.5),  # a container that sees itself as the root
        ("4:memory:/a\n0::/b\n", "sys/fs/cgroup/unified/b", 2.5),  # a hybrid machine
        ("4:memory:/a\n", "sys/fs/cgroup/memory/a", 60.0),  # version 1 has no such file: the machine's counts
        ("0::/other\n", "sys/fs/cgroup/top", 60.0),  # a group beside the own one
    ],
)
def test_stalls_are_those_of_the_nearest_group_that_tells(
    tmp_path: Path, cgroup: str, who_says: str, percent: float
) -> None:
    """A container was taken to be short of memory because its neighbours were."""
    files: dict[str, str | int] = {
        "proc/self/cgroup": cgroup,
        "proc/pressure/memory": stalled(60.0),
        f"{who_says}/memory.pressure": stalled(2.5),
    }
    assert memory_stall_percent(record(tmp_path, files)) == percent


def test_group_that_tells_stalls_and_is_told_limits_keeps_both(tmp_path: Path) -> None:
    files: dict[str, str | int] = {
        "proc/self/cgroup": "0::/a/b\n",
        **group("sys/fs/cgroup/a", usage=3 * GIB, max=4 * GIB),
        "sys/fs/cgroup/a/memory.pressure": stalled(40.0),
        **group("sys/fs/cgroup/a/b", usage=GIB, max="max\n"),
        "sys/fs/cgroup/a/b/memory.pressure": stalled(30.0),
    }
    found = host_memory(record(tmp_path, files))
    assert (found.available_bytes, found.bound_bytes) == (GIB, 4 * GIB)
    assert memory_stall_percent(tmp_path) == 30.0
