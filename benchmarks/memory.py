"""What state costs in memory and on disk: bytes reserved over bytes of state, and anonymous memory over the grant.

One fresh process per tier set, so that nothing of one is counted for the other. The state is many times the cpu tier,
so a store that kept more than it was granted would show. Afterwards the state is read out in full and compared with
what torch's optimizer has.
"""

from __future__ import annotations

import json as json_
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from benchmarks.harness import (
    Check,
    Column,
    Folders,
    Json,
    Plot,
    Quick,
    Report,
    Table,
    VerificationError,
    bytes_of,
    command,
    environment,
    folders_of,
    publish,
)
from benchmarks.harness.plots import Panel, bars
from benchmarks.harness.training import verify_bits
from tierstore import TieredAdamW

RATE = 1e-3
STEPS = 3
SLACK = 16 << 20
"""For what Python and torch themselves take."""
_RUN = """
import json, sys
from benchmarks.memory import measure_here
print(json.dumps(measure_here(*json.loads(sys.argv[1]))))
"""
STATE_DICT_BYTES = 64 << 20
"""Of a state dict so many bytes are ordinary memory, or the cpu tier's capacity if less; the rest is mapped."""
DRAWN = (
    Panel(0, "over", "bytes reserved over bytes of state"),
    Panel(0, "granted", "granted, MiB", 1 << 20),
    Panel(0, "grown", "peak anonymous memory, MiB", 1 << 20),
)


def measure(parameters: int, layers: int, cpu: int, chunk: int, folders: Sequence[Path]) -> Report:
    """Measure each tier set in a process of its own."""
    sets = {"cpu": "auto", "cpu+nvme": str(cpu), "nvme": "", "gpu+cpu+nvme": str(cpu)}
    rows = [_in_process(name, sets[name], parameters, layers, chunk, folders) for name in sets]
    columns = (
        Column("tiers", "tiers"),
        Column("state", "state", "bytes"),
        Column("reserved", "reserved", "bytes"),
        Column("over", "reserved/state", ".3f"),
        Column("granted", "granted", "bytes"),
        Column("grown", "peak", "bytes"),
        Column("beyond", "beyond", "bytes"),
        Column("with_state_dict", "state dict", "bytes"),
    )
    return Report(
        benchmark="memory",
        question="how much memory and disk does state cost over its own bytes?",
        options={"parameters": parameters, "layers": layers, "cpu": cpu, "chunk": chunk, "steps": STEPS},
        environment=environment(folders, {name: _policy(name, sets[name], chunk, folders) for name in sets}),
        tables=(Table("bytes, each tier set in a fresh process", columns, tuple(rows)),),
        checks=tuple(_checks(rows)),
        verified=f"{sum(row['verified'] for row in rows) / 1e6:.1f} MB: all state, read out, has the bits of torch's",
        notes=(
            "reserved: all extents of all tiers, those for chunks on their way included",
            "granted: the memory tiers, as large as policy and staging make them; nothing else should grow",
            "peak: anonymous memory over model and gradients, the most after any step; a state dict comes on top",
        ),
    )


