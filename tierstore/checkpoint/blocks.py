"""Blocks on their way between memory and files: a few buffers, a few threads, and how a block becomes bytes and back.

What a checkpoint's reading and writing takes of host memory is these buffers. Any number of blocks passes through them,
one after the other. Nothing here knows what a block belongs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from tierstore.checkpoint.documents import ZSTD_LEVEL
from tierstore.checkpoint.geometry import CHECKSUM_BYTES, PAGE_BYTES, Geometry
from tierstore.cores import stay_on_one_core
from tierstore.crew import Calls
from tierstore.errors import DamagedCheckpointError
from tierstore.layout import round_up
from tierstore.mapping import map_host_memory

Buffer = npt.NDArray[np.uint8]

THREADS = 6
_MOST_BYTES = 16 << 20
"""Of all buffers together, if the least there must be are not more."""
_ZSTD_MAGIC = 0xFD2FB528

_log = logging.getLogger("tierstore.checkpoint")


class Blocks:
    """Page-aligned buffers for blocks of up to `block_bytes`, to be filled and handed to threads that work on them.

    One thread hands out work.
    """

    def __init__(self, block_bytes: int) -> None:
        self._free, count = _buffers(block_bytes, 2)
        self._calls = Calls("tierstore-checkpoint", min(THREADS, count), begin=stay_on_one_core)
        self._under_way = threading.Condition()
        self._count = 0
        self._error: BaseException | None = None

    def wait_for_buffer(self) -> Buffer:
        """Take a buffer, to be filled and handed to `submit`, or given back."""
        return self._free.get()

    def give_back(self, buffer: Buffer) -> None:
        """Let others have a buffer."""
        self._free.put(buffer)

    def submit(self, work: Callable[[Buffer], None], buffer: Buffer) -> None:
        """Let a thread do `work` with a buffer, which is free afterwards; `check` raises what it raises.

        Raises NoThreadError, with the buffer still the caller's, if there is no thread to be had.
        """
        done = self._calls.submit(work, buffer)
        with self._under_way:
            self._count += 1
        done.add_done_callback(partial(self._end, buffer))

    def wait(self) -> None:
        """Wait until all work is done."""
        with self._under_way:
            self._under_way.wait_for(lambda: self._count == 0)

    def check(self) -> None:
        """Raise the first error of the work so far, again at every call."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the work and end the threads."""
        self._calls.shutdown()

    def _end(self, buffer: Buffer, done: Future[None]) -> None:
        self._error = self._error or done.exception()
        self._free.put(buffer)
        with self._under_way:
            self._count -= 1
            self._under_way.notify_all()


class Readers:
    """Threads that fill buffers of their own, page-aligned, for blocks of up to `block_bytes`, and empty them again.

    Any thread hands out work, and never waits for a buffer.
    """

    def __init__(self, block_bytes: int) -> None:
        self._free, count = _buffers(block_bytes, 3)
        self._own = own = threading.local()
        self._calls = Calls("tierstore-checkpoint", count - 1, begin=partial(_begin_reading, own, self._free))

    def submit(self, work: Callable[[Buffer], None]) -> Future[None]:
        """Let a thread do `work` with its buffer; the future has what it raises.

        Raises NoThreadError, with nothing begun, if there is no thread to be had.
        """
        return self._calls.submit(self._run, work)

    def work_here(self, work: Callable[[Buffer], None]) -> None:
        """Do `work` on this thread, with the buffer that no thread owns. Raises what it raises."""
        buffer = self._free.get()
        try:
            work(buffer)
        finally:
            self._free.put(buffer)

    def close(self) -> None:
        """Wait for the work and end the threads."""
        self._calls.shutdown()

    def _run(self, work: Callable[[Buffer], None]) -> None:
        work(self._own.buffer)


def _begin_reading(own: threading.local, free: queue.SimpleQueue[Buffer]) -> None:
    stay_on_one_core()
    own.buffer = free.get()


