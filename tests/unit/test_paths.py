"""Chunks go to the path that is done with them first; together the paths reach the sum of their rates."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.clockwork import Machine
from tierstore.errors import SwapError
from tierstore.paths import Path, PathLoad, Reserve, Shift, choose_path, plan_shifts, rates_of
from tierstore.striping import LOOKS_BEFORE_TRYING_AGAIN, PATIENCE

CHUNKS, CPU = 96, 16


def load(queued: int = 0, dealt: float = 0.0, rate: float | None = None, has_room: bool = True) -> PathLoad:
    return PathLoad(queued, dealt, rate, has_room)


# --- which path


@pytest.mark.parametrize(
    ("loads", "path"),
    [
        pytest.param([load(), load()], 0, id="nothing known: the first"),
        pytest.param([load(dealt=10), load()], 1, id="nothing known: in turn"),
        pytest.param([load(rate=10), load(rate=30)], 1, id="the fastest"),
        pytest.param([load(20, rate=10), load(50, rate=30)], 1, id="the first to be done"),
        pytest.param([load(0, rate=10), load(50, rate=30)], 0, id="a slow one without a queue"),
        pytest.param([load(dealt=10, rate=10), load(dealt=40, rate=30)], 1, id="what was dealt counts as queued"),
        pytest.param([load(0, rate=10), load(25, rate=None), load(0, rate=20)], 2, id="one not measured: the mean"),
        pytest.param([load(rate=10), load(99, rate=1), load(rate=30, has_room=False)], 0, id="of those with room"),
        pytest.param([load(has_room=False)], None, id="no room at all"),
    ],
)
def test_a_chunk_goes_where_it_is_done_first(loads: Sequence[PathLoad], path: int | None) -> None:
    assert choose_path(loads, 10) == path


@pytest.mark.parametrize(
    ("measured", "rates"), [([None, None], [1, 1]), ([None, 4.0], [4, 4]), ([2.0, None, 4.0], [2, 3, 4])]
)
def test_a_path_not_measured_is_as_fast_as_the_others(measured: list[float | None], rates: list[float]) -> None:
    assert rates_of(measured) == rates


# --- how fast a path is


def path_after(*transfers: tuple[int, float, float]) -> Path:
    path = Path()
    for nbytes, _, _ in transfers:
        path.begin(nbytes)
    for nbytes, began, ended in transfers:
        path.end(nbytes, began, ended, is_write=True)
    return path


@pytest.mark.parametrize(
    "transfers",
    [
        pytest.param([(100, 0.0, 1.0), (100, 1.0, 2.0)], id="one after the other"),
        pytest.param([(100, 0.0, 1.0), (100, 0.0, 2.0)], id="the second waits for the first"),
        pytest.param([(100, 0.0, 1.0), (100, 7.0, 8.0)], id="idle in between"),
    ],
)
def test_time_that_a_path_is_busy_with_several_counts_once(transfers: list[tuple[int, float, float]]) -> None:
    assert path_after(*transfers).bytes_per_second == pytest.approx(100)


def test_two_that_share_a_path_to_the_end_count_as_one() -> None:
    path = path_after((100, 0.0, 2.0), (100, 0.0, 2.0))
    assert path.bytes_per_second == pytest.approx(193.75 / (15 / 16 * 2))  # the older counts for 15/16 by now


def test_what_a_path_was_is_forgotten() -> None:
    fast = [(100, float(n), n + 1.0) for n in range(20)]
    slow = [(100, 20.0 + 4 * n, 24.0 + 4 * n) for n in range(40)]
    assert path_after(*fast, *slow).bytes_per_second == pytest.approx(25, rel=0.1)


def test_a_failed_transfer_leaves_the_queue_and_says_nothing_of_the_rate() -> None:
    path = Path()
    path.begin(100)
    path.fail(100)
    assert (path.queued_bytes, path.bytes_per_second, path.written_bytes) == (0, None, 0)


# --- how much room


def reserve(slabs: int, rate: float | None, wants_more: bool = False, extents: int = 1) -> Reserve:
    return Reserve((extents,) * slabs, rate, wants_more)


@pytest.mark.parametrize(
    ("reserves", "shifts"),
    [
        pytest.param([reserve(8, 30), reserve(8, 10)], [], id="nobody wants more"),
        pytest.param([reserve(8, 30, True), reserve(8, 10)], [Shift(0, 1, 1)] * 2, id="an eighth at once"),
        pytest.param([reserve(12, 30, True), reserve(4, 10)], [], id="in proportion already"),
        pytest.param([reserve(11, 30, True), reserve(5, 10)], [Shift(0, 1, 1)], id="no further than in proportion"),
        pytest.param([reserve(8, 30), reserve(8, 10, True)], [], id="wants more than its part"),
        pytest.param([reserve(4, 30, True, 4), reserve(4, 10, extents=4)], [Shift(0, 1, 4)], id="one slab at least"),
        pytest.param([reserve(1, 90, True), reserve(1, 10)], [], id="each path keeps a slab"),
        pytest.param(
            [reserve(16, 20, True), reserve(16, 20, True), reserve(16, 2)],
            [Shift(0, 2, 1), Shift(1, 2, 1)] * 3,
            id="one gives to two in turn",
        ),
        pytest.param([reserve(8, None, True), reserve(8, None)], [], id="nothing measured"),
    ],
)
def test_room_moves_towards_proportion(reserves: Sequence[Reserve], shifts: list[Shift]) -> None:
    assert plan_shifts(reserves) == shifts


# --- together


class Rates:
    """Chunks per second of each path, which a test may change."""

    def __init__(self, *now: float) -> None:
        self.now: Sequence[float] = now

    def __call__(self, path: int, time: float) -> float:
        return self.now[path]


def machine(rates: Rates, *, more: int = 0, cpu: int = CPU, **options: float) -> Machine:
    """As many extents in files as there are chunks, or `more`."""
    return Machine(rates, paths=len(rates.now), chunks=CHUNKS, cpu=cpu, nvme=CHUNKS + more, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "more"),
    [
        *(((10,), 0), ((10, 10), 6), ((10, 30), 6), ((100, 10), 6), ((40, 20, 10), 6), ((10,) * 8, 6)),
        *(((10,) * 4 + (2,), 6), ((100, 10), CHUNKS)),
    ],
    ids=str,
)
def test_paths_together_reach_the_sum_of_their_rates(rates: tuple[float, ...], more: int) -> None:
    """Equal parts would reach as many times the slowest's rate as there are paths: 0.18 of the sum for 100 and 10."""
    store = machine(Rates(*rates), more=more * len(rates))
    store.steps(12)
    outcome = store.steps(6)
    assert outcome.moved_per_second >= 0.95 * sum(rates)
    part = [chunks / sum(outcome.chunks) for chunks in outcome.chunks]
    assert part == pytest.approx([rate / sum(rates) for rate in rates], abs=0.05)
    assert sum(outcome.reserved) == CHUNKS + more * len(rates)


