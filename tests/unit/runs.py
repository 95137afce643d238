"""Pictures and records of runs that never were, for those who show them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from tierstore.history import PICTURE_FORMAT, RECORD_FORMAT, Interval, Job, Picture, Record, Sample, pressure_of
from tierstore.stats import Decision, IoStats, PathStats, Pressure, Recorder, Stats, StepStats, TierStats

HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
STARTED = 1.7e9


def stats_of(*, folder: str = "/mnt/nvme0", words: str = "here", is_measured: bool = True) -> Stats:
    """A store's statistics after 40 steps; `is_measured`: that pressure was, and chunks were moved because of it."""
    recorder = Recorder()
    for _ in range(10):
        recorder.record_move("cpu", "nvme", 10**9, 0.002)
    for step in (StepStats(39, 20.0, 10.0, 2.0), StepStats(1)):
        recorder.record_step(step)
    recorder.decide("room", f"room moves {words}", f"it was full {words}")
    if is_measured:
        recorder.pressure = pressure_at(0.9, words)
        recorder.spilled, recorder.promoted = 1500, 12
        recorder.decide("spill", f"cpu shrinks: 96 -> 48 extents {words}", f"it is at 93 %, over 85 % {words}")
    tiers = {name: TierStats(8 << 30, 7 << 30, 8 << 30, 40) for name in ("gpu", "cpu", "nvme")}
    paths = {
        folder: PathStats(8 << 30, 7 << 30, 0.5, 4.1e9, 10**12, 10**12),
        "/mnt/nvme1": PathStats(0, 0, 0.5, 0, 0, 0),
    }
    return recorder.snapshot(tiers, IoStats("threads", True, (folder,)), paths)


def pressure_at(share: float, words: str = "here") -> dict[str, Pressure]:
    """A GPU, a container and a disk; the container is as full as told, and the only one that knows of stalls."""
    return {
        "gpu": Pressure(19 << 30, 24 << 30, f"peak of the last steps {words}"),
        "cpu": Pressure(int(share * (64 << 30)), 64 << 30, f"the container's limit (cgroup v2) {words}", 12.5),
        "nvme": Pressure(400 << 30, 1 << 40, f"the filesystem of /mnt/nvme0 {words}"),
    }


def decisions_of(number: int, words: str) -> tuple[Decision, ...]:
    """As a run takes them: what was measured is too much, and after a while no more."""
    recorder = Recorder()
    kinds = ("room", "spill", "hold", "promote", "offload", "reload")
    for kind in (kinds[one % len(kinds)] for one in range(number)):
        recorder.decide(kind, f"cpu has room {words}: {kind}", f"it was full {words}")
        recorder.record_step(StepStats(1))
    return tuple(
        replace(one, time=STARTED + 100.0 * one.number / (number + 1))
        for one in recorder.snapshot({}, IoStats("threads", True, ())).decisions
    )


def picture_of(
    job: Job,
    *,
    time: float = STARTED + 60,
    ended: bool = False,
    words: str = "",
    steps: int = 2,
    is_measured: bool = True,
) -> Picture:
    since = Interval(1.0, steps, 0.5, 0.2, 0.1, {"cpu->nvme": 5 * 10**8} if steps else {})
    stats = stats_of(folder=f"/mnt/{words or 'nvme0'}", words=words, is_measured=is_measured)
    return Picture(PICTURE_FORMAT, "0.1.0", job, time, 40, ended, since, stats)


def record_of(*, samples: int = 60, words: str = "here", decisions: int = 6, is_measured: bool = True) -> Record:
    """A run whose chunks come down from gpu to nvme, with waves of waiting, and of pressure in the container."""
    columns = []
    for number in range(samples):
        edge = number * 24 // max(1, samples)
        rows = tuple(
            {"gpu": 4} if row < edge else {"cpu": 3, "nvme": 1} if row == edge else {"none": 4} for row in range(24)
        )
        wait = 0.3 * (1 + math.sin(number / 9))
        moved = {"cpu->nvme": int(4e9 * (1 + wait)), "nvme->cpu": int(3e9)}
        stats = replace(stats_of(), pressure=pressure_at(0.5 + wait / 2) if is_measured else {})
        spilled = number % 3 if is_measured else 0
        since = Interval(2.0, 1, 1.0, wait, 0.1, moved, spilled=spilled)
        now = pressure_of(stats)
        most = {tier: min(1.0, 1.1 * share) for tier, share in now.items()}
        columns.append(Sample(2.0 * (number + 1), number + 1, since, {"cpu": 1}, rows, now, most))
    return Record(
        RECORD_FORMAT,
        "0.1.0",
        Job(f"node {words}", 4711, 0, STARTED),
        True,
        96,
        tuple(f"chunk {4 * row} (layers.{row}.{words}[0:1024])" for row in range(24)),
        tuple(columns),
        decisions,
        decisions_of(decisions, words),
        stats_of(folder=f"/mnt/{words}", words=words, is_measured=is_measured),
        STARTED,
    )


def write(path: Path, seen: Picture | Record) -> Path:
    path.write_text(json.dumps(seen.to_dict() if isinstance(seen, Picture) else asdict(seen)))
    return path
