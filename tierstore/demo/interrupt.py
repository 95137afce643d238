"""Ctrl-C as a wish: the step in hand is finished, the summary printed, everything given back."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self


class Interrupt:
    """Remembers the first Ctrl-C while it is entered; the second one is a KeyboardInterrupt as ever.

    Does nothing in a thread other than the main one, or where somebody else hears the signal or it is ignored.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self._before: Any = None

    def __enter__(self) -> Self:
        is_ours = threading.current_thread() is threading.main_thread()
        if is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.is_heard:
            raise KeyboardInterrupt
        self.is_heard = True
