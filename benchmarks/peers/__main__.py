"""`python -m benchmarks.peers`: the same optimizer step by tierstore and by what people use instead, side by side."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
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
    Rounds,
    command,
    fio_entries,
    folders_of,
    interleave,
    publish,
)
from benchmarks.harness.fragments import in_fragments, whole_share
from benchmarks.peers.contenders import contenders_for, with_memory
from benchmarks.peers.process import Contender, Peer
from benchmarks.peers.report import Figures, draw, report_of
from benchmarks.peers.work import Work, reference_weights

WARM_UP = 2
"""Steps before the first round: the first makes the state, the second finds the files written."""
WATCHED = 3
"""Steps after those whose memory is sampled."""
RAW_BYTES, RAW_REQUEST, RAW_DEPTH = 256 << 20, 8 << 20, 8
RAW = "raw device"
VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Of every process, unless the caller's environment has them: threads that wait do not spin beside I/O, or beside the
other processes of the round."""


def main(
    parameters: Annotated[int, typer.Option(min=1, help="At least so many.")] = 100_000_000,
    width: Annotated[int, typer.Option(min=1, help="Of the square layers they lie in.")] = 1664,
    dtype: Annotated[str, typer.Option(help="Of the parameters: bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the parameters are: cpu or cuda.")] = "cpu",
    memory: Annotated[float, typer.Option(metavar="MIB", help="Host memory for the optimizer of who swaps.")] = 128,
    share: Annotated[
        list[float] | None, typer.Option(help="And again with this share of the state in memory (K/M), 0 to 1.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose name begins so; more than once.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each system in a round.")] = 2,
    fragmented: Annotated[
        bool,
        typer.Option(
            "--fragmented", help="Start all in free memory that is in pieces, as after long use; takes half of it."
        ),
    ] = False,
    rounds: Rounds = 5,
    folder: Folders = None,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How fast is the same optimizer step with the peers, in the same memory, on the same disk?"""
    work = Work.of(parameters, width, dtype, device)
    if quick:
        work, memory, rounds, steps = Work.of(100_000, 64, dtype, device), 0.5, 1, 1
    budgets = {f"{memory:g} MiB": int(memory * 2**20)}
    budgets |= {f"{part:.0%} of state": int(part * work.state_bytes) for part in share or [0.5]}
    chosen = [c for c in contenders_for(work, budgets) if c.name.startswith(tuple(only or [""]))]
    if not chosen:
        raise typer.BadParameter(f"no row begins with {' or '.join(only or [])}", param_hint="--only")
    places = folders_of(folder)
    figures = measure(work, chosen, places[0], rounds=rounds, steps=steps, is_fragmented=fragmented)
    publish(report_of(replace(figures, only=only or ())), json=json, is_quick=quick, plot=plot, draw=draw)


def measure(
    work: Work, contenders: Sequence[Contender], folder: Path, *, rounds: int, steps: int, is_fragmented: bool = False
) -> Figures:
    """Run all contenders in interleaved rounds, the raw device among them, and compare every weight at the end."""
    with tempfile.TemporaryDirectory(dir=folder) as inside, contextlib.ExitStack() as stack:
        place, peers, seen = Path(inside), dict[str, Peer](), dict[str, int]()
        pieces = stack.enter_context(contextlib.ExitStack())
        if is_fragmented:
            _say("breaking up free memory")
            pieces.enter_context(in_fragments())
        whole = whole_share()
        for number, row in enumerate(contenders):
            _say(f"starting {row.name}")
            contender = with_memory(row, seen)
            peer = peers[row.name] = stack.enter_context(Peer(contender, work, place / str(number), _variables()))
            peer.steps(WARM_UP)
            peer.watch_memory(WATCHED)
            if peer.begun is not None and not peer.trouble:
                seen[row.name] = peer.begun["seen_bytes"]
        pieces.close()
        raw = stack.enter_context(RawDevice([folder], min(RAW_BYTES, work.state_bytes)))
        turns: dict[str, Any] = {name: partial(peer.steps, steps) for name, peer in peers.items()}
        turns[RAW] = partial(raw.measure, "mixed", RAW_REQUEST, RAW_DEPTH)
        _say(f"{rounds} rounds of {steps} steps")
        found = interleave(turns, rounds)
        fio = fio_entries(folder, ("mixed",), RAW_REQUEST, RAW_DEPTH, min(RAW_BYTES, work.state_bytes))
        _say("comparing all weights")
        ends = _ends(work, peers, place)
        return Figures(
            work=work,
            folder=folder,
            steps=steps,
            peers={name: (peer.contender, peer.begun or {}, peer.trouble) for name, peer in peers.items()},
            rounds={name: taken for name, taken in found.items() if name != RAW},
            raw=found[RAW],
            ends=ends,
            fio=fio,
            is_fragmented=is_fragmented,
            whole=whole,
        )


def _ends(work: Work, peers: dict[str, Peer], place: Path) -> dict[str, dict[str, Any] | None]:
    """Finish every peer against the reference after as many steps as it took."""
    counts = {peer.steps_taken for peer in peers.values() if not peer.trouble}
    for count, weights in reference_weights(work, counts).items():
        torch.save(weights, place / f"reference-{count}")
    return {name: peer.finish(place / f"reference-{peer.steps_taken}") for name, peer in peers.items()}


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def _variables() -> dict[str, str]:
    return {name: os.environ.get(name, value) for name, value in VARIABLES.items()}


if __name__ == "__main__":
    command(main)
