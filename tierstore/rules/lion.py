"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore.rules.base import Pieces, Rule


@dataclass(frozen=True, slots=True)
class LionOptions:
    """The options of a group, as numbers."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool


class LionRule(Rule):
    """Each element moves by `lr` in the direction of an interpolated moment's sign; weight decay is decoupled."""

    name = "Lion"
    moments = needed = ("exp_avg",)
    needed_options = ("lr", "betas", "weight_decay")
    counts_steps = False
    sparse_advice = "Lion does not support sparse gradients"

    def options(self, group: Mapping[str, Any]) -> LionOptions:
        """A group's options as numbers."""
        beta1, beta2 = group["betas"]
        return LionOptions(
            float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"]), bool(group["maximize"])
        )

    def update(self, pieces: Pieces, options: LionOptions, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Apply one step to plain pieces."""
        exp_avgs = pieces.moments["exp_avg"]
        gradients = torch._foreach_neg(pieces.gradients) if options.maximize else pieces.gradients
        directions = torch._foreach_lerp(exp_avgs, gradients, 1 - options.beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(pieces.parameters, 1 - options.lr * options.weight_decay)
        torch._foreach_add_(pieces.parameters, directions, alpha=-options.lr)
        torch._foreach_lerp_(exp_avgs, gradients, 1 - options.beta2)
