"""Homes by tables; automatic sizes; and that every refusal names the numbers with which it would have passed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import CapacityError
from tierstore.placement import (
    ENOUGH_EXTENTS,
    LINE,
    MIB,
    Asked,
    Need,
    Room,
    auto_chunk_bytes,
    even_chunk_bytes,
    pipeline_needs,
    place_homes,
    size_tiers,
    spread,
    tiers_that_hold,
    whole_pages,
    with_choice,
)

EXTENT_BYTES = 4096


def place(needs: Sequence[Need], order: str = "alternating", **extents: int | Room) -> list[str]:
    rooms = {tier: room if isinstance(room, Room) else Room(room) for tier, room in extents.items()}
    return place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)


def on(compute: str, count: int, named: str | None = None, home: str | None = None) -> list[Need]:
    return [Need(compute, named, home)] * count


def letters(homes: Sequence[str]) -> str:
    return "".join(home[0] for home in homes)


# -- homes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["alternating", "fixed"])
def test_cpu_alone_is_home_to_all(order: str) -> None:
    assert letters(place(on("cpu", 5), order, cpu=5)) == "ccccc"


@pytest.mark.parametrize(
    ("cpu", "nvme", "homes"),
    [
        (4, 8, "nnnnnnnn"),
        (20, 8, "nnnnnnnn"),  # the cpu tier is one pool, however large
        (7, 4, "ncncncnc"),  # what has no room in nvme, spread
        (8, 0, "cccccccc"),
    ],
)
def test_alternating_order_has_homes_in_nvme_as_far_as_it_has_room(cpu: int, nvme: int, homes: str) -> None:
    assert letters(place(on("cpu", 8), "alternating", cpu=cpu, nvme=nvme)) == homes


@pytest.mark.parametrize(
    ("cpu", "nvme", "homes"),
    [
        (3, 12, "nnnnnnnnnnnn"),
        (6, 12, "nnncnnncnnnc"),
        (10, 12, "nncncnncncnc"),
        (12, 12, "cccccccccccc"),  # nothing passes through
        (7, 8, "nncnncnncnnc"),  # more than is left over from the pipeline, because nvme has no more
    ],
)
def test_fixed_order_spreads_homes_over_cpu_and_leaves_a_pipeline(cpu: int, nvme: int, homes: str) -> None:
    assert letters(place(on("cpu", 12), "fixed", cpu=cpu, nvme=nvme)) == homes


def test_named_chunks_live_where_they_were_told_to() -> None:
    needs = [*on("cpu", 2), *on("cpu", 1, "cpu"), *on("gpu", 1, "nvme"), *on("gpu", 1, "cpu"), *on("gpu", 1, "gpu")]
    assert letters(place(needs, gpu=4, cpu=8, nvme=8)) == "nncncg"


@pytest.mark.parametrize(
    ("gpu", "homes"),
    [
        (8, "gggggggg"),  # all fit: nothing passes
        (7, "ngngngng"),  # else three stay free for those that pass
        (4, "nnnnnnng"),
        (3, "nnnnnnnn"),
    ],
)
def test_device_chunks_live_on_the_device_as_far_as_it_has_room(gpu: int, homes: str) -> None:
    assert letters(place(on("gpu", 8), gpu=gpu, cpu=3, nvme=8)) == homes


def test_the_device_keeps_a_pipeline_for_those_told_to_live_elsewhere() -> None:
    assert letters(place([*on("gpu", 4), *on("gpu", 3, "cpu")], gpu=5, cpu=5, nvme=4)) == "ngngccc"


def test_device_alone_is_home_to_all_it_has_room_for() -> None:
    staging = Room(3, homes=False)
    assert letters(place(on("gpu", 5), gpu=5, cpu=staging)) == "ggggg"
    with pytest.raises(CapacityError, match=r"tiers\.gpu\.capacity to at least 20,480 bytes, or add the nvme tier"):
        place(on("gpu", 5), gpu=4, cpu=staging)


@pytest.mark.parametrize(
    ("needs", "rooms", "extent_bytes", "others"),
    [
        (on("cpu", 4), {"cpu": 3}, 1 << 20, ", or add the nvme tier"),
        (on("cpu", 4), {"cpu": 1, "nvme": 8}, 1 << 20, ", or lower chunk_size"),
        (on("cpu", 4), {"cpu": 1, "nvme": 8}, 16 << 10, ""),  # none is smaller
        (on("cpu", 4), {"cpu": 3, "nvme": 0}, 1 << 20, ""),
        (
            on("cpu", 4, "cpu"),
            {"cpu": 3, "nvme": 8},
            1 << 20,
            ", or name those tiers for fewer parameters (placement, or a group's tier)",
        ),
    ],
)
def test_a_refusal_offers_only_what_helps(
    needs: list[Need], rooms: dict[str, int], extent_bytes: int, others: str
) -> None:
    with pytest.raises(CapacityError) as raised:
        place_homes(
            needs,
            {tier: Room(extents) for tier, extents in rooms.items()},
            order="alternating",
            extent_bytes=extent_bytes,
        )
    assert re.fullmatch(rf".*: raise .* to at least [\d,]+ bytes{re.escape(others)}", str(raised.value))


def test_no_home_is_in_a_tier_for_staging() -> None:
    staging = Room(3, homes=False)
    for order in ("alternating", "fixed"):
        assert letters(place([*on("gpu", 5), *on("cpu", 2)], order, gpu=4, cpu=staging, nvme=8)) == "nnnngnn"


def test_a_chunk_used_in_cpu_never_lives_on_the_device() -> None:
    """A tier set of the device alone has nowhere to keep what is computed on the CPU."""
    with pytest.raises(CapacityError, match=r"cpu holds 3 extents .* staging only, but 2 chunks need a home there"):
        place(on("cpu", 2), gpu=8, cpu=Room(3, homes=False))


def test_a_tier_that_is_not_there_has_no_room() -> None:
    with pytest.raises(CapacityError, match=r"nvme holds 0 extents .* raise tiers.nvme.capacity to at least 4,096"):
        place(on("cpu", 1, "nvme"), cpu=8)


def test_no_chunks_need_no_room() -> None:
    assert place([], cpu=0, nvme=0) == []


# -- homes there are --------------------------------------------------------------------------------------------


def test_a_chunk_keeps_its_home_when_others_come() -> None:
    """Spreading anew would change the homes of chunks that have bytes elsewhere."""
    before = place(on("cpu", 12), "fixed", cpu=8, nvme=20)
    needs = [*(Need("cpu", None, home) for home in before), *on("cpu", 3)]
    after = place(needs, "fixed", cpu=8, nvme=20)
    assert after[:12] == before
    assert place(on("cpu", 15), "fixed", cpu=8, nvme=20)[:12] != before


def test_only_homes_in_the_tier_that_became_too_small_are_chosen_anew() -> None:
    needs = [*on("gpu", 4, home="gpu"), *on("cpu", 4, home="nvme"), *on("gpu", 2, home="cpu")]
    assert letters(place(needs, gpu=5, cpu=5, nvme=8)) == "ngngnnnncc"


def test_all_homes_are_chosen_anew_when_nothing_less_helps() -> None:
    """The cpu tier shrank and nvme is full, but two chunks there could live on the device."""
    needs = [*on("gpu", 2, home="nvme"), *on("cpu", 2, home="cpu")]
    assert letters(place(needs, gpu=2, cpu=3, nvme=2)) == "ggnn"


def test_a_name_beats_the_home_there_is() -> None:
    assert place(on("cpu", 1, "nvme", home="cpu"), cpu=3, nvme=1) == ["nvme"]


# -- what else --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extents", "paths", "wanted"),
    [(0, 2, 0), (100, 1, 100), (10, 2, 12), (64, 2, 72), (1000, 2, 1016), (1000, 8, 1064)],
)
def test_several_paths_get_extents_to_choose_from(extents: int, paths: int, wanted: int) -> None:
    assert with_choice(Room(extents), paths) == Room(wanted)


@pytest.mark.parametrize(("count", "total", "marks"), [(0, 3, "..."), (2, 4, ".x.x"), (3, 3, "xxx"), (1, 5, "....x")])
def test_spread(count: int, total: int, marks: str) -> None:
    assert "".join(".x"[mark] for mark in spread(count, total)) == marks


@given(st.integers(1, 200), st.data())
def test_spread_marks_exactly_so_many_evenly(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    marks = spread(count, total)
    assert sum(marks) == count
    for length in range(1, total + 1):
        assert abs(sum(marks[:length]) - count * length / total) < 1


@pytest.mark.parametrize(
    ("needs", "homes", "extents"),
    [
        (on("cpu", 2), ["nvme"] * 2, {"cpu": 2}),
        (on("cpu", 9), ["nvme"] * 9, {"cpu": 3}),
        (on("gpu", 1), ["nvme"], {"gpu": 1, "cpu": 1}),
        (on("gpu", 1), ["gpu"], {}),
        ([*on("gpu", 2), *on("cpu", 2)], ["cpu", "nvme", "nvme", "cpu"], {"gpu": 2, "cpu": 2}),
    ],
)
def test_chunks_pass_through_every_tier_from_where_they_are_used_to_their_home(
    needs: list[Need], homes: list[str], extents: dict[str, int]
) -> None:
    assert pipeline_needs(needs, homes) == extents


@pytest.mark.parametrize(
    ("state_bytes", "compute_bytes", "chunk_bytes"),
    [
        (10**12, None, 64 * MIB),
        (10**12, 256 * MIB, 16 * MIB),
        (10**12, 100 * MIB, 6 * MIB),
        (20 * MIB, 100 * MIB, 20 * MIB // 16 // 4096 * 4096),
        (0, None, 1 << 14),
        (10**6, 0, 1 << 14),
    ],
)
def test_chunks_are_as_large_as_leaves_sixteen_where_they_are_used(
    state_bytes: int, compute_bytes: int | None, chunk_bytes: int
) -> None:
    assert auto_chunk_bytes(state_bytes, compute_bytes) == chunk_bytes


@pytest.mark.parametrize(
    ("state_bytes", "chunk_bytes"), [(10**12, 64 * MIB), (20 * MIB, 16 * MIB), (8 * MIB, 8 * MIB), (0, 1 << 14)]
)
def test_chunks_of_state_that_stays_are_larger(state_bytes: int, chunk_bytes: int) -> None:
    assert auto_chunk_bytes(state_bytes, None, stays=True) == chunk_bytes


@pytest.mark.parametrize(
    ("state_bytes", "chunk_bytes"),
    [
        (20 * MIB, 22 * MIB),
        (62 * MIB, 64 * MIB),
        (64 * MIB, 34 * MIB),
        (256 * MIB, 54 * MIB),
        (62 * 10**3 * MIB, 64 * MIB),
    ],
)
def test_state_of_one_class_that_stays_is_cut_evenly_into_the_fewest_chunks(state_bytes: int, chunk_bytes: int) -> None:
    assert even_chunk_bytes(state_bytes) == chunk_bytes


@pytest.mark.parametrize(("asked", "given_bytes"), [(4096, 4096), (8191, 4096), (3 * MIB, 2 * MIB), (2 * MIB, 2 * MIB)])
def test_chunks_are_whole_pages(asked: int, given_bytes: int) -> None:
    assert whole_pages(asked) == given_bytes


# -- automatic sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["alternating", "fixed"])
@pytest.mark.parametrize(
    ("needs", "asked", "extents"),
    [
        pytest.param(on("cpu", 9), {"cpu": Asked(None)}, {"cpu": 9}, id="cpu-takes-all"),
        pytest.param(
            on("cpu", 9), {"cpu": Asked(None), "nvme": Asked(None)}, {"cpu": 9, "nvme": 0}, id="nothing-left-over"
        ),
        pytest.param(on("gpu", 9), {"gpu": Asked(None)}, {"gpu": 9}, id="gpu-alone"),
        pytest.param([], {"gpu": Asked(None), "cpu": Asked(None)}, {"gpu": 1, "cpu": 1}, id="no-chunks"),
        pytest.param(
            on("gpu", 9),
            {"gpu": Asked(None), "cpu": Asked(None)},
            {"gpu": 4, "cpu": 8},
            id="gpu-starts-with-a-pipeline",
        ),
        pytest.param(
            on("gpu", 9),
            {"gpu": Asked(None), "cpu": Asked(None, homes=False), "nvme": Asked(None)},
            {"gpu": 4, "cpu": 8, "nvme": 8},
            id="staging",
        ),
        pytest.param(
            on("cpu", 40),
            {"cpu": Asked(None, homes=False), "nvme": Asked(None)},
            {"cpu": 8, "nvme": 40},
            id="files-alone",
        ),
        pytest.param(
            on("cpu", 4, "nvme") + on("cpu", 9),
            {"cpu": Asked(None), "nvme": Asked(None)},
            {"cpu": 13, "nvme": 13},
            id="room-for-those-told-to-live-in-files",
        ),
    ],
)
def test_auto_is_as_large_as_is_needed(
    needs: list[Need], asked: dict[str, Asked], extents: dict[str, int], order: str
) -> None:
    if order == "fixed" and "nvme" in extents and any(need.named for need in needs):
        extents = {**extents, "nvme": 6}  # cpu keeps what its pipeline leaves
    rooms = size_tiers(needs, asked, order=order)
    assert {tier: room.extents for tier, room in rooms.items()} == extents
    place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)


@pytest.mark.parametrize(("order", "nvme"), [("alternating", 20), ("fixed", 15)])
def test_cpu_takes_no_more_than_its_limit_and_nvme_the_rest(order: str, nvme: int) -> None:
    rooms = size_tiers(on("cpu", 20), {"cpu": Asked(None, limit=10), "nvme": Asked(None)}, order=order)
    assert (rooms["cpu"].extents, rooms["nvme"].extents) == (10, nvme)


needs_of = st.lists(
    st.one_of(
        st.sampled_from([Need("gpu"), Need("cpu")]),
        st.builds(Need, st.just("gpu"), st.sampled_from(LINE)),
        st.builds(Need, st.just("cpu"), st.sampled_from(LINE[1:])),
    ),
    max_size=24,
)
orders = st.sampled_from(["alternating", "fixed"])


@settings(derandomize=True, max_examples=200)
@given(needs_of, orders, st.booleans(), st.integers(0, 2))
def test_what_auto_gives_is_always_enough(needs: list[Need], order: str, has_nvme: bool, staging: int) -> None:
    tiers = LINE if has_nvme else LINE[:2]
    needs = [need for need in needs if need.named in (None, *tiers)]
    asked = {tier: Asked(None) for tier in tiers}
    if staging and has_nvme:
        asked["cpu"] = Asked(None, homes=False)
        needs = [need for need in needs if need.named != "cpu"]
    rooms = size_tiers(needs, asked, order=order)
    homes = place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)
    check_homes(needs, homes, rooms)


# -- refusals ---------------------------------------------------------------------------------------------------


def check_homes(needs: Sequence[Need], homes: Sequence[str], rooms: Mapping[str, Room]) -> None:
    """What placement promises: names are followed, every home has room, and every tier some for those that pass."""
    assert len(homes) == len(needs)
    for need, home in zip(needs, homes, strict=True):
        assert LINE.index(home) >= LINE.index(need.compute)
        assert need.named in (None, home)
        assert rooms[home].homes
    wanted, passing = Counter(homes), pipeline_needs(needs, homes)
    for tier, room in rooms.items():
        assert wanted[tier] + passing.get(tier, 0) <= room.extents


@settings(derandomize=True, max_examples=400)
@given(
    needs_of,
    orders,
    st.dictionaries(st.sampled_from(LINE), st.builds(Room, st.integers(0, 20), st.booleans()), min_size=1),
)
def test_a_refusal_names_the_numbers_with_which_it_passes(
    needs: list[Need], order: str, rooms: dict[str, Room]
) -> None:
    if "gpu" in rooms:
        rooms["gpu"] = replace(rooms["gpu"], homes=True)  # only cpu can be for staging alone
    if "nvme" in rooms:
        rooms["nvme"] = replace(rooms["nvme"], homes=True)
    try:
        homes = place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)
    except CapacityError as error:
        for tier, extents in remedies(error):
            assert extents > rooms.get(tier, Room(0)).extents or not rooms[tier].homes
            rooms[tier] = Room(extents)
        homes = place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)
    check_homes(needs, homes, rooms)


def remedies(error: CapacityError) -> list[tuple[str, int]]:
    """Tiers to be enlarged, and to how many extents, as an error's text says."""
    found = re.findall(r"tiers\.(\w+)\.capacity to at least ([\d,]+) bytes", str(error))
    assert found
    in_bytes = [(tier, int(text.replace(",", ""))) for tier, text in found]
    assert all(nbytes % EXTENT_BYTES == 0 for _, nbytes in in_bytes)
    return [(tier, nbytes // EXTENT_BYTES) for tier, nbytes in in_bytes]


@settings(derandomize=True, max_examples=400)
@given(
    needs_of,
    orders,
    st.fixed_dictionaries(
        {"cpu": st.builds(Asked, st.one_of(st.none(), st.integers(0, 20)), st.one_of(st.none(), st.integers(1, 12)))},
        optional={tier: st.builds(Asked, st.one_of(st.none(), st.integers(0, 20))) for tier in ("gpu", "nvme")},
    ),
)
def test_a_refusal_helps_where_other_tiers_size_themselves_too(
    needs: list[Need], order: str, asked: dict[str, Asked]
) -> None:
    asked = {tier: asked[tier] for tier in LINE if tier in asked}
    needs = [need for need in needs if need.compute in asked and need.named in (None, *asked)]
    try:
        rooms = size_tiers(needs, asked, order=order)
        homes = place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)
    except CapacityError as error:
        asked |= {tier: Asked(extents) for tier, extents in remedies(error)}
        rooms = size_tiers(needs, asked, order=order)
        homes = place_homes(needs, rooms, order=order, extent_bytes=EXTENT_BYTES)
    check_homes(needs, homes, rooms)


@settings(derandomize=True, max_examples=200)
@given(needs_of, needs_of, orders, st.tuples(*[st.integers(0, 40)] * 3), st.data())
def test_homes_are_kept_unless_that_would_be_refused(
    needs: list[Need], more: list[Need], order: str, extents: tuple[int, int, int], data: st.DataObject
) -> None:
    """Whatever can be placed afresh can be placed with homes to be kept; and they are, if that can be."""
    rooms = {tier: Room(count) for tier, count in zip(LINE, extents, strict=True)}
    kept = [
        replace(need, home=data.draw(st.sampled_from(LINE[LINE.index(need.compute) :]), label="home")) for need in needs
    ]
    try:
        place_homes([*needs, *more], rooms, order=order, extent_bytes=EXTENT_BYTES)
    except CapacityError:
        return
    homes = place_homes([*kept, *more], rooms, order=order, extent_bytes=EXTENT_BYTES)
    check_homes([*needs, *more], homes, rooms)
    as_names = [Need(need.compute, need.named or need.home) for need in kept]
    try:
        wanted = place_homes([*as_names, *more], rooms, order=order, extent_bytes=EXTENT_BYTES)
    except CapacityError:
        return
    assert homes == wanted


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "rooms", "wanted"),
    [
        (0, 5, {"cpu": Room(5), "nvme": Room(9)}, {"cpu"}),
        (0, 6, {"cpu": Room(5), "nvme": Room(9)}, set()),
        (0, 3, {"cpu": Room(8, homes=False), "nvme": Room(9)}, set()),  # a mere staging area keeps nothing
        (4, 5, {"gpu": Room(4), "cpu": Room(5)}, {"gpu", "cpu"}),
        (6, 5, {"gpu": Room(4), "cpu": Room(7), "nvme": Room(9)}, {"cpu"}),  # with the two that the gpu tier has not
        (6, 5, {"gpu": Room(4), "cpu": Room(6), "nvme": Room(9)}, set()),
    ],
)
def test_a_tier_holds_what_is_used_in_it_if_all_of_it_has_room(
    on_gpu: int, on_cpu: int, rooms: dict[str, Room], wanted: set[str]
) -> None:
    found = tiers_that_hold(["gpu"] * on_gpu + ["cpu"] * on_cpu, rooms)
    assert {tier for tier in found if on_gpu or tier != "gpu"} == wanted


def test_enough_extents_is_three() -> None:
    """The README and the errors say so."""
    assert ENOUGH_EXTENTS == 3
