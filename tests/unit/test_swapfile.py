"""Swap files are reserved, private and gone; a full disk stays as it was."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import PATIENCE_SECONDS, FewThreads
from tests.unit.conftest import mounted
from tierstore import TieredStore, folders, swapfile
from tierstore.errors import AlignmentError, DiskFullError, PolicyError, StoreClosedError, SwapError
from tierstore.folders import FolderKind, describe_folder, disk_margin, swap_folders, who_else_may_rename
from tierstore.swapfile import SwapFile

MIB = 1 << 20
GIB = 1 << 30

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


def used_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def reserved_bytes(file: SwapFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SwapFile]:
    file = SwapFile(tmp_path, direct=None)
    yield file
    file.close()


# --- what a file is


def test_file_has_no_name_and_is_private(file: SwapFile, tmp_path: Path) -> None:
    assert os.listdir(tmp_path) == []
    status = os.fstat(file.fd)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink) == (0o600, 0)
    assert fcntl.fcntl(file.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert file.path == f"{tmp_path}/tierstore-{os.getpid()} (unnamed)"


def test_permissions_hold_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        file = SwapFile(tmp_path, direct=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.fstat(file.fd).st_mode) == 0o600
    file.close()


def test_growth_is_reserved_and_exact(file: SwapFile) -> None:
    assert [file.grow(MIB), file.grow(4096), file.grow(3 * MIB)] == [0, MIB, MIB + 4096]
    assert file.size_bytes == os.fstat(file.fd).st_size == 4 * MIB + 4096
    assert reserved_bytes(file) >= file.size_bytes


def test_growth_goes_slab_by_slab(file: SwapFile, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[tuple[int, int]] = []
    monkeypatch.setattr(swapfile, "_reserve", lambda fd, offset, length: slabs.append((offset, length)))
    file.grow(2 * GIB + 4096)
    assert slabs == [(0, GIB), (GIB, GIB), (2 * GIB, 4096)]


def test_shrinking_gives_the_tail_back(file: SwapFile) -> None:
    file.grow(2 * MIB)
    file.shrink(MIB + 4096)
    file.wait_until_cut()
    assert file.size_bytes == os.fstat(file.fd).st_size == MIB - 4096
    assert reserved_bytes(file) < 2 * MIB
    assert file.grow(4096) == MIB - 4096
    with pytest.raises(ValueError, match=rf"has {MIB} bytes, {2 * MIB} cannot"):
        file.shrink(2 * MIB)


class SlowToCut:
    """A filesystem that gives space back no sooner than somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut_files: list[int] = []
        self._is_waited_for = threading.Event()
        self._cut, wait = os.ftruncate, swapfile._Cut.wait

        def tell_and_wait(cut: swapfile._Cut) -> None:
            if cut._thread is not None:
                self._is_waited_for.set()
            wait(cut)

        monkeypatch.setattr(swapfile.os, "ftruncate", self._cut_late)
        monkeypatch.setattr(swapfile._Cut, "wait", tell_and_wait)

    def _cut_late(self, fd: int, size: int) -> None:
        assert self._is_waited_for.wait(PATIENCE_SECONDS)
        self._cut(fd, size)
        self.cut_files.append(os.fstat(fd).st_ino)


def test_nobody_waits_while_space_is_given_back_but_who_takes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem that discards what it is given back took a third of the time of a reload for it."""
    file = SwapFile(tmp_path, direct=False)
    file.grow(4 * MIB)
    SlowToCut(monkeypatch)
    for _ in range(3):
        file.shrink(MIB)
    assert file.size_bytes == MIB and os.fstat(file.fd).st_size == 4 * MIB
    assert file.grow(MIB) == MIB
    assert file.size_bytes == os.fstat(file.fd).st_size == 2 * MIB
    assert reserved_bytes(file) >= 2 * MIB
    file.close()


def test_space_on_its_way_back_counts_as_free(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another file of this process: an optimizer takes what another one has just given back."""
    one, other = SwapFile(small_disk, direct=False), SwapFile(small_disk, direct=False)
    one.grow(70 * MIB)
    SlowToCut(monkeypatch)
    one.shrink(70 * MIB)
    assert other.grow(70 * MIB) == 0
    one.close()
    other.close()


