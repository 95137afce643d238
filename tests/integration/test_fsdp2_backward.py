"""Updates beside the backward of FSDP2, whose gradients are reduced and sharded when hooks hear of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.tiny import (
    OPTIONS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    fused,
    loss_of,
    policy,
)
from tierstore import TieredAdamW
from tierstore.errors import BusyStoreError

pytestmark = [trains_shards, pytest.mark.integration]


def _sharded(offload: OffloadPolicy) -> Any:
    model = TinyModel()
    for name in ("first", "middle", "last"):
        fully_shard(getattr(model, name), offload_policy=offload)
    fully_shard(model, offload_policy=offload)
    return model


def _train(model: Any, optimizer: torch.optim.Optimizer) -> list[bool]:
    """Two batches a step, of which gradients are reduced at the last one; returns when steps were under way."""
    under_way = []
    for step in range(4):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            model.set_is_last_backward(part == 1)
            loss_of(model, 4 * step + 2 * part + dist.get_rank()).backward()
        try:
            optimizer.state_dict()
            under_way.append(False)
        except BusyStoreError:
            under_way.append(True)
        optimizer.step()
        optimizer.zero_grad()
    return under_way


def _run(folder: Path, offload: OffloadPolicy) -> None:
    mine, reference = _sharded(offload), _sharded(offload)
    optimizer = TieredAdamW(
        mine.parameters(),
        **OPTIONS,
        policy={**policy("cpu-nvme", folder), "update": "backward", "free_gradients": True},
    )
    theirs = fused(reference.parameters())
    assert _train(mine, optimizer) == [False, True, True, True]
    assert _train(reference, theirs) == [False] * 4
    assert_same_models(mine, reference)
    assert_same_bits(optimizer.state_dict(), theirs.state_dict())
    assert_took_every_route(optimizer, "cpu-nvme")
    optimizer.close()


@pytest.mark.parametrize("offload", [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)], ids=["kept", "offloaded"])
def test_shards_are_updated_beside_backward_to_the_same_bits(
    two_ranks: Ranks, tmp_path: Path, offload: OffloadPolicy
) -> None:
    two_ranks.run(_run, tmp_path, offload)


def _run_replicas(folder: Path) -> str:
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = TieredAdamW(model.parameters(), policy={**policy("cpu-nvme", folder), "update": "backward"})
    try:
        model(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        optimizer.close()
    return "nothing was said"


def test_replicas_whose_gradients_are_reduced_later_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    assert all("update: step" in text for text in two_ranks.run(_run_replicas, tmp_path))
