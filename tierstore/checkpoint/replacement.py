"""How a checkpoint comes to stand at its path in one instant, and what a crash in the middle leaves.

A checkpoint is built beside its path, in a folder `.NAME.tierstore-<random>`, and changes names with what stands there.
Where a filesystem cannot exchange names, the old one is put aside (`….old`) and the new one takes the name; a crash
between the two is finished by whoever looks next. A folder is locked as long as its writer lives, and by each reader:
only unlocked ones are ever removed, and only such as bear such a name.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from tierstore.checkpoint.files import Files, told
from tierstore.checkpoint.root import find_root
from tierstore.errors import CheckpointFileError, CheckpointValueError, NoCheckpointError

_ASIDE = ".old"
_LEFT = re.compile(r"\.(?P<name>.+)\.tierstore-[0-9a-f]{16}(?P<aside>\.old)?", re.DOTALL)
_NUMBERED = re.compile(r"(?P<before>.*?)[0-9]+(?P<after>[^0-9]*)", re.DOTALL)

_log = logging.getLogger("tierstore.checkpoint")


class Lock:
    """A folder, held against removal: shared by readers, alone by its writer. Stays with the folder when it is renamed.

    `is_sure` is False where the filesystem has no such locks. Forgotten, it is released.
    """

    def __init__(self, fd: int, is_sure: bool) -> None:
        self.fd = fd
        self.is_sure = is_sure
        self._finalizer = weakref.finalize(self, _release, os.getpid(), fd, is_sure)

    def release(self) -> None:
        """Let go of it, also in forked children that inherited it. Idempotent."""
        self._finalizer()

    def is_of(self, path: str) -> bool:
        """Whether the folder that is held is the one that has this name now."""
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))


def _release(pid: int, fd: int, is_sure: bool) -> None:
    if is_sure and os.getpid() == pid:
        fcntl.flock(fd, fcntl.LOCK_UN)  # of the parent's and the children's descriptors at once
    os.close(fd)


def hold(path: str, *, alone: bool, wait: bool = False) -> Lock | None:
    """Lock a folder; None if somebody else holds it, with `wait` only once it is free. Raises CheckpointFileError."""
    with told(path, "the folder cannot be opened"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mode = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        fcntl.flock(fd, mode if wait else mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        return Lock(fd, is_sure=False)
    return Lock(fd, is_sure=True)


@dataclass(slots=True)
class Site:
    """A folder in which a checkpoint is built, and the path that it is for. The lock is held until `leave`."""

    path: str
    target: str
    lock: Lock

    def leave(self) -> None:
        """Let others have, or remove, what stands there."""
        self.lock.release()


def begin(target: str, files: Files) -> Site:
    """Make a folder to build in beside `target`, after removing what dead writers left.

    Raises CheckpointValueError if something else than a checkpoint stands at the path.
    """
    parent, name = os.path.split(target)
    if not name:
        raise CheckpointValueError(f"{target} cannot be a checkpoint's path: name a folder in it")
    check_replaceable(target)
    clean(parent, files)
    while True:
        path = f"{parent}/.{name}.tierstore-{secrets.token_hex(8)}"
        files.make_folder(path)
        lock = None
        with contextlib.suppress(NoCheckpointError):
            lock = hold(path, alone=True)
        if lock is not None and lock.is_of(path):
            return Site(path, target, lock)
        if lock is not None:  # somebody took it for a leftover in the moment between
            lock.release()


def check_replaceable(target: str) -> None:
    """Refuse to replace what is no checkpoint. Raises CheckpointValueError."""
    if not os.path.lexists(target):
        return
    is_empty = os.path.isdir(target) and not _holds_anything(target)
    if not is_empty and find_root(target) is None and os.path.lexists(target):
        raise CheckpointValueError(
            f"{target} exists and is no checkpoint of tierstore's, or a damaged one: name another path, or remove it"
        )


def replace(site: Site, files: Files) -> None:
    """Let what was built, and synced, stand at its path; remove what stood there."""
    check_replaceable(site.target)
    while _holds_anything(site.target):
        old = None
        try:
            old = hold(site.target, alone=True)  # no new reader; None: one is at it, the next save will remove it
            left = _change_names(site, files)
            if old is not None:
                files.remove_tree(left)
            return
        except NoCheckpointError:
            if os.path.lexists(site.target):
                raise  # else another save has pruned it meanwhile
        finally:
            if old is not None:
                old.release()
    files.rename(site.path, site.target)
    files.sync(os.path.dirname(site.target))


def _holds_anything(path: str) -> bool:
    """Whether there is a folder with something in it, and stays there long enough to see."""
    try:
        return os.path.isdir(path) and bool(os.listdir(path))
    except FileNotFoundError:
        return False


def _change_names(site: Site, files: Files) -> str:
    """Let what was built take the name of what stands there; return what that is called now."""
    parent = os.path.dirname(site.target)
    left = site.path
    if not files.exchange(site.path, site.target):
        left = site.path + _ASIDE
        files.rename(site.target, left)
        files.sync(parent)
        files.rename(site.path, site.target)
    files.sync(parent)
    return left


def recover(target: str, files: Files, *, wait: bool) -> None:
    """Finish a replacement that was broken off while nothing stood at the path; `wait` for a writer that is at it."""
    for path in _left_beside(target):
        built = path.removesuffix(_ASIDE)
        if built == path or os.path.lexists(target):
            continue
        source = built if find_root(built) is not None else path
        try:
            lock = hold(source, alone=True, wait=wait)
        except NoCheckpointError:
            continue  # its writer has renamed it meanwhile
        if lock is None:
            continue
        try:
            if lock.is_of(source) and not os.path.lexists(target):
                files.rename(source, target)
                files.sync(os.path.dirname(target))
                _log.warning("%s: a replacement that was broken off has been finished", target)
        finally:
            lock.release()


def clean(parent: str, files: Files) -> None:
    """Remove what dead writers left in a folder, after finishing what can be finished."""
    for path, target in sorted(_left_in(parent), reverse=True):  # what was put aside first, then what was built
        if path.endswith(_ASIDE):
            recover(target, files, wait=False)
        if path.endswith(_ASIDE) and not os.path.lexists(target):
            continue
        if not path.endswith(_ASIDE) and os.path.lexists(path + _ASIDE) and not os.path.lexists(target):
            continue
        remove_unused(path, files)


def remove_unused(path: str, files: Files) -> bool:
    """Remove a folder unless somebody holds it, or that cannot be known. False if it stays."""
    try:
        lock = hold(path, alone=True)
    except CheckpointFileError:
        return False
    if lock is None:
        return False
    try:
        if not lock.is_sure or not lock.is_of(path):
            return False
        files.remove_tree(path)
        return True
    finally:
        lock.release()


def check_keep_last(keep_last: object) -> None:
    """Refuse to keep none, or what is no number. Raises CheckpointValueError."""
    is_count = isinstance(keep_last, Integral) and not isinstance(keep_last, bool) and int(keep_last) >= 1
    if keep_last is not None and not is_count:
        raise CheckpointValueError(f"keep_last is {keep_last!r}: give a whole number from 1 on, or None to keep all")


def prune(target: str, keep_last: int, files: Files) -> list[str]:
    """Remove the oldest complete checkpoints of the series of `target` beyond `keep_last`, never that one itself.

    Returns the paths of those removed. One that is being read stays, where the filesystem has locks of folders.
    """
    parent, own_name = os.path.split(target)
    with told(parent, "the folder cannot be listed"):
        names = os.listdir(parent)
    others = []
    for name in names:
        path = os.path.join(parent, name)
        is_other = (
            path != target
            and series_of(name) == series_of(own_name)
            and not _LEFT.fullmatch(name)
            and not os.path.islink(path)
            and os.path.isdir(path)
        )
        if is_other and (root := find_root(path)) is not None:
            others.append((root.saved_at, path))
    removed = [path for _, path in sorted(others, reverse=True)[max(keep_last - 1, 0) :]]
    return [path for path in removed if _put_out_of_use(path, files)]


def series_of(name: str) -> tuple[str, str]:
    """What the names of one run's checkpoints have in common: all but their last number."""
    match = _NUMBERED.fullmatch(name)
    return (name, "") if match is None else (match["before"], "#" + match["after"])


def unfinished_beside(target: str) -> Sequence[str]:
    """What lies beside a path that was never finished, or is about to be removed."""
    return _left_beside(target)


def _put_out_of_use(path: str, files: Files) -> bool:
    try:
        lock = hold(path, alone=True)
    except NoCheckpointError:  # another save has removed it meanwhile
        return False
    if lock is None:
        return False
    try:
        if not lock.is_of(path):  # another save has put a new one there meanwhile
            return False
        parent, name = os.path.split(path)
        left = f"{parent}/.{name}.tierstore-{secrets.token_hex(8)}"
        files.rename(path, left)  # at once under a name that nobody loads
        files.sync(parent)
        files.remove_tree(left)
    finally:
        lock.release()
    return True


def _left_beside(target: str) -> list[str]:
    return sorted(path for path, of in _left_in(os.path.dirname(target)) if of == target)


def _left_in(parent: str) -> list[tuple[str, str]]:
    """Folders of this user that writers made in a folder, and the paths that they were for."""
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    found = []
    for name in names:
        match = _LEFT.fullmatch(name)
        path = os.path.join(parent, name)
        if match is not None and _is_own_folder(path):
            found.append((path, os.path.join(parent, match["name"])))
    return found


def _is_own_folder(path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
