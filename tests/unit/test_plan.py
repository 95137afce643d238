"""The planner: its bound on bytes by tables, and its soundness in a simulator with random completion orders."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.calls import calls_of
from tests.simulator import RandomLife, Simulation
from tierstore.errors import CapacityError, TransferError
from tierstore.placement import ENOUGH_EXTENTS, PIPELINE_EXTENTS, Need, pipeline_needs, spread
from tierstore.planning import (
    TRANSIT_EXTENTS,
    ChunkView,
    Move,
    Plan,
    Reason,
    Update,
    plan_eviction,
    plan_fetch,
    plan_homes,
    plan_step,
)
from tierstore.transfer import Ticket

LINE = ("gpu", "cpu", "nvme")


def replay(plan: Plan, chunks: Mapping[int, ChunkView], room: Mapping[str, int]) -> dict[int, str | None]:
    """Play a plan on counters: every move starts where the chunk is and finds room; return where all end."""
    at = {chunk: view.tier for chunk, view in chunks.items()}
    room = dict(room)
    for action in plan.actions:
        if isinstance(action, Move):
            assert at[action.chunk] == action.source
            room[action.destination] -= 1
            assert room[action.destination] >= 0
            if action.source is not None:
                assert abs(LINE.index(action.source) - LINE.index(action.destination)) == 1
                room[action.source] += 1
            at[action.chunk] = action.destination
        else:
            assert at[action.chunk] == chunks[action.chunk].compute
    return at


def views(at: dict[int, str | None], home: str = "nvme", compute: str = "cpu") -> dict[int, ChunkView]:
    return {chunk: ChunkView(tier, home, compute) for chunk, tier in at.items()}


@pytest.mark.parametrize("extents", [1, 2, 3, 8, 16, 19, 20, 25])
def test_alternating_order_moves_the_fewest_chunks_any_schedule_can(extents: int) -> None:
    count = 20
    at: dict[int, str | None] = dict.fromkeys(range(count), None)
    order = list(range(count))
    moved = 0
    for _ in range(5):
        chunks = views(at)
        held = sum(tier == "cpu" for tier in at.values())
        room = {"gpu": 0, "cpu": extents - held, "nvme": count}
        plan = plan_step(order, order[::-1], chunks, room, LINE)
        at = replay(plan, chunks, room)
        moved = sum(move.source is not None for move in plan.moves)
        order.reverse()
    assert moved == 2 * max(0, count - extents)


def test_the_first_step_reads_nothing() -> None:
    chunks = views(dict.fromkeys(range(20)))
    plan = plan_step(range(20), range(19, -1, -1), chunks, {"gpu": 0, "cpu": 8, "nvme": 20}, LINE)
    counts = plan.counts()
    assert counts[None, "cpu"] == 20
    assert counts["nvme", "cpu"] == 0
    assert counts["cpu", "nvme"] == 12


def test_fixed_order_ends_with_the_next_steps_first_chunks_in_flight() -> None:
    chunks = views({chunk: "cpu" if chunk < 4 else "nvme" for chunk in range(20)})
    plan = plan_step(range(20), range(20), chunks, {"gpu": 0, "cpu": 0, "nvme": 20}, LINE)
    at = replay(plan, chunks, {"gpu": 0, "cpu": 0, "nvme": 20})
    assert [chunk for chunk, tier in at.items() if tier == "cpu"] == [0, 1, 2, 3]


def test_chunks_at_home_in_cpu_never_leave() -> None:
    chunks = views(dict.fromkeys(range(20), "nvme")) | {5: ChunkView("cpu", "cpu", "cpu")}
    plan = plan_step(range(20), range(20), chunks, {"gpu": 0, "cpu": 3, "nvme": 1}, LINE)
    assert all(move.chunk != 5 for move in plan.moves)


def test_prefetch_runs_ahead_of_the_update_as_far_as_there_is_room() -> None:
    chunks = views(dict.fromkeys(range(10), "nvme"))
    plan = plan_step(range(10), (), chunks, {"gpu": 0, "cpu": 4, "nvme": 0}, LINE)
    first_update = next(n for n, action in enumerate(plan.actions) if not isinstance(action, Move))
    assert [str(action) for action in plan.actions[:first_update]] == [
        f"prefetch   chunk {chunk}: nvme -> cpu" for chunk in range(4)
    ]


def test_device_chunks_pass_through_cpu_both_ways() -> None:
    chunks = views(dict.fromkeys(range(12), "nvme"), compute="gpu")
    room = {"gpu": 3, "cpu": 3, "nvme": 0}
    plan = plan_step(range(12), range(11, -1, -1), chunks, room, LINE)
    at = replay(plan, chunks, room)
    assert sum(tier == "gpu" for tier in at.values()) == 3
    assert {move.reason for move in plan.moves} == {Reason.PREFETCH, Reason.WRITE_BACK}


def test_a_plan_that_cannot_be_met_names_the_setting() -> None:
    chunks = views({0: "nvme", 1: "cpu"}) | {1: ChunkView("cpu", "cpu", "cpu")}
    with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity"):
        plan_step([0], (), chunks, {"gpu": 0, "cpu": 0, "nvme": 1}, LINE)


def test_fetch_takes_only_room_that_no_wanted_chunk_needs() -> None:
    chunks = views({0: "cpu", 1: "nvme", 2: "nvme", 3: "cpu"})
    plan = plan_fetch([0, 1, 2], chunks, {"gpu": 0, "cpu": 0, "nvme": 2}, LINE)
    assert [str(move) for move in plan.moves] == ["write-back chunk 3: cpu -> nvme", "prefetch   chunk 1: nvme -> cpu"]


def test_eviction_goes_all_the_way_home() -> None:
    chunks = views({0: "gpu", 1: "nvme"}, compute="gpu")
    plan = plan_eviction([0, 1], chunks, {"gpu": 0, "cpu": 1, "nvme": 1}, LINE)
    assert [(move.source, move.destination) for move in plan.moves] == [("gpu", "cpu"), ("cpu", "nvme")]


def test_a_change_of_home_moves_up_what_would_lie_in_a_slower_tier() -> None:
    """The others become guests where they are; a chunk moves up once there is room, whoever has to make it."""
    chunks = {
        0: ChunkView("nvme", "nvme", "cpu"),
        1: ChunkView("cpu", "cpu", "cpu"),
        2: ChunkView(None, "nvme", "cpu"),
        3: ChunkView("cpu", "nvme", "cpu"),
    }
    homes = {0: "cpu", 1: "nvme", 2: "cpu"}
    plan = plan_homes(homes, chunks, {"gpu": 0, "cpu": 0, "nvme": 2}, LINE)
    assert [str(move) for move in plan.moves] == ["write-back chunk 1: cpu -> nvme", "promote    chunk 0: nvme -> cpu"]


def test_homes_cannot_change_without_room_to_rearrange_chunks_in() -> None:
    chunks = {0: ChunkView("nvme", "nvme", "cpu"), 1: ChunkView("cpu", "cpu", "cpu")}
    with pytest.raises(CapacityError, match="chunk 0 cannot enter tier cpu"):
        plan_homes({0: "cpu", 1: "nvme"}, chunks, {"gpu": 0, "cpu": 0, "nvme": 0}, LINE)


def test_eviction_that_finds_no_room_is_refused() -> None:
    chunks = {0: ChunkView("gpu", "nvme", "gpu"), 1: ChunkView("cpu", "cpu", "cpu")}
    with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity"):
        plan_eviction([0], chunks, {"gpu": 0, "cpu": 0, "nvme": 1}, LINE)


def test_a_fresh_chunk_is_not_evicted() -> None:
    assert plan_eviction([0], views({0: None}), {"gpu": 0, "cpu": 1, "nvme": 1}, LINE).actions == ()


def test_a_place_kept_too_early_is_given_up_again() -> None:
    """Chunk 1 is to be made after chunk 0 was used, which needs the only extent first."""
    chunks = views({0: "nvme", 1: None})
    plan = plan_step([0, 1], (), chunks, {"gpu": 0, "cpu": 1, "nvme": 1}, LINE)
    assert [str(action) for action in plan.actions] == [
        "prefetch   chunk 0: nvme -> cpu",
        "update     chunk 0",
        "write-back chunk 0: cpu -> nvme",
        "fresh      chunk 1: nowhere -> cpu",
        "update     chunk 1",
    ]
    assert str(plan).splitlines() == [str(action) for action in plan.actions]


# -- bytes ------------------------------------------------------------------------------------------------------


def steady_moves(
    homes: Sequence[str], extents: Mapping[str, int], *, compute: str, is_alternating: bool
) -> Counter[tuple[str | None, str]]:
    """Moves of the last of some steps, all chunks being used in each, by (source, destination)."""
    at: dict[int, str | None] = dict.fromkeys(range(len(homes)), None)
    order = list(at)
    for _ in range(6):
        chunks = {chunk: ChunkView(tier, homes[chunk], compute) for chunk, tier in at.items()}
        held = Counter(at.values())
        room = {tier: extents.get(tier, 0) - held[tier] for tier in LINE}
        upcoming = order[::-1] if is_alternating else order
        plan = plan_step(order, upcoming, chunks, room, LINE)
        at = replay(plan, chunks, room)
        order = upcoming
    return plan.counts()


@pytest.mark.parametrize("pool", [1, 3, 8])
@pytest.mark.parametrize(("count", "pinned"), [(20, 0), (20, 1), (20, 7), (20, 19), (20, 20), (82, 16)])
def test_fixed_order_moves_nothing_that_has_its_home_in_cpu(count: int, pinned: int, pool: int) -> None:
    """2 (M - K) moves for K homes in cpu, which is the bound, however small the pool beside them."""
    homes = ["cpu" if is_pinned else "nvme" for is_pinned in spread(pinned, count)]
    moves = steady_moves(homes, {"cpu": pinned + pool, "nvme": count}, compute="cpu", is_alternating=False)
    retained = count - pinned if count - pinned <= pool else 0
    assert moves["nvme", "cpu"] == moves["cpu", "nvme"] == count - pinned - retained


@pytest.mark.parametrize(("pinned", "pool"), [(0, 16), (8, 8), (13, 3), (15, 1)])
def test_alternating_order_moves_as_little_with_homes_in_cpu_as_with_one_pool(pinned: int, pool: int) -> None:
    homes = ["cpu" if is_pinned else "nvme" for is_pinned in spread(pinned, 82)]
    moves = steady_moves(homes, {"cpu": pinned + pool, "nvme": 82}, compute="cpu", is_alternating=True)
    assert sum(moves.values()) == 2 * (82 - 16)


@pytest.mark.parametrize(("gpu", "cpu"), [(3, 3), (4, 8), (8, 8), (8, 30)])
def test_device_chunks_move_near_the_bound_over_both_links(gpu: int, cpu: int) -> None:
    """2 (M - g) over the link to the device, 2 (M - g - c) over that to the files, and what is in passing."""
    moves = steady_moves(["nvme"] * 60, {"gpu": gpu, "cpu": cpu, "nvme": 60}, compute="gpu", is_alternating=True)
    device_link = moves["cpu", "gpu"] + moves["gpu", "cpu"]
    file_link = moves["nvme", "cpu"] + moves["cpu", "nvme"]
    assert 2 * (60 - gpu) <= device_link <= 2 * (60 - gpu) + 2 * ENOUGH_EXTENTS
    assert 2 * (60 - gpu - cpu) <= file_link <= 2 * (60 - gpu - cpu) + 2 * ENOUGH_EXTENTS + TRANSIT_EXTENTS


@pytest.mark.parametrize("gpu", [3, 6, 9, 12, 15, 18, 21])
def test_device_chunks_move_near_the_bound_whatever_the_sizes_of_both_tiers(gpu: int) -> None:
    """Chunks that fit the device stay there, and those that fit the host beside what is in passing go no further."""
    for cpu in range(3, 25 - gpu, 3):
        moves = steady_moves(["nvme"] * 24, {"gpu": gpu, "cpu": cpu, "nvme": 24}, compute="gpu", is_alternating=True)
        assert moves["cpu", "gpu"] + moves["gpu", "cpu"] <= 2 * (24 - gpu) + 2 * ENOUGH_EXTENTS
        in_passing = 2 * ENOUGH_EXTENTS + TRANSIT_EXTENTS
        assert moves["nvme", "cpu"] + moves["cpu", "nvme"] <= 2 * (24 - gpu - cpu) + in_passing


@pytest.mark.parametrize(("before", "after"), [(6, 12), (12, 6), (4, 20), (20, 4), (8, 24), (24, 8)])
@pytest.mark.parametrize("order", ["alternating", "fixed"])
def test_the_second_step_after_a_resize_moves_no_more_than_the_new_size_makes_necessary(
    order: str, before: int, after: int
) -> None:
    """The first one adapts; of the extents all but eight count in fixed order, where they are homes."""
    simulation = Simulation({"cpu": before, "nvme": 24}, order, seed=before)
    simulation.add(["cpu"] * 24)

    def step() -> int:
        moved = sum(route.moves for route in simulation.store.stats().routes.values())
        chunks = list(range(24))[:: -1 if order == "alternating" and len(steps) % 2 else 1]
        simulation.step(chunks, chunks[::-1] if order == "alternating" else chunks)
        simulation.settle()
        steps.append(sum(route.moves for route in simulation.store.stats().routes.values()) - moved)
        return steps[-1]

    steps: list[int] = []
    for _ in range(3):
        step()
    simulation.store.resize_tier("cpu", after)
    step()
    kept = after if order == "alternating" else max(0, after - PIPELINE_EXTENTS)
    assert step() <= 2 * (24 - kept)


@pytest.mark.parametrize("extents", [3, 8, 16, 19])
def test_chunks_visited_twice_in_a_step_are_kept_for_the_second_visit(extents: int) -> None:
    """There and back within a step, then the same again: what any schedule must move is 2 (M - n) for each turn."""
    count, moved = 20, 0
    at: dict[int, str | None] = dict.fromkeys(range(count), None)
    order = [*range(count), *reversed(range(count - 1))]
    for _ in range(4):
        chunks = views(at)
        held = sum(tier == "cpu" for tier in at.values())
        room = {"gpu": 0, "cpu": extents - held, "nvme": count}
        plan = plan_step(order, range(count), chunks, room, LINE)
        at = replay(plan, chunks, room)
        moved = sum(move.source is not None for move in plan.moves)
    assert moved == 4 * (count - extents)


# -- soundness --------------------------------------------------------------------------------------------------


class RandomState:
    """Chunks anywhere between where they are used and their homes, in tiers no larger than placement asks for."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        computes = self.chance.choice([("gpu",), ("cpu",), ("gpu", "cpu")])
        self.needs = {chunk: Need(self.chance.choice(computes)) for chunk in range(self.chance.randint(1, 16))}
        self.homes = self.draw_homes()
        self.extents = self.least(self.homes)
        for tier in LINE:
            self.extents[tier] += self.chance.choice([0, 0, 0, 1, 2, 5])
        self.at = self.draw_places()

    def draw_homes(self) -> dict[int, str]:
        slowest = self.chance.choice(LINE[1:])
        return {
            chunk: self.chance.choice([*between(need.compute, slowest), slowest]) for chunk, need in self.needs.items()
        }

    def least(self, homes: Mapping[int, str]) -> Counter[str]:
        return Counter(homes.values()) + Counter(pipeline_needs(list(self.needs.values()), list(homes.values())))

    def draw_places(self) -> dict[int, str | None]:
        at: dict[int, str | None] = {}
        room = Counter(self.extents)
        for chunk in self.chance.sample(sorted(self.needs), len(self.needs)):
            home = self.homes[chunk]
            fitting = [tier for tier in between(self.needs[chunk].compute, home) if room[tier]]
            places = [tier for tier in fitting if tier == home or self.chance.random() < 0.8]
            at[chunk] = self.chance.choice(places) if places and self.chance.random() < 0.9 else None
            room[at[chunk] or ""] -= 1
        return at

    @property
    def chunks(self) -> dict[int, ChunkView]:
        return {chunk: ChunkView(self.at[chunk], self.homes[chunk], need.compute) for chunk, need in self.needs.items()}

    @property
    def room(self) -> dict[str, int]:
        held = Counter(self.at.values())
        return {tier: self.extents[tier] - held[tier] for tier in LINE}

    def some(self) -> list[int]:
        return self.chance.sample(sorted(self.needs), self.chance.randint(0, len(self.needs)))


