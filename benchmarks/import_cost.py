"""What `import tierstore`, and `from tierstore import TieredAdamW`, cost over `import torch`.

Fresh processes in turn, each of which must have got the module it asked for. The limits are those of the architecture:
100 ms and 10 MiB for `import tierstore`.
"""

from __future__ import annotations

import json as json_
import subprocess
import sys
from dataclasses import dataclass
from functools import partial

from benchmarks.harness import (
    Check,
    Column,
    Json,
    Plot,
    Quick,
    Report,
    Rounds,
    Table,
    VerificationError,
    command,
    environment,
    interleave,
    median,
    publish,
)
from benchmarks.harness.plots import Panel, bars

PROBE = """
import json, sys, time
import torch, torch.distributed
rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096
before, began = rss(), time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - began, rss() - before, 'tierstore' in sys.modules]))
"""
STATEMENTS = ("import tierstore", "from tierstore import TieredAdamW")
LIMIT_SECONDS, LIMIT_BYTES = 0.1, 10 << 20
DRAWN = (
    Panel(0, "seconds", "ms", 1e-3),
    Panel(0, "bytes", "MiB", 1 << 20),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one statement, once, over torch."""

    seconds: float
    bytes: int


def measure(rounds: int) -> Report:
    """Run every statement `rounds` times."""
    found = interleave({statement: lambda s=statement: _cost_of(s) for statement in STATEMENTS}, rounds)  # type: ignore[misc]
    seconds = {statement: median([cost.seconds for cost in costs]) for statement, costs in found.items()}
    nbytes = {statement: median([cost.bytes for cost in costs]) for statement, costs in found.items()}
    rows = [{"statement": name, "seconds": seconds[name], "bytes": nbytes[name]} for name in STATEMENTS]
    plain = STATEMENTS[0]
    columns = (
        Column("statement", "statement, after torch"),
        Column("seconds", "time", "seconds"),
        Column("bytes", "memory", "bytes"),
    )
    return Report(
        benchmark="import_cost",
        question="what does importing tierstore add to importing torch?",
        options={"rounds": rounds},
        environment=environment(),
        tables=(Table(f"medians of {rounds} fresh processes each", columns, tuple(rows)),),
        verified=f"each of {rounds * len(STATEMENTS)} processes had the module loaded when its clock stopped",
        checks=(
            _check("time of `import tierstore`", seconds[plain] * 1e3, LIMIT_SECONDS * 1e3, "ms"),
            _check("memory of `import tierstore`", nbytes[plain] / 2**20, LIMIT_BYTES / 2**20, "MiB"),
        ),
    )


def main(rounds: Rounds = 7, quick: Quick = False, json: Json = None, plot: Plot = None) -> None:
    """What does importing tierstore add to importing torch?"""
    publish(measure(1 if quick else rounds), json=json, is_quick=quick, plot=plot, draw=partial(bars, panels=DRAWN))


def _cost_of(statement: str) -> Cost:
    code = PROBE.format(statement=statement)
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, nbytes, is_loaded = json_.loads(result.stdout)
    if not is_loaded:
        raise VerificationError(f"{statement!r} did not load tierstore")
    return Cost(seconds, nbytes)


def _check(claim: str, seen: float, limit: float, unit: str) -> Check:
    return Check(claim, f"at most {limit:.0f} {unit}", f"{seen:.1f} {unit}", seen <= limit)


if __name__ == "__main__":
    command(main)
