"""The command line. Knows the options and how errors are told; what a command does is in its own module.

Everything heavy is imported within the commands, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

import tierstore
from tierstore import checkpoint_commands
from tierstore.demo.options import HEAD_WIDTH, DemoError, Options
from tierstore.output import STDOUT, exit_status_of

DEFAULTS = Options()
MODEL, STATE, OUTPUT = "What is trained", "Where its state lives", "What is shown"
SPEED = "How fast it is"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(checkpoint_commands.app, name="checkpoint")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit; `arguments` None: those of the process."""
    app(args=_with_value(sys.argv[1:] if arguments is None else arguments, "--json", STDOUT), prog_name="tierstore")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(tierstore.__version__)
        raise typer.Exit()


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """AdamW whose state lives on the GPU, in pinned host memory and in NVMe swap files."""


@app.command()
def demo(
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps to train.", rich_help_panel=MODEL)
    ] = DEFAULTS.steps,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What to train on, instead of Python's help topics.", rich_help_panel=MODEL),
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            min=HEAD_WIDTH, metavar="N", help=f"Of the model: a multiple of {HEAD_WIDTH}.", rich_help_panel=MODEL
        ),
    ] = DEFAULTS.width,
    layers: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of the model.", rich_help_panel=MODEL)
    ] = DEFAULTS.layers,
    context: Annotated[
        int, typer.Option(min=2, metavar="N", help="How many bytes it sees at once.", rich_help_panel=MODEL)
    ] = DEFAULTS.context,
    batch: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many such windows a step.", rich_help_panel=MODEL)
    ] = DEFAULTS.batch,
    lr: Annotated[
        float, typer.Option(min=0.0, metavar="RATE", help="The highest learning rate.", rich_help_panel=MODEL)
    ] = DEFAULTS.learning_rate,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of weights and batches.", rich_help_panel=MODEL)
    ] = DEFAULTS.seed,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where the model is: auto, cpu or cuda.", rich_help_panel=MODEL)
    ] = DEFAULTS.device,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A policy, instead of one made to fit the model.", rich_help_panel=STATE),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="The tiers to use of those, as cpu,nvme.", rich_help_panel=STATE),
    ] = None,
    swap: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER", help="Where swap files go; more than once for several disks.", rich_help_panel=STATE
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Train it again with torch's AdamW; compare every bit.", rich_help_panel=OUTPUT),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines, as when there is no terminal.", rich_help_panel=OUTPUT)
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE]",
            help="Write the results as JSON; without FILE to stdout, and all else to stderr.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Train a small language model on real text while its optimizer state lives in three tiers at once.

    Exit status: 0; 1 when --verify finds a difference; 2 when something cannot be carried out; 130 after Ctrl-C.
    """
    options = Options(
        steps=steps,
        text=text,
        seed=seed,
        verify=verify,
        policy=policy,
        tiers=None if tiers is None else tuple(name.strip() for name in tiers.split(",")),
        swap=tuple(swap or ()),
        plain=plain,
        json=json,
        width=width,
        layers=layers,
        context=context,
        batch=batch,
        learning_rate=lr,
        device=device,
    )
    raise typer.Exit(_run_demo(options))


@app.command()
def doctor(
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The policy to examine this machine for, not the defaults.")
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A swap folder, instead of the policy's; more than once for several."),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure disks, memory and arithmetic, for about a second, and show what is chosen."
        ),
    ] = False,
    json: Annotated[
        str | None,
        typer.Option(metavar="[FILE]", help="Write it as JSON; without FILE to stdout, and all else to stderr."),
    ] = None,
) -> None:
    """Look at what this machine has for state in tiers, and say what to do about what is missing.

    Exit status: 0, also with warnings; 1 when something fails; 2 when the examination cannot be carried out.
    """
    raise typer.Exit(_run_doctor(policy, tuple(path or ()), calibrate, json))


@app.command()
def plan(
    params: Annotated[
        str | None, typer.Option(metavar="N", help="How many parameters, as 125M, 7B or 1T.", rich_help_panel=MODEL)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="What makes the model, on the meta device.", rich_help_panel=MODEL
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters, with --params.", rich_help_panel=MODEL)] = "bfloat16",
    compute_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="What forward and backward take.", rich_help_panel=MODEL)
    ] = 0.0,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A policy, instead of the defaults.", rich_help_panel=STATE)
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Capacity of the gpu tier, as 24GiB.", rich_help_panel=STATE)
    ] = None,
    cpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Capacity of the cpu tier.", rich_help_panel=STATE)
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Capacity of the nvme tier, or auto.", rich_help_panel=STATE)
    ] = None,
    path: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="A swap folder; more than once for several.", rich_help_panel=STATE),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that share the machine.", rich_help_panel=STATE)
    ] = None,
    nvme_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of all swap folders, reads and writes, as 6GB/s.", rich_help_panel=SPEED),
    ] = None,
    link_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Each way between accelerator and host.", rich_help_panel=SPEED),
    ] = None,
    update_rate: Annotated[
        float | None,
        typer.Option(metavar="N", help="Float32 parameters that are updated in a second.", rich_help_panel=SPEED),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine first, for some seconds.", rich_help_panel=SPEED)
    ] = False,
    tbw: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What each drive may be written in all, as 600TB.", rich_help_panel=SPEED),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE]",
            help="Write it as JSON; without FILE to stdout, and all else to stderr.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Say before training where the state of a model will live, whether it fits, and what a step will cost.

    Exit status: 0 when it fits; 1 when it does not; 2 when the plan cannot be carried out.
    """
    options: dict[str, Any] = {
        "params": params,
        "model": model,
        "dtype": dtype,
        "policy": policy,
        "capacities": {"gpu": gpu, "cpu": cpu, "nvme": nvme},
        "paths": tuple(path or ()),
        "ranks": ranks,
        "nvme_bandwidth": nvme_bandwidth,
        "link_bandwidth": link_bandwidth,
        "update_rate": update_rate,
        "tbw": tbw,
        "compute_seconds": compute_seconds,
        "calibrate": calibrate,
        "json": json,
    }

    def work() -> int:
        from tierstore.forecast.command import Options, run

        return run(Options(**options))

    raise typer.Exit(exit_status_of(work))


