"""`save_checkpoint` where there are ranks: each writes its parts of one checkpoint, which any number of ranks loads.

Replicas save on one rank and load on all, or together.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.fakes import KILLED, EndingFiles, FailingFiles
from tests.integration import shared
from tests.integration.ranks import Ranks
from tests.integration.selection import trains_shards
from tests.integration.shared import Make, step, tiered, wholes
from tests.integration.tiny import OPTIONS, TinyModel, assert_same_bits, assert_same_models, policy, train
from tierstore import TieredAdamW
from tierstore.checkpoint import Reader, Writer
from tierstore.errors import (
    BusyStoreError,
    CheckpointFileError,
    CheckpointValueError,
    NoCheckpointError,
    RanksError,
    StateDictError,
)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four processes in a gloo group."""
    ranks = Ranks(4)
    yield ranks
    ranks.end()


# -- from any division to any other -------------------------------------------------------------------------------

WAYS: dict[str, tuple[int, Make, int, Make]] = {
    "rows": (2, shared.rows, 2, shared.rows),
    "rows, to one": (2, shared.rows, 1, shared.plain),
    "rows, from one": (1, shared.plain, 2, shared.rows),
    "rows, to four": (2, shared.rows, 4, shared.rows),
    "rows, from four": (4, shared.rows, 2, shared.rows),
    "rows, to replicas of shards": (2, shared.rows, 4, shared.replicas_of_shards),
    "replicas of shards, to one": (4, shared.replicas_of_shards, 1, shared.plain),
    "columns": (2, shared.tensor_parallel, 2, shared.tensor_parallel),
    "columns, to one": (2, shared.tensor_parallel, 1, shared.plain_parallel),
    "columns, from one": (1, shared.plain_parallel, 2, shared.tensor_parallel),
    "columns, to four": (2, shared.tensor_parallel, 4, shared.tensor_parallel),
    "both": (4, shared.sharded_parallel, 4, shared.sharded_parallel),
}


@trains_shards
@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_save_is_loaded_by_others_to_the_bit(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, way: str
) -> None:
    of_count = {2: two_ranks, 4: four_ranks}
    savers, saved, loaders, loaded = WAYS[way]
    for count, work, make in ((savers, shared.save, saved), (loaders, shared.load, loaded)):
        if count == 1:
            work(tmp_path, make)
        else:
            of_count[count].run(work, tmp_path, make)
    assert [name for name in os.listdir(tmp_path) if "tierstore" in name] == []


def _resume(folder: Path) -> None:
    model, resumed = shared.rows(), shared.rows(seed=1)
    optimizer, another = tiered(model, folder), tiered(resumed, folder)
    train(model, optimizer, range(3))
    optimizer.save_checkpoint(folder / "saved", model, {"rank": dist.get_rank(), "rng": torch.get_rng_state()})
    assert another.load_checkpoint(folder / "saved", resumed)["rank"] == dist.get_rank()
    assert train(resumed, another, range(3, 6)) == train(model, optimizer, range(3, 6))
    assert_same_models(resumed, model)
    assert_same_bits(another.state_dict()["state"], optimizer.state_dict()["state"])
    for each in (optimizer, another):
        each.close()


@trains_shards
def test_resumed_shards_train_like_uninterrupted_ones(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_resume, tmp_path)


def _low_precision(folder: Path) -> None:
    """Split masters: of what only the parameter holds each rank has its part."""
    model, resumed = (fully_shard(TinyModel(seed=seed).to(torch.bfloat16)) for seed in (0, 1))
    optimizer, another = tiered(model, folder), tiered(resumed, folder)
    for each, its in ((model, optimizer), (resumed, another)):
        _step_low(each, its, range(3))
    optimizer.save_checkpoint(folder / "saved", model)
    another.load_checkpoint(folder / "saved", resumed)
    for each, its in ((model, optimizer), (resumed, another)):
        _step_low(each, its, range(3, 6))
    assert_same_models(resumed, model)
    assert_same_bits(wholes(resumed, another), wholes(model, optimizer))
    for each in (optimizer, another):
        each.close()


