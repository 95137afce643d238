"""Rates decide how state moves, and no number: training, and going on under other rates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.rates import PathRates, Rates, SizeRates

SHAPES = ((400, 200), (5000,), (64, 64, 3))
SLOW, FAST = 1e6, 4e9


def rates(rate: float) -> Rates:
    return Rates({"disk": PathRates(1e-5, rate, rate, (SizeRates(8192, 1e-3, rate),))}, None, "2026-01-01")


def make(
    folder: Path, find_rates: Callable[..., Rates], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.nn.Parameter], TieredAdamW]:
    class Tuned(TieredAdamW):
        parts: ClassVar[Parts] = Parts(find_rates=find_rates)

    monkeypatch.setattr("tierstore.build.TUNED_ABOVE_BYTES", 0)
    parameters = start()
    tiers = {"cpu": {"capacity": "512KiB"}, "nvme": {"paths": [str(folder)]}}
    return parameters, Tuned(parameters, lr=1e-2, policy={"tiers": tiers})


def start() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def plain(steps: int) -> list[torch.nn.Parameter]:
    parameters = start()
    train(parameters, torch.optim.AdamW(parameters, lr=1e-2, fused=True), range(steps))
    return parameters


def test_rates_change_chunks_and_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for rate in (SLOW, FAST):
        parameters, optimizer = make(tmp_path, lambda *_, rate=rate, **__: rates(rate), monkeypatch)
        train(parameters, optimizer, range(3))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(parameters, plain(3), strict=True))
        sizes.append(optimizer.store.stats().tiers["nvme"].chunks + optimizer.store.stats().tiers["cpu"].chunks)
        optimizer.close()
    assert sizes[0] > sizes[1]


def test_state_goes_on_under_other_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint knows parameters, not chunks."""
    first, optimizer = make(tmp_path, lambda *_, **__: rates(FAST), monkeypatch)
    train(first, optimizer, range(2))
    saved: dict[str, Any] = optimizer.state_dict()
    optimizer.close()
    second, optimizer = make(tmp_path, lambda *_, **__: rates(SLOW), monkeypatch)
    with torch.no_grad():
        for ours, theirs in zip(second, first, strict=True):
            ours.copy_(theirs)
    optimizer.load_state_dict(saved)
    train(second, optimizer, range(2, 4))
    optimizer.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second, plain(4), strict=True))


def test_rates_are_found_at_the_first_binding_and_not_when_the_optimizer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def find(*_: object, **__: object) -> Rates:
        asked.append(1)
        return rates(FAST)

    parameters, optimizer = make(tmp_path, find, monkeypatch)
    assert asked == []
    train(parameters, optimizer, range(2))
    assert asked == [1]
    optimizer.close()
