"""How long `tierstore plan` says a step takes, beside what it takes: ten policies, planned and run in the same minutes.

Each round measures this machine anew for each policy, as `plan --calibrate` does, asks for the step, and then takes
steps back to back. What the plan says of bytes must be what is reserved and moved, to the byte, or there is no report.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tierstore
from benchmarks.harness import (
    Check,
    Column,
    Folders,
    Json,
    Plot,
    Quick,
    Report,
    Rounds,
    Table,
    VerificationError,
    bytes_of,
    command,
    environment,
    folders_of,
    interleave,
    median,
    publish,
)
from benchmarks.harness.plots import Panel, bars
from benchmarks.harness.training import Contender, Turn, Work
from tierstore import TieredAdamW
from tierstore.forecast.answer import Forecast
from tierstore.forecast.pace import StepForecast

WANTED = 0.15
"""What the median error should stay below."""
STEPS = 6
"""Back to back, an even number: chunks travel there and back."""
FP32, BF16 = torch.float32, torch.bfloat16
DRAWN = (
    Panel(0, "predicted", "predicted, ms", 1e-3),
    Panel(0, "measured", "took, ms", 1e-3),
    Panel(0, "error", "error, percent", 0.01),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One policy: of parameters of a dtype, the share of the state that a cpu tier can hold (None: all; no files)."""

    name: str
    dtype: torch.dtype
    share: float | None
    settings: Mapping[str, Any]
    has_gpu: bool = False


