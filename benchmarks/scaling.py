"""How the cost of a parameter behaves as state grows, as chunks shrink and as parameters get more numerous.

Every point is beside torch's fused AdamW on the same parameters in the same rounds. Python's part is the processor time
of the thread that steps, in the same tiers with a rule that does nothing: all of the store's and the optimizer's work,
and neither arithmetic nor waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.harness import (
    Check,
    Column,
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    Table,
    command,
    environment,
    fio_entries,
    folders_of,
    interleave,
    median,
    publish,
    ratio,
)
from benchmarks.harness.plots import COLOURS, figure, plain_numbers
from benchmarks.harness.training import verify_bits
from tierstore import TieredAdamW
from tierstore.rules import Pieces
from tierstore.rules.adam import AdamWRule
from tierstore.units import bytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATE = 1e-3
GROWN, SMALL, MANY = "as state grows", "as chunks shrink", "as parameters get more numerous"
DEFAULT_CHUNK = "auto"
MOMENTS_BYTES = 8
"""Of a float32 element: its state."""
RAW_BLOCKS, RAW_DEPTH = 64, 8
"""Of the raw device: blocks as large as the chunks that are read and written, and how many at once."""


class IdleRule(AdamWRule):
    """AdamW without its arithmetic."""

    def update(self, pieces: Pieces, options: Any, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Do nothing."""


class IdleAdamW(TieredAdamW):
    """What is left of a step when nothing is computed."""

    rule = IdleRule()


@dataclass(frozen=True, slots=True)
class Point:
    """`count` float32 parameters of `elements` elements, in chunks of `chunk` bytes, in `tiers`."""

    count: int
    elements: int
    chunk: int | str = DEFAULT_CHUNK
    tiers: str = "cpu"

    @property
    def total(self) -> int:
        """Elements in all."""
        return self.count * self.elements

    @property
    def name(self) -> str:
        """As tables show its tiers: those with files have chunks of the size `auto` or of another."""
        is_plain = self.tiers == "cpu" or self.chunk == DEFAULT_CHUNK
        return self.tiers if is_plain else f"{self.tiers}, {bytes_text(self.chunk)}"


