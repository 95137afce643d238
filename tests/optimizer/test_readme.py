"""The README's example of resuming is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.cases import assert_same_parameters, small_policy

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
