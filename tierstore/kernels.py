"""Applies an update rule to plain 1-D tensors, tile by tile. Knows no chunks, tiers, groups or optimizers.

Every tile begins at a multiple of 1,024 elements of its parameter, so that a parameter updated piece by piece has the
bits of one call on the whole. A low-precision parameter is updated through its float32 master: the gradient is cast up,
the master updated, and cast down into the parameter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tierstore.compiled import SinglePass
from tierstore.cores import shared_by, side_by_side
from tierstore.errors import InvariantError
from tierstore.layout import CUT_ELEMENTS, round_up
from tierstore.masters import combine, keep
from tierstore.rules import Pieces, Rule, step_count
from tierstore.scratch import GRAIN_ELEMENTS, Scratch

TILE_ELEMENTS = GRAIN_ELEMENTS
"""Elements cast and updated at once on the CPU; a float32 tile with its state fits the last-level cache."""
SHARED_ELEMENTS = 4 * TILE_ELEMENTS
"""Elements of a tile where each core has its own: in smaller ones threads wait longer for Python's lock than they gain
by what is still in a core's own cache.
"""
LEAST_SHARED_ELEMENTS = TILE_ELEMENTS // 2
"""Elements for each core below which the others are not woken up."""
PASS_ELEMENTS = 8 * 1024 * 1024
"""Elements updated at once on an accelerator: most chunks in one pass, with what is cast no larger than they are."""
MIRROR_ELEMENTS = 1024 * 1024
"""Elements brought to the host at once when a parameter lies on an accelerator and is computed on the CPU."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Given to a formula in tiles even so: it may have to cast them up."""

Formula = Callable[[Pieces], None]
"""What is done to plain pieces: a rule's update, or one pass of it, with the group's options."""


class Manner(NamedTuple):
    """How pieces are updated, besides by their formula.

    `check_parameters`: where a low-precision parameter is not what its master casts to, it was changed by someone else,
    and is what the step starts from. `as_whole`: plain pieces are given to the formula uncut. `single_pass`: what does
    the same as the formula to some pieces, in one pass over memory. `in_any_order`: the formula may be applied to tiles
    in any order, and to several at once.
    """

    scratch: Scratch
    check_parameters: bool
    as_whole: bool
    single_pass: SinglePass | None = None
    in_any_order: bool = False


def update(pieces: Pieces, formula: Formula, manner: Manner) -> None:
    """Apply a formula to pieces that share its options, no two of them of the same elements, in their order."""
    dtype, device = pieces.precision
    if pieces.is_plain and manner.as_whole and not (dtype in LOW_PRECISION and _are_flat(pieces)):
        formula(pieces)
    elif pieces.parameters[0].device != device:
        for tile in pieces.tiles(MIRROR_ELEMENTS):
            _update_remote(tile, formula, manner)
    elif device.type != "cpu":
        for tile in pieces.tiles(PASS_ELEMENTS):
            _update_tile(tile, dtype, device, formula, manner)
    else:
        check, single = manner.check_parameters, manner.single_pass
        for left in [pieces] if single is None else single.update(pieces, check_parameters=check):
            _update_tiles(left, dtype, device, formula, manner)