def test_a_capacity_without_an_extent_to_spare_does_nearly_as_well() -> None:
    store = machine(Rates(30, 10))
    store.steps(20)
    outcome = store.steps(6)
    assert outcome.moved_per_second >= 0.95 * 40
    assert sum(outcome.reserved) == CHUNKS


def test_a_path_that_becomes_slow_in_the_middle_is_left_for_the_others() -> None:
    rates = Rates(20, 20)
    store = machine(rates, more=12)
    assert store.steps(6).moved_per_second >= 0.95 * 40
    rates.now = (20, 4)
    store.steps(10)
    outcome = store.steps(6)
    assert outcome.moved_per_second >= 0.95 * 24
    assert outcome.chunks[1] < sum(outcome.chunks) / 4


def test_a_path_that_becomes_fast_again_is_found_out() -> None:
    rates = Rates(20, 1)
    store = machine(rates, more=12)
    store.steps(12)
    rates.now = (20, 20)
    store.steps(16)
    assert store.steps(6).moved_per_second >= 0.95 * 40


def test_an_idle_store_spreads_its_chunks_too() -> None:
    """With updates that take longer than all moves, every path is free each time one is chosen."""
    store = machine(Rates(30, 10), more=CHUNKS, update_seconds=0.5)
    assert store.steps(4).chunks == pytest.approx([60, 20], abs=6)


