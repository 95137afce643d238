"""The README's examples of resuming and of giving memory back are run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optimizer.cases import assert_same_parameters, small_policy
from tests.optimizer.settings import TinyTiers, fused, network

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_resumed_training_ends_with_the_bits_of_one_that_was_never_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text().split("## Checkpoints, and resuming to the bit")[1]
    (code,) = re.findall(r"```python\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    folders = [tmp_path / name for name in ("swap", "straight", "resumed")]
    for folder in folders:
        folder.mkdir()
    policy = small_policy(folders[0])
    with torch.random.fork_rng():
        monkeypatch.chdir(folders[1])
        straight = names["train"](37, policy)
        monkeypatch.chdir(folders[2])
        for until in (13, 20, 37):  # interrupted between two checkpoints, and just after one
            resumed = names["train"](until, policy)
    assert_same_parameters(list(resumed.parameters()), list(straight.parameters()))


def test_the_readmes_ways_of_giving_memory_back_work(swap_folder: Path) -> None:
    text = README.read_text().split("## When others need the memory")[1]
    (code,) = re.findall(r"```python\n(.*?)```", text.split("\n## ")[0], re.DOTALL)
    for large, small in (("16GiB", "160KiB"), ("8GiB", "120KiB"), ("4 << 30", "4 << 10")):
        assert large in code
        code = code.replace(large, small)
    model, twin = network(), network()
    batch = torch.ones(3, 130)
    optimizers = TinyTiers(model.parameters(), lr=1e-2), fused(twin.parameters(), lr=1e-2)

    def forward_and_backward(batch: Tensor) -> Tensor:
        for each in (model, twin):
            loss = (each(batch) * each.scale).square().mean()
            loss.backward()
        return loss.detach()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    names: dict[str, Any] = {"optimizer": optimizers[0], "model": model, "batch": batch}
    names |= {"generate": lambda model: model(batch), "evaluate": lambda model: model(batch)}
    forward_and_backward(batch)
    step()
    exec(compile(code, "README.md", "exec"), {**names, "forward_and_backward": forward_and_backward}, names)
    step()
    assert names["asked"].result() <= 120 << 10 and names["loss"] > 0
    assert_same_parameters(list(model.parameters()), list(twin.parameters()))
    optimizers[0].close()
