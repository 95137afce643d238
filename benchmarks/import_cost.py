"""Measures what `import tierstore`, and `from tierstore import TieredAdamW`, cost over `import torch`.

`python -m benchmarks.import_cost` starts fresh processes in turn and prints medians of seconds and resident bytes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

PROBE = """
import json, time
import torch, torch.distributed
rss = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096
before, began = rss(), time.perf_counter()
{statement}
print(json.dumps([time.perf_counter() - began, rss() - before]))
"""
STATEMENTS = ("import tierstore", "from tierstore import TieredAdamW")


def measure(statement: str) -> tuple[float, int]:
    """Run a statement after torch in a fresh process; return its seconds and resident bytes."""
    code = PROBE.format(statement=statement)
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, nbytes = json.loads(result.stdout)
    return seconds, nbytes


def main(rounds: int = 7) -> None:
    """Print the medians."""
    runs = {statement: [measure(statement) for _ in range(rounds)] for statement in STATEMENTS}
    for statement, figures in runs.items():
        seconds = statistics.median(run[0] for run in figures)
        nbytes = statistics.median(run[1] for run in figures)
        print(f"{statement:40} {seconds * 1e3:7.1f} ms  {nbytes / 2**20:6.1f} MiB over torch")


if __name__ == "__main__":
    main()
