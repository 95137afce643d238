"""The system calls that change a filesystem while a checkpoint is written and replaced, one method each.

In one place so that a test can let any of them be the last one. Errors name the file and what to do. Knows nothing of
what the files mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any

from tierstore.errors import CheckpointFileError, CheckpointValueError, NoCheckpointError

_EXCHANGE = 2
_AT_FDCWD = -100
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
_ADVICE = {
    errno.ENOSPC: "free space there; what stood at the path before is as it was",
    errno.EDQUOT: "the quota is used up; what stood at the path before is as it was",
    errno.EACCES: "name a folder that is yours",
    errno.EROFS: "name a folder that can be written",
    errno.ENAMETOOLONG: "name the checkpoint with fewer characters",
}
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def told(path: str, what: str, *, makes: bool = False) -> Iterator[None]:
    """Raise what the system refuses as a CheckpointFileError: `what` cannot be done to `path`.

    What is not there is a NoCheckpointError, unless it was to be made: then it is the folder around it that is missing.
    """
    try:
        yield
    except CheckpointFileError:  # which says more of another file
        raise
    except OSError as error:
        code = error.errno or errno.EIO
        reason = f"{what}: {os.strerror(code)}"
        if code in _ADVICE:
            reason += f" ({_ADVICE[code]})"
        if makes and code == errno.ENOENT:
            reason += f" (make the folder {os.path.dirname(path)} first)"
        kind = NoCheckpointError if code == errno.ENOENT and not makes else CheckpointFileError
        raise kind(code, reason, path) from error


def resolved(path: str | os.PathLike[str]) -> str:
    """The absolute path that a caller means: `~` is the home folder, a link is what it points to, there or not yet.

    Raises CheckpointValueError for an empty one.
    """
    text = os.fspath(path)
    if not text:
        raise CheckpointValueError("the path of a checkpoint is empty: name a folder, such as checkpoints/step-1000")
    return os.path.realpath(os.path.expanduser(text))


class Files:
    """The filesystem, as a writer needs it. Paths are absolute."""

    def make_folder(self, path: str) -> None:
        """Make one folder in one that exists."""
        with told(path, "the folder cannot be made", makes=True):
            os.mkdir(path)

    def create(self, path: str, content: bytes) -> None:
        """Write a new file, whole."""
        with told(path, "the file cannot be written", makes=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with contextlib.closing(_Descriptor(fd)):
                _write_all(fd, content, 0)

    def reserve(self, path: str, nbytes: int) -> None:
        """Make a new file with so much room reserved; with 0, an empty one."""
        with told(path, f"{nbytes:,} bytes cannot be reserved for the file", makes=True):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            with contextlib.closing(_Descriptor(fd)):
                if nbytes:
                    os.posix_fallocate(fd, 0, nbytes)

    def put(self, path: str, content: Any, offset: int, *, direct: bool) -> None:
        """Write a buffer into a file that exists. `direct`: its address, length and offset are multiples of 4096."""
        with told(path, "the file cannot be written", makes=True):
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            with contextlib.closing(_Descriptor(fd)):
                _write_all(fd, content, offset)

    def takes_direct(self, folder: str) -> bool:
        """Whether files in a folder can be written past the page cache, found by writing one."""
        path = f"{folder}/direct"
        self.create(path, b"")
        try:
            page = mmap.mmap(-1, mmap.PAGESIZE)
            self.put(path, memoryview(page)[: mmap.PAGESIZE], 0, direct=True)
        except CheckpointFileError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            return False
        finally:
            self.remove_file(path)
        return True

    def sync(self, path: str) -> None:
        """Let a file, or the names in a folder, reach the disk."""
        with told(path, "what was written cannot be brought to the disk"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.closing(_Descriptor(fd)):
                os.fsync(fd)

    def sync_filesystem(self, path: str) -> None:
        """Let all that was written to the filesystem of `path` reach the disk: one call for thousands of files."""
        with told(path, "what was written cannot be brought to the disk"):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            with contextlib.closing(_Descriptor(fd)):
                _check(_libc.syncfs(fd))

    def rename(self, source: str, target: str) -> None:
        """Give a file or folder another name, in the place of an empty folder or a file, if there is one."""
        with told(target, f"{source} cannot be given this name"):
            os.rename(source, target)

    def exchange(self, one: str, other: str) -> bool:
        """Let two folders change names in one instant. False where the filesystem cannot."""
        with told(other, f"it cannot change names with {one}"):
            renameat2 = getattr(_libc, "renameat2", None)
            if renameat2 is None:
                return False
            try:
                _check(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE))
            except OSError as error:
                if error.errno in _NOT_SUPPORTED:
                    return False
                raise
            return True

    def remove_file(self, path: str) -> None:
        """Remove a file, or a symbolic link."""
        with told(path, "it cannot be removed"):
            os.unlink(path)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        with told(path, "it cannot be removed"):
            os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, following no link."""
        with told(path, "it cannot be listed"), os.scandir(path) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(entry.path)
            else:
                self.remove_file(entry.path)
        self.remove_folder(path)


class _Descriptor:
    """A file descriptor that can be closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, content: Any, offset: int) -> None:
    view = memoryview(content).cast("B")
    while len(view):
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
