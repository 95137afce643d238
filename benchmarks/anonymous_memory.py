"""Measures how much anonymous host memory training takes over the model and its gradients.

`python -m benchmarks.anonymous_memory` trains parameters with random gradients, their state mostly in swap files, and
reads `RssAnon` after every step and after a state dict was taken. The state is many times the cpu tier, so a store that
kept more than it was granted would show.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tierstore import TieredAdamW


def anonymous_bytes() -> int:
    """Anonymous memory of this process that is resident now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(parameters: int, layers: int, policy: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train `steps` steps and report bytes over what parameters and gradients take."""
    model = [torch.nn.Parameter(torch.randn(parameters // layers)) for _ in range(layers)]
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    before = anonymous_bytes()
    grown, seconds = [], []
    with TieredAdamW(model, lr=1e-3, policy=policy) as optimizer:
        for _ in range(steps):
            began = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
            grown.append(anonymous_bytes() - before)
        state = optimizer.state_dict()
        with_state_dict = anonymous_bytes() - before
        state_bytes = sum(t.numel() * t.element_size() for entry in state["state"].values() for t in entry.values())
        stats = optimizer.store.stats().to_dict()
    return {
        "state_bytes": state_bytes,
        "grown_bytes": grown,
        "grown_bytes_with_state_dict": with_state_dict,
        "step_seconds": seconds,
        "stats": stats,
    }


def main() -> None:
    """Run with the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=162_500_000)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cpu", default="64MiB", help="capacity of the cpu tier")
    parser.add_argument("--chunk", default="4MiB", help="chunk size")
    parser.add_argument("--swap", default=None, help="folder for swap files")
    parser.add_argument("--json", default=None, help="write the figures here; - for standard output")
    arguments = parser.parse_args()
    nvme = {"paths": [arguments.swap]} if arguments.swap else {}
    policy = {"chunk_size": arguments.chunk, "tiers": {"cpu": {"capacity": arguments.cpu}, "nvme": nvme}}
    report = measure(arguments.parameters, arguments.layers, policy, arguments.steps)
    report |= {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    out = sys.stderr if arguments.json == "-" else sys.stdout
    print(f"state                       {report['state_bytes'] / 1e6:10.1f} MB", file=out)
    print(f"anonymous memory, steps     {max(report['grown_bytes']) / 1e6:10.1f} MB over model and gradients", file=out)
    print(f"anonymous memory, state_dict{report['grown_bytes_with_state_dict'] / 1e6:10.1f} MB", file=out)
    print(f"step, median                {statistics.median(report['step_seconds']):10.2f} s", file=out)
    if arguments.json == "-":
        json.dump(report, sys.stdout)
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
