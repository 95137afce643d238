"""The ledger: one valid copy of every chunk, whatever hops are begun, committed and aborted; leases hold chunks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tierstore.arena import Extent
from tierstore.errors import InvariantError, LeaseError
from tierstore.residency import FRESH, Ledger, Moving, Resident


def at(tier: str, number: int = 0) -> Resident:
    return Resident(tier, Extent(0, number * 4096, 4096))


def ledger_with(*places: Resident, home: str = "nvme") -> Ledger:
    """A ledger of chunks 0, 1, ... in these places."""
    ledger = Ledger()
    for chunk, place in enumerate(places):
        ledger.add(chunk, home)
        ledger.create(chunk, place)
    return ledger


def test_a_chunk_is_fresh_until_it_is_created() -> None:
    ledger = Ledger()
    ledger.add(5, "nvme")
    assert (ledger.where(5), ledger.bound_for(5), ledger.home(5)) == (FRESH, None, "nvme")
    assert ledger.valid_places() == {}
    ledger.create(5, at("cpu"))
    assert (ledger.where(5), ledger.bound_for(5)) == (at("cpu"), "cpu")


def test_a_ledger_is_a_collection_of_chunk_numbers() -> None:
    ledger = ledger_with(at("cpu"), at("gpu"))
    assert (list(ledger), len(ledger), 1 in ledger, 2 in ledger) == ([0, 1], 2, True, False)


def test_the_source_is_the_valid_copy_until_a_hop_is_committed() -> None:
    ledger = ledger_with(at("nvme"))
    assert ledger.begin_move(0, at("cpu")) == at("nvme")
    assert ledger.where(0) == Moving(at("nvme"), (at("cpu"),))
    assert ledger.valid_places() == {at("nvme"): 0}
    assert ledger.commit_move(0) == at("nvme")
    assert ledger.where(0) == at("cpu")
    assert ledger.valid_places() == {at("cpu"): 0}


def test_hops_are_committed_in_the_order_they_were_begun() -> None:
    ledger = ledger_with(at("nvme"))
    ledger.begin_move(0, at("cpu"))
    assert ledger.begin_move(0, at("gpu")) == at("cpu")
    assert ledger.bound_for(0) == "gpu"
    assert ledger.commit_move(0) == at("nvme")
    assert ledger.where(0) == Moving(at("cpu"), (at("gpu"),))
    assert ledger.commit_move(0) == at("cpu")
    assert ledger.where(0) == at("gpu")


@pytest.mark.parametrize(("hops", "left"), [(1, Moving(at("nvme"), (at("cpu"),))), (2, at("nvme"))])
def test_aborting_gives_back_the_last_destinations_and_never_the_source(hops: int, left: object) -> None:
    ledger = ledger_with(at("nvme"))
    ledger.begin_move(0, at("cpu"))
    ledger.begin_move(0, at("gpu"))
    assert ledger.abort_move(0, hops) == (at("cpu"), at("gpu"))[-hops:]
    assert ledger.where(0) == left


def test_a_change_of_home_moves_nothing() -> None:
    ledger = ledger_with(at("cpu"))
    ledger.set_home(0, "cpu")
    assert (ledger.home(0), ledger.where(0)) == ("cpu", at("cpu"))


def test_every_place_of_a_moving_chunk_is_told() -> None:
    ledger = ledger_with(at("nvme"), at("cpu", 1))
    ledger.add(2, "nvme")
    ledger.begin_move(0, at("cpu"))
    ledger.begin_move(0, at("gpu"))
    assert list(ledger.places()) == [(0, at("nvme")), (0, at("cpu")), (0, at("gpu")), (1, at("cpu", 1))]


def test_two_chunks_with_one_valid_place_are_found_out() -> None:
    ledger = ledger_with(at("cpu"), at("cpu"))
    with pytest.raises(InvariantError, match="chunks 0 and 1 both claim"):
        ledger.valid_places()


def test_a_promised_place_is_valid_for_its_present_owner_alone() -> None:
    ledger = ledger_with(at("cpu"), at("nvme"))
    ledger.begin_move(0, at("nvme", 1))
    ledger.begin_move(1, at("cpu"))  # where chunk 0 still is
    assert ledger.valid_places() == {at("cpu"): 0, at("nvme"): 1}


@pytest.mark.parametrize(
    "act",
    [
        lambda ledger: ledger.add(0, "cpu"),
        lambda ledger: ledger.create(0, at("cpu", 1)),
        lambda ledger: ledger.commit_move(0),
        lambda ledger: ledger.abort_move(0, 1),
        lambda ledger: ledger.begin_move(1, at("cpu", 1)),
    ],
    ids=["added-twice", "created-twice", "commit-without-a-move", "abort-without-a-move", "move-of-a-fresh-chunk"],
)
def test_what_cannot_be_is_an_invariant_error(act: Callable[[Ledger], object]) -> None:
    ledger = ledger_with(at("cpu"))
    ledger.add(1, "cpu")
    with pytest.raises(InvariantError):
        act(ledger)
    assert ledger.where(0) == at("cpu")


# -- leases -----------------------------------------------------------------------------------------------------


def test_a_leased_chunk_neither_moves_nor_goes_until_the_last_lease_ends() -> None:
    ledger = ledger_with(at("cpu"))
    assert ledger.lease(0) == ledger.lease(0) == at("cpu")
    for _ in range(2):
        assert ledger.is_leased(0)
        with pytest.raises(LeaseError, match="leased and cannot move to nvme"):
            ledger.begin_move(0, at("nvme"))
        with pytest.raises(LeaseError, match="cannot be deleted: it is leased"):
            ledger.remove(0)
        ledger.release(0)
    assert not ledger.is_leased(0)
    assert ledger.begin_move(0, at("nvme")) == at("cpu")


def test_a_lease_that_is_not_held_cannot_end() -> None:
    with pytest.raises(LeaseError, match="chunk 0 is not leased"):
        ledger_with(at("cpu")).release(0)


def test_what_is_fresh_or_moving_cannot_be_leased() -> None:
    ledger = ledger_with(at("cpu"))
    ledger.add(1, "cpu")
    ledger.begin_move(0, at("nvme"))
    for chunk in (0, 1):
        with pytest.raises(LeaseError, match="cannot be leased"):
            ledger.lease(chunk)


def test_a_settled_chunk_can_be_deleted_and_a_moving_one_cannot() -> None:
    ledger = ledger_with(at("cpu"), at("cpu", 1))
    ledger.add(2, "cpu")
    ledger.begin_move(0, at("nvme"))
    with pytest.raises(LeaseError, match="cannot be deleted: it is moving"):
        ledger.remove(0)
    assert ledger.remove(1) == at("cpu", 1)
    assert ledger.remove(2) == FRESH
    assert list(ledger) == [0]


def test_random_hops_keep_exactly_one_valid_copy() -> None:
    """Beside a list of places per chunk, the first of which is the valid one."""
    chance, ledger = random.Random(1), Ledger()
    model: dict[int, list[Resident]] = {}
    for number in range(20_000):
        chunk = chance.randrange(20)
        hops = model.get(chunk, [])
        action = chance.choice(["make", "begin", "begin", "commit", "commit", "abort", "remove"])
        if action == "make" and chunk not in model:
            ledger.add(chunk, "nvme")
            ledger.create(chunk, at("cpu", number))
            model[chunk] = [at("cpu", number)]
        elif action == "begin" and hops:
            assert ledger.begin_move(chunk, at("nvme", number)) == hops[-1]
            hops.append(at("nvme", number))
        elif action == "commit" and len(hops) > 1:
            assert ledger.commit_move(chunk) == hops.pop(0)
        elif action == "abort" and len(hops) > 1:
            count = chance.randint(1, len(hops) - 1)
            assert ledger.abort_move(chunk, count) == tuple(hops[-count:])
            del hops[-count:]
        elif action == "remove" and len(hops) == 1:
            assert ledger.remove(chunk) == model.pop(chunk)[0]
        assert ledger.valid_places() == {places[0]: one for one, places in model.items()}
        assert sorted(ledger) == sorted(model)