def test_a_file_is_not_closed_under_who_cuts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's by then, which would be cut instead."""
    file, disk = SwapFile(tmp_path, direct=False), SlowToCut(monkeypatch)
    fd, number = file.fd, os.fstat(file.fd).st_ino
    file.grow(MIB)
    file.shrink(MIB)
    file.close()
    assert disk.cut_files == [number]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_space_is_given_back_at_once_where_there_is_no_thread(file: SwapFile) -> None:
    """What was begun and never ran was waited for by the next to reserve room, and by who closed the file."""
    file.grow(2 * MIB)
    with FewThreads():
        file.shrink(MIB)
        assert file.size_bytes == os.fstat(file.fd).st_size == MIB
    file.shrink(4096)
    assert file.grow(MIB) == MIB - 4096


def test_space_that_cannot_be_given_back_is_told_of_and_used_again(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    file.grow(2 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(swapfile.os, "ftruncate", refuse)
        file.shrink(MIB)
        file.wait_until_cut()
    assert "could not be cut to 1048576 bytes: Input/output error" in caplog.text
    assert file.grow(2 * MIB) == MIB and file.size_bytes == os.fstat(file.fd).st_size == 3 * MIB


@pytest.mark.parametrize("nbytes", [0, -4096, 1, 4095, 4097])
def test_broken_sizes_are_refused(file: SwapFile, nbytes: int) -> None:
    with pytest.raises(AlignmentError, match=f"4096 bytes, not by {nbytes}"):
        file.grow(nbytes)
    assert os.fstat(file.fd).st_size == 0


def test_two_files_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Two optimizers with one swap folder: a peer let them train on each other's state."""
    files = [SwapFile(tmp_path, direct=False) for _ in range(2)]
    for number, file in enumerate(files):
        file.grow(4096)
        os.pwrite(file.fd, bytes([number]) * 4096, 0)
    assert [os.pread(file.fd, 4096, 0) for file in files] == [bytes(4096), b"\1" * 4096]
    for file in files:
        file.close()


# --- its end


def test_close_gives_everything_back_and_may_be_repeated(small_disk: Path) -> None:
    before = used_bytes(small_disk)
    file = SwapFile(small_disk, direct=None)
    file.grow(20 * MIB)
    assert used_bytes(small_disk) >= before + 20 * MIB
    file.close()
    file.close()
    os.sync()
    assert used_bytes(small_disk) == before
    assert (file.fd, file.size_bytes) == (-1, 0)
    with pytest.raises(StoreClosedError, match="is closed"):
        file.grow(4096)


def test_forgotten_file_is_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = SwapFile(tmp_path, direct=None)
    forgotten = weakref.ref(file)
    del file
    assert forgotten() is None
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_stay_constant_over_many_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        SwapFile(tmp_path, direct=None).close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_killed_process_leaves_nothing(small_disk: Path, ending: signal.Signals) -> None:
    """A peer leaves 16 MB per run and grows without end across runs."""
    before = used_bytes(small_disk)
    code = f"""
import os
from pathlib import Path
from tierstore.swapfile import SwapFile
file = SwapFile(Path({str(small_disk)!r}), direct=None)
file.grow({20 * MIB})
os.write(1, b"ready")
os.read(0, 1)
"""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stdout.read(5) == b"ready"
    assert used_bytes(small_disk) >= before + 20 * MIB
    child.send_signal(ending)
    child.communicate()
    os.sync()
    assert used_bytes(small_disk) == before
    assert set(os.listdir(small_disk)) <= {"lost+found"}


def test_forked_child_does_not_keep_the_disk_full(file: SwapFile) -> None:
    """The child of a data loader may outlive the optimizer; its copy of the descriptor would hold every block."""
    file.grow(MIB)
    fd = file.fd
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(fd)
        except OSError as error:
            file.close()
            os._exit(0 if (error.errno, file.fd) == (errno.EBADF, -1) else 2)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.fstat(file.fd).st_size == MIB


# --- direct I/O


def test_direct_is_what_is_really_used(file: SwapFile) -> None:
    assert bool(fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT) is file.direct
    assert (file.size_bytes, os.fstat(file.fd).st_size, reserved_bytes(file)) == (0, 0, 0)


def test_direct_is_not_used_against_the_wish(tmp_path: Path) -> None:
    file = SwapFile(tmp_path, direct=False)
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert file.direct is False
    file.close()


def refuse(code: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_failed_probe_falls_back_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(os, call, refuse(errno.EINVAL))
    with caplog.at_level(logging.INFO, "tierstore.swapfile"):
        file = SwapFile(tmp_path, direct=None)
    assert file.direct is False
    assert not fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_DIRECT
    assert "buffered: direct I/O does not work" in caplog.text
    assert os.fstat(file.fd).st_size == 0
    file.close()


def test_probe_that_reads_other_bytes_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 4096)
    file = SwapFile(tmp_path, direct=None)
    assert file.direct is False
    file.close()


def test_direct_that_was_demanded_and_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pwrite", refuse(errno.EINVAL))
    with pytest.raises(SwapError, match=r"direct I/O does not work.*tiers\.nvme\.io\.direct") as caught:
        SwapFile(tmp_path, direct=True)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(tmp_path))
    del caught
    assert len(os.listdir("/proc/self/fd")) == before


# --- disks that are full, or odd


@pytest.mark.parametrize(
    ("total", "margin"),
    [(110 * MIB, 5.5 * MIB), (GIB, GIB / 20), (20 * GIB, GIB), (40 * GIB, GIB), (100 * GIB, 2 * GIB)],
)
def test_margin_fits_the_filesystem(total: int, margin: float) -> None:
    assert disk_margin(total) == int(margin)


@pytest.mark.parametrize("mib", range(60, 84, 4))
def test_what_fits_is_reserved_whole(small_disk: Path, mib: int) -> None:
    file = SwapFile(small_disk, direct=None)
    before = used_bytes(small_disk)
    assert file.grow(mib * MIB) == 0
    assert used_bytes(small_disk) >= before + mib * MIB
    file.close()


@pytest.mark.parametrize("mib", [105, 107, 109, 110, 111, 120, 1000, 100_000])
def test_full_disk_is_found_before_anything_is_written(small_disk: Path, mib: int) -> None:
    file = SwapFile(small_disk, direct=None)
    before = used_bytes(small_disk)
    with pytest.raises(DiskFullError, match=r"tiers\.nvme\.capacity.*tiers\.nvme\.paths") as caught:
        file.grow(mib * MIB)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, file.path)
    assert f"{mib * MIB} bytes ({mib}.0 MiB) are needed in {small_disk}" in str(caught.value)
    assert (file.size_bytes, os.fstat(file.fd).st_size, used_bytes(small_disk)) == (0, 0, before)
    file.close()


