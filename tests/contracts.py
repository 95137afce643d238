"""What every device and every tier must do, as test classes that a module subclasses with its own fixture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tierstore.arena import Extent
from tierstore.device import Device
from tierstore.errors import CapacityError
from tierstore.layout import HUGE_PAGE
from tierstore.tiers import MemoryTier, Tier

KIB = 1 << 10
MIB = 1 << 20


def smaps(pid: int, address: int) -> dict[str, str]:
    """The system's own account of the mapping that an address lies in; empty if there is none."""
    fields: dict[str, str] = {}
    is_it = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_it = start <= address < end
        elif is_it:
            name, value = line.split(":", 1)
            fields[name] = value.strip()
    return fields


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    pytest.skip("this system does not tell anonymous memory apart")


class DeviceContract:
    """Subclass with a fixture `device` and, where its memory is not the host's, one `too_much`."""

    @pytest.fixture
    def device(self) -> Iterator[Device]:
        raise NotImplementedError

    @pytest.fixture
    def too_much(self) -> int:
        """More bytes than the device can give."""
        return 1 << 60

    def host(self, *values: int) -> Tensor:
        """A host tensor."""
        return torch.tensor(values, dtype=torch.uint8)

    def test_slab_has_exactly_the_bytes_asked_for(self, device: Device) -> None:
        for nbytes in (4096, 3 * 4096, HUGE_PAGE, HUGE_PAGE + 4096):
            slab = device.allocate(nbytes)
            assert slab.dtype == torch.uint8 and slab.shape == (nbytes,)
            assert slab.device == device.torch_device
            assert slab.untyped_storage().nbytes() == nbytes

    def test_too_large_a_slab_is_a_capacity_error_that_says_what_to_do(self, device: Device, too_much: int) -> None:
        with pytest.raises(CapacityError, match=r"lower tiers\.\w+\.capacity"):
            device.allocate(too_much)

    def test_copy_has_landed_when_its_event_has_come(self, device: Device) -> None:
        stream = device.copy_stream("host-device")
        slab, back = device.allocate(4096), torch.zeros(4096, dtype=torch.uint8)
        source = torch.arange(4096, dtype=torch.int32).to(torch.uint8)
        stream.copy(slab, source)
        stream.copy(back, slab)
        event = stream.record()
        event.wait()
        assert event.query()
        assert torch.equal(back, source)

    def test_copy_behind_an_event_sees_what_was_launched_before_it(self, device: Device) -> None:
        stream = device.copy_stream("device-host")
        slab, back = device.allocate(4096), torch.zeros(4096, dtype=torch.uint8)
        device.launch(lambda: _fill(slab, 3))
        device.launch(lambda: _add(slab, 4))
        stream.wait(device.record())
        stream.copy(back, slab)
        stream.record().wait()
        assert torch.equal(back, torch.full_like(back, 7))

    def test_launched_work_sees_a_copy_whose_event_was_waited_for(self, device: Device) -> None:
        stream = device.copy_stream("host-device")
        slab = device.allocate(4096)
        stream.copy(slab, torch.full((4096,), 5, dtype=torch.uint8))
        stream.record().wait()
        device.launch(lambda: _add(slab, 1))
        device.finish()
        assert torch.equal(slab.cpu(), torch.full((4096,), 6, dtype=torch.uint8))

    def test_launched_work_begins_after_an_event_it_was_told_to_wait_for(self, device: Device) -> None:
        stream = device.copy_stream("host-device")
        slab = device.allocate(4096)
        device.keep(slab)
        stream.copy(slab, torch.full((4096,), 5, dtype=torch.uint8))
        device.wait(stream.record())
        device.launch(lambda: _add(slab, 1))
        device.finish()
        assert torch.equal(slab.cpu(), torch.full((4096,), 6, dtype=torch.uint8))

    def test_event_of_launched_work_comes_after_it(self, device: Device) -> None:
        slab = device.allocate(4096)
        device.launch(lambda: _fill(slab, 9))
        event = device.record()
        event.wait()
        assert event.query()
        assert torch.equal(slab.cpu(), torch.full((4096,), 9, dtype=torch.uint8))

    def test_closing_waits_for_everything_and_the_device_can_be_used_again(self, device: Device) -> None:
        stream = device.copy_stream("device-host")
        slab, back = device.allocate(4096), torch.zeros(4096, dtype=torch.uint8)
        for value in (1, 2):
            device.launch(lambda value=value: _fill(slab, value))
            event = device.record()
            stream.wait(event)
            stream.copy(back, slab)
            device.close()
            device.close()
            assert event.query()
            assert torch.equal(back, torch.full_like(back, value))

    def test_memory_is_counted_in_bytes(self, device: Device) -> None:
        free, total = device.memory_bytes()
        assert 0 < free <= total
        now = device.memory_now()
        assert 0 < now.free_bytes <= now.total_bytes == total
        assert 0 <= now.allocated_bytes <= min(now.reserved_bytes, now.peak_bytes) <= total

    def test_what_is_in_use_is_not_released(self, device: Device) -> None:
        slab = device.allocate(4096)
        device.launch(lambda: _fill(slab, 9))
        before = device.memory_now()
        device.release_unused()
        device.finish()
        assert torch.equal(slab.cpu(), torch.full((4096,), 9, dtype=torch.uint8))
        after = device.memory_now()
        assert (after.allocated_bytes, after.peak_bytes) == (before.allocated_bytes, before.peak_bytes)


