"""A store's statistics for others to show: as scalars (TensorBoard and its like), and as one line for a log.

`prometheus`, `trainer` and `lightning` are modules of their own, as each needs its library.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from tierstore.stats import Stats

Source = Callable[[], Stats]
"""Answers the statistics as they are now, as `optimizer.store.stats` does."""

_log = logging.getLogger("tierstore.steps")


class Writer(Protocol):
    """What TensorBoard's SummaryWriter and its like can do."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object:
        """Add one number to a curve."""


def scalars(stats: Stats) -> dict[str, float]:
    """The numbers worth a curve, by name: seconds of the last step, bytes by tier and route, pressure, what was in all.

    `pressure/cpu/share` (0 to 1) is there where it was measured, `stall_percent` where the kernel says it.
    """
    step = stats.last_step
    found: dict[str, float] = {
        "step/update_seconds": step.update_seconds,
        "step/read_wait_seconds": step.read_wait_seconds,
        "step/write_wait_seconds": step.write_wait_seconds,
        "step/bytes_read": step.bytes_read,
        "step/bytes_written": step.bytes_written,
    }
    for name, tier in stats.tiers.items():
        found |= {f"tier/{name}/used_bytes": tier.used_bytes, f"tier/{name}/bytes_written": tier.bytes_written}
    for name, route in stats.routes.items():
        found |= {f"route/{name.replace('->', '-')}/bytes": route.bytes}
    for number, path in enumerate(stats.paths.values()):
        found[f"path/{number}/bytes_per_second"] = path.bytes_per_second
    for name, pressure in stats.pressure.items():
        found[f"pressure/{name}/share"] = pressure.share
        if pressure.stall_percent is not None:
            found[f"pressure/{name}/stall_percent"] = pressure.stall_percent
    in_all = {"spilled": stats.spilled, "promoted": stats.promoted, "bytes_written": stats.bytes_written}
    return found | {f"in_all/{name}": value for name, value in in_all.items()}


def add_scalars(writer: Writer, stats: Stats, step: int | None = None, *, prefix: str = "tierstore/") -> None:
    """Add the scalars to a writer, at `step`, or at the store's own number of steps."""
    for name, value in scalars(stats).items():
        writer.add_scalar(prefix + name, value, stats.step.count if step is None else step)


def line(stats: Stats) -> str:
    """The last step and the tiers, on one line; the pressure, where it was measured."""
    step, tiers = stats.last_step, stats.tiers
    times = f"update {step.update_seconds:.3f} s, read wait {step.read_wait_seconds:.3f} s"
    fill = ", ".join(
        f"{name} {tier.used_bytes / 2**20:,.0f}/{tier.capacity_bytes / 2**20:,.0f} MiB" for name, tier in tiers.items()
    )
    waits = f"write wait {step.write_wait_seconds:.3f} s, bound by {step.bound}"
    return f"step {stats.step.count}: {times}, {waits}; {fill}{_pressure(stats)}"


def _pressure(stats: Stats) -> str:
    if not stats.pressure:
        return ""
    shares = ", ".join(f"{name} {100 * pressure.share:.0f} %" for name, pressure in stats.pressure.items())
    return f"; pressure {shares}, {stats.spilled:,} chunks spilled, {stats.promoted:,} promoted"


class StepLog:
    """Logs a line every so many steps, to `tierstore.steps` (INFO) or a logger of the caller's."""

    def __init__(self, every: int = 100, *, logger: logging.Logger = _log) -> None:
        if every < 1:
            raise ValueError(f"every {every} steps; allowed: 1 or more")
        self._every, self._logger, self._logged = every, logger, 0

    def __call__(self, stats: Stats) -> None:
        """Log, if that many steps have been made since."""
        if stats.step.count < self._logged:  # the store was made anew
            self._logged = 0
        if stats.step.count - self._logged >= self._every:
            self._logged = stats.step.count
            self._logger.info("%s", line(stats))
