"""The portable engine: buffered reads and writes of plain file objects, through the package `aiofiles`.

One daemon thread runs an event loop, and each path has its own workers for it; each request seeks and then reads or
writes a file object over the caller's descriptor. Positions belong to the open file, not to the object, so requests for
one descriptor take turns: that, not the number of workers, bounds this engine. It is for platforms without positioned
or direct I/O, and never faster than the others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakValueDictionary

from tierstore.errors import EngineUnavailableError, PolicyError
from tierstore.io.base import Engine, Kind, Lane, Operation, Request

if TYPE_CHECKING:
    from types import ModuleType


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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tierstore-io-loop", daemon=True)
        self._thread.start()

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

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        super()._stop()

    def _launch(self, request: Request, lane: _Lane) -> None:
        task = self._loop.create_task(self._work(request, lane))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, request: Request, lane: _Lane) -> None:
        try:
            turn = self._turns.setdefault(request.operation.fd, asyncio.Lock())
            async with lane.slots, turn:
                await self._run(request, lane.executor)
        except BaseException as error:
            self._fail(request, error)
        self._end(request)

    async def _run(self, request: Request, executor: Executor) -> None:
        while not request.is_abandoned and not self._accept(request, await self._call(request, executor)):
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
        async with self._aiofiles.open(fd, "r+b", buffering=0, closefd=False, executor=executor) as file:
            await file.seek(request.offset)
            call = file.readinto if request.operation.kind is Kind.READ else file.write
            count: int | None = await call(request.view)
        return count or 0


class _Lane:
    """The workers of one path, and how many of its requests are with them."""

    def __init__(
        self, launch: Callable[[Request, _Lane], None], loop: asyncio.AbstractEventLoop, threads: int, depth: int
    ) -> None:
        self.executor = ThreadPoolExecutor(threads, thread_name_prefix="tierstore-io")
        self.slots = asyncio.Semaphore(depth)
        self._launch = launch
        self._loop = loop

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
