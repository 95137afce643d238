"""Every tier passes one contract: exact bytes, all or nothing, and everything given back."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts import HostMemoryContract, TierContract
from tests.fakes import HonestDevice
from tierstore import swapfile
from tierstore.device import Device, HostDevice
from tierstore.errors import StoreClosedError, SwapError
from tierstore.swapfile import SwapFile
from tierstore.tiers import FileTier, Tier

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


class TestMemoryTierOfTheHost(HostMemoryContract):
    @pytest.fixture
    def device(self) -> Device:
        return HostDevice()


class TestMemoryTierOfAnHonestDevice(HostMemoryContract):
    @pytest.fixture
    def device(self) -> Device:
        return HonestDevice(0)

    def test_released_bytes_are_poison_at_once(self, tier: Tier) -> None:
        tier.grow(1, slab_extents=1)
        extent = tier.arena.take()
        view = tier.bytes_at(extent, self.EXTENT).fill_(1)
        tier.release(extent)
        assert (view == 0xFF).all()


class TestFileTier(TierContract):
    FILES = 1

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        folders = [tmp_path / str(number) for number in range(self.FILES)]
        for folder in folders:
            folder.mkdir()
        tier = FileTier("nvme", [SwapFile(folder, direct=None) for folder in folders], self.EXTENT)
        yield tier
        tier.close()

    def reserved_bytes(self, tier: Tier) -> int:
        assert isinstance(tier, FileTier)
        for file in tier.files:
            file.wait_until_cut()
        sizes = [os.fstat(file.fd).st_size for file in tier.files if file.fd >= 0]
        blocks = [os.fstat(file.fd).st_blocks * 512 for file in tier.files if file.fd >= 0]
        assert sum(blocks) >= sum(sizes)  # reserved, not only claimed
        return sum(sizes)

    def fail_reserving(self, tier: Tier, slab: int, patch: pytest.MonkeyPatch) -> type[Exception]:
        reserve, calls = swapfile._reserve, iter(range(1, 100))

        def fail_at(fd: int, offset: int, nbytes: int) -> None:
            reserve(fd, offset, nbytes)
            if next(calls) == slab:
                raise OSError(errno.ENOSPC, "injected")

        patch.setattr(swapfile, "_reserve", fail_at)
        return SwapError

    def test_extents_are_separate_ranges(self, tier: FileTier) -> None:
        tier.grow(11, slab_extents=4)
        ranges = set()
        for _ in range(11):
            extent = tier.arena.take()
            file, offset = tier.range_at(extent)
            assert offset % self.EXTENT == 0 and offset + extent.length <= file.size_bytes
            ranges.add((file.fd, offset))
        assert len(ranges) == 11

    def test_closed_files_reserve_nothing_more(self, tier: FileTier) -> None:
        tier.grow(1, slab_extents=1)
        tier.close()
        with pytest.raises(StoreClosedError):
            tier.grow(1, slab_extents=1)


class TestFileTierOverThreeFolders(TestFileTier):
    FILES = 3

    def test_slabs_are_dealt_out_in_turn(self, tier: FileTier) -> None:
        tier.grow(12, slab_extents=2)
        assert [file.size_bytes for file in tier.files] == [4 * self.EXTENT] * 3

    def test_extents_lie_in_the_file_of_their_path(self, tier: FileTier) -> None:
        tier.grow(12, slab_extents=2)
        assert [tier.range_at(tier.arena.take(path))[0] for path in (2, 0, 1, 1)] == [
            tier.files[n] for n in (2, 0, 1, 1)
        ]

    def test_a_new_slab_goes_where_least_is_reserved(self, tier: FileTier) -> None:
        tier.grow(5, slab_extents=2)
        tier.grow(3, slab_extents=2)
        assert [file.size_bytes // self.EXTENT for file in tier.files] == [3, 2, 3]

    def test_room_moves_from_one_file_to_another_under_what_is_in_use(self, tier: FileTier) -> None:
        tier.grow(12, slab_extents=2)
        kept = [tier.arena.take(path) for path in (0, 0, 2)]
        before = [tier.range_at(extent) for extent in kept]
        tier.grow_on(0, 2)
        tier.arena.condemn(slab := tier.arena.slabs_on(1)[-1])
        tier.shrink_on(slab)
        assert [file.size_bytes // self.EXTENT for file in tier.files] == [6, 2, 4]
        assert [tier.range_at(extent) for extent in kept] == before
        tier.arena.check()
