"""The work that every peer does: parameters, gradients and AdamW's settings, the same to the bit in every process.

Parameters are drawn from a seed; gradients are one drawn matrix, rolled by another distance for every layer, so that a
process can make any of them at once without holding them all. The reference is torch's fused AdamW on a float32 master
of each whole parameter, then a cast: what a result is compared with, and how far it is off, is decided here alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
STATE_BYTES = {"bfloat16": 12, "float32": 8}
"""Of state that AdamW keeps for one parameter: two moments, and a float32 master for one of lower precision."""


@dataclass(frozen=True, slots=True)
class Work:
    """`layers` square matrices of `width` x `width` elements of `dtype` on `device`."""

    layers: int
    width: int
    dtype: str = "bfloat16"
    device: str = "cpu"

    @classmethod
    def of(cls, parameters: int, width: int, dtype: str, device: str) -> Self:
        """Answer the least number of layers that have `parameters` elements together."""
        return cls(math.ceil(parameters / width**2), width, dtype, device)

    @property
    def numel(self) -> int:
        """How many parameters all layers have."""
        return self.layers * self.width**2

    @property
    def state_bytes(self) -> int:
        """Of the state of all of them, as AdamW keeps it."""
        return self.numel * STATE_BYTES[self.dtype]

    @property
    def given_bytes(self) -> int:
        """Of host memory that one copy of all parameters and gradients takes."""
        return 2 * self.numel * getattr(torch, self.dtype).itemsize if self.device == "cpu" else 0

    @property
    def has_master(self) -> bool:
        """Whether a parameter is a rounded copy of a float32 master."""
        return self.dtype != "float32"

    def weight(self, layer: int) -> Tensor:
        """Draw what layer `layer` starts with, shape (width, width)."""
        return self._drawn(1 + layer, 0.02)

    def gradients(self) -> Gradients:
        """Draw the matrix all gradients come from."""
        return Gradients(self._drawn(0, 0.1))

    def to_dict(self) -> dict[str, Any]:
        """Answer the fields, for a job and for the record."""
        return asdict(self)

    def _drawn(self, seed: int, deviation: float) -> Tensor:
        drawn = torch.randn(self.width, self.width, generator=torch.Generator().manual_seed(seed)) * deviation
        return drawn.to(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of all layers, the same in every step."""

    base: Tensor

    def of(self, layer: int) -> Tensor:
        """Make the gradient of one layer, shape (width, width); never the same memory twice."""
        return torch.roll(self.base.flatten(), 1009 * (layer + 1)).view_as(self.base)


def zero_with_gradient(weight: Tensor, gradients: Gradients, layer: int) -> Tensor:
    """Answer a zero whose backward gives `weight` exactly the gradient of layer `layer`: a loss for who needs one."""
    zero: Tensor = _Given.apply(weight, gradients, layer)  # type: ignore[no-untyped-call]
    return zero


class _Given(torch.autograd.Function):
    """Zero, whose gradient for the weight is the one given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: Gradients, layer: int) -> Tensor:
        """Answer zero."""
        ctx.gradient = gradients, layer
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _above: Tensor) -> Any:
        """Answer the layer's gradient, whatever the loss."""
        gradients, layer = ctx.gradient
        return gradients.of(layer), None, None


def fused_adamw(parameter: Tensor, gradient: Tensor, fields: dict[str, Tensor], step: int) -> None:
    """Update one whole parameter by torch's fused kernel: step `step`, the first is 1.

    `fields` has exp_avg, exp_avg_sq and, for a parameter of lower precision, master: float32, of the parameter's shape.
    """
    target = fields.get("master", parameter)
    torch._fused_adamw_(
        [target.detach()],
        [gradient.to(target.dtype)],
        [fields["exp_avg"]],
        [fields["exp_avg_sq"]],
        [],
        [torch.tensor(float(step), device=target.device)],
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        weight_decay=WEIGHT_DECAY,
        eps=EPS,
        amsgrad=False,
        maximize=False,
    )
    if target is not parameter:
        parameter.detach().copy_(target)


def fresh_fields(parameter: Tensor, has_master: bool) -> dict[str, Tensor]:
    """Make the state of a parameter before its first step."""
    zeros = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    return ({"master": parameter.detach().float()} if has_master else {}) | zeros


def reference_weights(work: Work, steps: Collection[int]) -> dict[int, list[Tensor]]:
    """Compute every layer's weight after each of the numbers of steps, one layer after the other."""
    gradients = work.gradients()
    weights: dict[int, list[Tensor]] = {count: [] for count in steps}
    for layer in range(work.layers):
        weight, gradient = work.weight(layer), gradients.of(layer)
        fields = fresh_fields(weight, work.has_master)
        for step in range(1, max(steps, default=0) + 1):
            fused_adamw(weight, gradient, fields, step)
            if step in weights:
                weights[step].append(weight.cpu().clone())
    return weights


def compare(found: Iterable[Tensor], wanted: Iterable[Tensor], work: Work) -> dict[str, float]:
    """Say how far weights are from the reference.

    `differing` is the share of elements with other bits. `drift` is the largest distance beyond one unit in the last
    place, which the cast of equal masters may add, over the largest change that training made: below 1e-2 it is the
    same training.
    """
    differing, furthest, changed = 0, 0.0, 0.0
    for layer, (one, other) in enumerate(zip(found, wanted, strict=True)):
        one = one.detach().cpu()
        bits = {2: torch.int16, 4: torch.int32}[other.element_size()]
        if torch.equal(one.view(bits), other.view(bits)):
            continue
        differing += int((one.view(bits) != other.view(bits)).sum())
        beyond = (one.float() - other.float()).abs() - torch.finfo(other.dtype).eps * other.float().abs()
        furthest = max(furthest, float(beyond.max()))
        changed = max(changed, float((other.float() - work.weight(layer).cpu().float()).abs().max()))
    drift = furthest / max(changed, LR)
    return {"differing": differing / work.numel, "drift": drift}
