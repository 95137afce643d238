"""Single moves: begun on free or promised extents, committed or rolled back, and what `check` finds out."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.simulator import RECORD_BYTES, PoisoningDevice, RandomTransfer
from tierstore.arena import Extent
from tierstore.device import HostDevice
from tierstore.errors import (
    CapacityError,
    InvariantError,
    LeaseError,
    TierstoreError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from tierstore.planning import Move, Reason
from tierstore.residency import Ledger, Moving, Resident
from tierstore.tiers import MemoryTier
from tierstore.traffic import Traffic
from tierstore.transfer import Ticket


class StubbornTransfer(RandomTransfer):
    """Transfers that end only when waited for, that may be refused, and may never end."""

    def __init__(self) -> None:
        super().__init__(random.Random(1), self._is_to_fail)
        self.failing: set[str] = set()  # tiers that cannot be written
        self.refuses = self.is_dead = False

    def submit(self, *arguments: object, **options: object) -> Ticket:  # type: ignore[override]
        if self.refuses:
            raise OSError("no more threads")
        return super().submit(*arguments, **options)  # type: ignore[arg-type]

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        return None if self.is_dead else super().next_ended(wait=wait)

    def _is_to_fail(self, ticket: Ticket) -> bool:
        return ticket.route[1] in self.failing


def make_traffic(**extents: int) -> tuple[Traffic, StubbornTransfer]:
    tiers = {name: MemoryTier(name, PoisoningDevice(), RECORD_BYTES) for name in extents}
    for name, count in extents.items():
        tiers[name].grow(count, slab_extents=count)
    transfer = StubbornTransfer()
    return Traffic(tiers, transfer, describe="chunk {}".format, timeout_seconds=1.5), transfer


def make_chunks(traffic: Traffic, *chunks: int, tier: str = "cpu") -> None:
    for chunk in chunks:
        traffic.ledger.add(chunk, "nvme")
        traffic.issue(Move(chunk, None, tier, Reason.FRESH), RECORD_BYTES)
        assert traffic.make(chunk)


def write_back(traffic: Traffic, chunk: int) -> None:
    traffic.issue(Move(chunk, "cpu", "nvme", Reason.WRITE_BACK), RECORD_BYTES)


def test_chunks_that_change_places_between_two_tiers_do_not_wait_for_a_third() -> None:
    """One from the device claimed the extent of a chunk on its way to disk, so that writes went one after another."""
    traffic, _ = make_traffic(gpu=2, cpu=2, nvme=3)
    make_chunks(traffic, 0, 1)
    make_chunks(traffic, 2, tier="gpu")
    traffic.send(0, "nvme", RECORD_BYTES)
    left = traffic.ledger.where(1)
    traffic.send(1, "gpu", RECORD_BYTES)
    traffic.send(2, "cpu", RECORD_BYTES)
    moving = traffic.ledger.where(2)
    assert isinstance(moving, Moving) and moving.destination == left
    traffic.check()


def test_a_move_goes_to_an_extent_that_another_chunk_is_still_leaving() -> None:
    traffic, _ = make_traffic(cpu=1, nvme=2)
    make_chunks(traffic, 0)
    write_back(traffic, 0)
    assert traffic.room() == {"cpu": 1, "nvme": 1}
    traffic.ledger.add(1, "nvme")
    traffic.issue(Move(1, None, "cpu", Reason.FRESH), RECORD_BYTES)
    assert traffic.room() == {"cpu": 0, "nvme": 1}
    traffic.check()
    assert traffic.make(1)
    assert not traffic.make(0)
    traffic.check()


def test_without_room_a_move_is_refused() -> None:
    traffic, _ = make_traffic(cpu=1, nvme=1)
    make_chunks(traffic, 0)
    with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity"):
        make_chunks(traffic, 1)


@pytest.mark.parametrize("has_free_extent", [True, False])
def test_a_leased_chunk_that_is_told_to_move_takes_no_extent(has_free_extent: bool) -> None:
    traffic, _ = make_traffic(gpu=1, cpu=2, nvme=2)
    make_chunks(traffic, 0, 1)
    if not has_free_extent:
        traffic.send(1, "gpu", RECORD_BYTES)
        traffic.wait_for(1)
        traffic.send(1, "cpu", RECORD_BYTES)  # the extent in gpu is being left
    traffic.ledger.lease(0)
    before = traffic.room()
    with pytest.raises(LeaseError):
        traffic.send(0, "gpu", RECORD_BYTES)
    assert traffic.room() == before
    traffic.check()


def test_a_transfer_that_cannot_be_submitted_leaves_all_as_it_was() -> None:
    traffic, transfer = make_traffic(cpu=1, nvme=1)
    make_chunks(traffic, 0)
    transfer.refuses = True
    with pytest.raises(OSError, match="no more threads"):
        write_back(traffic, 0)
    assert traffic.room() == {"cpu": 0, "nvme": 1}
    traffic.check()


def test_a_failed_move_is_told_of_once_with_what_has_become_of_its_chunk() -> None:
    traffic, transfer = make_traffic(cpu=2, nvme=2)
    make_chunks(traffic, 0, 1)
    transfer.failing = {"nvme"}
    write_back(traffic, 0)
    write_back(traffic, 1)
    traffic.wait_until_over(0)
    traffic.wait_until_over(1)
    with pytest.raises(TransferError, match=r"from cpu to nvme failed; nothing is lost, its copy in cpu") as caught:
        traffic.raise_errors()
    assert caught.value.filename == "nowhere"
    assert "also: " in caught.value.__notes__[0]
    traffic.raise_errors()
    assert [traffic.ledger.bound_for(chunk) for chunk in (0, 1)] == ["cpu", "cpu"]
    traffic.check()


def test_settling_commits_what_has_landed_and_rolls_back_what_has_failed() -> None:
    """A chunk's second hop falls with its first, and nobody minds that it ends later."""
    traffic, transfer = make_traffic(gpu=2, cpu=3, nvme=2)
    make_chunks(traffic, 0, 1, tier="gpu")
    transfer.failing = {"nvme"}
    traffic.send(0, "cpu", RECORD_BYTES)
    traffic.send(0, "nvme", RECORD_BYTES)
    traffic.send(0, "cpu", RECORD_BYTES)
    traffic.send(1, "cpu", RECORD_BYTES)
    transfer.end_all()
    traffic.settle()
    assert [traffic.ledger.bound_for(chunk) for chunk in (0, 1)] == ["cpu", "cpu"]
    with pytest.raises(TransferError, match="moving chunk 0 from cpu to nvme"):
        traffic.raise_errors()
    traffic.check()