def _fill(tensor: Tensor, value: int) -> None:
    tensor.fill_(value)


def _add(tensor: Tensor, value: int) -> None:
    tensor.add_(value)


class TierContract:
    """Subclass with a fixture `tier` of 4 KiB extents, and `reserved_bytes` and `fail_reserving`."""

    EXTENT = 4 * KIB

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        raise NotImplementedError

    def reserved_bytes(self, tier: Tier) -> int:
        """What the backing has reserved, from the backing's own mouth."""
        raise NotImplementedError

    def fail_reserving(self, tier: Tier, slab: int, patch: pytest.MonkeyPatch) -> type[Exception]:
        """Let the nth slab from now (from 1) fail; return the error it fails with."""
        raise NotImplementedError

    def test_grows_to_exactly_the_extents_asked_for(self, tier: Tier) -> None:
        tier.grow(10, slab_extents=4)
        assert tier.arena.slabs == (4, 4, 2)
        assert tier.arena.capacity == tier.arena.free == 10
        assert self.reserved_bytes(tier) == 10 * self.EXTENT
        tier.grow(3, slab_extents=4)
        assert self.reserved_bytes(tier) == 13 * self.EXTENT
        tier.arena.check()

    def test_growing_by_nothing_changes_nothing(self, tier: Tier) -> None:
        tier.grow(0, slab_extents=4)
        assert tier.arena.slabs == ()
        assert self.reserved_bytes(tier) == 0

    def test_shrinks_slab_by_slab_to_nothing(self, tier: Tier) -> None:
        tier.grow(10, slab_extents=4)
        for left in (8, 4, 0):
            assert tier.arena.condemn_last() == frozenset()
            tier.shrink()
            assert tier.arena.capacity == left
            assert self.reserved_bytes(tier) == left * self.EXTENT
        tier.arena.check()

    def test_grows_again_after_shrinking(self, tier: Tier) -> None:
        tier.grow(8, slab_extents=4)
        tier.arena.condemn_last()
        tier.shrink()
        tier.grow(6, slab_extents=4)
        assert tier.arena.slabs == (4, 4, 2)
        assert self.reserved_bytes(tier) == 10 * self.EXTENT

    @pytest.mark.parametrize("slab", [1, 2, 4])
    def test_failing_at_any_slab_leaves_the_size_as_it_was(
        self, tier: Tier, slab: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tier.grow(3, slab_extents=4)
        kept = {tier.arena.take() for _ in range(2)}
        before = tier.arena.slabs, self.reserved_bytes(tier)
        with monkeypatch.context() as patch:
            error = self.fail_reserving(tier, slab, patch)
            with pytest.raises(error):
                tier.grow(16, slab_extents=4)
        assert (tier.arena.slabs, self.reserved_bytes(tier)) == before
        assert all(tier.arena.is_owned(extent) for extent in kept)
        tier.arena.check()
        tier.grow(16, slab_extents=4)  # nothing stands in the way of another try
        assert tier.arena.capacity == 19
        tier.arena.check()

    def test_released_extent_can_be_taken_again(self, tier: Tier) -> None:
        tier.grow(1, slab_extents=1)
        extent = tier.arena.take()
        tier.release(extent)
        assert tier.arena.take() == extent

    def test_closing_gives_everything_back_twice_if_asked_to(self, tier: Tier) -> None:
        tier.grow(5, slab_extents=2)
        tier.close()
        assert self.reserved_bytes(tier) == 0
        tier.close()


class MemoryTierContract(TierContract):
    """Subclass with a fixture `device`; for tiers of memory that can be looked at."""

    @pytest.fixture
    def device(self) -> Device:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, device: Device) -> Iterator[Tier]:
        tier = MemoryTier("memory", device, self.EXTENT)
        yield tier
        tier.close()
        device.close()

    def reserved_bytes(self, tier: Tier) -> int:
        assert isinstance(tier, MemoryTier)
        return sum(slab.untyped_storage().nbytes() for slab in tier._slabs)

    def fail_reserving(self, tier: Tier, slab: int, patch: pytest.MonkeyPatch) -> type[Exception]:
        assert isinstance(tier, MemoryTier)
        allocate, calls = tier.device.allocate, iter(range(1, 100))

        def fail_at(nbytes: int) -> Tensor:
            if next(calls) == slab:
                raise CapacityError("injected")
            return allocate(nbytes)

        patch.setattr(tier.device, "allocate", fail_at)
        return CapacityError

    def test_extents_are_separate_bytes(self, tier: MemoryTier) -> None:
        tier.grow(6, slab_extents=4)
        extents = [tier.arena.take() for _ in range(6)]
        for number, extent in enumerate(extents):
            tier.bytes_at(extent, self.EXTENT).fill_(number)
        for number, extent in enumerate(extents):
            assert torch.all(tier.bytes_at(extent, self.EXTENT) == number)
            assert tier.bytes_at(extent, 100).shape == (100,)

    def test_released_extent_is_discarded(self, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
        tier.grow(2, slab_extents=2)
        discarded: list[Tensor] = []
        monkeypatch.setattr(tier.device, "discard", discarded.append)
        extent = tier.arena.take()
        tier.release(extent)
        (bytes_given_up,) = discarded
        assert bytes_given_up.data_ptr() == tier.bytes_at(extent, 1).data_ptr()
        assert bytes_given_up.numel() == self.EXTENT


class HostMemoryContract(MemoryTierContract):
    """For tiers of this process's own mapped memory."""

    def large(self, device: Device, extents: int = 4) -> tuple[MemoryTier, list[Extent]]:
        """A tier with 2 MiB extents in one slab, all taken."""
        tier = MemoryTier("memory", device, HUGE_PAGE)
        tier.grow(extents, slab_extents=extents)
        return tier, [tier.arena.take() for _ in range(extents)]

    def test_large_extents_lie_on_huge_pages(self, device: Device) -> None:
        tier, extents = self.large(device)
        addresses = [tier.bytes_at(extent, 1).data_ptr() for extent in extents]
        assert [address % HUGE_PAGE for address in addresses] == [0] * 4
        flags = smaps(os.getpid(), addresses[0])["VmFlags"].split()
        assert "hg" in flags  # huge pages advised
        assert "dc" in flags  # not copied by a fork

    def test_small_extents_lie_on_pages(self, device: Device) -> None:
        tier = MemoryTier("memory", device, self.EXTENT)
        tier.grow(5, slab_extents=5)
        flags = smaps(os.getpid(), tier.bytes_at(tier.arena.take(), 1).data_ptr())["VmFlags"].split()
        assert "dc" in flags and "hg" not in flags
        assert all(tier.bytes_at(tier.arena.take(), 1).data_ptr() % 4096 == 0 for _ in range(4))

    def test_slab_takes_no_more_than_was_asked_for(self, device: Device) -> None:
        """A slab that ends within a huge page took all of that page."""
        before = anonymous_bytes()
        tiers = []
        for _ in range(16):
            tiers.append(MemoryTier("memory", device, self.EXTENT))
            tiers[-1].grow(HUGE_PAGE // self.EXTENT + 1, slab_extents=HUGE_PAGE)
            tiers[-1].bytes_at(tiers[-1].arena.take(), self.EXTENT)
            tiers[-1]._slabs[0].fill_(1)
        asked = 16 * (HUGE_PAGE + self.EXTENT)
        assert asked <= anonymous_bytes() - before < asked + 8 * MIB

    def test_what_engines_get_is_the_memory_of_the_extent_as_it_is_now(self, device: Device) -> None:
        """Slabs that are made and given back in turn have the same number, and what was kept of one is not the next."""
        tier = MemoryTier("memory", device, self.EXTENT)
        for value in (1, 2):
            tier.grow(3, slab_extents=3)
            extents = [tier.arena.take() for _ in range(3)]
            memory = [tier.memory_at(extent, 100) for extent in extents]
            for number, extent in enumerate(extents):
                tier.bytes_at(extent, 100).fill_(3 * value + number)
            assert [bytes(one) for one in memory] == [bytes([3 * value + number] * 100) for number in range(3)]
            assert all(tier.memory_at(extent, 100) is one for extent, one in zip(extents, memory, strict=True))
            tier.arena.condemn_last()
            for extent in extents:
                tier.release(extent)
            tier.shrink()

    def test_memory_goes_back_to_the_system_when_the_tier_shrinks_or_closes(self, device: Device) -> None:
        tier = MemoryTier("memory", device, HUGE_PAGE)
        before = anonymous_bytes()
        tier.grow(16, slab_extents=8)
        for slab in tier._slabs:
            slab.fill_(1)
        del slab
        assert anonymous_bytes() - before >= 32 * MIB
        tier.arena.condemn_last()
        tier.shrink()
        assert anonymous_bytes() - before < 20 * MIB
        tier.close()
        assert anonymous_bytes() - before < 4 * MIB

    def test_memory_stays_under_a_tensor_that_outlives_the_tier(self, device: Device) -> None:
        tier, extents = self.large(device)
        kept = tier.bytes_at(extents[1], 100).fill_(7)
        tier.close()
        assert torch.all(kept == 7)
        assert smaps(os.getpid(), kept.data_ptr())
        address = kept.data_ptr()
        del kept
        assert not smaps(os.getpid(), address)

    def test_forked_child_does_not_have_the_memory(self, device: Device) -> None:
        tier, extents = self.large(device)
        address = tier.bytes_at(extents[0], 1).fill_(1).data_ptr()
        assert smaps(os.getpid(), address)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, b"absent" if not smaps(os.getpid(), address) else b"mapped")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        assert os.read(read, 10) == b"absent"
        os.close(read)
