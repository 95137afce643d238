"""Shows how far a long save or load is, on a terminal and nowhere else. Measures nothing, decides nothing."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

QUIET_SECONDS = 1.0
"""What is over by then is not shown."""


class Bar:
    """A bar of bytes on standard error; only once something has taken QUIET_SECONDS. A context manager."""

    def __init__(self, words: str, total_bytes: int) -> None:
        self._words = words
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._shown: Any = None
        self._task: Any = None
        self._is_wanted = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()

    def tell(self, done_bytes: int) -> None:
        """Hear how many bytes are done."""
        if self._shown is not None:
            self._shown.update(self._task, completed=done_bytes)
        elif self._is_wanted and time.monotonic() - self._began > QUIET_SECONDS:
            self._show(done_bytes)

    def add(self, more_bytes: int) -> None:
        """Hear that so many bytes more are done; on any thread."""
        with self._lock:
            self._done_bytes += more_bytes
            self.tell(self._done_bytes)

    def _show(self, done_bytes: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
        self._shown = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._task = self._shown.add_task(self._words, total=self._total_bytes, completed=done_bytes)
        try:
            self._shown.start()
        except RuntimeError:  # there is no thread to draw it, which ends nobody's save
            self._shown.stop()
            self._shown, self._is_wanted = None, False
