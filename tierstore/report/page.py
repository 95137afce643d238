"""The page of a run: one file of HTML with its pictures and colours in it, that needs no network and no script.

Every text that comes from the record is escaped, here or in `charts`: names of parameters and folders are anybody's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from tierstore.demo.words import share, size
from tierstore.history import FRESH, Interval, Record
from tierstore.report.charts import MARKED, class_of, duration, pressure, residency, stacked


def page(record: Record) -> str:
    """Make the page."""
    style = files("tierstore.report").joinpath("page.css").read_text(encoding="utf-8")
    title = f"tierstore run on {record.job.host}, process {record.job.pid}"
    sections = [
        _section("Where chunks were", _residency(record)),
        _section("What a step's time went into", _split(record)),
        _section("Bandwidth of each route", _routes(record)),
        _section("Tiers and paths", _tiers(record)),
        _section("Pressure", _pressure(record)),
        _section("Decisions", _decisions(record)),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{_summary(record)}\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _summary(record: Record) -> str:
    total, job = _total(record), record.job
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(max(job.started, 0.0), 32e9)))
    steps, within = record.stats.step, total.step_stats
    in_step = within.update_seconds + within.wait_seconds
    written = sum(tier.bytes_written for tier in record.stats.tiers.values())
    figures = [
        ("steps", f"{record.samples[-1].step if record.samples else steps.count:,}"),
        ("time", duration(total.seconds)),
        ("steps per second", f"{total.steps / total.seconds:.2f}" if total.seconds > 0 else "-"),
        ("of it in step()", share(in_step, max(total.seconds, in_step))),
        ("bound by", within.bound if total.steps else "-"),
        ("moved in all", size(written)),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    end = "It has ended." if record.ended else "It had not ended when this was recorded."
    rank = f", rank {job.rank}" if job.rank else ""
    line = f"Started {began} UTC{rank}, tierstore {record.version}. {end}"
    return f'{_quiet(line)}\n<dl class="figures">{cells}</dl>'


def _residency(record: Record) -> str:
    if not record.chunks or not record.samples:
        return _quiet("There were no chunks.")
    tiers = list(dict.fromkeys(tier for sample in record.samples for row in sample.rows for tier in row))
    shared = f", {record.chunks / len(record.rows):.1f} to a row" if len(record.rows) < record.chunks else ""
    text = f"{record.chunks:,} chunks{shared}, each where it was at the end of a step."
    text += f" {FRESH}: it had no bytes yet." if FRESH in tiers else ""
    names = "".join(f"<tr><td>{number}</td><td>{escape(name)}</td></tr>" for number, name in enumerate(record.rows))
    return (
        f"{_quiet(text)}{_legend(sorted(tiers, key=_rank))}"
        f'<div class="tall">{residency(record.samples, record.chunks)}</div>'
        f"<details><summary>What is in which row</summary>{_table(('row', 'what is in it'), names)}</details>"
    )


def _split(record: Record) -> str:
    with_steps = [sample for sample in record.samples if sample.interval.steps]
    if not with_steps:
        return _quiet("No step was recorded.")

    def milliseconds(which: str) -> list[float]:
        spent = [(getattr(s.interval, f"{which}_seconds"), s.interval.steps) for s in record.samples]
        return [seconds / steps * 1e3 if steps else 0.0 for seconds, steps in spent]

    parts = {
        "update": milliseconds("update"),
        "wait for read": milliseconds("read_wait"),
        "wait for write": milliseconds("write_wait"),
    }
    total = _total(record)
    outside = max(0.0, total.seconds - total.step_stats.update_seconds - total.step_stats.wait_seconds)
    text = (
        f"Milliseconds of one step(), on average. Outside of it, forward and backward for one thing, "
        f"{outside / max(1, total.steps) * 1e3:,.1f} ms a step."
    )
    chart = stacked(record.samples, parts, "ms", "What a step's time went into, over time")
    return f"{_quiet(text)}{_legend(list(parts))}{chart}"


def _routes(record: Record) -> str:
    routes = list(dict.fromkeys(name for sample in record.samples for name in sample.interval.route_bytes))
    if not routes:
        return _quiet("Nothing was moved: all chunks were where they are used.")
    total, found = _total(record), []
    for name in routes:
        rates = [sample.interval.bytes_per_second.get(name, 0.0) for sample in record.samples]
        unit, per = ("GB/s", 1e9) if max(rates) >= 1e8 else ("MB/s", 1e6)
        mean = total.bytes_per_second.get(name, 0.0) / per
        text = f"{name}: {mean:.2f} {unit} on average, {size(total.route_bytes.get(name, 0))} in all"
        chart = stacked(record.samples, {"moved": [rate / per for rate in rates]}, unit, name)
        found.append(f"<h3>{escape(text)}</h3>{chart}")
    return f'<div class="pair">{"".join(f"<div>{one}</div>" for one in found)}</div>'


def _tiers(record: Record) -> str:
    rows = "".join(
        _row(name, size(tier.capacity_bytes), size(tier.used_bytes), size(tier.peak_bytes), size(tier.bytes_written))
        for name, tier in record.stats.tiers.items()
    )
    tables = _table(("tier", "capacity", "in use at the end", "at most", "moved into it"), rows)
    if record.stats.paths:
        paths = "".join(
            _row(
                folder,
                size(path.used_bytes),
                f"{path.bytes_per_second / 1e9:.2f}",
                size(path.bytes_read),
                size(path.bytes_written),
            )
            for folder, path in record.stats.paths.items()
        )
        tables += _table(("path", "in use at the end", "GB/s, busy", "read", "written"), paths)
        tables += _quiet(f"{size(record.stats.bytes_written)} were written to swap files in all.")
    return tables


def _pressure(record: Record) -> str:
    tiers = sorted(dict.fromkeys(tier for one in record.samples for tier in one.most_pressure), key=_rank)
    if not tiers:
        return _quiet("None was measured.")
    total, charts = _total(record), ""
    for tier in tiers:
        moments = {kind: _moments(record, kind, tier) for kind in MARKED}
        most, last = max(one.most_pressure.get(tier, 0.0) for one in record.samples), record.stats.pressure.get(tier)
        text, source = f"{tier}: at most {share(most, 1.0)}", ""
        if last is not None:
            text += f", {share(last.used_bytes, last.total_bytes)} at the end"
            stalled = "" if last.stall_percent is None else f"; tasks waited {last.stall_percent:.1f} % of ten seconds"
            source = _quiet(f"{last.source}{stalled}")
        charts += f"<div><h3>{escape(text)}</h3>{source}{pressure(record.samples, tier, moments)}</div>"
    text = (
        f"How full the memory is that a tier lies in, whoever fills it; fainter: the most there was in between. "
        f"{total.spilled:,} chunks were spilled, {total.promoted:,} promoted."
    )
    kinds = {one.kind for one in record.decisions}
    legend = _legend([kind for kind in MARKED if kind in kinds])
    return f'{_quiet(text)}{legend}<div class="low">{charts}</div>'


def _moments(record: Record, kind: str, tier: str) -> list[float]:
    """When something of a kind was decided that names a tier."""
    found = [one for one in record.decisions if one.kind == kind and tier in re.findall(r"\w+", one.what)]
    return [one.time - _began(record) for one in found]


def _began(record: Record) -> float:
    return record.job.started if record.began is None else record.began


def _decisions(record: Record) -> str:
    if not record.decisions:
        return _quiet("None.")
    left_out = record.decided - len(record.decisions)
    note = f"{record.decided:,} in all" + (f"; {left_out:,} in the middle are left out." if left_out > 0 else ".")
    rows = "".join(
        _row(duration(max(0.0, one.time - _began(record))), f"{one.step:,}", one.kind, one.what, one.reason)
        for one in record.decisions
    )
    table = _table(("after", "step", "kind", "what", "because"), rows)
    return f'{_quiet(note)}<div class="decisions">{table}</div>'


def _total(record: Record) -> Interval:
    total = Interval(0.0, 0, 0.0, 0.0, 0.0, {})
    for sample in record.samples:
        total += sample.interval
    return total


def _rank(tier: str) -> int:
    order = ("gpu", "cpu", "nvme", FRESH)
    return order.index(tier) if tier in order else len(order)


def _legend(names: Sequence[str]) -> str:
    entries = "".join(f"<span><i class={class_of(name)}></i>{escape(name)}</span>" for name in names)
    return f'<p class="legend">{entries}</p>'


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>\n"


def _quiet(text: str) -> str:
    return f'<p class="quiet">{escape(text)}</p>'


def _row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _table(heads: Iterable[str], rows: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
