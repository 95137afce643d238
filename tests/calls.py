"""How much a function does, whatever the machine does meanwhile: the calls it makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> int:
    """Calls of Python and C functions, and turns of generators, until the function returns."""
    calls = 0

    def hear(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(hear)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
