"""AdamW for bfloat16 parameters in one pass over memory, compiled by numba: the extra `tierstore[numba]`.

Torch has no operation that casts, updates and casts back, so that a tile is read and written by one operation after the
other. What is compiled here does it all at once, with the roundings of torch's fused kernel; before it is used it is
tried against that on this machine, and where a bit differs, or numba is not installed, it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.cores import side_by_side
from tierstore.masters import combine, write_master
from tierstore.rules import Pieces
from tierstore.rules.adam import AdamOptions
from tierstore.scratch import Scratch

BLOCK = 1024
"""Elements worked on at once, by one thread: their values fit the first cache."""
BLOCKS_PER_THREAD = 64
"""Fewer are done before another thread has woken up."""
LEAST_ELEMENTS = 16 * BLOCK
"""Shorter pieces are gathered into tiles, which torch updates."""

_log = logging.getLogger("tierstore.compiled")


@dataclass(frozen=True, slots=True)
class AdamWNumbers:
    """What AdamW is computed with: plain, without amsgrad or maximize; betas[0] above a half."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def at(self, step: float) -> tuple[np.float32, ...]:
        """The factors of one step as torch's fused kernel rounds them."""
        step_size = self.lr / (1 - self.beta1**step)
        correction = (1 - self.beta2**step) ** 0.5
        numbers = 1 - self.lr * self.weight_decay, 1 - self.beta1, self.beta2, 1 - self.beta2, correction, self.eps
        return tuple(np.float32(number) for number in (*numbers, -step_size))


