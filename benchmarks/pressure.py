"""What memory pressure costs a training: tiers that shrink and grow with it, and tiers that are emptied on demand.

The pressure is a stand-in, so that it is the same everywhere: a tier has what it has, and others take what a curve
says of a machine somewhat larger than the state. The training under it runs step by step beside one that is left
alone; both must have the same losses and end with the same bits, or there is no report. What is emptied on demand is
real: anonymous memory of the process before and after, beside the raw device in the same rounds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tierstore
from benchmarks.harness import (
    Check,
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    VerificationError,
    bytes_of,
    command,
    environment,
    fio_entries,
    folders_of,
    interleave,
    median,
    publish,
    request_of,
)
from benchmarks.harness.rawdevice import Kind
from benchmarks.harness.training import Work, verify_bits
from benchmarks.memory import SLACK, anonymous_bytes
from benchmarks.pressure_figures import (
    HIGH,
    LOW,
    PHASES,
    SETTLED,
    Seen,
    Turn,
    draw,
    memory_table,
    pressure_table,
    swing_table,
    time_table,
)
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.pressure import disk_space
from tierstore.rebalance import LEAST_AT_ONCE, PART_AT_ONCE
from tierstore.stats import Pressure, Stats

MACHINE = 2.5
"""Of the stand-in's memory, in states: all state takes two fifths of it."""
LITTLE, MUCH = 0.20, 0.70
"""What others have of it when there is no pressure, and when there is."""
SWINGS: dict[str, tuple[float, float, int]] = {
    "within the marks": (0.37, 0.43, 1),
    "across, each step": (LITTLE, MUCH, 1),
    "across, every 4": (LITTLE, MUCH, 4),
}
"""What others have by turns, as a share, and for how many steps."""
SWING_STEPS = 32
EMPTIED: dict[str, tuple[tuple[str, ...], str]] = {
    "cpu into nvme": (("cpu",), "nvme"),
    "gpu into cpu": (("gpu",), "cpu"),
    "gpu into nvme": (("gpu",), "nvme"),
    "gpu, cpu into nvme": (("gpu", "cpu"), "nvme"),
}
RETURNED = 0.95
"""Of what tiers hold, at least so much should leave the process."""
REQUEST = 8 << 20
RAW: tuple[Kind, ...] = ("write", "read")
FIRST, COPY = "first write", "copy"
"""What else is measured beside: writes into blocks that are reserved and were never written, and a plain copy."""


class Others:
    """Stands for the store's probe: a machine on which others take a share of memory, and a tier what it has."""

    def __init__(self, total: int, folder: Path) -> None:
        self.share = LITTLE
        self.cpu_bytes: Callable[[], int] = int
        self._total = total
        self._folder = folder

    def measure_now(self) -> dict[str, Pressure]:
        """What is used now; the disk is the real one."""
        disk = disk_space(self._folder)
        used = round(self.share * self._total) + self.cpu_bytes()
        return {
            "cpu": Pressure(used, self._total, "a stand-in"),
            "nvme": Pressure(disk.total_bytes - disk.free_bytes, disk.total_bytes, "the disk"),
        }

    measure = measure_now


class Training:
    """A model trained step by step, each timed until what it writes has landed; the losses are kept."""

    def __init__(self, work: Work, policy: Mapping[str, Any], parts: Parts | None = None) -> None:
        class Optimizer(TieredAdamW):
            pass

        if parts is not None:
            Optimizer.parts = parts
        self.model, self._batch = work.make()
        self.optimizer = Optimizer(self.model.parameters(), policy=dict(policy))
        self.losses: list[float] = []

    def step(self) -> float:
        """One iteration; the seconds of its step."""
        self.model.zero_grad()
        loss = self.model(self._batch)
        loss.backward()
        began = time.perf_counter()
        self.optimizer.step()
        self.optimizer.store.wait()
        seconds = time.perf_counter() - began
        self.losses.append(loss.item())
        return seconds

    def stats(self) -> Stats:
        """The store's."""
        return self.optimizer.store.stats()

    def verify(self, what: str, other: Training) -> int:
        """Compare losses and parameters; answer the bytes. Raises VerificationError."""
        if self.losses != other.losses:
            raise VerificationError(f"{what}: its losses are not those of the training that was left alone")
        return verify_bits(what, self.model.parameters(), other.model.parameters())


