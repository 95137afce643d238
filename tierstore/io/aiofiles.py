"""The portable engine: buffered reads and writes of plain file objects, through the package `aiofiles`.

One daemon thread runs an event loop, and each path has its own workers for it; each request seeks and then reads or
writes a file object over the caller's descriptor. Positions belong to the open file, not to the object, so requests for
one descriptor take turns: that, not the number of workers, bounds this engine. It is for platforms without positioned
or direct I/O, and never faster than the others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from tierstore.crew import Calls, start
from tierstore.errors import EngineUnavailableError, PolicyError
from tierstore.io.base import Engine, Kind, Lane, Operation, Request

if TYPE_CHECKING:
    from types import ModuleType

_log = logging.getLogger("tierstore.io")


class AiofilesEngine(Engine):
    """Buffered reads and writes by `threads` workers of an event loop per path, at most `queue_depth` at once.

    Two descriptors made by `dup` share one position: never give both to the same engine at once.
    """

    name: ClassVar[str] = "aiofiles"
    supports_direct: ClassVar[bool] = False

    def __init__(self, *, threads: int, queue_depth: int, request_size: int) -> None:
        self._aiofiles = _load()
        super().__init__(request_size=request_size)
        self._threads = threads
        self._depth = queue_depth
        self._turns: WeakValueDictionary[int, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._must_end = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="tierstore-io-loop", daemon=True)
        try:
            start(self._thread)
        except BaseException:
            self._loop.close()
            raise

    def submit(self, operation: Operation) -> None:
        """Begin an operation on a buffered file; its `done` tells the end."""
        if operation.direct:
            raise PolicyError(
                f"the aiofiles engine cannot use {operation.path}, which is open for direct I/O: set "
                "tiers.nvme.io.direct to false, or tiers.nvme.io.engine to threads"
            )
        super().submit(operation)

    def _open_lane(self, path: str) -> Lane:
        return _Lane(self._launch, self._loop, self._threads, self._depth)

    def _run_loop(self) -> None:
        while not self._must_end:
            try:
                self._loop.run_forever()
            except BaseException:  # what it interrupted fails, all others go on
                _log.exception("the event loop was interrupted")
        self._loop.close()
        super()._stop()

    def _stop(self) -> None:
        is_lost = any(lane.is_stuck for lane in self._lanes.values())
        self._loop.call_soon_threadsafe(self._end_loop)
        if not is_lost:
            self._thread.join()

    def _end_loop(self) -> None:
        """End the loop, now or when the last request that was given up has come back."""
        self._must_end = True
        if not self._tasks:
            self._loop.stop()

    def _launch(self, request: Request, lane: _Lane) -> None:
        task = self._loop.create_task(self._work(request, lane))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._must_end:
            self._end_loop()

    async def _work(self, request: Request, lane: _Lane) -> None:
        try:
            turn = self._turns.setdefault(request.operation.fd, asyncio.Lock())
            async with lane.slots, turn:
                lane.running.add(request)
                try:
                    await self._run(request, lane.executor)
                finally:
                    lane.running.discard(request)
        except BaseException as error:
            self._fail(request, error)
        self._end(request)

    async def _run(self, request: Request, executor: Executor) -> None:
        while self._begin(request) and not self._accept(request, await self._call(request, executor)):
            pass

    async def _call(self, request: Request, executor: Executor) -> int:
        try:
            return await self._transfer(request, executor)
        except OSError as error:
            if error.errno is None:
                raise
            return -error.errno

    async def _transfer(self, request: Request, executor: Executor) -> int:
        fd = request.operation.fd
        # nothing is to be closed, and leaving it as a context would be done on a thread of the loop's own
        file = await self._aiofiles.open(fd, "r+b", buffering=0, closefd=False, executor=executor)
        await file.seek(request.offset)
        call = file.readinto if request.operation.kind is Kind.READ else file.write
        count: int | None = await call(request.view)
        return count or 0


class _Lane:
    """The workers of one path, and how many of its requests are with them."""

    def __init__(
        self, launch: Callable[[Request, _Lane], None], loop: asyncio.AbstractEventLoop, threads: int, depth: int
    ) -> None:
        self.executor = Calls("tierstore-io", threads)
        self.executor.grow()  # now, to know that they can be had
        self.slots = asyncio.Semaphore(depth)
        self.running: set[Request] = set()
        self._launch = launch
        self._loop = loop

    @property
    def is_stuck(self) -> bool:
        """Whether a request that was given up has the turn: the others of its descriptor wait for that."""
        return any(request.progress.is_given_up for request in tuple(self.running))

    def put(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._launch, request, self)

    def close(self) -> None:
        self.executor.shutdown()


def _load() -> ModuleType:
    try:
        import aiofiles
    except ImportError as error:
        raise EngineUnavailableError(
            "the package aiofiles is not installed: pip install aiofiles, or set tiers.nvme.io.engine to threads"
        ) from error
    return aiofiles
