"""The split master: a float32 whose high half is a bfloat16 parameter and whose low half is in the record. Lossless.

A parameter is its master rounded to the nearest, ties to even, so that the master's bits are those of the parameter and
16 zeros, plus the low 16 bits as a signed `remainder`; only where that is -32768, half way, it must be told whether the
parameter was rounded down, by one `tie` bit. Elsewhere tie bits mean nothing. Somebody who overwrites a parameter
leaves it a stale remainder, half a unit of bfloat16 at most, which is dropped where it would make a NaN of a number.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tierstore.layout import Field
from tierstore.scratch import GRAIN_ELEMENTS, Scratch

REMAINDER = Field("remainder", torch.int16)
TIE = Field("tie", torch.uint8, bits=1)
HALF_WAY = -0x8000


def combine(parameters: list[Tensor], remainders: list[Tensor], ties: list[Tensor], scratch: Scratch) -> list[Tensor]:
    """Make float32 masters of 1-D bfloat16 tensors, int16 remainders and packed tie bits (uint8), all on one device.

    The masters lie one after another in one buffer of `scratch`, and are valid until the next ones are made.
    """
    remainder = scratch.joined("remainder", remainders)
    device, length = remainder.device, remainder.numel()
    masters = scratch.copies("master", torch.float32, device, parameters)
    master, bits = (scratch.get("master", dtype, device, length) for dtype in (torch.float32, torch.int32))
    wide = scratch.get("wide", torch.int32, device, length).copy_(remainder)
    bits.add_(wide)
    if device.type == "cpu":
        places = _half_ways(remainder)
        if places.size:
            byte, bit = _bits_of(places, remainders)
            tied = (scratch.joined("tie", ties).numpy()[byte] >> bit) & 1
            bits.numpy()[places] += tied.astype(np.int32) << 16
        if bool(master.sum().isnan()):
            _drop_false_nans(masters, parameters)
    else:
        is_tied = torch.cat([_unpacked(tie, tensor.numel()) for tie, tensor in zip(ties, remainders, strict=True)])
        wide.copy_((remainder == HALF_WAY) & is_tied)
        bits.add_(wide, alpha=1 << 16)
        _drop_false_nans(masters, parameters)
    return masters


def keep(masters: list[Tensor], remainders: list[Tensor], ties: list[Tensor], scratch: Scratch) -> None:
    """Write remainders and tie bits of float32 masters; the parameters must become the masters rounded."""
    bits = [master.view(torch.int32) for master in masters]
    torch._foreach_copy_(remainders, bits)  # the low 16 bits
    if remainders[0].device.type == "cpu":
        places = _half_ways(scratch.joined("remainder", remainders))
        if places.size:
            byte, bit = _bits_of(places, remainders)
            high = (scratch.joined("bits", bits).numpy()[places] >> 16).astype(np.uint8)
            packed = scratch.joined("tie", ties)
            packed.numpy()[byte] = 0
            np.bitwise_or.at(packed.numpy(), byte, (~high & 1) << bit)
            if len(ties) > 1:
                torch._foreach_copy_(ties, list(packed.split_with_sizes([tie.numel() for tie in ties])))
    else:
        torch._foreach_copy_(ties, [_packed((one >> 16) & 1 == 0) for one in bits])


def read_master(parameter: Tensor, remainder: Tensor, tie: Tensor, into: Tensor, scratch: Scratch) -> None:
    """Write the float32 master of one span into a 1-D CPU tensor."""
    for start in range(0, into.numel(), GRAIN_ELEMENTS):
        stop = min(into.numel(), start + GRAIN_ELEMENTS)
        high = parameter[start:stop].to(device=remainder.device, dtype=torch.bfloat16)
        combined = combine([high], [remainder[start:stop]], [tie[start // 8 : -(-stop // 8)]], scratch)
        into[start:stop].copy_(combined[0])


def write_master(master: Tensor, remainder: Tensor, tie: Tensor, scratch: Scratch) -> None:
    """Keep what of a 1-D tensor of values, cast to float32, is not in the parameter; on any device."""
    for start in range(0, master.numel(), GRAIN_ELEMENTS):
        stop = min(master.numel(), start + GRAIN_ELEMENTS)
        values = master[start:stop].to(device=remainder.device, dtype=torch.float32)
        keep([values], [remainder[start:stop]], [tie[start // 8 : -(-stop // 8)]], scratch)


def _half_ways(remainder: Tensor) -> np.ndarray:
    """Where the remainders of a CPU tensor are half way: a few elements in a million, as a rule."""
    return np.flatnonzero(remainder.numpy() == HALF_WAY)


def _bits_of(places: np.ndarray, remainders: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Byte and bit, in the joined tie bits, of elements of the joined remainders; each tensor's begin with a byte."""
    if len(remainders) > 1:
        lengths = np.array([tensor.numel() for tensor in remainders])
        ends, bit_ends = np.cumsum(lengths), np.cumsum(-(-lengths // 8) * 8)
        number = np.searchsorted(ends, places, side="right")
        places = places - (ends - lengths)[number] + (bit_ends - -(-lengths // 8) * 8)[number]
    return places >> 3, (places & 7).astype(np.uint8)


def _drop_false_nans(masters: list[Tensor], parameters: list[Tensor]) -> None:
    """Where a master is NaN and its parameter is not, let the master be the parameter: it was overwritten."""
    for master, parameter in zip(masters, parameters, strict=True):
        is_false = master.isnan() & ~parameter.isnan()
        torch.where(is_false, parameter.to(torch.float32), master, out=master)


def _unpacked(tie: Tensor, length: int) -> Tensor:
    """Tie bits as bools, least significant bit of each byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=tie.device)
    return ((tie.unsqueeze(1) >> shifts) & 1).view(-1)[:length].bool()


def _packed(is_tied: Tensor) -> Tensor:
    """Bools as tie bits."""
    padded = torch.nn.functional.pad(is_tied, (0, -is_tied.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=is_tied.device)
    return (padded.to(torch.uint8) << shifts).sum(1).to(torch.uint8)
