"""`save_checkpoint` where there are ranks: each writes its parts of one checkpoint, which any number of ranks loads.

Replicas save on one rank and load on all, or together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.tiny import (
    OPTIONS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    policy,
    train,
)
from tierstore import TieredAdamW

pytestmark = pytest.mark.integration


def _sharded(*, seed: int = 0) -> TinyModel:
    model = TinyModel(seed=seed)
    fully_shard(model.middle)
    fully_shard(model)
    return model


def _tiered(model: torch.nn.Module, folder: Path) -> TieredAdamW:
    return TieredAdamW(model.named_parameters(), **OPTIONS, policy=policy("cpu-nvme", folder))


def _save(folder: Path) -> None:
    model = _sharded()
    with _tiered(model, folder) as optimizer:
        train(model, optimizer, range(3))
        optimizer.save_checkpoint(folder / "saved", model, {"rank": dist.get_rank()})
        resumed = _sharded(seed=1)
        with _tiered(resumed, folder) as another:
            assert another.load_checkpoint(folder / "saved", resumed) == {"rank": dist.get_rank()}
            assert_same_models(resumed, model)
            assert_same_bits(another.state_dict()["state"], optimizer.state_dict()["state"])
            assert train(resumed, another, range(3, 6)) == train(model, optimizer, range(3, 6))
            assert_same_models(resumed, model)


@trains_shards
def test_shards_are_saved_by_all_ranks_and_resumed(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_save, tmp_path)
