"""`optimizer.state` of shards: read, written in place and assigned, uneven shards and empty ones included.

The second rank has less of each parameter than the first, and of the last one nothing. What is done to the state is
done to torch's fused AdamW's too, and training goes on from it with the same bits.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.integration.ranks import Ranks
from tests.integration.tiny import CHUNK_BYTES, assert_same_bits, fused, tiered
from tierstore import TieredAdamW
from tierstore.errors import StateDictError

SHAPES = [(7, 999), (3, 5), (1, 3000)]


def _parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in whole]


def _step(optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in optimizer.param_groups[0]["params"]:
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    optimizer.step()


def _both(folder: Path, *, steps: int = 2) -> tuple[TieredAdamW, torch.optim.AdamW]:
    optimizers = tiered(_parameters(), folder), fused(_parameters())
    for optimizer in optimizers:
        for number in range(steps):
            _step(optimizer, number)
    return optimizers


def _pairs(mine: TieredAdamW, theirs: torch.optim.AdamW) -> list[tuple[Any, Any]]:
    """The states of each parameter in both optimizers."""
    parameters = zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)
    return [(mine.state[one], theirs.state[other]) for one, other in parameters]


def _assert_same(mine: TieredAdamW, theirs: torch.optim.AdamW) -> None:
    assert_same_bits(mine.state_dict(), theirs.state_dict())
    assert_same_bits(mine.param_groups[0]["params"], theirs.param_groups[0]["params"])


# -- reading ------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> list[int]:
    mine, theirs = _both(folder)
    for own, state in _pairs(mine, theirs):
        assert_same_bits(dict(own), state)
        assert_same_bits(own["exp_avg"].full_tensor(), state["exp_avg"].full_tensor())
        assert own["exp_avg"].stride() == state["exp_avg"].stride()
        assert own["exp_avg"] is own["exp_avg"]
        assert not own["exp_avg"].requires_grad
    sizes = [own["exp_avg_sq"].to_local().numel() for own, _ in _pairs(mine, theirs)]
    mine.close()
    return sizes


def test_state_of_a_shard_is_a_dtensor_like_its_parameter(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(_read, tmp_path) == [[4 * 999, 10, 3000], [3 * 999, 5, 0]]


# -- writing ------------------------------------------------------------------------------------------------------


def _through_local(state: Any) -> None:
    with torch.no_grad():
        state["exp_avg"].to_local().mul_(0.5)


def _through_collectives(state: Any) -> None:
    """A value that is the same on all ranks, and no shard alone has."""
    state["exp_avg"].sub_(state["exp_avg"].full_tensor().mean().item())


def _with_an_item(state: Any) -> None:
    state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def _with_another_sharding(state: Any) -> None:
    whole = state["exp_avg"].redistribute(placements=[Replicate()])
    state["exp_avg"] = (whole * 3).redistribute(placements=[Shard(0)]) if isinstance(state, dict) else whole * 3


def _with_the_local_part(state: Any) -> None:
    """TieredAdamW alone takes a shard's values without their sharding; torch would keep what it cannot step on."""
    values = torch.full_like(state["exp_avg"].to_local(), 0.25)
    state["exp_avg"] = DTensor.from_local(values, **_like(state["exp_avg"])) if isinstance(state, dict) else values


def _like(tensor: DTensor) -> dict[str, Any]:
    return {
        "device_mesh": tensor.device_mesh,
        "placements": tensor.placements,
        "shape": tensor.shape,
        "stride": tensor.stride(),
    }


def _through_the_step(state: Any) -> None:
    state["step"].add_(5)


WRITES: dict[str, Callable[[Any], None]] = {
    "in place, its local part": _through_local,
    "in place, as a whole": lambda state: state["exp_avg"].mul_(0.5),
    "in place, by what all ranks have": _through_collectives,
    "in place, detached": lambda state: state["exp_avg"].detach().zero_(),
    "in place, by copy_": lambda state: state["exp_avg"].copy_(state["exp_avg_sq"]),
    "in place, its step": _through_the_step,
    "by an item": _with_an_item,
    "by an item sharded otherwise": _with_another_sharding,
    "by an item without sharding": _with_the_local_part,
}


def _write(folder: Path, way: str) -> None:
    mine, theirs = _both(folder)
    for pair in _pairs(mine, theirs):
        for state in pair:
            WRITES[way](state)
    _assert_same(mine, theirs)
    for optimizer in (mine, theirs):
        _step(optimizer, 7)
    _assert_same(mine, theirs)
    mine.store.check()
    mine.close()


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_into_a_shards_state_is_trained_on(two_ranks: Ranks, tmp_path: Path, way: str) -> None:
    two_ranks.run(_write, tmp_path, way)


