"""Moves under way: who promised which extent to whom, and what falls with a move that failed."""

from __future__ import annotations

import random

import pytest

from tierstore.arena import Extent
from tierstore.flights import Flight, Flights
from tierstore.residency import Resident

TIERS = ("gpu", "cpu", "nvme")


def at(tier: str, number: int = 0) -> Resident:
    return Resident(tier, Extent(0, number * 4096, 4096))


def flights_of(*flights: Flight) -> Flights:
    all_of_them = Flights(iter(TIERS))
    for flight in flights:
        all_of_them.add(flight)
    return all_of_them


def test_a_flight_is_known_by_its_chunk_and_by_the_tier_it_leaves() -> None:
    away = Flight(1, at("cpu"), at("nvme"))
    flights = flights_of(away)
    assert (flights.of(1), flights.of(2)) == (away, None)
    assert (list(flights), len(flights), flights.chunks()) == ([away], 1, [1])
    assert (flights.leaving("cpu"), flights.next_leaving("cpu")) == (1, away)
    assert (flights.leaving("nvme"), flights.next_leaving("nvme")) == (0, None)


def test_the_last_hop_of_a_chunk_is_the_one_it_is_known_by() -> None:
    first, second = Flight(1, at("nvme"), at("cpu")), Flight(1, at("cpu"), at("gpu"))
    flights = flights_of(first, second)
    assert flights.of(1) is second
    assert len(flights) == 2


def test_the_extent_left_for_longest_is_promised_first_and_once() -> None:
    first, second = Flight(1, at("cpu", 1), at("nvme", 1)), Flight(2, at("cpu", 2), at("nvme", 2))
    flights = flights_of(first, second)
    assert flights.next_leaving("cpu") is first
    follower = Flight(3, at("nvme", 3), first.source or at("gpu"), claims=first)
    flights.add(follower)
    assert first.claimed_by is follower
    assert (flights.next_leaving("cpu"), flights.leaving("cpu")) == (second, 1)


def test_an_extent_left_for_the_tier_that_somebody_comes_from_is_promised_before_one_left_for_longer() -> None:
    down, up = Flight(1, at("cpu", 1), at("nvme", 1)), Flight(2, at("cpu", 2), at("gpu", 2))
    flights = flights_of(down, up)
    assert [flights.next_leaving("cpu", towards) for towards in ("gpu", "nvme", None)] == [up, down, down]
    assert flights_of(down).next_leaving("cpu", "gpu") is down


def test_a_landed_flight_frees_its_source_unless_that_was_promised() -> None:
    free, promised = Flight(1, at("cpu", 1), at("nvme", 1)), Flight(2, at("cpu", 2), at("nvme", 2))
    follower = Flight(3, at("nvme", 3), at("cpu", 2), claims=promised)
    flights = flights_of(free, promised, follower)
    assert not follower.owns_destination
    assert flights.land(free)
    assert not flights.land(promised)
    assert follower.owns_destination
    assert (flights.chunks(), flights.leaving("cpu"), flights.leaving("nvme")) == ([3], 0, 1)


def test_a_claim_on_a_flight_that_has_landed_is_no_promise() -> None:
    landed = Flight(1, at("cpu"), at("nvme"))
    flights = flights_of(landed)
    flights.land(landed)
    follower = Flight(2, at("nvme", 1), at("cpu"), claims=landed)
    flights.add(follower)
    assert follower.owns_destination
    assert landed.claimed_by is None


def test_a_failed_flight_takes_the_later_hops_and_all_that_counted_on_them() -> None:
    """2 comes to where 1 was, 3 to where 2 was, 5 is made where 1 passes through; 4 has nothing to do with it."""
    first, second = Flight(1, at("gpu"), at("cpu", 1)), Flight(1, at("cpu", 1), at("nvme", 1))
    claims_gpu = Flight(2, at("cpu", 2), at("gpu"), claims=first)
    claims_cpu = Flight(3, at("nvme", 3), at("cpu", 2), claims=claims_gpu)
    claims_hop = Flight(5, None, at("cpu", 1), claims=second)
    other = Flight(4, at("cpu", 4), at("nvme", 4))
    flights = flights_of(first, second, claims_gpu, claims_cpu, claims_hop, other)
    fallen = flights.fall(first)
    assert set(fallen) == {first, second, claims_gpu, claims_cpu, claims_hop}
    assert len(fallen) == 5
    assert list(flights) == [other]
    assert [flights.leaving(tier) for tier in TIERS] == [0, 1, 0]


def test_an_earlier_hop_goes_on_when_a_later_one_fails() -> None:
    first, second = Flight(1, at("nvme"), at("cpu")), Flight(1, at("cpu"), at("gpu"))
    flights = flights_of(first, second)
    assert flights.fall(second) == [second]
    assert list(flights) == [first]


