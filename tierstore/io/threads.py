"""The default engine: worker threads that call `preadv` and `pwritev`, which release the interpreter's lock.

It needs nothing but positioned reads and writes, and moves as many bytes per second as asynchronous I/O does. Each path
has its own workers; its requests are run in the order they came, and each worker carries one at a time to its end.
"""

from __future__ import annotations

import os
import threading
import time
from typing import ClassVar

from tierstore.crew import Crew
from tierstore.errors import EngineUnavailableError
from tierstore.io.base import Engine, Kind, Lane, Request
from tierstore.trace import Detail, Trace


class ThreadsEngine(Engine):
    """Positioned reads and writes from `threads` workers per path, never more than `queue_depth` of them at once."""

    name: ClassVar[str] = "threads"
    supports_direct: ClassVar[bool] = True

    def __init__(self, *, threads: int, queue_depth: int, request_size: int) -> None:
        if not is_available():
            raise EngineUnavailableError(
                "this platform has no os.preadv and os.pwritev: set tiers.nvme.io.engine to aiofiles"
            )
        super().__init__(request_size=request_size)
        self._workers = min(threads, queue_depth)

    def transfer(self, request: Request) -> int:
        """Do one positioned read or write of the request's rest and return the bytes moved; raises OSError."""
        operation = request.operation
        call = os.preadv if operation.kind is Kind.READ else os.pwritev
        return call(operation.fd, [request.view], request.offset)

    def _open_lane(self, path: str) -> Lane:
        crew = Crew(self._carry, self._lose, f"tierstore-io-{len(self._lanes)}")
        crew.grow(self._workers)
        return _Lane(crew)

    def _carry(self, request: Request) -> None:
        """Run one request to its end."""
        began = time.perf_counter()
        try:
            self._run(request)
        except BaseException as error:
            self._fail(request, error)
        if self.trace is not None:
            self._tell(self.trace, request, began)
        self._end(request)

    def _tell(self, trace: Trace, request: Request, began: float) -> None:
        what, worker = request.operation, threading.current_thread().name
        args: dict[str, Detail] = {"bytes": request.length, "offset": what.offset + request.start, "path": what.path}
        trace.add(worker, what.kind.value, began, time.perf_counter(), **args)

    def _run(self, request: Request) -> None:
        while self._begin(request) and not self._accept(request, self._call(request)):
            pass

    def _call(self, request: Request) -> int:
        try:
            return self.transfer(request)
        except OSError as error:
            if error.errno is None:
                raise
            return -error.errno


class _Lane:
    """A path's workers."""

    def __init__(self, crew: Crew[Request]) -> None:
        self._crew = crew

    @property
    def is_stuck(self) -> bool:
        at = self._crew.carried()
        return bool(at) and all(
            request is not None and request.progress.is_given_up and not request.has_ended for request in at
        )

    def put(self, request: Request) -> None:
        self._crew.put(request)

    def close(self) -> None:
        self._crew.close(leave=lambda request: request.progress.is_given_up)


def is_available() -> bool:
    """Say whether the platform has positioned reads and writes."""
    return hasattr(os, "preadv") and hasattr(os, "pwritev")
