"""Tells what a run is about to show, before the first step, and what was seen, at the end; in 80 columns."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text as Words

import tierstore
from tierstore.demo.options import Options
from tierstore.demo.policy import Chosen
from tierstore.demo.result import Result, Verdict
from tierstore.demo.text import Text
from tierstore.demo.view import WIDTH, route_table, split_table, tier_table
from tierstore.demo.words import size
from tierstore.stats import Stats


def print_header(
    console: Console, *, options: Options, text: Text, chosen: Chosen, stats: Stats, parameters: int, state_bytes: int
) -> None:
    """Say what is trained on what, how large its state is and where that will live."""
    tiers = _count(len(stats.tiers))
    console.print(f"tierstore {tierstore.__version__}: AdamW with its state in {tiers}, on real text", style="bold")
    grid = _grid()
    grid.add_row(
        "model",
        f"byte-level transformer, {options.layers} x {options.width}: {parameters:,} float32 parameters, "
        f"{size(4 * parameters)}",
    )
    grid.add_row("state", f"two moments for each of them: {size(state_bytes)}{_in_chunks(chosen)}")
    for name, tier in stats.tiers.items():
        grid.add_row(name, f"{size(tier.capacity_bytes)}{_whereabouts(name, chosen, stats)}")
    grid.add_row("policy", chosen.origin)
    grid.add_row(
        "text",
        f"{text.name}: {size(len(text.training))} to train on, {size(len(text.heldout))} held out",
    )
    grid.add_row("to beat", f"{text.unigram_entropy:.3f} nats per byte, the loss of knowing byte frequencies alone")
    console.print(grid, width=min(WIDTH, console.width))
    console.print()


def print_summary(console: Console, result: Result) -> None:
    """Say what was seen."""
    losses, meter = result.meter.losses, result.meter
    width = min(WIDTH, console.width)
    console.print()
    if result.is_interrupted:
        console.print(f"Interrupted: {len(losses)} of {result.options.steps} steps were made.", style="bold yellow")
        console.print()
    if not losses or meter.stats is None:
        return
    grid = _grid()
    grid.add_row("steps", f"{len(losses)} in {meter.seconds:.1f} s, {meter.tokens_per_second:,.0f} tokens/s")
    grid.add_row("loss", f"{losses[0]:.3f} in the first step, {losses[-1]:.3f} in the last, in nats per byte")
    if result.heldout_loss is not None:
        grid.add_row("held out", _heldout(result.heldout_loss, result.text.unigram_entropy))
    step = meter.stats.step
    traffic = f"{size(step.bytes_read / len(losses))} read and {size(step.bytes_written / len(losses))} written a step"
    if "nvme" in meter.stats.tiers:
        grid.add_row("nvme", f"{traffic}, by the {meter.stats.io.engine} engine")
        grid.add_row("bound by", step.bound)
    console.print(grid, width=width)
    console.print()
    split, routes = split_table(meter.split, per="in all"), route_table(meter.routes(), per="in all")
    for table in (split, tier_table(meter.stats), routes):
        if table.row_count:
            console.print(table, width=width)
            console.print()
    console.print(_verdict(result), width=width)
    if "nvme" in meter.stats.tiers:
        console.print("The swap files are gone; nothing is left behind.", style="dim")


def _verdict(result: Result) -> Words:
    if result.verdict is None:
        hint = "" if result.options.verify else " --verify trains the same with it and compares every bit."
        return Words(f"Not compared with torch.optim.AdamW.{hint}", style="dim")
    verdict = result.verdict
    took = f"torch.optim.AdamW(fused=True), on the same model: {verdict.reference_seconds:.1f} s."
    if verdict.is_equal:
        equal = f"Equal to the bit: all {verdict.weights:,} weights and all {len(result.meter.losses)} losses."
        return Words(f"{equal} {took}", style="bold green")
    return Words(f"NOT EQUAL: {_difference(verdict)}. {took}", style="bold red")


def _difference(verdict: Verdict) -> str:
    weights = f"{verdict.different_weights:,} of {verdict.weights:,} weights differ"
    return weights if verdict.first_step is None else f"{weights}, and losses do from step {verdict.first_step} on"


def _heldout(loss: float, entropy: float) -> str:
    place = "below" if loss < entropy else "not below"
    bits = f" ({loss / math.log(2):.2f} bits per byte)" if math.isfinite(loss) else ""
    return f"{loss:.3f}{bits}, {place} the {entropy:.3f} to beat"


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _in_chunks(chosen: Chosen) -> str:
    chunk = chosen.policy.chunk_size
    return "" if chunk == "auto" else f", moved in chunks of {size(chunk)}"


def _whereabouts(name: str, chosen: Chosen, stats: Stats) -> str:
    gpu = chosen.policy.tiers.gpu
    if name == "gpu" and gpu is not None and gpu.device == "cpu":
        return ", host memory in an accelerator's stead"
    if name == "nvme":
        return f", swap files in {', '.join(stats.io.paths)} ({'direct' if stats.io.direct else 'buffered'} I/O)"
    return ""


def _count(tiers: int) -> str:
    return {1: "one tier", 2: "two tiers", 3: "three tiers"}[tiers]