def _buffers(block_bytes: int, least: int) -> tuple[queue.SimpleQueue[Buffer], int]:
    """Free buffers, one more than threads or as many as may be, and how many those are."""
    count = max(least, min(THREADS + 1, _MOST_BYTES // _buffer_bytes(block_bytes)))
    free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
    for buffer in map_buffers(block_bytes, count):
        free.put(buffer)
    return free, count


def map_buffers(block_bytes: int, count: int) -> list[Buffer]:
    """So many page-aligned buffers for blocks, side by side: so most of them lie on huge pages."""
    size = _buffer_bytes(block_bytes)
    memory = map_host_memory(count * size).numpy()
    return [memory[number * size : (number + 1) * size] for number in range(count)]


def _buffer_bytes(block_bytes: int) -> int:
    return round_up(block_bytes, PAGE_BYTES) + 2 * PAGE_BYTES  # a checksum behind, a page's rest before


def checksum(content: Any) -> bytes:
    """The crc32c of bytes, as it is stored behind them. Takes an array or bytes; no writable memoryview."""
    found, unlocked = 0, _unlocked_crc32c()
    if unlocked is None or not isinstance(content, np.ndarray):
        found = google_crc32c.value(content)
    else:
        found = unlocked(found, content.ctypes.data, content.nbytes)
    return found.to_bytes(CHECKSUM_BYTES, "little")


@functools.cache
def _unlocked_crc32c() -> Callable[[int, int, int], int] | None:
    """The function that google_crc32c calls itself, of a sum so far, an address and a length; None if it is not found.

    Called this way it does not hold the interpreter's lock, for which all other threads would wait.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):
        from google_crc32c import _crc32c

        found = ctypes.CDLL(_crc32c.__file__).crc32c_extend
        found.restype, found.argtypes = ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]
        if found(0, b"123456789", 9) == 0xE3069283:  # what the algorithm makes of these nine digits
            return found
    _log.info("google_crc32c's own function is not found, so other threads wait while a block is summed")
    return None


def encode(geometry: Geometry, buffer: Buffer) -> int:
    """Turn the block at the beginning of a buffer into what is stored, in place; return its length.

    A block that compression makes longer than the buffer is not written: zstd's worst case is below a page more.
    """
    nbytes = geometry.block_bytes
    if geometry.compression == "zstd":
        from numcodecs import zstd

        compressed = np.frombuffer(zstd.compress(buffer[:nbytes], ZSTD_LEVEL), np.uint8)
        nbytes = len(compressed)
        buffer[:nbytes] = compressed
    if geometry.has_checksum:
        buffer[nbytes : nbytes + CHECKSUM_BYTES] = np.frombuffer(checksum(buffer[:nbytes]), np.uint8)
        nbytes += CHECKSUM_BYTES
    return nbytes


def decode(where: str, geometry: Geometry, stored: Buffer) -> Buffer:
    """Turn what is stored of a block into its values: verified, of exactly the bytes of a whole block.

    Raises DamagedCheckpointError before anything is allocated that a block does not need.
    """
    if geometry.has_checksum:
        if len(stored) < CHECKSUM_BYTES:
            raise DamagedCheckpointError(f"{where} has {len(stored)} bytes, too few for a checksum")
        stored, wanted = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:].tobytes()
        if (found := checksum(stored)) != wanted:
            raise DamagedCheckpointError(
                f"{where} is damaged: its checksum is {found.hex()}, stored is {wanted.hex()}; its values are lost"
            )
    if geometry.compression == "zstd":
        return _decompress(where, geometry, stored)
    if len(stored) != geometry.block_bytes:
        raise DamagedCheckpointError(f"{where} has {len(stored):,} bytes, not {geometry.block_bytes:,}")
    return stored


def _decompress(where: str, geometry: Geometry, stored: Buffer) -> Buffer:
    from numcodecs import zstd

    size = _content_size(bytes(stored[:18]))
    if size != geometry.block_bytes:
        raise DamagedCheckpointError(
            f"{where} is a zstd frame of {size or 'unknown'} bytes, not {geometry.block_bytes}"
        )
    values = np.empty(geometry.block_bytes, np.uint8)
    try:
        zstd.decompress(stored, values)
    except (RuntimeError, ValueError) as error:
        raise DamagedCheckpointError(f"{where} cannot be decompressed: {error}") from error
    return values


def _content_size(header: bytes) -> int | None:
    """The size that a zstd frame announces for its content (RFC 8878, 3.1.1.1); None if it does not, or is none."""
    if len(header) < 6 or int.from_bytes(header[:4], "little") != _ZSTD_MAGIC:
        return None
    descriptor = header[4]
    is_single_segment = bool(descriptor & 0x20)
    width = (1 if is_single_segment else 0, 2, 4, 8)[descriptor >> 6]
    if width == 0:
        return None
    begin = 5 + (not is_single_segment) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(header[begin : begin + width], "little")
    return size + 256 if width == 2 else size
