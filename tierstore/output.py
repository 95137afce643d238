"""Where a command's JSON goes: a file, or stdout. Looked at before the work, written after it.

And how an error is told, with which exit status.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tierstore.errors import SwapError, TierstoreError

STDOUT = "-"
FAILED, INTERRUPTED = 2, 130
"""Exit statuses of every command: it cannot be carried out; Ctrl-C."""


class OutputError(TierstoreError, ValueError):
    """The file named by --json, or standard output, cannot be written."""


def check_target(target: str | None) -> None:
    """Find out, before anything takes long, whether a file can be written. Raises OutputError."""
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise OutputError(f"--json {target}: is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"--json {target}: cannot be written; name a file in a folder that exists and is yours")


def write_json(target: str | None, content: dict[str, Any]) -> None:
    """Write to a file or to stdout; to nowhere where `target` is None. Raises OutputError."""
    if target is None:
        return
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if target == STDOUT:
        if sys.stdout is None:
            raise OutputError("--json: there is no standard output, it was closed before the start; name a file")
        write_stdout(lambda: sys.stdout.write(text))
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise OutputError(f"--json {target}: cannot be written ({error.strerror})") from error


def write_stdout(work: Callable[[], object]) -> None:
    """Do what writes to standard output, and see it there. Raises OutputError; a closed pipe is left to the caller."""
    try:
        work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        sys.stdout = None  # what is left in it would be tried once more at the end
        raise OutputError(f"standard output cannot be written ({error.strerror})") from error


def error_text(error: TierstoreError) -> str:
    """What happened, without an error number; the file's name if it is not in the text."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    name = str(error.filename or "")
    text = error.strerror if name in error.strerror else f"{name}: {error.strerror}"
    return f"{text} (here: --swap FOLDER)" if isinstance(error, SwapError) else text


def exit_status_of(work: Callable[[], int]) -> int:
    """Do a command's work, and return its exit status; tell an error of tierstore's in one message."""
    try:
        return work()
    except TierstoreError as error:
        _tell(error_text(error))
        return FAILED
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        sys.stdout = None  # what is left in it would be tried once more at the end
        _tell(f"standard output cannot be written ({error.strerror})")
        return FAILED
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED


def _tell(text: str) -> None:
    typer.echo(f"error: {text}", err=True)
