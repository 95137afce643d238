"""A checkpoint replaces another in one instant, whatever ends the process, and whoever reads or writes meanwhile."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes import KILLED, EndingFiles, UnsyncedFiles, VanishingFiles
from tests.unit.test_checkpoint import load, save
from tierstore.checkpoint import Reader, TorchFile, Writer
from tierstore.checkpoint.files import Files
from tierstore.checkpoint.opening import open_checkpoint
from tierstore.checkpoint.replacement import hold
from tierstore.errors import (
    CheckpointFileError,
    CheckpointValueError,
    IncompleteCheckpointError,
    NoCheckpointError,
)

OLD, NEW = torch.full((5,), 1.0), torch.full((5,), 2.0)


def in_child(work: Callable[[], object]) -> int:
    """Do it in a process of its own; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_killed(path: Path, nth: int, can_exchange: bool) -> bool:
    """Save NEW in a child that ends at its nth call of the filesystem. False if it came to the end before that."""
    status = in_child(lambda: save(path, NEW, files=EndingFiles(nth, can_exchange=can_exchange)))
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_crash_at_any_call_leaves_the_old_one_or_the_new_one(tmp_path: Path, can_exchange: bool) -> None:
    """Every call of the filesystem is the last one once; a reader then finds one of the two, complete.

    The old one until the names are exchanged, the new one ever after. The next save leaves nothing else.
    """
    nth, found = 1, []
    while True:
        folder = tmp_path / str(nth)
        folder.mkdir()
        save(folder / "c", OLD)
        is_killed = save_killed(folder / "c", nth, can_exchange)
        with Reader(folder / "c") as reader:
            values = load(reader)
        assert values.equal(OLD) or values.equal(NEW)
        found.append(values.equal(NEW))
        save(folder / "c", OLD)
        assert os.listdir(folder) == ["c"]
        if not is_killed:
            break
        nth += 1
    assert nth > 20
    assert found == sorted(found) and not found[0] and found[-2]


def test_a_crash_in_the_first_save_leaves_the_new_one_or_none_that_is_loaded(tmp_path: Path) -> None:
    nth, outcomes = 1, []
    while True:
        folder = tmp_path / str(nth)
        folder.mkdir()
        is_killed = save_killed(folder / "c", nth, True)
        try:
            with Reader(folder / "c") as reader:
                assert load(reader).equal(NEW)
            outcomes.append("new")
        except NoCheckpointError as error:
            outcomes.append("unfinished" if "never finished" in str(error) else "none")
        if not is_killed:
            break
        nth += 1
    assert [outcome for place, outcome in enumerate(outcomes) if outcome not in outcomes[:place]] == [
        "none",
        "unfinished",
        "new",
    ]


def test_a_sync_that_fails_after_names_have_changed_keeps_both_until_the_next_save(tmp_path: Path) -> None:
    """After a power loss either may be what has the name; so neither may have been removed."""
    save(tmp_path / "c", OLD)
    with pytest.raises(CheckpointFileError):
        save(tmp_path / "c", NEW, files=UnsyncedFiles())
    (beside,) = set(os.listdir(tmp_path)) - {"c"}
    for name, values in (("c", NEW), (beside, OLD)):
        with Reader(tmp_path / name) as reader:
            assert load(reader).equal(values)
    save(tmp_path / "c", NEW)
    assert os.listdir(tmp_path) == ["c"]


def test_a_save_that_fails_is_never_taken_for_a_checkpoint_that_is_not_there_yet(tmp_path: Path) -> None:
    """A loop that starts afresh where there is none must not go on without checkpoints."""
    with pytest.raises(CheckpointFileError, match=r"make the folder .*/missing first") as caught:
        save(tmp_path / "missing" / "c", NEW)
    assert not isinstance(caught.value, NoCheckpointError)


