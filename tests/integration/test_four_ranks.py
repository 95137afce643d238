"""What needs more than two ranks: replicas of shards, and checkpoints of two ranks loaded on four and the other way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.integration.ranks import Ranks
from tests.integration.test_fsdp2 import load_saved_elsewhere, save_trained
from tests.integration.tiny import TinyModel, assert_same_bits, assert_same_models, fused, tiered, train

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in a gloo group."""
    ranks = Ranks(4)
    yield ranks
    ranks.end()


def test_checkpoint_of_two_ranks_loads_on_four(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_trained, tmp_path, True)
    four_ranks.run(load_saved_elsewhere, tmp_path)


def test_checkpoint_of_four_ranks_loads_on_two(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(save_trained, tmp_path, True)
    two_ranks.run(load_saved_elsewhere, tmp_path)


def _train_replicas_of_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    mine, reference = (fully_shard(TinyModel(), mesh=mesh) for _ in range(2))
    with tiered(mine.parameters(), folder) as optimizer:
        theirs = fused(reference.parameters())
        assert train(mine, optimizer, range(4)) == train(reference, theirs, range(4))
        assert_same_models(mine, reference)
        assert_same_bits(optimizer.state_dict(), theirs.state_dict())


def test_replicas_of_shards_are_trained_as_by_fused_adamw(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_train_replicas_of_shards, tmp_path)
