"""What a plan is asked for, apart from the policy: parameters as an optimizer sees them, and what is known better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tierstore.forecast.parameters import ForecastError, ModelLike, parameters_of
from tierstore.forecast.speeds import Given
from tierstore.members import Member, survey
from tierstore.optimizer import TieredAdamW
from tierstore.rules import NormedRule, Rule
from tierstore.tiered import TieredOptimizer


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that an answer depends on, apart from the policy."""

    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Member]
    kind: type[TieredOptimizer]
    given: Given
    ranks: int | None
    calibrate: bool
    tbw: int | None
    compute_seconds: float

    @property
    def covered(self) -> list[Member]:
        """The parameters that have room for state."""
        return [member for member in self.members if member.is_covered]

    @property
    def rule(self) -> Rule:
        """How parameters are updated."""
        return self.kind.rule


def ask(
    model: ModelLike,
    *,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: type[TieredOptimizer] = TieredAdamW,
    given: Given | None = None,
    ranks: int | None = None,
    calibrate: bool = False,
    tbw: int | None = None,
    compute_seconds: float = 0.0,
    **options: Any,
) -> Question:
    """Look at the parameters as an optimizer would, and bind nothing; arguments as those of `plan`."""
    if isinstance(optimizer.rule, NormedRule):
        raise ForecastError(
            f"{optimizer.rule.name} visits the chunks of a parameter that is cut twice: not planned yet"
        )
    if ranks is not None and not 1 <= ranks <= 1024:
        raise ForecastError(f"ranks: found {ranks}; allowed: from 1 to 1024 processes on one machine")
    if tbw is not None and tbw < 1:
        raise ForecastError(f"tbw: found {tbw} bytes; allowed: what the drive may be written in all, as 600TB")
    if not 0 <= compute_seconds < 1e9:
        raise ForecastError(
            f"compute seconds: found {compute_seconds}; allowed: what forward and backward take, from 0"
        )
    sketch: Any = type("Sketch", (optimizer,), {"check_fits": lambda *_, **__: None})
    groups = sketch(parameters_of(model, dtype), policy={"tiers": {"cpu": {}}}, **options).param_groups
    if any(is_lazy(parameter) for group in groups for parameter in group["params"]):
        raise ForecastError("the model has parameters without a shape yet (lazy modules): run it once, or give shapes")
    members = survey(groups, optimizer.rule)
    if not sum(member.form.numel() for member in members if member.is_covered):
        raise ForecastError("no parameter requires a gradient, so that there is no state to plan")
    return Question(groups, members, optimizer, given or Given(), ranks, calibrate, tbw, compute_seconds)
