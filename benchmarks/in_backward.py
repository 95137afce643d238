"""How much of what a step reads and writes is hidden when chunks are updated while backward runs (`update: backward`).

The batch is chosen so that backward takes about as long as the raw device needs for the bytes of a step: shorter, and
there is too little to hide behind; longer, and all would be hidden. Whole iterations follow one another, so what one
leaves behind counts in the next. All contenders train the same model on the same batch and must end with the same bits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import (
    Check,
    Column,
    Device,
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    Sample,
    Table,
    bytes_of,
    command,
    device_of,
    environment,
    fio_entries,
    folders_of,
    interleave,
    median,
    publish,
    ratio,
    request_of,
)
from benchmarks.harness.plots import Panel, bars
from benchmarks.harness.training import DTYPES, Contender, Iteration, Work, verify_equal
from tierstore import TieredAdamW
from tierstore.device import wait_for_all_work

RATE = 1e-3
IN_MEMORY = "in memory"
ON_THEIR_WAY = 8
SHARES = (0.0, 0.5)
UPDATES = ("step", "backward")
MOST_ROWS = 1 << 14
DRAWN = (
    Panel(0, "whole", "a whole iteration, ms", 1e-3),
    Panel(0, "of_step", "time of update: step, percent", 0.01),
    Panel(0, "hidden", "hidden, percent", 0.01),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A contender: which share of the chunks stays in memory, and when they are updated."""

    share: float
    update: str

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"cpu+nvme {self.share:.0%}, {self.update}"


def measure(
    work: Work,
    chunk: int,
    folders: Sequence[Path],
    rounds: int,
    *,
    iterations: int,
    rows: int | None,
    volume: int,
    gpu: Mapping[str, Any] | None = None,
) -> Report:
    """Measure both ways for each share; `rows` None: as many in a batch as make backward long enough.

    `gpu`: settings of a gpu tier, which only has what is on its way.
    """
    contenders: dict[str, Contender] = {}
    chosen = [Row(share, update) for share in SHARES for update in UPDATES]
    in_memory = {"cpu": {}} if gpu is None else {"gpu": gpu}
    samples: list[Sample] = []
    with contextlib.ExitStack() as closing:
        raw = closing.enter_context(RawDevice(folders, volume))
        chunks, state_bytes = _chunks_of(work, chunk, folders, gpu)
        if rows is None:
            rate = raw.measure("mixed", 8 << 20, 8).rate
            work = _with_rows_for(work, 2 * state_bytes / rate)
        else:
            work = replace(work, rows=rows)
        model, batch = work.make()
        policies: dict[str, dict[str, Any]] = {IN_MEMORY: {"chunk_size": chunk, "tiers": in_memory}}
        policies |= {row.name: _policy(row, chunk, chunks, folders, gpu) for row in chosen}
        for name, policy in policies.items():
            made = partial(TieredAdamW, lr=RATE, policy=policy)
            contenders[name] = Contender(work, model, batch, lambda m, made=made: made(m.parameters()))  # type: ignore[misc]
            closing.callback(contenders[name].close)
            contenders[name].iterate(3)  # makes the state, hears in which order gradients come, and follows it once
        runs: dict[str, Any] = {name: partial(one.iterate, iterations) for name, one in contenders.items()}
        runs["raw"] = lambda: samples.append(raw.measure("mixed", 8 << 20, 8))
        found: dict[str, list[Iteration]] = interleave(runs, rounds)
        del found["raw"]
        verified = verify_equal(contenders)
    figures = Figures(found, samples)
    return Report(
        benchmark="in_backward",
        question="how much of a step's reads and writes is hidden when chunks are updated while backward runs?",
        options={
            "parameters": work.parameters,
            "layers": work.layers,
            "width": work.width,
            "rows": work.rows,
            "dtype": str(work.dtype).removeprefix("torch."),
            "device": work.device.type,
            "chunk": chunk,
            "chunks": chunks,
            "iterations": iterations,
            "rounds": rounds,
        },
        environment=environment(folders, policies[chosen[-1].name]),
        raw=(
            {
                "kind": "mixed",
                "request": request_of(8 << 20, volume),
                "in_flight": 8,
                "gb_per_s": figures.raw_rate / 1e9,
            },
            *fio_entries(folders[0], ("mixed",), 8 << 20, 8, volume),
        ),
        tables=(figures.table(chosen),),
        checks=tuple(figures.checks()),
        verified=f"{verified / 1e6:.1f} MB of parameters, which ended with the same bits, and every raw byte",
        notes=(
            f"K%: that share of the chunks stays in memory from step to step, which has {ON_THEIR_WAY} extents more; "
            "a gpu tier, if there is one, has as many, and all chunks in the row in memory",
            "I/O: what the raw device takes for the bytes of an iteration; hidden: of what update: step adds to "
            "forward and backward (those of the row in memory), the part that update: backward does not",
        ),
    )


