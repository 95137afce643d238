"""The arena: no history fragments it, its capacity is exact, and every extent is in one state."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.arena import Arena, Extent
from tierstore.errors import CapacityError, InvariantError

EXTENT_BYTES = 4096


def make_arena(*slabs: int, spread: bool = False) -> Arena:
    arena = Arena("cpu", EXTENT_BYTES, spread=spread)
    for extents in slabs:
        arena.grow(extents)
    return arena


def take_all(arena: Arena) -> list[Extent]:
    return [arena.take() for _ in range(arena.available)]


@pytest.mark.parametrize("spread", [False, True])
def test_a_hundred_thousand_random_operations_never_fragment(spread: bool) -> None:
    """After any history of taking, giving back, growing and shrinking, every byte not in use serves any chunk."""
    chance, arena, held = random.Random(1), make_arena(8, 8, spread=spread), []
    for number in range(100_000):
        if chance.random() < 0.5 and arena.available:
            held.append(arena.take())
        elif held and chance.random() < 0.98:
            arena.release(held.pop(chance.randrange(len(held))))
        elif chance.random() < 0.5 and arena.capacity < 60:
            arena.grow(chance.randint(1, 8))
        elif len(arena.slabs) > 1:
            shrink(arena, held)
        assert arena.available == arena.free == arena.capacity - len(held)
        if number % 10_000 == 0:
            held += take_all(arena)  # all that is free can be taken at any time
            check_disjoint(held, arena)
            arena.check()
    assert arena.quarantined == arena.draining == 0


def shrink(arena: Arena, held: list[Extent]) -> None:
    """Remove the last slab, whose chunks move to others or, for the test, are given up."""
    for extent in arena.condemn_last():
        held.remove(extent)
        if arena.available:
            held.append(arena.take())
        arena.release(extent)
    arena.remove_last()


def check_disjoint(held: list[Extent], arena: Arena) -> None:
    assert len({(extent.slab, extent.offset) for extent in held}) == len(held) == arena.capacity
    for extent in held:
        assert extent.length == EXTENT_BYTES
        assert extent.offset in range(0, arena.slabs[extent.slab] * EXTENT_BYTES, EXTENT_BYTES)


@pytest.mark.parametrize(
    ("spread", "slabs"),
    [(False, [0, 0, 0, 1, 1, 2]), (True, [0, 1, 2, 0, 1, 0])],
    ids=["lowest-slab-first", "slabs-in-turn"],
)
def test_extents_are_taken_in_the_order_asked_for(spread: bool, slabs: list[int]) -> None:
    assert [extent.slab for extent in take_all(make_arena(3, 2, 1, spread=spread))] == slabs


def test_a_full_arena_names_the_setting() -> None:
    arena = make_arena(2)
    take_all(arena)
    with pytest.raises(CapacityError, match=r"all 2 extents of 4096 bytes .* tiers\.cpu\.capacity"):
        arena.take()


def test_a_condemned_slab_is_removed_once_its_extents_have_come_back() -> None:
    arena = make_arena(1, 2)
    _, first, second = take_all(arena)
    assert arena.condemn_last() == {first, second}
    arena.release(first)
    assert (arena.available, arena.free, arena.capacity) == (0, 1, 3)
    with pytest.raises(InvariantError, match="slab 1 of tier cpu cannot be removed"):
        arena.remove_last()
    arena.release(second)
    assert arena.remove_last() == 2
    assert arena.slabs == (1,)
    arena.check()


def test_slabs_are_condemned_from_the_last_on() -> None:
    arena = make_arena(1, 1, 1)
    held = take_all(arena)
    assert [arena.condemn_last(), arena.condemn_last()] == [{held[2]}, {held[1]}]


def test_a_slab_that_is_not_condemned_cannot_be_removed() -> None:
    with pytest.raises(InvariantError, match="cannot be removed"):
        make_arena(1).remove_last()


def test_reprieve_makes_condemned_extents_ordinary_again() -> None:
    arena = make_arena(1, 1)
    held = take_all(arena)
    arena.condemn_last()
    arena.release(held[1])
    arena.reprieve()
    arena.release(held[0])
    assert arena.available == 2


def test_a_draining_extent_is_neither_owned_nor_free_until_released() -> None:
    arena = make_arena(1)
    extent = arena.take()
    arena.drain(extent)
    assert (arena.owned, arena.draining, arena.free) == (0, 1, 0)
    assert not arena.is_owned(extent)
    arena.release(extent)
    assert (arena.draining, arena.free) == (0, 1)


def test_a_quarantined_extent_never_comes_back() -> None:
    arena = make_arena(2)
    extent = arena.take()
    arena.quarantine(extent)
    assert arena.quarantined == 1
    assert extent not in take_all(arena)
    with pytest.raises(InvariantError, match="not in use"):
        arena.release(extent)
    assert extent in arena.condemn_last()
    arena.check()


@pytest.mark.parametrize("give_up", [Arena.release, Arena.drain, Arena.quarantine])
def test_what_is_not_in_use_cannot_be_given_up(give_up: Callable[[Arena, Extent], None]) -> None:
    arena = make_arena(1)
    extent = arena.take()
    arena.release(extent)
    with pytest.raises(InvariantError, match="not in use"):
        give_up(arena, extent)


def test_peak_owned_is_the_most_that_ever_was() -> None:
    arena = make_arena(3)
    held = take_all(arena)
    for extent in held:
        arena.release(extent)
    arena.take()
    assert arena.peak_owned == 3


@pytest.mark.parametrize("damage", ["twice", "lost"])
def test_check_finds_an_extent_in_two_states_or_in_none(damage: str) -> None:
    arena = make_arena(2)
    extent = arena.take()
    if damage == "twice":
        arena._draining.add(extent)
    else:
        arena._owned.clear()
    with pytest.raises(InvariantError, match="is not its capacity of 2 extents"):
        arena.check()


class ArenaMachine(RuleBasedStateMachine):
    """An arena beside a dict of what every extent should be."""

    @initialize(spread=st.booleans(), extents=st.integers(0, 4))
    def begin(self, spread: bool, extents: int) -> None:
        self.arena = make_arena(extents, spread=spread)
        self.slabs = [extents]
        self.condemned = 0
        self.states: dict[Extent, str] = {}  # of all that are not free

    def held(self, *states: str) -> list[Extent]:
        return [extent for extent, state in self.states.items() if state in states]

    def is_condemned(self, extent: Extent) -> bool:
        return extent.slab >= len(self.slabs) - self.condemned

    @property
    def expected_available(self) -> int:
        ordinary = sum(self.slabs[: len(self.slabs) - self.condemned])
        return ordinary - sum(not self.is_condemned(extent) for extent in self.states)

    @precondition(lambda self: not self.condemned)
    @rule(extents=st.integers(0, 4))
    def grow(self, extents: int) -> None:
        assert self.arena.grow(extents) == len(self.slabs)
        self.slabs.append(extents)

    @rule()
    def take(self) -> None:
        if self.expected_available:
            extent = self.arena.take()
            assert extent not in self.states
            assert not self.is_condemned(extent)
            self.states[extent] = "owned"
        else:
            with pytest.raises(CapacityError):
                self.arena.take()

    @rule(choice=st.data(), action=st.sampled_from(["release", "drain", "quarantine"]))
    def give_up(self, choice: Any, action: str) -> None:
        candidates = self.held("owned", "draining") if action == "release" else self.held("owned")
        if not candidates:
            return
        extent = choice.draw(st.sampled_from(candidates))
        getattr(self.arena, action)(extent)
        if action == "release":
            del self.states[extent]
        else:
            self.states[extent] = {"drain": "draining", "quarantine": "quarantined"}[action]

    @precondition(lambda self: self.condemned < len(self.slabs))
    @rule()
    def condemn(self) -> None:
        self.condemned += 1
        slab = len(self.slabs) - self.condemned
        assert self.arena.condemn_last() == {extent for extent in self.states if extent.slab == slab}

    @precondition(lambda self: self.condemned)
    @rule()
    def remove(self) -> None:
        if any(extent.slab == len(self.slabs) - 1 for extent in self.states):
            with pytest.raises(InvariantError):
                self.arena.remove_last()
        else:
            assert self.arena.remove_last() == self.slabs.pop()
            self.condemned -= 1

    @rule()
    def reprieve(self) -> None:
        self.arena.reprieve()
        self.condemned = 0

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        assert self.arena.slabs == tuple(self.slabs)
        assert self.arena.available == self.expected_available
        assert self.arena.free == sum(self.slabs) - len(self.states)
        assert self.arena.owned == len(self.held("owned"))
        assert self.arena.draining == len(self.held("draining"))
        assert self.arena.quarantined == len(self.held("quarantined"))


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
