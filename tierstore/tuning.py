"""Chooses what a policy leaves at `auto` from measured rates, and says why. Pure: from values to values and words.

What the policy gives always wins. Depth follows Little's law: what is on its way is bandwidth times latency. Requests
and chunks are as large as their Python is small beside their transfer, and no larger, so that many fit the tier that
computes. Nothing chosen here changes a number that training computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.placement import LARGEST_CHUNK, PIPELINE_EXTENTS, auto_chunk_bytes
from tierstore.policy import IoSettings, TierPolicy
from tierstore.rates import MachineRates, PathRates, Rates
from tierstore.units import bytes_text

REQUEST_SECONDS, REQUEST_SHARE = 30e-6, 0.02
"""Measured: CPU time that a worker spends in Python on one request; and what it may be of the request's transfer."""
CHUNK_SECONDS, CHUNK_SHARE = 400e-6, 0.05
"""The same for the thread that plans, issues and commits, and one chunk."""
ENOUGH = 0.95
"""Of the best rate, what a smaller request must reach to be preferred."""
LOCK_SECONDS = 5e-3
"""How long a worker may wait for the interpreter's lock between two requests: Python's switch interval."""
DEPTHS = (4, 32)
MOST_PREFETCH = 2 * PIPELINE_EXTENTS
MOMENTS_BYTES = 16
"""Of a float32 parameter under AdamW: two moments of 4 bytes, read and written."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of a key, in bytes or a count, and why."""

    key: str
    value: int
    why: str
    is_size: bool = False

    @property
    def shown(self) -> str:
        """The value as a policy writes it."""
        return str(bytes_text(self.value)) if self.is_size else str(self.value)

    def __str__(self) -> str:
        return f"{self.key} {self.shown}: {self.why}"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is chosen: `chunk_size` is at most what `auto` may take; `prefetch` is extents that chunks pass through."""

    request_size: Choice
    chunk_size: Choice
    queue_depth: Choice
    threads: Choice
    prefetch: Choice
    bound: str  # what a step is bound by, in words; empty where that is unknown

    def __iter__(self) -> Iterator[Choice]:
        yield from (self.request_size, self.queue_depth, self.threads, self.chunk_size, self.prefetch)


def tune(rates: Rates, policy: TierPolicy, *, state_bytes: int, capacity_bytes: int | None) -> Tuning | None:
    """Choose for so much state, in chunks that pass through a tier of `capacity_bytes` (None: `auto`).

    None where no path was measured: the defaults stay.
    """
    paths, io = list(rates.paths.values()), policy.tiers.nvme.io if policy.tiers.nvme else IoSettings()
    if not paths:
        return None
    request = _request_size(paths, io)
    chunk = _chunk_size(paths, policy, request.value, state_bytes, capacity_bytes)
    depth = _queue_depth(paths, io, min(request.value, chunk.value))
    return Tuning(
        request,
        chunk,
        depth,
        _threads(io, depth.value),
        _prefetch(len(paths), depth.value * min(request.value, chunk.value), chunk.value),
        _bound(paths, rates.machine),
    )


def _request_size(paths: list[PathRates], io: IoSettings) -> Choice:
    key = "tiers.nvme.io.request_size"
    if io.request_size != "auto":
        return Choice(key, io.request_size, _AS_GIVEN, is_size=True)
    common = set.intersection(*({size.request_bytes for size in path.sizes} for path in paths))
    if not common:  # disks so unlike that no size was measured on all
        common = {max(path.sizes[0].request_bytes for path in paths)}
    rate = {size: sum(path.at(size).bytes_per_second for path in paths) for size in sorted(common)}
    best = max(rate.values())
    fast = [size for size in rate if rate[size] >= ENOUGH * best]
    cheap = [size for size in fast if REQUEST_SECONDS * rate[size] <= REQUEST_SHARE * size]
    measured = ", ".join(f"{bytes_text(size)} {per_second(rate[size])}" for size in rate)
    if cheap:
        return Choice(key, cheap[0], f"the smallest that reads within 5 % of the best rate ({measured})", is_size=True)
    why = f"the largest that reads within 5 % of the best rate, for the least Python per byte ({measured})"
    return Choice(key, fast[-1], why, is_size=True)


def _chunk_size(
    paths: list[PathRates], policy: TierPolicy, request_bytes: int, state_bytes: int, capacity_bytes: int | None
) -> Choice:
    if policy.chunk_size != "auto":
        return Choice("chunk_size", policy.chunk_size, _AS_GIVEN, is_size=True)
    best = sum(path.best_bytes_per_second for path in paths)
    overhead = CHUNK_SECONDS + max(path.latency_seconds for path in paths)
    wanted = 1 << max(0, min(63, math.ceil(math.log2(best * overhead / CHUNK_SHARE))))
    largest = min(LARGEST_CHUNK, max(wanted, request_bytes))
    value = auto_chunk_bytes(state_bytes, capacity_bytes, largest=largest)
    if value < largest:
        return Choice("chunk_size", value, "the largest of which 16 fit the tier that computes", is_size=True)
    why = (
        f"at {per_second(best)} takes {value / best * 1e3:.1f} ms, beside which {overhead * 1e3:.1f} ms of Python and "
        f"latency per chunk are {overhead * best / value:.1%}"
    )
    return Choice("chunk_size", value, why, is_size=True)


def _queue_depth(paths: list[PathRates], io: IoSettings, request_bytes: int) -> Choice:
    key = "tiers.nvme.io.queue_depth"
    if io.queue_depth != "auto":
        return Choice(key, io.queue_depth, _AS_GIVEN)
    least, most = DEPTHS
    rate = sum(path.best_bytes_per_second for path in paths)
    alone = max(path.at(request_bytes).seconds_alone for path in paths)
    needed = (
        sum(path.best_bytes_per_second * (path.at(request_bytes).seconds_alone + LOCK_SECONDS) for path in paths)
        / request_bytes
    )
    value = max(least, min(most, math.ceil(needed)))
    why = (
        f"{per_second(rate)} x ({alone * 1e3:.2f} ms for a request of {bytes_text(request_bytes)} alone + "
        f"{LOCK_SECONDS * 1e3:.0f} ms that a worker may wait for Python's lock) are {needed:.1f} requests on their way"
    )
    return Choice(key, value, why if value == math.ceil(needed) else f"{why}; from {least} to {most}")


def _threads(io: IoSettings, depth: int) -> Choice:
    if io.threads != "auto":
        return Choice("tiers.nvme.io.threads", io.threads, _AS_GIVEN)
    why = "libaio has one of its own" if io.engine == "libaio" else "as many as requests at once: each carries one"
    return Choice("tiers.nvme.io.threads", 1 if io.engine == "libaio" else depth, why)


def _prefetch(paths: int, bytes_on_the_way: int, chunk_bytes: int) -> Choice:
    """Extents for chunks that pass through a tier that finds its size by itself."""
    moving = max(math.ceil(bytes_on_the_way / chunk_bytes), 2 * paths)
    needed = moving + 3
    most = max(PIPELINE_EXTENTS, min(MOST_PREFETCH, PIPELINE_EXTENTS * LARGEST_CHUNK // chunk_bytes))
    value = max(PIPELINE_EXTENTS, min(most, needed))
    why = f"{needed} are needed: {moving} on their way, one in use, one ready before and one after it"
    if value != needed:
        why += f"; from {PIPELINE_EXTENTS} to {most}"
    return Choice("prefetch depth", value, why)


def _bound(paths: list[PathRates], machine: MachineRates | None) -> str:
    if machine is None:
        return ""
    carried = sum(path.mixed_bytes_per_second for path in paths) / MOMENTS_BYTES
    spared = machine.elements_per_second_sparing_a_core
    computed = machine.elements_per_second if spared is None else max(spared, machine.elements_per_second)
    sparing = "" if spared is None else f", {_elements(spared)} with a core left free"
    binds = "the disks bind" if carried < computed else "arithmetic binds"
    return (
        f"{binds}: they carry the moments of {_elements(carried)} float32 parameters a second, of which "
        f"{_elements(machine.elements_per_second)} are updated with {machine.threads} threads{sparing}"
    )


def per_second(rate: float) -> str:
    """A rate in bytes per second, in words."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def _elements(count: float) -> str:
    return f"{count / 1e6:,.0f} million"


_AS_GIVEN = "as the policy says"
