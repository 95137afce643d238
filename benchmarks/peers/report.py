"""What the rounds say: rates and ratios, bytes, memory, files left behind, and how near the weights came.

Knows no process and measures nothing: figures in, a report out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Check, Column, Report, Sample, Table, VerificationError, environment, median, ratio
from benchmarks.harness.plots import COLOURS, figure
from benchmarks.peers.contenders import FUSED
from benchmarks.peers.process import Contender
from benchmarks.peers.work import Work

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAME_TRAINING = 1e-2
"""Most drift that another order of float32 arithmetic explains: see `work.compare`."""
LEAST_PARAMETERS = 100_000_000
SPEED = (
    Column("name", "system"),
    Column("rate", "parameters/s", ",.0f"),
    Column("step", "step", "seconds"),
    Column("beside", "x DeepSpeed", ".2f"),
    Column("iterations", "+ backward", ".2f"),
    Column("torch", "x fused", ".2f"),
    Column("moved", "B/param", ".2f"),
    Column("before", "before", ".2f"),
    Column("raw", "of raw", "percent"),
    Column("cpu", "CPU s", ".2f"),
    Column("trouble", "not here"),
)
COST = (
    Column("name", "system"),
    Column("planned", "memory, set", "bytes"),
    Column("peak", "seen", "bytes"),
    Column("iteration", "backward + step", "seconds"),
    Column("load", "import, build", "seconds"),
    Column("begin", "construct", "seconds"),
    Column("files", "files left", "d"),
    Column("left", "bytes left", "bytes"),
    Column("weights", "weights"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured: per row its contender, what beginning took, what is wrong with it, its rounds and its end.

    `only`: the beginnings of names that rows were chosen by, if they were. `whole`: the share of free memory in blocks
    of a huge page or more when the first began.
    """

    work: Work
    folder: Path
    steps: int
    peers: Mapping[str, tuple[Contender, Mapping[str, Any], str]]
    rounds: Mapping[str, Sequence[Mapping[str, Any] | None]]
    raw: Sequence[Sample]
    ends: Mapping[str, Mapping[str, Any] | None]
    fio: Sequence[Mapping[str, Any]] = ()
    is_fragmented: bool = False
    only: Sequence[str] = ()
    whole: float | None = None

    def is_whole(self, name: str) -> bool:
        """Whether a row was measured in every round and compared at the end."""
        return self.ends.get(name) is not None and all(self.rounds[name])

    def rates(self, name: str) -> list[float]:
        """Parameters per second, round by round; empty unless the row is whole."""
        if not self.is_whole(name):
            return []
        return [self.work.numel * self.steps / sum(taken["seconds"]) for taken in self._taken(name)]

    def over(self, name: str, other: str) -> float | None:
        """The rounds' ratio of parameters/s; None if either is not there."""
        one, two = (self.rates(n) if n in self.peers else [] for n in (name, other))
        return ratio(one, two) if one and two else None

    def iterations_over(self, name: str, other: str) -> float | None:
        """The same ratio where each step follows a backward, and the time of both counts."""
        if not (self.rates(name) and other in self.peers and self.rates(other)):
            return None
        ours, theirs = ([taken["iteration_seconds"] for taken in self._taken(n)] for n in (name, other))
        return ratio(theirs, ours)

    def moved(self, name: str, when: str) -> list[float]:
        """Bytes that one step, or the backward before it, read and wrote: round by round."""
        return [taken[when]["bytes_read"] + taken[when]["bytes_written"] for taken in self._taken(name)]

    def of_raw(self, name: str) -> float | None:
        """Share of the raw device's rate that a step's bytes had; None if it moves less than a byte per parameter."""
        seconds = [sum(taken["seconds"]) / self.steps for taken in self._taken(name)]
        moved = self.moved(name, "step")
        if median(moved) < self.work.numel:
            return None
        return ratio([m / s for m, s in zip(moved, seconds, strict=True)], [sample.rate for sample in self.raw])

    def seen_bytes(self, name: str) -> int:
        """Most anonymous memory in a step, over one copy of parameters and gradients where those are on the host."""
        seen: int = self.peers[name][1]["seen_bytes"]
        return seen

    def least_that_takes_no_less(self, name: str) -> str | None:
        """The row like the one that `name` is compared with which has the least memory that is no less than its own."""
        beside = self.peers[name][0].beside
        if not (self.is_whole(name) and beside in self.peers):
            return None
        kind = self.peers[beside][0]
        alike = [n for n, (c, _, _) in self.peers.items() if (c.system, c.options) == (kind.system, kind.options)]
        larger = [n for n in alike if self.is_whole(n) and self.seen_bytes(n) >= self.seen_bytes(name)]
        return min(larger, key=self.seen_bytes, default=None)

    def median_of(self, name: str, what: str, when: str = "") -> float:
        """The median over the rounds of one of the runner's figures."""
        return median([taken[when][what] if when else taken[what] for taken in self._taken(name)])

    def _taken(self, name: str) -> list[Mapping[str, Any]]:
        return [taken for taken in self.rounds[name] if taken is not None]