def single_pass(options: object, pieces: Pieces) -> SinglePass | None:
    """The pass with a group's options; None where it would have nothing to do, or there is none with torch's bits.

    What it takes are long pieces of bfloat16 with float32 moments on the CPU. Compiling takes seconds, once.
    """
    if not (pieces.remainders or pieces.masters):
        return None
    firsts = (pieces.parameters[0], pieces.gradients[0])
    is_fit = (
        all(tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" for tensor in firsts)
        and all(tensors[0].dtype == torch.float32 for tensors in pieces.moments.values())
        and any(length >= LEAST_ELEMENTS for length in pieces.lengths())
    )
    is_plain = (
        isinstance(options, AdamOptions)
        and options.arithmetic == "fused"
        and (options.is_decoupled or options.weight_decay == 0)
        and not (options.amsgrad or options.maximize)
        and options.beta1 > 0.5
    )
    if not (is_fit and is_plain) or _onepass() is None:
        return None
    assert isinstance(options, AdamOptions)
    lr, beta1, beta2 = float(options.lr), float(options.beta1), float(options.beta2)
    return SinglePass(AdamWNumbers(lr, beta1, beta2, options.eps, options.weight_decay))


@dataclass(frozen=True, slots=True)
class SinglePass:
    """AdamW's step on pieces that `single_pass` was asked about."""

    numbers: AdamWNumbers

    def update(self, pieces: Pieces, *, check_parameters: bool) -> Iterator[Pieces]:
        """Update the long ones, in whole blocks; yield what is left to do otherwise."""
        start, lengths = 0, pieces.lengths()
        for number, length in enumerate(lengths):
            if length >= LEAST_ELEMENTS:
                if number > start:
                    yield pieces.take(start, number)
                blocks, *rest = pieces.cut(number, length // BLOCK * BLOCK)
                _run(_onepass(), blocks, self.numbers, check_parameters)
                yield from rest
                start = number + 1
        if start < len(lengths):
            yield pieces.take(start, len(lengths))


def why_not_used() -> str:
    """Why updates take one operation after the other on this machine; empty where the pass is used. May compile it."""
    return _found()[1]


def _onepass() -> Any:
    """The compiled loops, or None."""
    return _found()[0]


@cache
def _found() -> tuple[Any, str]:
    """The compiled loops, or None and why. What is optional must not fail a step, whatever is wrong with it."""
    try:
        import tierstore.onepass as onepass

        if _has_torchs_bits(onepass):
            return onepass, ""
        problem = f"numba's code has other bits than torch {torch.__version__}'s kernel here"
    except ModuleNotFoundError as error:
        problem = f"{error.name} is not installed"
    except Exception as error:  # numba refuses a numpy, has nowhere to keep what it compiles, compiles nothing
        problem = f"numba does not work here: {type(error).__name__}: {error}"
        _log.warning("%s: bfloat16 parameters are updated without it", problem)
    return None, problem


def _run(onepass: Any, pieces: Pieces, numbers: AdamWNumbers, check_parameters: bool) -> None:
    moments = (pieces.moments[name][0].numpy() for name in ("exp_avg", "exp_avg_sq"))
    state = pieces.remainders or pieces.masters
    arrays = [
        *(tensors[0].view(torch.int16).numpy() for tensors in (pieces.parameters, pieces.gradients)),
        *moments,
        state[0].numpy(),
        *(tie.numpy() for tie in pieces.ties),
    ]
    function = onepass.update_split if pieces.remainders else onepass.update_whole
    factors, blocks = numbers.at(float(pieces.steps[0])), len(arrays[0]) // BLOCK
    threads = max(1, min(torch.get_num_threads(), blocks // BLOCKS_PER_THREAD))
    ends = [blocks * number // threads * BLOCK for number in range(threads + 1)]

    has_nan: list[bool] = []

    def run(start: int, stop: int) -> None:
        has_nan.append(bool(function(*arrays, start, stop, check_parameters, *factors)))

    side_by_side([partial(run, start, stop) for start, stop in pairwise(ends)])
    if any(has_nan) and pieces.masters:  # as torch casts it
        pieces.parameters[0].copy_(pieces.masters[0])


def _has_torchs_bits(onepass: Any) -> bool:
    """Compare both loops with torch's kernel, with and without decay."""
    return all(_is_as_torchs(onepass, decay, is_split) for is_split in (False, True) for decay in (0.01, 0.0))


def _is_as_torchs(onepass: Any, weight_decay: float, is_split: bool) -> bool:
    """Compare one loop on values of every size; some masters are half way, and without decay stay so."""
    generator = torch.Generator().manual_seed(0)
    length = 2 * LEAST_ELEMENTS

    def values() -> Tensor:
        exponents = torch.randint(-60, 60, (length,), generator=generator).float()
        return torch.randn(length, generator=generator) * torch.pow(2.0, exponents)

    numbers = AdamWNumbers(1e-3, 0.9, 0.999, 1e-8, weight_decay)
    master, gradient, exp_avg, exp_avg_sq = values(), values().bfloat16(), values(), values().abs()
    gradient[::7] = exp_avg[::7] = 0.0
    master.view(torch.int32)[::7] = master.view(torch.int32)[::7] >> 16 << 16 | 0x8000
    remainder, tie = torch.empty(length, dtype=torch.int16), torch.empty(length // 8, dtype=torch.uint8)
    write_master(master, remainder, tie, Scratch())
    step = torch.tensor(3.0)
    found = Pieces(
        [master.bfloat16()],
        [gradient],
        {"exp_avg": [exp_avg.clone()], "exp_avg_sq": [exp_avg_sq.clone()]},
        [] if is_split else [master.clone()],
        [step],
        remainders=[remainder] if is_split else [],
        ties=[tie] if is_split else [],
    )
    _run(onepass, found, numbers, True)
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": weight_decay}
    fused: Any = torch._fused_adamw_
    fused([master], [gradient.float()], [exp_avg], [exp_avg_sq], [], [step], **options, amsgrad=False, maximize=False)
    masters = found.masters or combine(found.parameters, found.remainders, found.ties, Scratch())
    pairs = [
        (masters[0], master),
        (found.moments["exp_avg"][0], exp_avg),
        (found.moments["exp_avg_sq"][0], exp_avg_sq),
    ]
    is_cast = torch.equal(found.parameters[0].view(torch.int16), master.bfloat16().view(torch.int16))
    return is_cast and all(torch.equal(one.view(torch.int32), two.view(torch.int32)) for one, two in pairs)
