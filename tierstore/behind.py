"""Writes on a thread of its own what was copied for it: a few buffers, filled by one thread, emptied here.

The thread sees its buffers and the writer of a checkpoint, nothing else: no tier, no ledger, no parameter. After an
error it writes no more, but goes on taking buffers until it hears that no more will come, so that whoever fills them
never waits in vain. A disk that hangs is not waited for: the checkpoint is given up, and the thread left to itself.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol

from torch import Tensor

from tierstore.cores import on_one_core
from tierstore.crew import start
from tierstore.errors import CheckpointFileError
from tierstore.guard import WORKER_PREFIX
from tierstore.mapping import map_host_memory
from tierstore.signals import break_point

BUFFERS = 3
"""One is filled, one is written, and one waits between."""
MOST_BUFFERS = 8
"""Of small ones, several of which are filled at once, and written."""
MOST_BYTES = 16 << 20
"""Of all buffers, if there are more than BUFFERS."""


class Sink(Protocol):
    """The writer of a checkpoint: a context manager that abandons what was not committed."""

    def write(self, section: str, number: int, field: str, start: int, values: Tensor) -> None:
        """Store a part of a field, a 1-D CPU tensor; has copied it when it returns."""

    def commit(self, *, keep_last: int | None = None) -> None:
        """Let the checkpoint be there, complete."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Abandon what was not committed."""


Job = Callable[[Sink], None]
"""Writes what is in one buffer."""


class WriteBehind:
    """What is on its way into the checkpoint at `path`. For the one thread that fills the buffers.

    Whenever it waits, `tell` hears how many bytes are written. A buffer that takes longer than `timeout_seconds` to be
    written ends the checkpoint; to bring all to the disk in the end may take any time.
    """

    def __init__(
        self, sink: Sink, *, path: str, buffer_bytes: int, keep_last: int | None, timeout_seconds: float
    ) -> None:
        """Take over a writer that was entered and knows its entries. Raises NoThreadError, without having taken it."""
        self.error: BaseException | None = None
        self.tell: Callable[[int], None] = _tell_nobody
        self.written_bytes = 0
        self._sink = sink
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._keep_last = keep_last
        self._buffer_bytes = buffer_bytes
        self._count = max(BUFFERS, min(MOST_BUFFERS, MOST_BYTES // buffer_bytes))
        self._free: list[Tensor] = []
        self._made = 0
        self._jobs: deque[tuple[Tensor, Job, int]] = deque()
        self._unwritten = 0  # buffers on their way
        self._changed = threading.Condition()
        self._is_complete = self._is_over = self._is_given_up = False
        self._thread = threading.Thread(
            target=on_one_core, args=(self._main,), name=f"{WORKER_PREFIX}checkpoint", daemon=True
        )
        start(self._thread)

    @property
    def has_failed(self) -> bool:
        """Whether nothing more will be written."""
        return self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is there, or was given up."""
        return self._is_over

    @property
    def most_at_once(self) -> int:
        """How many buffers to fill at once, while as many are written."""
        return self._count // 2

    def wait_for_buffer(self) -> tuple[Tensor, float]:
        """Get a buffer (uint8, page-aligned host memory) to be filled, and the seconds that it took.

        Raises CheckpointFileError, with the checkpoint given up, if the disk hangs.
        """
        began = time.perf_counter()
        with self._changed:
            if not self._free and self._made < self._count:
                buffer = map_host_memory(self._buffer_bytes)
                self._made += 1
                return buffer, 0.0
            if not self._changed.wait_for(lambda: bool(self._free), self._timeout_seconds):
                raise self._give_up()
            buffer, written = self._free.pop(), self.written_bytes
        self.tell(written)
        return buffer, time.perf_counter() - began

    def put(self, buffer: Tensor, job: Job, nbytes: int) -> None:
        """Let a job write so many bytes of a filled buffer, which is the thread's from now on."""
        with self._changed:
            self._jobs.append((buffer, job, nbytes))
            self._unwritten += 1
            self._changed.notify_all()

    def drop(self) -> None:
        """Hear that the buffer got last is lost: something may write to it yet."""
        with self._changed:
            self._made -= 1

    def complete(self) -> None:
        """Say that nothing more comes; the checkpoint is committed once all is written, or given up if that failed."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Give the checkpoint up; what went wrong first counts."""
        with self._changed:
            self.error = self.error or error
            self._is_complete = True
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        """Wait until the checkpoint is there or given up."""
        while not self._is_over:
            with self._changed:
                limit, before = self._timeout_seconds if self._unwritten else None, self._unwritten
                if not self._is_over and not self._changed.wait(limit) and self._unwritten == before:
                    self._give_up()  # it is notified of every buffer that was written
            self.tell(self.written_bytes)
            break_point()
        if not self._is_given_up:
            self._thread.join()

    def _give_up(self) -> CheckpointFileError:
        """Leave the thread, and what it waits for, to itself; it abandons the checkpoint once it is back."""
        reason = (
            f"nothing was written for {self._timeout_seconds:g} s (tiers.nvme.io.timeout), so the disk hangs: the "
            f"checkpoint is given up, and what stood at the path before stays"
        )
        error = CheckpointFileError(errno.ETIMEDOUT, reason, self._path)
        self.error = self.error or error
        self._is_complete = self._is_given_up = self._is_over = True
        self._changed.notify_all()
        return error

    def _main(self) -> None:
        with ExitStack() as writing:
            writing.callback(self._end)
            writing.push(self._leave)
            while (job := self._next_job()) is not None:
                self._do(*job)
            if not self.has_failed:
                self._sink.commit(keep_last=self._keep_last)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Leave the writer, which abandons what it did not commit."""
        self.error = self.error or error
        try:
            self._sink.__exit__(kind, error, traceback)
        except BaseException as another:
            self.error = self.error or another
        return True

    def _next_job(self) -> tuple[Tensor, Job, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._jobs) or self._is_complete)
            return self._jobs.popleft() if self._jobs else None

    def _do(self, buffer: Tensor, job: Job, nbytes: int) -> None:
        try:
            if not self.has_failed:
                job(self._sink)
        except BaseException as error:
            self.error = self.error or error
        with self._changed:
            self.written_bytes += nbytes
            self._unwritten -= 1
            self._free.append(buffer)
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._free.clear()
            self._is_over = True
            self._changed.notify_all()


def _tell_nobody(written_bytes: int) -> None:
    pass
