"""Each rank has tiers of its own: capacities are per rank, shares are divided, swap files in one folder never meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integration.ranks import Ranks
from tests.integration.test_fsdp2 import sharded
from tests.integration.tiny import CHUNK_BYTES, OPTIONS, TinyModel, assert_same_bits, fused, policy, tiered, train
from tierstore import TieredAdamW
from tierstore.errors import DiskFullError
from tierstore.folders import disk_margin
from tierstore.pressure import disk_space, host_memory

MIB = 1 << 20


def _capacities(folder: Path) -> dict[str, int]:
    with tiered(sharded().parameters(), folder, "gpu-cpu-nvme") as optimizer:
        return {name: tier.capacity_bytes for name, tier in optimizer.store.stats().tiers.items()}


def test_a_capacity_is_each_ranks_own(two_ranks: Ranks, tmp_path: Path) -> None:
    """As many bytes on each, though the second rank has less state."""
    one, other = two_ranks.run(_capacities, tmp_path)
    assert one == other == {"gpu": 3 * CHUNK_BYTES, "cpu": 3 * CHUNK_BYTES, "nvme": MIB}


def _with_ranks(ranks: int, settings: dict[str, Any]) -> int:
    """Bytes of the cpu tier when the launcher tells of so many ranks."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        with TieredAdamW(sharded().parameters(), policy=settings) as optimizer:
            return optimizer.store.stats().tiers["cpu"].capacity_bytes
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE")
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


def _share(folder: Path, ranks: int) -> tuple[int, int]:
    settings = policy("cpu-nvme", folder)
    settings["tiers"]["cpu"]["capacity"] = "0.1%"
    memory = host_memory()
    return _with_ranks(ranks, settings), memory.limit_bytes or memory.total_bytes


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_share_is_divided_by_the_ranks_of_this_machine(two_ranks: Ranks, tmp_path: Path, ranks: int) -> None:
    for capacity, total in two_ranks.run(_share, tmp_path, ranks):
        assert capacity == int(total * 0.001) // ranks // CHUNK_BYTES * CHUNK_BYTES


def _auto(folder: Path) -> tuple[int, int]:
    """What `auto` takes for one rank, and for so many that half of the memory is 8 chunks for each."""
    settings = policy("cpu-nvme", folder)
    settings["tiers"]["cpu"]["capacity"] = "auto"
    many = host_memory().available_bytes // 2 // (8 * CHUNK_BYTES)
    return _with_ranks(1, settings) // CHUNK_BYTES, _with_ranks(many, settings) // CHUNK_BYTES


def test_auto_takes_a_ranks_part_of_the_memory(two_ranks: Ranks, tmp_path: Path) -> None:
    for alone, crowded in two_ranks.run(_auto, tmp_path):
        assert 4 <= crowded <= 12 < alone


def _swap_files(folder: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """What is seen in the folder, and device and inode of this process's swap files."""
    model = TinyModel()
    with tiered(model.parameters(), folder) as optimizer:
        train(model, optimizer, range(2))
        dist.barrier()
        files = [os.stat(f"/proc/self/fd/{fd}") for fd in _descriptors_in(folder)]
        assert all(status.st_nlink == 0 and status.st_mode & 0o777 == 0o600 for status in files)
        seen = os.listdir(folder)
        dist.barrier()
        return seen, [(status.st_dev, status.st_ino) for status in files]


def _descriptors_in(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the listing's own
            continue
        if target.startswith(str(folder)):
            found.append(fd)
    return found


def test_swap_files_of_two_ranks_in_one_folder_are_two_and_have_no_name(two_ranks: Ranks, tmp_path: Path) -> None:
    (seen, one), (_, other) = two_ranks.run(_swap_files, tmp_path)
    assert seen == []
    assert one and other and not set(one) & set(other)


# -- one small disk for two ranks ---------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A filesystem of as many bytes as the test says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


ELEMENTS = 400_000
STATE_BYTES = 8 * ELEMENTS


def _train_weight(optimizer: torch.optim.Optimizer, weight: nn.Parameter, *numbers: int) -> None:
    for number in numbers:
        weight.grad = torch.full_like(weight, 0.1 + number)
        optimizer.step()


def _train_at_once(folder: Path) -> tuple[str, int]:
    """Reserve in the first step as the other rank does; return the error, if any, and what was free then."""
    weight, reference = (nn.Parameter(torch.linspace(-1, 1, ELEMENTS)) for _ in range(2))
    theirs = fused([reference])
    tiers = {"cpu": {"capacity": 3 * CHUNK_BYTES}, "nvme": {"paths": [str(folder)]}}
    story = ""
    with TieredAdamW([weight], **OPTIONS, policy={"chunk_size": CHUNK_BYTES, "tiers": tiers}) as optimizer:
        dist.barrier()
        try:
            _train_weight(optimizer, weight, 0, 1)
            _train_weight(theirs, reference, 0, 1)
        except DiskFullError as error:
            story = str(error)
        dist.barrier()
        free = disk_space(folder).free_bytes
        if not story:  # state that lies there is still right
            _train_weight(optimizer, weight, 2)
            _train_weight(theirs, reference, 2)
        assert_same_bits(weight.detach(), reference.detach())
    dist.barrier()
    return story, free


@pytest.mark.parametrize("disk", [int(1.6 * STATE_BYTES), int(2.02 * STATE_BYTES), 3 * STATE_BYTES], indirect=True)
def test_ranks_that_reserve_at_once_leave_the_disk_its_margin(two_ranks: Ranks, disk: Path) -> None:
    space = disk_space(disk)
    margin = disk_margin(space.total_bytes)
    outcomes = two_ranks.run(_train_at_once, disk)
    refused = [story for story, _ in outcomes if story]
    assert all("tiers.nvme.capacity" in story for story in refused)
    assert bool(refused) == (space.free_bytes - margin < 2 * STATE_BYTES)
    assert all(free >= margin for _, free in outcomes)
    assert disk_space(disk).free_bytes == space.free_bytes


# -- a real launcher ----------------------------------------------------------------------------------------------

_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from tierstore import TieredAdamW
from tierstore.pressure import host_memory

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
settings = {"chunk_size": 16384, "tiers": {"cpu": {"capacity": "0.1%"}, "nvme": {"paths": [sys.argv[1]]}}}
with TieredAdamW(model.parameters(), policy=settings) as optimizer:
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = host_memory()
    told = [optimizer.store.stats().tiers["cpu"].capacity_bytes, memory.limit_bytes or memory.total_bytes]
with open(f"{sys.argv[1]}/told-{dist.get_rank()}", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""


@pytest.mark.integration
def test_torchrun_tells_how_many_ranks_share_the_machine(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, str(script), str(tmp_path)], check=True, timeout=120, capture_output=True)
    for rank in range(2):
        capacity, total = json.loads((tmp_path / f"told-{rank}").read_text())
        assert capacity == int(total * 0.001) // 2 // CHUNK_BYTES * CHUNK_BYTES
