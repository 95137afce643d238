"""What a training step costs with its state in each set of tiers, beside torch's optimizer and the raw device.

All contenders train the same model on the same batch and must end with the same bits. Rounds are interleaved, with the
raw device measured in each. What a step costs is taken from steps back to back, so that nothing it leaves behind is
hidden in a forward pass; how it lies among forward and backward is shown beside.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness import (
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    Sample,
    bytes_of,
    command,
    environment,
    fio_entries,
    folders_of,
    interleave,
    publish,
)
from benchmarks.harness.command import drawable, writable
from benchmarks.harness.training import DTYPES, Contender, Turn, Work, torch_fused, verify_equal
from benchmarks.step_figures import TORCH, Bound, Figures
from benchmarks.step_plots import draw, draw_timeline
from tierstore import TieredAdamW

IN_FLIGHT = 8
RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Setting:
    """A tier set: the share of the chunks that stays in each tier but the last, next to what passes through."""

    name: str
    kept: Mapping[str, float]
    last: str
    capacity: int | None = None  # bytes of the cpu tier, instead of a share
    master: str = "auto"


def settings_for(device: str, cpu: int | None, dtype: torch.dtype) -> list[Setting]:
    """The tier sets that are compared. First the one with all state in the fastest tier; then, where it is stored in
    another form if it moves, one with all state there in that form.
    """
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    fastest = "cpu" if device == "cpu" else "gpu"
    found = [Setting(fastest, {}, fastest)]
    if dtype == torch.bfloat16:
        found.append(Setting(f"{fastest}, split", {}, fastest, master="split"))
    if device == "cpu":
        found += [Setting(f"cpu+nvme {share:.0%}", {"cpu": share}, "nvme") for share in shares]
    else:
        found += [Setting(f"gpu+cpu {share:.0%}", {"gpu": share}, "cpu") for share in shares]
        found.append(Setting("gpu+cpu+nvme 0%", {"gpu": 0.0, "cpu": 0.0}, "nvme"))
    if cpu is not None:
        kept = {"cpu": 0.0} if device == "cpu" else {"gpu": 0.0, "cpu": 0.0}
        found.append(Setting(f"{'+'.join(kept)}+nvme {cpu / 2**20:.0f} MiB", kept, "nvme", cpu))
    return [*found, Setting("gpu+cpu+nvme", {"gpu": 0.25, "cpu": 0.25}, "nvme")]


def measure(
    work: Work, chunk: int, folders: Sequence[Path], rounds: int, cpu: int | None = None, volume: int = 256 << 20
) -> tuple[Report, Any]:
    """Measure all tier sets. Answers the report and the trace of one step of the setting that waits most."""
    model, batch = work.make()
    with contextlib.ExitStack() as closing:
        contenders = {TORCH: Contender(work, model, batch, partial(torch_fused, lr=RATE))}
        bounds: dict[str, Bound] = {}
        settings = settings_for(work.device.type, cpu, work.dtype)
        for setting in settings:
            policy, bounds[setting.name] = _policy(model, setting, chunk, folders)
            made = partial(TieredAdamW, lr=RATE, policy=policy)
            contenders[setting.name] = Contender(work, model, batch, lambda m, made=made: made(m.parameters()))  # type: ignore[misc]
            closing.callback(contenders[setting.name].close)
        del model
        for contender in contenders.values():
            contender.turn(2)  # makes the state, and lets retention settle
        raw = closing.enter_context(RawDevice(folders, volume))
        turns, samples = _rounds(contenders, raw, rounds)
        alike = [setting.name for setting in settings if not setting.kept][-1]
        alone = next(setting.name for setting in settings if setting.last == "nvme")
        trace = _traced(contenders[alone])
        for name, contender in contenders.items():
            if name != alone:
                contender.step()
        if work.device.type != "cpu":  # where torch's kernel is another one, ours are only compared with each other
            del contenders[TORCH]
        verified, reference = verify_equal(contenders), next(iter(contenders))
        used = policy
    figures = Figures(work, turns, samples, bounds, ideal=settings[0].name, alike=alike)
    report = Report(
        benchmark="step_time",
        question="what does a step cost where the state does not fit, beside torch's, the raw device and the bound?",
        options={
            "parameters": work.parameters,
            "layers": work.layers,
            "width": work.width,
            "dtype": str(work.dtype).removeprefix("torch."),
            "device": work.device.type,
            "chunk": chunk,
            "rounds": rounds,
        },
        environment=environment(folders, used),
        raw=(*figures.raw(), *fio_entries(folders[0], ("mixed",), 8 << 20, IN_FLIGHT, volume)),
        tables=figures.tables(),
        checks=tuple(figures.checks()),
        verified=f"{verified / 1e6:.1f} MB of parameters, which ended with the bits of {reference}, and every raw byte",
        notes=tuple(figures.notes()),
        extra={"raw_bytes_per_second": figures.raw_rate},
    )
    return report, trace


def main(
    folder: Folders = None,
    parameters: Annotated[
        float, typer.Option(metavar="N", help="How many, in millions; needs 105 bytes of memory for each.")
    ] = 100.0,
    width: Annotated[int, typer.Option(min=8, help="Of a layer, which has width x width parameters.")] = 1024,
    rows: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of the parameters: fp32, bf16 or fp16.")] = "bf16",
    chunk: Annotated[str, typer.Option(help="Chunk size.")] = "8MiB",
    cpu: Annotated[str | None, typer.Option(help="One more row: a cpu tier of this size, such as 128MiB.")] = None,
    rounds: Rounds = 3,
    quick: Quick = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a step as a timeline for chrome://tracing and Perfetto.", callback=writable
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw that timeline.", callback=drawable)
    ] = None,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What does a step cost where the state does not fit, beside torch's, the raw device and the bound?"""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"allowed: {', '.join(DTYPES)}", param_hint="--dtype")
    layers = max(1, round(parameters * 1e6 / width**2))
    work = Work(2, 128, 2, DTYPES[dtype]) if quick else Work(layers, width, rows, DTYPES[dtype])
    size, volume = (16 << 10, 64 << 10) if quick else (bytes_of(chunk), 256 << 20)
    capacity = None if cpu is None else bytes_of(cpu)
    report, traced = measure(work, size, folders_of(folder), rounds, capacity, volume)
    if trace is not None:
        traced.write(trace)
    if timeline is not None:
        draw_timeline(traced).savefig(timeline)
    publish(report, json=json, is_quick=quick, plot=plot, draw=draw)


