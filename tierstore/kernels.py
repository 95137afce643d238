"""The update formula on plain 1-D tensors, tile by tile. Knows no chunks, tiers, groups or optimizers.

AdamW (Loshchilov and Hutter, 2019, algorithm 2) as `torch._fused_adamw_` computes it, called with `step` already
advanced. Every tile begins at a multiple of 1,024 elements of its parameter, so that a parameter updated piece by piece
has the bits of one call on the whole. A low-precision parameter is updated through its float32 master: gradient cast
up, fused update, master cast down into the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tierstore.errors import InvariantError

TILE_ELEMENTS = 256 * 1024
"""Elements cast and updated at once; a float32 tile with its state fits the last-level cache."""
MIRROR_ELEMENTS = 1024 * 1024
"""Elements brought to the host at once when a parameter lies on an accelerator and is computed on the CPU."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """The options of a parameter group, as numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool


class Pieces(NamedTuple):
    """Runs of parameters' elements, each 1-D: values, gradients and fields of the state, in lists in one order.

    A list has one dtype and one device. `max_exp_avg_sqs` and `masters` are empty where there are none. `steps` are the
    parameters' 0-dim step counts, already advanced.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    masters: list[Tensor]
    steps: list[Tensor]

    @property
    def is_plain(self) -> bool:
        """Whether the fused kernel can work on them as they are."""
        firsts = (self.parameters[0], self.gradients[0], self.exp_avgs[0])
        return not self.masters and len({(tensor.dtype, tensor.device) for tensor in firsts}) == 1

    def lengths(self) -> list[int]:
        """The number of elements of each."""
        return [parameter.numel() for parameter in self.parameters]

    def take(self, start: int, stop: int) -> Pieces:
        """Those from the one numbered `start` to before `stop`."""
        return Pieces(*(column[start:stop] for column in self))

    def cut(self, number: int, start: int, length: int) -> Pieces:
        """A part of one of them, from its element `start` on."""

        def part(tensors: list[Tensor]) -> list[Tensor]:
            return [tensor.narrow(0, start, length) for tensor in tensors[number : number + 1]]

        return Pieces(
            part(self.parameters),
            part(self.gradients),
            part(self.exp_avgs),
            part(self.exp_avg_sqs),
            part(self.max_exp_avg_sqs),
            part(self.masters),
            self.steps[number : number + 1],
        )

    def tiles(self, most: int) -> Iterator[Pieces]:
        """Cut the long ones and gather the short ones, in order, into tiles of at most `most` elements."""
        first, gathered = 0, 0
        lengths = self.lengths()
        for number, length in enumerate(lengths):
            if gathered + length > most:
                if number > first:
                    yield self.take(first, number)
                first, gathered = number, 0
            if length > most:
                for start in range(0, length, most):
                    yield self.cut(number, start, min(most, length - start))
                first = number + 1
            else:
                gathered += length
        if first < len(lengths):
            yield self.take(first, len(lengths))


class Scratch:
    """Buffers for one tile at a time, made when first needed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, purpose: str, dtype: torch.dtype, device: torch.device, length: int, most: int) -> Tensor:
        """View the first `length` of the buffer for a purpose, which holds `most`."""
        key = (purpose, dtype, device)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(most, dtype=dtype, device=device)
        return self._buffers[key].narrow(0, 0, length)

    def copies(
        self, purpose: str, dtype: torch.dtype, device: torch.device, tensors: list[Tensor], most: int
    ) -> list[Tensor]:
        """Copy 1-D tensors of `most` elements in all."""
        lengths = [tensor.numel() for tensor in tensors]
        copies = list(self.get(purpose, dtype, device, sum(lengths), most).split_with_sizes(lengths))
        torch._foreach_copy_(copies, tensors)
        return copies

    def joined(self, purpose: str, tensors: list[Tensor], most: int) -> Tensor:
        """Copy 1-D tensors of `most` elements in all, one after another; a single one is returned as it is."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        buffer = self.get(purpose, first.dtype, first.device, sum(tensor.numel() for tensor in tensors), most)
        return torch.cat(tensors, out=buffer)


@dataclass(frozen=True, slots=True)
class Manner:
    """How pieces are updated, besides by their group's options.

    `check_parameters`: where a low-precision parameter is not what its master casts to, it was changed by someone else,
    and is what the step starts from. `grad_scale`: a 1-element tensor that gradients are divided by.
    """

    scratch: Scratch
    check_parameters: bool
    grad_scale: Tensor | None


def update(pieces: Pieces, hyper: Hyper, manner: Manner) -> None:
    """Apply one AdamW step to pieces that share `hyper`, no two of them of the same elements."""
    if pieces.is_plain:
        fused_adamw(pieces, hyper, manner.grad_scale)
    elif pieces.parameters[0].device != pieces.exp_avgs[0].device:
        for tile in pieces.tiles(MIRROR_ELEMENTS):
            _update_remote(tile, hyper, manner)
    else:
        for tile in pieces.tiles(TILE_ELEMENTS):
            _update_tile(tile, hyper, manner)


def begin(pieces: Pieces) -> None:
    """Make the state of pieces that have none."""
    for moments in (pieces.exp_avgs, pieces.exp_avg_sqs, pieces.max_exp_avg_sqs):
        if moments:
            torch._foreach_zero_(moments)
    if pieces.masters:
        torch._foreach_copy_(pieces.masters, pieces.parameters)


def fused_adamw(pieces: Pieces, hyper: Hyper, grad_scale: Tensor | None = None) -> None:
    """Call torch's fused kernel once for all pieces, which are plain and on one device."""
    device, steps = pieces.parameters[0].device, pieces.steps
    if device.type != "cpu":
        steps = list(torch.stack(steps).to(device, non_blocking=True).unbind())
    torch._fused_adamw_(
        pieces.parameters,
        pieces.gradients,
        pieces.exp_avgs,
        pieces.exp_avg_sqs,
        pieces.max_exp_avg_sqs if hyper.amsgrad else [],
        steps,
        lr=hyper.lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=hyper.amsgrad,
        maximize=hyper.maximize,
        grad_scale=None if grad_scale is None else grad_scale.to(device),
    )


