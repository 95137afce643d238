"""How long a steady step takes, and what it is bound by. Pure: from bytes, elements and speeds to seconds.

One thread updates chunk by chunk while others read and write: a step takes what the slower of the two takes, and a
little more where they share cores and memory. The constants are fitted to measured steps of this machine's kind, see
`benchmarks/predicted_vs_measured`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHUNK_SECONDS = 250e-6
"""Measured: what the control thread takes to plan, issue, commit and begin one chunk that moves."""
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
    moved_chunks: float,
    update_source: str,
) -> StepForecast:
    """Play the links against the arithmetic.

    `every_core_seconds` is the arithmetic of all chunks; `sparing_seconds` the same with a core left free, as a step
    computes that waits for its files. `moved_chunks` pass a link.
    """
    python = CHUNK_SECONDS * moved_chunks
    slowest = max(links.values(), key=lambda link: link.seconds, default=None)
    moving = 0.0 if slowest is None else slowest.seconds
    if not moving:
        return StepForecast(every_core_seconds, every_core_seconds, 0.0, "arithmetic", links, update_source)
    seconds, arithmetic = min(
        _together(sparing_seconds + python, moving),
        _together(every_core_seconds + python, moving / BESIDE_ARITHMETIC),
    )
    bound = slowest.name if slowest is not None and moving >= arithmetic else "arithmetic"
    return StepForecast(seconds, arithmetic, seconds - arithmetic, bound, links, update_source)


def _together(arithmetic: float, moving: float) -> tuple[float, float]:
    """Seconds of a step and of its arithmetic: a link goes slower while something computes."""
    return arithmetic + max(0.0, moving - BESIDE_ARITHMETIC * arithmetic), arithmetic
