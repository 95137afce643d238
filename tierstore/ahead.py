"""Fills buffers ahead of whoever empties them, on a thread of its own: a few, in a known order, each used again.

The thread sees its buffers and what fills them, nothing else. Where one cannot be filled, whoever asks for it gets the
error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from torch import Tensor

from tierstore.cores import on_one_core
from tierstore.guard import WORKER_PREFIX
from tierstore.layout import RECORD_ALIGNMENT
from tierstore.mapping import map_host_memory

BUFFERS = 3
"""One is emptied, one is filled, and one waits between."""
LEAST_BYTES = 8 << 20
"""Of all buffers: who fills small ones reads for many at once, and they are what is emptied meanwhile."""

Fill = Callable[[Tensor], None]


class ReadAhead:
    """Buffers (uint8, host memory) filled by `fills` in order. A context manager, for one thread."""

    def __init__(self, fills: Iterable[Fill], buffer_bytes: int) -> None:
        self._fills = iter(fills)
        size = max(buffer_bytes, RECORD_ALIGNMENT)
        count = max(BUFFERS, LEAST_BYTES // size)
        self._free = list(map_host_memory(count * size).view(count, size).unbind())
        self._filled: deque[Tensor] = deque()
        self._given: Tensor | None = None
        self._error: BaseException | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=on_one_core, args=(self._main,), name=f"{WORKER_PREFIX}read ahead", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def wait_for_next(self) -> Tensor:
        """The next buffer, filled; the one before it is given back by that."""
        with self._changed:
            if self._given is not None:
                self._free.append(self._given)
                self._given = None
                self._changed.notify_all()
            self._changed.wait_for(lambda: bool(self._filled) or self._error is not None)
            if not self._filled:
                assert self._error is not None
                raise self._error
            self._given = self._filled.popleft()
            return self._given

    def _main(self) -> None:
        try:
            for fill in self._fills:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._free) or self._is_closed)
                    if self._is_closed:
                        return
                    buffer = self._free.pop()
                fill(buffer)
                with self._changed:
                    self._filled.append(buffer)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
