"""The split master: a float32 whose high half is a bfloat16 parameter and whose low half is in the record. Lossless.

A parameter is its master rounded to the nearest, ties to even, so that the master's bits are those of the parameter and
16 zeros, plus the low 16 bits as a signed `remainder`; only where that is -32768, half way, it must be told whether the
parameter was rounded down, by one `tie` bit. Elsewhere tie bits mean nothing. Somebody who overwrites a parameter
leaves it a stale remainder, half a unit of bfloat16 at most, which is dropped where it would make a NaN of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from tierstore.layout import Field
from tierstore.scratch import GRAIN_ELEMENTS, Scratch

REMAINDER = Field("remainder", torch.int16)
TIE = Field("tie", torch.uint8, bits=1)
HALF_WAY = -0x8000
_Places = np.ndarray[tuple[int], np.dtype[np.intp]]


def combine(parameters: list[Tensor], remainders: list[Tensor], ties: list[Tensor], scratch: Scratch) -> list[Tensor]:
    """Make float32 masters of 1-D bfloat16 tensors, int16 remainders and packed tie bits (uint8), all on one device.

    The masters lie in one buffer of `scratch`, and are valid until the next ones are made.
    """
    device = remainders[0].device
    master, masters = scratch.padded("master", torch.float32, device, parameters)
    bits = scratch.get("master", torch.int32, device, len(master))
    torch._foreach_copy_(masters, parameters)
    remainder = _joined(remainders, scratch)
    if device.type == "cpu":
        np.add(bits.numpy(), remainder.numpy(), out=bits.numpy())  # without a wide copy of the remainder
        _add_ties_where_they_are(bits, remainder, ties, scratch)
    else:
        bits.add_(remainder)
        _add_ties_everywhere(bits, remainder, ties, scratch)
    if device.type != "cpu" or math.isnan(master.sum().item()):
        high, parts = scratch.padded("high", torch.float32, device, parameters)
        torch._foreach_copy_(parts, parameters)
        torch.where(master.isnan() & ~high.isnan(), high, master, out=master)  # the parameter was overwritten
    return masters


def keep(masters: list[Tensor], remainders: list[Tensor], ties: list[Tensor], scratch: Scratch) -> None:
    """Write remainders and tie bits of float32 masters; the parameters must become the masters rounded."""
    bits = [master.view(torch.int32) for master in masters]
    torch._foreach_copy_(remainders, bits)  # the low 16 bits
    if remainders[0].device.type == "cpu":
        _keep_ties_where_they_are(bits, remainders, ties, scratch)
    else:
        _keep_ties_everywhere(bits, ties, scratch)


def read_master(parameter: Tensor, remainder: Tensor, tie: Tensor, into: Tensor, scratch: Scratch) -> None:
    """Write the float32 master of one span into a 1-D CPU tensor."""
    for start, master in master_in_parts(parameter, remainder, tie, scratch):
        into[start : start + len(master)].copy_(master)


def master_in_parts(
    parameter: Tensor, remainder: Tensor, tie: Tensor, scratch: Scratch
) -> Iterator[tuple[int, Tensor]]:
    """The float32 master of one span, part by part: where each begins, and values that are valid until the next."""
    for start in range(0, remainder.numel(), GRAIN_ELEMENTS):
        stop = min(remainder.numel(), start + GRAIN_ELEMENTS)
        high = parameter[start:stop].to(device=remainder.device, dtype=torch.bfloat16)
        yield start, combine([high], [remainder[start:stop]], [tie[start // 8 : -(-stop // 8)]], scratch)[0]


def write_master(master: Tensor, remainder: Tensor, tie: Tensor, scratch: Scratch) -> None:
    """Keep what of a 1-D tensor of values, cast to float32, is not in the parameter; on any device."""
    for start in range(0, master.numel(), GRAIN_ELEMENTS):
        stop = min(master.numel(), start + GRAIN_ELEMENTS)
        values = master[start:stop].to(device=remainder.device, dtype=torch.float32)
        keep([values], [remainder[start:stop]], [tie[start // 8 : -(-stop // 8)]], scratch)


def _joined(tensors: list[Tensor], scratch: Scratch, purpose: str = "remainder") -> Tensor:
    """Tensors in one, as `Scratch.padded` has it; a single one is returned as it is."""
    if len(tensors) == 1:
        return tensors[0]
    whole, parts = scratch.padded(purpose, tensors[0].dtype, tensors[0].device, tensors)
    torch._foreach_copy_(parts, tensors)
    return whole


# On the CPU by looking for the few that need a tie bit, one in 65,536 as a rule; on an accelerator, which would have to
# wait for what is found, by working on all.


def _half_way(remainder: Tensor, scratch: Scratch) -> _Places:
    """Where remainders are half way, ascending."""
    is_half_way = scratch.get("half way", torch.bool, remainder.device, len(remainder)).numpy()
    places: _Places = np.flatnonzero(np.equal(remainder.numpy(), HALF_WAY, out=is_half_way))
    return places


def _add_ties_where_they_are(bits: Tensor, remainder: Tensor, ties: list[Tensor], scratch: Scratch) -> None:
    places = _half_way(remainder, scratch)
    if places.size:
        is_tied = (scratch.joined("tie", ties).numpy()[places >> 3] >> (places & 7).astype(np.uint8)) & 1
        bits.numpy()[places] += is_tied.astype(np.int32) << 16


def _keep_ties_where_they_are(
    bits: list[Tensor], remainders: list[Tensor], ties: list[Tensor], scratch: Scratch
) -> None:
    places = _half_way(_joined(remainders, scratch), scratch)
    if places.size:
        high = (_joined(bits, scratch, "bits").numpy()[places] >> 16).astype(np.uint8)
        tie = scratch.joined("tie", ties)
        byte = places >> 3
        tie.numpy()[byte] = 0
        np.bitwise_or.at(tie.numpy(), byte, (~high & 1) << (places & 7).astype(np.uint8))
        if len(ties) > 1:
            torch._foreach_copy_(ties, list(tie.split_with_sizes([one.numel() for one in ties])))


def _add_ties_everywhere(bits: Tensor, remainder: Tensor, ties: list[Tensor], scratch: Scratch) -> None:
    tie = scratch.joined("tie", ties)
    shifts = torch.arange(8, dtype=torch.uint8, device=tie.device)
    is_tied = ((tie.unsqueeze(1) >> shifts) & 1).view(-1)[: len(bits)]
    bits.add_((is_tied * (remainder == HALF_WAY)).to(torch.int32), alpha=1 << 16)


def _keep_ties_everywhere(bits: list[Tensor], ties: list[Tensor], scratch: Scratch) -> None:
    is_down = (_joined(bits, scratch, "bits") >> 16) & 1 == 0
    shifts = torch.arange(8, dtype=torch.uint8, device=is_down.device)
    eights = torch.nn.functional.pad(is_down, (0, -len(is_down) % 8)).view(-1, 8).to(torch.uint8)
    packed = (eights << shifts).sum(1, dtype=torch.uint8)
    torch._foreach_copy_(ties, list(packed.split_with_sizes([tie.numel() for tie in ties])))
