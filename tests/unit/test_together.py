"""Ranks that save one checkpoint together agree on everything, and nobody waits for one that has failed.

Ranks are threads here, with a barrier for a process group. Files and writers are real.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import FailingFiles, HeldWriters, ThreadRanks
from tierstore.checkpoint import Entry, Reader, Writer
from tierstore.checkpoint.entries import Whole
from tierstore.checkpoint.examine import shaped
from tierstore.errors import CheckpointError, CheckpointFileError, RanksError
from tierstore.ranks import Ranks
from tierstore.saving import Content, OpenWriter
from tierstore.together import SharedSave, begin_together
from tierstore.weights import Weights

SHAPE = (5, 3)
ROWS = ((0, 3), (3, 5))
"""Those of each of two ranks."""
NEVER = -1


def whole(value: float) -> Tensor:
    return torch.arange(15.0).view(SHAPE) + value


def content(
    ranks: Ranks, value: float, *, name: str = "w", step: float | None = None, same: Tensor | None = None
) -> Content:
    """The rows of a tensor that a rank has; and one that all have.

    Without `same` that is a buffer, whose values differ here, to be told apart.
    """
    begin, end = ROWS[ranks.rank]
    tensors = [whole(value)[begin:end].clone(), torch.full((4,), float(ranks.rank)) if same is None else same]
    fields = {"values": torch.float32}
    entries = [
        Entry(name, (end - begin, 3), (3, 1), torch.float32, fields, step, whole=Whole(SHAPE, (3, 1), (begin, 0))),
        Entry("same", (4,), (1,), torch.float32, fields, step),
    ]
    weights = Weights(tensors, entries, {}, {}, {0} if same is None else {0, 1})
    return Content({"value": value}, {"rank": ranks.rank}, {}, dict(enumerate(entries)), weights, None, [])


def begin(ranks: Ranks, path: Path, own: Content, open_writer: OpenWriter = Writer, **options: Any) -> SharedSave:
    options = {"compression": "none", "keep_last": None, **options}
    return begin_together(ranks, path, own, contextlib.nullcontext, open_writer=open_writer, **options)


def save(path: Path, value: float, ranks: Ranks) -> None:
    begin(ranks, path, content(ranks, value), partial(Writer, files=FailingFiles(NEVER))).wait()


def value_at(path: Path) -> float:
    """Which checkpoint stands there; it is complete, and right in every element."""
    with Reader(path) as reader:
        value = float(reader.header["value"])
        assert torch.equal(shaped(reader, "model", 0, "values"), whole(value))
        assert torch.equal(shaped(reader, "model", 1, "values"), torch.zeros(4))
        assert [reader.extra(rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
    return value


def kinds(results: list[object]) -> list[str]:
    return [type(result).__name__ for result in results]


def test_parts_of_all_ranks_are_there_and_of_what_several_have_the_lowest_ones(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        assert ThreadRanks(2).run(partial(save, tmp_path / "c", value)) == [None, None]
        assert value_at(tmp_path / "c") == value
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_parameter_that_all_have_with_the_same_values_is_saved_once(tmp_path: Path) -> None:
    def saved(ranks: Ranks) -> None:
        begin(ranks, tmp_path / "c", content(ranks, 1.0, same=torch.zeros(4))).wait()

    assert ThreadRanks(2).run(saved) == [None, None]
    assert value_at(tmp_path / "c") == 1.0


@pytest.mark.parametrize("broken", [0, 1])
def test_a_disk_that_fails_at_any_call_fails_on_all_ranks_and_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, broken: int
) -> None:
    """Each call of the filesystem on one rank fails once. Only rank 0's matter once the names have changed."""
    nth, found = 1, []
    while True:
        (folder := tmp_path / str(nth)).mkdir()
        ThreadRanks(2).run(partial(save, folder / "c", 0.0))
        files = FailingFiles(nth)

        def saved(ranks: Ranks, folder: Path = folder, files: FailingFiles = files) -> None:
            own = files if ranks.rank == broken else FailingFiles(NEVER)
            begin(ranks, folder / "c", content(ranks, 1.0), partial(Writer, files=own)).wait()

        results = ThreadRanks(2).run(saved)
        found.append(value_at(folder / "c"))
        if results == [None, None]:
            break
        assert kinds(results) == ["RanksError", "RanksError"]
        assert all(f"rank {broken}: CheckpointFileError" in str(error) for error in results)
        assert isinstance(results[broken], RanksError) and isinstance(results[broken].__cause__, CheckpointFileError)
        if len(list(folder.iterdir())) > 1:  # what could not be removed goes with the next save
            ThreadRanks(2).run(partial(save, folder / "c", 2.0))
            assert value_at(folder / "c") == 2.0
        assert [path.name for path in folder.iterdir()] == ["c"]
        nth += 1
    assert files.left > 0 and nth > 20
    assert found == sorted(found) and found.count(1.0) > (1 if broken == 0 else 0)