def report_of(figures: Figures) -> Report:
    """Write the report. Raises VerificationError if a system that promises the reference's bits has others."""
    whole = [name for name in figures.peers if figures.is_whole(name)]
    for name in whole:
        _verify(name, figures.ends[name] or {})
    work = figures.work
    speed = [_speed(figures, name) for name in figures.peers]
    columns = SPEED if len(whole) < len(figures.peers) else SPEED[:-1]
    cost = [_cost(figures, name) for name in whole]
    builds = [end["described"].get("build_seconds", 0.0) for name in whole if (end := figures.ends[name])]
    return Report(
        benchmark="peers",
        question="how fast is the same optimizer step with the peers, in the same memory, on the same disk?",
        options={"work": work.to_dict(), "rounds": len(figures.raw), "steps": figures.steps}
        | ({"fragmented": True} if figures.is_fragmented else {})
        | ({"only": list(figures.only)} if figures.only else {}),
        environment=environment([figures.folder], _policies(figures, whole)),
        tables=(
            Table(
                f"{work.numel:,} {work.dtype} parameters on {work.device}, medians", columns, tuple(speed), NOTE_SPEED
            ),
            Table("what it takes, and what it leaves", COST, tuple(cost), NOTE_COST),
        ),
        verified=f"{work.numel:,} weights of each of {len(whole)} systems against torch's fused AdamW",
        raw=({"kind": "mixed", "gb_per_s": median([sample.rate for sample in figures.raw]) / 1e9}, *figures.fio),
        checks=tuple(itertools.chain.from_iterable(checks_of(figures, name) for name in figures.peers)),
        notes=tuple(_notes(figures, builds)),
        extra={name: _extra(figures, name) for name in whole},
    )


def _policies(figures: Figures, names: Sequence[str]) -> dict[str, Any]:
    """The policies of tierstore's rows; how all others were set is in `extra`."""
    described = {name: (figures.ends[name] or {})["described"] for name in names}
    return {name: found["policy"] for name, found in described.items() if "policy" in found}


def _notes(figures: Figures, builds: Sequence[float]) -> Iterator[str]:
    if any(builds):
        yield f"DeepSpeed's operators took {max(builds):.0f} s to build, once"
    if figures.whole is not None:
        how = "broken up on purpose" if figures.is_fragmented else "as it was"
        yield (
            f"free memory was {how}: {figures.whole:.0%} of it was in blocks of a huge page or more when the systems "
            f"began. Buffers on small pages, DeepSpeed's for one, are the slower the less that is"
        )


NOTE_SPEED = (
    "x: the median of the rounds' ratios, to DeepSpeed with NVMe and the same buffers, and to torch with all state "
    "in memory. Bytes are the kernel's count of what went to and from block devices in the step, and in the backward "
    "before it, where DeepSpeed writes gradients: not in the step's time, but in the ratio with the backward. "
    "Page cache rows keep all state in host memory."
)
NOTE_COST = (
    "Memory is for the optimizer: by its settings, and seen as anonymous memory over one copy of parameters and "
    "gradients. Drift is the largest distance to the reference over the largest change that training made."
)


def _speed(figures: Figures, name: str) -> dict[str, Any]:
    contender, _, trouble = figures.peers[name]
    if not figures.is_whole(name):
        return {"name": name, "trouble": trouble}
    return {
        "name": name,
        "rate": median(figures.rates(name)),
        "step": median([figures.work.numel / rate for rate in figures.rates(name)]),
        "beside": figures.over(name, contender.beside),
        "iterations": figures.iterations_over(name, contender.beside),
        "torch": figures.over(name, FUSED),
        "moved": median(figures.moved(name, "step")) / figures.work.numel,
        "before": median(figures.moved(name, "backward")) / figures.work.numel,
        "raw": figures.of_raw(name),
        "cpu": figures.median_of(name, "cpu_seconds", "step"),
    }


