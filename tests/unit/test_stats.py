"""Counters and histograms: sums are exact, percentiles are within 5 %, a snapshot stays as it was taken."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.stats import Histogram, IoStats, Recorder, RouteStats, Stats, StepStats, TierStats

IO = IoStats(engine="threads", direct=True, paths=("/mnt/a", "/mnt/b"))
TIERS = {"cpu": TierStats(capacity_bytes=8, used_bytes=4, peak_bytes=6, chunks=2)}

durations = st.floats(-6, 3).map(lambda exponent: 10.0**exponent) | st.floats(1e-6, 1e3)


def histogram_of(seconds: list[float]) -> Histogram:
    histogram = Histogram()
    for value in seconds:
        histogram.record(value)
    return histogram


@settings(deadline=None)
@given(st.lists(durations, min_size=1, max_size=300), st.sampled_from([0, 1, 5, 25, 50, 75, 90, 95, 99, 100]))
def test_percentile_is_within_5_percent_of_numpy(seconds, q):
    expected = np.percentile(seconds, q, method="inverted_cdf")
    assert histogram_of(seconds).percentile(q) == pytest.approx(expected, rel=0.05)


@settings(deadline=None)
@given(st.lists(durations, min_size=1, max_size=50), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_are_ordered(seconds, one, other):
    histogram = histogram_of(seconds)
    assert histogram.percentile(min(one, other)) <= histogram.percentile(max(one, other))
    assert histogram.count == len(seconds)


@pytest.mark.parametrize(
    ("seconds", "nearest"), [(0.0, 1e-6), (-1.0, 1e-6), (1e-9, 1e-6), (1e6, 1e3), (float("inf"), 1e3)]
)
def test_duration_out_of_range_counts_at_the_nearer_end(seconds, nearest):
    histogram = histogram_of([seconds])
    assert histogram.count == 1
    assert histogram.percentile(50) == pytest.approx(nearest, rel=0.05)


def test_empty_histogram_answers_zero():
    assert Histogram().percentile(50) == 0.0 and Histogram().count == 0


@pytest.mark.parametrize("q", [-1, 100.1, float("nan")])
def test_percentile_outside_0_to_100_is_an_error(q):
    with pytest.raises(ValueError, match="allowed: 0 to 100"):
        histogram_of([1.0]).percentile(q)


def test_fresh_recorder_has_no_routes_and_no_steps():
    none = StepStats(0, 0.0, 0.0, 0.0, 0, 0)
    assert Recorder().snapshot(TIERS, IO) == Stats(tiers=TIERS, routes={}, step=none, last_step=none, io=IO)


moves = st.tuples(st.sampled_from(["gpu", "cpu"]), st.sampled_from(["cpu", "nvme"]), st.integers(0, 2**40), durations)


@settings(deadline=None)
@given(st.lists(moves, max_size=100))
def test_routes_are_sums_of_their_moves(moves):
    recorder = Recorder()
    for move in moves:
        recorder.record_move(*move)
    routes = recorder.snapshot(TIERS, IO).routes
    assert set(routes) == {f"{source}->{destination}" for source, destination, _, _ in moves}
    for name, route in routes.items():
        own = [move for move in moves if f"{move[0]}->{move[1]}" == name]
        seconds = [move[3] for move in own]
        assert (route.moves, route.bytes) == (len(own), sum(move[2] for move in own))
        assert route.seconds == pytest.approx(sum(seconds))
        expected_ms = np.percentile(seconds, [50, 95, 99], method="inverted_cdf") * 1e3
        assert (route.p50_ms, route.p95_ms, route.p99_ms) == pytest.approx(tuple(expected_ms), rel=0.05)


def test_steps_add_up():
    recorder = Recorder()
    recorder.record_step(StepStats(1, 0.5, 0.25, 0.125, 100, 200))
    recorder.record_step(StepStats(1, update_seconds=1.0, bytes_read=1, bytes_written=2))
    snapshot = recorder.snapshot(TIERS, IO)
    assert snapshot.step == StepStats(2, 1.5, 0.25, 0.125, 101, 202)
    assert snapshot.step.wait_seconds == 0.375
    assert snapshot.last_step == StepStats(1, 1.0, 0.0, 0.0, 1, 2)


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (StepStats(), "arithmetic"),
        (StepStats(1, update_seconds=9.0, read_wait_seconds=0.5, write_wait_seconds=0.5), "arithmetic"),
        (StepStats(1, update_seconds=9.0, read_wait_seconds=1.0, write_wait_seconds=0.9), "read"),
        (StepStats(1, update_seconds=9.0, read_wait_seconds=0.9, write_wait_seconds=1.0), "write"),
        (StepStats(1, update_seconds=9.0, read_wait_seconds=2.0, on_small_pages=True), "memory pages"),
        (StepStats(1, update_seconds=9.0, read_wait_seconds=0.5, on_small_pages=True), "arithmetic"),
    ],
)
def test_what_bound_a_step_is_what_it_waited_for(step, bound):
    assert step.bound == bound


def test_snapshot_never_changes():
    recorder, tiers = Recorder(), dict(TIERS)
    recorder.record_move("cpu", "nvme", 10, 0.001)
    snapshot = recorder.snapshot(tiers, IO)
    before = snapshot.to_dict()
    recorder.record_move("cpu", "nvme", 10, 0.001)
    recorder.record_move("nvme", "cpu", 10, 0.001)
    recorder.record_step(StepStats(1, 1.0, 1.0, 1.0, 1, 1))
    tiers.clear()
    assert snapshot.to_dict() == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.step = StepStats()  # type: ignore[misc]


def test_dict_is_what_json_gives_back():
    recorder = Recorder()
    recorder.record_move("cpu", "nvme", 10, 0.001)
    recorder.record_step(StepStats(1, 1.0, 0.5, 0.25, 10, 0))
    found = recorder.snapshot(TIERS, IO).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    tier = {"capacity_bytes": 8, "used_bytes": 4, "peak_bytes": 6, "chunks": 2, "bytes_written": 0}
    assert found["tiers"] == {"cpu": tier}
    assert list(found["routes"]["cpu->nvme"]) == [item.name for item in dataclasses.fields(RouteStats)]
    assert found["step"] == {
        "count": 1,
        "update_seconds": 1.0,
        "read_wait_seconds": 0.5,
        "write_wait_seconds": 0.25,
        "bytes_read": 10,
        "bytes_written": 0,
        "on_small_pages": False,
        "wait_seconds": 0.75,
        "bound": "read",
    }
    assert found["last_step"] == found["step"]
    assert found["io"] == {"engine": "threads", "direct": True, "paths": ["/mnt/a", "/mnt/b"]}


def test_what_was_written_to_a_tier_is_what_was_moved_there():
    recorder = Recorder()
    for route in (("gpu", "cpu", 1), ("nvme", "cpu", 2), ("cpu", "nvme", 4), ("gpu", "cpu", 8)):
        recorder.record_move(*route, 0.001)
    assert recorder.snapshot(TIERS, IO).tiers["cpu"].bytes_written == 11


def test_last_thousand_decisions_are_kept_with_the_step_and_their_number():
    recorder = Recorder()
    for number in range(1, 1201):
        recorder.decide("resize", f"cpu has {number} extents", f"{number} were asked for")
        recorder.record_step(StepStats(1))
    decisions = recorder.snapshot(TIERS, IO).decisions
    assert [decision.number for decision in decisions] == list(range(201, 1201))
    assert (decisions[-1].step, decisions[-1].what) == (1199, "cpu has 1200 extents")
    found = recorder.snapshot(TIERS, IO).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_snapshot_survives_copies():
    recorder = Recorder()
    recorder.record_move("cpu", "nvme", 10, 0.001)
    snapshot = recorder.snapshot(TIERS, IO)
    assert copy.deepcopy(snapshot) == snapshot == pickle.loads(pickle.dumps(snapshot))
