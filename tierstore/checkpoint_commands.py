"""The command line of checkpoints: inspect, verify, diff, convert. Knows options and exit statuses.

Everything heavy is imported within the commands, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tierstore.output import check_target, exit_status_of

SOUND, DIFFERENT = 0, 1
"""Exit statuses: nothing is wrong; something is, or differs. Others are those of every command."""

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, verify, compare and convert them.")

JsonOption = Annotated[
    str | None,
    typer.Option(metavar="[FILE]", help="Write it as JSON; without FILE to stdout, and all else to stderr."),
]
PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a file of torch's.")]


class CompressionName(StrEnum):
    """What blocks are compressed with."""

    NONE = "none"
    ZSTD = "zstd"


@app.command()
def inspect(
    path: PathArgument,
    norms: Annotated[bool, typer.Option(help="Read all values for their norms.")] = True,
    json: JsonOption = None,
) -> None:
    """Show what a checkpoint holds: the tree with shapes, bytes, steps and norms.

    Exit status: 0; 2 when it cannot be read.
    """

    def work() -> int:
        from tierstore.checkpoint_view import show_contents

        show_contents(path, norms=norms, json=json)
        return SOUND

    raise typer.Exit(_run(work, json))


@app.command()
def verify(path: PathArgument, json: JsonOption = None) -> None:
    """Read all of a checkpoint, and compare checksums, sizes and metadata.

    Exit status: 0 when it is complete and sound; 1 when it is not; 2 when there is none, or it cannot be read.
    """

    def work() -> int:
        from tierstore.checkpoint_view import show_problems

        return SOUND if show_problems(path, json=json) else DIFFERENT

    raise typer.Exit(_run(work, json))


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or a file of torch's.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    json: JsonOption = None,
) -> None:
    """Show in what two checkpoints differ: hyper-parameters, shapes, steps, and every value.

    Exit status: 0 when they hold the same, to the bit; 1 when they differ; 2 when one cannot be read.
    """

    def work() -> int:
        from tierstore.checkpoint_view import show_differences

        return SOUND if show_differences(one, other, json=json) else DIFFERENT

    raise typer.Exit(_run(work, json))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a file of torch's.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="What is written.")],
    nd: Annotated[
        bool, typer.Option("--nd", help="Write arrays of the tensors' own shapes for other tools; no checkpoint.")
    ] = False,
    compression: Annotated[CompressionName, typer.Option(help="Of a checkpoint that is written.")] = (
        CompressionName.NONE
    ),
) -> None:
    """Turn a file of torch's into a checkpoint, or a checkpoint into a file of torch's.

    Exit status: 0; 2 when it cannot be carried out, and TARGET is as it was.
    """

    def work() -> int:
        from tierstore.checkpoint_view import show_conversion

        show_conversion(source, target, nd=nd, compression=compression.value)
        return SOUND

    raise typer.Exit(_run(work, None))


def _run(work: Callable[[], int], json: str | None) -> int:
    """Do it, if what it finds can be written where `json` says."""

    def checked() -> int:
        check_target(json)
        return work()

    return exit_status_of(checked)