@app.command()
def top(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `monitor: FILE` in the job's policy names.")],
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="How often to look.")] = 1.0,
) -> None:
    """Watch a running job: its tiers, routes, waits and decisions.

    Ends with the job, or at Ctrl-C. Exit status: 0; 1 when the job is gone, with --once also when it is silent; 2 when
    the file cannot be read.
    """

    def work() -> int:
        from tierstore.top.job import run

        return run(file, once=once, every=every)

    raise typer.Exit(exit_status_of(work))


@app.command()
def report(
    file: Annotated[Path, typer.Argument(metavar="RUN.json", help="What `record: FILE` in the job's policy names.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page; else RUN.html beside RUN.json.")
    ] = None,
) -> None:
    """Make one page of how a run went: where chunks were, what steps took, bandwidth, decisions.

    Exit status: 0; 2 when it cannot be read or written.
    """

    def work() -> int:
        from tierstore.report.job import run

        typer.echo(run(file, output))
        return 0

    raise typer.Exit(exit_status_of(work))


def _run_doctor(policy: Path | None, paths: tuple[Path, ...], calibrate: bool, json: str | None) -> int:
    def work() -> int:
        from tierstore.doctor.examination import Options, run

        return run(Options(policy, paths, calibrate, json))

    return exit_status_of(work)


def _run_demo(options: Options) -> int:
    # Threads that spin while they wait for each other keep the cores from swap I/O and from whatever else runs here:
    # on two busy cores a step took 3 to 7 times as long. Waiting passively costs a fifth on idle ones. Only read when
    # torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def work() -> int:
        if options.width % HEAD_WIDTH:
            raise DemoError(f"--width {options.width}: give a multiple of {HEAD_WIDTH}, the width of an attention head")
        from tierstore.demo.job import run

        return run(options)

    return exit_status_of(work)


def _with_value(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """Give an option whose value may be left out its `value` where no other follows."""
    completed = []
    for argument, following in pairwise([*arguments, "--"]):
        is_bare = argument == option and following != value and following.startswith("-")
        completed.append(f"{option}={value}" if is_bare else argument)
    return completed
