"""Prints what the doctor found, in 100 columns or what the terminal has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.doctor.finding import Finding, Level
from tierstore.rates import Rates
from tierstore.tuning import Tuning, per_second
from tierstore.units import bytes_text

WIDTH = 100
_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A line for each, what to do below it, and the count at the end."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=28)
    table.add_column(overflow="fold")
    before = ""
    for finding in findings:
        words = Text(finding.text)
        if finding.advice:
            words.append(f"\n-> {finding.advice}", style="italic")
        name = "" if finding.name == before else finding.name
        table.add_row(Text(finding.level.value, style=_STYLES[finding.level]), name, words)
        before = finding.name
    console.print(table, width=min(WIDTH, console.width))
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(", ".join(f"{count} {level.value}" for level, count in counts.items() if count), style="dim")


def print_rates(console: Console, rates: Rates, tuning: Tuning | None) -> None:
    """What was measured, and what is chosen from it where a policy says `auto`."""
    width = min(WIDTH, console.width)
    if rates.paths:
        console.print()
        console.print(_paths(rates), width=width)
    if rates.machine is not None:
        machine = rates.machine
        spared = machine.elements_per_second_sparing_a_core
        elements = f"{machine.elements_per_second / 1e6:,.0f} million elements a second with {machine.threads} threads"
        sparing = "" if spared is None else f", {spared / 1e6:,.0f} with a core left free"
        console.print()
        console.print(
            f"within 64 MiB, memory is copied at {per_second(machine.copied_bytes_per_second)} (read and written), and "
            f"fused AdamW updates {elements}{sparing}",
            width=width,
        )
    console.print()
    if tuning is None:
        console.print("No path was measured, so the defaults stay where a policy says `auto`.", width=width)
        return
    console.print(_choices(tuning), width=width)
    if tuning.bound:
        console.print()
        console.print(f"{tuning.bound[0].upper()}{tuning.bound[1:]}.", width=width)


def _paths(rates: Rates) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("direct I/O", overflow="fold")
    for name in ("request", "alone", "reads", "writes", "both at once"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, path in rates.paths.items():
        table.add_row(name, "4KiB", f"{path.latency_seconds * 1e3:.2f} ms", "", "", "")
        for number, size in enumerate(path.sizes, start=1):
            is_last = number == len(path.sizes)
            table.add_row(
                "",
                str(bytes_text(size.request_bytes)),
                f"{size.seconds_alone * 1e3:.2f} ms",
                per_second(size.bytes_per_second),
                per_second(path.write_bytes_per_second) if is_last else "",
                per_second(path.mixed_bytes_per_second) if is_last else "",
            )
    return table


def _choices(tuning: Tuning) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("where a policy says auto", no_wrap=True)
    table.add_column("chosen", justify="right", no_wrap=True)
    table.add_column("because", overflow="fold")
    for choice in tuning:
        table.add_row(choice.key, choice.shown, choice.why)
    return table
