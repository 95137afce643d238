"""Host memory as the tiers want it: private, on huge pages, of exactly the size asked for, and no child's after a fork.

A tensor on it keeps the mapping; nobody closes one. What page-locks it is handed in, and undone when it goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tierstore.errors import CapacityError
from tierstore.layout import HUGE_PAGE

PageLock = Callable[[int, int], Callable[[], None]]
"""Page-locks `nbytes` from an address on; returns what undoes it."""

_areas: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def map_host_memory(nbytes: int, *, page_lock: PageLock | None = None) -> Tensor:
    """Map private anonymous memory as a uint8 tensor of exactly `nbytes`, on huge pages where the system has them.

    The memory is not inherited by a fork, and is unmapped when the last tensor on it goes. It takes up room only as it
    is touched, all of it at once when page-locked. Raises CapacityError when the address space, what may be locked, or
    the limit of this process is too small.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    padding = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    try:
        area = mmap.mmap(-1, nbytes + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise CapacityError(
            f"{nbytes:,} bytes of host memory cannot be mapped ({error}): lower tiers.cpu.capacity"
        ) from error
    _areas.add(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    start = -address % HUGE_PAGE if padding else 0
    _advise(area, start, nbytes)
    # the tensor keeps the memoryview, which keeps the mapping; closing the mapping under it is impossible that way
    view = memoryview(area)[start : start + nbytes]
    if page_lock is not None:
        undo = page_lock(address + start, nbytes)
        weakref.finalize(view, _unlock, undo, area, os.getpid()).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8)


def _advise(area: mmap.mmap, start: int, nbytes: int) -> None:
    """Ask for huge pages where whole ones are wanted, and for none beyond: they would take more than was asked for."""
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    advice = [("MADV_DONTFORK", 0, len(area)), ("MADV_NOHUGEPAGE", 0, len(area)), ("MADV_HUGEPAGE", start, whole)]
    for name, begin, length in advice:
        if length and hasattr(mmap, name):
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
                area.madvise(getattr(mmap, name), begin, length)


def _unlock(undo: Callable[[], None], area: mmap.mmap, pid: int) -> None:
    """Undo page-locking, while `area` still keeps the memory mapped; in a forked child it is the parent's."""
    if os.getpid() == pid:
        undo()


def _abandon_areas_in_child() -> None:
    """Never unmap in a forked child: the memory is not there, and by then its addresses may be something else's."""
    for area in list(_areas):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(area))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_areas_in_child)
