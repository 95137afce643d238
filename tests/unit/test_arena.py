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


def make_arena(*slabs: int, paths: int = 1) -> Arena:
    """Slabs of so many extents, dealt to the paths in turn."""
    arena = Arena("cpu", EXTENT_BYTES)
    for number, extents in enumerate(slabs):
        arena.grow(extents, path=number % paths)
    return arena


def take_all(arena: Arena) -> list[Extent]:
    return [arena.take() for _ in range(arena.available)]


@pytest.mark.parametrize("paths", [1, 3])
def test_a_hundred_thousand_random_operations_never_fragment(paths: int) -> None:
    """After any history of taking, giving back, growing and shrinking, every byte not in use serves any chunk."""
    chance, arena, held = random.Random(1), make_arena(8, 8, paths=paths), []
    for number in range(100_000):
        if chance.random() < 0.5 and arena.available:
            held.append(arena.take())
        elif held and chance.random() < 0.98:
            arena.release(held.pop(chance.randrange(len(held))))
        elif chance.random() < 0.5 and arena.capacity < 60:
            arena.grow(chance.randint(1, 8), path=chance.randrange(paths))
        elif len(arena.slabs) > 1:
            shrink(arena, held, chance)
        assert arena.available == arena.free == arena.capacity - len(held)
        if number % 10_000 == 0:
            held += take_all(arena)  # all that is free can be taken at any time
            check_disjoint(held, arena)
            arena.check()
    assert arena.quarantined == arena.draining == 0


def shrink(arena: Arena, held: list[Extent], chance: random.Random) -> None:
    """Remove some slab, whose chunks move to others or, for the test, are given up."""
    slab = chance.choice([slab for path in range(3) for slab in arena.slabs_on(path)])
    for extent in arena.condemn(slab):
        held.remove(extent)
        if arena.available:
            held.append(arena.take())
        arena.release(extent)
    arena.remove(slab)
    assert not arena.has_slab(slab)


def check_disjoint(held: list[Extent], arena: Arena) -> None:
    assert len({(extent.slab, extent.offset) for extent in held}) == len(held) == arena.capacity
    for extent in held:
        assert extent.length == EXTENT_BYTES
        assert extent.offset in range(0, arena.extents_of(extent.slab) * EXTENT_BYTES, EXTENT_BYTES)


def test_the_lowest_slab_is_taken_from_first() -> None:
    assert [extent.slab for extent in take_all(make_arena(3, 2, 1))] == [0, 0, 0, 1, 1, 2]


def test_extents_are_taken_on_the_path_asked_for() -> None:
    arena = make_arena(2, 1, 1, 3, paths=2)
    assert [arena.take(1).slab for _ in range(4)] == [1, 3, 3, 3]
    assert (arena.has_room(0), arena.has_room(1), arena.owned_on(1), arena.reserved_on(1)) == (True, False, 4, 4)
    with pytest.raises(CapacityError):
        arena.take(1)
    assert [arena.take().slab for _ in range(3)] == [0, 0, 2]


def test_a_slab_in_the_middle_is_removed_while_the_others_are_in_use() -> None:
    arena = make_arena(1, 2, 1, paths=2)
    kept = [arena.take(0), arena.take(0)]
    assert arena.condemn(1) == frozenset()
    assert (arena.lasting, arena.condemned, arena.capacity, arena.slabs_on(1)) == (2, 2, 4, ())
    assert arena.remove(1) == 2
    assert all(arena.is_owned(extent) for extent in kept)
    assert (arena.grow(5, path=1), arena.slabs) == (3, (1, 1, 5))
    arena.check()


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
        arena.remove(arena.last_slab)
    arena.release(second)
    assert arena.remove(arena.last_slab) == 2
    assert arena.slabs == (1,)
    arena.check()


def test_slabs_are_condemned_from_the_last_on() -> None:
    arena = make_arena(1, 1, 1)
    held = take_all(arena)
    assert [arena.condemn_last(), arena.condemn_last()] == [{held[2]}, {held[1]}]


def test_a_slab_that_is_not_condemned_cannot_be_removed() -> None:
    with pytest.raises(InvariantError, match="cannot be removed"):
        make_arena(1).remove(0)


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
    """An arena on three paths beside a dict of what every extent should be."""

    @initialize(extents=st.integers(0, 4))
    def begin(self, extents: int) -> None:
        self.arena = make_arena(extents)
        self.slabs = {0: (0, extents)}  # path and extents by number
        self.condemned: set[int] = set()
        self.states: dict[Extent, str] = {}  # of all that are not free

    def held(self, *states: str) -> list[Extent]:
        return [extent for extent, state in self.states.items() if state in states]

    def expected_available(self, *paths: int) -> int:
        ordinary = {slab for slab, (path, _) in self.slabs.items() if path in paths and slab not in self.condemned}
        return sum(self.slabs[slab][1] for slab in ordinary) - sum(one.slab in ordinary for one in self.states)

    @rule(extents=st.integers(0, 4), path=st.integers(0, 2))
    def grow(self, extents: int, path: int) -> None:
        number = self.arena.grow(extents, path=path)
        assert number == max(self.slabs, default=-1) + 1
        self.slabs[number] = path, extents

    @rule(path=st.sampled_from([None, 0, 1, 2]))
    def take(self, path: int | None) -> None:
        if self.expected_available(*(range(3) if path is None else [path])):
            extent = self.arena.take(path)
            assert extent not in self.states
            assert extent.slab not in self.condemned
            assert path in (None, self.slabs[extent.slab][0])
            self.states[extent] = "owned"
        else:
            with pytest.raises(CapacityError):
                self.arena.take(path)

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

    @precondition(lambda self: len(self.condemned) < len(self.slabs))
    @rule(choice=st.data())
    def condemn(self, choice: Any) -> None:
        ordinary = [slab for slab in self.slabs if slab not in self.condemned]
        slab = choice.draw(st.sampled_from([None, *ordinary]))
        in_use = self.arena.condemn_last() if slab is None else self.arena.condemn(slab)
        slab = ordinary[-1] if slab is None else slab
        self.condemned.add(slab)
        assert in_use == {extent for extent in self.states if extent.slab == slab}

    @precondition(lambda self: self.condemned)
    @rule(choice=st.data())
    def remove(self, choice: Any) -> None:
        slab = choice.draw(st.sampled_from(sorted(self.condemned)))
        if any(extent.slab == slab for extent in self.states):
            with pytest.raises(InvariantError):
                self.arena.remove(slab)
        else:
            assert self.arena.remove(slab) == self.slabs.pop(slab)[1]
            self.condemned.remove(slab)

    @rule()
    def reprieve(self) -> None:
        self.arena.reprieve()
        self.condemned.clear()

    @invariant()
    def agrees(self) -> None:
        self.arena.check()
        total = sum(extents for _, extents in self.slabs.values())
        assert self.arena.slabs == tuple(extents for _, extents in self.slabs.values())
        assert self.arena.available == self.expected_available(0, 1, 2)
        assert [self.arena.has_room(path) for path in range(3)] == [self.expected_available(p) > 0 for p in range(3)]
        assert self.arena.free == total - len(self.states)
        lost = sum(extent.slab not in self.condemned for extent in self.held("quarantined"))
        assert self.arena.lasting == total - sum(self.slabs[slab][1] for slab in self.condemned) - lost
        for slab in self.slabs:
            assert self.arena.has_quarantined(slab) == any(one.slab == slab for one in self.held("quarantined"))
        assert self.arena.owned == len(self.held("owned"))
        assert self.arena.draining == len(self.held("draining"))
        assert self.arena.quarantined == len(self.held("quarantined"))


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