def between(compute: str, home: str) -> list[str]:
    return list(LINE[LINE.index(compute) : LINE.index(home) + 1])


def plan_from(seed: int) -> None:
    """Make one of each plan from a random state. None is refused, and each can be issued in its order."""
    state = RandomState(seed)
    order, upcoming = state.some(), state.some()
    if state.chance.random() < 0.3:  # some come twice
        order += [chunk for chunk in reversed(order) if state.chance.random() < 0.6]
    step = plan_step(order, upcoming, state.chunks, state.room, LINE)
    assert [action.chunk for action in step.actions if isinstance(action, Update)] == order
    check_between(state, replay(step, state.chunks, state.room))
    wanted = [chunk for chunk in state.some() if state.at[chunk] is not None]
    check_between(state, replay(plan_fetch(wanted, state.chunks, state.room, LINE), state.chunks, state.room))
    unwanted = state.some()
    at = replay(plan_eviction(unwanted, state.chunks, state.room, LINE), state.chunks, state.room)
    assert all(at[chunk] in (None, state.homes[chunk]) for chunk in unwanted)
    homes = state.draw_homes()
    if not state.least(homes) - state.extents:
        rearrange(state, homes)


def rearrange(state: RandomState, homes: Mapping[int, str]) -> None:
    """Change homes. Where chunks only move up, or only become guests, there is always room to."""
    changed = {chunk: home for chunk, home in homes.items() if home != state.homes[chunk]}
    is_up = [LINE.index(home) < LINE.index(state.homes[chunk]) for chunk, home in changed.items()]
    try:
        plan = plan_homes(changed, state.chunks, state.room, LINE)
    except CapacityError:
        assert any(is_up) and not all(is_up)
        return
    at = replay(plan, state.chunks, state.room)
    for chunk, tier in at.items():
        assert tier is None or LINE.index(tier) <= LINE.index(homes[chunk])