def test_a_place_kept_on_an_extent_whose_chunk_could_not_leave_is_lost() -> None:
    traffic, transfer = make_traffic(cpu=1, nvme=2)
    make_chunks(traffic, 0)
    transfer.failing = {"nvme"}
    write_back(traffic, 0)
    traffic.ledger.add(1, "nvme")
    traffic.issue(Move(1, None, "cpu", Reason.FRESH), RECORD_BYTES)
    with pytest.raises(TransferError):
        traffic.make(1)
    assert traffic.ledger.bound_for(1) is None
    traffic.check()


def test_a_place_kept_in_vain_is_given_back() -> None:
    traffic, _ = make_traffic(cpu=1, nvme=1)
    traffic.ledger.add(0, "nvme")
    traffic.issue(Move(0, None, "cpu", Reason.FRESH), RECORD_BYTES)
    traffic.unmake()
    assert traffic.room() == {"cpu": 1, "nvme": 1}
    traffic.check()


def test_when_nothing_arrives_in_time_the_error_names_the_setting_and_all_goes_on() -> None:
    traffic, transfer = make_traffic(cpu=1, nvme=1)
    make_chunks(traffic, 0)
    write_back(traffic, 0)
    transfer.is_dead = True
    with pytest.raises(
        TransferTimeoutError, match=r"chunk 0 did not arrive.* within 1\.5 s .*tiers\.nvme\.io\.timeout"
    ):
        traffic.wait_for(0)
    traffic.check()
    transfer.is_dead = False
    traffic.wait_for_all()
    assert traffic.ledger.bound_for(0) == "nvme"


def test_an_error_that_is_no_transfers_own_is_passed_on_as_it_is() -> None:
    traffic, transfer = make_traffic(cpu=1, nvme=1)
    make_chunks(traffic, 0)
    ours = TierstoreError("closed meanwhile")
    transfer._copy = lambda job: ours  # type: ignore[method-assign]
    write_back(traffic, 0)
    with pytest.raises(TierstoreError) as caught:
        traffic.wait_for(0)
    assert caught.value is ours