def _policy(model: Any, setting: Setting, chunk: int, folders: Sequence[Path]) -> tuple[dict[str, Any], Bound]:
    """A policy in which these shares of the chunks stay, and its bound; how many chunks there are is asked first."""
    names = [*setting.kept, setting.last]
    asked: dict[str, dict[str, Any]] = {name: {} for name in names}
    if "nvme" in names:
        asked["nvme"] = {"paths": [str(folder) for folder in folders]}
    if "gpu" in names and next(model.parameters()).device.type == "cpu":
        asked["gpu"] = {"device": "cpu"}
    policy = {"chunk_size": chunk, "tiers": asked, "state": {"master": setting.master}}
    if not setting.kept:
        return policy, _bound(model, policy, {})
    tight = {name: tier if name == setting.last else {**tier, "capacity": chunk * 4} for name, tier in asked.items()}
    chunks = _bound(model, {**policy, "tiers": tight}, {}).chunks
    kept = {name: round(share * chunks) for name, share in setting.kept.items()}
    for name, count in kept.items():
        asked[name]["capacity"] = (count + min(IN_FLIGHT, max(3, chunks // 8))) * chunk
    if setting.capacity is not None:
        asked["cpu"]["capacity"] = setting.capacity
        kept["cpu"] = max(0, setting.capacity // chunk - IN_FLIGHT)
    return policy, _bound(model, policy, kept)


def _bound(model: Any, policy: Mapping[str, Any], kept: Mapping[str, int]) -> Bound:
    """Ask an optimizer that takes no step how many chunks there are; what is kept in a faster tier passes no link."""
    with TieredAdamW(model.parameters(), lr=RATE, policy=dict(policy)) as optimizer:
        chunks = optimizer.bound()[0].layout.chunks
        nbytes = sum(chunk.record_bytes for chunk in chunks)
    links, above = {}, 0
    names = list(policy["tiers"])
    for faster, slower in itertools.pairwise(names):
        above += kept.get(faster, 0)
        links[f"{faster}-{slower}"] = 2 * max(0, len(chunks) - above) * nbytes / len(chunks)
    return Bound(len(chunks), nbytes, links)


def _rounds(
    contenders: Mapping[str, Contender], raw: RawDevice, rounds: int
) -> tuple[dict[str, list[Turn]], list[Sample]]:
    samples: list[Sample] = []
    runs: dict[str, Callable[[], Turn | None]] = {name: partial(c.turn, 2) for name, c in contenders.items()}
    runs["raw"] = lambda: samples.append(raw.measure("mixed", 8 << 20, 8))
    found = interleave(runs, rounds)
    return {name: [turn for turn in found[name] if turn is not None] for name in contenders}, samples


def _traced(contender: Contender) -> Any:
    assert contender.tiered is not None
    with contender.tiered.store.traced() as trace:
        contender.step()
    return trace


if __name__ == "__main__":
    command(main)