def _update_remote(tile: Pieces, hyper: Hyper, manner: Manner) -> None:
    """Bring parameters and gradients to where the state is, update there, take the parameters back."""
    device, dtype = tile.exp_avgs[0].device, tile.parameters[0].dtype
    parameters = manner.scratch.copies("parameter", dtype, device, tile.parameters, MIRROR_ELEMENTS)
    gradients = manner.scratch.copies(
        "remote gradient", tile.gradients[0].dtype, device, tile.gradients, MIRROR_ELEMENTS
    )
    update(tile._replace(parameters=parameters, gradients=gradients), hyper, manner)
    torch._foreach_copy_(tile.parameters, parameters)


def _update_tile(tile: Pieces, hyper: Hyper, manner: Manner) -> None:
    """Update one tile in the precision of its state."""
    dtype, device, scratch = tile.exp_avgs[0].dtype, tile.exp_avgs[0].device, manner.scratch
    masters = tile.masters
    if masters and manner.check_parameters:
        _adopt_changes(tile.parameters, masters, scratch)
    elif not masters:  # the parameters themselves, or with `master: none` their values cast up
        masters = tile.parameters
        if masters[0].dtype != dtype:
            masters = scratch.copies("master", dtype, device, masters, TILE_ELEMENTS)
    gradients = scratch.copies("gradient", dtype, device, tile.gradients, TILE_ELEMENTS)
    fused_adamw(tile._replace(parameters=masters, gradients=gradients, masters=[]), hyper, manner.grad_scale)
    if masters is not tile.parameters:
        torch._foreach_copy_(tile.parameters, masters)


def _adopt_changes(parameters: list[Tensor], masters: list[Tensor], scratch: Scratch) -> None:
    """Where a parameter is not its master cast down, bit for bit, let the master be the parameter."""
    now = scratch.joined("now", parameters, TILE_ELEMENTS)
    master = scratch.joined("master", masters, TILE_ELEMENTS)
    cast = scratch.get("cast", now.dtype, now.device, now.numel(), TILE_ELEMENTS).copy_(master)
    if now.device.type == "cpu" and _are_same_bits(now, cast):
        return
    adopted = torch.where(cast.view(torch.int16) != now.view(torch.int16), now.to(master.dtype), master)
    torch._foreach_copy_(masters, adopted.split_with_sizes([master.numel() for master in masters]))


def _are_same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors of 16-bit elements, four at once if they lie so that one can."""
    four_at_once = all(tensor.numel() % 4 == tensor.storage_offset() % 4 == 0 for tensor in (one, other))
    dtype = torch.int64 if four_at_once else torch.int16
    return torch.equal(one.view(dtype), other.view(dtype))


@cache
def self_test(dtype: torch.dtype) -> None:
    """Compare one update of a whole tensor with the same one cut into pieces, on the CPU.

    Raises InvariantError if they differ in a bit: then this torch does not allow state to be moved in chunks.
    """
    generator = torch.Generator().manual_seed(0)
    total, cut = 3 * 1024 + 37, 1024
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, amsgrad=True, maximize=False)

    def pieces(values: Sequence[Tensor]) -> Pieces:
        p, g, m, v, w = values
        return Pieces([p], [g], [m], [v], [w], [], [torch.tensor(3.0)])

    whole = [torch.rand(total, generator=generator, dtype=dtype) for _ in range(5)]
    cuts = [tensor.clone() for tensor in whole]
    fused_adamw(pieces(whole), hyper)
    for start in range(0, total, cut):
        fused_adamw(pieces([tensor[start : start + cut] for tensor in cuts]), hyper)
    if not all(torch.equal(one, other) for one, other in zip(whole, cuts, strict=True)):
        raise InvariantError(
            f"torch {torch.__version__} updates a tensor of {dtype} to other bits when it is cut at multiples of {cut} "
            f"elements, so its state cannot be moved in chunks without changing numbers"
        )
