"""Decides whether the next run that moves chunks over files leaves a core free for them, from what runs have taken.

With all cores at the arithmetic, reads and writes wait for one; with one core fewer the arithmetic takes longer, which
costs nothing while files are what is waited for. Where both take about as long, only trying tells.
"""

from __future__ import annotations

from tierstore.stats import WAITING_SHARE, StepStats

STEPS_BETWEEN_TRIALS = 32
"""Runs after which the way that was slower is tried again, because what else the machine does may have changed."""
CLEARLY = 1.1
"""A pace is clearly slower than another if it takes this many times as long."""


class Sparing:
    """`is_on` is the decision; `hear` is told of every run that moved chunks over files, made as it was decided."""

    def __init__(self) -> None:
        self.is_on = False
        self._pace: dict[bool, float] = {}  # seconds per byte moved, of the last run with and without
        self._runs = 0  # since the other way was tried

    def hear(self, run: StepStats) -> None:
        """Take note of a run, and decide for the next one."""
        if not run.bytes_read:
            return  # a first one makes its chunks
        seconds = run.update_seconds + run.wait_seconds
        self._pace[self.is_on] = seconds / (run.bytes_read + run.bytes_written)
        self._runs += 1
        if not self._is_well(is_held_up=run.wait_seconds > WAITING_SHARE * seconds):
            self.is_on = not self.is_on
            self._runs = 0

    def _is_well(self, *, is_held_up: bool) -> bool:
        """Whether the way of the last run, which files held up or not, is the one for the next."""
        if not self.is_on and not is_held_up:
            return True
        other = self._pace.get(not self.is_on)
        if other is None:
            return False
        if self.is_on and is_held_up:  # more cores would only wait, but for a reading far from the other one
            return self._pace[True] <= CLEARLY * other
        return self._pace[self.is_on] <= other and self._runs < STEPS_BETWEEN_TRIALS
