"""Holds signals back while something must not be left half done. Touches nothing else.

A handler written in Python runs on the main thread between any two of its instructions, and the usual one for SIGINT
raises there. Inside `deferred` such signals are only noted; they are handled, in order of arrival, when the outermost
block is over. Whoever runs for long offers `break_point`s, where a second SIGINT raises KeyboardInterrupt.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of what it returns, at 5 us each
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

_DEFERRED = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]

Handler = Callable[[int, FrameType | None], Any]


class _Deferral:
    """The handlers that were put aside, and the signals that came meanwhile. One at a time, on the main thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: dict[int, Handler] = {}
        self.noted: list[int] = []
        self.stand_in: threading.Thread | None = None

    def begin(self) -> None:
        for number in _DEFERRED:
            handler = _signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
                _signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.noted.append(number)

    def end(self) -> None:
        handlers = dict(self.handlers)
        try:
            self._put_back()
        finally:
            if self.noted:
                self._deliver(handlers)

    def _put_back(self) -> None:
        """Put all handlers back, also where the first ones, back already, raise meanwhile."""
        try:
            while self.handlers:
                number, handler = next(iter(self.handlers.items()))
                if _signal.getsignal(number) == self.note:  # else somebody set a new one meanwhile
                    _signal.signal(number, handler)
                del self.handlers[number]
        finally:
            if self.handlers:
                self._put_back()

    def _deliver(self, handlers: Mapping[int, Handler]) -> None:
        noted, self.noted = list(dict.fromkeys(self.noted)), []
        with contextlib.ExitStack() as deliveries:  # all of them, whatever one raises
            for number in reversed(noted):
                deliveries.callback(handlers[number], number, None)


_deferral = _Deferral()


def deferred() -> contextlib.AbstractContextManager[None]:
    """Handle signals that arrive inside when the outermost such block is over. Does nothing on other threads."""
    return _Deferred()


class _Deferred(contextlib.AbstractContextManager[None]):
    """One block; no generator, which would cost more than the rest of it."""

    __slots__ = ("_is_main",)

    def __enter__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        if not self._is_main:
            return
        _deferral.depth += 1
        try:
            if _deferral.depth == 1:
                _deferral.begin()
        except BaseException:  # of a signal that came just before it could be deferred
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_main:
            _deferral.depth -= 1
            if _deferral.depth == 0:
                _deferral.end()


@contextlib.contextmanager
def standing_in(thread: threading.Thread) -> Iterator[None]:
    """Let `thread` break off where the main thread would, which only waits for it meanwhile."""
    before, _deferral.stand_in = _deferral.stand_in, thread
    try:
        yield
    finally:
        _deferral.stand_in = before


def break_point() -> None:
    """Raise KeyboardInterrupt here if SIGINT has come twice while it was deferred."""
    if _deferral.noted.count(signal.SIGINT) < 2:
        return
    if threading.current_thread() in (threading.main_thread(), _deferral.stand_in):
        _deferral.noted = [number for number in _deferral.noted if number != signal.SIGINT]
        raise KeyboardInterrupt