def test_a_promise_to_a_flight_that_fell_is_taken_back() -> None:
    leaving = Flight(1, at("cpu"), at("nvme"))
    follower = Flight(2, at("nvme", 2), at("cpu"), claims=leaving)
    flights = flights_of(leaving, follower)
    assert flights.fall(follower) == [follower]
    assert leaving.claimed_by is None
    assert flights.next_leaving("cpu") is leaving
    assert flights.land(leaving)


def test_a_fall_reaches_a_flight_by_two_ways_and_tells_of_it_once() -> None:
    """Chunk 2's second hop falls both as a later hop of chunk 2 and because it claims what chunk 1 leaves."""
    one = Flight(1, at("gpu", 1), at("cpu", 1))
    other = Flight(1, at("cpu", 1), at("nvme", 1))
    first = Flight(2, at("nvme", 2), at("cpu", 1), claims=other)
    second = Flight(2, at("cpu", 1), at("gpu", 1), claims=one)
    flights = flights_of(one, other, first, second)
    fallen = flights.fall(one)
    assert len(fallen) == 4
    assert set(fallen) == {one, other, first, second}
    assert len(flights) == 0
    assert all(flight.has_fallen for flight in fallen)


def test_a_place_kept_for_a_chunk_to_be_made_leaves_nothing() -> None:
    kept = Flight(1, None, at("cpu"))
    flights = flights_of(kept)
    assert kept.owns_destination
    assert [flights.leaving(tier) for tier in TIERS] == [0, 0, 0]
    assert flights.fall(kept) == [kept]
    assert len(flights) == 0


def test_what_landed_or_fell_before_does_not_fall_again() -> None:
    landed, fallen = Flight(1, at("cpu", 1), at("nvme", 1)), Flight(2, at("cpu", 2), at("nvme", 2))
    flights = flights_of(landed, fallen)
    flights.land(landed)
    flights.fall(fallen)
    assert flights.fall(landed) == flights.fall(fallen) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_promises_every_leaving_extent_once_and_loses_none(seed: int) -> None:
    """Extents as a set of free ones beside the books: at the end each is free or holds the chunk it should."""
    chance = random.Random(seed)
    free = {tier: [at(tier, number) for number in range(4)] for tier in TIERS}
    valid = {chunk: free["cpu" if chunk % 2 else "nvme"].pop() for chunk in range(6)}
    flights = Flights(iter(TIERS))
    for _ in range(400):
        action = chance.choice(["begin", "begin", "land", "fall"])
        under_way = list(flights)
        if action == "begin":
            begin(flights, free, valid, chance)
        elif under_way and action == "land":
            land(flights, free, valid, chance.choice(under_way))
        elif under_way and chance.random() < 0.3:
            for fallen in flights.fall(first_hop(flights, chance.choice(under_way).chunk)):
                if fallen.owns_destination:
                    free[fallen.destination.tier].append(fallen.destination)
        check(flights, free, valid)
    while under_way := list(flights):
        for flight in under_way:
            land(flights, free, valid, flight)
    check(flights, free, valid)


def begin(flights: Flights, free: dict[str, list[Resident]], valid: dict[int, Resident], chance: random.Random) -> None:
    chunk, tier = chance.randrange(6), chance.choice(TIERS)
    last = flights.of(chunk)
    source, leaving = last.destination if last else valid[chunk], flights.next_leaving(tier)
    if free[tier]:
        flights.add(Flight(chunk, source, free[tier].pop()))
    elif leaving is not None and leaving.source is not None:
        flights.add(Flight(chunk, source, leaving.source, claims=leaving))


def first_hop(flights: Flights, chunk: int) -> Flight:
    return next(flight for flight in flights if flight.chunk == chunk)


def land(flights: Flights, free: dict[str, list[Resident]], valid: dict[int, Resident], flight: Flight) -> None:
    """Land a flight, as far as its turn has come: its chunk's first hop, to an extent that is its own."""
    if flight is not first_hop(flights, flight.chunk) or not flight.owns_destination:
        return
    assert flight.source is not None
    valid[flight.chunk] = flight.destination
    if flights.land(flight):
        free[flight.source.tier].append(flight.source)


def check(flights: Flights, free: dict[str, list[Resident]], valid: dict[int, Resident]) -> None:
    held = [place for places in free.values() for place in places]
    held += valid.values()
    held += [flight.destination for flight in flights if flight.owns_destination]
    assert len(held) == len(set(held)) == 4 * len(TIERS)
    for tier in TIERS:
        unpromised = [one for one in flights if one.source and one.source.tier == tier and one.claimed_by is None]
        assert flights.leaving(tier) == len(unpromised)
