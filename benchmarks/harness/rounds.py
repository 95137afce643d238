"""Interleaved rounds: every contender once per round, in turn, so that a machine that drifts drifts for all of them.

A ratio is the median of the rounds' ratios, not the ratio of two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def interleave(contenders: Mapping[Key, Callable[[], Value]], rounds: int) -> dict[Key, list[Value]]:
    """Run all contenders `rounds` times, every other round backwards; answer what each returned, round by round."""
    found: dict[Key, list[Value]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            found[name].append(contenders[name]())
    return found


def median(values: Sequence[float]) -> float:
    """The middle of the values; 0.0 of none."""
    return statistics.median(values) if values else 0.0


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """How large `values` are beside `others` of the same rounds; 0.0 where there is nothing to compare."""
    return median([value / other for value, other in zip(values, others, strict=True) if other])


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest rank: a value that occurred. 0.0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(len(ordered) * q) // 100) - 1)] if ordered else 0.0
