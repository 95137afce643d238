"""How fast checkpoints are saved and loaded, what that takes of memory, and what one beside training costs the steps.

The state is twenty times the cpu tier, and lies on the disk that the checkpoint is written to: every byte is read there
and written there, whether it is saved or loaded. torch's own functions do the same work where they save and load this
very state, as `state_dict()` and `load_state_dict()` hand it over. torch's AdamW, which is saved beside, has all state
in memory and moves the checkpoint alone; so ours is measured with all state in memory, too. Files are synced when they
are saved, and what is read is read from the device: caches of files are dropped before. Peak memory is that of a fresh
process that saves, loads and hands out a state dict.
"""

from __future__ import annotations

import json as json_
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.harness import (
    Check,
    Column,
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    Table,
    VerificationError,
    command,
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
from benchmarks.harness.training import verify_bits
from benchmarks.memory import SLACK, anonymous_bytes
from tierstore import TieredAdamW

RATE = 1e-3
LAYERS = 16
TIMES = 20
"""The state, in capacities of the cpu tier."""
EXTENTS = 16
STEPS = 6
SAMPLE_SECONDS = 0.002
FIELDS = ("exp_avg", "exp_avg_sq")
KINDS = ("save", "load")
OURS = {"save": "save", "load": "load"}
SAME = {"save": "torch.save, same state", "load": "torch.load, same state"}
IN_MEMORY = {"save": "save, state in memory", "load": "load, state in memory"}
OF_TORCH = {"save": "torch.save, torch's AdamW", "load": "torch.load, torch's AdamW"}
BUFFERS = 128 << 20
"""Of memory that a save may take over the tiers: buffers for chunks, and for blocks of which only a part is known."""
_RUN = """
import json, sys
from benchmarks.checkpoint import peaks_here
print(json.dumps(peaks_here(*json.loads(sys.argv[1]))))
"""
DRAWN = (
    Panel(0, "rate", "GB/s"),
    Panel(1, "total", "steps and save, s"),
    Panel(2, "peak", "peak memory over that of training, MiB", 1 << 20),
)


class Model(nn.Module):
    """Parameters of float32 in layers, and their gradients."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        count = parameters // LAYERS
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(count, generator=generator)) for _ in range(LAYERS))
        for layer in self.layers:
            layer.grad = torch.randn(count, generator=generator)


@dataclass(frozen=True, slots=True)
class Way:
    """A model and its optimizer, saved to `path` and loaded from it by calls of ours."""

    model: Model
    optimizer: Any
    path: Path

    def save(self) -> float:
        """Seconds of saving both to the disk."""
        return _seconds(self._save)

    def load(self) -> float:
        """Seconds of loading both from the disk."""
        _drop_caches(self.path)
        return _seconds(self._load)

    def _save(self) -> None:
        self.optimizer.save_checkpoint(self.path, self.model)

    def _load(self) -> None:
        self.optimizer.load_checkpoint(self.path, self.model)


class WayOfTorch(Way):
    """The same by torch's functions, for any optimizer."""

    def _save(self) -> None:
        with open(self.path, "wb") as file:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def _load(self) -> None:
        saved = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Contenders:
    """The same training three times: with its state in tiers, in the cpu tier, and torch's. All saved in `folder`."""

    def __init__(self, parameters: int, folder: Path) -> None:
        models = [Model(parameters) for _ in range(3)]
        tiered = _tiered(models[0], parameters, folder)
        host = TieredAdamW(models[1].named_parameters(), lr=RATE, tiers=["cpu"])
        theirs = torch.optim.AdamW(models[2].parameters(), lr=RATE, fused=True)
        self.ours = Way(models[0], tiered, folder / "ours")
        self.same = WayOfTorch(models[0], tiered, folder / "ours.pt")
        self.in_memory = Way(models[1], host, folder / "memory")
        self.of_torch = WayOfTorch(models[2], theirs, folder / "torch.pt")
        self.folder = folder
        for way in (self.ours, self.in_memory, self.of_torch):
            way.optimizer.step()
        self.nbytes = 12 * (parameters // LAYERS) * LAYERS
        """Of weights and state."""

    def close(self) -> None:
        """Close ours."""
        self.ours.optimizer.close()
        self.in_memory.optimizer.close()

    def ways(self) -> dict[str, Callable[[], float]]:
        """All saves and loads, by their names."""
        named = ((OURS, self.ours), (SAME, self.same), (IN_MEMORY, self.in_memory), (OF_TORCH, self.of_torch))
        saves = {names["save"]: way.save for names, way in named}
        return saves | {names["load"]: way.load for names, way in named}

    def steps(self, *, is_saving: bool) -> tuple[float, float, float]:
        """Seconds of some steps, of the slowest one, and of the call that begins a save before them, if one is."""
        tiered = self.ours.optimizer
        began = time.perf_counter()
        save = tiered.save_checkpoint(self.folder / "beside", wait=False) if is_saving else None
        call = time.perf_counter() - began
        taken = [_seconds(tiered.step) for _ in range(STEPS)]
        if save is not None:
            save.wait()
        total = time.perf_counter() - began
        for _ in range(STEPS):
            self.in_memory.optimizer.step()
            self.of_torch.optimizer.step()
        return total, max(taken), call

    def verify(self) -> int:
        """Save ours, let it make a step that torch's does not make, load it, and compare to the bit; each way."""
        verified = 0
        for way in (self.ours, self.same, self.in_memory):
            way.save()
            way.optimizer.step()
            way.load()
            for number, (mine, theirs) in enumerate(zip(way.model.layers, self.of_torch.model.layers, strict=True)):
                state, wanted = way.optimizer.state[mine], self.of_torch.optimizer.state[theirs]
                found = [mine, *(state[name] for name in FIELDS)]
                verified += verify_bits(f"layer {number}", found, [theirs, *(wanted[name] for name in FIELDS)])
        return verified


def measure(
    parameters: int, folders: Sequence[Path], rounds: int, volume: int, peaks_of: Callable[[int, Path], dict[str, int]]
) -> Report:
    """Measure in one process, interleaved; memory by `peaks_of`, which is to do it in a fresh one."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=folders[0])))
        raw = closing.enter_context(RawDevice(folders[:1], volume))
        one = Contenders(parameters, folder)
        closing.callback(one.close)
        ways = one.ways()
        for name in (names["save"] for names in (OURS, SAME, IN_MEMORY, OF_TORCH)):  # what is saved later replaces it
            ways[name]()
        runs: dict[str, Callable[[], Any]] = {
            **ways,
            "write": lambda: raw.measure("write", 8 << 20, 8).rate,
            "read": lambda: raw.measure("read", 8 << 20, 8).rate,
            "steps": lambda: one.steps(is_saving=False),
            "steps, saving": lambda: one.steps(is_saving=True),
        }
        found = interleave(runs, rounds)
        verified = one.verify()
        nbytes = one.nbytes
    peaks = peaks_of(parameters, folders[0])
    rates = {kind: median(found[kind]) for kind in ("write", "read")}
    plain, saving = ([median([run[n] for run in found[name]]) for n in range(3)] for name in ("steps", "steps, saving"))
    alone = median(found["save"])
    return Report(
        benchmark="checkpoint",
        question="how fast are checkpoints, what memory do they take, and what does one cost the training beside it?",
        options={"parameters": parameters, "layers": LAYERS, "times": TIMES, "steps": STEPS, "rounds": rounds},
        environment=environment(folders, _policy(parameters, folders[0])),
        raw=tuple(
            {"kind": kind, "request": request_of(8 << 20, volume), "in_flight": 8, "gb_per_s": rates[kind] / 1e9}
            for kind in ("write", "read")
        )
        + fio_entries(folders[0], ("write", "read"), 8 << 20, 8, volume),
        tables=(
            _table_of(nbytes, found, rates),
            Table(
                f"{STEPS} steps, and with a save beside them",
                (
                    Column("what", "what"),
                    Column("total", "steps", "seconds"),
                    Column("slowest", "slowest", "seconds"),
                    Column("call", "call", "seconds"),
                ),
                (
                    {"what": "steps", "total": plain[0], "slowest": plain[1]},
                    {"what": "saving beside", "total": saving[0], "slowest": saving[1], "call": saving[2]},
                    {"what": "saving before", "total": plain[0] + alone, "slowest": plain[1], "call": alone},
                ),
                note="total: until the checkpoint is on the disk",
            ),
            Table(
                "peak anonymous memory over that of training, in a fresh process",
                (Column("what", "what"), Column("state", "state", "bytes"), Column("peak", "peak", "bytes")),
                tuple(
                    {"what": what, "state": peaks["state"], "peak": peaks[what]} for what in ("save", "load", "dict")
                ),
            ),
        ),
        checks=(
            *(_at_least(f"{kind} over {SAME[kind]}", ratio(found[SAME[kind]], found[kind])) for kind in KINDS),
            *(
                _at_least(f"{IN_MEMORY[kind]}, over {OF_TORCH[kind]}", ratio(found[OF_TORCH[kind]], found[name]))
                for kind, name in IN_MEMORY.items()
            ),
            *(_at_least(f"{kind} over {OF_TORCH[kind]}", ratio(found[OF_TORCH[kind]], found[kind])) for kind in KINDS),
            _at_least("both over both, torch's AdamW", ratio(_both(found, OF_TORCH), _both(found, OURS))),
            _memory_check("a save", peaks["save"]),
            _memory_check("a load", peaks["load"]),
            _memory_check("torch.save of a state dict", peaks["dict"]),
        ),
        verified=f"{verified / 1e6:.1f} MB: weights and state that were loaded have the bits of torch's",
        notes=(
            f"the state is {TIMES} times the cpu tier, and lies on the disk that the checkpoint is written to",
            "same state: ours, by torch's functions; state_dict() maps a file for it, whose bytes are not counted",
            "torch's AdamW has all state in memory, as ours in memory: nothing is read for saving it, nor written for "
            "loading it, as is for state on the disk",
        ),
    )


def _table_of(nbytes: int, found: Mapping[str, Sequence[float]], raw: Mapping[str, float]) -> Table:
    """Rates of what the disk moves, held against its own: of a checkpoint, and of state on its way to or from it."""
    swapped = nbytes * 2 // 3 * (TIMES - 1) // TIMES
    rows: list[dict[str, Any]] = []
    for kind, checkpoint, swap in (("save", "write", "read"), ("load", "read", "write")):
        for names, other in ((OURS, swapped), (SAME, None), (IN_MEMORY, 0), (OF_TORCH, 0)):
            name = names[kind]
            seconds = median(found[name])
            row = {"what": name, "seconds": seconds, "of_torch": ratio(found[OF_TORCH[kind]], found[name])}
            if other is not None:
                least = nbytes / raw[checkpoint] + other / raw[swap]
                moved = nbytes + other
                row |= {"moved": moved, "rate": moved / seconds / 1e9, "of_raw": least / seconds}
            rows.append(row)
    columns = (
        Column("what", "what"),
        Column("seconds", "took", "seconds"),
        Column("of_torch", "x torch's AdamW", ".2f"),
        Column("moved", "moved", "bytes"),
        Column("rate", "GB/s", ".2f"),
        Column("of_raw", "x raw", ".2f"),
    )
    return Table(
        "weights and state", columns, tuple(rows), note="moved: by the disk, state from or to the swap file too"
    )


def main(
    folder: Folders = None,
    parameters: Annotated[float, typer.Option(metavar="N", help="In millions.")] = 64.0,
    rounds: Rounds = 3,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How fast are checkpoints, what memory do they take, and what does one cost the training beside it?"""
    if quick:
        report = measure(1 << 17, folders_of(folder), 1, 1 << 20, peaks_here)
    else:
        report = measure(round(parameters * 1e6), folders_of(folder), rounds, 256 << 20, _in_process)
    publish(report, json=json, is_quick=quick, plot=plot, draw=partial(bars, panels=DRAWN))


def peaks_here(parameters: int, folder: str | Path) -> dict[str, int]:
    """Peak anonymous memory over that of training while this process saves, loads, and `torch.save`s a state dict."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        warm = Model(LAYERS * 1024)
        with _tiered(warm, LAYERS * 1024, Path(place)) as optimizer:
            optimizer.step()
            optimizer.save_checkpoint(Path(place) / "warm", warm)
            optimizer.load_checkpoint(Path(place) / "warm", warm)
        model = Model(parameters)
        with _tiered(model, parameters, Path(place)) as optimizer:
            for _ in range(2):
                optimizer.step()
            runs: dict[str, Callable[[], Any]] = {
                "save": lambda: optimizer.save_checkpoint(Path(place) / "saved", model),
                "load": lambda: optimizer.load_checkpoint(Path(place) / "saved", model),
                "dict": lambda: torch.save(optimizer.state_dict(), Path(place) / "dict.pt"),
            }
            found = {name: _peak_of(run) for name, run in runs.items()}
    return {**found, "state": 8 * parameters}


def _tiered(model: Model, parameters: int, folder: Path) -> TieredAdamW:
    return TieredAdamW(model.named_parameters(), lr=RATE, policy=_policy(parameters, folder))


def _policy(parameters: int, folder: Path) -> dict[str, Any]:
    cpu = 8 * parameters // TIMES
    chunk = max(16 << 10, cpu // EXTENTS // 4096 * 4096)
    tiers = {"cpu": {"capacity": max(cpu, 4 * chunk)}, "nvme": {"paths": [str(folder)]}}
    return {"chunk_size": chunk, "tiers": tiers}


def _peak_of(run: Callable[[], Any]) -> int:
    before = anonymous_bytes()
    seen = [before]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            seen.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        is_over.set()
        watcher.join()
    return max(seen) - before


def _in_process(parameters: int, folder: Path) -> dict[str, int]:
    command_line = [sys.executable, "-c", _RUN, json_.dumps([parameters, str(folder)])]
    result = subprocess.run(command_line, check=False, capture_output=True, text=True)
    if result.returncode:
        raise VerificationError(f"peak memory: {result.stderr.strip().splitlines()[-1]}")
    found: dict[str, int] = json_.loads(result.stdout.splitlines()[-1])
    return found


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _drop_caches(path: Path) -> None:
    """Let what is read next come from the device: of a file, or of all files in a folder, which are on the disk."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _both(found: Mapping[str, Sequence[float]], names: Mapping[str, str]) -> list[float]:
    """Seconds of saving and loading, round by round."""
    return [save + load for save, load in zip(found[names["save"]], found[names["load"]], strict=True)]


def _at_least(claim: str, seen: float) -> Check:
    return Check(claim, "at least 1.00", f"{seen:.2f}", seen >= 1)


def _memory_check(what: str, seen: int) -> Check:
    limit = BUFFERS + SLACK
    return Check(f"{what} takes over training", f"at most {limit >> 20} MiB", f"{seen / 2**20:.0f} MiB", seen <= limit)


if __name__ == "__main__":
    command(main)
