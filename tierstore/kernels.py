"""Applies an update rule to plain 1-D tensors, tile by tile. Knows no chunks, tiers, groups or optimizers.

Every tile begins at a multiple of 1,024 elements of its parameter, so that a parameter updated piece by piece has the
bits of one call on the whole. A low-precision parameter is updated through its float32 master: the gradient is cast up,
the master updated, and cast down into the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import InvariantError
from tierstore.layout import CUT_ELEMENTS
from tierstore.rules import Pieces, Rule, step_count

TILE_ELEMENTS = 256 * 1024
"""Elements cast and updated at once; a float32 tile with its state fits the last-level cache."""
MIRROR_ELEMENTS = 1024 * 1024
"""Elements brought to the host at once when a parameter lies on an accelerator and is computed on the CPU."""

Formula = Callable[[Pieces], None]
"""What is done to plain pieces: a rule's update, or one pass of it, with the group's options."""


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
    """How pieces are updated, besides by their formula.

    `check_parameters`: where a low-precision parameter is not what its master casts to, it was changed by someone else,
    and is what the step starts from. `as_whole`: plain pieces are given to the formula uncut.
    """

    scratch: Scratch
    check_parameters: bool
    as_whole: bool


def update(pieces: Pieces, formula: Formula, manner: Manner) -> None:
    """Apply a formula to pieces that share its options, no two of them of the same elements, in their order."""
    if pieces.is_plain and manner.as_whole:
        formula(pieces)
    elif pieces.parameters[0].device != pieces.state_like.device:
        for tile in pieces.tiles(MIRROR_ELEMENTS):
            _update_remote(tile, formula, manner)
    else:
        for tile in pieces.tiles(TILE_ELEMENTS):
            _update_tile(tile, formula, manner)


def begin(pieces: Pieces) -> None:
    """Make the state of pieces that have none."""
    for moments in pieces.moments.values():
        torch._foreach_zero_(moments)
    if pieces.masters:
        torch._foreach_copy_(pieces.masters, pieces.parameters)


def _update_remote(tile: Pieces, formula: Formula, manner: Manner) -> None:
    """Bring parameters and gradients to where the state is, update there, take the parameters back."""
    device, scratch = tile.state_like.device, manner.scratch
    parameters = scratch.copies("parameter", tile.parameters[0].dtype, device, tile.parameters, MIRROR_ELEMENTS)
    gradients = scratch.copies("remote gradient", tile.gradients[0].dtype, device, tile.gradients, MIRROR_ELEMENTS)
    update(tile._replace(parameters=parameters, gradients=gradients), formula, manner)
    torch._foreach_copy_(tile.parameters, parameters)


def _update_tile(tile: Pieces, formula: Formula, manner: Manner) -> None:
    """Update one tile in the precision of its state."""
    like, scratch, masters = tile.state_like, manner.scratch, tile.masters
    if masters and manner.check_parameters:
        _adopt_changes(tile.parameters, masters, scratch)
    elif not masters:  # the parameters themselves, or with `master: none` their values cast up
        masters = tile.parameters
        if masters[0].dtype != like.dtype:
            masters = scratch.copies("master", like.dtype, like.device, masters, TILE_ELEMENTS)
    gradients = tile.gradients
    if (gradients[0].dtype, gradients[0].device) != (like.dtype, like.device):
        gradients = scratch.copies("gradient", like.dtype, like.device, gradients, TILE_ELEMENTS)
    formula(tile._replace(parameters=masters, gradients=gradients, masters=[]))
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


@lru_cache(maxsize=64)
def self_test(rule: Rule, options: Any, dtype: torch.dtype) -> None:
    """Compare one update of a whole tensor with the same one cut into pieces, on the CPU.

    Raises InvariantError if they differ in a bit: then this torch does not allow state to be moved in chunks.
    """
    generator = torch.Generator().manual_seed(0)
    elements = 3 * CUT_ELEMENTS + 37
    values, gradient, *moments = (
        torch.rand(elements, generator=generator, dtype=dtype, device="cpu") for _ in range(2 + len(rule.moments))
    )

    def pieces() -> Pieces:
        fields = {name: [moment.clone()] for name, moment in zip(rule.moments, moments, strict=True)}
        return Pieces([values.clone()], [gradient.clone()], fields, [], [step_count(3.0)])

    whole, cut = pieces(), pieces()
    rule.update_in_cuts([whole], options)
    rule.update_in_cuts(
        [cut.cut(0, at, min(CUT_ELEMENTS, elements - at)) for at in range(0, elements, CUT_ELEMENTS)], options
    )
    results = [
        *zip([whole.parameters, *whole.moments.values()], [cut.parameters, *cut.moments.values()], strict=True),
        *((pieces.gradients, [gradient]) for pieces in (whole, cut)),  # which a rule leaves as they are
    ]
    if not all(torch.allclose(one[0], other[0], rtol=0, atol=0, equal_nan=True) for one, other in results):
        raise InvariantError(
            f"torch {torch.__version__} updates a tensor of {dtype} by {rule.name} to other bits when it is cut at "
            f"multiples of {CUT_ELEMENTS} elements, so its state cannot be moved in chunks without changing numbers"
        )
