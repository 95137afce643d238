"""The parent's end of a peer's process: starts it, gives orders, takes answers, and knows when it died.

A peer that is absent or fails stays so: later orders are not sent, and `trouble` says why. The process ends with
`finish`, or is killed when the parent lets go of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.work import Work

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: a system of the runner, how much host memory its optimizer may take, and its own options.

    `beside` names the row that its parameters/s are divided by, and `target` is what that ratio is to reach.
    `memory_of` names one that was started before: the budget is what that was seen to take.
    """

    name: str
    system: str
    budget_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: str = ""
    target: float | None = None
    memory_of: str = ""


class Peer:
    """A contender's process. Its folder is its own, inside `folder`."""

    def __init__(self, contender: Contender, work: Work, folder: Path, variables: Mapping[str, str]) -> None:
        self.contender = contender
        self.trouble = ""
        self.steps_taken = 0
        self._folder = folder
        self._folder.mkdir()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.runner"],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        job = {"system": contender.system, "work": work.to_dict(), "budget_bytes": contender.budget_bytes}
        self.begun = self._exchange({**job, "folder": str(folder), "options": dict(contender.options)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def steps(self, count: int) -> dict[str, Any] | None:
        """Take `count` steps and answer what the runner measured; None if the peer is in trouble."""
        answer = self._order({"do": "steps", "count": count})
        self.steps_taken += answer["taken"] if answer is not None else 0
        return answer

    def watch_memory(self, count: int) -> None:
        """Take `count` steps, and keep the most memory there was in one as `seen_bytes` of what the peer began with."""
        answer = self._order({"do": "memory", "count": count})
        if answer is not None:
            self.steps_taken += answer["taken"]
            self.begun = {**(self.begun or {}), "seen_bytes": answer["seen_bytes"]}

    def finish(self, reference: Path) -> dict[str, Any] | None:
        """Compare the weights, end the process, and add what it left in its folder; None if the peer is in trouble."""
        answer = self._order({"do": "finish", "reference": str(reference)})
        if answer is None:
            return None
        self._process.wait()
        left = [file for file in self._folder.rglob("*") if file.is_file()]
        return {**answer, "files_left": len(left), "bytes_left": sum(file.stat().st_size for file in left)}

    def _order(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if self.trouble else self._exchange(order)

    def _exchange(self, order: Mapping[str, Any]) -> dict[str, Any] | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        if not line:
            self.trouble = f"ended with status {self._process.wait()}: {self._last_words()}"
            return None
        answer: dict[str, Any] = json.loads(line)
        self.trouble = "".join(f"{word}: {answer[word]}" for word in ("absent", "failed") if word in answer)
        return None if self.trouble else answer

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
