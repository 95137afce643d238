"""LAMB (You et al., 2020, "Large Batch Optimization for Deep Learning", algorithm 2), with phi the identity.

A parameter moves along d = r + weight_decay * x, where r is Adam's direction, scaled by the trust ratio |x| / |d|,
which is 1 where either norm is 0. Both norms are over the whole parameter, in float64, from sums over blocks that are
the same however the parameter is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.rules.base import NormedRule, Pieces, block_sums


@dataclass(frozen=True, slots=True)
class LAMBOptions:
    """The options of a group, as numbers."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


class LAMBRule(NormedRule):
    """Adam's direction in steps as long as the parameter's norm asks for."""

    name = "LAMB"
    moments = needed = ("exp_avg", "exp_avg_sq")
    needed_options = ("lr", "betas", "eps", "weight_decay")
    sparse_advice = "LAMB does not support sparse gradients"

    def options(self, group: Mapping[str, Any]) -> LAMBOptions:
        """A group's options as numbers."""
        beta1, beta2 = group["betas"]
        return LAMBOptions(
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )

    def measure(self, pieces: Pieces, options: LAMBOptions) -> list[Tensor]:
        """Advance both moments; return the sums for |x| and |d|."""
        gradients = torch._foreach_neg(pieces.gradients) if options.maximize else pieces.gradients
        torch._foreach_lerp_(pieces.moments["exp_avg"], gradients, 1 - options.beta1)
        torch._foreach_mul_(pieces.moments["exp_avg_sq"], options.beta2)
        torch._foreach_addcmul_(pieces.moments["exp_avg_sq"], gradients, gradients, 1 - options.beta2)
        pairs = zip(pieces.parameters, _directions(pieces, options), strict=True)
        return [torch.stack([block_sums(x), block_sums(direction)], dim=1) for x, direction in pairs]

    def scale(self, sums: Tensor, options: LAMBOptions) -> Tensor:
        """The trust ratio."""
        of_parameter, of_direction = sums.sum(0).sqrt().unbind()
        ratio = of_parameter / of_direction
        return torch.where((of_parameter > 0) & (of_direction > 0), ratio, torch.ones_like(ratio))

    def apply(self, pieces: Pieces, options: LAMBOptions) -> None:
        """Move each parameter against its direction by lr times its trust ratio."""
        for x, direction, scale in zip(pieces.parameters, _directions(pieces, options), pieces.scales, strict=True):
            x.sub_(direction.mul_((scale * options.lr).to(x.dtype)))


def _directions(pieces: Pieces, options: LAMBOptions) -> list[Tensor]:
    """d of each piece, from bias-corrected moments."""
    steps = [step.item() for step in pieces.steps]
    directions = torch._foreach_div(pieces.moments["exp_avg_sq"], [1 - options.beta2**step for step in steps])
    torch._foreach_sqrt_(directions)
    torch._foreach_add_(directions, options.eps)
    corrected = torch._foreach_div(pieces.moments["exp_avg"], [1 - options.beta1**step for step in steps])
    torch._foreach_div_(corrected, directions)
    torch._foreach_add_(corrected, pieces.parameters, alpha=options.weight_decay)
    return list(corrected)