def test_capacity_that_the_error_names_fits(small_disk: Path) -> None:
    file = SwapFile(small_disk, direct=None)
    with pytest.raises(DiskFullError) as caught:
        file.grow(GIB)
    most = int(str(caught.value).split("to at most ")[1].split()[0])
    assert file.grow(most) == 0
    file.close()


def test_disk_that_fills_behind_the_check_is_as_it_was(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the space between the look and the reservation: what was reserved is given back."""
    file = SwapFile(small_disk, direct=None)
    file.grow(10 * MIB)
    before = used_bytes(small_disk)
    monkeypatch.setattr(SwapFile, "_check_space", lambda self, nbytes, taken=0: None)
    monkeypatch.setattr(swapfile, "SLAB_BYTES", 16 * MIB)
    with pytest.raises(DiskFullError, match=f"{200 * MIB} bytes"):
        file.grow(200 * MIB)
    assert (file.size_bytes, os.fstat(file.fd).st_size) == (10 * MIB, 10 * MIB)
    assert 0 <= used_bytes(small_disk) - before < MIB // 4  # ext4 may keep a block of the file's own extent tree
    assert file.grow(4096) == 10 * MIB
    file.close()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.EIO, "injected"), OSError(errno.EFBIG, "injected")]
)
def test_broken_off_growth_gives_back_what_it_had(
    file: SwapFile, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    real, calls = os.posix_fallocate, []

    def break_off(fd: int, offset: int, length: int) -> None:
        calls.append(offset)
        if len(calls) == 3:
            raise error
        real(fd, offset, length)

    file.grow(4096)
    before = reserved_bytes(file)
    monkeypatch.setattr(swapfile, "SLAB_BYTES", MIB)
    monkeypatch.setattr(os, "posix_fallocate", break_off)
    with pytest.raises(SwapError if isinstance(error, OSError) else KeyboardInterrupt):
        file.grow(4 * MIB)
    assert (file.size_bytes, os.fstat(file.fd).st_size, reserved_bytes(file)) == (4096, 4096, before)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_zeros_reserve_where_the_filesystem_cannot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    direct: bool | None,
    code: int,
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse(code))
    file = SwapFile(tmp_path, direct=direct)
    with caplog.at_level(logging.INFO, "tierstore.swapfile"):
        assert [file.grow(9 * MIB + 4096), file.grow(4096)] == [0, 9 * MIB + 4096]
    os.fsync(file.fd)
    assert reserved_bytes(file) >= file.size_bytes == os.fstat(file.fd).st_size
    assert "bytes of zeros" in caplog.text
    file.close()


def test_full_disk_under_the_probe_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))
    with pytest.raises(DiskFullError, match=r"tiers\.nvme\.capacity"):
        SwapFile(tmp_path, direct=None)


# --- folders


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match=r"missing does not exist: create it, or set tiers\.nvme\.paths") as caught:
        SwapFile(tmp_path / "missing", direct=None)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "missing"))


def test_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SwapError, match="is not a folder"):
        SwapFile(tmp_path / "file", direct=None)


def test_read_only_filesystem_is_named(tmp_path: Path) -> None:
    folder = mounted(tmp_path / "read-only", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs")
    try:
        with pytest.raises(SwapError, match="mounted read-only"):
            SwapFile(folder, direct=None)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_unwritable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # no folder is unwritable to root
        monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(SwapError, match="cannot be written by this user: change its permissions"):
        SwapFile(tmp_path, direct=None)


def without_tmpfile(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.open

    def fail(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", fail)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR])
def test_filesystem_without_unnamed_files_gets_an_unlinked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    without_tmpfile(monkeypatch, code)
    file = SwapFile(tmp_path, direct=None)
    status = os.fstat(file.fd)
    assert (os.listdir(tmp_path), status.st_nlink, stat.S_IMODE(status.st_mode)) == ([], 0, 0o600)
    assert fcntl.fcntl(file.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    file.grow(4096)
    file.close()


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to])
def test_planted_name_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path, Path], None]
) -> None:
    """Somebody who guesses the name must not make us write into a file of his choice."""
    without_tmpfile(monkeypatch, errno.EOPNOTSUPP)
    monkeypatch.setattr(swapfile.secrets, "token_hex", lambda nbytes: "guessed")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    name = tmp_path / f".tierstore-{os.getpid()}-guessed"
    plant(name, victim)
    with pytest.raises(SwapError, match=r"set tiers\.nvme\.paths to another"):
        SwapFile(tmp_path, direct=None)
    assert (victim.read_bytes(), name.exists()) == (b"precious", True)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
@pytest.mark.parametrize("by", ["name", "symlink", "variable"])
def test_folder_in_which_any_user_may_rename_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, by: str
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    paths: Any = [folder]
    if by == "symlink":
        (tmp_path / "link").symlink_to("shared")
        paths = [tmp_path / "link"]
    elif by == "variable":
        monkeypatch.setenv("TIERSTORE_SWAP", str(folder))
        paths = "auto"
    with pytest.raises(
        SwapError, match=rf"every user .*mode {mode:o}\).* set tiers\.nvme\.allow_shared_folder to true"
    ):
        swap_folders(paths)
    assert swap_folders(paths, allows_shared=True)
    folder.chmod(mode | stat.S_ISVTX)
    assert swap_folders(paths)


USER, PRIVATE, GROUP, OTHER = 1000, 1000, 100, 1001


@pytest.mark.parametrize(
    ("owner", "group", "mode", "who"),
    [
        (0, 0, 0o1777, ""),  # the temporary folder
        (0, 0, 0o755, ""),
        (0, 0, 0o775, ""),  # root's group is root's: folders of containers with arbitrary users
        (0, GROUP, 0o775, "every member of group 100"),
        (0, GROUP, 0o1775, ""),
        (0, 0, 0o777, "every user of this machine"),
        (USER, PRIVATE, 0o700, ""),
        (USER, PRIVATE, 0o775, ""),  # what a umask of 002 makes
        (USER, GROUP, 0o750, ""),
        (USER, GROUP, 0o770, "every member of group 100"),
        (USER, OTHER, 0o770, "every member of group 1001"),
        (USER, PRIVATE, 0o772, "every user of this machine"),
        (OTHER, PRIVATE, 0o700, "user 1001, who owns it,"),
        (OTHER, PRIVATE, 0o1777, "user 1001, who owns it,"),  # the sticky bit does not bind the owner
    ],
)
def test_those_who_may_rename_files_in_a_folder_are_named(
    monkeypatch: pytest.MonkeyPatch, owner: int, group: int, mode: int, who: str
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name=f"name{uid}", pw_gid=uid))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=f"name{gid}", gr_mem=[]))
    status = os.stat_result((stat.S_IFDIR | mode, 1, 1, 2, owner, group, 0, 0, 0, 0))
    assert who_else_may_rename(status, USER) == who


@pytest.mark.parametrize("members", [["name1000"], ["name1000", "name1001"]])
def test_a_group_of_the_users_own_is_one_that_nobody_else_is_in(
    monkeypatch: pytest.MonkeyPatch, members: list[str]
) -> None:
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="name1000", pw_gid=PRIVATE))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name="name1000", gr_mem=members))
    status = os.stat_result((stat.S_IFDIR | 0o775, 1, 1, 2, USER, PRIVATE, 0, 0, 0, 0))
    assert bool(who_else_may_rename(status, USER)) == (len(members) > 1)


@pytest.mark.parametrize(("mapping", "is_refused"), [("0 0 4294967295", True), ("0 1000 1", False)])
def test_an_owner_without_a_number_in_this_container_is_no_known_stranger(
    monkeypatch: pytest.MonkeyPatch, mapping: str, is_refused: bool
) -> None:
    """A folder that the host's user gave a container belongs to nobody there, unless all users have numbers there."""
    files = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": f"  {mapping}\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: files[str(self)])
    status = os.stat_result((stat.S_IFDIR | 0o700, 1, 1, 2, 65534, 65534, 0, 0, 0, 0))
    assert bool(who_else_may_rename(status, USER)) is is_refused


