"""TieredAdamW beside torch.optim.AdamW: both made alike, trained alike, and what each saves compared to the bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.cases import FourTiers, assert_same_parameters, same_bits, seeded, small_policy, train
from tierstore.optimizer import TieredAdamW

SHAPES: list[tuple[int, ...]] = [(3000,), (40, 50), (1,), (), (7, 3), (20_000,)]
"""More state than the memory tiers of `FourTiers` hold, so that chunks travel by every route."""
EVERY_TIERS = pytest.mark.parametrize("tiers", FourTiers.names)


def tiered(parameters: Any, folder: Path, tiers: str = "cpu nvme", **options: Any) -> TieredAdamW:
    return TieredAdamW(parameters, **{"lr": 1e-2, **options}, policy=small_policy(folder, tiers.split()))


def torchs(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **{"lr": 1e-2, "fused": True, **options})


def trained(folder: Path, tiers: str = "cpu nvme", steps: int = 3, **options: Any) -> tuple[list[Any], TieredAdamW]:
    parameters = seeded(*SHAPES, dtype=options.pop("dtype", torch.float32))
    optimizer = tiered(parameters, folder, tiers, **options)
    train(optimizer, parameters, range(steps))
    return parameters, optimizer


def cloned(saved: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(saved)


def assert_same_saved(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert_same_values(one, other)


def assert_same_values(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare the states of two state dicts alone."""
    assert one["state"].keys() == other["state"].keys()
    for key, fields in one["state"].items():
        assert fields.keys() == other["state"][key].keys()
        assert all(same_bits(value, other["state"][key][name]) for name, value in fields.items()), key


def assert_same_state_dicts(optimizer: TieredAdamW, reference: torch.optim.Optimizer) -> None:
    """Compare all fields that torch has."""
    found, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for key, fields in wanted.items():
        assert all(same_bits(found[key][name], value) for name, value in fields.items()), key


@contextlib.contextmanager
def nothing_changes(optimizer: TieredAdamW) -> Iterator[None]:
    """Check that parameters, groups, the whole state and where it lies are the same afterwards."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    values = [parameter.detach().clone() for parameter in parameters]
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    saved, places = cloned(optimizer.state_dict()), _places(optimizer)
    yield
    assert len(optimizer.param_groups) == len(groups)
    for group, (same_group, options) in zip(optimizer.param_groups, groups, strict=True):
        assert group is same_group and group.keys() == options.keys()
        assert all(group[key] is value for key, value in options.items())
    assert_same_parameters(parameters, values)
    assert _places(optimizer) == places
    assert_same_values(optimizer.state_dict(), saved)
    if optimizer.has_state():
        optimizer.store.check()


def _places(optimizer: TieredAdamW) -> dict[str, dict[str, int]]:
    """Bytes by parameter and tier, none before there is state."""
    if not optimizer.has_state():
        return {}
    optimizer.store.wait()
    return optimizer.store.where()
