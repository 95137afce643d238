"""Counters and latency histograms per route, read as one frozen snapshot.

`Recorder` is owned by the control thread: it takes no lock and is never called by a worker. What tiers and engines know
of themselves (fill, chunks, paths) is not counted here but handed to `snapshot`, so that every number has one owner.
Invariant: memory is fixed per route, and a snapshot never changes after it was taken. Bytes are bytes, times are
seconds unless a name says `_ms`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

DECISIONS_KEPT = 1000
"""So many decisions are kept, the last ones."""
WAITING_SHARE = 0.1
"""A step that waits for no more than this share of its time is bound by its arithmetic."""

_LEAST_SECONDS = 1e-6
_MOST_SECONDS = 1e3
_BUCKETS_PER_DECADE = 48  # bounds 4.9 % apart: a bucket's middle is within 2.5 % of everything in it
_BUCKETS = _BUCKETS_PER_DECADE * 9  # 1 us to 1,000 s


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier now; `peak_bytes` is the most it ever had in use, `bytes_written` what was moved into it in all.

    `quarantined_bytes` are not part of its capacity: a request that was given up may yet write there, until it is back,
    or they cannot be written or read.
    A policy without a cpu tier may yet have one here, for staging: chunks pass through it, and some are kept in it.
    """

    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    chunks: int
    bytes_written: int = 0
    quarantined_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full the memory really is that a tier lies in: of a device, at the peak of the last steps.

    `source` says in words where the numbers are from. `stall_percent`: how much of the last ten seconds tasks waited
    for memory, where the kernel says it.
    """

    used_bytes: int
    total_bytes: int
    source: str
    stall_percent: float | None = None

    @property
    def share(self) -> float:
        """What is used, of all there is."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Relocation:
    """What it took to empty tiers, or to fill them again: bytes moved, bytes of memory given back or taken, seconds."""

    bytes_moved: int
    memory_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PathStats:
    """One swap folder now: what it has reserved and in use, its share of the tier's chunks, what moved since the start.

    `bytes_per_second` is measured while it is busy, over the last few transfers, reads and writes; 0 before the first.
    One that is `is_shunned` has failed so often that nothing more is written to it.
    """

    capacity_bytes: int
    used_bytes: int
    share: float
    bytes_per_second: float
    bytes_read: int
    bytes_written: int
    is_shunned: bool = False


@dataclass(frozen=True, slots=True)
class RouteStats:
    """All moves from one tier to another since the store was made; the percentiles are of one move's latency."""

    moves: int
    bytes: int
    seconds: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over `count` optimizer steps.

    `update_seconds` are those spent issuing moves and updating. A wait for a chunk counts by the copy that the chunk
    stood behind at the time: one to a faster tier as read; one to a slower tier, which was still leaving the extent
    that the chunk needed, as write. An accelerator's updates are only queued: what waits for them counts as waiting for
    the copies that follow them. `bytes_read` and `bytes_written` are from and to swap files.
    """

    count: int = 0
    update_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    write_wait_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    on_small_pages: bool = False  # some of the memory that chunks were moved through was not on huge pages

    @property
    def wait_seconds(self) -> float:
        """Seconds spent waiting for moves."""
        return self.read_wait_seconds + self.write_wait_seconds

    @property
    def bound(self) -> str:
        """What the steps could not be faster than: `read`, `write`, `arithmetic` or `memory pages`.

        It is arithmetic unless more than a tenth of the time was spent waiting; then it is what was waited for longer,
        or the memory, where that was not on huge pages, on which direct I/O is several times as fast.
        """
        if self.wait_seconds <= WAITING_SHARE * (self.update_seconds + self.wait_seconds):
            return "arithmetic"
        if self.on_small_pages:
            return "memory pages"
        return "read" if self.read_wait_seconds >= self.write_wait_seconds else "write"

    def __add__(self, other: StepStats) -> StepStats:
        """Both together, in the memory of the later one."""
        return StepStats(
            self.count + other.count,
            self.update_seconds + other.update_seconds,
            self.read_wait_seconds + other.read_wait_seconds,
            self.write_wait_seconds + other.write_wait_seconds,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            other.on_small_pages,
        )

    def to_dict(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return {**asdict(self), "wait_seconds": self.wait_seconds, "bound": self.bound}


@dataclass(frozen=True, slots=True)
class IoStats:
    """What swap files are read and written with, and what went wrong with that.

    `timed_out` counts reads and writes given up after `io.timeout`, `late` those of them that came back after all,
    `misread` requests whose checksum was right only when they were read once more, `retries` whole reads and writes
    that were begun once more because they had failed.
    """

    engine: str
    direct: bool
    paths: tuple[str, ...]
    checksum: bool = False
    timed_out: int = 0
    late: int = 0
    misread: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that was decided while training, and why. `number` counts from 1 for each store.

    `kind` is one word (order, tuning, homes, resize, room, core, spill, promote, hold, offload, reload); `step` are the
    steps that were done by then, `time` is in seconds since the epoch.
    """

    number: int
    step: int
    time: float
    kind: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stats:
    """A store at one moment. Routes are keyed `cpu->nvme`; one without a move yet has no entry. Paths, by folder.

    `step` is of all optimizer steps since the store was made, `last_step` of the last one. `decisions` are the last
    1,000, the oldest first. `pressure`, by tier, is what was measured last; `spilled` counts the
    chunks that had to leave a tier because of it, `promoted` those that a tier took room for when there was some.
    """

    tiers: Mapping[str, TierStats]
    routes: Mapping[str, RouteStats]
    step: StepStats
    last_step: StepStats
    io: IoStats
    paths: Mapping[str, PathStats] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()
    pressure: Mapping[str, Pressure] = field(default_factory=dict)
    spilled: int = 0
    promoted: int = 0

    @property
    def bytes_written(self) -> int:
        """What was written to swap files in all."""
        return sum(path.bytes_written for path in self.paths.values())

    def to_dict(self) -> dict[str, Any]:
        """Answer the same as plain dicts, lists and numbers, equal to what JSON gives back."""
        io = {**asdict(self.io), "paths": list(self.io.paths)}
        plain: dict[str, Any] = {
            "tiers": _plain(self.tiers),
            "routes": _plain(self.routes),
            "paths": _plain(self.paths),
            "pressure": _plain(self.pressure),
            "spilled": self.spilled,
            "promoted": self.promoted,
            "bytes_written": self.bytes_written,
        }
        plain["decisions"] = [asdict(decision) for decision in self.decisions]
        return {**plain, "step": self.step.to_dict(), "last_step": self.last_step.to_dict(), "io": io}