def _cost(figures: Figures, name: str) -> dict[str, Any]:
    end, begun = figures.ends[name] or {}, figures.peers[name][1]
    return {
        "name": name,
        "planned": end["described"]["optimizer_bytes"],
        "peak": figures.seen_bytes(name),
        "iteration": figures.median_of(name, "iteration_seconds"),
        "load": begun["load_seconds"],
        "begin": begun["begin_seconds"],
        "files": end["files_left"],
        "left": end["bytes_left"],
        "weights": _judged(end),
    }


def _verify(name: str, end: Mapping[str, Any]) -> None:
    if end["promise"] == "bits" and end["compared"]["differing"]:
        raise VerificationError(f"{name}: {end['compared']['differing']:.2%} of the weights have other bits")


def _judged(end: Mapping[str, Any]) -> str:
    compared, promise = end["compared"], end["promise"]
    if compared["differing"] == 0:
        return "same bits"
    told = f"{compared['differing']:.2%} differ, drift {compared['drift']:.1e}"
    if promise == "other":
        return f"other state: {told}"
    return told if compared["drift"] <= SAME_TRAINING else f"OTHER TRAINING: {told}"


def checks_of(figures: Figures, name: str) -> list[Check]:
    """What a row is to reach, each meaning of the same memory on its own; nothing for a row without a target."""
    contender = figures.peers[name][0]
    if contender.target is None:
        return []
    other, speed = contender.beside, f"{name}: parameters/s over DeepSpeed's"
    if contender.memory_of:
        claim = f"{speed}, which was seen to take no less memory, step alone"
        over = figures.over(name, other)
        is_fair = over is not None and figures.seen_bytes(name) <= figures.seen_bytes(other)
        return [_check(figures, claim, contender.target, over if is_fair else None)]
    both = figures.iterations_over(name, other)
    checks = [
        _check(figures, f"{speed} with as large buffers, step alone", contender.target, figures.over(name, other)),
        _check(figures, f"{speed} with as large buffers, backward and step", contender.target, both),
    ]
    if (larger := figures.least_that_takes_no_less(name)) not in (None, other):
        claim = f"{name}: parameters/s over {larger}, which was seen to take no less memory, step alone"
        checks.append(_check(figures, claim, contender.target, figures.over(name, larger)))
    return checks


def _check(figures: Figures, claim: str, target: float, seen: float | None) -> Check:
    is_tried = figures.work.numel >= LEAST_PARAMETERS and figures.work.dtype == "bfloat16"
    holds = seen >= target if is_tried and seen is not None else None
    return Check(claim, f">= {target:g}", f"{seen:.2f}" if seen is not None else "-", holds)


def _extra(figures: Figures, name: str) -> dict[str, Any]:
    described = {key: value for key, value in (figures.ends[name] or {})["described"].items() if key != "build_seconds"}
    return {"rates": figures.rates(name), "moved": figures.moved(name, "step"), "described": _nameless(described)}


def _nameless(value: Any) -> Any:
    """The same without the names of folders."""
    if isinstance(value, Mapping):
        return {key: _nameless(inner) for key, inner in value.items() if key not in ("nvme_path", "paths")}
    return value


def draw(report: Report) -> Figure:
    """Draw parameters/s and bytes per parameter, one bar per system."""
    rows = [row for row in report.tables[0].rows if "rate" in row][::-1]
    drawn, (rates, moved) = figure(report.tables[0].title, columns=2, width=11, height=0.4 * len(rows) + 1.2)
    names = [row["name"] for row in rows]
    colours = [COLOURS[0] if name.startswith("tierstore") else COLOURS[6] for name in names]
    rates.barh(names, [row["rate"] / 1e6 for row in rows], color=colours)
    rates.set_xlabel("million parameters/s")
    moved.barh(names, [row["moved"] for row in rows], color=colours, label="step")
    moved.barh(names, [row["before"] for row in rows], left=[row["moved"] for row in rows], color=COLOURS[3])
    moved.set_xlabel("disk bytes per parameter (yellow: in the backward)")
    moved.set_yticklabels([])
    return drawn
