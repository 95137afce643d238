"""State that somebody holds: written into by any means, taken out and put back, replaced under a view's eyes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import FaultyEngine
from tests.optimizer.cases import KIB, FourTiers, assert_same_parameters, seeded, small_policy, train
from tierstore import TieredAdam, TieredAdamW
from tierstore.build import Parts
from tierstore.errors import TransferError
from tierstore.io.base import Kind

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

SHAPES: list[tuple[int, ...]] = [(9_000,), (3, 5), (), (70, 80)]
Use = Callable[[torch.optim.Optimizer, list[nn.Parameter]], Any]


def check_beside_torch(use: Use, folder: Path, tiers: str = "cpu nvme") -> None:
    """Train, use the state, train on: with ours as with torch's AdamW."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[nn.Parameter]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        train(optimizer, parameters, range(3))
        use(optimizer, parameters)
        train(optimizer, parameters, range(3, 5))
        return parameters

    made: list[TieredAdamW] = []

    def make(parameters: Any) -> TieredAdamW:
        made.append(TieredAdamW(parameters, policy=small_policy(folder, tiers.split())))
        return made[-1]

    found = run(make)
    made[0].store.check()
    made[0].close()
    assert_same_parameters(found, run(lambda parameters: torch.optim.AdamW(parameters, fused=True)))


# -- writes that no version counts ------------------------------------------------------------------------------


def _by_data(tensor: Tensor) -> None:
    tensor.data.zero_()


def _by_replaced_data(tensor: Tensor) -> None:
    tensor.data = torch.full_like(tensor, 0.25)


def _by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[...] = 0.5


def _by_vector(tensor: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(torch.full((tensor.numel(),), 0.125), [tensor])


def _by_swapped_elements(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.data.flip(0) if tensor.dim() else tensor.data)


@pytest.mark.parametrize("tiers", FourTiers.names[:2])
@pytest.mark.parametrize("write", [_by_data, _by_replaced_data, _by_numpy, _by_vector, _by_swapped_elements])
def test_whatever_is_written_into_state_by_any_means_counts(
    write: Callable[[Tensor], None], tiers: str, tmp_path: Path
) -> None:
    def use(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            for name in ("exp_avg", "exp_avg_sq"):
                write(optimizer.state[parameter][name])

    check_beside_torch(use, tmp_path, tiers)


# -- views that outlive what they show --------------------------------------------------------------------------


def _pop_and_put_back(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        state = optimizer.state.pop(parameter)
        assert parameter not in optimizer.state and state["step"] == 3
        optimizer.state[parameter] = state


def _clear_and_update(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    saved = dict(optimizer.state)
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    optimizer.state.update(saved)


def _swap_for_a_while(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    weights = [p.detach().clone() for p in parameters]
    saved = optimizer.state
    optimizer.state = collections.defaultdict(dict)
    train(optimizer, parameters, range(20, 22))
    optimizer.state = saved
    with torch.no_grad():
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.copy_(value)


def _delete_and_put_back(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    held = optimizer.state[parameters[0]]
    step, values = held["step"].clone(), held["exp_avg"].clone()
    del optimizer.state[parameters[0]]
    assert held["step"] == step and torch.equal(held["exp_avg"], values)
    held["exp_avg"] = values * 2  # in what is held, not in the optimizer
    assert parameters[0] not in optimizer.state
    optimizer.state[parameters[0]] = held


def _replace_under_a_view(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    held = optimizer.state[parameters[3]]
    optimizer.state[parameters[3]] = {name: value * 0.5 for name, value in held.items()}
    assert held["step"] == 3 and optimizer.state[parameters[3]]["step"] == 1.5
    optimizer.state[parameters[3]]["step"] = held["step"]


def _pop_items(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    taken = [optimizer.state.popitem() for _ in range(2)]
    assert len(optimizer.state) == 2
    for parameter, state in taken:
        optimizer.state[parameter] = state


@pytest.mark.parametrize(
    "use",
    [
        *(_pop_and_put_back, _clear_and_update, _swap_for_a_while, _delete_and_put_back),
        *(_replace_under_a_view, _pop_items),
    ],
)
def test_state_that_is_taken_out_and_put_back_is_not_lost(use: Use, tmp_path: Path) -> None:
    check_beside_torch(use, tmp_path)


def test_parameters_may_be_pruned_and_grown_with_their_state(tmp_path: Path) -> None:
    """As Gaussian splatting does: each group has one parameter, which is replaced by a part of it, or a longer one."""

    def resize(optimizer: torch.optim.Optimizer, change: Callable[[Tensor], Tensor]) -> None:
        for group in optimizer.param_groups:
            old = group["params"][0]
            state = dict(optimizer.state[old])
            state["exp_avg"], state["exp_avg_sq"] = change(state["exp_avg"]), change(state["exp_avg_sq"])
            del optimizer.state[old]
            group["params"][0] = nn.Parameter(change(old.detach()).clone())
            optimizer.state[group["params"][0]] = state

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        optimizer = make([{"params": [p], "name": str(n)} for n, p in enumerate(seeded((3000, 3), (3000,), (3000, 4)))])

        def steps(numbers: range) -> None:
            train(optimizer, [group["params"][0] for group in optimizer.param_groups], numbers)

        steps(range(2))
        resize(optimizer, lambda values: values[:1200])
        steps(range(2, 4))
        resize(optimizer, lambda values: torch.cat([values, torch.zeros_like(values[:700])]))
        steps(range(4, 6))
        return [group["params"][0] for group in optimizer.param_groups]

    mine = run(lambda groups: TieredAdam(groups, lr=1e-2, eps=1e-15, policy=small_policy(tmp_path)))
    assert_same_parameters(mine, run(lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-15, fused=True)))


def test_what_was_handed_out_before_a_step_that_broke_off_is_read_anew_after_it(tmp_path: Path) -> None:
    engines: list[FaultyEngine] = []

    def open_engine(*_: Any, **__: Any) -> FaultyEngine:
        engines.append(FaultyEngine(threads=1, request_size=16 * KIB))
        return engines[-1]

    class OnFaultyDisk(TieredAdamW):
        parts = Parts(open_engine=open_engine)

    parameters = seeded(*SHAPES)
    with OnFaultyDisk(parameters, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(2))
        held = [optimizer.state[p]["exp_avg"] for p in parameters]
        before = [one.clone() for one in held]
        engines[0].spoil(nth=3, kind=Kind.READ)
        with pytest.raises(TransferError):
            train(optimizer, parameters, range(2, 3))
        assert optimizer.store.broken_off
        engines[0].heal()
        now = [optimizer.state[p]["exp_avg"] for p in parameters]
        assert not any(one is other for one, other in zip(now, held, strict=True))
        assert not all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
