"""The public question: `tierstore.plan(...)`. Asks, answers, and looks for what would make it fit if it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tierstore.forecast.answer import Forecast
from tierstore.forecast.forecast import forecast
from tierstore.forecast.parameters import ModelLike
from tierstore.forecast.question import ask
from tierstore.forecast.remedies import remedies_for
from tierstore.forecast.speeds import Given
from tierstore.optimizer import TieredAdamW
from tierstore.policy import TierPolicy
from tierstore.tiered import PolicyLike, TieredOptimizer


def plan(
    model_or_params: ModelLike,
    policy: PolicyLike = None,
    *,
    tiers: Sequence[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: type[TieredOptimizer] = TieredAdamW,
    ranks: int | None = None,
    nvme_bandwidth: float | None = None,
    link_bandwidth: float | None = None,
    update_rate: float | None = None,
    calibrate: bool = False,
    tbw: int | None = None,
    compute_seconds: float = 0.0,
    **options: Any,
) -> Forecast:
    """Say where the state of parameters will live, whether it fits, and what a step will cost; reserve nothing.

    model_or_params: a model or parameters (on the meta device, too), what an optimizer takes as `params`, or a number
        of parameters of a `dtype`, as 7_000_000_000 or "7B", which become the shapes of a transformer.
    policy, tiers: as the optimizer's. A capacity of `auto` is what this machine has; one that is given may be of
        another.
    optimizer, options: the class, and what its constructor takes besides (`amsgrad=True`).
    ranks: processes that share the machine; None: as the launcher says.
    nvme_bandwidth: bytes per second of all swap paths, read and written at once. link_bandwidth: bytes per second each
        way between accelerator and host. update_rate: float32 elements updated per second. None: as measured here
        before, else assumed, which the answer says. calibrate: measure now, which takes seconds.
    tbw: bytes that each drive may be written in all. compute_seconds: what forward and backward take of an iteration.

    Raises PolicyError, SwapError or ForecastError where there is nothing to plan; what does not fit is an answer.
    """
    given = Given(nvme_bandwidth, link_bandwidth, update_rate)
    question = ask(
        model_or_params,
        dtype=dtype,
        optimizer=optimizer,
        given=given,
        ranks=ranks,
        calibrate=calibrate,
        tbw=tbw,
        compute_seconds=compute_seconds,
        **options,
    )
    asked = TierPolicy.load(policy, tiers=tiers)
    answer = forecast(question, asked)
    return answer if answer.fits else replace(answer, remedies=tuple(remedies_for(question, asked, answer)))
