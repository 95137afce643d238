"""What a run looks like from outside, as values: a picture of now, and a record of how it went, bounded in size.

Everything in them is a sum or a state over an interval between two looks, so that two neighbours can be merged into
one: a record that becomes too long halves its samples, and says the same of twice the time. Pure; knows no file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tierstore.stats import Decision, Stats, StepStats

PICTURE_FORMAT, RECORD_FORMAT = "tierstore monitor 1", "tierstore record 1"
MOST_SAMPLES = 240
MOST_ROWS = 96
"""Chunks are told apart up to so many; beyond, neighbours share a row."""
FIRST_DECISIONS, LAST_DECISIONS = 100, 400
"""Of a run's decisions, those kept: how it began, and the latest."""
FRESH = "none"
"""Where a chunk is that has no bytes yet."""


@dataclass(frozen=True, slots=True)
class Job:
    """Which process it is. `started` is in seconds since the epoch; `rank` of the launcher, 0 without one."""

    host: str
    pid: int
    rank: int
    started: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums over the time between two looks. Routes are in bytes moved; what is no step's is not in the three times.

    `spilled` and `promoted` count chunks.
    """

    seconds: float
    steps: int
    update_seconds: float
    read_wait_seconds: float
    write_wait_seconds: float
    route_bytes: Mapping[str, int]
    spilled: int = 0
    promoted: int = 0

    @property
    def step_stats(self) -> StepStats:
        """The steps of the interval; their bytes are not in it."""
        return StepStats(self.steps, self.update_seconds, self.read_wait_seconds, self.write_wait_seconds)

    @property
    def bytes_per_second(self) -> dict[str, float]:
        """What each route moved."""
        return {name: nbytes / self.seconds if self.seconds > 0 else 0.0 for name, nbytes in self.route_bytes.items()}

    def __add__(self, other: Interval) -> Interval:
        """Both together."""
        return Interval(
            self.seconds + other.seconds,
            self.steps + other.steps,
            self.update_seconds + other.update_seconds,
            self.read_wait_seconds + other.read_wait_seconds,
            self.write_wait_seconds + other.write_wait_seconds,
            dict(Counter(self.route_bytes) + Counter(other.route_bytes)),
            self.spilled + other.spilled,
            self.promoted + other.promoted,
        )


@dataclass(frozen=True, slots=True)
class Picture:
    """A job now. `step` counts the job's steps, `time` is in seconds since the epoch, `interval` what came before."""

    format: str
    version: str
    job: Job
    time: float
    step: int
    ended: bool
    interval: Interval
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with what can be worked out from them where a script would want it."""
        since = {"bytes_per_second": self.interval.bytes_per_second, "bound": self.interval.step_stats.bound}
        plain = {name: getattr(self, name) for name in ("format", "version", "time", "step", "ended")}
        since = {**asdict(self.interval), **since}
        return {**plain, "job": asdict(self.job), "interval": since, "stats": self.stats.to_dict()}


@dataclass(frozen=True, slots=True)
class Sample:
    """How things were at `seconds` since the start of the record, and what happened since the sample before.

    `used_bytes` by tier; `rows`: for each row of chunks, how many are in which tier. `pressure`, by tier: the share in
    use of the memory it lies in, 0 to 1; `most_pressure`: the highest there was since the sample before.
    """

    seconds: float
    step: int
    interval: Interval
    used_bytes: Mapping[str, int]
    rows: tuple[Mapping[str, int], ...]
    pressure: Mapping[str, float] = field(default_factory=dict)
    most_pressure: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, later: Sample) -> Sample:
        """Both as one: states are those of the later one, sums those of both, and what was highest stays."""
        before, after = self.most_pressure, later.most_pressure
        most = {tier: max(before.get(tier, 0.0), after.get(tier, 0.0)) for tier in {**before, **after}}
        return replace(later, interval=self.interval + later.interval, most_pressure=most)


@dataclass(frozen=True, slots=True)
class Record:
    """A run. `rows` says in words what each row of chunks is; `decided` counts the decisions that there were.

    `began` is the second 0 of its samples, in seconds since the epoch; None in a file of an earlier version.
    """

    format: str
    version: str
    job: Job
    ended: bool
    chunks: int
    rows: tuple[str, ...]
    samples: tuple[Sample, ...]
    decided: int
    decisions: tuple[Decision, ...]
    stats: Stats
    began: float | None = None


def interval(before: Stats | None, now: Stats, seconds: float) -> Interval:
    """What happened between two looks at one store; `before` None: since it was made."""
    earlier = before.step if before is not None else StepStats()
    routes = before.routes if before is not None else {}
    spilled, promoted = (before.spilled, before.promoted) if before is not None else (0, 0)
    moved = {name: route.bytes - (routes[name].bytes if name in routes else 0) for name, route in now.routes.items()}
    return Interval(
        seconds,
        now.step.count - earlier.count,
        max(0.0, now.step.update_seconds - earlier.update_seconds),
        max(0.0, now.step.read_wait_seconds - earlier.read_wait_seconds),
        max(0.0, now.step.write_wait_seconds - earlier.write_wait_seconds),
        {name: nbytes for name, nbytes in moved.items() if nbytes},
        now.spilled - spilled,
        now.promoted - promoted,
    )


def pressure_of(stats: Stats) -> dict[str, float]:
    """By tier, the share in use of the memory it lies in, as a sample keeps it: to a hundredth of a percent."""
    return {tier: round(pressure.share, 4) for tier, pressure in stats.pressure.items()}


def row_bounds(chunks: int, most: int = MOST_ROWS) -> list[range]:
    """Deal chunks, by position, out to at most so many rows of neighbours, of equal length but for one chunk."""
    rows = min(chunks, most)
    return [range(row * chunks // rows, (row + 1) * chunks // rows) for row in range(rows)]


def rows_of(tiers: Sequence[str | None], bounds: Sequence[range]) -> tuple[dict[str, int], ...]:
    """Count, for each row, in which tiers its chunks are."""
    return tuple(dict(Counter(tier or FRESH for tier in tiers[row.start : row.stop])) for row in bounds)


def halved(samples: Sequence[Sample]) -> list[Sample]:
    """Merge each two neighbours. The last may stay alone."""
    pairs = [samples[start : start + 2] for start in range(0, len(samples), 2)]
    return [pair[0] if len(pair) == 1 else pair[0] + pair[1] for pair in pairs]


def kept(first: Sequence[Decision], last: Sequence[Decision], new: Sequence[Decision]) -> tuple[list[Decision], ...]:
    """The decisions kept when there are new ones: the first, and the last."""
    missing = FIRST_DECISIONS - len(first)
    return [*first, *new[:missing]], [*last, *new[missing:]][-LAST_DECISIONS:]
