"""Pictures of a record as inline SVG: values over time, on axes of whole numbers. Colours are classes of the page's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from tierstore.history import FRESH, Sample

WIDTH, HEIGHT = 1000, 400
"""Of a picture, in units that the page stretches."""
TIERS = ("gpu", "cpu", "nvme", FRESH)
"""As they are stacked in a row that holds chunks of several."""
MARKED = ("spill", "offload", "promote", "reload")
"""Kinds of decisions that are marked where pressure is shown: two that move chunks down, two that move them up."""


def residency(samples: Sequence[Sample], chunks: int) -> str:
    """Where chunks were: a column for each sample, from chunk 0 at the top; a row's part for each of its tiers."""
    edges = _edges(samples)
    shapes: dict[str, list[str]] = {}
    for sample, (start, end) in zip(samples, edges, strict=True):
        for tier, top, bottom in _stack(sample.rows):
            place = f"M{_x(start, edges)} {_n(top * HEIGHT)}H{_x(end, edges)}V{_n(bottom * HEIGHT)}"
            shapes.setdefault(tier, []).append(f"{place}H{_x(start, edges)}z")
    body = "".join(f'<path class="{class_of(tier)}" d="{"".join(paths)}"/>' for tier, paths in shapes.items())
    marks = [(HEIGHT * number / max(1, chunks), f"{number:,}") for number in _whole(chunks)]
    texts = [f"{_span(sample, one)}: {_told(sample.rows)}" for sample, one in zip(samples, edges, strict=True)]
    return _frame(body, edges, marks, "chunk", texts, label="Where chunks were, over time", grid=False)


def stacked(samples: Sequence[Sample], series: Mapping[str, Sequence[float]], unit: str, label: str) -> str:
    """Values of several kinds, one on the other; a series' name is its class, too."""
    edges = _edges(samples)
    sums = [sum(values) for values in zip(*series.values(), strict=True)]
    most, marks = _axis(max(sums, default=0.0))
    floor = [0.0] * len(samples)
    body = ""
    for name, values in series.items():
        ceiling = [one + other for one, other in zip(floor, values, strict=True)]
        body += f'<path class="{class_of(name)}" d="{_area(floor, ceiling, edges, most)}"/>'
        floor = ceiling
    texts = [
        f"{_span(sample, one)}: " + ", ".join(f"{name} {values[number]:.3g} {unit}" for name, values in series.items())
        for number, (sample, one) in enumerate(zip(samples, edges, strict=True))
    ]
    return _frame(body, edges, marks, unit, texts, label=label)


def pressure(samples: Sequence[Sample], tier: str, moments: Mapping[str, Sequence[float]]) -> str:
    """How full the memory of a tier was, of all there is, and behind it the most in between.

    A line stands where something was decided: `moments` has the seconds for each kind of decision.
    """
    edges = _edges(samples)
    floor, body = [0.0] * len(samples), ""
    for name, found in (("most", [one.most_pressure for one in samples]), ("now", [one.pressure for one in samples])):
        ceiling = [min(1.0, shares.get(tier, 0.0)) for shares in found]
        body += f'<path class="{class_of(tier)} {name}" d="{_area(floor, ceiling, edges, 1.0)}"/>'
    for kind, times in moments.items():
        lines = "".join(f"M{_x(seconds, edges)} 0V{HEIGHT}" for seconds in times)
        body += f'<path class="mark {class_of(kind)}" d="{lines}"/>' if lines else ""
    texts = []
    for sample, (start, end) in zip(samples, edges, strict=True):
        shares = [f"{100 * found[tier]:.1f} %" for found in (sample.pressure, sample.most_pressure) if tier in found]
        counts = {kind: sum(start < seconds <= end for seconds in times) for kind, times in moments.items()}
        decided = "".join(f", {count} x {kind}" for kind, count in counts.items() if count)
        texts.append(f"{_span(sample, (start, end))}: {', at most '.join(shares) or 'not measured'}{decided}")
    marks = [(HEIGHT * (1 - percent / 100), str(percent)) for percent in (0, 50, 100)]
    return _frame(body, edges, marks, "%", texts, label=f"Pressure on {tier}, over time")


def _stack(rows: Sequence[Mapping[str, int]]) -> list[tuple[str, float, float]]:
    """Tier, top and bottom (0 to 1) of each band of a column; neighbours alike are one."""
    bands: list[tuple[str, float, float]] = []
    for number, row in enumerate(rows):
        chunks = sum(row.values()) or 1
        top = number / len(rows)
        for tier in sorted(row, key=lambda name: TIERS.index(name) if name in TIERS else len(TIERS)):
            bottom = top + row[tier] / chunks / len(rows)
            if bands and bands[-1][0] == tier:
                bands[-1] = (tier, bands[-1][1], bottom)
            else:
                bands.append((tier, top, bottom))
            top = bottom
    return bands


