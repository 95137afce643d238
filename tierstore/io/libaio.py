"""Linux's native asynchronous I/O, through the PyPI package `libaio`.

Each path has a context of the kernel's and one thread that owns it: it hands requests over, at most `queue_depth` at a
time, and reaps what has completed. It waits in one place, on an eventfd that the kernel signals for completions and
`submit` and `close` signal for news, so that nothing polls. Blocks stay referenced until the kernel has returned them,
so no buffer can vanish under it. On a buffered file the kernel works while it takes a request, and so it does on a disk
whose own queue is full: use this engine with direct I/O, and never one thread for two paths.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import deque
from typing import Any, ClassVar

from tierstore.crew import start
from tierstore.errors import EngineUnavailableError
from tierstore.io.base import Engine, Kind, Lane, Request

_log = logging.getLogger("tierstore.io")


class LibaioEngine(Engine):
    """Asynchronous reads and writes with at most `queue_depth` requests of each path in the kernel."""

    name: ClassVar[str] = "libaio"
    supports_direct: ClassVar[bool] = True

    def __init__(self, *, queue_depth: int, request_size: int) -> None:
        self._libaio = _load()
        super().__init__(request_size=request_size)
        self._depth = queue_depth
        self._unused = [_set_up(self._libaio, queue_depth)]  # the first path's, made now to know that it can be

    def _open_lane(self, path: str) -> Lane:
        context = self._unused.pop() if self._unused else _set_up(self._libaio, self._depth)
        return _Lane(self, context, self._libaio, self._depth, f"tierstore-io-{len(self._lanes)}")

    def _stop(self) -> None:
        super()._stop()
        for context in self._unused:
            context.close()


class _Lane:
    """A queue, the kernel's context, and the thread between them.

    The thread frees the context, which waits for all that the kernel still has: only it may be kept waiting by that.
    """

    def __init__(self, engine: LibaioEngine, context: Any, libaio: Any, depth: int, name: str) -> None:
        self._engine = engine
        self._context = context
        self._libaio = libaio
        self._depth = depth
        self._news = os.eventfd(0, os.EFD_CLOEXEC)
        self._waiting: deque[Request] = deque()
        self._in_kernel: dict[Any, Request] = {}
        self._submitting: Request | None = None
        self._must_end = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            start(self._thread)
        except BaseException:
            context.close()
            os.close(self._news)
            raise

    @property
    def is_stuck(self) -> bool:
        """Whether the kernel holds all its places, or the thread, with requests that were given up."""
        submitting = self._submitting
        return self._lost() >= self._depth or (submitting is not None and submitting.progress.is_given_up)

    def put(self, request: Request) -> None:
        self._waiting.append(request)
        if self._death is not None:
            self._lose_waiting(self._death)
        else:
            os.eventfd_write(self._news, 1)

    def close(self) -> None:
        self._must_end = True
        os.eventfd_write(self._news, 1)
        if not self._lost():
            self._thread.join()
        if self._death is not None:
            os.close(self._news)

    def _lost(self) -> int:
        return sum(request.progress.is_given_up for request in list(self._in_kernel.values()))

    def _work(self) -> None:
        try:
            while not self._must_end or self._in_kernel:
                os.eventfd_read(self._news)
                self._reap()
                self._hand_over()
            self._context.close()
            os.close(self._news)
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """End all that is here and will come, once the kernel no longer touches any of it."""
        _log.error("the worker %s died, and with it its lane", self._thread.name, exc_info=error)
        self._death = error
        self._lose_waiting(error)
        self._context.close()
        for request in (self._submitting, *self._in_kernel.values()):
            if request is not None:
                self._engine._lose(request, error)
        self._in_kernel.clear()

    def _lose_waiting(self, error: BaseException) -> None:
        with contextlib.suppress(IndexError):  # several threads may be at it
            while True:
                self._engine._lose(self._waiting.popleft(), error)

    def _reap(self) -> None:
        for block, result, _ in self._context.getEvents(min_nr=0, timeout=0):
            request = self._in_kernel[block]
            is_over = self._engine._accept(request, result)
            del self._in_kernel[block]
            if is_over:
                self._engine._end(request)
            else:
                self._waiting.appendleft(request)

    def _hand_over(self) -> None:
        while self._waiting and len(self._in_kernel) < self._depth:
            request = self._submitting = self._waiting[0]  # at any moment it is somewhere: the thread may die
            self._waiting.popleft()
            if not self._engine._begin(request):
                self._engine._end(request)
            elif not self._try_submit(request):
                return
            self._submitting = None

    def _try_submit(self, request: Request) -> bool:
        """Give one request to the kernel, or end it with the error; False when only a completion can make room."""
        block = None
        try:
            block = self._block(request)
            self._in_kernel[block] = request
            self._context.submit([block])
        except Exception as error:
            self._in_kernel.pop(block, None)
            return self._not_taken(request, error)
        return True

    def _not_taken(self, request: Request, error: Exception) -> bool:
        if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EINTR) and self._in_kernel:
            self._waiting.appendleft(request)
            self._submitting = None
            return False
        if isinstance(error, OSError) and error.errno is not None:
            if not self._engine._accept(request, -error.errno):
                self._waiting.appendleft(request)
                return True
        else:
            self._engine._fail(request, error)
        self._engine._end(request)
        return True

    def _block(self, request: Request) -> Any:
        operation = request.operation
        modes = {Kind.READ: self._libaio.AIOBLOCK_MODE_READ, Kind.WRITE: self._libaio.AIOBLOCK_MODE_WRITE}
        return self._libaio.AIOBlock(
            mode=modes[operation.kind],
            target_file=operation.fd,
            buffer_list=[request.view],
            offset=request.offset,
            eventfd=self._news,
        )


def _load() -> Any:
    if not hasattr(os, "eventfd"):
        raise EngineUnavailableError("libaio exists on Linux only: set tiers.nvme.io.engine to threads")
    try:
        import libaio
    except ImportError as error:
        raise EngineUnavailableError(
            "the package libaio is not installed: pip install 'tierstore[libaio]', "
            "or set tiers.nvme.io.engine to threads"
        ) from error
    except OSError as error:
        raise EngineUnavailableError(
            f"the package libaio is installed but not the system's library ({error}): install libaio1 or libaio1t64, "
            "or set tiers.nvme.io.engine to threads"
        ) from error
    return libaio


def _set_up(libaio: Any, queue_depth: int) -> Any:
    try:
        return libaio.AIOContext(queue_depth)
    except OSError as error:
        raise EngineUnavailableError(
            f"the kernel refused {queue_depth} asynchronous requests ({error.strerror}): {_advice(error.errno)}, "
            "or set tiers.nvme.io.engine to threads"
        ) from error


def _advice(code: int | None) -> str:
    if code != errno.EAGAIN:
        return "asynchronous I/O is switched off or forbidden here"
    try:
        with open("/proc/sys/fs/aio-nr") as used, open("/proc/sys/fs/aio-max-nr") as limit:
            numbers = f"{used.read().strip()} of {limit.read().strip()} are in use on this machine"
    except OSError:
        numbers = "the machine's limit is reached"
    return f"{numbers}; raise the sysctl fs.aio-max-nr or lower tiers.nvme.io.queue_depth"
