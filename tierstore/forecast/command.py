"""`tierstore plan` from its options to its exit status."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

import tierstore
from tierstore.errors import PolicyError
from tierstore.forecast.answer import Forecast
from tierstore.forecast.parameters import ForecastError, ModelLike, call, dtype_named
from tierstore.forecast.plan import plan
from tierstore.forecast.view import print_forecast
from tierstore.output import STDOUT, check_target, write_json, write_stdout
from tierstore.policy import TierPolicy
from tierstore.units import parse_bytes, shown

FITS, DOES_NOT_FIT = 0, 1
"""Exit statuses."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, as it was written; None: not given."""

    params: str | None = None
    model: str | None = None
    dtype: str = "bfloat16"
    policy: Path | None = None
    capacities: Mapping[str, str | None] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    ranks: int | None = None
    nvme_bandwidth: str | None = None
    link_bandwidth: str | None = None
    update_rate: float | None = None
    tbw: str | None = None
    compute_seconds: float = 0.0
    calibrate: bool = False
    json: str | None = None


def run(options: Options) -> int:
    """Plan and tell; return the exit status. Raises PolicyError, SwapError, ForecastError or OutputError."""
    check_target(options.json)
    console = Console(
        file=sys.stderr if options.json == STDOUT else sys.stdout, markup=False, emoji=False, highlight=False
    )
    is_collecting = gc.isenabled()
    gc.disable()  # to look for garbage among millions of things in use takes half of the time
    try:
        answer = answer_to(options)
    finally:
        if is_collecting:
            gc.enable()
    write_stdout(lambda: print_forecast(console, answer))
    write_json(options.json, {"version": tierstore.__version__, **answer.to_dict()})
    return FITS if answer.fits else DOES_NOT_FIT


def answer_to(options: Options) -> Forecast:
    """Read the options and plan."""
    if (options.params is None) == (options.model is None):
        raise ForecastError("give either --params N, as 7B, or --model module:function")
    policy, dtype = _policy(options), dtype_named(options.dtype)
    asked: ModelLike = call(options.model) if options.model is not None else str(options.params)
    return plan(
        asked,
        policy,
        dtype=dtype,
        ranks=options.ranks,
        nvme_bandwidth=_bytes("--nvme-bandwidth", options.nvme_bandwidth),
        link_bandwidth=_bytes("--link-bandwidth", options.link_bandwidth),
        update_rate=options.update_rate,
        calibrate=options.calibrate,
        tbw=_bytes("--tbw", options.tbw),
        compute_seconds=options.compute_seconds,
    )


def _policy(options: Options) -> TierPolicy:
    """The policy's file, or the defaults, with the capacities and folders of the command line."""
    given = {name: capacity for name, capacity in options.capacities.items() if capacity is not None}
    if options.policy is None and given:
        settings: dict[str, Any] = {"tiers": {name: {} for name in given}}
    else:
        settings = TierPolicy.load(options.policy).model_dump(exclude_none=True)
    for name, capacity in given.items():
        tier = settings["tiers"].get(name, {})
        settings["tiers"][name] = {**tier, "capacity": capacity}
    if options.paths:
        if "nvme" not in settings["tiers"]:
            raise PolicyError(f"--path {options.paths[0]}: the plan has no nvme tier: give one a capacity with --nvme")
        settings["tiers"]["nvme"]["paths"] = list(options.paths)
    return TierPolicy.load(settings)


def _bytes(option: str, text: str | None) -> int | None:
    """Read a size, or a rate of so much a second."""
    if text is None:
        return None
    nbytes = parse_bytes(text.removesuffix("/s"))
    if nbytes is None:
        raise ForecastError(f"{option}: found {shown(text)}; allowed: a size such as 3.5GB or 600TB, above 0")
    return nbytes
