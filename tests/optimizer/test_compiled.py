"""The pass that numba compiles has the bits of torch's operations; without numba nothing is lost but time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.cases import same_bits
from tierstore import TieredAdamW, compiled
from tierstore.rules import Pieces

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="the extra `numba` is not installed")

ONE_STEP = """
import torch
from tierstore import TieredAdamW
from tierstore.compiled import why_not_used

parameter = torch.nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
parameter.grad = torch.ones_like(parameter)
TieredAdamW([parameter], policy={"tiers": {"cpu": {}}}).step()
print(why_not_used())
"""
SHAPES = [(300, 1000), (77, 1033), (16385,), (100,), ()]  # long ones with and without a rest, and short ones
Make = Callable[..., Any]


def in_memory(**state: str) -> dict[str, Any]:
    return {"tiers": {"cpu": {}}, "state": state}


def train(policy: dict[str, Any], change: Make | None = None, steps: int = 6, **options: Any) -> TieredAdamW:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    optimizer = TieredAdamW(parameters, policy=policy, **{"lr": 3e-3, **options})
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step()
        if change is not None:
            for parameter in parameters:
                change(parameter.data)
    return optimizer


def assert_same(one: TieredAdamW, other: TieredAdamW) -> None:
    for here, there in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        assert same_bits(here, there)
        assert all(same_bits(value, other.state[there][name]) for name, value in one.state[here].items())


def _overwrite(values: torch.Tensor) -> None:
    values.view(-1)[::3] = 0.0
    values.view(-1)[1::5] *= -0.5


@needs_numba
@pytest.mark.parametrize("change", [None, _overwrite])
@pytest.mark.parametrize("master", ["float32", "split"])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "eps": 1e-3, "betas": (0.8, 0.95)}])
def test_the_compiled_pass_has_the_bits_of_torchs_operations(
    master: str, options: dict[str, Any], change: Make | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    run = compiled._run
    monkeypatch.setattr(compiled, "_run", lambda *given: (taken.append(1), run(*given)))
    fast = train(in_memory(master=master), change, **options)
    assert len(taken) >= 3 * 6  # else it was torch that did it
    monkeypatch.setattr(compiled, "_onepass", lambda: None)
    assert_same(fast, train(in_memory(master=master), change, **options))


@needs_numba
def test_the_compiled_pass_has_the_same_bits_wherever_state_lies(tmp_path: Path) -> None:
    tiers = {"cpu": {"capacity": "768KiB"}, "nvme": {"paths": [str(tmp_path)]}}
    with train({"chunk_size": "256KiB", "tiers": tiers}) as split:
        assert_same(split, train(in_memory(master="float32")))


@needs_numba
@pytest.mark.parametrize("master", ["float32", "split"])
def test_nan_and_infinity_stay_what_they_are(master: str) -> None:
    def spoil(values: torch.Tensor) -> None:
        values.view(-1)[:1] = torch.nan
        values.view(-1)[1:2] = torch.inf

    optimizer = train(in_memory(master=master), spoil, steps=3)
    for parameter in optimizer.param_groups[0]["params"]:
        assert parameter.view(-1)[:1].isnan().all()
        assert not parameter.view(-1)[1:].isnan().any()


@needs_numba
@pytest.mark.parametrize(
    "options", [{}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.4, 0.9)}, {"foreach": True}]
)
def test_what_the_pass_does_not_compute_is_left_to_torch(options: dict[str, Any]) -> None:
    optimizer = TieredAdamW([nn.Parameter(torch.zeros(1))], **options)
    long = torch.zeros(1 << 16)
    moments = {name: [long] for name in ("exp_avg", "exp_avg_sq")}
    pieces = Pieces([long.bfloat16()], [long.bfloat16()], moments, [long], [torch.tensor(1.0)])
    found = compiled.single_pass(optimizer.rule.options(optimizer.param_groups[0]), pieces)
    assert (found is None) == bool(options)
    whole = pieces._replace(masters=[], parameters=[long], gradients=[long])
    assert compiled.single_pass(optimizer.rule.options(optimizer.param_groups[0]), whole) is None


@needs_numba
@pytest.mark.parametrize("argument", [0, 2, 3, 4, 5])  # parameter, moments, remainder, tie
def test_a_split_loop_with_other_bits_is_not_used(argument: int) -> None:
    """Only the loop for whole masters was tried."""
    from tierstore import onepass

    class Other:
        update_whole = staticmethod(onepass.update_whole)

        @staticmethod
        def update_split(*given: Any) -> bool:
            is_any = bool(onepass.update_split(*given))
            given[argument].view("uint8")[:] ^= 1
            return is_any

    assert not compiled._has_torchs_bits(Other)
    assert compiled._has_torchs_bits(onepass)


def test_code_with_other_bits_is_not_used() -> None:
    class Other:
        @staticmethod
        def update_whole(p: Any, g: Any, m: Any, v: Any, w: Any, start: int, stop: int, *factors: Any) -> bool:
            w[start:stop] += 1
            return False

    assert not compiled._has_torchs_bits(Other)


@needs_numba
@pytest.mark.parametrize(
    ("variables", "problem"), [({}, ""), ({"NUMBA_DISABLE_JIT": "1"}, "numba does not work here: NotImplementedError")]
)
def test_a_numba_that_cannot_be_used_costs_time_and_no_step(variables: dict[str, str], problem: str) -> None:
    command, environment = [sys.executable, "-c", ONE_STEP], {**os.environ, **variables}
    result = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(problem or "\n")
