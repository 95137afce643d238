"""What `benchmarks.pressure` says and draws: from what was seen of each step, and each time that tiers were emptied."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness.plots import COLOURS, figure
from benchmarks.harness.report import Column, Report, Table
from benchmarks.harness.rounds import median

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIGH, LOW = 0.85, 0.75
"""The watermarks: the defaults of a cpu tier."""
PHASES = {"before": 10, "rising": 10, "high": 16, "falling": 10, "after": 14}
"""In steps."""
SETTLED = 3
"""Steps that make the state, and are not timed."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One step under pressure: the share that others took and that was used when it began, and what became of it."""

    others: float
    used: float
    cpu_extents: int
    spilled: int
    promoted: int
    moved: int
    rebalanced: int  # bytes of `moved`
    seconds: float
    undisturbed: float  # seconds of the other training's


@dataclass(frozen=True, slots=True)
class Turn:
    """Tiers given back and filled again, once: bytes, and seconds."""

    held: int
    before: int
    after: int
    offload: float
    written: int
    reload: float
    read: int
    next_step: float
    steady_step: float

    @property
    def returned(self) -> float:
        """Of what the tiers held, the part that left the process."""
        return (self.before - self.after) / self.held


def pressure_table(steps: Sequence[Seen]) -> Table:
    """The phases of the curve."""
    columns = (
        Column("phase", "phase"),
        Column("steps", "steps"),
        Column("used", "used", "percent"),
        Column("extents", "cpu"),
        Column("spilled", "spilled"),
        Column("promoted", "promoted"),
        Column("moved", "moved", "bytes"),
        Column("rebalanced", "spills", "bytes"),
        Column("typical", "step", "seconds"),
        Column("largest", "largest", "seconds"),
        Column("slower", "x alone", ".2f"),
        Column("undisturbed", "alone", "seconds"),
    )
    following = iter(steps)
    phases = {name: list(itertools.islice(following, count)) for name, count in PHASES.items()}
    phases["before"] = phases["before"][SETTLED:]
    rows = []
    for name, seen in phases.items():
        largest, usual = max(one.seconds for one in seen), median([one.undisturbed for one in seen])
        rows.append(
            {
                "phase": name,
                "steps": len(seen),
                "used": max(one.used for one in seen),
                "extents": seen[-1].cpu_extents,
                "spilled": sum(one.spilled for one in seen),
                "promoted": sum(one.promoted for one in seen),
                "moved": sum(one.moved for one in seen),
                "rebalanced": sum(one.rebalanced for one in seen),
                "typical": median([one.seconds for one in seen]),
                "largest": largest,
                "slower": largest / usual,
                "undisturbed": usual,
            }
        )
    note = (
        "used: the most, of the machine, when a step began; cpu: extents of the tier in the end; spilled, promoted: "
        "chunks that had to leave it, extents it gained; moved: by all steps of the phase, which read and write what "
        "the tier cannot keep; spills: what left as it shrank; alone: the median of steps without "
        "pressure, side by side; x alone: the largest over it"
    )
    return Table("under pressure", columns, tuple(rows), note)


def swing_table(runs: Mapping[str, Sequence[Seen]], bound: int) -> Table:
    """What is moved when others take and give memory by turns."""
    columns = (
        Column("swing", "others swing"),
        Column("used", "used"),
        Column("extents", "cpu, least"),
        Column("spilled", "spilled"),
        Column("promoted", "promoted"),
        Column("changes", "resized"),
        Column("at_once", "at once"),
        Column("typical", "step", "seconds"),
        Column("largest", "largest", "seconds"),
        Column("undisturbed", "alone", "seconds"),
    )
    rows = []
    for name, all_steps in runs.items():
        seen = all_steps[SETTLED:]
        rows.append(
            {
                "swing": name,
                "used": f"{min(one.used for one in seen):.0%} to {max(one.used for one in seen):.0%}",
                "extents": min(one.cpu_extents for one in seen),
                "spilled": sum(one.spilled for one in seen),
                "promoted": sum(one.promoted for one in seen),
                "changes": sum(one.cpu_extents != other.cpu_extents for one, other in itertools.pairwise(all_steps)),
                "at_once": max(one.spilled + one.promoted for one in seen),
                "typical": median([one.seconds for one in seen]),
                "largest": max(one.seconds for one in seen),
                "undisturbed": median([one.undisturbed for one in seen]),
            }
        )
    note = f"resized: steps that changed the tier; at once: the most chunks in one step, of {bound} that are allowed"
    return Table("a swing at the watermarks", columns, tuple(rows), note)


