"""Room that disks cost by failing or not answering: what a tier owes for it, and what comes back with a disk."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes import FaultyEngine, HangingEngine
from tests.unit.test_store import CHUNK, assert_holds, value_of
from tierstore.build import Parts
from tierstore.errors import TransferError, TransferTimeoutError
from tierstore.io import Kind
from tierstore.mapping import map_host_memory
from tierstore.tensors import TieredStore

ALL = 16  # extents of files, in two folders; memory has half as many


class TwoFolders:
    """A store whose tensors, of a chunk each, have their home in files in two folders, on an engine of the test's."""

    def __init__(self, folder: Path, engine: FaultyEngine) -> None:
        self.engine = engine
        self.folders = [str(folder / "one"), str(folder / "two")]
        for each in self.folders:
            Path(each).mkdir()
        nvme = {"capacity": ALL * CHUNK, "paths": self.folders, "io": {"direct": False, "checksum": True}}
        tiers = {"cpu": {"capacity": ALL // 2 * CHUNK}, "nvme": nvme}
        policy = {"chunk_size": CHUNK, "tiers": tiers, "placement": [{"params": "*", "tier": "nvme"}]}
        self.store = TieredStore(policy, parts=Parts(open_engine=lambda *_, **__: engine))
        self.count = 0

    @property
    def extents(self) -> int:
        return self.store.stats().tiers["nvme"].capacity_bytes // CHUNK

    def path(self, folder: str) -> Any:
        return self.store.stats().paths[folder]

    def fill(self, count: int) -> None:
        """Put tensors until there are so many, of a chunk each."""
        for number in range(self.count, count):
            self.store.put(f"{number}", value_of(number))
        self.count = count
        self.store.wait()

    def fetch(self, first: int = 0) -> list[str]:
        """Bring as many tensors to memory as it holds; say which."""
        some = [f"{number}" for number in range(first, min(first + ALL // 2, self.count))]
        for name in some:
            with self.store.lease(name):
                pass
        self.store.wait()
        return some

    def write_all(self) -> None:
        """Write every tensor anew."""
        for first in range(0, self.count, ALL // 2):
            self.store.evict(self.fetch(first))
            self.store.wait()

    def lose_second(self) -> None:
        """Let writes to the second folder fail for good until nothing more is written there."""
        self.engine.break_path(self.folders[1], errno.EROFS, kind=Kind.WRITE)
        self.write_all()
        assert self.path(self.folders[1]).is_shunned
        self.store.check()
        self.engine.heal()

    def close(self) -> None:
        self.engine.heal()
        self.engine.release()
        assert_holds(self.store, self.count)
        self.store.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoFolders]:
    made = TwoFolders(tmp_path, FaultyEngine())
    yield made
    made.close()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[TwoFolders]:
    made = TwoFolders(tmp_path, HangingEngine())
    yield made
    made.close()


# -- disks that fail --------------------------------------------------------------------------------------------------


def test_room_that_came_back_with_a_disk_and_became_homes_is_made_up_for_when_it_is_lost_again(two: TwoFolders) -> None:
    """A count of what was lost stood below zero from the first time, so that the second was not made up for."""
    two.fill(12)
    two.lose_second()
    assert two.extents == ALL
    two.fill(ALL + 4)  # for which the folder is tried again
    assert two.extents == ALL + ALL // 2
    two.lose_second()
    assert two.extents == ALL + 4


def test_a_disk_lost_again_after_the_tier_was_made_smaller_is_made_up_for(two: TwoFolders) -> None:
    two.fill(12)
    two.lose_second()
    two.store.forgive()  # as a load does; then the folder is tried again
    assert two.extents == ALL + ALL // 2
    two.store.resize("nvme", ALL * CHUNK)
    assert two.extents == ALL
    two.lose_second()
    assert two.extents == ALL


def test_no_checksum_is_kept_of_what_could_not_be_written_or_read(two: TwoFolders) -> None:
    """One stayed until the next write there, and for good where the file was cut off before."""
    two.fill(12)  # more than one folder has room for, wherever the two writes fail
    two.engine.spoil(errno.EIO, times=2, kind=Kind.WRITE)
    two.write_all()
    two.store.check()
    two.lose_second()
    two.engine.break_path(two.folders[0], errno.EIO, kind=Kind.READ)
    with pytest.raises(TransferError), two.store.lease("0"):
        pass
    two.store.delete("0")
    two.store.check()
    two.count = 0


# -- disks that do not answer -----------------------------------------------------------------------------------------


def hang(two: TwoFolders, first: int = 0) -> str:
    """Begin to write tensors of which the first hangs, with others behind it in its folder; say in which."""
    some = two.fetch(first)
    two.engine.hold(times=1, kind=Kind.WRITE)
    two.store.evict(some)
    two.engine.wait_until_held()
    (request,) = two.engine.held
    return next(folder for folder in two.folders if request.operation.path.startswith(folder))


def come_back(two: TwoFolders) -> None:
    two.engine.release()
    two.engine.wait_until_back()


def test_a_disk_that_answers_again_is_used_again_though_there_is_room_elsewhere(hanging: TwoFolders) -> None:
    """It was left alone until room was short, which it may never be."""
    hanging.fill(ALL // 2)
    folder = hang(hanging)
    hanging.store.wait()
    assert hanging.path(folder).is_shunned
    hanging.write_all()
    assert hanging.path(folder).used_bytes == 0
    come_back(hanging)
    assert not hanging.path(folder).is_shunned
    hanging.write_all()
    assert hanging.path(folder).used_bytes >= 3 * CHUNK


@pytest.mark.parametrize("kind", Kind)
def test_a_disk_that_answers_at_last_with_an_error_stays_out_of_use(hanging: TwoFolders, kind: Kind) -> None:
    """It was used again, until it had failed once more."""
    hanging.fill(ALL // 2)
    if kind is Kind.WRITE:
        folder = hang(hanging)
    else:
        hanging.write_all()
        hanging.engine.hold(times=1, kind=Kind.READ)
        for number in range(ALL // 2):
            hanging.store.prefetch(f"{number}")
        hanging.engine.wait_until_held()
        (request,) = hanging.engine.held
        folder = next(folder for folder in hanging.folders if request.operation.path.startswith(folder))
    with contextlib.suppress(TransferError):
        hanging.store.wait()
    assert hanging.path(folder).is_shunned
    hanging.engine.fail(errno.EIO)
    come_back(hanging)
    assert hanging.path(folder).is_shunned
    assert {tier.quarantined_bytes for tier in hanging.store.stats().tiers.values()} == {0}
    hanging.write_all()
    assert hanging.path(folder).used_bytes == 0


def test_an_extent_a_request_may_write_to_comes_back_with_it_and_what_was_made_up_for_it_stays(
    hanging: TwoFolders,
) -> None:
    hanging.fill(ALL // 2)
    hang(hanging)
    hanging.store.wait()
    assert hanging.store.stats().tiers["nvme"].quarantined_bytes == CHUNK
    come_back(hanging)
    assert hanging.store.stats().tiers["nvme"].quarantined_bytes == 0
    assert hanging.extents >= ALL


def test_the_books_are_right_between_a_write_that_hangs_and_its_mending(hanging: TwoFolders) -> None:
    """Reading waits for what is under way, and so gives up a write; only the next call that moves chunks mends it."""
    hanging.fill(ALL)
    for first in (0, ALL // 2):
        hang(hanging, first)
        hanging.store.check()
        for number in range(first, first + ALL // 2):
            with contextlib.suppress(TransferError):  # one that was written there before cannot be read now
                hanging.store.read_record(-1 - number, map_host_memory(CHUNK))
            hanging.store.check()
        assert hanging.store._traffic.failed_writes
        hanging.store.wait()
        hanging.store.check()
        come_back(hanging)
        assert_holds(hanging.store, ALL)


def test_a_late_read_comes_back_though_the_place_it_was_to_read_is_no_longer_there(tmp_path: Path) -> None:
    """A late request does no harm by reading, so its chunk may move meanwhile, and the tier be made smaller."""
    hanging = TwoFolders(tmp_path, HangingEngine(threads=2))
    store, arena = hanging.store, hanging.store.setup.tiers["nvme"].arena
    hanging.fill(ALL)
    hanging.write_all()
    places = {number: store._ledger.where(-1 - number) for number in range(ALL)}
    last = next(number for number, place in places.items() if place.extent.slab == arena.last_slab)
    hanging.engine.hold(times=1, kind=Kind.READ)
    with pytest.raises(TransferTimeoutError), store.lease(f"{last}"):
        pass
    for number in range(ALL):
        if number != last:
            store.delete(f"{number}")
    with store.lease(f"{last}"):
        pass
    store.resize("nvme", 4 * CHUNK)
    assert not arena.has_slab(places[last].extent.slab)
    come_back(hanging)
    assert store.stats().tiers["cpu"].quarantined_bytes == 0
    assert torch.equal(store.get(f"{last}"), value_of(last))
    hanging.count = 0
    hanging.close()


def test_what_only_stood_behind_a_hang_costs_no_room(hanging: TwoFolders) -> None:
    """A write that was not begun cost its extent for good where it was no third; a read did so when it was deleted."""
    hanging.fill(4)
    hang(hanging)
    hanging.store.wait()
    come_back(hanging)
    assert hanging.store.stats().tiers["nvme"].quarantined_bytes == 0
    hanging.engine.hold(times=1, kind=Kind.READ)
    for name in ("0", "1", "2", "3"):
        with contextlib.suppress(TransferError), hanging.store.lease(name):
            pass
    come_back(hanging)
    for name in ("0", "1", "2", "3"):
        hanging.store.delete(name)
    assert {tier.quarantined_bytes for tier in hanging.store.stats().tiers.values()} == {0}
    hanging.count = 0


def uses(two: TwoFolders, chunks: list[int]) -> list[int]:
    """Run over some chunks; say which were used."""
    used: list[int] = []
    with contextlib.suppress(TransferError):
        two.store.run(chunks, (), lambda chunk, record, is_fresh: used.append(chunk))
    return used


def test_a_run_with_a_chunk_that_hung_is_refused_before_it_begins_until_it_can_be_read(hanging: TwoFolders) -> None:
    """It broke off at that chunk, with others used, so that only a load could put that right."""
    hanging.fill(ALL)
    hanging.write_all()
    for name in ("0", "1", "2", "3"):
        with hanging.store.lease(name):
            pass
    chunks = [-1, -2, -3, -4, -16]
    hanging.engine.hold(times=1, kind=Kind.READ)
    with pytest.raises(TransferTimeoutError), hanging.store.lease("15"):
        pass
    for _ in range(2):
        assert uses(hanging, chunks) == []
        assert hanging.store.broken_off is None
    come_back(hanging)
    assert uses(hanging, chunks) == chunks


def test_a_run_waits_for_a_chunk_that_could_not_be_read_and_is_on_its_way_again(hanging: TwoFolders) -> None:
    """It was believed to be at rest, which was an AssertionError."""
    hanging.fill(1)
    hanging.write_all()
    hanging.engine.fail(times=None, kind=Kind.READ)
    with pytest.raises(TransferError), hanging.store.lease("0"):
        pass
    hanging.engine.heal()
    hanging.engine.hold(times=1, kind=Kind.READ)
    hanging.store.prefetch("0")
    hanging.engine.wait_until_held()
    assert uses(hanging, [-1]) == []
    come_back(hanging)
    assert uses(hanging, [-1]) == [-1]
