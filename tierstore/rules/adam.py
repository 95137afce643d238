"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019, algorithm 2), as torch computes them.

The fused kernel (`torch._fused_adam_`, `torch._fused_adamw_`) is called with `step` already advanced; torch's foreach
and for-loop formulas, which a group may ask for and which round differently, advance a copy of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from tierstore.rules.base import Pieces, Rule, arithmetic_of, as_number, on_device, unscaled


@dataclass(frozen=True, slots=True)
class AdamOptions:
    """The options of a group, as numbers."""

    arithmetic: str
    is_decoupled: bool
    lr: float | Tensor  # the for-loop rounds Tensors as they are
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool


class AdamRule(Rule):
    """Adam, with weight decay as a part of the gradient unless the group's `decoupled_weight_decay` says otherwise."""

    name = "Adam"
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    needed = ("exp_avg", "exp_avg_sq")
    needed_options = ("lr", "betas", "eps", "weight_decay")
    sparse_advice = "Adam does not support sparse gradients, please consider SparseAdam instead"

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Two, and the largest second moment so far with amsgrad."""
        return self.moments if group.get("amsgrad") else self.needed

    def options(self, group: Mapping[str, Any]) -> AdamOptions:
        """A group's options as numbers."""
        arithmetic, (beta1, beta2) = arithmetic_of(group), group["betas"]
        return AdamOptions(
            arithmetic,
            self.is_decoupled(group),
            as_number(group["lr"], arithmetic),
            as_number(beta1, arithmetic),
            as_number(beta2, arithmetic),
            float(group["eps"]),
            float(group["weight_decay"]),
            amsgrad=bool(group["amsgrad"]),
            maximize=bool(group["maximize"]),
        )

    def is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Whether weight decay stays out of the moments."""
        return bool(group.get("decoupled_weight_decay"))

    def is_one_pass(self, options: AdamOptions) -> bool:
        """The fused kernel is."""
        return options.arithmetic == "fused"

    def counts_turns(self, options: AdamOptions) -> bool:
        """torch's for-loop does."""
        return options.arithmetic == "for-loop"

    def update(self, pieces: Pieces, options: AdamOptions, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Apply one step to plain pieces."""
        exp_avgs, exp_avg_sqs = pieces.moments["exp_avg"], pieces.moments["exp_avg_sq"]
        largest = pieces.moments["max_exp_avg_sq"] if options.amsgrad else []
        numbers = {
            "lr": options.lr,
            "beta1": options.beta1,
            "beta2": options.beta2,
            "weight_decay": options.weight_decay,
            "eps": options.eps,
            "amsgrad": options.amsgrad,
            "maximize": options.maximize,
        }
        lists = (pieces.parameters, pieces.gradients, exp_avgs, exp_avg_sqs, largest)
        if options.arithmetic == "fused":
            device = pieces.parameters[0].device
            fused: Any = torch._fused_adamw_ if options.is_decoupled else torch._fused_adam_
            scale = None if grad_scale is None else grad_scale.to(device)
            fused(*lists, on_device(pieces.steps, device), **numbers, grad_scale=scale)
        else:
            formula: Any = adamw if options.is_decoupled else adam
            before = [step - 1 for step in pieces.steps]
            lists = (pieces.parameters, unscaled(pieces.gradients, grad_scale), exp_avgs, exp_avg_sqs, largest)
            formula(*lists, before, **numbers, foreach=options.arithmetic == "foreach", fused=False)


class AdamWRule(AdamRule):
    """AdamW: weight decay is decoupled whatever a group says."""

    name = "AdamW"

    def is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Always."""
        return True