def points(is_quick: bool) -> dict[str, list[Point]]:
    """What is measured, by what varies."""
    if is_quick:
        base = Point(4, 4096, 16 << 10)
        return {
            GROWN: [
                replace(base, elements=elements, chunk=chunk, tiers=tiers)
                for tiers, chunk in (("cpu", 16 << 10), ("cpu+nvme", DEFAULT_CHUNK), ("cpu+nvme", 16 << 10))
                for elements in (4096, 16384)
            ],
            SMALL: [base, replace(base, chunk=32 << 10)],
            MANY: [base, replace(base, count=16, elements=1024)],
        }
    base = Point(8, 1 << 21)  # 16 M
    return {
        GROWN: [
            replace(base, elements=elements, chunk=chunk, tiers=tiers)
            for tiers, chunk in (("cpu", DEFAULT_CHUNK), ("cpu+nvme", DEFAULT_CHUNK), ("cpu+nvme", 1 << 20))
            for elements in (1 << 19, 1 << 21, 1 << 23)
        ],
        SMALL: [replace(base, chunk=chunk << 10) for chunk in (64 << 10, 16 << 10, 4 << 10, 1 << 10, 256, 64)],
        MANY: [replace(base, count=8 * times, elements=(1 << 20) // times) for times in (1, 16, 256, 1024)],
    }


def measure(chosen: Mapping[str, Sequence[Point]], folders: Sequence[Path], rounds: int) -> Report:
    """Measure all points."""
    found: dict[Point, dict[str, Any]] = {}
    for point in dict.fromkeys(point for group in chosen.values() for point in group):
        found[point] = _measure_point(point, folders, rounds)
    columns = (
        Column("tiers", "tiers"),
        Column("total", "elements", ","),
        Column("count", "params", ","),
        Column("chunk", "chunk", "bytes"),
        Column("chunks", "chunks"),
        Column("step", "step", "seconds"),
        Column("each", "ns/elem", ".2f"),
        Column("of_torch", "of torch", "percent"),
        Column("python", "Python", "seconds"),
        Column("share", "share", "percent"),
    )
    tables = tuple(
        Table(f"cost {varied}", columns, tuple(found[point] for point in group)) for varied, group in chosen.items()
    )
    return Report(
        benchmark="scaling",
        question="does a parameter cost the same however much state there is, and however it is cut?",
        options={"rounds": rounds},
        environment=environment(folders, {"tiers": {"cpu": {}}}),
        raw=tuple(_raw(found.values(), folders[0])),
        tables=tables,
        checks=tuple(_checks({varied: [found[point] for point in group] for varied, group in chosen.items()})),
        verified=f"{sum(row['verified'] for row in found.values()) / 1e6:.1f} MB of parameters: the bits of torch's",
        notes=(
            "of torch: beside torch's fused AdamW; Python: processor time of the thread that steps, in the "
            "same tiers with a rule that does nothing",
            "cpu+nvme: the cpu tier has room for three eighths of the state, with what is on its way; "
            "the size of its chunks is auto, or what it says",
        ),
    )


def main(
    folder: Folders = None, rounds: Rounds = 5, quick: Quick = False, json: Json = None, plot: Plot = None
) -> None:
    """Does a parameter cost the same however much state there is, and however it is cut?"""
    report = measure(points(quick), folders_of(folder), 1 if quick else rounds)
    publish(report, json=json, is_quick=quick, plot=plot, draw=draw)


class _Stepper:
    """Parameters with gradients that others may share, and what updates them."""

    def __init__(self, values: Tensor, gradients: Tensor, optimizer_of: Any) -> None:
        self.parameters = [nn.Parameter(row.clone()) for row in values]
        for parameter, row in zip(self.parameters, gradients, strict=True):
            parameter.grad = row
        self.optimizer = optimizer_of(self.parameters)

    def run(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of one step by a clock, of as many as take a while."""
        began = clock()
        self.optimizer.step()
        self.optimizer.step()
        return (clock() - began) / 2


def _measure_point(point: Point, folders: Sequence[Path], rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(point.count, point.elements, generator=generator)
    gradients = torch.randn(point.count, point.elements, generator=generator)
    policy = _policy(point, folders)
    with contextlib.ExitStack() as closing:
        torchs = _Stepper(values, gradients, lambda p: torch.optim.AdamW(p, lr=RATE, fused=True))
        idle = _Stepper(values, gradients, lambda p: IdleAdamW(p, lr=RATE, policy=policy))
        closing.callback(idle.optimizer.close)
        ours = _Stepper(values, gradients, lambda p: TieredAdamW(p, lr=RATE, policy=policy))
        closing.callback(ours.optimizer.close)
        chunks = ours.optimizer.bound()[0].layout.chunks
        chunk = point.chunk if isinstance(point.chunk, int) else max(chunk.record_bytes for chunk in chunks)
        steppers = {"torch": torchs, "idle": idle, "ours": ours}
        for stepper in steppers.values():
            stepper.run()
        runs = {name: stepper.run for name, stepper in steppers.items()}
        runs["idle"] = partial(idle.run, time.thread_time)
        if point.tiers != "cpu":
            raw = closing.enter_context(RawDevice(folders, RAW_BLOCKS * chunk))
            runs["raw"] = lambda: raw.measure("mixed", chunk, RAW_DEPTH).rate
        found = interleave(runs, rounds)
        verified = verify_bits(str(point), ours.parameters, torchs.parameters)
    step = median(found["ours"])
    return {
        "tiers": point.name,
        "total": point.total,
        "count": point.count,
        "chunk": chunk,
        "chunks": len(chunks),
        "step": step,
        "each": step / point.total * 1e9,
        "of_torch": ratio(found["torch"], found["ours"]),
        "python": median(found["idle"]),
        "share": ratio(found["idle"], found["ours"]),
        "verified": verified,
        "raw": found.get("raw", []),
    }


def _raw(rows: Iterable[Mapping[str, Any]], folder: Path) -> Iterator[Mapping[str, Any]]:
    """What the raw device did in the rounds in which steps read and wrote, for each size of chunks."""
    rates: dict[int, list[float]] = {}
    for row in rows:
        rates.setdefault(row["chunk"], []).extend(row["raw"])
    for chunk, own in rates.items():
        if own:
            yield {"kind": "mixed", "request": chunk, "in_flight": RAW_DEPTH, "gb_per_s": median(own) / 1e9}
            yield from fio_entries(folder, ("mixed",), chunk, RAW_DEPTH, RAW_BLOCKS * chunk)


def _policy(point: Point, folders: Sequence[Path]) -> dict[str, Any]:
    if point.tiers == "cpu":
        return {"chunk_size": point.chunk, "tiers": {"cpu": {}}}
    capacity = MOMENTS_BYTES * point.total * 3 // 8
    if isinstance(point.chunk, int):
        capacity = max(3, capacity // point.chunk) * point.chunk
    nvme = {"paths": [str(folder) for folder in folders]}
    return {"chunk_size": point.chunk, "tiers": {"cpu": {"capacity": capacity}, "nvme": nvme}}


def _checks(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Check]:
    by_tiers = {row["tiers"]: [one for one in rows[GROWN] if one["tiers"] == row["tiers"]] for row in rows[GROWN]}
    for tiers, own in by_tiers.items():
        growth = own[-1]["each"] / own[0]["each"]
        beside = own[0]["of_torch"] / own[-1]["of_torch"]  # torch's own cost grows, where caches end
        claim = f"{tiers}: cost of an element, {own[-1]['total'] // own[0]['total']} x state, alone or beside torch's"
        decided = "alone" if growth <= beside else "beside torch's"
        seen = f"alone x{growth:.2f}, beside torch's x{beside:.2f}: {decided} decides"
        yield Check(claim, "the lesser at most x1.10", seen, min(growth, beside) <= 1.1)
    for tiers in ("cpu", "cpu+nvme"):
        *smaller, largest = by_tiers[tiers]
        claim = f"{tiers}: Python's share of a step of {_millions(largest)} elements, the most here"
        seen = f"{largest['share']:.1%}; " + ", ".join(f"{_millions(row)} have {row['share']:.0%}" for row in smaller)
        yield Check(claim, "below 5%", seen, largest["share"] < 0.05)


def _millions(row: Mapping[str, Any]) -> str:
    return f"{row['total'] / 1e6:.3g} M"


def draw(report: Report) -> Figure:
    """One panel for each thing that varies."""
    panels = {GROWN: ("total", "M elements"), SMALL: ("chunk", "chunk size, KiB"), MANY: ("count", "parameters")}
    drawn, axes = figure("What a parameter costs", columns=3, width=13, height=4)
    for axis, table, (varied, (key, label)) in zip(axes, report.tables, panels.items(), strict=True):
        for number, tiers in enumerate(dict.fromkeys(row["tiers"] for row in table.rows)):
            own = [row for row in table.rows if row["tiers"] == tiers]
            xs = [row[key] / {"chunk": 1024, "total": 1e6}.get(key, 1) for row in own]
            axis.plot(xs, [row["each"] for row in own], "o-", color=COLOURS[number], label=f"tierstore, {tiers}")
            if tiers == "cpu":
                axis.plot(
                    xs, [row["each"] * row["of_torch"] for row in own], "s--", color="#777777", label="torch fused"
                )
                python = [row["python"] / row["total"] * 1e9 for row in own]
                axis.plot(xs, python, "^:", color=COLOURS[3], label="Python alone")
        axis.set(title=varied, xlabel=label, ylabel="ns per element", xscale="log", yscale="log")
        plain_numbers(axis.xaxis)
        plain_numbers(axis.yaxis)
        axis.legend(fontsize=7)
    return drawn


if __name__ == "__main__":
    command(main)
