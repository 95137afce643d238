"""Fills buffers ahead of whoever empties them: a few, in a known order, each used again.

A thread asks for what belongs into them, buffer after buffer, and others bring it; it waits for none of it. It sees its
buffers and what fills them, nothing else. Where one cannot be filled, whoever asks for it, or leaves, gets the error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor

from tierstore.cores import on_one_core
from tierstore.crew import start
from tierstore.guard import WORKER_PREFIX
from tierstore.layout import RECORD_ALIGNMENT
from tierstore.mapping import map_host_memory

BUFFERS = 3
"""One is emptied, one is filled, and one waits between."""
LEAST_BYTES = 16 << 20
"""Of all buffers: what is read at once belongs into many small ones, and is under way into others meanwhile."""


class Arriving(Protocol):
    """What belongs into one buffer or more."""

    @property
    def is_begun(self) -> bool:
        """Whether it is on its way."""

    def begin(self) -> None:
        """Send it on its way, if it is not, though more of it may be asked for."""

    def wait(self) -> None:
        """Wait until it is there, once it is on its way. Raises what went wrong."""


Fill = Callable[[Tensor], Sequence[Arriving]]
"""Begins to fill a buffer; tells what must have arrived before it is full."""


class ReadAhead:
    """Buffers (uint8, host memory) filled by `fills` in order. A context manager, for one thread.

    Entering it raises NoThreadError, with nothing asked for, if there is no thread to be had.
    """

    def __init__(self, fills: Iterable[Fill], buffer_bytes: int) -> None:
        self._fills = iter(fills)
        size = max(buffer_bytes, RECORD_ALIGNMENT)
        count = max(BUFFERS, LEAST_BYTES // size)
        self._free = list(map_host_memory(count * size).view(count, size).unbind())
        self._most_asked = count - 2  # for two more, one being emptied and one to be asked for next
        self._filled: deque[tuple[Tensor, Sequence[Arriving]]] = deque()
        self._given: Tensor | None = None
        self._error: BaseException | None = None
        self._is_closed = self._is_told = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=on_one_core, args=(self._main,), name=f"{WORKER_PREFIX}read ahead", daemon=True
        )

    def __enter__(self) -> Self:
        start(self._thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        if error is None and self._error is not None and not self._is_told:  # of what `fills` did after the last buffer
            raise self._error

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
                self._is_told = True
                raise self._error
            self._given, arriving = self._filled.popleft()
        for one in arriving:
            one.wait()
        return self._given

    def _main(self) -> None:
        asked: deque[tuple[Tensor, Sequence[Arriving]]] = deque()
        try:
            for fill in self._fills:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._free) or self._is_closed)
                    if self._is_closed:
                        return
                    buffer = self._free.pop()
                asked.append((buffer, fill(buffer)))
                self._pass_on(asked, self._most_asked)
            self._pass_on(asked, 0)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _pass_on(self, asked: deque[tuple[Tensor, Sequence[Arriving]]], most: int) -> None:
        """Let the first ones be waited for, if all that belongs into them is on its way; it must be, beyond `most`."""
        while asked and (len(asked) > most or all(one.is_begun for one in asked[0][1])):
            for one in asked[0][1]:
                one.begin()
            with self._changed:
                self._filled.append(asked.popleft())
                self._changed.notify_all()