def test_a_folder_of_another_user_is_refused_unless_the_policy_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a folder may rename what is in it: root, too, is asked whether that is meant."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(folder, OTHER, OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SwapError, match=r"user \d+, who owns it, may rename .*allow_shared_folder to true") as caught:
        swap_folders([folder])
    assert caught.value.errno == errno.EPERM and caught.value.filename == str(folder)
    assert swap_folders([folder], allows_shared=True) == [folder]


@pytest.mark.parametrize("allows", [False, True])
def test_the_policy_says_whether_a_shared_folder_will_do(tmp_path: Path, allows: bool) -> None:
    tmp_path.chmod(0o777)
    policy = {"tiers": {"nvme": {"paths": [tmp_path], "capacity": "1MiB", "allow_shared_folder": allows}}}
    with contextlib.nullcontext() if allows else pytest.raises(SwapError, match="every user"):
        TieredStore(policy).close()


def test_folder_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    SwapFile(tmp_path / "link", direct=None).close()


@pytest.mark.parametrize(("kind", "word"), [(FolderKind.MEMORY, "is memory"), (FolderKind.NETWORK, "network")])
def test_memory_and_network_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FolderKind, word: str
) -> None:
    monkeypatch.setattr(folders, "describe_folder", lambda folder: kind)
    with pytest.warns(UserWarning, match=rf"{word}.*tiers\.nvme\.paths") as caught:
        SwapFile(tmp_path, direct=None).close()
    assert [warning.filename for warning in caught] == [__file__]


