"""What happened when: events as values, and the file that Chrome (`chrome://tracing`) and Perfetto draw them from.

A trace only collects; whoever did something says when it began and ended, on the clock of `time.perf_counter`, and from
any thread. Nothing is dropped and nothing is computed before `write`, so that being traced costs one list entry per
event, and not being traced costs the question whether there is a trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTROL = "control thread"
"""The track of whoever calls the store."""

Detail = int | float | str


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that was done on one track: what `Trace.events` lists. Times are seconds of `time.perf_counter`."""

    track: str
    name: str
    start_seconds: float
    seconds: float
    args: Mapping[str, Detail]


class Trace:
    """Events in the order in which they were reported."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def add(self, track: str, name: str, start_seconds: float, end_seconds: float, **args: Detail) -> None:
        """Report one event, from any thread; a caller may add tracks of its own."""
        self.events.append(TraceEvent(track, name, start_seconds, end_seconds - start_seconds, args))

    def to_chrome(self) -> dict[str, Any]:
        """Answer the events in the Trace Event Format: complete events, in microseconds from the first one on.

        A track whose events overlap without one being within the other takes as many rows as it needs.
        """
        events = list(self.events)
        first = min((event.start_seconds for event in events), default=0.0)
        found: list[dict[str, Any]] = []
        thread = 0
        for track in dict.fromkeys(event.track for event in events):
            rows = _rows([event for event in events if event.track == track])
            for number, row in enumerate(rows, 1):
                thread += 1
                where = {"pid": 1, "tid": thread}
                title = track if len(rows) == 1 else f"{track} ({number})"
                found.append({"ph": "M", "name": "thread_name", **where, "args": {"name": title}})
                found.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}})
                found += [_complete(event, first) | where for event in row]
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the events as JSON that chrome://tracing and ui.perfetto.dev open."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_chrome(), file)


def _complete(event: TraceEvent, first: float) -> dict[str, Any]:
    begin, length = (event.start_seconds - first) * 1e6, event.seconds * 1e6
    return {"ph": "X", "name": event.name, "cat": event.track, "ts": begin, "dur": length, "args": dict(event.args)}


def _rows(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """Deal events out to as few rows as hold them: in a row each begins after the one before, or lies within it."""
    rows: list[list[TraceEvent]] = []
    open_until: list[list[float]] = []  # of each row, the ends of the events that enclose the next one, inmost last
    for event in sorted(events, key=lambda event: (event.start_seconds, -event.seconds)):
        end = event.start_seconds + event.seconds
        for row, ends in zip(rows, open_until, strict=True):
            while ends and ends[-1] <= event.start_seconds:
                ends.pop()
            if not ends or end <= ends[-1]:
                row.append(event)
                ends.append(end)
                break
        else:
            rows.append([event])
            open_until.append([end])
    return rows
