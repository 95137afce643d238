"""The default engine: worker threads that call `preadv` and `pwritev`, which release the interpreter's lock.

It needs nothing but positioned reads and writes, and moves as many bytes per second as asynchronous I/O does. Requests
are run in the order they came; each worker carries one at a time to its end.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import ClassVar

from tierstore.errors import EngineUnavailableError
from tierstore.io.base import Engine, Kind, Request
from tierstore.trace import Detail, Trace


class ThreadsEngine(Engine):
    """Positioned reads and writes from `threads` workers, never more than `queue_depth` of them at once."""

    name: ClassVar[str] = "threads"
    supports_direct: ClassVar[bool] = True

    def __init__(self, *, threads: int, queue_depth: int, request_size: int) -> None:
        if not is_available():
            raise EngineUnavailableError(
                "this platform has no os.preadv and os.pwritev: set tiers.nvme.io.engine to aiofiles"
            )
        super().__init__(request_size=request_size)
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"tierstore-io-{number}", daemon=True)
            for number in range(min(threads, queue_depth))
        ]
        for worker in self._workers:
            worker.start()

    def transfer(self, request: Request) -> int:
        """Do one positioned read or write of the request's rest and return the bytes moved; raises OSError."""
        operation = request.operation
        call = os.preadv if operation.kind is Kind.READ else os.pwritev
        return call(operation.fd, [request.view], request.offset)

    def _start(self, request: Request) -> None:
        self._requests.put(request)

    def _stop(self) -> None:
        for _ in self._workers:
            self._requests.put(None)
        for worker in self._workers:
            worker.join()

    def _work(self) -> None:
        while self._carry(self._requests.get()):  # an idle worker keeps no request, and so no memory of the caller's
            pass

    def _carry(self, request: Request | None) -> bool:
        """Run one request to its end; False when there are no more."""
        if request is None:
            return False
        began = time.perf_counter()
        try:
            self._run(request)
        except BaseException as error:
            self._fail(request, error)
        if self.trace is not None:
            self._tell(self.trace, request, began)
        self._end(request)
        return True

    def _tell(self, trace: Trace, request: Request, began: float) -> None:
        what, worker = request.operation, threading.current_thread().name
        args: dict[str, Detail] = {"bytes": request.length, "offset": what.offset + request.start, "path": what.path}
        trace.add(worker, what.kind.value, began, time.perf_counter(), **args)

    def _run(self, request: Request) -> None:
        while not request.is_abandoned and not self._accept(request, self._call(request)):
            pass

    def _call(self, request: Request) -> int:
        try:
            return self.transfer(request)
        except OSError as error:
            if error.errno is None:
                raise
            return -error.errno


def is_available() -> bool:
    """Say whether the platform has positioned reads and writes."""
    return hasattr(os, "preadv") and hasattr(os, "pwritev")
