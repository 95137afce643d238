"""The optimizers: torch's signatures and algorithms, each with one rule of `rules`, and their state in tiers.

`TieredAdamW` says what all of them take besides torch's arguments, what they raise, and when they reserve anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.rules.adam import AdamRule, AdamWRule
from tierstore.rules.lamb import LAMBRule
from tierstore.rules.lion import LionRule
from tierstore.rules.sgd import SGDRule
from tierstore.tiered import PolicyLike, TieredOptimizer


class TieredAdamW(TieredOptimizer, torch.optim.AdamW):
    """AdamW with its state on the GPU, in pinned host memory and in NVMe swap files.

    The arguments are torch.optim.AdamW's, in its order, then, by keyword only:

    policy: a TierPolicy, a mapping, or the path of a YAML file. None: all tiers, sized by themselves.
    tiers: names of the tiers to use, from the policy or with defaults, e.g. `["cpu", "nvme"]`.

    A parameter group may carry `tier`, the tier its state lives in. The numbers are those of torch's fused AdamW for
    float32 parameters to the last bit, wherever the state lies; with `foreach=True` those of torch's foreach formula,
    with `fused=False` of its for-loop, which are slower. bfloat16 and float16 parameters are updated through a float32
    master. Raises what torch.optim.AdamW raises, PolicyError for a wrong policy, CapacityError, SwapError or
    DiskFullError if its tiers cannot hold the state, RuntimeError for `capturable` and `differentiable`. Memory and
    files are reserved at the first step, load or use of `store`, and given back by `close()`.
    """

    rule = AdamWRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: PolicyLike = None,
        tiers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            policy=policy,
            tiers=tiers,
        )


class TieredAdam(TieredOptimizer, torch.optim.Adam):
    """Adam with weight decay in the gradient (L2), as torch.optim.Adam; `policy` and `tiers` as for TieredAdamW."""

    rule = AdamRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        policy: PolicyLike = None,
        tiers: Sequence[str] | None = None,
    ) -> None:
        newer = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}  # torch 2.6 does not have it
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            policy=policy,
            tiers=tiers,
            **newer,
        )


class TieredSGD(TieredOptimizer, torch.optim.SGD):
    """SGD with momentum, dampening and Nesterov, as torch.optim.SGD; `policy` and `tiers` as for TieredAdamW."""

    rule = SGDRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: PolicyLike = None,
        tiers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
            policy=policy,
            tiers=tiers,
        )


class TieredLion(TieredOptimizer):
    """Lion (Chen et al., 2023), a third of AdamW's state; `policy` and `tiers` as for TieredAdamW."""

    rule = LionRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        policy: PolicyLike = None,
        tiers: Sequence[str] | None = None,
    ) -> None:
        _check(lr=lr, betas=betas, weight_decay=weight_decay)
        options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, policy=policy, tiers=tiers)


class TieredLAMB(TieredOptimizer):
    """LAMB (You et al., 2020), for large batches; `policy` and `tiers` as for TieredAdamW.

    The trust ratio's norms are over whole parameters, so that chunks of a parameter that is cut move twice in a step.
    A parameter that is sharded over ranks is refused.
    """

    rule = LAMBRule()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        policy: PolicyLike = None,
        tiers: Sequence[str] | None = None,
    ) -> None:
        _check(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, options, policy=policy, tiers=tiers)


def _check(*, lr: float | Tensor, betas: tuple[Any, Any], weight_decay: float, eps: float = 0.0) -> None:
    """Refuse options that no rule can work with, NaN among them, in the words of torch's optimizers."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if len(betas) != 2:
        raise ValueError(f"betas must be a pair, not {betas}")
    for number, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {number}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
