"""SGD with momentum, dampening and Nesterov's acceleration (Sutskever et al., 2013), as torch computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from tierstore.rules.base import Pieces, Rule, arithmetic_of, as_number, unscaled


@dataclass(frozen=True, slots=True)
class SGDOptions:
    """The options of a group, as numbers."""

    arithmetic: str
    lr: float | Tensor  # the for-loop rounds a Tensor as it is
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool


class SGDRule(Rule):
    """SGD; without momentum it keeps nothing. At a parameter's first step the buffer becomes the whole gradient."""

    name = "SGD"
    moments = ("momentum_buffer",)
    needed = ()
    needed_options = ("lr", "momentum", "dampening", "weight_decay")
    counts_steps = False
    sparse_advice = "TieredSGD does not support sparse gradients, use torch.optim.SGD for these parameters"

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The buffer, if there is momentum."""
        return self.moments if group["momentum"] != 0 else ()

    def options(self, group: Mapping[str, Any]) -> SGDOptions:
        """A group's options as numbers."""
        arithmetic = arithmetic_of(group)
        return SGDOptions(
            arithmetic,
            as_number(group["lr"], arithmetic),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )

    def is_one_pass(self, options: SGDOptions) -> bool:
        """The fused kernel is."""
        return options.arithmetic == "fused"

    def begins_moments(self, options: SGDOptions) -> bool:
        """Not without momentum."""
        return options.momentum != 0

    def update(self, pieces: Pieces, options: SGDOptions, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Apply one step to plain pieces."""
        buffers = pieces.moments["momentum_buffer"] if options.momentum != 0 else []
        numbers = {
            "weight_decay": options.weight_decay,
            "momentum": options.momentum,
            "lr": options.lr,
            "dampening": options.dampening,
            "nesterov": options.nesterov,
            "maximize": options.maximize,
        }
        if options.arithmetic == "fused":
            scale = None if grad_scale is None else grad_scale.to(pieces.parameters[0].device)
            fused: Any = torch._fused_sgd_
            given = _as_the_kernel_needs(pieces.parameters, pieces.gradients, buffers)
            fused(*given, **numbers, is_first_step=is_first, grad_scale=scale)
            if given[0] is not pieces.parameters:
                torch._foreach_copy_(pieces.parameters, given[0])
                torch._foreach_copy_(buffers, given[2])
            return
        before: list[Any] = list(buffers) if buffers and not is_first else [None] * len(pieces.parameters)
        formula: Any = sgd
        gradients = unscaled(pieces.gradients, grad_scale)
        if options.nesterov and gradients is pieces.gradients:
            gradients = [gradient.clone() for gradient in gradients]  # torch's foreach adds the buffers to them
        formula(pieces.parameters, gradients, before, **numbers, foreach=options.arithmetic == "foreach", fused=False)
        if buffers and is_first:
            torch._foreach_copy_(buffers, before)


def _as_the_kernel_needs(*lists: list[Tensor]) -> tuple[list[Tensor], ...]:
    """Cast low precision up: torch's fused CPU kernel ends each run of bfloat16 buffers with whatever is in memory."""
    first = lists[0][0]
    if first.device.type != "cpu" or first.dtype not in (torch.bfloat16, torch.float16) or not lists[-1]:
        return lists
    return tuple([tensor.to(torch.float32) for tensor in tensors] for tensors in lists)
