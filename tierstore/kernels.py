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

import torch
from torch import Tensor

from tierstore.errors import InvariantError

TILE_ELEMENTS = 256 * 1024
"""Elements cast and updated at once; a float32 tile with its state fits the last-level cache."""
MIRROR_ELEMENTS = 1024 * 1024
"""Elements brought to the host at once when a parameter lies on an accelerator and is computed on the CPU."""

_SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one parameter's elements: values, gradient, and the fields of its state; 1-D and equally long.

    `step` is the parameter's 0-dim step count, already advanced. `is_new`: the state holds nothing yet.
    """

    parameter: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    master: Tensor | None
    step: Tensor
    is_new: bool

    @property
    def is_plain(self) -> bool:
        """Whether the fused kernel can work on it as it is."""
        tensors = (self.parameter, self.gradient, self.exp_avg)
        return self.master is None and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1

    def cut(self, start: int, length: int) -> Piece:
        """The part of it from `start` on."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.narrow(0, start, length)

        return Piece(
            self.parameter.narrow(0, start, length),
            self.gradient.narrow(0, start, length),
            self.exp_avg.narrow(0, start, length),
            self.exp_avg_sq.narrow(0, start, length),
            part(self.max_exp_avg_sq),
            part(self.master),
            self.step,
            self.is_new,
        )


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


def update(
    pieces: Sequence[Piece], hyper: Hyper, scratch: Scratch, *, check_parameters: bool, grad_scale: Tensor | None = None
) -> None:
    """Apply one AdamW step to pieces that share `hyper`.

    `check_parameters`: where a low-precision parameter is not what its master casts to, it was changed by someone else,
    and is what the step starts from. `grad_scale`: a 1-element tensor that gradients are divided by.
    """
    for piece in pieces:
        if piece.is_new:
            _begin(piece)
    plain = [piece for piece in pieces if piece.is_plain]
    if plain:
        fused_adamw(plain, hyper, grad_scale)
    for piece in pieces:
        if not piece.is_plain:
            _update_by_tiles(piece, hyper, scratch, check_parameters, grad_scale)


