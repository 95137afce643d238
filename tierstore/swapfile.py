"""Owns the nvme tier's files: private to this process, reserved in full, gone when the process is.

A swap file has no name from the moment it exists, so nothing is left whatever ends the process, and two processes in
one folder cannot meet. Every byte it counts as its own is reserved on the disk, and a reservation that fails leaves
the disk as it was. Never used for anything that must outlive the process, and never silently in a folder that is
memory or a network.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import mmap
import os
import secrets
import stat
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tierstore.errors import AlignmentError, DiskFullError, PolicyError, StoreClosedError, SwapError
from tierstore.io.base import ALIGNMENT
from tierstore.pressure import disk_space, mount_of

SLAB_BYTES = 1 << 30
"""Reserved at once: small enough to be interrupted, large enough to be contiguous."""

_ZEROS_BYTES = 4 << 20
_MEMORY = {"tmpfs", "ramfs", "rootfs", "hugetlbfs"}
_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs"),
    *("afs", "ncpfs", "orangefs", "pvfs2", "coda", "davfs", "afpfs", "webdav", "ocfs2", "gfs2", "wekafs", "panfs"),
}
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g", "fuse.gocryptfs", "fuse.encfs"}

_log = logging.getLogger("tierstore.swapfile")


class FolderKind(enum.Enum):
    """What the filesystem under a folder is made of."""

    DISK = "disk"
    MEMORY = "memory"
    NETWORK = "network"


class SwapFile:
    """One unnamed file in a folder, with what `grow` reserved in it.

    `direct` asks for O_DIRECT, or against it; None probes, and takes buffered I/O where it does not work. Afterwards
    `direct` says which it is. Used by one thread, except `fd`, which engines use. `warns` of a folder that is memory or
    a network.
    """

    def __init__(self, folder: Path, *, direct: bool | None, warns: bool = True) -> None:
        self.folder = folder
        self.path = f"{folder}/tierstore-{os.getpid()} (unnamed)"
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._lost = 0  # requests that were given up, and may use the descriptor yet
        self._is_closed = False
        self.fd = _open_unnamed(folder)
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), self.fd)
        try:
            if warns:
                _warn_of_folder(folder)
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
        """Give the last `nbytes` back to the disk; the caller no longer needs what is in them."""
        self._check(nbytes)
        if nbytes > self.size_bytes:
            raise ValueError(f"{self.path} has {self.size_bytes} bytes, {nbytes} cannot be given back")
        os.ftruncate(self.fd, self.size_bytes - nbytes)
        self.size_bytes -= nbytes

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
        free = space.free_bytes + taken
        room = free - disk_margin(space.total_bytes)
        if nbytes > room:
            raise DiskFullError(errno.ENOSPC, self._too_full(nbytes, free, room), self.path)

    def _held_bytes(self) -> int:
        """What the file takes of the disk, with the filesystem's bookkeeping for it."""
        return os.fstat(self.fd).st_blocks * 512

    def _too_full(self, nbytes: int, free: int, room: int) -> str:
        return _too_full(nbytes, [self.folder], free=free, room=room, most=self.size_bytes + max(0, room))

    def _refusal(self, error: OSError, nbytes: int) -> SwapError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = disk_space(self.fd).free_bytes
            return DiskFullError(error.errno, self._too_full(nbytes, free, free), self.path)
        hint = "raise the file size limit (ulimit -f)" if error.errno == errno.EFBIG else "check the disk"
        return SwapError(
            error.errno or errno.EIO,
            f"{_sized(nbytes)} could not be reserved ({error.strerror}): {hint}, or set tiers.nvme.paths to another",
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


def swap_folders(paths: Literal["auto"] | Sequence[Path], *, allows_shared: bool = False) -> list[Path]:
    """Say which folders hold swap files: those given, or for `auto` $TIERSTORE_SWAP, or the temporary folder.

    Raises PolicyError when a folder appears twice, SwapError when `auto` finds only memory or a network, or for a
    folder in which any user may rename and remove what others have made, unless the policy `allows_shared` ones.
    """
    folders = _automatic() if paths == "auto" else [Path(path).expanduser() for path in paths]
    if not folders:
        raise PolicyError("tiers.nvme.paths is empty: name at least one folder, or auto")
    seen: dict[str, Path] = {}
    for folder in folders:
        real = os.path.realpath(folder)
        if real in seen:
            raise PolicyError(f"tiers.nvme.paths names {real} twice, as {seen[real]} and {folder}: leave one out")
        seen[real] = folder
        if not allows_shared:
            _refuse_shared(folder)
    return folders


def filesystems(folders: Sequence[Path]) -> list[list[Path]]:
    """Group folders by the filesystem they lie on. Raises SwapError for one that cannot hold a swap file."""
    found: dict[int, list[Path]] = {}
    for folder in folders:
        try:
            found.setdefault(_look_at(folder), []).append(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
    return list(found.values())


def check_space(shares: Mapping[Path, int]) -> None:
    """Check that swap files can be made in folders and take so many bytes each; makes and reserves nothing.

    Folders on one filesystem take their bytes from the same free space. Raises SwapError or DiskFullError.
    """
    total = sum(shares.values())
    for folders in filesystems(list(shares)):
        space = disk_space(folders[0])
        room = max(0, space.free_bytes - disk_margin(space.total_bytes))
        nbytes = sum(shares[folder] for folder in folders)
        if nbytes > room:
            most = total * room // nbytes
            text = _too_full(nbytes, folders, free=space.free_bytes, room=room, most=most, of=len(shares))
            raise DiskFullError(errno.ENOSPC, text, str(folders[0]))


def describe_folder(folder: Path, *, root: Path = Path("/")) -> FolderKind:
    """Say whether a folder is on a disk, in memory or on a network, by the filesystem mounted nearest above it."""
    return _kind(mount_of(folder, root).filesystem)


def disk_margin(total_bytes: int) -> int:
    """Bytes to leave free on a filesystem of this size: max(1 GiB, 2 %), on one below 20 GiB 5 % of it."""
    return min(max(1 << 30, total_bytes // 50), total_bytes // 20)


def _automatic() -> list[Path]:
    value = os.environ.get("TIERSTORE_SWAP", "")
    try:
        named = [Path(part).expanduser() for part in value.split(os.pathsep) if part]
    except RuntimeError as error:  # a user there is not
        raise SwapError(errno.ENOENT, f"TIERSTORE_SWAP is {value!r}: {error}; name a folder", value) from error
    if named:
        return named
    folder = Path(tempfile.gettempdir())
    kind = describe_folder(folder)
    if kind is FolderKind.DISK:
        return [folder]
    raise SwapError(
        errno.EOPNOTSUPP,
        f"the temporary folder is {_is_what(kind)} and no place for swap files: set tiers.nvme.paths, or the variable "
        "TIERSTORE_SWAP, to a folder on a local disk",
        str(folder),
    )


def _warn_of_folder(folder: Path) -> None:
    kind = describe_folder(folder)
    if kind is FolderKind.DISK:
        return
    harm = "saves no memory" if kind is FolderKind.MEMORY else "is slow and fails with the network"
    warnings.warn(
        f"the swap folder {folder} is {_is_what(kind)}, so that state there {harm}: set tiers.nvme.paths to a folder "
        "on a local disk",
        UserWarning,
        stacklevel=3,
    )


def _is_what(kind: FolderKind) -> str:
    return "memory" if kind is FolderKind.MEMORY else "on a network filesystem"


def _kind(filesystem: str) -> FolderKind:
    if filesystem in _MEMORY:
        return FolderKind.MEMORY
    is_remote_fuse = filesystem.startswith("fuse.") and filesystem not in _LOCAL_FUSE
    return FolderKind.NETWORK if filesystem in _NETWORK or is_remote_fuse else FolderKind.DISK


def _refuse_shared(folder: Path) -> None:
    """Refuse a folder that is open to all users without the sticky bit; one that is not there is told of later."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise SwapError(
            errno.EPERM,
            f"every user of this machine may rename and remove files in the swap folder {folder} (mode "
            f"{stat.S_IMODE(mode):o}): chmod +t it, name another in tiers.nvme.paths, or, if all users here are to be "
            f"trusted, set tiers.nvme.allow_shared_folder to true",
            str(folder),
        )


def _look_at(folder: Path) -> int:
    """The filesystem of a folder, by number; raises the OSError that making a file there would meet, and makes none."""
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        is_read_only = hasattr(os, "ST_RDONLY") and os.statvfs(folder).f_flag & os.ST_RDONLY
        code = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(code, os.strerror(code))
    return status.st_dev


def _open_unnamed(folder: Path) -> int:
    try:
        fd = _open_tmpfile(folder)
        os.fchmod(fd, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from error
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


def _unusable(folder: Path, error: OSError) -> SwapError:
    reasons = {
        errno.ENOENT: "does not exist: create it",
        errno.ENOTDIR: "is not a folder: name a folder",
        errno.EACCES: "cannot be written by this user: change its permissions",
        errno.EPERM: "cannot be written by this user: change its permissions",
        errno.EROFS: "is on a filesystem that is mounted read-only: mount it for writing",
        errno.ENOSPC: "is on a filesystem without a free file entry: free some",
    }
    reason = reasons.get(error.errno or 0, f"cannot hold a swap file ({error.strerror}): check it")
    text = f"the swap folder {folder} {reason}, or set tiers.nvme.paths to another one"
    return SwapError(error.errno or errno.EIO, text, str(folder))


def _too_full(nbytes: int, folders: Sequence[Path], *, free: int, room: int, most: int, of: int = 1) -> str:
    """Words for a disk without `nbytes` of room; `most`: bytes that would fit in the `of` folders there are."""
    about = "about " if of > len(folders) else ""  # slabs are dealt out in turn
    here = " in this folder" if of == 1 else ""
    return (
        f"{_sized(nbytes)} are needed in {' and '.join(map(str, folders))}, where {_sized(free)} are free, of which "
        f"tierstore leaves {_sized(free - room)}: lower tiers.nvme.capacity to at most "
        f"{about}{_sized(most // ALIGNMENT * ALIGNMENT)}{here}, free space, or add a folder on another disk to "
        "tiers.nvme.paths"
    )


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


def _sized(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / (1 << 20):.1f} MiB)"


def _close_in(pid: int, fd: int) -> None:
    if os.getpid() == pid:
        os.close(fd)


_open_files: weakref.WeakSet[SwapFile] = weakref.WeakSet()


def _close_in_child() -> None:
    """Drop a forked child's copies, which would keep the disk full after the parent has closed the files."""
    for file in list(_open_files):
        with contextlib.suppress(OSError):
            os.close(file.fd)
        file.fd, file.size_bytes = -1, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