def test_a_cancelled_transfer_is_no_error_of_its_own() -> None:
    traffic, transfer = make_traffic(cpu=1, nvme=1)
    make_chunks(traffic, 0)
    transfer._copy = lambda job: TransferCancelledError("not begun")  # type: ignore[method-assign]
    write_back(traffic, 0)
    traffic.wait_for(0)
    assert traffic.ledger.bound_for(0) == "cpu"
    traffic.check()


class _Later:
    """An event that comes when it is waited for."""

    def __init__(self) -> None:
        self.has_come = False

    def query(self) -> bool:
        return self.has_come

    def wait(self) -> None:
        self.has_come = True


def test_an_extent_that_a_kernel_may_be_at_is_free_only_afterwards() -> None:
    traffic, _ = make_traffic(cpu=2, nvme=1)
    make_chunks(traffic, 0, 1)
    for chunk, event in ((0, _Later()), (1, None)):
        place = traffic.ledger.remove(chunk)
        assert isinstance(place, Resident)
        if event is not None:
            traffic.last_use[chunk] = event
        traffic.give_up(chunk, place)
    assert traffic.room()["cpu"] == 1
    assert traffic.tiers["cpu"].arena.draining == 1
    traffic.check()
    assert traffic.wait_for_room()["cpu"] == 2


def test_only_memory_computes() -> None:
    traffic, _ = make_traffic(cpu=1, nvme=1)
    assert traffic.memory("cpu") is traffic.tiers["cpu"]
    assert isinstance(traffic.memory("cpu").device, HostDevice)


# -- the books --------------------------------------------------------------------------------------------------


def forget_an_owner(traffic: Traffic) -> None:
    traffic.ledger.remove(0)


def give_two_chunks_one_extent(traffic: Traffic) -> None:
    place = traffic.ledger.where(1)
    assert isinstance(place, Resident)
    traffic.ledger.begin_move(0, place)
    traffic.ledger.commit_move(0)


def receive_into_an_extent_that_is_held(traffic: Traffic) -> None:
    write_back(traffic, 0)
    flight = next(iter(traffic._flights))
    place = traffic.ledger.where(1)
    assert isinstance(place, Resident)
    flight.destination = place


def promise_more_homes_than_there_are(traffic: Traffic) -> None:
    for chunk in (5, 6, 7):
        traffic.ledger.add(chunk, "cpu")


def hold_an_extent_that_is_not_owned(traffic: Traffic) -> None:
    extent = traffic.tiers["cpu"].arena.take()
    traffic.tiers["cpu"].release(extent)
    place = traffic.ledger.remove(0)
    assert isinstance(place, Resident)
    traffic.ledger.add(0, "nvme")
    traffic.ledger.create(0, Resident("cpu", extent))


def begin_a_hop_that_nobody_flies(traffic: Traffic) -> None:
    traffic.ledger.begin_move(0, Resident("nvme", Extent(0, 0, RECORD_BYTES)))


def fly_a_chunk_that_nobody_knows(traffic: Traffic) -> None:
    write_back(traffic, 0)
    place = traffic.ledger.where(0)
    assert isinstance(place, Moving)
    traffic.ledger.abort_move(0, 1)
    traffic.ledger.remove(0)
    traffic.ledger.add(9, "nvme")
    traffic.ledger.create(9, place.source)


@pytest.mark.parametrize(
    ("damage", "story"),
    [
        (forget_an_owner, "tier cpu counts 2 owned extents, the ledger 1"),
        (give_two_chunks_one_extent, "both claim"),
        (receive_into_an_extent_that_is_held, "an extent has two owners"),
        (promise_more_homes_than_there_are, "tier cpu is home to 3 chunks but has 2 extents"),
        (hold_an_extent_that_is_not_owned, "owned extents, the ledger"),
        (begin_a_hop_that_nobody_flies, "chunk 0: the ledger has begun"),
        (fly_a_chunk_that_nobody_knows, "not in the ledger are under way"),
    ],
)
def test_check_finds_books_that_contradict_each_other(damage: Callable[[Traffic], None], story: str) -> None:
    extents = {"cpu": 3 if damage is hold_an_extent_that_is_not_owned else 2, "nvme": 3}
    traffic, _ = make_traffic(**extents)
    make_chunks(traffic, 0, 1)
    traffic.check()
    damage(traffic)
    with pytest.raises(InvariantError, match=story):
        traffic.check()


def test_a_ledger_without_chunks_is_consistent() -> None:
    traffic, _ = make_traffic(cpu=1, nvme=1)
    assert isinstance(traffic.ledger, Ledger)
    traffic.check()
