"""The update alone, with all state in memory: ours beside torch's fused and foreach AdamW, interleaved in one run.

Rates are beside torch's fused AdamW on as many float32 parameters. float32 parameters must end with its bits, bfloat16
ones with those of float32 masters that are stepped by it and cast; on an accelerator only ours are compared.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness import (
    Check,
    Column,
    Device,
    Json,
    Plot,
    Quick,
    Report,
    Rounds,
    Table,
    command,
    device_of,
    environment,
    interleave,
    median,
    publish,
    ratio,
)
from benchmarks.harness.plots import COLOURS, figure
from benchmarks.harness.training import HandMaster, Steps, verify_bits
from tierstore import TieredAdamW, TierPolicy
from tierstore.device import wait_for_all_work
from tierstore.errors import PolicyError

RATE = 1e-3
FUSED = "torch fused, fp32"
BY_HAND = "torch fused, masters by hand"
WHOLE, SPLIT = "tierstore, bf16", "tierstore, bf16, split"
VERIFIED = {
    True: "bits as torch's fused, or as masters stepped by it and cast",
    False: "bits of split as of float32 masters; float32 is not compared",
}


@dataclass(frozen=True, slots=True)
class Case:
    """So many parameters of so many elements, and what each contender is to reach beside torch's fused."""

    name: str
    count: int
    elements: int
    targets: Mapping[str, float]
    steps: int  # per sample

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.count * self.elements


@dataclass(frozen=True, slots=True)
class Way:
    """One contender: dtype of its parameters, its optimizer, and whose bits it must end with."""

    dtype: torch.dtype
    make: Callable[[Sequence[Tensor]], Steps]
    bits_of: str | None
    state: Mapping[str, str] | None = None


def ways(device: torch.device) -> dict[str, Way]:
    """All contenders; those that this release does not have are left out.

    On an accelerator torch's kernel works on other pieces than ours, so that only ours are compared with each other.
    """
    bf16, is_on_cpu = torch.bfloat16, device.type == "cpu"
    tiered = partial(_tiered, device)
    masters = BY_HAND if is_on_cpu else None
    found = {
        FUSED: Way(torch.float32, lambda p: torch.optim.AdamW(p, lr=RATE, fused=True), None),
        "torch foreach, fp32": Way(torch.float32, lambda p: torch.optim.AdamW(p, lr=RATE, foreach=True), None),
        "tierstore, fp32": Way(torch.float32, tiered({}), FUSED if is_on_cpu else None),
        BY_HAND: Way(bf16, lambda p: HandMaster(p, RATE), None),
        WHOLE: Way(bf16, tiered({"state": {"master": "float32"}}), masters),
        SPLIT: Way(bf16, tiered({"state": {"master": "split"}}), masters or WHOLE, {"master": "split"}),
    }
    return {name: way for name, way in found.items() if way.state is None or _has(way.state)}