def test_paths_that_are_equally_fast_by_and_large_keep_their_room() -> None:
    chance = random.Random(1)
    store = Machine(lambda path, time: chance.uniform(10, 30), paths=2, chunks=CHUNKS, cpu=CPU, nvme=CHUNKS + 12)
    reserved = [store.steps(4).reserved for _ in range(8)]
    assert all(abs(one - other) <= 12 for one, other in reserved)


def test_room_that_a_disk_does_not_have_is_done_without() -> None:
    """The fast path's disk is full: it keeps its half, and the slow one carries the other."""
    store = machine(Rates(30, 10), more=12)
    store.nvme.most = {0: 54}
    store.steps(8)
    outcome = store.steps(6)
    assert outcome.reserved == [54, 54]
    in_files = CHUNKS - CPU
    assert outcome.moved_per_second >= 0.95 * 10 * in_files / (in_files - 54)
    with pytest.raises(SwapError):
        store.nvme.grow_on(0, 1)


def test_a_full_disk_is_asked_for_room_again_now_and_then_and_gets_it_once_there_is_some() -> None:
    store = machine(Rates(30, 10), more=12)
    store.nvme.most = {0: 54}
    store.steps(4)
    assert store.nvme.refusals == 1  # not again at each step
    store.steps(LOOKS_BEFORE_TRYING_AGAIN)
    assert store.nvme.refusals == 2
    store.nvme.most.clear()
    store.steps(LOOKS_BEFORE_TRYING_AGAIN + 8)
    assert store.nvme.refusals == 2
    outcome = store.steps(6)
    assert outcome.reserved[0] > 60 and sum(outcome.reserved) == 108
    assert outcome.moved_per_second >= 0.95 * 40


def while_room_moves() -> Machine:
    """A store in which a slab of the slow path is to empty itself."""
    store = machine(Rates(100, 10))
    for _ in range(12):
        store.steps(1)
        if store.nvme.arena.condemned:
            return store
    raise AssertionError("no room ever moved")


def test_chunks_that_stay_where_they_are_do_not_keep_room_from_moving() -> None:
    store, few = machine(Rates(30, 10)), range(CPU // 2)
    store.steps(2)
    store.use(few)  # the others are not even read
    store.steps(1)
    assert store.nvme.arena.condemned > 0
    store.steps(PATIENCE)
    assert (store.nvme.arena.condemned, store.nvme.arena.capacity) == (0, CHUNKS)


@pytest.mark.parametrize("extents", [CHUNKS, CHUNKS + 24])
def test_a_store_resized_while_room_moves_has_what_was_asked_for(extents: int) -> None:
    store = while_room_moves()
    store.store.resize_tier("nvme", extents)
    arena = store.nvme.arena
    assert arena.condemned == 0 and extents <= arena.capacity < extents + max(arena.slabs)
    store.steps(4)


def test_a_slab_behind_which_its_file_has_grown_stays() -> None:
    """A file is cut at its end only: what was reserved behind a slab must not be cut off in its place."""
    store = while_room_moves()
    arena = store.nvme.arena
    store.nvme.grow_on(1, 5)
    store.steps(1)
    assert (arena.condemned, arena.extents_of(arena.last_slab_on(1))) == (0, 5)
    assert arena.lasting > CHUNKS + 5