STAGES = ["before anything", "while parts are written", "when all are written"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_gone_is_an_error_for_the_others(tmp_path: Path, lost: int, stage: str) -> None:
    ThreadRanks(2).run(partial(save, tmp_path / "c", 0.0))
    group = ThreadRanks(2)

    def lose_one(ranks: Ranks) -> None:
        is_lost = ranks.rank == lost
        if is_lost and stage == STAGES[0]:
            return group.lose()
        held = HeldWriters()
        if is_lost and stage == STAGES[1]:
            held.hold()
        save = begin(ranks, tmp_path / "c", content(ranks, 1.0), held)
        if is_lost:
            if stage == STAGES[2]:
                save._behind.wait_until_over()
            group.lose()
            held.release()
            return save.finish_alone()  # a process that is gone leaves it as it is, which the next save removes
        return save.wait()

    results = group.run(lose_one)
    assert kinds(results)[1 - lost] == "RanksError" and results[lost] is None
    assert value_at(tmp_path / "c") == 0.0
    ThreadRanks(2).run(partial(save, tmp_path / "c", 2.0))
    assert value_at(tmp_path / "c") == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def with_last_bit(bit: int) -> Tensor:
    """Ones, of which the last has another last bit."""
    ones = torch.ones(4)
    ones.view(torch.int32)[-1] += bit
    return ones


REFUSED: dict[str, tuple[Callable[[Ranks, Path], SharedSave], str]] = {
    "names": (lambda ranks, path: begin(ranks, path, content(ranks, 1.0, name=f"w{ranks.rank}")), "'w1'"),
    "steps": (lambda ranks, path: begin(ranks, path, content(ranks, 1.0, step=float(ranks.rank))), "step=1.0"),
    "values": (
        lambda ranks, path: begin(ranks, path, content(ranks, 1.0, same=with_last_bit(ranks.rank))),
        "other values on rank 1: same.",
    ),
    "paths": (lambda ranks, path: begin(ranks, path.with_name(f"c{ranks.rank}"), content(ranks, 1.0)), "c1"),
    "keeping none": (lambda ranks, path: begin(ranks, path, content(ranks, 1.0), keep_last=0), "keep_last is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_that_do_not_have_the_same_are_refused_on_all_before_anything_is_written(
    tmp_path: Path, case: str
) -> None:
    refused, words = REFUSED[case]
    results = ThreadRanks(2).run(lambda ranks: refused(ranks, tmp_path / "c"))
    assert kinds(results) == ["CheckpointValueError", "CheckpointValueError"]
    assert all(words in str(error) for error in results)
    assert list(tmp_path.iterdir()) == []


def test_parts_that_do_not_make_a_whole_are_never_put_in_place(tmp_path: Path) -> None:
    """Both ranks say that they have the first rows, as where a mesh has ranks that are not in the group."""
    ThreadRanks(2).run(partial(save, tmp_path / "c", 0.0))

    def doubled(ranks: Ranks) -> None:
        begin(ranks, tmp_path / "c", content(Ranks(0, 2, list), 1.0)).wait()

    results = ThreadRanks(2).run(doubled)
    assert kinds(results) == ["RanksError", "RanksError"] and "do not cover it" in " ".join(str(results[0]).split())
    assert value_at(tmp_path / "c") == 0.0


def test_an_interrupt_on_one_rank_ends_it_on_all(tmp_path: Path) -> None:
    ThreadRanks(2).run(partial(save, tmp_path / "c", 0.0))

    def interrupted(ranks: Ranks) -> None:
        writers = HeldWriters()
        writers.fault = KeyboardInterrupt() if ranks.rank == 1 else None
        begin(ranks, tmp_path / "c", content(ranks, 1.0), writers).wait()

    assert kinds(ThreadRanks(2).run(interrupted)) == ["RanksError", "KeyboardInterrupt"]
    assert value_at(tmp_path / "c") == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_one_that_nobody_waits_for_is_given_up_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ThreadRanks(2).run(partial(save, tmp_path / "c", 0.0))

    def leave(ranks: Ranks) -> None:
        save = begin(ranks, tmp_path / "c", content(ranks, 1.0))
        assert not save.is_over and save.take_error() is None
        save.finish_alone()
        assert save.is_over
        with pytest.raises(CheckpointError, match="given up before all ranks had waited"):
            save.wait()

    assert ThreadRanks(2).run(leave) == [None, None]
    assert [record.levelname for record in caplog.records].count("ERROR") == 2
    assert value_at(tmp_path / "c") == 0.0


# -- what ranks tell each other -----------------------------------------------------------------------------------


def test_an_error_of_one_rank_is_raised_on_all_and_one_that_all_have_as_it_is() -> None:
    def fail(ranks: Ranks, failing: tuple[int, ...], kind: type[BaseException]) -> int:
        def work() -> int:
            if ranks.rank in failing:
                raise kind(f"of rank {ranks.rank}")
            return 7

        return ranks.each(work)

    assert ThreadRanks(3).run(partial(fail, failing=(), kind=ValueError)) == [7, 7, 7]
    results = ThreadRanks(3).run(partial(fail, failing=(1,), kind=ValueError))
    assert kinds(results) == ["RanksError"] * 3 and "1 of 3 ranks failed" in str(results[0])
    assert kinds(ThreadRanks(3).run(partial(fail, failing=(0, 1, 2), kind=ValueError))) == ["ValueError"] * 3
    interrupted = kinds(ThreadRanks(3).run(partial(fail, failing=(2,), kind=KeyboardInterrupt)))
    assert interrupted == ["RanksError", "RanksError", "KeyboardInterrupt"]


def test_what_rank_0_finds_all_hear() -> None:
    did = []

    def find(ranks: Ranks) -> str:
        return ranks.first(lambda: did.append(threading.get_ident()) or f"found by {ranks.rank}")

    assert ThreadRanks(3).run(find) == ["found by 0"] * 3
    assert len(did) == 1
