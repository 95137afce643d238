"""A trace: what rows its events are drawn in, and what a store reports of a step over files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tierstore.policy import TierPolicy
from tierstore.store import ChunkInfo
from tierstore.tensors import TieredStore
from tierstore.trace import Trace

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


def rows_of(*spans: tuple[float, float]) -> list[list[tuple[float, float]]]:
    trace = Trace()
    for begin, end in spans:
        trace.add("route", "copy", begin, end)
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in trace.to_chrome()["traceEvents"]:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            rows.setdefault(event["tid"], []).append((begin, begin + event["dur"] / 1e6))
    return list(rows.values())


def test_events_that_overlap_are_drawn_in_rows_of_their_own() -> None:
    assert rows_of((0, 2), (1, 3), (2, 4)) == [[(0, 2), (2, 4)], [(1, 3)]]


def test_events_within_an_event_are_drawn_in_its_row() -> None:
    assert rows_of((0, 1), (1, 2), (0, 3)) == [[(0, 3), (0, 1), (1, 2)]]


def test_rows_of_one_track_are_told_apart_by_number(tmp_path: Path) -> None:
    trace = Trace()
    for begin in (5.0, 5.5):
        trace.add("nvme->cpu", "chunk 7", begin, begin + 1, chunk=7, bytes=4096)
    trace.write(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    names = [event["args"]["name"] for event in written["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["nvme->cpu (1)", "nvme->cpu (2)"]
    first = next(event for event in written["traceEvents"] if event["ph"] == "X")
    assert first["args"] == {"chunk": 7, "bytes": 4096}
    assert (first["ts"], first["dur"]) == (0.0, 1e6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    tiers = {"cpu": {"capacity": "64KiB"}, "nvme": {"capacity": "1MiB", "paths": [str(tmp_path)]}}
    with TieredStore({"chunk_size": "16KiB", "tiers": tiers}) as store:
        store.put("value", torch.arange(32 << 10, dtype=torch.int32))
        yield store


def runs(trace: Trace) -> int:
    return sum(event.name == "run" for event in trace.events)


def test_what_happens_within_two_traces_belongs_to_both(store: TieredStore) -> None:
    """The end of the inner block was once the end of the outer one's events."""
    with store.traced() as outer:
        store.get("value")
        before = runs(outer)
        with store.traced() as inner:
            store.get("value")
        store.get("value")
    assert before > 0 and runs(inner) > 0 and runs(outer) > before + runs(inner)
    assert all(event in outer.events for event in inner.events)
    seen = len(outer.events)
    store.get("value")
    assert len(outer.events) == seen


def test_a_trace_outlives_its_store_and_hides_no_error(store: TieredStore) -> None:
    """Leaving the block of a store closed within it raised StoreClosedError, in place of what had gone wrong there."""
    trace = Trace()

    def fail_after_closing() -> None:
        nonlocal trace
        with store.traced() as trace:
            store.get("value")
            store.close()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail_after_closing()
    assert runs(trace) > 0


def test_a_traced_store_tells_of_every_move_update_and_request(tmp_path: Path) -> None:
    """A value of 12 chunks goes over 3 extents twice; 32 KiB are moved by requests of 16 KiB."""
    policy = TierPolicy.load(
        {
            "chunk_size": "32KiB",
            "tiers": {
                "gpu": {"device": "cpu", "capacity": "96KiB"},
                "cpu": {"capacity": "96KiB"},
                "nvme": {"capacity": "2MiB", "paths": [str(tmp_path)], "io": {"request_size": "16KiB"}},
            },
        }
    )
    value = torch.arange(12 * 8192, dtype=torch.int32)
    with TieredStore(policy) as store:
        store.put("value", value)
        assert torch.equal(store.get("value"), value)
        store.wait()
        before = store.stats().routes
        with store.traced() as trace:
            assert torch.equal(store.get("value"), value)
        routes = store.stats().routes
        assert torch.equal(store.get("value"), value)
    moves = {name: route.moves - before[name].moves for name, route in routes.items()}
    counts = Counter(event.track for event in trace.events)
    assert {name: counts[name] for name in routes} == moves
    assert moves["nvme->cpu"] > 6
    updates = [event.args["chunks"] for event in trace.events if event.name.startswith("update")]
    assert sorted(map(int, updates)) == list(range(-12, 0))
    workers = [event for event in trace.events if event.track.startswith("tierstore-io")]
    assert len(workers) == 2 * (moves["nvme->cpu"] + moves["cpu->nvme"])
    assert counts["tierstore-cpu-gpu"] == moves["cpu->gpu"]
    assert all(event.seconds >= 0 for event in trace.events)
    began = min(event.start_seconds for event in trace.events)
    assert all(event.start_seconds - began < 600 for event in trace.events)


def test_a_run_that_waits_to_be_ready_encloses_all_its_updates() -> None:
    """The time for which nothing was ready is no part of the step's, and of the timeline it is."""
    with TieredStore({"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "64KiB"}}}) as store:
        store.add_chunks({chunk: ChunkInfo(16 << 10, "cpu") for chunk in range(2)})
        with store.traced() as trace:
            store.run([0, 1], [0, 1], lambda *_: None, ready=lambda chunk: max(range(1 + chunk * 10**6)))
        (run,) = [event for event in trace.events if event.name == "run"]
        assert run.start_seconds == min(event.start_seconds for event in trace.events)
        assert 0 <= store.stats().last_step.update_seconds < run.seconds
