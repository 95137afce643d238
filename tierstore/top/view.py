"""Draws one picture of a job for a terminal. Knows no file and no clock; shows nothing that a file says as it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierstore.demo.words import share, size, time_left
from tierstore.history import Interval, Picture
from tierstore.stats import Decision, PathStats, Stats, TierStats

WIDTH = 100
LEAST_WANTED = ("space", "paths", "routes", "decisions")
"""What a picture with too many lines does without first."""
_NAME, _LEAST, _BAR, _GAP = 14, 8, 24, 2
_DECISIONS = 4
_TIER_COLOURS = {"gpu": "green", "cpu": "cyan", "nvme": "magenta"}

Cell = str | ProgressBar


def draw(
    picture: Picture, state: str, *, is_well: bool, width: int = WIDTH, without: Collection[str] = ()
) -> RenderableType:
    """All of it; `state` says how the job is, `is_well` whether that is as it should be.

    `without`: those of LEAST_WANTED that are left out.
    """
    job, since, stats, width = picture.job, picture.interval, picture.stats, min(WIDTH, width)
    inside = width - 4  # of the panel's frame
    line = Text.assemble(
        (state, "green" if is_well else "bold red"),
        f"   step {picture.step:,}   {_steps_per_second(since)}   running {time_left(picture.time - job.started)}",
    )
    sections: dict[str, RenderableType | None] = {
        "state": line,
        "tiers": _tiers(stats.tiers, inside),
        "routes": _routes(picture, inside),
        "split": _split(since, inside),
        "paths": _paths(stats.paths, inside) if len(stats.paths) > 1 else None,
        "pressure": _pressure(stats, inside) if stats.pressure else None,
        "decisions": _decisions(stats.decisions[-_DECISIONS:]) if stats.decisions else None,
    }
    parts: list[RenderableType] = []
    for name, section in sections.items():
        if section is not None and name not in without:
            parts += [section] if "space" in without or not parts else ["", section]
    title = f"{plain(job.host)}, process {job.pid}" + (f", rank {job.rank}" if job.rank else "")
    return Panel(Group(*parts), title=Text(title), title_align="left", width=width)


def plain(text: str) -> str:
    """A text without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _steps_per_second(since: Interval) -> str:
    return f"{since.steps / since.seconds:.2f} steps/s" if since.steps and since.seconds > 0 else "no step timed yet"


def _tiers(tiers: Mapping[str, TierStats], width: int) -> Table:
    heads = "tier", "in use", "of", "share", "peak", "chunks", "written in all", ""
    rows: list[Sequence[Cell]] = []
    for name, tier in tiers.items():
        numbers = size(tier.used_bytes), size(tier.capacity_bytes), share(tier.used_bytes, tier.capacity_bytes)
        rest = size(tier.peak_bytes), f"{tier.chunks:,}", size(tier.bytes_written)
        rows.append((name, *numbers, *rest, _bar(tier.used_bytes, tier.capacity_bytes, _colour(name))))
    return _table(heads, rows, width)


def _routes(picture: Picture, width: int) -> Table:
    rates = picture.interval.bytes_per_second
    rows: list[Sequence[Cell]] = [("none yet", *[""] * 5)]
    if picture.stats.routes:
        rows = [
            (
                name,
                f"{rates.get(name, 0.0) / 1e9:.2f}",
                f"{route.bytes / 1e9:,.2f}",
                f"{route.moves:,}",
                f"{route.p50_ms:.2f}",
                f"{route.p99_ms:.2f}",
            )
            for name, route in picture.stats.routes.items()
        ]
    return _table(("route", "GB/s now", "GB in all", "moves", "p50 ms", "p99 ms"), rows, width)


def _split(since: Interval, width: int) -> Table:
    steps = since.step_stats
    within = steps.update_seconds + steps.wait_seconds
    whole = max(since.seconds, within)
    parts = {
        "update": (since.update_seconds, "green"),
        "wait for read": (since.read_wait_seconds, "red"),
        "wait for write": (since.write_wait_seconds, "yellow"),
        "not in step()": (max(0.0, since.seconds - within), "blue"),
    }
    rows: list[Sequence[Cell]] = [
        (name, f"{seconds:.3f}", share(seconds, whole), _bar(seconds, whole, colour))
        for name, (seconds, colour) in parts.items()
    ]
    rows.append(("bound by", steps.bound if since.steps else "-", "", ""))
    return _table(("of the time", "seconds", "share", ""), rows, width)


def _paths(paths: Mapping[str, PathStats], width: int) -> Table:
    rows = [
        (
            folder,
            size(path.used_bytes),
            f"{path.bytes_per_second / 1e9:.2f}",
            f"{path.bytes_read / 1e9:,.2f}",
            f"{path.bytes_written / 1e9:,.2f}",
        )
        for folder, path in paths.items()
    ]
    return _table(("path", "in use", "GB/s busy", "GB read", "GB written"), rows, width)


def _pressure(stats: Stats, width: int) -> RenderableType:
    """How full the memory is that each tier lies in, where from that is known, and what was done because of it."""
    rows: list[Sequence[Cell]] = []
    for name, one in stats.pressure.items():
        bar = _bar(one.used_bytes, one.total_bytes, _colour(name))
        stalled = "-" if one.stall_percent is None else f"{one.stall_percent:.1f} %"
        rows.append(
            (name, share(one.used_bytes, one.total_bytes), bar, size(one.used_bytes), size(one.total_bytes), stalled)
        )
    sources = "; ".join(f"{name}: {one.source}" for name, one in stats.pressure.items())
    counts = f"{stats.spilled:,} chunks spilled, {stats.promoted:,} promoted"
    table = _table(("pressure on", "share", "", "in use", "of", "stalled"), rows, width)
    return Group(table, Text(f"{counts}. {plain(sources)}", style="dim"))


def _decisions(decisions: tuple[Decision, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("at step", "decided", "because"):
        table.add_column(column, justify="right" if column == "at step" else "left")
    for one in decisions:
        table.add_row(f"{one.step:,}", Text(plain(one.what)), Text(plain(one.reason), style="dim"))
    return table


def _colour(tier: str) -> str:
    return _TIER_COLOURS.get(tier, "white")


def _bar(part: float, whole: float, colour: str) -> ProgressBar:
    return ProgressBar(whole or 1.0, part, complete_style=colour, finished_style=colour)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], width: int) -> Table:
    """Columns of names, of numbers and, without a head, of bars, which take what room is left.

    What does not fit is left out from the right, by whole columns: half a number is another one.
    """
    columns = list(zip(heads, *rows, strict=True))
    widths = [_NAME, *(max(_LEAST, *map(_cells, column)) for column in columns[1:])]
    while len(widths) > 2 and _left(width, widths) < 0:
        widths.pop()
    widths[0] = max(1, min(max(_NAME, *map(_cells, columns[0])), _NAME + _left(width, widths)))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, (head, cells) in enumerate(zip(heads, widths, strict=False)):
        wide = cells if head else min(_BAR, cells + _left(width, widths))
        table.add_column(head, justify="right" if number else "left", no_wrap=True, overflow="ellipsis", width=wide)
    for row in rows:
        table.add_row(*(Text(plain(cell)) if isinstance(cell, str) else cell for cell in row[: len(widths)]))
    return table


def _left(width: int, widths: Sequence[int]) -> int:
    return width - sum(widths) - _GAP * (len(widths) - 1)


def _cells(cell: Cell) -> int:
    return cell_len(plain(cell)) if isinstance(cell, str) else 0
