"""How many cores the arithmetic of one thread takes. Changes nothing for other threads, and nothing for good.

torch's own `set_num_threads` is for the whole process: threads that begin meanwhile would keep the lower number, and a
matrix product of somebody else's might be summed in another order. OpenMP's is for the calling thread alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator

import torch

_log = logging.getLogger("tierstore.cores")


@contextlib.contextmanager
def leaving_one_free() -> Iterator[None]:
    """Let torch's operations on this thread leave one core free for what reads and writes; of one core, none.

    Waiting threads of OpenMP spin, and would take it too: with one thread of two there is none that waits.
    """
    before = torch.get_num_threads()  # first: torch sets a new thread's number when it is first asked
    fewer = min(before, available() - 1)
    change = _changer()
    if change is None or not 1 <= fewer < before:
        yield
        return
    change(fewer)
    try:
        yield
    finally:
        change(before)


def available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _changer() -> Callable[[int], None] | None:
    """What sets the calling thread's number of threads in the OpenMP that torch runs on; None if it is not found."""
    change = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    before = torch.get_num_threads()
    if change is not None:
        change(before + 1)
        is_heard = torch.get_num_threads() == before + 1
        change(before)
        if is_heard:
            return change  # type: ignore[no-any-return]
    _log.info("torch's threads cannot be changed for one thread alone here, so no core is left free during I/O")
    return None
