"""Keeps measured rates in the user's cache folder, and lets one process at a time measure.

A file holds one thing's rates under a key of everything they depend on, and is replaced as a whole. What cannot be
read, is another user's or says something else than the key is as good as absent, and told; where no file can be
written, rates are kept for the life of the process, which is told once. Never raises for any of that.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from tierstore.cores import available
from tierstore.pressure import host_memory, huge_pages, mount_of, processor

Key = dict[str, str | int | bool]
T = TypeVar("T")

MOST_BYTES = 64 << 10
"""Of a file that is read: an entry is about 1 KiB."""

_log = logging.getLogger("tierstore.calibrate")


class Entry(BaseModel, Generic[T]):
    """What a file holds. `measured_at` is ISO 8601, in UTC."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1]
    measured_at: str
    key: Key
    rates: T


@dataclass(frozen=True, slots=True)
class Turn:
    """Whether another process is measuring; `without` says why processes cannot take turns, where they cannot."""

    is_taken: bool = False
    without: str = ""


class RateCache:
    """The files of one folder; `folder` None: nowhere. Used by one thread."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, kind: type[T], key: Key) -> Entry[T] | None:
        """Find the rates of a kind that were measured for a key."""
        place = self._place(kind, key)
        if place in _kept or self.folder is None:
            return _kept.get(place)
        try:
            entry = TypeAdapter(Entry[kind]).validate_json(_read(place), strict=True)  # type: ignore[valid-type]
            if entry.key != key:
                raise ValueError("it is of something else")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            _log.warning("the calibration in %s is left aside: %s", place, " ".join(str(error).split())[:200])
            return None
        return entry

    def save(self, rates: T, key: Key) -> Entry[T]:
        """Keep rates, in place of those before."""
        kind, now = type(rates), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = Entry[kind](format=1, measured_at=now, key=key, rates=rates)  # type: ignore[valid-type]
        place = self._place(kind, key)
        _kept.pop(place, None)
        try:
            if self.folder is None:
                raise FileNotFoundError(errno.ENOENT, "there is no home folder")
            _replace(place, entry.model_dump_json(indent=1))
        except OSError as error:
            _kept[place] = entry
            if self.folder not in _told:
                _told.add(self.folder)
                _log.info("calibration is kept for this process only, not in %s: %s", self.folder, error.strerror)
        return entry

    @contextlib.contextmanager
    def turn(self) -> Iterator[Turn]:
        """Ask for the turn to measure, which one process at a time has; waits for nobody."""
        try:
            fd = self._lock()
        except BlockingIOError:
            yield Turn(is_taken=True)
            return
        except (OSError, ImportError) as error:
            yield Turn(without=str(error))
            return
        try:
            yield Turn()
        finally:
            _unlock(fd)

    def _lock(self) -> int:
        import fcntl

        if self.folder is None:
            raise FileNotFoundError(errno.ENOENT, "there is no home folder")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _place(self, kind: type, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return (self.folder or Path()) / f"{kind.__name__.removesuffix('Rates').lower()}-{digest}.json"


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for files of tierstore's that may vanish: $XDG_CACHE_HOME/tierstore, else ~/.cache/tierstore."""
    named = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the specification ignores relative ones
        return Path(named) / "tierstore"
    try:
        return Path("~/.cache/tierstore").expanduser()
    except RuntimeError:
        return None


def path_key(folder: Path, *, engine: str) -> Key:
    """All that the rates of a folder depend on, and no more: any folder of the filesystem has them. Raises OSError."""
    status, mount = os.stat(folder), mount_of(folder)
    return {
        "filesystem": mount.filesystem,
        "source": mount.source,
        "device": f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}",
        "id": f"{os.statvfs(folder).f_fsid:x}",
        "engine": engine,
        "huge_pages": huge_pages(),
        "kernel": platform.release(),
    }


def machine_key(threads: int) -> Key:
    """All that the rates of memory and arithmetic depend on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "usable_cores": available(),
        "threads": threads,
        "memory": host_memory().total_bytes,
        "huge_pages": huge_pages(),
        "torch": torch.__version__,
    }


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo, say, is no reason to wait
    try:  # no `fdopen`, which keeps open what is a folder
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's")
        return os.read(fd, MOST_BYTES)
    finally:
        os.close(fd)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _unlock(fd: int) -> None:
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile has the same open file
    os.close(fd)


_kept: dict[Path, Any] = {}  # what no file could be written for
_told: set[Path | None] = set()
