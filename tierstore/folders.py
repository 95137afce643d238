"""Says which folders hold swap files, what they lie on, and whether they will do; makes nothing in them.

A folder that is memory or a network is warned of, one in which others may rename files is refused, and a disk is never
filled up.
"""

from __future__ import annotations

import enum
import errno
import grp
import os
import pwd
import stat
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tierstore.errors import DiskFullError, PolicyError, SwapError
from tierstore.io.base import ALIGNMENT
from tierstore.pressure import disk_space, mount_of

_MEMORY = {"tmpfs", "ramfs", "rootfs", "hugetlbfs"}
_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "beegfs", "gpfs"),
    *("afs", "ncpfs", "orangefs", "pvfs2", "coda", "davfs", "afpfs", "webdav", "ocfs2", "gfs2", "wekafs", "panfs"),
}
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.bindfs", "fuse.ntfs-3g", "fuse.gocryptfs", "fuse.encfs"}


class FolderKind(enum.Enum):
    """What the filesystem under a folder is made of."""

    DISK = "disk"
    MEMORY = "memory"
    NETWORK = "network"


def swap_folders(paths: Literal["auto"] | Sequence[Path], *, allows_shared: bool = False) -> list[Path]:
    """Say which folders hold swap files: those given, or for `auto` $TIERSTORE_SWAP, or the temporary folder.

    Raises PolicyError when a folder appears twice, SwapError when `auto` finds only memory or a network, or for a
    folder in which others may rename and remove what this user has made, unless the policy `allows_shared` ones.
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
            raise unusable(folder, error) from error
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
            text = too_full(nbytes, folders, free=space.free_bytes, room=room, most=most, of=len(shares))
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


def warn_of_folder(folder: Path) -> None:
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
    """Refuse a folder that others may rename files in; one that is not there is told of later."""
    try:
        status = os.stat(folder)
    except OSError:
        return
    others = who_else_may_rename(status, os.geteuid())
    if others:
        raise SwapError(
            errno.EPERM,
            f"{others} may rename and remove files in the swap folder {folder} (owner {status.st_uid}, group "
            f"{status.st_gid}, mode {stat.S_IMODE(status.st_mode):o}): make a folder of your own with mode 700, name "
            f"it in tiers.nvme.paths, or, if they are to be trusted, set tiers.nvme.allow_shared_folder to true",
            str(folder),
        )


def who_else_may_rename(status: os.stat_result, user: int) -> str:
    """Say who, besides root and a `user`, may rename and remove what that user makes in a folder of such a status.

    An empty text: nobody. A group that is root's, or the user's own and nobody else's, is nobody else.
    """
    mode = status.st_mode
    if status.st_uid not in (0, user) and not _is_unknown_here(status.st_uid):
        return f"user {status.st_uid}, who owns it,"
    if mode & stat.S_ISVTX:
        return ""
    if mode & stat.S_IWOTH:
        return "every user of this machine"
    if mode & stat.S_IWGRP and status.st_gid != 0 and not _is_private_group(status.st_gid, user):
        return f"every member of group {status.st_gid}"
    return ""


def _is_unknown_here(user: int) -> bool:
    """Whether a number stands for all users who have none in this user namespace, as a container's host may have."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        is_everybody_known = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
    except OSError:
        return False
    return user == overflow and not is_everybody_known


def _is_private_group(group: int, user: int) -> bool:
    """Whether it is the group that a user has for himself, as many systems make one, with 775 for what is made."""
    try:
        entry, named = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.pw_gid == group and named.gr_name == entry.pw_name and set(named.gr_mem) <= {entry.pw_name}


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


def unusable(folder: Path, error: OSError) -> SwapError:
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


def too_full(nbytes: int, folders: Sequence[Path], *, free: int, room: int, most: int, of: int = 1) -> str:
    """Words for a disk without `nbytes` of room; `most`: bytes that would fit in the `of` folders there are."""
    about = "about " if of > len(folders) else ""  # slabs are dealt out in turn
    here = " in this folder" if of == 1 else ""
    return (
        f"{sized(nbytes)} are needed in {' and '.join(map(str, folders))}, where {sized(free)} are free, of which "
        f"tierstore leaves {sized(free - room)}: lower tiers.nvme.capacity to at most "
        f"{about}{sized(most // ALIGNMENT * ALIGNMENT)}{here}, free space, or add a folder on another disk to "
        "tiers.nvme.paths"
    )


def sized(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / (1 << 20):.1f} MiB)"