def test_an_unfinished_checkpoint_is_named_as_such(tmp_path: Path) -> None:
    save_killed(tmp_path / "b", 5, True)
    with pytest.raises(NoCheckpointError, match=r"\.b\.tierstore-[0-9a-f]* beside it was never finished"):
        Reader(tmp_path / "b")
    save(tmp_path / "c", OLD)
    (tmp_path / "c/zarr.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="never finished"):
        Reader(tmp_path / "c")


def test_a_checkpoint_that_is_replaced_can_be_read_to_its_end(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD)
    with Reader(tmp_path / "c") as reader:
        save(tmp_path / "c", NEW)
        assert load(reader).equal(OLD)
    with Reader(tmp_path / "c") as reader:
        assert load(reader).equal(NEW)
    save(tmp_path / "c", NEW)
    assert os.listdir(tmp_path) == ["c"]


def test_two_writers_of_one_path_leave_each_other_alone(tmp_path: Path) -> None:
    with Writer(tmp_path / "c", header={"who": 1}) as one:
        with Writer(tmp_path / "c", header={"who": 2}) as two:
            two.commit()
        assert len(os.listdir(tmp_path)) == 2
        one.commit()
    with Reader(tmp_path / "c") as reader:
        assert reader.header == {"who": 1}
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("opens", [lambda path: Writer(path, header={}), Reader, TorchFile])
def test_an_empty_path_is_told_as_one(opens: Callable[[str], object]) -> None:
    with pytest.raises(CheckpointValueError, match=r"path of a checkpoint is empty: name a folder"):
        opens("")


def test_a_path_may_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save(Path("~/c"), OLD)
    assert os.listdir(tmp_path) == ["c"]
    with open_checkpoint("~/c") as found:
        assert isinstance(found, Reader) and load(found).equal(OLD)
    torch.save({"w": NEW}, tmp_path / "t.pt")
    with open_checkpoint("~/t.pt") as found:
        assert list(found.header["model"]["keys"]) == ["w"]


def test_a_link_is_saved_through_whether_or_not_anything_is_there(tmp_path: Path) -> None:
    """A link from a run's folder to a large disk: the checkpoint lies there, and the link stays one."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "newest").symlink_to("disk/c")
    for values in (OLD, NEW):  # dangling, then with one there
        save(tmp_path / "newest", values)
        with Reader(tmp_path / "newest") as reader:
            assert load(reader).equal(values)
    assert (tmp_path / "newest").is_symlink() and os.listdir(tmp_path / "disk") == ["c"]
    (tmp_path / "lost").symlink_to("nowhere/c")
    with pytest.raises(CheckpointFileError, match=r"make the folder .*/nowhere first"):
        save(tmp_path / "lost", OLD)


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").write_text("years of work")
    (tmp_path / "file").write_text("as well")
    for name in ("mine", "file"):
        with pytest.raises(CheckpointValueError, match="no checkpoint"):
            Writer(tmp_path / name, header={})
    save(tmp_path / "c", OLD)
    with Writer(tmp_path / "c", header={}) as writer:
        (tmp_path / "c").rename(tmp_path / "away")
        (tmp_path / "c").mkdir()
        (tmp_path / "c/thesis").write_text("put there meanwhile")
        with pytest.raises(CheckpointValueError, match="no checkpoint"):
            writer.commit()
    assert sorted(os.listdir(tmp_path)) == ["away", "c", "file", "mine"]


def test_only_the_oldest_beyond_keep_last_are_removed_and_only_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(5):
        with Writer(tmp_path / f"step-{number}", header={}) as writer:
            writer.commit(keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-2", "step-3", "step-4"]
    with Reader(tmp_path / "step-2"), Writer(tmp_path / "step-5", header={}) as writer:
        writer.commit(keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["notes", "step-2", "step-5"]


@pytest.mark.parametrize(
    ("names", "saved", "kept"),
    [
        (["gen-1", "disc-1", "gen-2", "disc-2"], "gen-3", ["disc-1", "disc-2", "gen-3"]),
        (["rank0-step1", "rank1-step1"], "rank0-step2.zarr", ["rank0-step1", "rank0-step2.zarr", "rank1-step1"]),
        (["rank0-step1", "rank1-step1"], "rank0-step20", ["rank0-step20", "rank1-step1"]),
        (["best", "7", "10", "last"], "11", ["11", "best", "last"]),
        (["step-1", "step-2"], "last", ["last", "step-1", "step-2"]),
    ],
)
def test_only_names_that_differ_in_their_last_number_alone_are_of_one_series(
    tmp_path: Path, names: list[str], saved: str, kept: list[str]
) -> None:
    """Two optimizers that save into one folder leave each other's checkpoints alone."""
    for name in names:
        save(tmp_path / name, OLD)
    with Writer(tmp_path / saved, header={}) as writer:
        writer.commit(keep_last=1)
    assert sorted(os.listdir(tmp_path)) == kept


def test_what_is_removed_while_it_is_read_is_no_checkpoint_that_was_never_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a filesystem without flock pruning cannot see a reader: that ends with an error, and never starts afresh."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    save(tmp_path / "step-1", torch.ones(600_000))
    with Reader(tmp_path / "step-1") as reader:
        with Writer(tmp_path / "step-2", header={}) as writer:
            writer.commit(keep_last=1)
        assert os.listdir(tmp_path) == ["step-2"]
        with pytest.raises(IncompleteCheckpointError, match=r"is missing: .* removed while it was read") as caught:
            load(reader)
    assert not isinstance(caught.value, NoCheckpointError)


def test_a_writer_and_a_reader_that_are_forgotten_give_everything_back(tmp_path: Path) -> None:
    save(tmp_path / "c", OLD)
    before = len(os.listdir("/proc/self/fd"))
    writer, reader = Writer(tmp_path / "c", header={}), Reader(tmp_path / "c")
    assert len(os.listdir(tmp_path)) == 2
    del writer, reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    save(tmp_path / "c", NEW)
    assert os.listdir(tmp_path) == ["c"]


def test_a_forked_child_that_lives_on_holds_nothing(tmp_path: Path) -> None:
    """A DataLoader's worker, forked in the middle of a save, inherits the descriptors and outlives the writer."""
    save(tmp_path / "c", OLD)
    ours, its = os.pipe()
    with Writer(tmp_path / "c", header={}) as writer:
        child = os.fork()
        if child == 0:
            os.close(its)
            os.read(ours, 1)  # until the parent is done
            os._exit(0)
        writer.commit()
    save(tmp_path / "c", NEW)
    assert os.listdir(tmp_path) == ["c"]
    os.close(its)
    os.close(ours)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_pruned_when_a_save_fails(tmp_path: Path) -> None:
    class NamelessFiles(Files):
        def rename(self, source: str, target: str) -> None:
            raise OSError(5, "refused")

    save(tmp_path / "one", OLD)
    with Writer(tmp_path / "two", header={}, files=NamelessFiles()) as writer, pytest.raises(OSError, match="refused"):
        writer.commit(keep_last=1)
    assert os.listdir(tmp_path) == ["one"]


def test_descriptors_and_threads_stay_constant_over_many_checkpoints(tmp_path: Path) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    counts = []
    for number in range(40):
        save(tmp_path / f"{number % 3}", torch.randn(600_000) if number % 10 == 0 else OLD)
        with Reader(tmp_path / f"{number % 3}") as reader:
            load(reader)
        counts.append(held())
    assert counts[-1] == counts[10]


def test_without_locks_of_folders_nothing_of_anybodys_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a filesystem without flock nobody can tell a dead writer's folder from a live one's, so it stays."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with Writer(tmp_path / "c", header={}):
        save(tmp_path / "c", OLD)
        save(tmp_path / "c", NEW)
        assert len(os.listdir(tmp_path)) == 2
    with Reader(tmp_path / "c") as reader:
        assert load(reader).equal(NEW)
    assert os.listdir(tmp_path) == ["c"]


def test_a_folder_that_another_saver_has_removed_before_it_was_locked_is_made_anew(tmp_path: Path) -> None:
    """Two that save into one folder clean it up both; ranks that save together do so every time."""
    files = VanishingFiles()
    save(tmp_path / "c", NEW, files=files)
    assert files.has_vanished
    with Reader(tmp_path / "c") as reader:
        assert torch.equal(load(reader), NEW)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("place", ["before it is locked", "before names change"])
@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_another_save_prunes_while_it_is_replaced_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, can_exchange: bool
) -> None:
    """Two runs that save one series in one folder: neither loses its checkpoint to the other's keep_last."""
    old = tmp_path / "c"
    save(old, OLD)

    class PruningFiles(Files):
        def exchange(self, one: str, other: str) -> bool:
            if old.exists() and place == "before names change":
                shutil.rmtree(old)
            return can_exchange and super().exchange(one, other)

    def held_late(path: str, **options: Any) -> Any:
        if path == os.fspath(old) and place == "before it is locked":
            shutil.rmtree(old)
        return hold(path, **options)

    monkeypatch.setattr("tierstore.checkpoint.replacement.hold", held_late)
    save(old, NEW, files=PruningFiles())
    monkeypatch.undo()
    with Reader(old) as reader:
        assert load(reader).equal(NEW)
    assert os.listdir(tmp_path) == ["c"]


def test_what_another_save_prunes_first_does_not_fail_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "step-1", OLD)

    def held_late(path: str, **options: Any) -> Any:
        if path == f"{tmp_path}/step-1":
            shutil.rmtree(path)
        return hold(path, **options)

    monkeypatch.setattr("tierstore.checkpoint.replacement.hold", held_late)
    with Writer(tmp_path / "step-2", header={}) as writer:
        writer.commit(keep_last=1)
    assert os.listdir(tmp_path) == ["step-2"]


@pytest.mark.parametrize("of", [int, np.int64, np.uint8])
def test_keep_last_may_be_any_whole_number(of: Callable[[int], int], tmp_path: Path) -> None:
    """One that numpy counted was refused as no whole number."""
    for number in range(4):
        with Writer(tmp_path / f"step-{number}", header={}) as writer:
            writer.commit(keep_last=of(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize("none", [np.int64(0), np.bool_(True), np.float64(2), 0, True, 2.0])
def test_keep_last_of_none_or_of_what_is_no_whole_number_is_refused(none: Any, tmp_path: Path) -> None:
    with Writer(tmp_path / "step-0", header={}) as writer, pytest.raises(CheckpointValueError, match="whole number"):
        writer.commit(keep_last=none)