def _told(rows: Sequence[Mapping[str, int]]) -> str:
    sums: dict[str, int] = {}
    for row in rows:
        for tier, count in row.items():
            sums[tier] = sums.get(tier, 0) + count
    return ", ".join(f"{count:,} in {tier}" for tier, count in sums.items())


def _area(floor: Sequence[float], ceiling: Sequence[float], edges: Sequence[tuple[float, float]], most: float) -> str:
    """Steps along the ceiling, and back along the floor."""

    def steps(values: Sequence[float]) -> list[str]:
        found = []
        for value, (start, end) in zip(values, edges, strict=True):
            y = _n(HEIGHT * (1 - value / most))
            found += [f"{_x(start, edges)} {y}", f"{_x(end, edges)} {y}"]
        return found

    return "M" + "L".join([*steps(ceiling), *reversed(steps(floor))]) + "z" if edges else ""


def _frame(
    body: str,
    edges: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, str]],
    unit: str,
    texts: Sequence[str],
    *,
    label: str,
    grid: bool = True,
) -> str:
    """Axes around a picture, and a text for each column, shown where somebody points. Words are not in the picture,
    which is stretched to the width there is.
    """
    lines = "".join(f'<path class="grid" d="M0 {_n(y)}H{WIDTH}"/>' for y, _ in marks) if grid else ""
    hovers = "".join(
        f'<rect class="hover" x="{_x(start, edges)}" width="{_n(float(_x(end, edges)) - float(_x(start, edges)))}" '
        f'height="{HEIGHT}"><title>{escape(text)}</title></rect>'
        for (start, end), text in zip(edges, texts, strict=True)
    )
    ys = "".join(f'<span style="top:{_n(y / HEIGHT * 100)}%">{escape(text)}</span>' for y, text in marks)
    total = edges[-1][1] if edges else 0.0
    xs = "".join(
        f'<span class="{"last" if seconds > 0.92 * total > 0 else "at"}" '
        f'style="left:{_n(seconds / max(total, 1e-9) * 100)}%">{escape(duration(seconds))}</span>'
        for seconds in _moments(total)
    )
    return (
        f'<div class="plot"><div class="unit">{escape(unit)}</div><div class="ys">{ys}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'{lines}{body}{hovers}</svg><div class="xs">{xs}</div></div>'
    )


def _edges(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """From when to when each sample is; the first, which is a look at the first step's end, from 0 on."""
    ends = [sample.seconds for sample in samples]
    if len(ends) == 1:
        return [(0.0, max(ends[0], 1.0))]
    return [(0.0 if number == 0 else ends[number - 1], end) for number, end in enumerate(ends)]


def _x(seconds: float, edges: Sequence[tuple[float, float]]) -> str:
    total = edges[-1][1] if edges and edges[-1][1] > 0 else 1.0
    return _n(WIDTH * min(1.0, max(0.0, seconds / total)))


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _span(sample: Sample, edge: tuple[float, float]) -> str:
    return f"{duration(edge[0])} to {duration(edge[1])}, up to step {sample.step:,}"


def _axis(most: float) -> tuple[float, list[tuple[float, str]]]:
    """The value at the top, and where to write which numbers."""
    top = most * 1.05 if most > 0 else 1.0
    marks = [(HEIGHT * (1 - value / top), f"{value:g}") for value in _ticks(top, 4)]
    return top, marks


def _ticks(most: float, count: int) -> list[float]:
    """At most about `count` round numbers from 0 on."""
    if not most > 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [round(number * step, 12) for number in range(int(most / step) + 1)]


def _moments(total: float) -> list[float]:
    """The same for times: in minutes and hours where there are some."""
    step = next((step for step in (60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200) if total / step <= 5), 0)
    if total <= 120 or not step:
        return _ticks(total, 5)
    return [float(number * step) for number in range(int(total / step) + 1)]


def _whole(most: int) -> list[int]:
    return sorted({int(tick) for tick in _ticks(float(most), 4)})


def class_of(name: str) -> str:
    """A class of the page's for a name, whatever the name."""
    known = {*TIERS, *MARKED, "update", "wait for read", "wait for write", "moved"}
    return name.replace(" ", "-") if name in known else "other"


def duration(seconds: float) -> str:
    """Write seconds as one reads them."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"
