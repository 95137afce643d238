"""The split master: every float32 comes back to the bit from its bfloat16, 16 more bits and now and then a tie bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tierstore import masters as of_module
from tierstore.masters import combine, keep, read_master, write_master
from tierstore.scratch import Scratch

HALF_WAY = -0x8000


class Kept:
    """What is left of float32 values: bfloat16 parameters, and what a record has besides."""

    def __init__(self, masters: list[Tensor]) -> None:
        device = masters[0].device
        self.parameters = [master.bfloat16() for master in masters]
        self.remainders = [torch.zeros(len(master), dtype=torch.int16, device=device) for master in masters]
        self.ties = [torch.full((-(-len(m) // 8),), 0xFF, dtype=torch.uint8, device=device) for m in masters]
        keep(masters, self.remainders, self.ties, Scratch())

    def combined(self) -> list[Tensor]:
        return combine(self.parameters, self.remainders, self.ties, Scratch())


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def assert_come_back(masters: list[Tensor]) -> None:
    for master, combined in zip(masters, Kept(masters).combined(), strict=True):
        is_nan = master.isnan()
        assert torch.equal(combined.isnan(), is_nan)
        assert torch.equal(combined.view(torch.int32)[~is_nan], master.view(torch.int32)[~is_nan])


def sampled_patterns(device: str = "cpu") -> Tensor:
    """Every high half with the low halves at which something changes, infinities and NaN among them."""
    high = torch.arange(-0x8000, 0x8000, device=device) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], device=device)
    return from_bits((high.unsqueeze(1) | low).view(-1))


def test_every_kind_of_float32_comes_back_to_the_bit() -> None:
    assert_come_back([sampled_patterns()])


@pytest.mark.long
def test_every_float32_comes_back_to_the_bit() -> None:
    for start in range(-(1 << 31), 1 << 31, 1 << 22):
        assert_come_back([from_bits(torch.arange(start, start + (1 << 22)))])


def test_pieces_that_end_amid_a_byte_come_back_to_the_bit() -> None:
    masters = sampled_patterns()[torch.randperm(65536 * 6, generator=torch.Generator().manual_seed(0))][:6000]
    masters[::3] = from_bits((masters[::3].view(torch.int32) & ~0xFFFF) | 0x8000)  # a third of them half way
    assert_come_back(list(masters.split_with_sizes([1, 7, 8, 9, 1023, 1024, 3000, 17, 911])))


def test_only_values_half_way_need_a_tie_bit() -> None:
    """Whatever is in the bits of the others: fresh records have none, and old ones those of values long gone."""
    kept = Kept([sampled_patterns()])
    (before,) = (combined.clone() for combined in kept.combined())
    is_half_way = packed(kept.remainders[0] == HALF_WAY)
    kept.ties[0].bitwise_xor_(~is_half_way)
    (after,) = kept.combined()
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))
    kept.ties[0].bitwise_xor_(is_half_way)
    (wrong,) = kept.combined()
    assert not torch.equal(before.view(torch.int32), wrong.view(torch.int32))


def packed(flags: Tensor) -> Tensor:
    """Bools as bits, the first in the lowest."""
    return torch.from_numpy(np.packbits(flags.cpu().numpy(), bitorder="little"))


@pytest.mark.parametrize("remainder", [-0x8000, -1, 1, 0x7FFF])
def test_no_nan_arises_from_an_overwritten_parameter(remainder: int) -> None:
    """0 with a negative remainder, or infinity with a positive one, would be the pattern of a NaN."""
    every = torch.arange(-0x8000, 0x8000, dtype=torch.int16).view(torch.bfloat16)
    tie = torch.zeros(len(every) // 8, dtype=torch.uint8)
    (master,) = combine([every], [torch.full((len(every),), remainder, dtype=torch.int16)], [tie], Scratch())
    assert torch.equal(master.isnan(), every.isnan())
    is_number = ~every.isnan()
    unit = every.float().abs().nextafter(torch.tensor(torch.inf)).clamp(min=2**-126) * 2**-7
    assert torch.all((master - every.float()).abs()[is_number & every.isfinite()] <= unit[is_number & every.isfinite()])


@pytest.mark.parametrize("lengths", [[6000], [1, 7, 8, 9, 1024, 4951], [5999, 1]])
def test_what_accelerators_do_to_all_ties_is_what_the_cpu_does_to_those_that_count(lengths: list[int]) -> None:
    bits = sampled_patterns().view(torch.int32)[:6000].clone()
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    kept = Kept(list(bits.view(torch.float32).split_with_sizes(lengths)))
    ties = [torch.zeros_like(tie) for tie in kept.ties]
    of_module._keep_ties_everywhere(list(bits.split_with_sizes(lengths)), ties, Scratch())
    for one, other, remainder in zip(ties, kept.ties, kept.remainders, strict=True):
        is_half_way = packed(remainder == HALF_WAY)
        assert torch.equal(one & is_half_way, other & is_half_way)
        found, wanted = (torch.zeros(len(remainder), dtype=torch.int32) for _ in range(2))
        of_module._add_ties_everywhere(found, remainder, [one], Scratch())
        of_module._add_ties_where_they_are(wanted, remainder, [other], Scratch())
        assert torch.equal(found, wanted)
    assert sum(int(tie.sum()) for tie in ties) > 0


def test_a_master_longer_than_a_tile_is_read_and_written_tile_by_tile() -> None:
    masters = torch.randn(600_003, generator=torch.Generator().manual_seed(0))
    masters[::1000] = from_bits((masters[::1000].view(torch.int32) & ~0xFFFF) | 0x8000)
    remainder, tie = torch.empty(len(masters), dtype=torch.int16), torch.empty(75_001, dtype=torch.uint8)
    write_master(masters, remainder, tie, Scratch())
    found = torch.empty_like(masters)
    read_master(masters.bfloat16(), remainder, tie, found, Scratch())
    assert torch.equal(found, masters)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_an_accelerator_combines_and_keeps_as_the_cpu_does() -> None:
    on_device = sampled_patterns("cuda")
    assert_come_back(list(on_device.split_with_sizes([1, 7, 65536, 65536 * 5 - 8])))
    numbers = on_device[~on_device.isnan()]
    there, here = Kept([numbers]), Kept([numbers.cpu()])
    is_half_way = packed(here.remainders[0] == HALF_WAY)
    assert torch.equal(there.remainders[0].cpu(), here.remainders[0])
    assert torch.equal(there.ties[0].cpu() & is_half_way, here.ties[0] & is_half_way)