def cases(millions: float, is_quick: bool) -> list[Case]:
    """What is updated."""
    if is_quick:
        return [Case("4 x 4,096", 4, 4096, {}, 1), Case("20 x 100", 20, 100, {}, 1)]
    large = {"tierstore, fp32": 0.95, WHOLE: 0.60, SPLIT: 0.45}
    return [
        Case(f"8 x {millions / 8:g} M", 8, round(millions / 8 * 1e6) // 1024 * 1024, large, 2),
        Case("10,000 x 100", 10_000, 100, {"tierstore, fp32": 1.0}, 2),
        Case("100 x 1,000", 100, 1000, {}, 20),
        Case("10 x 64", 10, 64, {}, 50),
    ]


def measure(chosen: Sequence[Case], rounds: int, device: torch.device) -> Report:
    """Measure all ways in all cases; one case is in memory at a time."""
    rows: list[dict[str, Any]] = []
    verified = 0
    for case in chosen:
        own, nbytes = _measure_case(case, rounds, device)
        rows += own
        verified += nbytes
    columns = (
        Column("case", "parameters"),
        Column("way", "update"),
        Column("seconds", "step", "seconds"),
        Column("rate", "M param/s", ".1f"),
        Column("of_fused", "of torch fused", "percent"),
        Column("target", "to reach", "percent"),
    )
    table = Table("a step with all state in memory, medians", columns, tuple(rows))
    return Report(
        benchmark="arithmetic",
        question="how fast is the update alone, beside torch's?",
        options={"rounds": rounds, "parameters": chosen[0].total, "device": device.type},
        environment=environment(policy=_policy(device, {})),
        tables=(table,),
        checks=tuple(_check(row) for row in rows if row["target"] is not None),
        verified=f"{verified / 1e6:.1f} MB of parameters: {VERIFIED[device.type == 'cpu']}",
        notes=(
            "each case is interleaved in one run, the ways in turn; of torch fused: the median of the rounds' ratios",
        ),
    )


def main(
    parameters: Annotated[float, typer.Option(metavar="N", help="Of the large case, in millions.")] = 32.0,
    rounds: Rounds = 7,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How fast is the update alone, beside torch's?"""
    report = measure(cases(parameters, quick), 1 if quick else rounds, device_of(device))
    publish(report, json=json, is_quick=quick, plot=plot, draw=draw)


class _Stepper:
    """Parameters with gradients, and what updates them."""

    def __init__(self, case: Case, way: Way, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(5)
        values = torch.randn(case.total, generator=generator).view(case.count, case.elements)
        self.parameters = [nn.Parameter(row.to(device, way.dtype, copy=True)) for row in values]
        values.normal_(generator=generator)
        for parameter, row in zip(self.parameters, values, strict=True):
            parameter.grad = row.to(device, way.dtype, copy=True)
        self._optimizer = way.make(self.parameters)
        self._steps = case.steps
        self._device = device

    def run(self) -> float:
        """Seconds of one step."""
        wait_for_all_work(self._device)
        began = time.perf_counter()
        for _ in range(self._steps):
            self._optimizer.step()
        wait_for_all_work(self._device)
        return (time.perf_counter() - began) / self._steps

    def close(self) -> None:
        """Give back what the optimizer holds."""
        if isinstance(self._optimizer, TieredAdamW):
            self._optimizer.close()


def _measure_case(case: Case, rounds: int, device: torch.device) -> tuple[list[dict[str, Any]], int]:
    chosen = ways(device)
    with contextlib.ExitStack() as closing:
        steppers = {name: _Stepper(case, way, device) for name, way in chosen.items()}
        for stepper in steppers.values():
            closing.callback(stepper.close)
            stepper.run()  # makes the state
        seconds = interleave({name: stepper.run for name, stepper in steppers.items()}, rounds)
        verified = sum(
            verify_bits(f"{name}, {case.name}", steppers[name].parameters, steppers[way.bits_of].parameters)
            for name, way in chosen.items()
            if way.bits_of is not None
        )
    rows = [
        {
            "case": case.name,
            "way": name,
            "seconds": median(own),
            "rate": case.total / median(own) / 1e6,
            "of_fused": ratio(seconds[FUSED], own),
            "target": case.targets.get(name) if device.type == "cpu" else None,
        }
        for name, own in seconds.items()
    ]
    return rows, verified


def _policy(device: torch.device, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"tiers": {"cpu" if device.type == "cpu" else "gpu": {}}, **settings}


def _tiered(device: torch.device, settings: Mapping[str, Any]) -> Callable[[Sequence[Tensor]], Steps]:
    return lambda parameters: TieredAdamW(parameters, lr=RATE, policy=_policy(device, settings))


def _has(state: Mapping[str, str]) -> bool:
    """Whether this release takes the setting."""
    try:
        TierPolicy.load({"tiers": {"cpu": {}}, "state": dict(state)})
    except PolicyError:
        return False
    return True


def _check(row: Mapping[str, Any]) -> Check:
    seen, target = row["of_fused"], row["target"]
    return Check(
        f"{row['way']}, {row['case']}: of torch fused", f"at least {target:.2f}", f"{seen:.3f}", seen >= target
    )


def draw(report: Report) -> Any:
    """One group of bars per case."""
    rows = report.tables[0].rows
    names = list(dict.fromkeys(row["case"] for row in rows))
    drawn, axes = figure("The update alone, beside torch's fused AdamW", columns=len(names), width=13, height=3.6)
    for axis, case in zip(axes, names, strict=True):
        own = [row for row in rows if row["case"] == case]
        axis.barh([row["way"] for row in own], [row["of_fused"] for row in own], color=COLOURS[0])
        for number, row in enumerate(own):
            if row["target"] is not None:
                axis.plot([row["target"]] * 2, [number - 0.4, number + 0.4], color=COLOURS[1], linewidth=2)
        axis.axvline(1.0, color="#333333", linewidth=1)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(title=case, xlabel="of torch fused (red: to reach)")
        if axis is not axes[0]:
            axis.set_yticklabels([])
    return drawn


if __name__ == "__main__":
    command(main)
