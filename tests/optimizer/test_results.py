"""Memory of what is handed out: state read and saved takes no more of it than is granted, and no disk for long."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.cases import (
    KIB,
    MIB,
    seeded,
    small_policy,
    train,
)
from tests.processes import run_script
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


def test_state_beyond_the_grant_is_returned_as_mappings_of_an_unnamed_file(tmp_path: Path) -> None:
    """Invariant 6 and CASES 24: 48 MiB of state come out of a 1 MiB cpu tier, and are saved, in a few MiB of memory."""
    printed = run_script(
        """
        import os, torch
        from tierstore.optimizer import TieredAdamW

        def anonymous_kib():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

        parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(6)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        policy = {"chunk_size": "128KiB", "tiers": {"cpu": {"capacity": "1MiB"}, "nvme": {"paths": [folder]}}}
        optimizer = TieredAdamW(parameters, policy=policy)
        optimizer.step()
        optimizer.state_dict()
        torch.save({"warm": torch.zeros(10)}, folder + "/warm")
        before = anonymous_kib()
        saved = optimizer.state_dict()
        tensors = [value for fields in saved["state"].values() for name, value in fields.items() if name != "step"]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len(storages) == len(tensors) == 12
        assert all(tensor.untyped_storage().nbytes() == tensor.numel() * 4 for tensor in tensors)
        torch.save(saved, folder + "/saved")
        print(anonymous_kib() - before, os.path.getsize(folder + "/saved") >> 20)
        for _ in range(2):
            optimizer.step()
        assert all(float(tensor.view(-1)[5]) == float(tensors[0].view(-1)[5]) for tensor in tensors[::2])
        loaded = torch.load(folder + "/saved", weights_only=True, mmap=True)
        assert all(torch.equal(loaded["state"][k][n], v) for k, f in saved["state"].items() for n, v in f.items())
        """,
        tmp_path,
    )
    grown_kib, file_mib = map(int, printed.split())
    assert grown_kib < 12 * KIB and file_mib >= 48
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "warm"]


@pytest.mark.parametrize(
    "tiers",
    [
        {"cpu": {"capacity": "1GiB"}},
        pytest.param({"cpu": {}}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
    ],
    ids=["large", "auto", "none"],
)
def test_results_take_no_second_cpu_tier_of_memory(tiers: dict[str, Any], tmp_path: Path) -> None:
    """Invariant 6: the cpu tier's capacity is what the user can spare, so a checkpoint must not take it once more.

    96 MiB of state, saved whole or read field by field: with 1 GiB of cpu tier all of it would come on top.
    """
    printed = run_script(
        f"""
        import torch
        from tierstore.optimizer import TieredAdamW

        def anonymous_kib():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

        parameters = [torch.nn.Parameter(torch.zeros(1 << 20)) for _ in range(12)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        tiers = {{**{tiers!r}, "nvme": {{"paths": [folder]}}}}
        optimizer = TieredAdamW(parameters, policy={{"chunk_size": "1MiB", "tiers": tiers}})
        optimizer.step()
        float(optimizer.state[parameters[0]]["exp_avg"][0])
        optimizer.store.wait()
        before = anonymous_kib()
        saved = optimizer.state_dict()
        print(anonymous_kib() - before)
        del saved
        read = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        print(anonymous_kib() - before)
        """,
        tmp_path,
    )
    saving_kib, reading_kib = map(int, printed.split())
    assert saving_kib < 8 * KIB  # known to be more than the grant, so all of it is mapped
    assert 32 * KIB < reading_kib < 72 * KIB  # the grant, then mappings


def test_results_file_takes_no_more_disk_than_the_state(tmp_path: Path) -> None:
    parameters = seeded((70_000,))
    policy = small_policy(tmp_path)
    optimizer = TieredAdamW(parameters, policy=policy)
    train(optimizer, parameters, [0])
    optimizer.store.wait()
    saved = optimizer.state_dict()
    assert 0 < _mapped_bytes(tmp_path) <= 2 * MIB
    del saved
    assert _mapped_bytes(tmp_path) == 0


def test_results_are_spread_over_all_swap_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    parameters = seeded(*[(200_000,)] * 6)
    policy = {
        "chunk_size": "64KiB",
        "tiers": {"cpu": {"capacity": "512KiB"}, "nvme": {"paths": list(map(str, folders))}},
    }
    with TieredAdamW(parameters, policy=policy) as optimizer:
        train(optimizer, parameters, [0])
        saved = optimizer.state_dict()
        assert all(_mapped_bytes(folder) > 2 * MIB for folder in folders)
        assert float(saved["state"][5]["exp_avg"][-1]) == float(optimizer.state[parameters[5]]["exp_avg"][-1])


def test_a_copy_of_an_optimizer_waits_for_its_tiers_in_a_file(tmp_path: Path) -> None:
    """State larger than memory is copied without a moment in which all of it is there."""
    parameters = seeded((70_000,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path))
    train(optimizer, parameters, [0])
    copies, twin = copy.deepcopy((parameters, optimizer))
    assert _mapped_bytes(tmp_path) >= 2 * 4 * 70_000
    for params, one in ((parameters, optimizer), (copies, twin)):
        train(one, params, [1])
    assert _mapped_bytes(tmp_path) == 0
    assert torch.equal(parameters[0], copies[0])
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], twin.state[copies[0]]["exp_avg"])


def _mapped_bytes(folder: Path) -> int:
    """Bytes of files in the folder, unnamed ones too, that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if f"{folder}/" in line and "tierstore" not in line.rsplit("/", 1)[-1]:
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            total += last - first
    return total
