"""The planner: its bound on bytes by tables, and its soundness in a simulator with random completion orders."""

from __future__ import annotations

import random

import pytest

from tests.simulator import Simulation
from tierstore.errors import CapacityError, TransferError
from tierstore.plan import ChunkView, Move, Plan, Reason, plan_eviction, plan_fetch, plan_step

LINE = ("gpu", "cpu", "nvme")


def replay(plan: Plan, chunks: dict[int, ChunkView], room: dict[str, int]) -> dict[int, str | None]:
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


def simulate(seed: int, steps: int = 4, failure_rate: float = 0.0) -> bool:
    """Run a few steps of a random store: tiers, capacities, homes, orders, gradients missing now and then.

    False: the capacities drawn were too small, and said so before anything moved.
    """
    chance = random.Random(seed)
    simulation, order, alternates = draw(chance, seed, failure_rate)
    if simulation is None:
        return False
    for _ in range(steps):
        upcoming = order[::-1] if alternates else order
        participating = [chunk for chunk in order if chance.random() < 0.9]
        try:
            simulation.step(participating, upcoming)
        except TransferError:
            simulation.store.forgive()
        simulation.store.check()
        simulation.verify()
        order = upcoming
    while True:
        try:
            simulation.store.wait()
            break
        except TransferError:
            simulation.store.check()
    simulation.store.check()
    simulation.verify()
    return True


def draw(chance: random.Random, seed: int, failure_rate: float) -> tuple[Simulation | None, list[int], bool]:
    count = chance.randint(1, 24)
    order_kind = chance.choice(["alternating", "fixed"])
    has_gpu, has_nvme = chance.random() < 0.6, chance.random() < 0.85
    capacity = {"gpu": chance.randint(3, 10)} if has_gpu else {}
    capacity["cpu"] = chance.randint(3, 12) if has_nvme else count + 3
    if has_nvme:
        capacity["nvme"] = count + chance.randint(0, 2)
    fault = random.Random(seed + 1)
    simulation = Simulation(capacity, order_kind, seed, fails=lambda _: fault.random() < failure_rate)
    computes = [chance.choice(["gpu", "cpu"]) if has_gpu and chance.random() < 0.9 else "cpu" for _ in range(count)]
    if chance.random() < 0.5:
        computes = [computes[0]] * count
    slower = {"gpu": list(capacity), "cpu": [tier for tier in capacity if tier != "gpu"]}
    named = [chance.choice(slower[compute]) if chance.random() < 0.1 else None for compute in computes]
    try:
        simulation.add(computes, named)
    except CapacityError:
        return None, [], False
    return simulation, list(range(count)), order_kind == "alternating"


@pytest.mark.parametrize("block", range(20))
def test_random_steps_keep_every_byte_whatever_order_moves_end_in(block: int) -> None:
    assert sum(simulate(seed) for seed in range(block * 25, block * 25 + 25)) > 15


@pytest.mark.parametrize("block", range(10))
def test_failed_moves_lose_no_byte_and_no_extent(block: int) -> None:
    """A move that fails takes those that counted on its extent with it, and nothing else."""
    assert sum(simulate(seed, failure_rate=0.05) for seed in range(block * 25, block * 25 + 25)) > 15


@pytest.mark.long
def test_ten_thousand_random_simulations() -> None:
    assert sum(simulate(seed, failure_rate=seed % 2 * 0.05) for seed in range(1000, 11000)) > 6000