def check_between(state: RandomState, at: Mapping[int, str | None]) -> None:
    for chunk, tier in at.items():
        assert tier is None or tier in between(state.needs[chunk].compute, state.homes[chunk])


@pytest.mark.parametrize("block", range(10))
def test_three_extents_besides_homes_are_enough_for_any_plan_from_any_state(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        plan_from(seed)


def test_planning_takes_time_in_proportion_to_the_chunks() -> None:
    """A first step over three tiers once took 23 s for 25,000 chunks: each eviction looked at all of them again."""
    assert calls_to_plan(4000) < 4.5 * calls_to_plan(1000)


def calls_to_plan(count: int) -> int:
    """Calls that planning a first step makes."""
    chunks = views(dict.fromkeys(range(count)), compute="gpu")
    room = {"gpu": 100, "cpu": 100, "nvme": count}
    return calls_of(lambda: plan_step(range(count), range(count), chunks, room, LINE))


@pytest.mark.long
def test_two_hundred_thousand_chunks_are_planned_in_seconds() -> None:
    count = 200_000
    chunks = views(dict.fromkeys(range(count)), compute="gpu")
    began = time.process_time()  # this process's own, whatever else the machine does
    plan_step(range(count), range(count), chunks, {"gpu": 1000, "cpu": 1000, "nvme": count}, LINE)
    assert time.process_time() - began < 30


# -- in a store -------------------------------------------------------------------------------------------------


def live(seeds: Sequence[int], failure_rate: float = 0.0) -> Counter[str]:
    """Let random stores live, and count what they did."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        life = RandomLife(seed, failure_rate)
        life.live(operations=12)
        seen += Counter(steps=life.steps, refusals=life.capacity_errors, failures=life.failures)
    return seen


@pytest.mark.parametrize("block", range(10))
def test_random_lives_keep_every_byte_whatever_order_moves_end_in(block: int) -> None:
    seen = live(range(block * 20, block * 20 + 20))
    assert seen["steps"] > 80
    assert seen["refusals"] > 0
    assert seen["failures"] == 0


@pytest.mark.parametrize("block", range(5))
def test_failed_moves_lose_no_byte_and_no_extent(block: int) -> None:
    """A move that fails takes those that counted on its extent with it, and nothing else."""
    seen = live(range(1000 + block * 20, 1000 + block * 20 + 20), failure_rate=0.05)
    assert seen["steps"] > 80
    assert seen["failures"] > 0


def small_store(homes: str, *, fails: Callable[[Ticket], bool] = lambda _: False, **capacity: int) -> Simulation:
    """A store with chunks used in cpu whose homes are told by letter, each of them used once."""
    names = {"c": "cpu", "n": "nvme", "?": None}
    simulation = Simulation(capacity, "fixed", seed=1, fails=fails)
    simulation.add(["cpu"] * len(homes), [names[letter] for letter in homes])
    simulation.step(range(len(homes)), range(len(homes)))
    simulation.settle()
    return simulation


def arrangement(simulation: Simulation) -> tuple[str, dict[str, int]]:
    simulation.store.check()
    simulation.verify()
    homes = "".join(simulation.store.home_of(chunk)[0] for chunk in simulation.expected)
    return homes, {name: tier.arena.capacity for name, tier in simulation.store.setup.tiers.items()}


def test_a_larger_tier_becomes_home_to_more_chunks_which_move_there_first() -> None:
    simulation = small_store("????????", cpu=4, nvme=8)
    simulation.store.send_home(range(8))
    simulation.store.resize_tier("cpu", 7)
    assert arrangement(simulation) == ("nncncncc", {"cpu": 7, "nvme": 8})
    assert [simulation.store.tier_of(chunk) for chunk in (2, 4, 6, 7)] == ["cpu"] * 4


def test_homes_and_size_stay_as_they_were_when_a_chunk_cannot_move_to_its_new_home() -> None:
    failing: set[tuple[str, str]] = set()
    simulation = small_store("????????", cpu=4, nvme=8, fails=lambda ticket: ticket.route in failing)
    simulation.store.send_home(range(8))
    simulation.settle()
    failing.add(("nvme", "cpu"))
    with pytest.raises(TransferError, match="moving chunk"):
        simulation.store.resize_tier("cpu", 7)
    assert arrangement(simulation) == ("nnnnnnnc", {"cpu": 4, "nvme": 8})
    failing.clear()
    simulation.step(range(8), range(8))


def test_a_tier_that_homes_would_not_fit_keeps_its_size() -> None:
    simulation = small_store("ccnn?", cpu=6, nvme=4)
    before = arrangement(simulation)
    with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity to at least 20,480 bytes"):
        simulation.store.resize_tier("cpu", 4)
    assert arrangement(simulation) == before


def test_a_tier_grown_in_vain_shrinks_again() -> None:
    """Chunks that should live on the larger device cannot come up through a tier that is full of leased ones."""
    simulation = Simulation({"gpu": 3, "cpu": 3, "nvme": 12}, "alternating", seed=1)
    simulation.add([*["gpu"] * 8, *["cpu"] * 3])
    simulation.step(range(11), range(10, -1, -1))
    before = arrangement(simulation)
    with contextlib.ExitStack() as held:
        for chunk in (8, 9, 10):
            held.enter_context(simulation.lease(chunk))
        with pytest.raises(CapacityError, match="cannot enter tier cpu"):
            simulation.store.resize_tier("gpu", 8)
    assert arrangement(simulation) == before
    simulation.store.resize_tier("gpu", 8)
    assert arrangement(simulation)[0] == "gggggggg" + "nnn"


def test_a_tier_can_be_resized_to_nothing_and_back() -> None:
    simulation = Simulation({"gpu": 4, "cpu": 8}, "alternating", seed=1)
    simulation.add(["cpu"] * 8)
    simulation.step(range(8), range(7, -1, -1))
    simulation.store.resize_tier("gpu", 0)
    assert arrangement(simulation)[1] == {"gpu": 0, "cpu": 8}
    simulation.store.resize_tier("gpu", 3)
    simulation.step(range(7, -1, -1), range(8))


@pytest.mark.long
def test_ten_thousand_random_lives_and_fifty_thousand_plans() -> None:
    for seed in range(10_000, 60_000):
        plan_from(seed)
    live(range(10_000, 15_000))
    live(range(20_000, 25_000), failure_rate=0.05)
