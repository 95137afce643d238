"""Training over swap folders of different speed: the same bits, more on the fast one, and the sum of the rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import Parameter

from tests.fakes import TokenBucketEngine
from tests.optimizer.cases import KIB, MIB, assert_same_parameters, seeded, train
from tierstore.build import Parts
from tierstore.optimizer import TieredAdamW
from tierstore.stats import PathStats

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "fast", tmp_path / "slow"]
    for folder in folders:
        folder.mkdir()
    return folders


def on_rates(
    parameters: list[Parameter], rates: dict[Path, float], *, chunk: int, cpu: int, request: int, burst: float = 0.02
) -> TieredAdamW:
    """An optimizer whose folders move so many bytes per second; with no `burst` never more, however late threads."""

    def open_engine(*_: Any, **__: Any) -> TokenBucketEngine:
        return TokenBucketEngine(
            {str(folder): rate for folder, rate in rates.items()}, request_size=request, burst=burst
        )

    class OnRates(TieredAdamW):
        parts: ClassVar[Parts] = Parts(open_engine=open_engine)

    tiers = {"cpu": {"capacity": cpu}, "nvme": {"paths": [str(folder) for folder in rates]}}
    return OnRates(parameters, lr=1e-2, policy={"chunk_size": chunk, "tiers": tiers})


def paths_of(optimizer: TieredAdamW) -> list[PathStats]:
    return list(optimizer.store.stats().paths.values())


def test_room_moves_to_the_fast_folder_under_training_and_no_bit_changes(folders: list[Path]) -> None:
    ours, theirs = seeded((65_000,)), seeded((65_000,))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    rates = dict(zip(folders, (200e6, 3e6), strict=True))
    optimizer = on_rates(ours, rates, chunk=16 * KIB, cpu=64 * KIB, request=16 * KIB, burst=0.0)
    for step in range(6):
        train(optimizer, ours, [step])
        train(reference, theirs, [step])
        assert_same_parameters(ours, theirs, step)
        optimizer.store.check()
    fast, slow = paths_of(optimizer)
    assert fast.capacity_bytes > 1.5 * slow.capacity_bytes  # equal at first
    assert fast.share > 0.6 and fast.share + slow.share == pytest.approx(1)
    assert fast.bytes_per_second > 3 * slow.bytes_per_second > 0
    optimizer.close()


@pytest.mark.long
def test_two_folders_reach_the_sum_of_their_rates(folders: list[Path], record_property: Callable[..., None]) -> None:
    """200 and 100 MB/s; in turn, as equals, they would reach 200."""
    ours = seeded((12 << 20,))
    rates = dict(zip(folders, (200e6, 100e6), strict=True))
    optimizer = on_rates(ours, rates, chunk=MIB, cpu=16 * MIB, request=256 * KIB)
    train(optimizer, ours, range(10))
    optimizer.store.wait()
    before, began = sum(one.bytes_read + one.bytes_written for one in paths_of(optimizer)), time.perf_counter()
    for _ in range(8):  # with the gradients there are: making new ones is no work of a disk's
        optimizer.step()
    optimizer.store.wait()
    seconds = time.perf_counter() - began
    moved = sum(one.bytes_read + one.bytes_written for one in paths_of(optimizer)) - before
    record_property("of_the_sum", moved / seconds / 300e6)
    print(f"{moved / seconds / 1e6:.0f} MB/s of 300, shares {[round(one.share, 3) for one in paths_of(optimizer)]}")
    assert moved / seconds >= 0.95 * 300e6
    optimizer.close()
