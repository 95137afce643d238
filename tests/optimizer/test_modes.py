"""Modes of torch that a program sets for other reasons change no number and break nothing.

A default dtype or device for making models, the inference mode of an evaluation in which a callback saves or reads
state, autocast left on around a step, gradients off or on, deterministic algorithms.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.beside import assert_same_saved, assert_same_state_dicts, cloned, tiered, torchs
from tests.optimizer.cases import assert_same_parameters, seeded, set_gradients, train
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

SHAPES: list[tuple[int, ...]] = [(20_000,), (40, 50), ()]

Mode = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """It also fills what is made without values."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


MODES: dict[str, Mode] = {
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default float16": lambda: default_dtype(torch.float16),
    "default device": lambda: torch.device("meta"),  # as `set_default_device("cuda")` with the parameters on the CPU
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "deterministic": deterministic,
}
EVERY_MODE = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(("dtype", "asked"), [(torch.float32, {}), (torch.bfloat16, {"foreach": True})], ids=str)
@EVERY_MODE
def test_steps_in_a_mode_are_those_without_it(
    mode: str, dtype: torch.dtype, asked: dict[str, Any], tmp_path: Path
) -> None:
    """The first one alone, and all but the first."""

    def run(*within: bool) -> tuple[list[Any], TieredAdamW]:
        parameters = seeded(*SHAPES, dtype=dtype)
        with MODES[mode]() if within[0] else contextlib.nullcontext():
            optimizer = tiered(parameters, tmp_path, "gpu cpu nvme", **asked)
        for step, is_within in enumerate(within):
            set_gradients(parameters, step)
            with MODES[mode]() if is_within else contextlib.nullcontext():
                optimizer.step()
        return parameters, optimizer

    wanted, reference = run(False, False, False)
    for within in ((True, False, False), (False, True, True)):
        found, optimizer = run(*within)
        assert_same_parameters(found, wanted, within)
        assert_same_saved(optimizer.state_dict(), reference.state_dict())
        assert all(state["step"].dtype == torch.float32 for state in optimizer.state.values())


@EVERY_MODE
def test_state_read_saved_copied_and_loaded_in_a_mode_serves_outside_it(mode: str, tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    optimizer = tiered(parameters, tmp_path)
    train(optimizer, parameters, range(2))
    wanted = cloned(optimizer.state_dict())
    with MODES[mode]():
        read = [dict(state) for state in optimizer.state.values()]
        saved = optimizer.state_dict()
        twins, twin = copy.deepcopy((parameters, optimizer))
        optimizer.load_state_dict(saved)
    assert_same_saved(saved, wanted)
    assert_same_saved(twin.state_dict(), wanted)
    for state in read:
        for value in state.values():
            assert value.device.type == "cpu" and not value.is_inference()
    read[0]["exp_avg"].add_(1.0)  # handed out before the load, so it is nobody's now
    train(twin, twins, [2])
    train(optimizer, parameters, [2])
    assert_same_parameters(parameters, twins)


@EVERY_MODE
def test_state_changed_in_a_mode_has_the_effect_it_has_with_torch(mode: str, tmp_path: Path) -> None:
    """By assignment, and in place to what was handed out inside the mode and outside."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Any], torch.optim.Optimizer]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        train(optimizer, parameters, range(2))
        ones, seven = torch.ones(40, 50), torch.tensor(7.0)
        handed = optimizer.state[parameters[0]]["exp_avg"]
        with MODES[mode]():
            handed.mul_(0.5)
            optimizer.state[parameters[0]]["exp_avg_sq"].mul_(2.0)
            optimizer.state[parameters[1]]["exp_avg"] = ones
            optimizer.state[parameters[1]]["step"] = seven
            optimizer.state[parameters[2]]["step"].fill_(9.0)
        handed.add_(0.25)
        train(optimizer, parameters, [2])
        return parameters, optimizer

    found, optimizer = run(lambda parameters: tiered(parameters, tmp_path))
    wanted, reference = run(torchs)
    assert_same_parameters(found, wanted)
    assert_same_state_dicts(optimizer, reference)


@EVERY_MODE
def test_a_master_is_derived_from_its_parameter_in_a_mode(mode: str, tmp_path: Path) -> None:
    parameters = seeded(*SHAPES, dtype=torch.bfloat16)
    optimizer = tiered(parameters, tmp_path)
    train(optimizer, parameters, range(2))
    saved = optimizer.state_dict()
    for fields in saved["state"].values():
        del fields["master"]
    with MODES[mode]():
        optimizer.load_state_dict(saved)
        optimizer.state[parameters[1]] = saved["state"][1]
    masters = [state["master"] for state in optimizer.state.values()]
    assert_same_parameters(masters, [parameter.detach().float() for parameter in parameters])
    train(optimizer, parameters, [2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_steps_are_counted_beyond_what_a_default_dtype_can_count(dtype: torch.dtype, tmp_path: Path) -> None:
    """bfloat16 has no number between 256 and 258; float16 none between 2,048 and 2,050."""
    (parameter,) = seeded((3,))
    optimizer = tiered([parameter], tmp_path)
    train(optimizer, [parameter], [0])
    optimizer.state[parameter]["step"] = 2047
    set_gradients([parameter], 1)
    with default_dtype(dtype):
        for _ in range(4):
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert optimizer.state[parameter]["step"] == 2052


def test_a_store_in_a_mode_keeps_what_is_put(tmp_path: Path) -> None:
    """The store by itself, beside an optimizer's state."""
    (parameter,) = seeded((10,))
    optimizer = tiered([parameter], tmp_path)
    values = torch.arange(5.0)
    for mode in MODES.values():
        with mode():
            optimizer.store.put("mine", values)
            with optimizer.store.lease("mine") as leased:
                leased.mul_(2.0)
            found = optimizer.store.get("mine")
            optimizer.store.delete("mine")
        assert torch.equal(found, torch.arange(5.0) * 2) and not found.is_inference()
