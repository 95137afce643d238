"""The command line that every benchmark has, and what becomes of its report.

`--json` without a file writes a dated file under benchmarks/results; `--json -` writes to standard output, and all else
goes to standard error. A benchmark that cannot verify what it moved ends with status 1 and writes nothing.
"""

from __future__ import annotations

import json as json_
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from benchmarks.harness.pattern import VerificationError
from benchmarks.harness.report import Report
from benchmarks.harness.show import print_report
from tierstore.device import present_accelerator

DATED = "dated"
STDOUT = "-"
PLOTS = (".png", ".svg", ".pdf")
WIDTH = 140


def writable(target: Path | None) -> Path | None:
    """Find out before anything takes long whether a file can be written. Raises typer.BadParameter."""
    if target is None:
        return None
    if target.is_dir():
        raise typer.BadParameter(f"{target} is a folder: name a file in it")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise typer.BadParameter(f"{target} cannot be written: name a file in a folder that exists and is yours")
    return target


def drawable(target: Path | None) -> Path | None:
    """As `writable`, for a plot. Raises typer.BadParameter."""
    if target is not None and target.suffix not in PLOTS:
        raise typer.BadParameter(f"{target}: name a file that ends in {', '.join(PLOTS)}")
    if writable(target) is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("plots need matplotlib: pip install -e '.[bench]'")
    return target


def _json_target(target: str | None) -> str | None:
    if target is not None and target not in (DATED, STDOUT):
        writable(Path(target))
    return target


Json = Annotated[
    str | None,
    typer.Option(
        metavar="[FILE]",
        help="Write the report: to a dated file in benchmarks/results, to FILE, or to -.",
        callback=_json_target,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the figures (PNG, SVG or PDF; needs matplotlib).", callback=drawable),
]
Quick = Annotated[bool, typer.Option("--quick", help="Kilobytes: shows that it runs; the figures mean nothing.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are their medians.")]
Folders = Annotated[
    list[Path] | None,
    typer.Option("--folder", metavar="FOLDER", help="Where swap files go; more than once for several paths."),
]


Device = Annotated[str, typer.Option("--device", help="Where the parameters are: cpu or cuda.")]


def folders_of(given: Sequence[Path] | None) -> list[Path]:
    """The folders given, or those of $TIERSTORE_SWAP, or the temporary folder. Raises typer.BadParameter."""
    named = [Path(part) for part in os.environ.get("TIERSTORE_SWAP", "").split(os.pathsep) if part]
    folders = list(given or named or [Path(tempfile.gettempdir())])
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise typer.BadParameter(f"not a folder: {', '.join(missing)}", param_hint="--folder")
    return folders


def device_of(name: str) -> torch.device:
    """Where parameters are to be: the CPU, or the accelerator there is. Raises typer.BadParameter."""
    found = {"cpu": torch.device("cpu")}
    if (accelerator := present_accelerator()) is not None:
        found[accelerator.type] = accelerator
    if name not in found:
        raise typer.BadParameter(f"found {name!r}; here there is {', '.join(found)}", param_hint="--device")
    return found[name]


def bytes_of(size: str) -> int:
    """Read a size such as 8MiB, as policies write it. Raises typer.BadParameter."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError as error:
        raise typer.BadParameter(f"found {size!r}; allowed: a size such as 8MiB") from error


def command(main: Callable[..., None], arguments: Sequence[str] | None = None) -> None:
    """Run a benchmark's `main` with the options of the command line, or with `arguments`, in this process."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        app(args=_completed(given), standalone_mode=arguments is None)
    except VerificationError as error:
        if arguments is not None:
            raise
        print(f"error: what was moved is not what arrived, so nothing was measured: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def open_console(file: TextIO) -> Console:
    """What reports are printed on; wide enough for the tables where the output is no terminal and has no width."""
    console = Console(file=file, markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def publish(
    report: Report,
    *,
    json: str | None,
    plot: Path | None = None,
    draw: Callable[[Report], Any] | None = None,
    is_quick: bool = False,
) -> None:
    """Print the report, write it, and draw it; one of kilobytes says so."""
    if is_quick:
        report = replace(report, notes=("--quick: kilobytes were moved, and the figures mean nothing", *report.notes))
    plain = report.to_dict()
    console = open_console(sys.stderr if json == STDOUT else sys.stdout)
    print_report(console, report)
    if json == STDOUT:
        print(json_.dumps(plain, indent=1))
    elif json is not None:
        path = report.dated_path() if json == DATED else Path(json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_.dumps(plain, indent=1) + "\n")
        console.print(f"written: {path}", soft_wrap=True)
    if plot is not None and draw is not None:
        draw(report).savefig(plot)
        console.print(f"drawn: {plot}", soft_wrap=True)


def _completed(arguments: Sequence[str]) -> list[str]:
    """Give a bare `--json` its meaning."""
    completed = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        is_bare = argument == "--json" and following != STDOUT and following.startswith("-")
        completed.append(f"--json={DATED}" if is_bare else argument)
    return completed
