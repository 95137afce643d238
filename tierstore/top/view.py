"""Draws one picture of a job for a terminal. Knows no file and no clock; shows nothing that a file says as it is."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierstore.demo.words import share, size, time_left
from tierstore.history import Interval, Picture
from tierstore.stats import Decision, PathStats, TierStats

WIDTH = 100
_NAME, _BAR = 14, 24
_DECISIONS = 4
_TIER_COLOURS = {"gpu": "green", "cpu": "cyan", "nvme": "magenta"}


def draw(picture: Picture, state: str, *, is_well: bool, width: int = WIDTH) -> RenderableType:
    """All of it; `state` says how the job is, `is_well` whether that is as it should be."""
    job, since = picture.job, picture.interval
    line = Text.assemble(
        (state, "green" if is_well else "bold red"),
        f"   step {picture.step:,}   {_steps_per_second(since)}   running {time_left(picture.time - job.started)}",
    )
    parts: list[RenderableType] = [line, "", _tiers(picture.stats.tiers), "", _routes(picture), "", _split(since)]
    if len(picture.stats.paths) > 1:
        parts += ["", _paths(picture.stats.paths)]
    if picture.stats.decisions:
        parts += ["", _decisions(picture.stats.decisions[-_DECISIONS:])]
    title = f"{plain(job.host)}, process {job.pid}" + (f", rank {job.rank}" if job.rank else "")
    return Panel(Group(*parts), title=Text(title), title_align="left", width=min(WIDTH, width))


def plain(text: str) -> str:
    """A text without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _steps_per_second(since: Interval) -> str:
    return f"{since.steps / since.seconds:.2f} steps/s" if since.steps and since.seconds > 0 else "no step timed yet"


def _tiers(tiers: Mapping[str, TierStats]) -> Table:
    table = _table("tier", "in use", "of", "share", "peak", "chunks", "written in all", bar=True)
    for name, tier in tiers.items():
        colour = _TIER_COLOURS.get(name, "white")
        bar = ProgressBar(max(1, tier.capacity_bytes), tier.used_bytes, width=_BAR, complete_style=colour)
        fill = share(tier.used_bytes, tier.capacity_bytes)
        numbers = size(tier.used_bytes), size(tier.capacity_bytes), fill, size(tier.peak_bytes), f"{tier.chunks:,}"
        table.add_row(Text(plain(name)), *numbers, size(tier.bytes_written), bar)
    return table


def _routes(picture: Picture) -> Table:
    table = _table("route", "GB/s now", "GB in all", "moves", "p50 ms", "p99 ms")
    rates = picture.interval.bytes_per_second
    for name, route in picture.stats.routes.items():
        numbers = f"{rates.get(name, 0.0) / 1e9:.2f}", f"{route.bytes / 1e9:,.2f}", f"{route.moves:,}"
        table.add_row(Text(plain(name)), *numbers, f"{route.p50_ms:.2f}", f"{route.p99_ms:.2f}")
    if not picture.stats.routes:
        table.add_row("none yet", *[""] * 5)
    return table


def _split(since: Interval) -> Table:
    table = _table("of the time", "seconds", "share", bar=True)
    steps = since.step_stats
    within = steps.update_seconds + steps.wait_seconds
    parts = {
        "update": (since.update_seconds, "green"),
        "wait for read": (since.read_wait_seconds, "red"),
        "wait for write": (since.write_wait_seconds, "yellow"),
        "not in step()": (max(0.0, since.seconds - within), "blue"),
    }
    whole = max(since.seconds, within)
    for name, (seconds, colour) in parts.items():
        bar = ProgressBar(whole or 1.0, seconds, width=_BAR, complete_style=colour, finished_style=colour)
        table.add_row(name, f"{seconds:.3f}", share(seconds, whole), bar)
    table.add_row("bound by", steps.bound if since.steps else "-", "", "")
    return table


def _paths(paths: Mapping[str, PathStats]) -> Table:
    table = _table("path", "in use", "GB/s busy", "GB read", "GB written")
    for folder, path in paths.items():
        numbers = size(path.used_bytes), f"{path.bytes_per_second / 1e9:.2f}", f"{path.bytes_read / 1e9:,.2f}"
        table.add_row(Text(plain(folder), overflow="ellipsis"), *numbers, f"{path.bytes_written / 1e9:,.2f}")
    return table


def _decisions(decisions: tuple[Decision, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("at step", "decided", "because"):
        table.add_column(column, justify="right" if column == "at step" else "left")
    for one in decisions:
        table.add_row(f"{one.step:,}", Text(plain(one.what)), Text(plain(one.reason), style="dim"))
    return table


def _table(name: str, *numbers: str, bar: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(name, no_wrap=True, min_width=_NAME)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True, min_width=max(8, len(number)))
    if bar:
        table.add_column("", no_wrap=True)
    return table