def _step_low(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        x = torch.randn(8, 33, generator=torch.Generator().manual_seed(number)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@trains_shards
def test_shards_with_masters_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_low_precision, tmp_path)


# -- what else groups and parameters may be -----------------------------------------------------------------------


def _unusual(folder: Path, *, seed: int, is_sharded: bool = True) -> tuple[nn.Module, TieredAdamW]:
    """A frozen layer, an empty group, a Tensor lr, options of a group's own."""
    model = TinyModel(seed=seed)
    if is_sharded:
        fully_shard(model)
    model.middle.requires_grad_(False)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:4], "lr": torch.tensor(2e-3)},
        {"params": [], "lr": torch.tensor(1e-3)},
        {"params": parameters[4:], "lr": torch.tensor(3e-3), "weight_decay": 0.0},
    ]
    return model, TieredAdamW(groups, **OPTIONS, policy=policy("cpu-nvme", folder))


def _resume_unusual(folder: Path, by_name: bool) -> None:
    (model, optimizer), (resumed, another) = (_unusual(folder, seed=seed) for seed in (0, 1))
    step(model, optimizer, range(3))
    optimizer.save_checkpoint(folder / "saved", model if by_name else None)
    another.load_checkpoint(folder / "saved", resumed if by_name else None)
    if not by_name:
        resumed.load_state_dict(model.state_dict())
    assert [group["lr"] for group in another.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for each, its in ((model, optimizer), (resumed, another)):
        step(each, its, range(3, 6))
    found = wholes(model, optimizer)
    assert_same_bits(wholes(resumed, another), found)
    if dist.get_rank() == 0:
        torch.save(found, folder / "wholes")
    optimizer.save_checkpoint(folder / "saved", model if by_name else None)
    for each in (optimizer, another):
        each.close()


@trains_shards
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by place"])
def test_frozen_layer_empty_group_and_tensor_lr_survive(two_ranks: Ranks, tmp_path: Path, by_name: bool) -> None:
    two_ranks.run(_resume_unusual, tmp_path, by_name)
    model, optimizer = _unusual(tmp_path, seed=2, is_sharded=False)
    with optimizer:
        optimizer.load_checkpoint(tmp_path / "saved", model if by_name else None)
        found, wanted = wholes(model, optimizer), torch.load(tmp_path / "wholes")
        for kind in ("weights", "state") if by_name else ("state",):
            assert_same_bits(found[kind], wanted[kind], kind)


class _Tied(nn.Module):
    """One weight in two places, of which rank 1 has nothing; and a buffer that is not sharded."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.into, self.out = nn.Linear(33, 1, bias=False), nn.Linear(33, 1, bias=False)
        self.out.weight = self.into.weight
        self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x) + self.out(torch.tanh(x))


def _sharded_tied(*, seed: int = 0) -> nn.Module:
    return fully_shard(_Tied(seed=seed))


@trains_shards
def test_a_weight_in_two_places_is_one_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(shared.save, tmp_path, _sharded_tied)
    two_ranks.run(shared.load, tmp_path, _sharded_tied)
    shared.load(tmp_path, _Tied)
    with Reader(tmp_path / "saved") as reader:
        keys = reader.header["model"]["keys"]
        assert keys["into.weight"] == keys["out.weight"] and len(reader.entries("model")) == 2
        assert len(reader.entries("params")) == 1


def _load_by_pattern(folder: Path) -> None:
    shared.save(folder, shared.rows)
    wanted = torch.load(folder / "wholes")
    model = shared.rows(seed=1)
    with tiered(model, folder) as optimizer:
        step(model, optimizer, range(2))
        before = wholes(model, optimizer)
        optimizer.load_checkpoint(folder / "saved", model, params="middle.*")
        found = wholes(model, optimizer)
        for kind in ("weights", "state"):
            for name in found[kind]:
                assert_same_bits(found[kind][name], (wanted if name.startswith("middle.") else before)[kind][name])


@trains_shards
def test_shards_are_loaded_by_pattern(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_load_by_pattern, tmp_path)


def _load_torchs_file(folder: Path) -> None:
    model = shared.rows(seed=1)
    with tiered(model, folder) as optimizer:
        optimizer.load_checkpoint(folder / "t.pt", model)
        assert_same_bits(wholes(model, optimizer), torch.load(folder / "wholes"))


@trains_shards
def test_a_file_of_torchs_is_loaded_into_shards(two_ranks: Ranks, tmp_path: Path) -> None:
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.named_parameters(), **OPTIONS, fused=True)
    step(model, optimizer, range(3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "t.pt")
    torch.save(wholes(model, optimizer), tmp_path / "wholes")
    two_ranks.run(_load_torchs_file, tmp_path)


# -- beside training ----------------------------------------------------------------------------------------------

ENDS = ["waited for", "next save", "closed"]


def _save_beside(folder: Path, end: str) -> None:
    """It holds what was there when it was begun; it is not there before all ranks have come to the end of it."""
    model = shared.rows()
    optimizer = tiered(model, folder)
    step(model, optimizer, range(3))
    wanted = wholes(model, optimizer)
    saving = optimizer.save_checkpoint(folder / "saved", model, wait=False)
    step(model, optimizer, range(3, 6))
    assert not saving.is_over and not (folder / "saved").exists()
    with pytest.raises(BusyStoreError):
        optimizer.save_checkpoint(folder / "other", model, if_busy="error")
    if end == "waited for":
        optimizer.wait_for_checkpoint()
    elif end == "next save":
        optimizer.save_checkpoint(folder / "next", model)
    optimizer.close()
    assert saving.is_over
    resumed = shared.rows(seed=1)
    with tiered(resumed, folder) as another:
        another.load_checkpoint(folder / "saved", resumed)
        assert_same_bits(wholes(resumed, another), wanted)


@trains_shards
@pytest.mark.parametrize("end", ENDS)
def test_a_save_beside_training_is_there_when_all_ranks_have_ended_it(
    two_ranks: Ranks, tmp_path: Path, end: str
) -> None:
    two_ranks.run(_save_beside, tmp_path, end)
    assert sorted(os.listdir(tmp_path)) == (["next", "saved"] if end == "next save" else ["saved"])


def _break_off(folder: Path) -> None:
    """Nobody waits for others with an error on its way: rank 1 never comes here, or somewhere else."""
    model = shared.rows()
    optimizer = tiered(model, folder)
    step(model, optimizer, range(2))
    optimizer.save_checkpoint(folder / "saved", model, {"which": "old"})
    optimizer.save_checkpoint(folder / "saved", model, {"which": "new"}, wait=False)
    if dist.get_rank() == 1:
        dist.recv(torch.empty(1), 0)
    with pytest.raises(ZeroDivisionError), optimizer:
        raise ZeroDivisionError
    if dist.get_rank() == 0:  # had it waited for rank 1, neither would come here
        dist.send(torch.ones(1), 1)
    dist.barrier()
    with Reader(folder / "saved") as reader:
        assert reader.extra() == {"which": "old"}


@trains_shards
def test_an_optimizer_closed_by_an_error_waits_for_no_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_break_off, tmp_path)


# -- faults -------------------------------------------------------------------------------------------------------


class _Failing(TieredAdamW):
    """On rank 1 the disk fails at the nth call."""

    nth = 0

    def open_writer(self, *arguments: Any, **options: Any) -> Writer:
        files = FailingFiles(self.nth) if dist.get_rank() == 1 else None
        return Writer(*arguments, **options, files=files)


def _fail_on_one(folder: Path, wait: bool) -> str:
    model = shared.rows()
    with _Failing(model.named_parameters(), **OPTIONS, policy=policy("cpu-nvme", folder)) as optimizer:
        step(model, optimizer, range(2))
        optimizer.save_checkpoint(folder / "saved", model, {"which": "old"})
        wanted = wholes(model, optimizer)
        optimizer.nth = 150
        if wait:
            with pytest.raises(RanksError) as caught:
                optimizer.save_checkpoint(folder / "saved", model, {"which": "new"})
        else:
            optimizer.save_checkpoint(folder / "saved", model, {"which": "new"}, wait=False)
            step(model, optimizer, range(2, 4))  # an error of one rank is told to none before all can hear of it
            with pytest.raises(RanksError) as caught:
                optimizer.wait_for_checkpoint()
        assert isinstance(caught.value.__cause__, CheckpointFileError) is (dist.get_rank() == 1)
        optimizer.nth = 0
        resumed = shared.rows(seed=1)
        with tiered(resumed, folder) as another:
            assert another.load_checkpoint(folder / "saved", resumed) == {"which": "old"}
            assert_same_bits(wholes(resumed, another), wanted)
        step(model, optimizer, range(4, 6))
        optimizer.save_checkpoint(folder / "saved", model, {"which": "new"})
        optimizer.store.check()
    return str(caught.value)


@trains_shards
@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "beside training"])
def test_a_disk_that_fails_on_one_rank_fails_on_all_and_the_old_checkpoint_stays(
    two_ranks: Ranks, tmp_path: Path, wait: bool
) -> None:
    stories = two_ranks.run(_fail_on_one, tmp_path, wait)
    assert all("1 of 2 ranks failed" in story and "rank 1: CheckpointFileError" in story for story in stories)
    assert os.listdir(tmp_path) == ["saved"]
    with Reader(tmp_path / "saved") as reader:
        assert reader.extra() == {"which": "new"}


class _Killed(TieredAdamW):
    """On one rank the process ends at the nth call of the filesystem by one of its writers, as if it were killed."""

    killed: tuple[int, int, int] = (-1, 0, 0)

    def open_writer(self, *arguments: Any, **options: Any) -> Writer:
        rank, writer, nth = self.killed
        self.killed = rank, writer - 1, nth
        files = EndingFiles(nth) if (dist.get_rank(), 0) == (rank, writer) else None
        return Writer(*arguments, **options, files=files)


def _kill_one(folder: Path, *killed: int) -> str:
    model = shared.rows()
    optimizer = _Killed(model.named_parameters(), **OPTIONS, policy=policy("cpu-nvme", folder))
    step(model, optimizer, range(2))
    optimizer.save_checkpoint(folder / "saved", model, {"which": "old"})
    found = wholes(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(found, folder / "wholes")
    dist.barrier()
    optimizer.killed = killed  # type: ignore[assignment]
    with pytest.raises(RanksError) as caught:
        optimizer.save_checkpoint(folder / "saved", model, {"which": "new"})
    return str(caught.value)


KILLS = {
    "rank 1 as it begins": (1, 0, 10),
    "rank 1 as it writes": (1, 0, 110),
    "rank 1 as it ends": (1, 0, 220),
    "rank 0 before all": (0, 0, 5),
    "rank 0 as it writes": (0, 1, 150),
    "rank 0 when all have written": (0, 0, 10),
    "rank 0 when names have changed": (0, 0, 14),
}


@trains_shards
@pytest.mark.parametrize("kill", KILLS)
def test_a_rank_killed_while_it_saves_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, kill: str) -> None:
    ranks = Ranks(2)
    with pytest.raises(AssertionError, match=f"rank {KILLS[kill][0]}: the process ended with exit code {KILLED}"):
        ranks.run(_kill_one, tmp_path, *KILLS[kill])
    model = TinyModel(seed=1)
    with tiered(model, tmp_path) as optimizer:
        found = optimizer.load_checkpoint(tmp_path / "saved", model)
        assert found == {"which": "new" if kill == "rank 0 when names have changed" else "old"}
        assert_same_bits(wholes(model, optimizer), torch.load(tmp_path / "wholes"))
        optimizer.save_checkpoint(tmp_path / "saved", model)
    assert sorted(os.listdir(tmp_path)) == ["saved", "wholes"]


def _load_where_one_cannot(folder: Path) -> None:
    """Rank 1 looks elsewhere: on none anything has changed, and none takes it for the first run."""
    shared.save(folder, shared.rows)
    model = shared.rows(seed=1)
    with tiered(model, folder) as optimizer:
        step(model, optimizer, range(2))
        before = wholes(model, optimizer)
        with pytest.raises(RanksError, match="rank 1: NoCheckpointError"):
            optimizer.load_checkpoint(folder / ("elsewhere" if dist.get_rank() else "saved"), model)
        with pytest.raises(NoCheckpointError):
            optimizer.load_checkpoint(folder / "elsewhere", model)
        another = fully_shard(nn.Linear(3, 3))
        with tiered(another, folder) as of_another, pytest.raises(StateDictError):
            of_another.load_checkpoint(folder / "saved")
        assert_same_bits(wholes(model, optimizer), before)
        step(model, optimizer, range(2, 3))


@trains_shards
def test_a_load_that_one_rank_refuses_changes_nothing_on_any(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_load_where_one_cannot, tmp_path)


def _found_half_way(folder: Path) -> str:
    """Rank 1 alone reads what is damaged."""
    shared.save(folder, shared.rows)
    if dist.get_rank() == 0:
        (file,) = (folder / "saved/ranks/000001/params/000002/exp_avg").glob("c.0")
        content = bytearray(file.read_bytes())
        content[9] ^= 1
        file.write_bytes(content)
    dist.barrier()
    model = shared.rows(seed=1)
    with tiered(model, folder) as optimizer:
        with pytest.raises(RanksError) as caught:
            optimizer.load_checkpoint(folder / "saved", model)
        assert isinstance(caught.value.__cause__, ValueError) is (dist.get_rank() == 1)
    return str(caught.value)


@trains_shards
def test_damage_that_one_rank_finds_is_told_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    stories = two_ranks.run(_found_half_way, tmp_path)
    assert all("rank 1: DamagedCheckpointError" in story and "checksum" in story for story in stories)


# -- replicas -----------------------------------------------------------------------------------------------------


def _replicated(folder: Path, together: bool) -> None:
    def made() -> tuple[TinyModel, TieredAdamW]:
        model = TinyModel()
        return model, tiered(model, folder)

    (model, optimizer), (twin, another) = made(), made()
    step(model, optimizer, range(1))
    if together:
        optimizer.save_checkpoint(folder / "saved", model, dist.get_rank(), process_group=dist.group.WORLD)
        assert another.load_checkpoint(folder / "saved", twin, process_group=dist.group.WORLD) == dist.get_rank()
        assert not (folder / "saved/ranks/000001/params").exists()
    else:
        if dist.get_rank() == 0:
            optimizer.save_checkpoint(folder / "saved", model)
        dist.barrier()
        another.load_checkpoint(folder / "saved", twin)
        optimizer.save_checkpoint(folder / f"saved-{dist.get_rank()}", model)
    for one, its_model in ((optimizer, model), (another, twin)):
        step(its_model, one, range(1, 2))
        one.close()
    assert_same_models(twin, model)


def _unlike_replicas(folder: Path, is_weight: bool, with_model: bool) -> None:
    """Rank 1 has something else, as of experts of its own, or of a running mean that each rank counts for itself."""
    model = TinyModel()
    model.register_buffer("seen", torch.zeros(3))
    with tiered(model, folder) as optimizer:
        step(model, optimizer, range(1))
        saves = {"model": model if with_model else None, "process_group": dist.group.WORLD}
        optimizer.save_checkpoint(folder / "saved", extra="old", **saves)
        if dist.get_rank() == 1:
            with torch.no_grad():
                (model.middle.bias[-1:] if is_weight else model.seen).add_(1e-3)
        if is_weight:
            with pytest.raises(CheckpointValueError, match=r"other values on rank 1: (middle.bias|param.3)\."):
                optimizer.save_checkpoint(folder / "saved", extra="new", **saves)
        else:
            optimizer.save_checkpoint(folder / "saved", extra="new", **saves)
        dist.barrier()
        with Reader(folder / "saved") as reader:
            assert reader.extra() == ("old" if is_weight else "new")
        step(model, optimizer, range(1, 2))


def _without_plain_values(folder: Path) -> None:
    frozen = [torch.eye(3).to_sparse(), torch.ones(3).to_mkldnn(), torch.ones(3, device="meta"), torch.empty(0)]
    parameters = [nn.Parameter(torch.ones(50)), *(nn.Parameter(values, requires_grad=False) for values in frozen)]
    with TieredAdamW(parameters, **OPTIONS, policy=policy("cpu-nvme", folder)) as optimizer:
        parameters[0].grad = torch.ones(50)
        optimizer.step()
        optimizer.save_checkpoint(folder / "saved", process_group=dist.group.WORLD)
        with Reader(folder / "saved") as reader:
            assert len(reader.entries("params")) == len(parameters)


def test_replicas_with_frozen_parameters_of_other_layouts_are_saved_together(two_ranks: Ranks, tmp_path: Path) -> None:
    """Those have no plain memory to compare. A rank that saved alone could, and ranks together could not."""
    two_ranks.run(_without_plain_values, tmp_path)


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("is_weight", [True, False], ids=["weight", "buffer"])
def test_replicas_that_have_other_weights_are_not_saved_as_one(
    two_ranks: Ranks, tmp_path: Path, is_weight: bool, with_model: bool
) -> None:
    """Those of one rank were saved, and nobody heard that the others' were not."""
    two_ranks.run(_unlike_replicas, tmp_path, is_weight, with_model)


@pytest.mark.parametrize("together", [False, True], ids=["each on its own", "together"])
def test_one_of_several_replicas_saves_and_all_load(two_ranks: Ranks, tmp_path: Path, together: bool) -> None:
    two_ranks.run(_replicated, tmp_path, together)
