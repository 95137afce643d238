"""Values of a run: intervals add up whatever is merged, rows hold every chunk once, records stay bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.history import (
    FIRST_DECISIONS,
    LAST_DECISIONS,
    Interval,
    Sample,
    halved,
    interval,
    kept,
    pressure_of,
    row_bounds,
    rows_of,
)
from tierstore.stats import Decision, IoStats, Pressure, Recorder, StepStats

NOTHING = Interval(0.0, 0, 0.0, 0.0, 0.0, {})
IO = IoStats("threads", True, ())


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 100))
def test_rows_hold_every_chunk_once_and_are_of_one_length_but_for_one(chunks, most):
    bounds = row_bounds(chunks, most)
    assert [position for row in bounds for position in row] == list(range(chunks))
    assert len(bounds) <= most and len({len(row) for row in bounds}) <= 2


def test_rows_count_their_chunks_by_tier():
    tiers = ["gpu", "gpu", "nvme", None]
    assert rows_of(tiers, row_bounds(4, 2)) == ({"gpu": 2}, {"nvme": 1, "none": 1})


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.dictionaries(st.sampled_from("abc"), st.integers(1, 99))), max_size=40))
def test_halving_keeps_every_sum_and_the_later_states(parts):
    samples = [
        Sample(float(n), 10 * n, Interval(float(k), k, k, 2 * k, 3 * k, moved, k, 5 * k), {"cpu": n}, ({"cpu": n},))
        for n, (k, moved) in enumerate(parts)
    ]
    found = halved(samples)
    assert len(found) == (len(samples) + 1) // 2
    assert sum((one.interval for one in found), NOTHING) == sum((one.interval for one in samples), NOTHING)
    assert [(one.seconds, one.step, one.rows) for one in found] == [
        (one.seconds, one.step, one.rows) for one in [*samples[1::2], *samples[len(samples) - len(samples) % 2 :]]
    ]


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["gpu", "cpu"]), st.floats(0, 1)), min_size=1, max_size=40))
def test_merged_samples_keep_the_later_pressure_and_the_highest(shares):
    merged = [Sample(float(n), n, NOTHING, {}, (), now, now) for n, now in enumerate(shares)]
    while len(merged) > 1:
        merged = halved(merged)
    tiers = {tier for now in shares for tier in now}
    assert merged[0].pressure == shares[-1]
    assert merged[0].most_pressure == {tier: max(now.get(tier, 0.0) for now in shares) for tier in tiers}


def test_interval_is_what_lies_between_two_snapshots():
    recorder = Recorder()
    recorder.record_move("cpu", "nvme", 100, 0.1)
    recorder.record_step(StepStats(1, 1.0, 0.5, 0.25))
    recorder.spilled, recorder.promoted = 5, 2
    before = recorder.snapshot({}, IO)
    recorder.spilled, recorder.promoted = 8, 6
    recorder.record_move("cpu", "nvme", 40, 0.1)
    recorder.record_move("nvme", "cpu", 60, 0.1)
    recorder.record_step(StepStats(1, 2.0, 0.5, 0.0))
    found = interval(before, recorder.snapshot({}, IO), 4.0)
    assert found == Interval(4.0, 1, 2.0, 0.5, 0.0, {"cpu->nvme": 40, "nvme->cpu": 60}, spilled=3, promoted=4)
    assert found.bytes_per_second == {"cpu->nvme": 10.0, "nvme->cpu": 15.0}
    assert found.step_stats.bound == "read"


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=8))
def test_first_and_last_decisions_are_kept(amounts):
    first, last, number = [], [], 0
    for amount in amounts:
        new = [Decision(number + n, 0, 0.0, "core", "", "") for n in range(1, amount + 1)]
        number += amount
        first, last = kept(first, last, new)
    numbers = list(range(1, number + 1))
    assert [one.number for one in first] == numbers[:FIRST_DECISIONS]
    assert [one.number for one in last] == numbers[FIRST_DECISIONS:][-LAST_DECISIONS:]
    assert Counter(len(part) > most for part, most in ((first, FIRST_DECISIONS), (last, LAST_DECISIONS)))[True] == 0


def test_pressure_of_a_moment_is_by_tier_and_only_what_was_measured():
    recorder = Recorder()
    assert pressure_of(recorder.snapshot({}, IO)) == {}
    recorder.pressure["cpu"] = Pressure(1 << 30, 3 << 30, "the machine's memory")
    assert pressure_of(recorder.snapshot({}, IO)) == {"cpu": 0.3333}
