"""Pictures and records of runs that never were, for those who show them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from tierstore.history import PICTURE_FORMAT, RECORD_FORMAT, Interval, Job, Picture, Record, Sample
from tierstore.stats import Decision, IoStats, PathStats, RouteStats, Stats, StepStats, TierStats

HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
STARTED = 1.7e9


def stats_of(*, folder: str = "/mnt/nvme0") -> Stats:
    tiers = {name: TierStats(8 << 30, 7 << 30, 8 << 30, 40, 1 << 40) for name in ("gpu", "cpu", "nvme")}
    paths = {
        folder: PathStats(8 << 30, 7 << 30, 0.5, 4.1e9, 10**12, 10**12),
        "/mnt/nvme1": PathStats(0, 0, 0.5, 0, 0, 0),
    }
    routes = {"cpu->nvme": RouteStats(10, 10**10, 5.0, 1.0, 2.0, 3.0)}
    return Stats(
        tiers, routes, StepStats(40, 20.0, 10.0, 2.0), StepStats(1), IoStats("threads", True, (folder,)), paths
    )


def decision(number: int, words: str) -> Decision:
    return Decision(number, number, STARTED + number, "room", f"room moves {words}", f"it was full {words}")


def picture_of(
    job: Job, *, time: float = STARTED + 60, ended: bool = False, words: str = "", steps: int = 2
) -> Picture:
    stats = stats_of(folder=f"/mnt/{words or 'nvme0'}")
    since = Interval(1.0, steps, 0.5, 0.2, 0.1, {"cpu->nvme": 5 * 10**8} if steps else {})
    seen = Stats(
        *(getattr(stats, name) for name in ("tiers", "routes", "step", "last_step", "io", "paths")),
        (decision(1, words),),
    )
    return Picture(PICTURE_FORMAT, "0.1.0", job, time, 40, ended, since, seen)


def record_of(*, samples: int = 60, words: str = "here", decisions: int = 3) -> Record:
    """A run whose chunks come down from gpu to nvme, with waves of waiting."""
    columns = []
    for number in range(samples):
        edge = number * 24 // max(1, samples)
        rows = tuple(
            {"gpu": 4} if row < edge else {"cpu": 3, "nvme": 1} if row == edge else {"none": 4} for row in range(24)
        )
        wait = 0.3 * (1 + math.sin(number / 9))
        moved = {"cpu->nvme": int(4e9 * (1 + wait)), "nvme->cpu": int(3e9)}
        columns.append(
            Sample(2.0 * (number + 1), number + 1, Interval(2.0, 1, 1.0, wait, 0.1, moved), {"cpu": 1}, rows)
        )
    return Record(
        RECORD_FORMAT,
        "0.1.0",
        Job(f"node {words}", 4711, 0, STARTED),
        True,
        96,
        tuple(f"chunk {4 * row} (layers.{row}.{words}[0:1024])" for row in range(24)),
        tuple(columns),
        decisions,
        tuple(decision(number, words) for number in range(decisions)),
        stats_of(folder=f"/mnt/{words}"),
    )


def write(path: Path, seen: Picture | Record) -> Path:
    path.write_text(json.dumps(seen.to_dict() if isinstance(seen, Picture) else asdict(seen)))
    return path
