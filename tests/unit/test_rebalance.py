"""What pressure makes of tiers, as values: within watermarks and bounds, and never without room for every chunk."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import CapacityError
from tierstore.placement import LINE, Need, Room, pipeline_needs, place_homes
from tierstore.rebalance import (
    Holdings,
    Limits,
    Rebalance,
    is_called_for,
    is_over,
    is_under,
    plan_giving,
    plan_rebalance,
    plan_size,
)
from tierstore.stats import Pressure

EXTENT = 1 << 20


def limits(slabs: tuple[int, ...], **options: float) -> Limits:
    return replace(Limits(0.9, 0.7, sum(slabs), slabs, 2), **options)  # type: ignore[arg-type]


def holdings(
    chunks: int, *, spare: int = 0, nvme: int | None = None, order: str = "alternating", **slabs: tuple[int, ...]
) -> Holdings:
    """Chunks that are computed in the fastest tier, at home where placement puts them."""
    rooms = {tier: Room(sum(each)) for tier, each in slabs.items()}
    if nvme is not None:
        rooms["nvme"] = Room(nvme)
    compute = next(iter(slabs))
    homes = place_homes([Need(compute)] * chunks, rooms, order=order, extent_bytes=EXTENT)
    needs = {number: Need(compute, None, home) for number, home in enumerate(homes)}
    return Holdings(needs, rooms, {tier: limits(each) for tier, each in slabs.items()}, order, EXTENT, spare)


def used(extents: int, *, of: int = 100, stall: float | None = None) -> Pressure:
    return Pressure(extents * EXTENT, of * EXTENT, "a test", stall)


def test_over_the_high_watermark_a_tier_gives_what_leads_to_the_low_one() -> None:
    plan = plan_rebalance(holdings(40, cpu=(2,) * 10, nvme=40), {"cpu": used(37, of=40)})
    assert plan.sizes == {"cpu": 12}  # 9 extents more than 28, and no more than 8 at once
    assert set(plan.homes.values()) == {"nvme"}
    plan = plan_rebalance(holdings(40, cpu=(2,) * 3, nvme=40), {"cpu": used(37, of=40)})
    assert plan.sizes == {"cpu": 4}  # three extents are needed at least


@pytest.mark.parametrize(
    ("pressure", "size"),
    [
        (used(91), 12),  # 21 extents over the low mark, and no more than 8 at once
        (used(90), None),
        (used(70), None),
        (used(72, stall=50.0), 18),
        (used(72, stall=5.0), None),
        (used(60, stall=50.0), None),
    ],
)
def test_what_is_given_depends_on_how_far_the_low_watermark_is(pressure: Pressure, size: int | None) -> None:
    given = holdings(40, cpu=(2,) * 10, nvme=40)
    plan = plan_rebalance(given, {"cpu": pressure})
    assert plan.sizes == ({} if size is None else {"cpu": size})
    assert is_called_for({"cpu": pressure}, given.limits, {"cpu": 20}, may_grow=True) == (size is not None)


def test_under_the_low_watermark_a_tier_takes_what_leads_up_to_it() -> None:
    now = holdings(40, cpu=(4,), nvme=40)
    now = replace(now, limits={"cpu": replace(now.limits["cpu"], most=20)})
    assert plan_rebalance(now, {"cpu": used(65)}).sizes == {"cpu": 8}  # 5 extents, in slabs of 2
    assert plan_rebalance(now, {"cpu": used(20)}).sizes == {"cpu": 12}  # 8 at once
    assert plan_rebalance(now, {"cpu": used(20)}, may_grow=False).sizes == {}
    assert plan_rebalance(now, {"cpu": used(20)}, processes=20).sizes == {"cpu": 6}
    untouched = {"cpu": replace(now.limits["cpu"], untouched_bytes=47 * EXTENT)}
    assert plan_rebalance(replace(now, limits=untouched), {"cpu": used(20)}).sizes == {"cpu": 6}


def test_a_tier_grows_to_its_limit_even_by_less_than_a_slab() -> None:
    now = holdings(40, cpu=(4,), nvme=40)
    now = replace(now, limits={"cpu": replace(now.limits["cpu"], most=5)})
    assert plan_rebalance(now, {"cpu": used(20)}).sizes == {"cpu": 5}


def test_a_tier_grows_by_a_slab_though_that_is_more_than_moves_at_once() -> None:
    now = holdings(40, cpu=(4,), nvme=40)
    now = replace(now, limits={"cpu": replace(now.limits["cpu"], most=40, grows_by=12)})
    assert plan_rebalance(now, {"cpu": used(20)}).sizes == {"cpu": 16}
    assert plan_rebalance(now, {"cpu": used(59)}).sizes == {}  # 11 extents below the low mark


def test_files_grow_for_what_leaves_and_leave_room_for_eight_on_their_way() -> None:
    now = holdings(40, cpu=(4,) * 10, spare=100)
    plan = plan_rebalance(now, {"cpu": used(95)})
    assert plan.sizes == {"cpu": 32, "nvme": 16}
    assert Counter(plan.homes.values()) == {"cpu": 24, "nvme": 16}
    assert "cpu shrinks: 40 -> 32 extents" in str(plan) and "nvme grows: 0 -> 16 extents; for chunks" in str(plan)


def test_with_little_disk_fewer_are_on_their_way_and_fewer_slabs_leave() -> None:
    assert plan_rebalance(holdings(40, cpu=(4,) * 10, spare=12), {"cpu": used(95)}).sizes == {"cpu": 32, "nvme": 11}
    assert plan_rebalance(holdings(40, cpu=(4,) * 10, spare=8), {"cpu": used(95)}).sizes == {"cpu": 36, "nvme": 7}
    plan = plan_rebalance(holdings(40, cpu=(4,) * 10, spare=3), {"cpu": used(95)})
    assert plan.sizes == {} and "cpu stays: 40 extents" in str(plan) and "what is left is needed" in str(plan)


def test_ranks_share_the_host_and_each_has_a_device_of_its_own() -> None:
    now = holdings(40, gpu=(2,) * 10, cpu=(2,) * 10, nvme=60)
    over = {"gpu": used(78), "cpu": used(78)}
    over = {tier: replace(pressure, stall_percent=50.0) for tier, pressure in over.items()}
    assert plan_rebalance(now, over).sizes == {"gpu": 12, "cpu": 12}
    assert plan_rebalance(now, over, processes=8).sizes == {"gpu": 12, "cpu": 18}


def test_memory_grows_for_what_leaves_a_device_where_it_may() -> None:
    full = holdings(20, gpu=(2,) * 10, cpu=(1,))
    assert plan_rebalance(full, {"gpu": used(95)}).sizes == {}
    assert plan_rebalance(replace(full, spare_memory=30), {"gpu": used(95)}).sizes == {"gpu": 12, "cpu": 11}
    passing = replace(full, spare_memory=5, spare=30)
    assert plan_rebalance(passing, {"gpu": used(95)}).sizes == {"gpu": 12, "cpu": 6, "nvme": 13}


def test_many_chunks_with_named_homes_are_planned_at_once() -> None:
    """What is named cannot leave, and that is found out in a few tries, not in one for each chunk."""
    needs = {number: Need("cpu", "cpu", "cpu") for number in range(4000)}
    now = Holdings(needs, {"cpu": Room(4000)}, {"cpu": limits((250,) * 16)}, "alternating", EXTENT, spare=10_000)
    plan = plan_rebalance(now, {"cpu": used(95)})
    assert plan.sizes == {} and "what is left is needed" in str(plan)


def test_what_a_device_gives_weighs_on_the_host_in_the_same_plan() -> None:
    now = holdings(30, gpu=(3,) * 10, cpu=(3,) * 10, nvme=60)
    plan = plan_rebalance(now, {"gpu": used(95), "cpu": used(95)})
    assert plan.sizes == {"gpu": 24, "cpu": 24}  # three slabs are more than 8
    assert set(plan.homes.values()) == {"gpu", "nvme"}


def test_what_is_asked_for_is_given_or_refused_whole() -> None:
    now = holdings(40, cpu=(4,) * 10, spare=100)
    assert plan_giving(now, "cpu", 6, "asked for").sizes["cpu"] == 32
    with pytest.raises(CapacityError, match="41 are asked for"):
        plan_giving(now, "cpu", 41, "asked for")
    with pytest.raises(CapacityError, match="files may grow by 5 extents"):
        plan_giving(replace(now, spare=5), "cpu", 20, "asked for")
    with pytest.raises(CapacityError, match=r"raise tiers\.cpu\.capacity"):
        plan_size(replace(now, spare=0), "cpu", 20, "asked for")


pressures = st.builds(
    lambda share, total, stall: Pressure(int(share * total) * EXTENT, total * EXTENT, "drawn", stall),
    st.floats(0, 1.2),
    st.integers(1, 300),
    st.none() | st.floats(0, 100),
)


@st.composite
def stores(draw: st.DrawFn) -> Holdings:
    chunks = draw(st.integers(0, 60))
    tiers = draw(st.sampled_from([("gpu", "cpu"), ("cpu",), ("gpu",)]))
    slabs = {tier: tuple(draw(st.lists(st.integers(1, 12), max_size=12))) for tier in tiers}
    nvme = draw(st.none() | st.integers(0, 80))
    try:
        found = holdings(
            chunks,
            spare=draw(st.integers(0, 80)),
            nvme=nvme,
            order=draw(st.sampled_from(["fixed", "alternating"])),
            **slabs,
        )
    except CapacityError:
        return draw(stores())
    most = {tier: replace(each, most=sum(each.slabs) + draw(st.integers(0, 40))) for tier, each in found.limits.items()}
    return replace(found, limits=most)


@settings(max_examples=400, deadline=None)
@given(stores(), st.dictionaries(st.sampled_from(["gpu", "cpu", "nvme"]), pressures), st.integers(1, 8), st.booleans())
def test_every_plan_fits_and_stays_within_its_bounds(
    now: Holdings, pressure: dict[str, Pressure], processes: int, may_grow: bool
) -> None:
    plan = plan_rebalance(now, pressure, processes=processes, may_grow=may_grow)
    sizes = {tier: room.extents for tier, room in now.rooms.items()} | plan.sizes
    if plan.sizes:
        homes = plan.homes
        assert homes.keys() == now.needs.keys()
        counts = Counter(homes.values())
        passing = pipeline_needs(list(now.needs.values()), [homes[chunk] for chunk in now.needs])
        assert all(counts[tier] + passing.get(tier, 0) <= sizes[tier] for tier in LINE if tier in sizes)
        assert all(LINE.index(homes[chunk]) >= LINE.index(need.compute) for chunk, need in now.needs.items())
    for change in plan.changes:
        if change.tier == "nvme":
            continue
        bounds = now.limits[change.tier]
        if change.after < change.before:
            assert is_over(pressure[change.tier], bounds)
            assert change.before - change.after <= max(now.most_at_once, bounds.slabs[0])
        elif change.after > change.before:
            assert may_grow and is_under(pressure[change.tier], bounds)
            assert change.after <= bounds.most
            assert change.after - change.before <= max(now.most_at_once, bounds.grows_by)
    before = now.rooms.get("nvme", Room(0)).extents
    assert before <= sizes.get("nvme", 0) <= before + now.spare
    assert str(plan)


@settings(max_examples=200, deadline=None)
@given(stores(), st.floats(0.7, 0.9))
def test_between_the_watermarks_nothing_changes(now: Holdings, share: float) -> None:
    pressure = {tier: Pressure(int(share * (1 << 40)), 1 << 40, "drawn") for tier in now.limits}
    assert plan_rebalance(now, pressure) == Rebalance((), {c: n.home for c, n in now.needs.items() if n.home})