def memory_table(emptied: Mapping[str, Sequence[Turn]]) -> Table:
    """What of the tiers' memory leaves the process."""
    columns = (
        Column("tiers", "emptied"),
        Column("held", "held", "bytes"),
        Column("before", "RssAnon before", "bytes"),
        Column("after", "after", "bytes"),
        Column("returned", "returned", "percent"),
    )
    rows = [
        {
            "tiers": name,
            "held": turns[0].held,
            "before": median([turn.before for turn in turns]),
            "after": median([turn.after for turn in turns]),
            "returned": None if name.endswith("cpu") else min(turn.returned for turn in turns),
        }
        for name, turns in emptied.items()
    ]
    note = "held: by the tiers that are emptied; returned: of it, in the worst round; what goes into cpu stays"
    return Table("memory given back on demand", columns, tuple(rows), note)


def time_table(emptied: Mapping[str, Sequence[Turn]], raw: Mapping[str, float]) -> Table:
    """How long it takes to empty tiers, and to fill them again."""
    columns = (
        Column("tiers", "emptied"),
        Column("offload", "offload", "seconds"),
        Column("written", "GB/s", ".2f"),
        Column("of_write", "of raw", "percent"),
        Column("of_first", "of first", "percent"),
        Column("reload", "reload", "seconds"),
        Column("read", "GB/s", ".2f"),
        Column("of_read", "of raw", "percent"),
        Column("next", "next step", "seconds"),
        Column("steady", "steady", "seconds"),
    )
    rows = []
    for name, turns in emptied.items():
        written = median([turn.written / turn.offload for turn in turns])
        read = median([turn.read / turn.reload for turn in turns])
        has_files = name.endswith("nvme")
        write, read_back = (raw["write"], raw["read"]) if has_files else (raw["copy"], raw["copy"])
        rows.append(
            {
                "tiers": name,
                "offload": median([turn.offload for turn in turns]),
                "written": written / 1e9,
                "of_write": written / write,
                "of_first": written / raw["first write"] if has_files else None,
                "reload": median([turn.reload for turn in turns]),
                "read": read / 1e9,
                "of_read": read / read_back,
                "next": median([turn.next_step for turn in turns]),
                "steady": median([turn.steady_step for turn in turns]),
            }
        )
    note = (
        "GB/s: of what went to, and came from, the slower tier; reload: until all that it fetches has landed; of raw: "
        f"of the raw device, or between memories of torch's copy into fresh memory ({raw['copy'] / 1e9:.2f} GB/s); of "
        "first: of the raw device's writes into blocks that were reserved and never written, as an offload's are"
    )
    return Table("time to give memory back and take it again", columns, tuple(rows), note)


def draw(report: Report) -> Figure:
    """Memory and the tier above, the time of steps below, over steps."""
    drawn, axes = figure("A training under pressure", rows=2, width=9, height=6.5)
    steps, total = report.extra["steps"], report.options["machine"]
    numbers = range(len(steps))
    tier = [step["cpu_extents"] * report.options["chunk"] / total for step in steps]
    for name, colour, values in (
        ("used, when the step began", COLOURS[1], [step["used"] for step in steps]),
        ("what others have", COLOURS[6], [step["others"] for step in steps]),
        ("the cpu tier, after the step", COLOURS[0], tier),
    ):
        axes[0].step(numbers, [value * 100 for value in values], where="mid", label=name, color=colour)
    for mark in (HIGH, LOW):
        axes[0].axhline(mark * 100, linestyle=":", color="#333333", linewidth=1)
    axes[0].set(ylabel="percent of memory", ylim=(0, 100))
    axes[1].plot(numbers, [step["seconds"] * 1e3 for step in steps], label="under pressure", color=COLOURS[0])
    axes[1].plot(numbers, [step["undisturbed"] * 1e3 for step in steps], label="left alone", color=COLOURS[6])
    axes[1].set(ylabel="ms of a step, its writes included", xlabel="step", ylim=(0, None))
    for axis in axes:
        axis.legend(fontsize=8)
    return drawn