def _update_tiles(pieces: Pieces, dtype: torch.dtype, device: torch.device, formula: Formula, manner: Manner) -> None:
    """Update pieces on the CPU; tiles on one core each where it may be, as a tile has many short operations, and all
    cores would have to wait for each other in every one of them.
    """
    elements = sum(pieces.lengths())
    threads = shared_by(elements // LEAST_SHARED_ELEMENTS) if manner.in_any_order else 1
    if threads == 1:
        for tile in pieces.tiles(TILE_ELEMENTS):
            _update_tile(tile, dtype, device, formula, manner)
        return
    tiles = threads * -(-elements // (threads * SHARED_ELEMENTS))  # as many for each
    most = round_up(-(-elements // tiles), CUT_ELEMENTS)
    left = iter(list(pieces.tiles(most)))  # whoever is done with one takes the next; `next` of a list is one operation

    def take_turns(scratch: Scratch) -> None:
        own = manner._replace(scratch=scratch)
        for tile in left:
            _update_tile(tile, dtype, device, formula, own)

    side_by_side([partial(take_turns, scratch) for scratch in manner.scratch.of_threads(threads)])


def _are_flat(pieces: Pieces) -> bool:
    """Whether all parameters are 1-D, so that they can be cut."""
    return all(parameter.dim() == 1 for parameter in pieces.parameters)


def begin(pieces: Pieces) -> None:
    """Make the state of pieces that have none."""
    for moments in pieces.moments.values():
        torch._foreach_zero_(moments)
    if pieces.masters:
        torch._foreach_copy_(pieces.masters, pieces.parameters)
    if pieces.remainders:
        torch._foreach_zero_(pieces.remainders)


def _update_remote(tile: Pieces, formula: Formula, manner: Manner) -> None:
    """Bring parameters and gradients to where the state is, update there, take the parameters back."""
    (_, device), scratch = tile.precision, manner.scratch
    parameters = scratch.copies("parameter", tile.parameters[0].dtype, device, tile.parameters)
    gradients = scratch.copies("remote gradient", tile.gradients[0].dtype, device, tile.gradients)
    update(tile._replace(parameters=parameters, gradients=gradients), formula, manner)
    torch._foreach_copy_(tile.parameters, parameters)


def _update_tile(tile: Pieces, dtype: torch.dtype, device: torch.device, formula: Formula, manner: Manner) -> None:
    """Update one tile in the precision of its state."""
    scratch, gradients, moments = manner.scratch, tile.gradients, tile.moments
    values = _values_of(tile, dtype, manner)
    if gradients[0].dtype != dtype or gradients[0].device != device:
        gradients = scratch.copies("gradient", dtype, device, gradients)
    if is_cast := any(tensors[0].dtype != dtype for tensors in moments.values()):
        moments = {name: scratch.copies(name, dtype, device, tensors) for name, tensors in moments.items()}
    formula(Pieces(values, gradients, moments, [], tile.steps, tile.scales))
    if values is not tile.parameters:
        torch._foreach_copy_(tile.parameters, values)
    if tile.remainders:
        keep(values, tile.remainders, tile.ties, scratch)
    if is_cast:
        for name, tensors in tile.moments.items():
            torch._foreach_copy_(tensors, moments[name])


def _values_of(tile: Pieces, dtype: torch.dtype, manner: Manner) -> list[Tensor]:
    """What the formula changes: masters, or the parameters themselves, or with `master: none` their values cast up."""
    if tile.remainders:
        return combine(tile.parameters, tile.remainders, tile.ties, manner.scratch)
    if tile.masters:
        if manner.check_parameters:
            _adopt_changes(tile.parameters, tile.masters, manner.scratch)
        return tile.masters
    first = tile.parameters[0]
    if first.dtype == dtype:
        return tile.parameters
    return manner.scratch.copies("master", dtype, first.device, tile.parameters)


def _adopt_changes(parameters: list[Tensor], of_record: list[Tensor], scratch: Scratch) -> None:
    """Where a parameter is not its master cast down, bit for bit, let the master be the parameter."""
    now = scratch.joined("now", parameters)
    master = scratch.joined("master", of_record)
    cast = scratch.get("cast", now.dtype, now.device, now.numel()).copy_(master)
    if now.device.type == "cpu" and _are_same_bytes(now, cast):
        return
    adopted = torch.where(cast.view(torch.int16) != now.view(torch.int16), now.to(master.dtype), master)
    torch._foreach_copy_(of_record, adopted.split_with_sizes([tensor.numel() for tensor in of_record]))


def _are_same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare the bytes of two dense tensors on the CPU, in a fifth of the time of `torch.equal`."""
    compare = _memory_compare()
    if compare is None:
        return torch.equal(one.view(torch.int16), other.view(torch.int16))
    return compare(one.data_ptr(), other.data_ptr(), one.nbytes) == 0


@cache
def _memory_compare() -> Callable[[int, int, int], int] | None:
    """C's `memcmp`, for addresses and a number of bytes; None where a process cannot look it up in itself."""
    try:
        compare = ctypes.CDLL(None).memcmp
    except (TypeError, OSError, AttributeError):
        return None
    compare.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    return compare


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
    rule.update_in_cuts(list(cut.cut(0, CUT_ELEMENTS)), options)
    results = [
        *zip([whole.parameters, *whole.moments.values()], [cut.parameters, *cut.moments.values()], strict=True),
        *((pieces.gradients, [gradient]) for pieces in (whole, cut)),  # which a rule leaves as they are
    ]
    if not all(torch.allclose(one[0], other[0], rtol=0, atol=0, equal_nan=True) for one, other in results):
        raise InvariantError(
            f"torch {torch.__version__} updates a tensor of {dtype} by {rule.name} to other bits when it is cut at "
            f"multiples of {CUT_ELEMENTS} elements, so its state cannot be moved in chunks without changing numbers"
        )
