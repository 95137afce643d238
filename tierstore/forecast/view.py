"""Prints a forecast, in 100 columns or what the terminal has: tables, a bar for each tier, and the verdict last."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.demo.words import share, size
from tierstore.forecast.answer import Endurance, Forecast, Remedy
from tierstore.forecast.pace import StepForecast
from tierstore.tuning import per_second

WIDTH = 100
BAR = 24
_FILLED, _FREE = "█", "░"


def print_forecast(console: Console, answer: Forecast) -> None:
    """All of it."""
    width = min(WIDTH, console.width)
    dtypes = ", ".join(f"{count:,} {name}" for name, count in answer.dtypes.items())
    each = "" if answer.ranks == 1 else f" in each of {answer.ranks} processes"
    console.print(f"{dtypes} parameters{each}; order {answer.order}, update: {answer.update}", width=width)
    for table in (_state(answer), _tiers(answer), _host(answer)):
        console.print()
        console.print(table, width=width)
    if answer.step is not None:
        console.print()
        console.print(_links(answer.step), width=width)
        console.print(_step(answer, answer.step), width=width)
    if answer.endurance is not None:
        console.print(_endurance(answer.endurance), width=width)
    for warning in answer.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), width=width)
    console.print()
    for line in _verdict(answer):
        console.print(line, width=width)


def _state(answer: Forecast) -> Table:
    table = _table("state by field", "bytes each", "bytes")
    for name, nbytes in answer.state.items():
        table.add_row(name, f"{nbytes / answer.params:.4g}", size(nbytes))
    padding = answer.record_bytes - answer.state_bytes
    table.add_row(
        "state, all fields", f"{answer.state_bytes / answer.params:.4g}", size(answer.state_bytes), style="bold"
    )
    table.add_row(f"in {answer.chunks:,} chunks of {size(answer.chunk_bytes)}, padded by", "", size(padding))
    table.add_row("parameters", f"{answer.parameter_bytes / answer.params:.4g}", size(answer.parameter_bytes))
    table.add_row("gradients", f"{answer.gradient_bytes / answer.params:.4g}", size(answer.gradient_bytes))
    return table


def _tiers(answer: Forecast) -> Table:
    table = _table("between steps", "reserved", "extents", "homes", "holds", "")
    for name, tier in answer.tiers.items():
        part = tier.resting / tier.extents if tier.extents else 0.0
        filled = round(part * BAR) or (1 if tier.resting else 0)
        bar = Text(_FILLED * filled, style="cyan") + Text(_FREE * (BAR - filled), style="dim")
        label = f"{name}, for staging only" if tier.is_staging else name
        holds = share(tier.resting, answer.chunks) if answer.fits else "-"
        table.add_row(label, size(tier.bytes), f"{tier.extents:,}", f"{tier.homes:,}", holds, bar)
    return table


def _host(answer: Forecast) -> Table:
    host = answer.host
    table = _table("host memory", "bytes", "")
    rows = [
        ("cpu tier", host.cpu_tier, "reserved when first used"),
        ("gpu tier, stand-in", host.gpu_stand_in, ""),
        ("buffer for one record", host.record_buffer, ""),
        ("scratch, at most", host.scratch, "for tiles, all threads"),
    ]
    for name, nbytes, note in rows:
        if nbytes:
            table.add_row(name, f"{nbytes:,}", note)
    place = "mapped from a swap folder's file" if host.state_dict_is_mapped else "in memory"
    table.add_row("a state_dict()", f"{host.state_dict:,}", place)
    table.add_row("in memory, all together", f"{host.total:,}", size(host.total), style="bold")
    return table


def _links(step: StepForecast) -> Table:
    table = _table("a step", "down", "up", "seconds", "at", "")
    for link in step.links.values():
        rate = per_second((link.bytes_down + link.bytes_up) / link.seconds) if link.seconds else "-"
        table.add_row(
            link.name,
            size(link.bytes_down),
            size(link.bytes_up),
            f"{_seconds(link.seconds)}",
            rate,
            _mark(step, link.name, link.source),
        )
    source = _mark(step, "arithmetic", step.update_source)
    table.add_row("arithmetic", "", "", f"{_seconds(step.arithmetic_seconds)}", "", source)
    return table


def _mark(step: StepForecast, name: str, source: str) -> str:
    return f"{source}; binds" if step.bound == name else source


def _step(answer: Forecast, step: StepForecast) -> str:
    hidden = ", as far as forward and backward do not hide it" if answer.update == "backward" else ""
    seconds, waiting = _seconds(step.seconds), _seconds(step.exposed_wait_seconds)
    written = size(answer.bytes_written_per_step or 0)
    return f"predicted, back to back: {seconds} s a step, {waiting} s of it waiting{hidden}; {written} to swap files"


def _endurance(endurance: Endurance) -> str:
    if endurance.days is None:
        return "endurance: no swap file is written"
    return (
        f"endurance: {endurance.bytes_per_day / 1e12:,.4g} TB a day at {_seconds(endurance.iteration_seconds)} s an "
        f"iteration: drives of {endurance.tbw / 1e12:,.4g} TB each last {endurance.days:,.1f} days"
    )


def _verdict(answer: Forecast) -> Iterator[Text]:
    if answer.fits:
        yield Text("It fits.", style="bold green")
        return
    yield Text(f"It does not fit: {answer.why_not}", style="bold red")
    for number, remedy in enumerate(answer.remedies):
        yield Text(f"{'the smallest change' if number == 0 else 'or'}: {_remedy(remedy)}")
    if not answer.remedies:
        yield Text("No single change makes it fit: give the tiers more room, add one, or plan fewer parameters.")


def _remedy(remedy: Remedy) -> str:
    if remedy.step_seconds is None:
        return remedy.change
    return f"{remedy.change} (then {_seconds(remedy.step_seconds)} s a step)"


def _seconds(seconds: float) -> str:
    """Three digits, or all before the point."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title, overflow="fold")
    for number, name in enumerate(columns):
        is_words = not name and number == len(columns) - 1
        table.add_column(name, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
    return table
