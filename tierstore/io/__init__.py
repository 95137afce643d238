"""Engines that read and write ranges of files: `threads`, `libaio` and `aiofiles`, opened by name.

`open_engine` is the one place where a name becomes an engine and where the numbers behind `auto` live. It falls back
only for `auto`, and says so; an engine that was asked for by name is opened or refused.
"""

from __future__ import annotations

import difflib
import logging

from tierstore.errors import PolicyError
from tierstore.io.base import ALIGNMENT, Engine, Kind, Operation

__all__ = ["ALIGNMENT", "Engine", "Kind", "Operation", "open_engine"]

# Measured: 8 requests of 8 MiB in flight move as many bytes per second as the raw device does. A worker carries one
# request at a time and waits in the kernel, so as many workers as requests cost no more than 0.02 CPU seconds per GB.
REQUEST_SIZE = 8 << 20
QUEUE_DEPTH = 8
THREADS = 8

_NAMES = ("auto", "threads", "libaio", "aiofiles")
_log = logging.getLogger("tierstore.io")


def open_engine(engine: str, *, threads: int | None, queue_depth: int | None, request_size: int | None) -> Engine:
    """Open an engine by name; None takes the default. `threads` means nothing to `libaio`, which has one thread.

    Raises PolicyError for an unknown name or a number out of range, EngineUnavailableError when it cannot run here.
    """
    name = _resolve(engine)
    threads = _at_least("threads", THREADS if threads is None else threads, 1)
    depth = _at_least("queue_depth", QUEUE_DEPTH if queue_depth is None else queue_depth, 1)
    size = _at_least("request_size", REQUEST_SIZE if request_size is None else request_size, ALIGNMENT)
    if size % ALIGNMENT:
        raise PolicyError(f"tiers.nvme.io.request_size is {size} bytes: use a multiple of {ALIGNMENT}")
    return _open(name, threads, depth, size)


def _open(name: str, threads: int, queue_depth: int, request_size: int) -> Engine:
    if name == "threads":
        from tierstore.io.threads import ThreadsEngine

        return ThreadsEngine(threads=threads, queue_depth=queue_depth, request_size=request_size)
    if name == "libaio":
        from tierstore.io.libaio import LibaioEngine

        return LibaioEngine(queue_depth=queue_depth, request_size=request_size)
    from tierstore.io.aiofiles import AiofilesEngine

    return AiofilesEngine(threads=threads, queue_depth=queue_depth, request_size=request_size)


def _resolve(engine: str) -> str:
    if engine not in _NAMES:
        nearest = difflib.get_close_matches(engine, _NAMES, n=1, cutoff=0.0)[0]
        raise PolicyError(
            f"tiers.nvme.io.engine is {engine!r}: allowed are {', '.join(_NAMES)}; did you mean {nearest!r}?"
        )
    if engine != "auto":
        return engine
    from tierstore.io.threads import is_available

    name, reason = ("threads", "has") if is_available() else ("aiofiles", "lacks")
    _log.info("io engine auto: %s, because this platform %s positioned reads and writes", name, reason)
    return name


def _at_least(key: str, value: int, least: int) -> int:
    if value < least:
        raise PolicyError(f"tiers.nvme.io.{key} is {value}: use at least {least}")
    return value
