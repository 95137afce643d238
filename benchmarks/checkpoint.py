"""How fast checkpoints are saved and loaded, what that takes of memory, and what one beside training costs the steps.

The state is twenty times the cpu tier, and lies on the disk that the checkpoint is written to: every byte is read there
and written there, whether it is saved or loaded. torch's way has all state in memory, and moves the checkpoint alone:
`torch.save`, with the file synced, and `torch.load` with both `load_state_dict`s. So ours is measured with all state in
memory, too. What is read is read from the device: caches of files are dropped before. Peak memory is that of a fresh
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
    folders_of,
    interleave,
    median,
    publish,
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
IN_MEMORY = {"save": "save, state in memory", "load": "load, state in memory"}
OF_TORCH = {"save": "torch.save", "load": "torch.load"}
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


class Contenders:
    """The same training three times: with its state in tiers, in the cpu tier, and torch's. All saved in `folder`."""

    def __init__(self, parameters: int, folder: Path) -> None:
        self.folder = folder
        self.ours, self.in_memory, self.theirs = (Model(parameters) for _ in range(3))
        self.tiered = _tiered(self.ours, parameters, folder)
        self.host = TieredAdamW(self.in_memory.named_parameters(), lr=RATE, tiers=["cpu"])
        self.torch = torch.optim.AdamW(self.theirs.parameters(), lr=RATE, fused=True)
        for optimizer in (self.tiered, self.host, self.torch):
            optimizer.step()
        self.nbytes = 12 * (parameters // LAYERS) * LAYERS
        """Of weights and state."""

    def close(self) -> None:
        """Close ours."""
        self.tiered.close()
        self.host.close()

    def save(self) -> float:
        """Seconds of a checkpoint of ours."""
        return _seconds(lambda: self.tiered.save_checkpoint(self.folder / "ours", self.ours))

    def load(self) -> float:
        """Seconds of loading it."""
        _drop_caches(self.folder / "ours")
        return _seconds(lambda: self.tiered.load_checkpoint(self.folder / "ours", self.ours))

    def save_memory(self) -> float:
        """Seconds of a checkpoint of ours whose state is all in memory."""
        return _seconds(lambda: self.host.save_checkpoint(self.folder / "memory", self.in_memory))

    def load_memory(self) -> float:
        """Seconds of loading it."""
        _drop_caches(self.folder / "memory")
        return _seconds(lambda: self.host.load_checkpoint(self.folder / "memory", self.in_memory))

    def torch_save(self) -> float:
        """Seconds of torch's, with its file on the disk."""

        def save() -> None:
            with open(self.folder / "torch.pt", "wb") as file:
                torch.save({"model": self.theirs.state_dict(), "optimizer": self.torch.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

        return _seconds(save)

    def torch_load(self) -> float:
        """Seconds of loading torch's."""

        def load() -> None:
            saved = torch.load(self.folder / "torch.pt", weights_only=True)
            self.theirs.load_state_dict(saved["model"])
            self.torch.load_state_dict(saved["optimizer"])

        _drop_caches(self.folder / "torch.pt")
        return _seconds(load)

    def steps(self, *, is_saving: bool) -> tuple[float, float, float]:
        """Seconds of some steps, of the slowest one, and of the call that begins a save before them, if one is."""
        began = time.perf_counter()
        save = self.tiered.save_checkpoint(self.folder / "beside", wait=False) if is_saving else None
        call = time.perf_counter() - began
        taken = [_seconds(self.tiered.step) for _ in range(STEPS)]
        if save is not None:
            save.wait()
        total = time.perf_counter() - began
        for _ in range(STEPS):
            self.host.step()
            self.torch.step()
        return total, max(taken), call

    def go_astray(self) -> None:
        """Let ours make a step that torch's does not make, so that only a load makes them equal again."""
        self.tiered.step()
        self.host.step()

    def verify(self) -> int:
        """Compare what was loaded with what torch's optimizer has, to the bit."""
        verified = 0
        for model, optimizer in ((self.ours, self.tiered), (self.in_memory, self.host)):
            for number, (mine, theirs) in enumerate(zip(model.layers, self.theirs.layers, strict=True)):
                state, wanted = optimizer.state[mine], self.torch.state[theirs]
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
        for run in (one.save, one.save_memory, one.torch_save):  # what is saved later replaces something
            run()
        runs: dict[str, Callable[[], Any]] = {
            "save": one.save,
            "load": one.load,
            IN_MEMORY["save"]: one.save_memory,
            IN_MEMORY["load"]: one.load_memory,
            "torch.save": one.torch_save,
            "torch.load": one.torch_load,
            "write": lambda: raw.measure("write", 8 << 20, 8).rate,
            "read": lambda: raw.measure("read", 8 << 20, 8).rate,
            "steps": lambda: one.steps(is_saving=False),
            "steps, saving": lambda: one.steps(is_saving=True),
        }
        found = interleave(runs, rounds)
        for run in (one.save, one.save_memory, one.go_astray, one.load, one.load_memory):
            run()
        verified = one.verify()
        nbytes = one.nbytes
    peaks = peaks_of(parameters, folders[0])
    took = {name: median(found[name]) for kind in KINDS for name in (kind, IN_MEMORY[kind], OF_TORCH[kind])}
    rates = {kind: median(found[kind]) for kind in ("write", "read")}
    speed_up = {name: took[OF_TORCH[kind]] / took[name] for kind in KINDS for name in (kind, IN_MEMORY[kind])}
    plain, saving = ([median([run[n] for run in found[name]]) for n in range(3)] for name in ("steps", "steps, saving"))
    alone = median(found["save"])
    return Report(
        benchmark="checkpoint",
        question="how fast are checkpoints, what memory do they take, and what does one cost the training beside it?",
        options={"parameters": parameters, "layers": LAYERS, "times": TIMES, "steps": STEPS, "rounds": rounds},
        environment=environment(folders),
        raw=tuple(
            {"kind": kind, "request": 8 << 20, "in_flight": 8, "gb_per_s": rates[kind] / 1e9}
            for kind in ("write", "read")
        ),
        tables=(
            _table_of(nbytes, took, rates),
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
            *(_at_least(f"{kind} over {OF_TORCH[kind]}", speed_up[kind]) for kind in KINDS),
            _at_least(
                "both over both of torch's",
                sum(took[OF_TORCH[kind]] for kind in KINDS) / sum(took[kind] for kind in KINDS),
            ),
            *(_at_least(f"{IN_MEMORY[kind]}, over {OF_TORCH[kind]}", speed_up[IN_MEMORY[kind]]) for kind in KINDS),
            _memory_check("a save", peaks["save"]),
            _memory_check("a load", peaks["load"]),
            _memory_check("torch.save of a state dict", peaks["dict"]),
        ),
        verified=f"{verified / 1e6:.1f} MB: weights and state that were loaded have the bits of torch's",
        notes=(
            f"the state is {TIMES} times the cpu tier, and lies on the disk that the checkpoint is written to",
            "torch's state is in memory: nothing is read for saving it, and nothing written for loading it, as with "
            "ours in memory",
        ),
    )


def _table_of(nbytes: int, took: Mapping[str, float], raw: Mapping[str, float]) -> Table:
    """Rates of what the disk moves, held against its own: of a checkpoint, and of state on its way to or from it."""
    swapped = nbytes * 2 // 3 * (TIMES - 1) // TIMES
    rows = []
    for kind, checkpoint, swap in (("save", "write", "read"), ("load", "read", "write")):
        for name in (kind, IN_MEMORY[kind], OF_TORCH[kind]):
            other = swapped if name == kind else 0
            least = nbytes / raw[checkpoint] + other / raw[swap]
            rows.append(
                {
                    "what": name,
                    "seconds": took[name],
                    "of_torch": took[OF_TORCH[kind]] / took[name],
                    "moved": nbytes + other,
                    "rate": (nbytes + other) / took[name] / 1e9,
                    "of_raw": least / took[name],
                }
            )
    columns = (
        Column("what", "what"),
        Column("seconds", "took", "seconds"),
        Column("of_torch", "x torch", ".2f"),
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
    cpu = 8 * parameters // TIMES
    chunk = max(16 << 10, cpu // EXTENTS // 4096 * 4096)
    tiers = {"cpu": {"capacity": max(cpu, 4 * chunk)}, "nvme": {"paths": [str(folder)]}}
    return TieredAdamW(model.named_parameters(), lr=RATE, policy={"chunk_size": chunk, "tiers": tiers})


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


def _at_least(claim: str, seen: float) -> Check:
    return Check(claim, "at least 1.00", f"{seen:.2f}", seen >= 1)


def _memory_check(what: str, seen: int) -> Check:
    limit = BUFFERS + SLACK
    return Check(f"{what} takes over training", f"at most {limit >> 20} MiB", f"{seen / 2**20:.0f} MiB", seen <= limit)


if __name__ == "__main__":
    command(main)
