"""Shows a training while it runs: a frame that is redrawn on a terminal, lines everywhere else. Measures nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text as Words

from tierstore.demo.meter import Progress, RouteRate, Split
from tierstore.demo.words import curve, share, size, time_left
from tierstore.policy import TIER_NAMES
from tierstore.stats import Stats

WIDTH = 80
REDRAW_SECONDS = 0.2
LINES_PER_TRAINING = 20
LINE_SECONDS = 10.0
_NAME = 11
_NUMBER = 12
_NUMBER_WITH_BAR = 9
_BAR = 18
_CURVE = 40
_ECHO = 2
"""Columns left free for the ^C that a terminal echoes: a line broken by it would be left behind."""
_TIER_COLOURS = {"gpu": "green", "cpu": "cyan", "nvme": "magenta"}
_SPLIT_COLOURS = {"forward": "blue", "backward": "cyan", "update": "green", "wait": "red"}


class View(Protocol):
    """Somewhere to show what goes on. Used as a context manager; between two trainings `begin` is called."""

    def __enter__(self) -> View:
        """Start."""

    def __exit__(self, *_: object) -> None:
        """Stop, and leave the screen to others."""

    def begin(self, title: str) -> None:
        """Say what comes next."""

    def show(self, progress: Progress, note: str = "") -> None:
        """Show a training after one more step, and what else is known of it."""


def open_view(console: Console, *, plain: bool) -> View:
    """A frame where the console is a terminal that can redraw and knows the characters of a bar, else lines."""
    can_draw = console.file.isatty() and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(console) if can_draw and not plain else PlainView(console)


class PlainView:
    """Lines for a log: some twenty for a training, more if it is slow."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_line = 0.0

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, title: str) -> None:
        """Print the title."""
        self._print(title)

    def show(self, progress: Progress, note: str = "") -> None:
        """Print a line if it is time for one."""
        step, steps = len(progress.losses), progress.steps
        is_due = step in (1, steps) or step % math.ceil(steps / LINES_PER_TRAINING) == 0
        if is_due or time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            self._print(f"{_line(progress)}  {note}".rstrip())

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)


class LiveView:
    """A frame redrawn in place, gone when it ends."""

    def __init__(self, console: Console) -> None:
        self._title = ""
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, title: str) -> None:
        """Show the title, in an empty frame until there is a step to show."""
        self._title = title
        self._draw(Words("starting ..."))

    def show(self, progress: Progress, note: str = "") -> None:
        """Redraw, unless that was done a moment ago."""
        if len(progress.losses) in (1, progress.steps) or time.monotonic() - self._drawn > REDRAW_SECONDS:
            self._draw(frame(progress, note))

    def _draw(self, content: RenderableType) -> None:
        self._drawn = time.monotonic()
        width = min(WIDTH, self._live.console.width) - _ECHO
        panel = Panel(
            content,
            title=self._title,
            title_align="left",
            subtitle="Ctrl-C: stop and sum up",
            subtitle_align="right",
            width=width,
        )
        self._live.update(panel, refresh=True)


def frame(progress: Progress, note: str = "") -> RenderableType:
    """All there is to see after a step, in few enough lines for a terminal of 24."""
    parts: list[RenderableType] = [_advance(progress), "", split_table(progress.split, per="step")]
    if note:
        parts += ["", note]
    if progress.stats is not None:
        parts += ["", tier_table(progress.stats), "", route_table(progress.routes, per="step")]
    return Group(*parts)


def split_table(split: Split, *, per: str) -> Table:
    """What time was spent on, of one step or in all."""
    table = _table("time", f"seconds, {per}", "share")
    for name, seconds in split.parts().items():
        bar = _bar(seconds, split.total, _SPLIT_COLOURS[name])
        table.add_row(name, f"{seconds:.3f}", share(seconds, split.total), bar)
    return table


def tier_table(stats: Stats) -> Table:
    """What each tier holds."""
    chunks = sum(tier.chunks for tier in stats.tiers.values())
    table = _table("tier", "capacity", "in use", "chunks", "of state")
    for name, tier in stats.tiers.items():
        bar = _bar(tier.chunks, chunks, _TIER_COLOURS[name])
        used, capacity = size(tier.used_bytes), size(tier.capacity_bytes)
        table.add_row(name, capacity, used, str(tier.chunks), share(tier.chunks, chunks), bar)
    return table


def route_table(routes: Sequence[RouteRate], *, per: str) -> Table:
    """What went along each route, per step or in all."""
    table = _table("route", f"moves, {per}", f"bytes, {per}", "GB/s in update", "one move", bar=False)
    for route in sorted(routes, key=_as_travelled):
        gigabytes = f"{route.bytes_per_second / 1e9:.2f}"
        name = route.name.replace("->", " -> ")
        table.add_row(name, f"{route.moves:,}", size(route.bytes), gigabytes, f"{route.p50_ms:.2f} ms")
    return table


def _as_travelled(route: RouteRate) -> tuple[bool, int]:
    """Sort routes as a chunk takes them: up to where it is updated, and back."""
    source, destination = (TIER_NAMES.index(name) for name in route.name.split("->"))
    return (source < destination, -source if source > destination else source)


def _advance(progress: Progress) -> RenderableType:
    step, steps = len(progress.losses), progress.steps
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=_NAME)
    grid.add_column(min_width=_CURVE)
    grid.add_column(justify="right", min_width=14)
    grid.add_row(
        f"step {step}/{steps}", ProgressBar(steps, step, width=_CURVE), f"{time_left(progress.seconds_left)} left"
    )
    grid.add_row(
        f"loss {progress.losses[-1]:.3f}",
        Words(curve(progress.losses, _CURVE), style="yellow"),
        f"{progress.tokens_per_second:,.0f} tokens/s",
    )
    return grid


def _line(progress: Progress) -> str:
    step, steps = len(progress.losses), progress.steps
    total = progress.split.total or 1.0
    parts = "  ".join(f"{name} {seconds / total:.0%}" for name, seconds in progress.split.parts().items())
    speed = f"{progress.tokens_per_second:,.0f} tokens/s"
    line = f"step {step:>{len(str(steps))}}/{steps}  loss {progress.losses[-1]:.3f}  {speed}  {parts}"
    return line.replace("forward", "fwd").replace("backward", "bwd")


def _table(name: str, *numbers: str, bar: bool = True) -> Table:
    """A table with a name in the first column, then numbers, then a bar."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(name, no_wrap=True, min_width=_NAME)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True, min_width=_NUMBER_WITH_BAR if bar else _NUMBER)
    if bar:
        table.add_column("", no_wrap=True)
    return table


def _bar(part: float, whole: float, colour: str) -> RenderableType:
    return ProgressBar(whole or 1.0, part, width=_BAR, complete_style=colour, finished_style=colour)