def main(
    folder: Folders = None,
    parameters: Annotated[float, typer.Option(metavar="N", help="In millions.")] = 64.0,
    layers: Annotated[int, typer.Option(min=1, help="How many parameters hold them.")] = 16,
    cpu: Annotated[str, typer.Option(help="Capacity of the cpu tier.")] = "64MiB",
    chunk: Annotated[str, typer.Option(help="Chunk size.")] = "4MiB",
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How much memory and disk does state cost over its own bytes?"""
    if quick:
        report = measure(1 << 16, 4, 128 << 10, 16 << 10, folders_of(folder))
    else:
        report = measure(round(parameters * 1e6), layers, bytes_of(cpu), bytes_of(chunk), folders_of(folder))
    publish(report, json=json, is_quick=quick, plot=plot, draw=partial(bars, panels=DRAWN))


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure_here(
    name: str, cpu: str, parameters: int, layers: int, chunk: int, folders: Sequence[str]
) -> dict[str, Any]:
    """Train some steps in this process and answer one row."""
    _warm_up()
    model = _model(parameters, layers)
    before = anonymous_bytes()
    grown = []
    with TieredAdamW(model, lr=RATE, policy=_policy(name, cpu, chunk, folders)) as optimizer:
        for _ in range(STEPS):
            optimizer.step()
            grown.append(anonymous_bytes() - before)
        stats = optimizer.store.stats()
        state = optimizer.state_dict()["state"]
        with_state_dict = anonymous_bytes() - before
        verified = _verify(model, state, parameters, layers)
    state_bytes = sum(_nbytes(value) for entry in state.values() for value in entry.values() if value.dim())
    capacity = {tier: figures.capacity_bytes for tier, figures in stats.tiers.items()}
    granted = sum(nbytes for tier, nbytes in capacity.items() if tier != "nvme")
    return {
        "tiers": name,
        "state": state_bytes,
        "reserved": sum(capacity.values()),
        "over": sum(capacity.values()) / state_bytes,
        "granted": granted,
        "grown": max(grown),
        "beyond": max(grown) - granted,
        "with_state_dict": with_state_dict,
        "verified": verified,
    }


def _policy(name: str, cpu: str, chunk: int, folders: Sequence[str | Path]) -> dict[str, Any]:
    tiers: dict[str, Any] = {}
    if "gpu" in name:
        tiers["gpu"] = {"device": "cpu", "capacity": int(cpu)}
    if "cpu" in name:
        tiers["cpu"] = {"capacity": cpu if cpu == "auto" else int(cpu)}
    if "nvme" in name:
        tiers["nvme"] = {"paths": [str(folder) for folder in folders]}
    return {"chunk_size": chunk, "tiers": tiers}


def _warm_up() -> None:
    """Let everything be imported, and every thread started, before memory is counted."""
    parameter = nn.Parameter(torch.ones(2048))
    parameter.grad = torch.ones(2048)
    with TieredAdamW([parameter], lr=RATE, policy={"tiers": {"cpu": {}}}) as optimizer:
        optimizer.step()
        optimizer.state_dict()
    torch.optim.AdamW([parameter], lr=RATE, fused=True).step()


def _model(parameters: int, layers: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    model = [nn.Parameter(torch.randn(parameters // layers, generator=generator)) for _ in range(layers)]
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return model


def _verify(model: Sequence[nn.Parameter], state: Any, parameters: int, layers: int) -> int:
    """Compare parameters and moments with torch's, one parameter at a time."""
    verified = 0
    for number, twin in enumerate(_model(parameters, layers)):
        reference = torch.optim.AdamW([twin], lr=RATE, fused=True)
        for _ in range(STEPS):
            reference.step()
        expected = reference.state[twin]
        names = ("exp_avg", "exp_avg_sq")
        found: list[Tensor] = [model[number], *(state[number][name] for name in names)]
        verified += verify_bits(f"parameter {number}", found, [twin, *(expected[name] for name in names)])
    return verified


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _in_process(
    name: str, cpu: str, parameters: int, layers: int, chunk: int, folders: Sequence[Path]
) -> dict[str, Any]:
    arguments = [name, cpu, parameters, layers, chunk, [str(folder) for folder in folders]]
    command = [sys.executable, "-c", _RUN, json_.dumps(arguments)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise VerificationError(f"{name}: {result.stderr.strip().splitlines()[-1]}")
    row: dict[str, Any] = json_.loads(result.stdout.splitlines()[-1])
    return row


def _checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    found = []
    for row in rows:
        seen = row["grown"] / row["granted"]
        claim = f"{row['tiers']}: peak anonymous memory over the grant"
        target, limit = f"at most 1.10 + {SLACK >> 20} MiB", 1.1 * row["granted"] + SLACK
        found.append(Check(claim, target, f"{seen:.2f}", row["grown"] <= limit))
        if "nvme" in row["tiers"]:
            claim = f"{row['tiers']}: with a state dict"
            limit = row["granted"] + STATE_DICT_BYTES + SLACK
            target = f"at most {limit / 2**20:.0f} MiB"
            nbytes = row["with_state_dict"]
            found.append(Check(claim, target, f"{nbytes / 2**20:.0f} MiB", nbytes <= limit))
    return found


if __name__ == "__main__":
    command(main)
