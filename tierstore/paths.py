"""Decides over which path a chunk leaves memory, and how much room each path should have. Pure: values in, values out.

A tier of several paths (swap folders) is used at the sum of their rates when each has work in proportion to its rate.
What is read follows what was written, so it is the writes that are dealt: each goes to the path that would be done
with it first, given what is queued there, reads included, since a device has one rate for both, and given what the path
was dealt lately. The second keeps an idle tier in proportion too, and neighbours in the order of a step on different
paths. Rates are measured: bytes over the time in which the path had anything to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 15 / 16
"""What is kept of all earlier measurements of a path at the next one."""
DEALT_MEMORY = 15 / 16
"""What is kept of what paths were dealt when the next chunk is."""
AT_ONCE = 1 / 8
"""The part of a tier's room that may be moving between its paths."""


@dataclass(frozen=True, slots=True)
class PathLoad:
    """One path now; no `bytes_per_second` yet counts as the mean of the others."""

    queued_bytes: int
    dealt_bytes: float
    bytes_per_second: float | None
    has_room: bool = True


def choose_path(loads: Sequence[PathLoad], nbytes: int) -> int | None:
    """Choose the path for `nbytes`: of those with room, the one that is done with them first. None without any room."""
    rates = rates_of([load.bytes_per_second for load in loads])
    with_room = [path for path, load in enumerate(loads) if load.has_room]
    return min(with_room, key=lambda path: _seconds(loads[path], rates[path], nbytes), default=None)


def rates_of(measured: Sequence[float | None]) -> list[float]:
    """The rates to reckon with: a path not measured yet is as fast as the mean of those that are."""
    known = [rate for rate in measured if rate is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [mean if rate is None else rate for rate in measured]


def _seconds(load: PathLoad, rate: float, nbytes: int) -> float:
    return (load.queued_bytes + load.dealt_bytes + nbytes) / rate


class Path:
    """The books of one path: what is queued, what it was dealt, and how fast it has been."""

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.read_bytes = self.written_bytes = 0
        self.dealt_bytes = 0.0
        self._bytes = self._seconds = 0.0  # of what was measured, the older the less
        self._last_ended = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes over the seconds in which it was busy with them; None before the first."""
        return self._bytes / self._seconds if self._seconds else None

    def begin(self, nbytes: int) -> None:
        """Count a transfer as queued."""
        self.queued_bytes += nbytes

    def end(self, nbytes: int, began: float, ended: float, *, is_write: bool) -> None:
        """A queued transfer has landed; the time it shared with one that ended before it is not its own."""
        self.queued_bytes -= nbytes
        if is_write:
            self.written_bytes += nbytes
        else:
            self.read_bytes += nbytes
        self._bytes = self._bytes * MEMORY + nbytes
        self._seconds = self._seconds * MEMORY + max(0.0, ended - max(began, self._last_ended))
        self._last_ended = max(self._last_ended, ended)

    def fail(self, nbytes: int) -> None:
        """A queued transfer has failed, or was never begun; that says nothing of the rate."""
        self.queued_bytes -= nbytes


@dataclass(frozen=True, slots=True)
class Reserve:
    """What one path has reserved: extents by slab, the oldest first. `wants_more`: chunks found it full."""

    slabs: tuple[int, ...]
    bytes_per_second: float | None
    wants_more: bool


@dataclass(frozen=True, slots=True)
class Shift:
    """Room that moves: path `to` gets a slab of so many extents, and path `giver` gives up its last one."""

    to: int
    giver: int
    extents: int


def plan_shifts(reserves: Sequence[Reserve]) -> list[Shift]:
    """Say which slabs should move between paths now; none when all is well.

    Room moves towards a path that wants more and has less than its part of the whole by the rates, from the path that
    has most beyond its part, as long as both come nearer to it; no more at once than AT_ONCE of the whole, which is
    reserved twice meanwhile, or one slab. Each path keeps a slab, and so can be measured.
    """
    rates = rates_of([reserve.bytes_per_second for reserve in reserves])
    slabs = [list(reserve.slabs) for reserve in reserves]
    total = sum(map(sum, slabs))
    beyond = [sum(own) - total * rate / sum(rates) for own, rate in zip(slabs, rates, strict=True)]
    shifts: list[Shift] = []
    while True:
        giver = max((path for path, own in enumerate(slabs) if len(own) > 1), key=beyond.__getitem__, default=None)
        to = min((path for path, one in enumerate(reserves) if one.wants_more), key=beyond.__getitem__, default=None)
        if giver is None or to is None:
            return shifts
        extents = slabs[giver][-1]
        is_enough = shifts and sum(shift.extents for shift in shifts) + extents > total * AT_ONCE
        if is_enough or beyond[to] > -extents / 2 or beyond[giver] < extents / 2:
            return shifts
        slabs[giver].pop()
        beyond[to] += extents
        beyond[giver] -= extents
        shifts.append(Shift(to, giver, extents))
