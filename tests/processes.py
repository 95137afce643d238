"""Processes for tests that must end one, or fork one: forked from a server that has imported torch, so that each is
there in a tenth of a second. The server has no threads, and none of what the tests' own process has done to torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

PATIENCE_SECONDS = 600.0
"""How long a test waits for a process before it fails; never waited out when the code is right."""

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


class Child:
    """A process that calls a function of a module, with arguments that can be pickled; a context that ends it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._here, there = _context.Pipe()
        self._process = _context.Process(target=_work, args=(there, function, arguments))
        self._process.start()
        there.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._here.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def is_over_within(self, seconds: float) -> bool:
        """Wait for its end, and say whether it came."""
        self._process.join(seconds)
        return self._process.exitcode is not None

    def wait(self) -> int:
        """Wait for its end: the exit status, or minus the signal that killed it."""
        assert self.is_over_within(PATIENCE_SECONDS), "the process does not end"
        return int(self._process.exitcode)

    def kill(self) -> None:
        """Send SIGKILL and wait until it is gone, with all of its threads and files."""
        self._process.kill()
        self.wait()

    def send(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def result(self) -> Any:
        """What the function returned; what it raised is raised here, as text."""
        try:
            assert self._here.poll(PATIENCE_SECONDS), "the process does not answer"
            is_well, answer = self._here.recv()
        except EOFError:
            raise AssertionError(f"the process ended with {self.wait()} and no answer") from None
        assert is_well, answer
        self.wait()
        return answer


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own and return what it returns."""
    with Child(function, *arguments) as child:
        return child.result()


def barrier(parties: int) -> Any:
    """What so many processes wait for each other at: an argument for a `Child`."""
    return _context.Barrier(parties, timeout=PATIENCE_SECONDS)


def run_script(code: str, folder: Path, *, to_its_end: bool = False) -> str:
    """Run Python code in a process of its own, with `folder` defined; return what comes of it on stdout and stderr.

    `to_its_end`: let the interpreter end as it does after a script, which takes torch a second.
    """
    with TemporaryDirectory() as name:
        printed = Path(name) / "printed"
        with Child(_script, textwrap.dedent(code), str(folder), printed, to_its_end) as child:
            status = child.wait()
        text = printed.read_text()
    assert status == 0, f"it ended with {status}: {text}"
    return text


def exit_as_a_script_does(code: int = 0) -> NoReturn:
    """End the interpreter: threads are joined, exit functions called, modules torn down. A forked child skips that."""
    sys.stdout.flush()
    ctypes.pythonapi.Py_Exit(code)
    raise AssertionError


def _script(code: str, folder: str, printed: Path, to_its_end: bool) -> None:
    status: Any = 0
    main = sys.modules["__main__"].__dict__  # torn down last of all
    main["folder"] = folder
    with printed.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    try:
        exec(code, main)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if to_its_end:
        exit_as_a_script_does(status)
    sys.stdout.flush()
    os._exit(status)


def _work(there: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell put the tests into the background
    try:
        answer = True, function(*arguments)
    except Exception:
        answer = False, traceback.format_exc()
    there.send(answer)
