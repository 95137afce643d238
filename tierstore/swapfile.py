"""Owns the nvme tier's files: private to this process, reserved in full, gone when the process is.

A swap file has no name from the moment it exists, so nothing is left whatever ends the process, and two processes in
one folder cannot meet. Every byte it counts as its own is reserved on the disk, and a reservation that fails leaves
the disk as it was. Never used for anything that must outlive the process, and never silently in a folder that is
memory or a network.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
import threading
import weakref
from pathlib import Path

from tierstore.crew import start
from tierstore.errors import AlignmentError, DiskFullError, NoThreadError, StoreClosedError, SwapError
from tierstore.folders import disk_margin, sized, too_full, unusable, warn_of_folder
from tierstore.io.base import ALIGNMENT
from tierstore.pressure import disk_space

SLAB_BYTES = 1 << 30
"""Reserved at once: small enough to be interrupted, large enough to be contiguous."""

_ZEROS_BYTES = 4 << 20

_log = logging.getLogger("tierstore.swapfile")


class SwapFile:
    """One unnamed file in a folder, with what `grow` reserved in it.

    `direct` asks for O_DIRECT, or against it; None probes, and takes buffered I/O where it does not work. Afterwards
    `direct` says which it is. Used by one thread, except `fd`, which engines use, and what is said to be for any.
    `warns` of a folder that is memory or a network.
    """

    def __init__(self, folder: Path, *, direct: bool | None, warns: bool = True) -> None:
        self.folder = folder
        self.path = f"{folder}/tierstore-{os.getpid()} (unnamed)"
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._lost = 0  # requests that were given up, and may use the descriptor yet
        self._is_closed = False
        self.fd = _open_unnamed(folder)
        self._cut = _Cut(self.fd, self.path)
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), self.fd, self._cut)
        try:
            if warns:
                warn_of_folder(folder)
            self.direct = False if direct is False else self._try_direct(required=direct is True)
        except BaseException:
            self.close()
            raise
        _open_files.add(self)

    def grow(self, nbytes: int) -> int:
        """Reserve `nbytes` more, a multiple of 4096, and return the offset where they begin.

        Raises DiskFullError or SwapError with file and disk as they were before. Other processes may reserve in the
        same moment: whoever then finds the disk with less than its margin gives back what it took.
        """
        self._check(nbytes)
        _wait_for_cuts(self.fd)  # those of this file would take away what is reserved meanwhile
        self._check_space(nbytes)
        offset, end, held = self.size_bytes, self.size_bytes + nbytes, self._held_bytes()
        try:
            for start in range(offset, end, SLAB_BYTES):
                stop = min(start + SLAB_BYTES, end)
                _reserve(self.fd, start, stop - start)
                self._check_space(nbytes, taken=max(stop - offset, self._held_bytes() - held))
        except BaseException as error:
            os.ftruncate(self.fd, offset)
            if isinstance(error, OSError) and not isinstance(error, DiskFullError):
                raise self._refusal(error, nbytes) from error
            raise
        self.size_bytes += nbytes
        return offset

    def shrink(self, nbytes: int) -> None:
        """Begin to give the last `nbytes` back to the disk; the caller no longer needs what is in them.

        That goes on beside whatever comes next. Who reserves room on this disk in this process, or closes the file,
        waits for that.
        """
        self._check(nbytes)
        if nbytes > self.size_bytes:
            raise ValueError(f"{self.path} has {self.size_bytes} bytes, {nbytes} cannot be given back")
        self.size_bytes -= nbytes
        self._cut.begin(self.size_bytes)

    def wait_until_cut(self) -> None:
        """Wait until what was given back is the disk's again. From any thread."""
        self._cut.wait()

    def close(self) -> None:
        """Give everything back to the disk. Idempotent; the engine must be done with the file.

        One that is kept open stays until it no longer is, and so does its space on the disk.
        """
        with self._lock:
            self._is_closed = True
            is_kept = self._lost > 0
        if not is_kept:
            self._close_now()

    def keep_open(self) -> None:
        """Let the descriptor outlast `close`, as a request that does not come back may use it. From any thread."""
        with self._lock:
            self._lost += 1

    def may_be_closed(self) -> None:
        """Take one `keep_open` back, even before it."""
        with self._lock:
            self._lost -= 1
            is_due = self._is_closed and self._lost == 0
        if is_due:
            self._close_now()

    def _close_now(self) -> None:
        self._finalizer()
        self.fd, self.size_bytes = -1, 0

    def _check(self, nbytes: int) -> None:
        if self._is_closed:
            raise StoreClosedError(f"{self.path} is closed")
        if nbytes <= 0 or nbytes % ALIGNMENT:
            raise AlignmentError(f"{self.path} grows and shrinks by multiples of {ALIGNMENT} bytes, not by {nbytes}")

    def _check_space(self, nbytes: int, *, taken: int = 0) -> None:
        """Refuse `nbytes`, of which `taken` have been reserved already, if they leave the disk less than its margin."""
        space = disk_space(self.fd)
        free = space.free_bytes + taken  # as it was before those were
        room = free - disk_margin(space.total_bytes)
        if nbytes > room:
            raise DiskFullError(errno.ENOSPC, self._too_full(nbytes, free, room), self.path)

    def _held_bytes(self) -> int:
        """What the file takes of the disk, with the filesystem's bookkeeping for it."""
        return os.fstat(self.fd).st_blocks * 512

    def _too_full(self, nbytes: int, free: int, room: int) -> str:
        return too_full(nbytes, [self.folder], free=free, room=room, most=self.size_bytes + max(0, room))

    def _refusal(self, error: OSError, nbytes: int) -> SwapError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = disk_space(self.fd).free_bytes
            return DiskFullError(error.errno, self._too_full(nbytes, free, free), self.path)
        hint = "raise the file size limit (ulimit -f)" if error.errno == errno.EFBIG else "check the disk"
        return SwapError(
            error.errno or errno.EIO,
            f"{sized(nbytes)} could not be reserved ({error.strerror}): {hint}, or set tiers.nvme.paths to another",
            self.path,
        )

    def _try_direct(self, *, required: bool) -> bool:
        try:
            _set_direct(self.fd, True)
            _probe(self.fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._refusal(error, ALIGNMENT) from error
            if required:
                raise _no_direct(self.folder, error) from error
            _log.info("swap files in %s are buffered: direct I/O does not work there (%s)", self.folder, error.strerror)
            _set_direct(self.fd, False)
            return False
        return True


class _Cut:
    """Cuts a file off at its end, on a thread of its own: a filesystem that discards blocks at once takes a third as
    long for that as for the writes that filled them, and only waits meanwhile.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self._lock = threading.Lock()
        self._size: int | None = None  # to be cut to next
        self._thread: threading.Thread | None = None

    def begin(self, size: int) -> None:
        """Have the file cut to `size` bytes, in place of a size that nobody has come to yet."""
        with self._lock:
            self._size = size
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="tierstore-cut", daemon=True)
            with contextlib.suppress(NoThreadError):
                start(thread)
                self._thread = thread
                return
        self._run()

    def wait(self) -> None:
        """Wait until the file is no longer than was asked for."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (size := self._next_size()) is not None:
            try:
                os.ftruncate(self._fd, size)
            except OSError as error:  # costs the disk some space, and is made good by whoever reserves it again
                _log.warning("%s could not be cut to %d bytes: %s", self._path, size, error.strerror)

    def _next_size(self) -> int | None:
        with self._lock:
            size, self._size = self._size, None
            if size is None:
                self._thread = None
            return size


def _wait_for_cuts(fd: int) -> None:
    """Wait until this process has given back what it no longer needs of the disk that a file is on."""
    disk = os.fstat(fd).st_dev
    for file in _files():
        with contextlib.suppress(OSError):  # another thread has closed it since
            if os.fstat(file.fd).st_dev == disk:
                file.wait_until_cut()


def _files() -> list[SwapFile]:
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has opened one meanwhile
            return list(_open_files)


def _open_unnamed(folder: Path) -> int:
    try:
        fd = _open_tmpfile(folder)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise unusable(folder, error) from error
    return fd


def _open_tmpfile(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    name = os.path.join(folder, f".tierstore-{os.getpid()}-{secrets.token_hex(8)}")
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    os.unlink(name)
    return fd


def _reserve(fd: int, offset: int, length: int) -> None:
    """Give the file blocks of its own from `offset` on."""
    try:
        os.posix_fallocate(fd, offset, length)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        _log.info("writing %d bytes of zeros, because this filesystem cannot reserve space (%s)", length, error)
        _write_zeros(fd, offset, length)


def _write_zeros(fd: int, offset: int, length: int) -> None:
    end = offset + length
    with mmap.mmap(-1, _ZEROS_BYTES) as zeros, memoryview(zeros) as view:
        while offset < end:
            written = os.pwrite(fd, view[: min(end - offset, _ZEROS_BYTES)], offset)
            offset += written - written % ALIGNMENT or written


def _set_direct(fd: int, is_direct: bool) -> None:
    """Switch O_DIRECT of an open file; raises OSError where the filesystem has no such thing."""
    if not hasattr(os, "O_DIRECT"):
        if is_direct:
            raise OSError(errno.EOPNOTSUPP, "this platform has no O_DIRECT")
        return
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT)


def _probe(fd: int) -> None:
    """Write a block of an empty file and read it back through O_DIRECT; the file is empty again afterwards.

    The block is a written one: on blocks that are only reserved, reads that cannot work succeed.
    """
    pattern = secrets.token_bytes(ALIGNMENT)
    try:
        with mmap.mmap(-1, ALIGNMENT) as block:
            block[:] = pattern
            written = os.pwrite(fd, block, 0)
            block[:] = bytes(ALIGNMENT)
            read = os.preadv(fd, [block], 0)
            if (written, read, block[:]) != (ALIGNMENT, ALIGNMENT, pattern):
                raise OSError(errno.EIO, f"wrote {written} and read {read} of {ALIGNMENT} bytes, or others")
    finally:
        os.ftruncate(fd, 0)


def _no_direct(folder: Path, error: OSError) -> SwapError:
    text = f"direct I/O does not work in {folder} ({error.strerror}): set tiers.nvme.io.direct to auto or false"
    return SwapError(error.errno or errno.EIO, text, str(folder))


def _close_in(pid: int, fd: int, cut: _Cut) -> None:
    if os.getpid() == pid:
        cut.wait()  # by then the number may be another file's
        os.close(fd)


_open_files: weakref.WeakSet[SwapFile] = weakref.WeakSet()


def _close_in_child() -> None:
    """Drop a forked child's copies, which would keep the disk full after the parent has closed the files."""
    for file in _files():
        with contextlib.suppress(OSError):
            os.close(file.fd)
        file.fd, file.size_bytes = -1, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
