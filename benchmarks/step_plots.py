"""What `step_time` draws: a roofline, what a step is made of, and the timeline of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.harness.plots import COLOURS, figure, plain_numbers
from benchmarks.harness.report import Report
from benchmarks.step_figures import NVME_LINK, TORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tierstore.trace import Trace


def draw(report: Report) -> Figure:
    """The roofline and the parts of a step."""
    drawn, axes = figure(
        f"A step over {report.options['parameters'] / 1e6:.0f} M {report.options['dtype']} parameters",
        columns=2,
        width=12,
        height=4.8,
    )
    _roofline(axes[0], report)
    _parts(axes[1], report)
    return drawn


def _roofline(axis: Axes, report: Report) -> None:
    """Parameters per second over bytes per parameter on the link: under the device's slope and the update's ceiling."""
    steps, links, _ = (table.rows for table in report.tables)
    rate_of = {row["tiers"]: row["rate"] for row in steps}
    found = {row["tiers"]: row["moved"] for row in links if row["link"] == NVME_LINK and row["moved"] > 0}
    least, most = min(found.values()) / 2, max(found.values()) * 1.5
    xs = [least * (most / least) ** (step / 100) for step in range(101)]
    ideal = steps[1]["rate"]  # torch's is the first row, all state in the fastest tier the second
    device = report.extra["raw_bytes_per_second"] / 1e6
    axis.plot(xs, [min(device / x, ideal) for x in xs], color="#333333", label="bound: raw device, update in memory")
    axis.axhline(rate_of[TORCH], linestyle=":", color="#333333", linewidth=1, label=TORCH)
    for (name, moved), colour in zip(found.items(), COLOURS, strict=False):
        axis.plot(moved, rate_of[name], "o", color=colour, label=name)
    axis.set(title="roofline", xlabel="bytes per parameter on the NVMe link, read + written", ylabel="M parameters/s")
    axis.set(xscale="log", yscale="log")
    plain_numbers(axis.xaxis)
    plain_numbers(axis.yaxis)
    axis.legend(fontsize=7, loc="lower left")


def _parts(axis: Axes, report: Report) -> None:
    """Forward and backward of the iteration; update and waits of the steps back to back."""
    steps, _, iterations = (table.rows for table in report.tables)
    names = [row["tiers"] for row in steps]
    parts = {
        "forward": [row["forward"] for row in iterations],
        "backward": [row["backward"] for row in iterations],
        "update": [row["update"] for row in steps],
        "wait for reads": [row["read_wait"] for row in steps],
        "wait for writes": [row["write_wait"] for row in steps],
    }
    left = [0.0] * len(names)
    for (label, seconds), colour in zip(parts.items(), COLOURS, strict=False):
        axis.barh(names, seconds, left=left, label=label, color=colour)
        left = [sum(pair) for pair in zip(left, seconds, strict=True)]
    axis.invert_yaxis()
    axis.set(title="what an iteration is made of", xlabel="seconds")
    axis.grid(axis="y", visible=False)
    axis.legend(fontsize=7)


KINDS = {"update": 2, "wait": 3, "read": 0, "write": 1, "chunk": 4, "run": 6}
"""Colours of events, by the first word of their names."""


def draw_timeline(trace: Trace) -> Figure:
    """One bar per event, one row per track; a run, which is all of a step, is left out."""
    from matplotlib.patches import Patch

    events = [event for event in sorted(trace.events, key=lambda e: e.start_seconds) if event.name != "run"]
    tracks = sorted({event.track for event in events})
    first = min((event.start_seconds for event in events), default=0.0)
    drawn, (axis,) = figure("One step, what happened when", width=12, height=1.4 + 0.32 * len(tracks))
    for row, track in enumerate(tracks):
        own = [event for event in events if event.track == track]
        bars = [((event.start_seconds - first) * 1e3, event.seconds * 1e3) for event in own]
        colours = [COLOURS[KINDS.get(event.name.split()[0], 5)] for event in own]
        axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours, edgecolor="white", linewidth=0.2)
    axis.set_yticks(range(len(tracks)), tracks)
    axis.invert_yaxis()
    axis.set(xlabel="ms", xlim=(0, None))
    axis.grid(axis="y", visible=False)
    names = ("update", "wait", "read", "write", "chunk")
    labels = {"read": "read by a worker", "write": "write by a worker", "chunk": "a chunk on its way"}
    handles = [Patch(color=COLOURS[KINDS[name]], label=labels.get(name, name)) for name in names]
    axis.legend(handles=handles, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    return drawn
