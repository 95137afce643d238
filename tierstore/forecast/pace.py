"""How long a steady step takes, and what it is bound by. Pure: from bytes, elements and speeds to seconds.

One thread updates chunk by chunk while others read and write: a step takes what the slower of the two takes, and a
little more where they share cores and memory. The constants are fitted to measured steps of this machine's kind, see
`benchmarks/predicted_vs_measured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

USE_SECONDS = 100e-6
"""Measured: what the control thread takes to begin and end the update of a chunk."""
MOVE_SECONDS = 150e-6
"""Measured: what it takes to plan, issue and commit a move of a chunk."""
BESIDE_ARITHMETIC = 0.85
"""Measured: the part of its rate that a disk keeps while one core less than all computes."""


@dataclass(frozen=True, slots=True)
class Link:
    """What passes between two neighbouring tiers in a step: bytes down and up, and seconds with nothing beside."""

    name: str
    bytes_down: int
    bytes_up: int
    seconds: float
    source: str  # of its speed


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A steady step, back to back with others, so that nothing hides what it leaves behind. Seconds.

    `bound` is the link or `arithmetic`, whatever takes longest; `exposed_wait_seconds` is what is not arithmetic.
    """

    seconds: float
    arithmetic_seconds: float
    exposed_wait_seconds: float
    bound: str
    links: Mapping[str, Link]
    update_source: str


def step_forecast(
    links: Mapping[str, Link],
    *,
    every_core_seconds: float,
    sparing_seconds: float,
    chunks: int,
    moves: float,
    update_source: str,
) -> StepForecast:
    """Play the links against the arithmetic.

    `every_core_seconds` is the arithmetic of all `chunks`; `sparing_seconds` the same with a core left free, as a step
    computes that waits for its files, where that is faster. `moves` are of chunks over links.
    """
    python = USE_SECONDS * chunks + MOVE_SECONDS * moves
    every, sparing = every_core_seconds + python, sparing_seconds + python
    slowest = max(links.values(), key=lambda link: link.seconds, default=None)
    if slowest is None or not slowest.seconds:
        return StepForecast(every, every, 0.0, "arithmetic", links, update_source)
    moving = slowest.seconds
    beside = sparing + max(0.0, moving - BESIDE_ARITHMETIC * sparing)
    in_turns = every + moving  # with every core at work both take twice as long as long as both are at it
    seconds, arithmetic = min((beside, sparing), (in_turns, every))
    bound = slowest.name if moving >= arithmetic else "arithmetic"
    return StepForecast(seconds, arithmetic, seconds - arithmetic, bound, links, update_source)