def fused_adamw(pieces: Sequence[Piece], hyper: Hyper, grad_scale: Tensor | None = None) -> None:
    """Call torch's fused kernel once for all pieces, which are plain and on one device."""
    device = pieces[0].parameter.device
    steps = [piece.step for piece in pieces]
    if device.type != "cpu":
        steps = list(torch.stack(steps).to(device, non_blocking=True).unbind())
    torch._fused_adamw_(
        [piece.parameter for piece in pieces],
        [piece.gradient for piece in pieces],
        [piece.exp_avg for piece in pieces],
        [piece.exp_avg_sq for piece in pieces],
        [piece.max_exp_avg_sq for piece in pieces if piece.max_exp_avg_sq is not None] if hyper.amsgrad else [],
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


def _begin(piece: Piece) -> None:
    """Make the state of a piece that has none."""
    for moment in (piece.exp_avg, piece.exp_avg_sq, piece.max_exp_avg_sq):
        if moment is not None:
            moment.zero_()
    if piece.master is not None:
        piece.master.copy_(piece.parameter)


def _update_by_tiles(
    piece: Piece, hyper: Hyper, scratch: Scratch, check_parameters: bool, grad_scale: Tensor | None
) -> None:
    is_remote = piece.parameter.device != piece.exp_avg.device
    for start, length in _tiles(piece.parameter.numel(), MIRROR_ELEMENTS if is_remote else TILE_ELEMENTS):
        tile = piece.cut(start, length)
        if is_remote:
            _update_remote(tile, hyper, scratch, check_parameters, grad_scale)
        else:
            _update_tile(tile, hyper, scratch, check_parameters, grad_scale)


def _update_remote(
    tile: Piece, hyper: Hyper, scratch: Scratch, check_parameters: bool, grad_scale: Tensor | None
) -> None:
    """Bring parameter and gradient to where the state is, update there, take the parameter back."""
    device, length = tile.exp_avg.device, tile.parameter.numel()
    values = scratch.get("parameter", tile.parameter.dtype, device, length, MIRROR_ELEMENTS)
    gradient = scratch.get("gradient there", tile.gradient.dtype, device, length, MIRROR_ELEMENTS)
    values.copy_(tile.parameter)
    gradient.copy_(tile.gradient)
    state = (tile.exp_avg, tile.exp_avg_sq, tile.max_exp_avg_sq, tile.master)
    near = Piece(values, gradient, *state, tile.step, is_new=False)
    if near.is_plain:
        fused_adamw([near], hyper, grad_scale)
    else:
        for start, part in _tiles(length, TILE_ELEMENTS):
            _update_tile(near.cut(start, part), hyper, scratch, check_parameters, grad_scale)
    tile.parameter.copy_(values)


def _update_tile(
    tile: Piece, hyper: Hyper, scratch: Scratch, check_parameters: bool, grad_scale: Tensor | None
) -> None:
    """Update one tile in the precision of its state."""
    dtype, device, length = tile.exp_avg.dtype, tile.exp_avg.device, tile.parameter.numel()
    gradient = scratch.get("gradient", dtype, device, length, TILE_ELEMENTS).copy_(tile.gradient)
    master = tile.master
    if master is None:  # the parameter itself, or with `master: none` its value cast up
        if tile.parameter.dtype == dtype:
            master = tile.parameter
        else:
            master = scratch.get("master", dtype, device, length, TILE_ELEMENTS).copy_(tile.parameter)
    elif check_parameters:
        _adopt_changes(tile.parameter, master, scratch)
    state = (tile.exp_avg, tile.exp_avg_sq, tile.max_exp_avg_sq)
    fused_adamw([Piece(master, gradient, *state, None, tile.step, is_new=False)], hyper, grad_scale)
    if master is not tile.parameter:
        tile.parameter.copy_(master)


def _adopt_changes(parameter: Tensor, master: Tensor, scratch: Scratch) -> None:
    """Where the parameter is not its master cast down, bit for bit, let the master be the parameter."""
    cast = scratch.get("cast", parameter.dtype, parameter.device, parameter.numel(), TILE_ELEMENTS).copy_(master)
    integer = _SAME_SIZE_INTEGER[parameter.dtype.itemsize]
    if parameter.device.type == "cpu" and torch.equal(cast.view(integer), parameter.view(integer)):
        return
    changed = cast.view(integer) != parameter.view(integer)
    master.copy_(torch.where(changed, parameter.to(master.dtype), master))


def _tiles(total: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, total, most):
        yield start, min(most, total - start)


@cache
def self_test(dtype: torch.dtype) -> None:
    """Compare one update of a whole tensor with the same one cut into pieces, on the CPU.

    Raises InvariantError if they differ in a bit: then this torch does not allow state to be moved in chunks.
    """
    generator = torch.Generator().manual_seed(0)
    total, cut = 3 * 1024 + 37, 1024
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, amsgrad=True, maximize=False)

    def piece(values: Sequence[Tensor]) -> Piece:
        p, g, m, v, w = values
        return Piece(p, g, m, v, w, None, torch.tensor(3.0), is_new=False)

    whole = [torch.rand(total, generator=generator, dtype=dtype) for _ in range(5)]
    cuts = [tensor.clone() for tensor in whole]
    fused_adamw([piece(whole)], hyper)
    for start in range(0, total, cut):
        fused_adamw([piece([tensor[start : start + cut] for tensor in cuts])], hyper)
    if not all(torch.equal(one, other) for one, other in zip(whole, cuts, strict=True)):
        raise InvariantError(
            f"torch {torch.__version__} updates a tensor of {dtype} to other bits when it is cut at multiples of {cut} "
            f"elements, so its state cannot be moved in chunks without changing numbers"
        )
