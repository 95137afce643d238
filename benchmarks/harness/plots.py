"""One look for all plots. matplotlib (`pip install -e '.[bench]'`) is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from benchmarks.harness.report import Report

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
"""Paul Tol's bright scheme: told apart by all eyes, and in print."""


def figure(
    title: str, *, rows: int = 1, columns: int = 1, width: float = 8.0, height: float = 4.5
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a title and its axes, row by row, in the look of all plots. Raises ImportError."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install -e '.[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from cycler import cycler

    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=COLOURS),
        "font.size": 9,
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        drawn, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, dpi=120)
    drawn.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return drawn, list(axes.flat)


@dataclass(frozen=True, slots=True)
class Panel:
    """What `bars` draws of a report: a column of one of its tables, in units of `unit`."""

    table: int
    key: str
    label: str
    unit: float = 1.0


def bars(report: Report, panels: Sequence[Panel]) -> Figure:
    """Draw a bar for each row, named by its first column. Raises ImportError."""
    drawn, axes = figure(f"{report.benchmark}: {report.question}", columns=len(panels), width=4.5 * len(panels))
    for axis, panel in zip(axes, panels, strict=True):
        table = report.tables[panel.table]
        rows = [row for row in table.rows if row.get(panel.key) is not None]
        places = range(len(rows))
        axis.barh(places, [row[panel.key] / panel.unit for row in rows], color=COLOURS[0])
        axis.set_yticks(places, [str(row[table.columns[0].key]) for row in rows])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(xlabel=panel.label)
    return drawn


def plain_numbers(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis as people do, and only so many that each can be read."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_view_interval()
    if high / low < 100:
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    else:
        axis.set_minor_formatter(NullFormatter())
