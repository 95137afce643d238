"""What parameter groups look like after a load: as torch's do, but for what an optimizer keeps as its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.cases import seeded, small_policy, train
from tierstore import TieredAdamW


@pytest.mark.parametrize("saved_by", [TieredAdamW, torch.optim.AdamW])
@pytest.mark.parametrize("is_scheduled", [False, True])
def test_loaded_groups_have_the_keys_that_torch_gives_them_in_its_order(
    tmp_path: Path, saved_by: type[torch.optim.Optimizer], is_scheduled: bool
) -> None:
    def make(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        parameters = seeded((40, 40), (7,))
        own: dict[str, Any] = {"policy": small_policy(tmp_path)} if cls is TieredAdamW else {"fused": True}
        optimizer = cls([{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}], lr=0.1, **own)
        if is_scheduled:  # adds keys of its own
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        train(optimizer, parameters, range(2))
        return optimizer

    saved = make(saved_by).state_dict()
    mine, theirs = make(TieredAdamW), make(torch.optim.AdamW)
    for optimizer in (mine, theirs):
        optimizer.load_state_dict(saved)
    assert [list(group.items()) for group in mine.state_dict()["param_groups"]] == [
        list(group.items()) for group in theirs.state_dict()["param_groups"]
    ]
