"""Numbers in the words of the demo's output: bytes, rates, times, a curve of losses. Nothing else is known here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"


def size(nbytes: float) -> str:
    """Write bytes in the unit that leaves at most four digits before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def share(part: float, whole: float) -> str:
    """Write a part as a whole number of percent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def time_left(seconds: float) -> str:
    """Write a duration as minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def curve(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` bars, the highest full and the lowest a line."""
    count = min(width, len(values))
    edges = [number * len(values) // count for number in range(count + 1)] if count else [0]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    means = [mean for mean in means if math.isfinite(mean)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    steps = [(mean - low) / (high - low) if high > low else 0.0 for mean in means]
    return "".join(BARS[round(step * (len(BARS) - 1))] for step in steps)
