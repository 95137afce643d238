"""Looks at a job's file again and again, says when the job is gone or silent, and ends with it or at Ctrl-C."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console, RenderableType
from rich.live import Live

from tierstore.history import Job, Picture
from tierstore.output import write_stdout
from tierstore.seen import read_picture
from tierstore.top.view import LEAST_WANTED, WIDTH, draw

SILENT_SECONDS = 10.0
"""After so long without a new picture, the job is said to be silent; a step may take longer."""
WELL, GONE = 0, 1
"""Exit statuses: the job runs, or has ended as it should; it is gone without a word."""


@dataclass(frozen=True, slots=True)
class State:
    """How a job is, in words."""

    text: str
    is_well: bool = True
    is_over: bool = False


def run(path: Path, *, once: bool, every: float) -> int:
    """Show the file's job, once or until it is over; return the exit status. Raises SeenError or OutputError."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    if once:
        return _show_once(path, console)
    show = _show_lines if not console.is_terminal or console.is_dumb_terminal else _show_live
    try:
        return show(path, console, every)
    except KeyboardInterrupt:  # how one stops looking
        return WELL


def state_of(picture: Picture, *, now: float, exists: Callable[[Job], bool | None]) -> State:
    """How a job is, by its last picture; `exists` None: not to be known from here."""
    silent = now - picture.time
    if picture.ended:
        return State("ended", is_over=True)
    if exists(picture.job) is False:
        return State("gone: its process is no more, and did not say that it ended", is_well=False, is_over=True)
    if silent > SILENT_SECONDS:
        return State(f"stale: nothing new for {silent:.0f} s, the last step takes that long or hangs", is_well=False)
    return State("running")


def exists(job: Job) -> bool | None:
    """Whether a job's process is there; None on another host."""
    if job.host != socket.gethostname():
        return None
    try:  # another process may have got the number since
        return bool(psutil.Process(job.pid).create_time() <= job.started + 1.0)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True


def fitting(picture: Picture, state: State, console: Console) -> RenderableType:
    """As much of a picture as the terminal has lines for."""
    for number in range(len(LEAST_WANTED) + 1):
        without = LEAST_WANTED[:number]
        drawn = draw(picture, state.text, is_well=state.is_well, width=console.width, without=without)
        if len(console.render_lines(drawn)) < console.height:
            break
    return drawn


def _look(path: Path) -> tuple[Picture, State]:
    picture = read_picture(path)
    return picture, state_of(picture, now=time.time(), exists=exists)


def _show_once(path: Path, console: Console) -> int:
    picture, state = _look(path)
    write_stdout(lambda: console.print(draw(picture, state.text, is_well=state.is_well, width=console.width)))
    return WELL if state.is_well else GONE


def _show_live(path: Path, console: Console, every: float) -> int:
    picture, state = _look(path)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(fitting(picture, state, console), refresh=True)
            if state.is_over:
                return WELL if state.is_well else GONE
            _wait(every)
            picture, state = _look(path)


def _show_lines(path: Path, console: Console, every: float) -> int:
    """One picture after another, as often as there is a new one."""
    shown: tuple[float, State] | None = None
    while True:
        picture, state = _look(path)
        if shown is None or shown[0] != picture.time or shown[1].is_well != state.is_well:
            shown = picture.time, state
            write_stdout(lambda: console.print(draw(picture, state.text, is_well=state.is_well)))  # noqa: B023
        if state.is_over:
            return WELL if state.is_well else GONE
        _wait(every)


def _wait(seconds: float) -> None:
    """Wait for somebody who looks; Ctrl-C ends it."""
    threading.Event().wait(seconds)
