"""`save_checkpoint` where there are ranks: replicas save on one and load on all; shards are sent to torch's own way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.tiny import OPTIONS, TinyModel, assert_same_models, loss_of, policy
from tierstore import TieredAdamW
from tierstore.errors import CheckpointValueError

pytestmark = pytest.mark.integration


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def _refused(folder: Path) -> str:
    model = TinyModel()
    fully_shard(model)
    with TieredAdamW(model.named_parameters(), **OPTIONS, policy=policy("cpu-nvme", folder)) as optimizer:
        _step(model, optimizer, 0)
        with pytest.raises(CheckpointValueError) as caught:
            optimizer.save_checkpoint(folder / "saved")
    return str(caught.value)


def _replicated(folder: Path) -> None:
    def made() -> tuple[TinyModel, TieredAdamW]:
        model = TinyModel()
        return model, TieredAdamW(model.named_parameters(), **OPTIONS, policy=policy("cpu-nvme", folder))

    (model, optimizer), (twin, another) = made(), made()
    _step(model, optimizer, 0)
    if dist.get_rank() == 0:
        optimizer.save_checkpoint(folder / "saved", model)
    dist.barrier()
    another.load_checkpoint(folder / "saved", twin)
    for one, its_model in ((optimizer, model), (another, twin)):
        _step(its_model, one, 1)
        one.close()
    assert_same_models(twin, model)


@trains_shards
def test_sharded_parameters_are_refused_with_words_of_what_saves_them(two_ranks: Ranks, tmp_path: Path) -> None:
    assert all("torch.distributed.checkpoint" in words for words in two_ranks.run(_refused, tmp_path))
    assert not (tmp_path / "saved").exists()


def test_one_of_several_replicas_saves_and_all_load(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_replicated, tmp_path)
