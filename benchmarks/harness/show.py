"""How a report looks: in a terminal, and as Markdown on the page of results. One way to write each kind of value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.harness.report import Check, Column, Report, Table

_RAW = (
    Column("kind", "raw"),
    Column("request", "requests", "bytes"),
    Column("in_flight", "in flight"),
    Column("paths", "paths"),
    Column("gb_per_s", "GB/s", ".2f"),
    Column("p50", "p50", "seconds"),
    Column("p99", "p99", "seconds"),
    Column("cpu_s_per_gb", "CPU s/GB", ".3f"),
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def written(value: Any, form: str) -> str:
    """One value as text; what is not there is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if form == "bytes":
        return _bytes(value)
    if form == "seconds":
        return _seconds(value)
    if form == "percent":
        return f"{value:.0%}"
    return format(value, form)


def print_report(console: Console, report: Report) -> None:
    """Print all of a report, for a terminal."""
    console.print(Text.assemble((report.benchmark, "bold"), f": {report.question}"))
    for line in surroundings(report):
        console.print(line, style="dim")
    for table in all_tables(report):
        console.print()
        console.print(rich_table(table), crop=False)
        if table.note:
            console.print(table.note, style="dim")
    console.print()
    console.print(f"verified: {report.verified}")
    for note in report.notes:
        console.print(f"note: {note}")


def surroundings(report: Report) -> Iterator[str]:
    """What the figures depend on, in a few lines."""
    environment = report.environment
    hardware, versions = environment.get("hardware", {}), environment.get("versions", {})
    accelerator = hardware.get("accelerator") or "no accelerator"
    yield (
        f"{report.when}, {hardware.get('cpu')}, {hardware.get('cores')} cores ({hardware.get('vector')}), "
        f"{hardware.get('memory_gb')} GB, {accelerator}, Linux {hardware.get('kernel')}"
    )
    threads = environment.get("threads", {})
    settings = ", ".join(f"{name} {value}" for name, value in threads.items())
    yield (
        ", ".join(f"{name} {version}" for name, version in versions.items())
        + f"; threads: {settings}; huge pages: {environment.get('huge_pages')}"
    )
    for place in environment.get("storage", ()):
        yield (
            f"swap: {place.get('filesystem')} ({place.get('mount_options')}) on {place.get('disk', 'no disk')}"
            f"{' ' + place['model'] if 'model' in place else ''}, {place.get('free_gb')} GB free"
        )


def all_tables(report: Report) -> Iterator[Table]:
    """The raw device, the benchmark's own tables, and the figures to reach."""
    if report.raw:
        present = [column for column in _RAW if any(column.key in entry for entry in report.raw)]
        yield Table("the raw device, in the same minutes", tuple(present), report.raw)
    yield from report.tables
    if report.checks:
        yield _checks(report.checks)


def _checks(checks: tuple[Check, ...]) -> Table:
    words = {True: "reached", False: "MISSED", None: "not tried"}
    rows: list[Mapping[str, Any]] = [
        {"claim": c.claim, "target": c.target, "seen": c.seen, "holds": words[c.holds]} for c in checks
    ]
    columns = (Column("claim", "claim"), Column("target", "target"), Column("seen", "seen"), Column("holds", ""))
    return Table("figures to reach", columns, tuple(rows))


def markdown(table: Table) -> str:
    """A table as Markdown."""
    lines = ["| " + " | ".join(column.heading for column in table.columns) + " |"]
    lines.append("|" + "|".join(" --- " if _is_text(table, column) else " ---: " for column in table.columns) + "|")
    lines += ["| " + " | ".join(_cell(row, column) for column in table.columns) + " |" for row in table.rows]
    return "\n".join(lines)


def rich_table(table: Table) -> RichTable:
    """A table for a terminal. In a narrow one names and headings take more lines, so that no figure is cut."""
    rich = RichTable(title=table.title, title_justify="left", title_style="bold", header_style="bold", box=None)
    for column in table.columns:
        is_text = _is_text(table, column)
        least = 0 if is_text else max((len(_cell(row, column)) for row in table.rows), default=0)
        rich.add_column(column.heading, justify="left" if is_text else "right", overflow="fold", min_width=least)
    for row in table.rows:
        rich.add_row(*(_cell(row, column) for column in table.columns))
    return rich


def _cell(row: Mapping[str, Any], column: Column) -> str:
    return written(row.get(column.key), column.form)


def _is_text(table: Table, column: Column) -> bool:
    return any(isinstance(row.get(column.key), str) for row in table.rows)


def _bytes(value: float) -> str:
    size, unit = float(value), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if size < 1000 else f"{size:.0f} {_UNITS[unit]}"


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if abs(value) * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us" if value else "0"