class Histogram:
    """Counts durations in buckets of equal ratio from 1 us to 1,000 s; what lies outside counts at the nearer end."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS

    @property
    def count(self) -> int:
        """How many durations were recorded."""
        return sum(self._counts)

    def record(self, seconds: float) -> None:
        """Count one duration."""
        decades = math.log10(min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS) / _LEAST_SECONDS)
        self._counts[min(int(decades * _BUCKETS_PER_DECADE), _BUCKETS - 1)] += 1

    def percentile(self, q: float) -> float:
        """Answer the seconds that `q` percent (0 to 100) of the durations do not exceed, within 5 %; 0.0 when empty.

        The nearest rank, numpy's `method="inverted_cdf"`: always a duration that occurred, never one between two.
        """
        if not 0 <= q <= 100:
            raise ValueError(f"found percentile {q}; allowed: 0 to 100")
        rank = max(1, math.ceil(self.count * q / 100))
        below = 0
        for bucket, count in enumerate(self._counts):
            below += count
            if below >= rank:
                return _LEAST_SECONDS * 10 ** ((bucket + 0.5) / _BUCKETS_PER_DECADE)
        return 0.0


@dataclass(slots=True)
class _Route:
    """What was moved along one route; the histogram also counts the moves."""

    bytes: int = 0
    seconds: float = 0.0
    latency: Histogram = field(default_factory=Histogram)

    def stats(self) -> RouteStats:
        p50_ms, p95_ms, p99_ms = (self.latency.percentile(q) * 1e3 for q in (50, 95, 99))
        return RouteStats(self.latency.count, self.bytes, self.seconds, p50_ms, p95_ms, p99_ms)


class Recorder:
    """The counters of one store, only ever added to."""

    def __init__(self) -> None:
        self._routes: dict[str, _Route] = {}
        self._step = self.last_step = StepStats()
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._decided = 0
        self.pressure: dict[str, Pressure] = {}  # by tier, as measured last
        self.spilled = self.promoted = 0  # chunks

    @property
    def moved_bytes(self) -> int:
        """What was moved along all routes."""
        return sum(route.bytes for route in self._routes.values())

    @property
    def steps(self) -> int:
        """How many steps are done."""
        return self._step.count

    def record_move(self, source: str, destination: str, nbytes: int, seconds: float) -> None:
        """Add one committed move of `nbytes` that took `seconds`."""
        name = f"{source}->{destination}"
        route = self._routes.get(name)
        if route is None:
            route = self._routes[name] = _Route()
        route.bytes += nbytes
        route.seconds += seconds
        route.latency.record(seconds)

    def record_step(self, step: StepStats) -> None:
        """Add one finished step."""
        self._step, self.last_step = self._step + step, step

    def decide(self, kind: str, what: str, reason: str) -> None:
        """Add a decision: one word for its kind, what was decided, and why, with the numbers."""
        self._decided += 1
        self._decisions.append(Decision(self._decided, self._step.count, time.time(), kind, what, reason))

    def snapshot(self, tiers: Mapping[str, TierStats], io: IoStats, paths: Mapping[str, PathStats] = {}) -> Stats:
        """Read everything at once, with what the tiers and the engine say of themselves."""
        routes = {name: route.stats() for name, route in self._routes.items()}
        tiers = {name: replace(tier, bytes_written=self._written_to(name)) for name, tier in tiers.items()}
        now = self._step, self.last_step, io, dict(paths), tuple(self._decisions)
        return Stats(tiers, routes, *now, dict(self.pressure), self.spilled, self.promoted)

    def _written_to(self, tier: str) -> int:
        return sum(route.bytes for name, route in self._routes.items() if name.endswith(f"->{tier}"))


def _plain(
    stats: Mapping[str, TierStats] | Mapping[str, RouteStats] | Mapping[str, PathStats] | Mapping[str, Pressure],
) -> dict[str, Any]:
    return {name: asdict(value) for name, value in stats.items()}