def main(
    folder: Folders = None,
    parameters: Annotated[
        float, typer.Option(metavar="N", help="How many, in millions; needs 40 bytes of memory for each.")
    ] = 100.0,
    width: Annotated[int, typer.Option(min=8, help="Of a layer, which has width x width parameters.")] = 1024,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows in a batch; else as many as make backward take as long as the I/O.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the parameters: fp32, bf16 or fp16.")] = "bf16",
    device: Device = "cpu",
    chunk: Annotated[str, typer.Option(help="Chunk size.")] = "8MiB",
    iterations: Annotated[int, typer.Option(min=1, help="In a row, of each, in each round.")] = 2,
    rounds: Rounds = 3,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How much of a step's reads and writes is hidden when chunks are updated while backward runs?"""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"allowed: {', '.join(DTYPES)}", param_hint="--dtype")
    layers = max(1, round(parameters * 1e6 / width**2))
    where = device_of(device)
    work = Work(3, 128, 2, DTYPES[dtype], where) if quick else Work(layers, width, 8, DTYPES[dtype], where)
    size, volume = (16 << 10, 64 << 10) if quick else (bytes_of(chunk), 256 << 20)
    rows = rows or (2 if quick else None)
    gpu = None if where.type == "cpu" else {}
    report = measure(work, size, folders_of(folder), rounds, iterations=iterations, rows=rows, volume=volume, gpu=gpu)
    publish(report, json=json, is_quick=quick, plot=plot, draw=partial(bars, panels=DRAWN))


@dataclass(frozen=True, slots=True)
class Figures:
    """Iterations by contender, and a raw sample per round."""

    found: Mapping[str, Sequence[Iteration]]
    samples: Sequence[Sample]

    @property
    def raw_rate(self) -> float:
        """Bytes per second of the raw device, read and written at once."""
        return median([sample.rate for sample in self.samples])

    def table(self, chosen: Sequence[Row]) -> Table:
        """A row for each contender."""
        columns = (
            Column("tiers", "tiers, update"),
            Column("forward", "forward", "seconds"),
            Column("backward", "backward", "seconds"),
            Column("step", "step", "seconds"),
            Column("whole", "whole", "seconds"),
            Column("io", "I/O", "seconds"),
            Column("hidden", "hidden", "percent"),
            Column("of_step", "time of update: step", "percent"),
        )
        rows = [self._row(IN_MEMORY, None)]
        rows += [self._row(row.name, Row(row.share, "step").name) for row in chosen]
        return Table("whole iterations, one after another, medians", columns, tuple(rows))

    def checks(self) -> list[Check]:
        """What `update: backward` is for."""
        found = []
        for share in SHARES:
            name, other = Row(share, "backward").name, Row(share, "step").name
            seen = ratio(self._wholes(name), self._wholes(other))
            found.append(Check(f"{name}: time of update: step", "below 100%", f"{seen:.0%}", seen < 1.0))
        return found

    def _row(self, name: str, beside: str | None) -> dict[str, Any]:
        own = self.found[name]
        row: dict[str, Any] = {
            "tiers": name,
            "forward": median([one.forward for one in own]),
            "backward": median([one.backward for one in own]),
            "step": median([one.step for one in own]),
            "whole": median(self._wholes(name)),
        }
        if beside is None:
            return row
        row["io"] = median([one.bytes / sample.rate for one, sample in zip(own, self.samples, strict=True)])
        row["of_step"] = ratio(self._wholes(name), self._wholes(beside))
        if name != beside:
            row["hidden"] = 1 - ratio(self._added(name), self._added(beside))
        return row

    def _added(self, name: str) -> list[float]:
        """What an iteration takes beyond a forward and a backward beside which nothing is read or written."""
        alone = [one.forward + one.backward for one in self.found[IN_MEMORY]]
        return [whole - least for whole, least in zip(self._wholes(name), alone, strict=True)]

    def _wholes(self, name: str) -> list[float]:
        return [one.whole for one in self.found[name]]


def _chunks_of(work: Work, chunk: int, folders: Sequence[Path], gpu: Mapping[str, Any] | None) -> tuple[int, int]:
    """How many chunks there are where they cross a file, and their bytes: asked of an optimizer that takes no step."""
    model, _ = work.make()
    with TieredAdamW(
        model.parameters(), lr=RATE, policy=_policy(Row(0.0, "step"), chunk, 0, folders, gpu)
    ) as optimizer:
        chunks = optimizer.bound()[0].layout.chunks
        return len(chunks), sum(one.record_bytes for one in chunks)


def _policy(
    row: Row, chunk: int, chunks: int, folders: Sequence[Path], gpu: Mapping[str, Any] | None
) -> dict[str, Any]:
    passing = min(ON_THEIR_WAY, max(3, chunks // 8))
    tiers: dict[str, Any] = {} if gpu is None else {"gpu": {**gpu, "capacity": passing * chunk}}
    tiers["cpu"] = {"capacity": (round(row.share * chunks) + passing) * chunk}
    tiers["nvme"] = {"paths": [str(folder) for folder in folders]}
    return {"chunk_size": chunk, "update": row.update, "tiers": tiers}


def _with_rows_for(work: Work, seconds: float) -> Work:
    """The work with a batch whose backward takes about so long, found by doubling it."""
    model, batch = work.make()
    model(batch).backward()  # an accelerator's first one also loads its libraries
    took = 0.0
    while took < seconds and work.rows < MOST_ROWS:
        work = replace(work, rows=work.rows * (1 if took == 0.0 else 2))
        _, batch = replace(work, layers=1).make()
        model.zero_grad()
        loss = model(batch)
        wait_for_all_work(work.device)
        began = time.perf_counter()
        loss.backward()
        wait_for_all_work(work.device)
        took = time.perf_counter() - began
    return work


if __name__ == "__main__":
    command(main)