CASES = (
    Case("fp32, cpu", FP32, None, {}),
    Case("bf16, cpu", BF16, None, {"state": {"master": "float32"}}),
    Case("bf16 split, cpu", BF16, None, {"state": {"master": "split"}}),
    Case("fp32, cpu+nvme 25%", FP32, 0.25, {}),
    Case("fp32, cpu+nvme 75%", FP32, 0.75, {}),
    Case("fp32, cpu+nvme 50%, fixed", FP32, 0.5, {"order": "fixed"}),
    Case("bf16 split, cpu+nvme 25%", BF16, 0.25, {}),
    Case("bf16 whole, cpu+nvme 50%", BF16, 0.5, {"state": {"master": "float32"}}),
    Case("bf16 small, cpu+nvme 25%", BF16, 0.25, {"state": {"master": "none", "moments": "parameter"}}),
    Case("fp32, gpu+cpu+nvme 25%", FP32, 0.25, {}, has_gpu=True),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of one policy's step in one round."""

    predicted: StepForecast
    measured: Turn


def measure(millions: float, width: int, chunk: int, folders: Sequence[Path], rounds: int) -> Report:
    """Plan and run all policies. Raises VerificationError."""
    layers = max(2, round(millions * 1e6 / width**2))
    works = {case.name: Work(layers, width, 2, case.dtype, torch.device("cpu")) for case in CASES}
    policies = {case.name: _policy(case, works[case.name], chunk, folders) for case in CASES}
    with _own_cache():
        runs = {name: _run_of(name, works[name], policy) for name, policy in policies.items()}
        found = interleave(runs, rounds)
    verified = sum(nbytes for turns in found.values() for _, nbytes in turns)
    rows = tuple(_row(case, [pair for pair, _ in found[case.name]]) for case in CASES)
    typical = median([abs(row["error"]) for row in rows])
    columns = (
        Column("policy", "policy"),
        Column("predicted", "predicted", "seconds"),
        Column("moving", "moves", "seconds"),
        Column("arithmetic", "updates", "seconds"),
        Column("bound", "bound"),
        Column("measured", "took", "seconds"),
        Column("waits", "waited", "seconds"),
        Column("says", "bound"),
        Column("error", "error", "percent"),
    )
    return Report(
        benchmark="predicted_vs_measured",
        question="how long does a plan say that a step takes, and how long does it take?",
        options={"parameters": layers * width**2, "width": width, "chunk": chunk, "rounds": rounds},
        environment=environment(folders, policies),
        tables=(Table("steps back to back, medians", columns, rows),),
        checks=(Check("median error over all policies", f"below {WANTED:.0%}", f"{typical:.1%}", typical < WANTED),),
        verified=f"what plans said of {verified / 1e6:.1f} MB, to the byte: reserved in each tier, moved on each route",
        notes=(
            "each policy is calibrated anew before each of its measurements, as `plan --calibrate` does",
            "error: of the medians; K%: the part of the state's bytes that the cpu tier could hold",
            "gpu is host memory here, which stands in for an accelerator",
        ),
    )


def main(
    folder: Folders = None,
    parameters: Annotated[float, typer.Option(metavar="N", help="How many, in millions.")] = 32.0,
    width: Annotated[int, typer.Option(min=8, help="Of a layer, which has width x width parameters.")] = 1024,
    chunk: Annotated[str, typer.Option(help="Chunk size.")] = "8MiB",
    rounds: Rounds = 1,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How long does a plan say that a step takes, and how long does it take?"""
    size = (0.04, 64, 16 << 10) if quick else (parameters, width, bytes_of(chunk))
    publish(
        measure(*size, folders_of(folder), rounds),
        json=json,
        is_quick=quick,
        plot=plot,
        draw=partial(bars, panels=DRAWN),
    )


def _run_of(name: str, work: Work, policy: Mapping[str, Any]) -> Callable[[], tuple[Pair, int]]:
    """What plans and runs a policy once; answers the pair and the bytes that were verified."""

    def run() -> tuple[Pair, int]:
        model, batch = work.make()
        answer = tierstore.plan(model, policy, calibrate=True)
        if answer.step is None:
            raise VerificationError(f"{name}: the plan does not fit, {answer.why_not}")
        with contextlib.closing(
            Contender(work, model, batch, lambda m: TieredAdamW(m.parameters(), policy=policy))
        ) as contender:
            contender.turn(4)  # makes the state, and lets retention settle
            turn = contender.turn(STEPS)
            verified = _verify(name, answer, contender)
        return Pair(answer.step, turn), verified

    return run


def _policy(case: Case, work: Work, chunk: int, folders: Sequence[Path]) -> dict[str, Any]:
    policy: dict[str, Any] = {"chunk_size": chunk, **case.settings}
    if case.share is None:
        return {**policy, "tiers": {"cpu": {}}}
    files = {"paths": [str(folder) for folder in folders]}
    whole = tierstore.plan(
        work.make()[0].to("meta"), {**policy, "tiers": {"cpu": {"capacity": chunk * 4}, "nvme": files}}
    )
    kept = max(4, round(case.share * whole.chunks))
    tiers: dict[str, Any] = {"cpu": {"capacity": kept * chunk}, "nvme": files}
    if case.has_gpu:
        tiers["gpu"] = {"device": "cpu", "capacity": 8 * chunk}
    return {**policy, "tiers": tiers}


def _verify(name: str, answer: Forecast, contender: Contender) -> int:
    """Compare what is reserved, and what two more steps move, with the plan."""
    optimizer = contender.tiered
    assert optimizer is not None
    store = optimizer.store
    reserved = {tier: stats.capacity_bytes for tier, stats in store.stats().tiers.items()}
    planned = {tier: found.bytes for tier, found in answer.tiers.items() if found.bytes}
    if reserved != planned:
        raise VerificationError(f"{name}: {reserved} bytes are reserved, the plan said {planned}")
    store.wait()
    before = {route: stats.bytes for route, stats in store.stats().routes.items()}
    for _ in range(2):
        contender.step()
    store.wait()
    moved = {route: stats.bytes - before.get(route, 0) for route, stats in store.stats().routes.items()}
    moved = {route: nbytes // 2 for route, nbytes in moved.items() if nbytes}
    if moved != answer.moved:
        raise VerificationError(f"{name}: a step moved {moved} bytes, the plan said {answer.moved}")
    return sum(reserved.values()) + sum(moved.values())


def _row(case: Case, pairs: Sequence[Pair]) -> dict[str, Any]:
    predicted = median([pair.predicted.seconds for pair in pairs])
    measured = median([pair.measured.step for pair in pairs])
    moving = [max((link.seconds for link in pair.predicted.links.values()), default=0.0) for pair in pairs]
    return {
        "policy": case.name,
        "predicted": predicted,
        "moving": median(moving),
        "arithmetic": median([pair.predicted.arithmetic_seconds for pair in pairs]),
        "bound": pairs[-1].predicted.bound,
        "measured": measured,
        "waits": median([pair.measured.read_wait + pair.measured.write_wait for pair in pairs]),
        "says": pairs[-1].measured.bound or None,
        "error": predicted / measured - 1,
    }


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Keep what is measured here out of the user's cache, from which trainings choose chunk sizes."""
    before = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


if __name__ == "__main__":
    command(main)
