"""Runs the benchmarks one after another, each in a fresh process, and renders the page.

With `--gpu` only those that have GPU figures, and only where there is an accelerator: then one run gets them all.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Column, Folders, Quick, Table, command, folders_of, open_console
from benchmarks.harness.report import RESULTS
from benchmarks.harness.show import rich_table
from tierstore.device import present_accelerator


@dataclass(frozen=True, slots=True)
class Run:
    """One benchmark: whether it takes folders, and what more it is told for GPU figures, if it has any."""

    name: str
    takes_folders: bool = True
    on_gpu: tuple[str, ...] | None = None


RUNS = (
    Run("swap_latency", on_gpu=()),
    Run("step_time", on_gpu=()),
    Run("in_backward", on_gpu=("--device=cuda",)),
    Run("peers", on_gpu=("--device=cuda",)),
    Run("arithmetic", takes_folders=False, on_gpu=("--device=cuda",)),
    Run("scaling"),
    Run("memory"),
    Run("checkpoint"),
    Run("retention", takes_folders=False),
    Run("predicted_vs_measured"),
    Run("pressure"),
    Run("import_cost", takes_folders=False),
)


def main(
    folder: Folders = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only what has GPU figures; an error without an accelerator.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; more than once for more.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where results, plots and the page go.")] = RESULTS,
    quick: Quick = False,
) -> None:
    """Run the benchmarks one after another and render the page."""
    folders = folders_of(folder)
    if gpu and present_accelerator() is None:
        raise typer.BadParameter("torch finds no accelerator here", param_hint="--gpu")
    unknown = set(only or ()) - {run.name for run in RUNS}
    if unknown:
        allowed = ", ".join(run.name for run in RUNS)
        raise typer.BadParameter(f"no benchmark {', '.join(unknown)}; allowed: {allowed}", param_hint="--only")
    chosen = [run for run in RUNS if not only or run.name in only]
    chosen = [run for run in chosen if not gpu or run.on_gpu is not None]
    results.mkdir(parents=True, exist_ok=True)
    console = open_console(sys.stdout)
    rows = []
    for run in chosen:
        console.rule(run.name)
        began = time.perf_counter()
        outcome = _outcome(run, _options(run, folders, results, is_gpu=gpu, is_quick=quick))
        rows.append({"name": run.name, "outcome": outcome, "seconds": time.perf_counter() - began})
    columns = (Column("name", "benchmark"), Column("outcome", ""), Column("seconds", "took", "seconds"))
    console.print(rich_table(Table("all", columns, tuple(rows))))
    subprocess.run([sys.executable, "-m", "benchmarks.page", "--results", str(results)], check=True)
    if any(row["outcome"] != "done" for row in rows):
        raise typer.Exit(1)


def _outcome(run: Run, options: Sequence[str]) -> str:
    status = subprocess.run([sys.executable, "-m", f"benchmarks.{run.name}", *options], check=False).returncode
    return "done" if status == 0 else f"failed with status {status}"


def _options(run: Run, folders: Sequence[Path], results: Path, *, is_gpu: bool, is_quick: bool) -> list[str]:
    path = results / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-{run.name}"
    options = [f"--json={path}.json", *(run.on_gpu or () if is_gpu else ())]
    options += [f"--folder={folder}" for folder in folders if run.takes_folders]
    if importlib.util.find_spec("matplotlib") is not None:
        options += [f"--plot={path}.png"]
        options += [f"--timeline={path}-timeline.png"] if run.name == "step_time" else []
    return options + (["--quick"] if is_quick else [])


if __name__ == "__main__":
    command(main)