def measure(work: Work, chunk: int, folders: Sequence[Path], rounds: int, volume: int) -> Report:
    """Train under pressure, then empty tiers. Raises VerificationError."""
    tiers = {"cpu": {"watermarks": {"high": HIGH, "low": LOW}}, "nvme": _files(folders)}
    policy = {"chunk_size": chunk, "tiers": tiers}
    planned = tierstore.plan(work.make()[0], policy)
    total, bound = round(MACHINE * planned.tiers["cpu"].bytes), max(LEAST_AT_ONCE, planned.chunks // PART_AT_ONCE)
    curves = {"": list(_curve())}
    for name, (low, high, steps) in SWINGS.items():
        curves[name] = [LITTLE] * SETTLED + [high if step // steps % 2 else low for step in range(SWING_STEPS)]
    found = {name: _side_by_side(work, policy, Others(total, folders[0]), curve) for name, curve in curves.items()}
    runs = {name: steps for name, (steps, _) in found.items()}
    emptied, rates, compared = _on_demand(work, chunk, folders, rounds, volume)
    verified = compared + sum(nbytes for _, nbytes in found.values())
    at_once = max(seen.spilled + seen.promoted for steps in runs.values() for seen in steps)
    returned = min(turn.returned for name, turns in emptied.items() if name.endswith("nvme") for turn in turns)
    is_large = min(turn.held for turns in emptied.values() for turn in turns) > SLACK
    return Report(
        benchmark="pressure",
        question="what does memory pressure cost a training, and how fast is memory given back and taken again?",
        options={
            "parameters": work.parameters,
            "width": work.width,
            "chunk": chunk,
            "chunks": planned.chunks,
            "rounds": rounds,
            "machine": total,
        },
        environment={**environment(folders), "policy": {"chunk_size": chunk, "watermarks": [HIGH, LOW]}},
        raw=tuple(
            {"kind": kind, "request": request_of(REQUEST, volume), "in_flight": 8, "gb_per_s": rates[kind] / 1e9}
            for kind in (*RAW, FIRST)
        )
        + fio_entries(folders[0], RAW, REQUEST, 8, volume),
        tables=(
            pressure_table(runs.pop("")),
            swing_table(runs, bound),
            memory_table(emptied),
            time_table(emptied, rates),
        ),
        checks=(
            Check("losses and parameters of trainings under pressure", "the same bits", "the same bits", True),
            Check("chunks that leave or may come at once", f"at most {bound}", str(at_once), at_once <= bound),
            Check(
                "memory returned, of what was held",
                f"at least {RETURNED:.0%}",
                f"{returned:.1%}",
                returned >= RETURNED if is_large else None,
            ),
        ),
        verified=f"{verified / 1e6:.1f} MB of parameters, and all losses, have the bits of trainings left alone",
        notes=(
            "a step is timed until what it writes has landed: nothing here hides its write-backs",
            "pressure is a stand-in: others take what a curve says, and the tier has what it has",
            "gpu is host memory here, which stands in for an accelerator",
        ),
        extra={"steps": [asdict(seen) for seen in found[""][0]]},
    )


def main(
    folder: Folders = None,
    millions: Annotated[float, typer.Option(metavar="N", help="Parameters, in millions.")] = 24.0,
    width: Annotated[int, typer.Option(min=8, help="Of a layer, which has width x width parameters.")] = 1024,
    chunk: Annotated[str, typer.Option(help="Chunk size.")] = "2MiB",
    rounds: Rounds = 5,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """What does memory pressure cost a training, and how fast is memory given back and taken again?"""
    if quick:
        millions, width, chunk, rounds = 0.08, 64, "16KiB", 1
    work = Work(max(2, round(millions * 1e6 / width**2)), width, 8, torch.float32, torch.device("cpu"))
    report = measure(work, bytes_of(chunk), folders_of(folder), rounds, 1 << 20 if quick else 256 << 20)
    publish(report, json=json, plot=plot, draw=draw, is_quick=quick)


# -- under pressure ---------------------------------------------------------------------------------------------------


def _curve() -> Iterator[float]:
    """What others have at each step."""
    yield from [LITTLE] * PHASES["before"]
    yield from _line(LITTLE, MUCH, PHASES["rising"])
    yield from [MUCH] * PHASES["high"]
    yield from _line(MUCH, LITTLE, PHASES["falling"])
    yield from [LITTLE] * PHASES["after"]


def _line(begin: float, end: float, steps: int) -> list[float]:
    return [begin + (end - begin) * (step + 1) / steps for step in range(steps)]


def _side_by_side(
    work: Work, policy: Mapping[str, Any], others: Others, curve: Sequence[float]
) -> tuple[list[Seen], int]:
    """Train under pressure, and, step by step beside it, without; answer what was seen, and the bytes compared."""
    with contextlib.ExitStack() as closing:
        one = Training(work, policy, Parts(open_probe=lambda **_: others))  # type: ignore[arg-type]
        other = Training(work, {**policy, "adapt": False})
        for training in (one, other):
            closing.callback(training.optimizer.close)
        found, seconds = [], [0.0, 0.0]
        others.cpu_bytes = lambda: one.stats().tiers["cpu"].capacity_bytes
        before = one.stats()
        for step, share in enumerate(curve):
            others.share = share
            for number in (0, 1) if step // 2 % 2 else (1, 0):
                seconds[number] = (one, other)[number].step()
            after = one.stats()
            found.append(_seen(before, after, share, seconds[0], seconds[1], policy["chunk_size"]))
            before = after
        return found, one.verify("under pressure", other)


def _seen(before: Stats, after: Stats, others: float, seconds: float, undisturbed: float, chunk: int) -> Seen:
    spilled = after.spilled - before.spilled
    within = _bytes(after, "cpu->cpu") - _bytes(before, "cpu->cpu")
    return Seen(
        others,
        after.pressure["cpu"].share if after.pressure else 0.0,
        after.tiers["cpu"].capacity_bytes // chunk,
        spilled,
        after.promoted - before.promoted,
        _bytes(after) - _bytes(before),
        spilled * chunk + within,
        seconds,
        undisturbed,
    )


def _bytes(stats: Stats, *routes: str) -> int:
    """Moved on some routes, or on all."""
    return sum(route.bytes for name, route in stats.routes.items() if not routes or name in routes)


# -- on demand --------------------------------------------------------------------------------------------------------


def _on_demand(
    work: Work, chunk: int, folders: Sequence[Path], rounds: int, volume: int
) -> tuple[dict[str, list[Turn]], dict[str, float], int]:
    """Empty and fill tiers, in turn with the raw device; its bytes per second, and the bytes compared in the end."""
    state = tierstore.plan(work.make()[0], {"chunk_size": chunk, "tiers": {"cpu": {}}}).tiers["cpu"].bytes
    half: dict[str, Any] = {"device": "cpu", "capacity": state // 2 // chunk * chunk}
    with contextlib.ExitStack() as closing:
        raw = closing.enter_context(RawDevice(folders, volume))
        alone = Training(work, {"chunk_size": chunk, "adapt": False, "tiers": {"cpu": {}}})
        trainings = {}
        for name, (tiers, _) in EMPTIED.items():
            given: dict[str, Any] = {"cpu": {}, "nvme": _files(folders), **({"gpu": half} if "gpu" in tiers else {})}
            trainings[name] = Training(work, {"chunk_size": chunk, "adapt": False, "tiers": given})
        for training in (alone, *trainings.values()):
            closing.callback(training.optimizer.close)
            for _ in range(SETTLED):
                training.step()
        runs: dict[str, Callable[[], Any]] = {
            name: partial(_turn, training, *EMPTIED[name]) for name, training in trainings.items()
        }
        runs |= {kind: partial(_raw_rate, raw, kind) for kind in RAW}
        runs |= {FIRST: partial(_first_rate, folders, volume), COPY: partial(_copy_rate, half["capacity"])}
        found = interleave(runs, rounds)
        for _ in range(2 * rounds):
            alone.step()
        verified = sum(training.verify(name, alone) for name, training in trainings.items())
    return (
        {name: found[name] for name in trainings},
        {kind: median(found[kind]) for kind in (*RAW, FIRST, COPY)},
        verified,
    )


def _turn(training: Training, tiers: Sequence[str], to: str) -> Turn:
    """Two steps, and before the second one empty tiers and fill them again."""
    steady = training.step()
    store, held = training.optimizer.store, anonymous_bytes()
    start = training.stats()
    began = time.perf_counter()
    done = training.optimizer.offload(to, tiers)
    emptied = time.perf_counter() - began
    left, middle = anonymous_bytes(), training.stats()
    began = time.perf_counter()
    training.optimizer.reload()
    store.wait()
    filled = time.perf_counter() - began
    end = training.stats()
    written = sum(_bytes(middle, f"{tier}->{to}") - _bytes(start, f"{tier}->{to}") for tier in ("gpu", "cpu"))
    read = sum(_bytes(end, f"{to}->{tier}") - _bytes(middle, f"{to}->{tier}") for tier in ("gpu", "cpu"))
    return Turn(done.memory_bytes, held, left, emptied, written, filled, read, training.step(), steady)


def _raw_rate(raw: RawDevice, kind: Kind) -> float:
    return raw.measure(kind, REQUEST, 8).rate


def _first_rate(folders: Sequence[Path], volume: int) -> float:
    with RawDevice(folders, volume) as raw:
        return raw.measure_first_write(REQUEST, 8).rate


def _copy_rate(nbytes: int) -> float:
    """Of torch's copy of so much into memory that nobody has touched. Raises VerificationError."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    began = time.perf_counter()
    copy = torch.empty(nbytes, dtype=torch.uint8).copy_(source)
    seconds = time.perf_counter() - began
    if not torch.equal(copy, source):
        raise VerificationError("a plain copy: other bytes than were copied")
    return nbytes / seconds


def _files(folders: Sequence[Path]) -> dict[str, Any]:
    return {"paths": [str(folder) for folder in folders]}


if __name__ == "__main__":
    command(main)