def test_warning_made_an_error_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(folders, "describe_folder", lambda folder: FolderKind.MEMORY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            SwapFile(tmp_path, direct=None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_disk_is_not_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "describe_folder", lambda folder: FolderKind.DISK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SwapFile(tmp_path, direct=None).close()


MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
25 27 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24683656k
40 27 0:40 / /tmp rw,nosuid shared:9 - tmpfs tmpfs rw
41 27 0:41 / /home rw,relatime - nfs4 server:/export/home rw,vers=4.2
42 41 0:42 / /home/local rw,relatime - xfs /dev/nvme0n1p1 rw
43 27 0:43 / /mnt/with\040blank rw,relatime - fuse.sshfs user@host: rw
44 27 0:44 / /mnt/lustre rw,relatime - lustre 10.0.0.1@tcp:/scratch rw
45 27 0:45 / /mnt/merged rw,relatime - fuse.mergerfs a:b rw
46 27 0:46 / /mnt/over rw,relatime - tmpfs tmpfs rw
47 46 0:47 / /mnt/over rw,relatime - btrfs /dev/nvme1n1 rw
48 27 0:48 / /mnt/container rw,relatime - overlay overlay rw,lowerdir=a,upperdir=b,workdir=c
49 27 0:49 / /mnt/share rw,relatime - 9p host rw,trans=virtio
""".lstrip()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(MOUNTINFO)
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", FolderKind.DISK),
        ("/var/nowhere", FolderKind.DISK),
        ("/tmp", FolderKind.MEMORY),
        ("/tmp/deep/er", FolderKind.MEMORY),
        ("/tmpfoo", FolderKind.DISK),
        ("/dev/shm/x", FolderKind.MEMORY),
        ("/home/me", FolderKind.NETWORK),
        ("/home/local/swap", FolderKind.DISK),
        ("/mnt/with blank/x", FolderKind.NETWORK),
        ("/mnt/lustre", FolderKind.NETWORK),
        ("/mnt/merged", FolderKind.DISK),
        ("/mnt/over", FolderKind.DISK),
        ("/mnt/container", FolderKind.DISK),
        ("/mnt/share", FolderKind.NETWORK),
    ],
)
def test_folder_is_described_by_the_nearest_mount(recorded: Path, folder: str, kind: FolderKind) -> None:
    assert describe_folder(Path(folder), root=recorded) is kind


# --- which folders


def test_given_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    assert swap_folders([tmp_path / "a", tmp_path / "b"]) == [tmp_path / "a", tmp_path / "b"]


def test_one_folder_by_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for other in (tmp_path / "real", tmp_path / "link", tmp_path / "real/../real"):
        with pytest.raises(PolicyError, match=r"tiers\.nvme\.paths names .*real twice"):
            swap_folders([tmp_path / "real", other])


def test_no_folder_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"tiers\.nvme\.paths is empty"):
        swap_folders([])


def test_auto_takes_the_variable_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_SWAP", os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    assert swap_folders("auto") == [tmp_path / "a", tmp_path / "b"]


def test_auto_takes_the_temporary_folder_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIERSTORE_SWAP", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "describe_folder", lambda folder: FolderKind.DISK)
    assert swap_folders("auto") == [tmp_path]


@pytest.mark.parametrize("kind", [FolderKind.MEMORY, FolderKind.NETWORK])
def test_auto_never_takes_memory_or_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FolderKind
) -> None:
    """`/tmp` is RAM on many machines."""
    monkeypatch.delenv("TIERSTORE_SWAP", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "describe_folder", lambda folder: kind)
    with pytest.raises(SwapError, match=r"set tiers\.nvme\.paths, or the variable TIERSTORE_SWAP") as caught:
        swap_folders("auto")
    assert caught.value.filename == str(tmp_path)
