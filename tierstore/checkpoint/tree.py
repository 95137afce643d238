"""The files of one checkpoint, for reading. Names are relative to its folder, which is held open and locked, so that
they mean the same when the checkpoint is replaced. No symbolic link inside is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

from tierstore.checkpoint.blocks import Buffer
from tierstore.checkpoint.files import told
from tierstore.checkpoint.geometry import PAGE_BYTES
from tierstore.checkpoint.replacement import hold
from tierstore.errors import DamagedCheckpointError, IncompleteCheckpointError, NoCheckpointError


class Tree:
    """An open folder. Raises CheckpointFileError for what cannot be read, DamagedCheckpointError for links, and
    IncompleteCheckpointError for what is not there, or was removed meanwhile.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._sizes: dict[str, int] = {}
        self._folders: set[str] = {""}
        lock = None
        while lock is None or not lock.is_of(path):  # it may be replaced between the two
            if lock is not None:
                lock.release()
            lock = hold(path, alone=False, wait=True)
        self._lock = lock
        self._direct = True

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._lock.release()

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            os.stat(name, dir_fd=self._lock.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def folders(self, name: str) -> list[str]:
        """The folders in a folder, in order."""
        self._check_folder(name)
        with self._told(name, "the folder cannot be listed"):
            fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._lock.fd)
            try:
                with os.scandir(fd) as entries:
                    found = sorted((entry.name, entry.is_symlink(), entry.is_dir()) for entry in entries)
            finally:
                os.close(fd)
        if links := [link for link, is_link, _ in found if is_link]:
            raise DamagedCheckpointError(f"{self.path}/{name}/{links[0]} is a symbolic link, which no checkpoint has")
        return [folder for folder, _, is_folder in found if is_folder]

    def size(self, name: str) -> int:
        """Bytes of a file; it must be an ordinary one."""
        if (size := self._sizes.get(name)) is None:
            self._check_folder(os.path.dirname(name))
            size = self._sizes[name] = self._stat(name, stat.S_ISREG).st_size
        return size

    def read(self, name: str, most_bytes: int) -> bytes:
        """Read a file whole, if it is not too long."""
        size = self.size(name)
        if size > most_bytes:
            raise DamagedCheckpointError(
                f"{self.path}/{name} has {size:,} bytes; more than {most_bytes:,} are not read"
            )
        return self.read_range(name, 0, size)

    def read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read a part of a file."""
        with self._told(name, "the file cannot be read"):
            fd = self._open(name, 0)
            try:
                content = os.pread(fd, nbytes, offset)
                while len(content) < nbytes and (more := os.pread(fd, nbytes - len(content), offset + len(content))):
                    content += more
            finally:
                os.close(fd)
        if len(content) != nbytes:
            raise DamagedCheckpointError(f"{self.path}/{name} ended after {offset + len(content):,} bytes")
        return content

    def expect(self, name: str, offset: int, nbytes: int) -> None:
        """Let the kernel begin to read a part of a file that `read_range` will be asked for."""
        with self._told(name, "the file cannot be read"):
            fd = self._open(name, 0)
            try:
                with contextlib.suppress(OSError):  # a filesystem may not take advice: then nothing is read beforehand
                    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def read_into(self, name: str, offset: int, nbytes: int, buffer: Buffer) -> Buffer:
        """Read a part of a file into a page-aligned buffer with two pages to spare; return where it lies there."""
        begin = offset // PAGE_BYTES * PAGE_BYTES
        length = -(-(offset + nbytes - begin) // PAGE_BYTES) * PAGE_BYTES
        flags, wanted = os.O_DIRECT if self._direct else 0, offset - begin + nbytes
        with self._told(name, "the file cannot be read"):
            try:
                found = self._fill(name, begin, buffer[:length], wanted, flags)
            except OSError as error:
                if error.errno != errno.EINVAL or not flags:  # whatever other threads have found out meanwhile
                    raise
                self._direct = False
                found = self._fill(name, begin, buffer[:length], wanted, 0)
        if found < wanted:
            raise DamagedCheckpointError(f"{self.path}/{name} ended after {begin + found:,} bytes")
        return buffer[offset - begin : wanted]

    @contextlib.contextmanager
    def _told(self, name: str, what: str) -> Iterator[None]:
        """As `told`, but the checkpoint was there when it was opened: one without a part is no missing one."""
        try:
            with told(f"{self.path}/{name}", what):
                yield
        except NoCheckpointError as error:
            raise IncompleteCheckpointError(
                f"{self.path}/{name} is missing: the checkpoint is not complete, or was removed while it was read"
            ) from error

    def _fill(self, name: str, offset: int, buffer: Buffer, wanted: int, flags: int) -> int:
        target: Any = buffer
        fd = self._open(name, flags)
        try:
            found = 0
            while found < wanted:
                count = os.preadv(fd, [target[found:]], offset + found)
                if count == 0:
                    break
                found += count
            return found
        finally:
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=self._lock.fd)

    def _check_folder(self, name: str) -> None:
        """Refuse a folder that is, or lies behind, a symbolic link."""
        if name not in self._folders:
            self._check_folder(os.path.dirname(name))
            self._stat(name, stat.S_ISDIR)
            self._folders.add(name)

    def _stat(self, name: str, is_right: object) -> os.stat_result:
        with self._told(name, "it cannot be found"):
            found = os.stat(name, dir_fd=self._lock.fd, follow_symlinks=False)
        if not callable(is_right) or not is_right(found.st_mode):
            raise DamagedCheckpointError(
                f"{self.path}/{name} is {'a symbolic link' if stat.S_ISLNK(found.st_mode) else 'of the wrong kind'}; "
                f"checkpoints consist of ordinary files and folders"
            )
        return found