def _fresh(parameter: Tensor, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(50 + number)
    whole = torch.randn(parameter.shape, generator=generator).square()
    sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return {"step": torch.tensor(4.0), "exp_avg": sharded.clone(), "exp_avg_sq": sharded}


def _assign_each(optimizer: torch.optim.Optimizer) -> None:
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[parameter] = _fresh(parameter, number)


def _assign_all(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = {p: _fresh(p, number) for number, p in enumerate(optimizer.param_groups[0]["params"])}


def _load(optimizer: torch.optim.Optimizer) -> None:
    states = {number: _fresh(p, number) for number, p in enumerate(optimizer.param_groups[0]["params"])}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})


ASSIGNMENTS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "each parameter's": _assign_each,
    "all": _assign_all,
    "loaded": _load,
}


def _replace(folder: Path, way: str, steps: int) -> None:
    mine, theirs = _both(folder, steps=steps)
    for optimizer in (mine, theirs):
        ASSIGNMENTS[way](optimizer)
    _assert_same(mine, theirs)
    for optimizer in (mine, theirs):
        _step(optimizer, 7)
    _assert_same(mine, theirs)
    mine.close()


@pytest.mark.parametrize("way", ASSIGNMENTS)
@pytest.mark.parametrize("steps", [0, 2], ids=["fresh", "stepped"])
def test_state_of_shards_may_be_replaced(two_ranks: Ranks, tmp_path: Path, way: str, steps: int) -> None:
    two_ranks.run(_replace, tmp_path, way, steps)


def _refuse(folder: Path) -> list[str]:
    mine, theirs = _both(folder)
    parameter = mine.param_groups[0]["params"][0]
    wrong = distribute_tensor(torch.zeros(8, 999), parameter.device_mesh, [Shard(0)])
    stories = []
    for value in (wrong, torch.zeros(1, 999)):
        with pytest.raises(StateDictError) as caught:
            mine.state[parameter]["exp_avg"] = value
        stories.append(str(caught.value))
    _assert_same(mine, theirs)
    mine.close()
    return stories


def test_state_of_another_shape_is_refused_on_every_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    for number, stories in enumerate(two_ranks.run(_refuse, tmp_path)):
        assert "(8, 999)" in stories[0] and "(7, 999)" in stories[0]
        assert "(1, 999)" in stories[1] and f"({4 - number}, 999)" in stories[1]


# -- copies -------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[TieredAdamW], Any]] = {
    "state dict": lambda optimizer: optimizer.state_dict()["state"],
    "deep copy": lambda optimizer: copy.deepcopy(optimizer).state_dict()["state"],
    "handed out": lambda optimizer: dict(enumerate(map(dict, optimizer.state.values()))),
}


def _keep_copies(folder: Path, way: str) -> None:
    mine, theirs = _both(folder)
    copies = COPIES[way](mine)
    for number in range(3):
        _step(mine, 10 + number)
    for state in copies.values() if way == "handed out" else ():
        state["step"] = torch.tensor(2.0)  # `step` is one tensor that counts on, as torch's is
    assert_same_bits(copies, theirs.state_dict()["state"])
    for state in copies.values():
        state["exp_avg"].to_local().zero_()
    for number in range(3):
        _step(theirs, 10 + number)
    _assert_same(mine, theirs)
    mine.close()


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_shards_states_and_later_steps_do_not_reach_each_other(
    two_ranks: Ranks, tmp_path: Path, way: str
) -> None:
    two_ranks.run(_keep_copies, tmp_path, way)


def _exceed_the_grant(folder: Path) -> bool:
    """State beyond the cpu tier's capacity comes as mappings of a file: DTensors too."""
    mine, theirs = _both(folder)
    states = mine.state_dict()["state"]
    size = sum(t.to_local().nbytes for state in states.values() for t in state.values() if isinstance(t, DTensor))
    assert_same_bits(states, theirs.state_dict()["state"])
    _step(mine, 9)
    assert_same_bits(states, theirs.state_dict()["state"])
    mine.close()
    assert_same_bits(states, theirs.state_dict()["state"])
    return size > 3 * CHUNK_BYTES


def test_large_shards_states_are_stable_copies_too(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(_exceed_the_grant, tmp_path) == [True, False]


def _shard_of_nothing(folder: Path) -> bool:
    """The second rank has no element of any parameter; its state must be there all the same, and be truthy."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(1, 50), mesh, [Shard(0)]))
    with tiered([parameter], folder) as optimizer:
        _step(optimizer, 0)
        assert optimizer.state and parameter in optimizer.state
        assert optimizer.state[parameter]["step"].item() == 1.0
        again = pickle.loads(pickle.dumps(optimizer.state_dict()["state"][0]["step"]))
        assert again.item() == 1.0
        assert optimizer.state[parameter]["exp_avg"].shape == (1, 50)
        optimizer.store.check()
        return parameter.to_local().numel() == 0


def test_rank_that_has_only_empty_shards_has_state(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks.run(_shard_of_nothing, tmp_path) == [False, True]
