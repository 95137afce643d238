"""Mixed precision: GradScaler, with and without explicit `fused=True`, does with us what it does with torch's AdamW.

With `fused=True` the scaler leaves scaled gradients to the optimizer, in `grad_scale` and `found_inf`; without, it
unscales them itself and may not call `step()` at all. Either way the weights are those of torch's fused kernel, to the
bit: all scales here are powers of two.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

from tests.optimizer.beside import (
    EVERY_TIERS,
    assert_same_saved,
    assert_same_state_dicts,
    nothing_changes,
    tiered,
    torchs,
)
from tests.optimizer.cases import (
    Reference,
    assert_same_parameters,
    assert_same_state,
    seeded,
    set_gradient_of_any_dtype,
    set_gradients,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the swap folder:UserWarning"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning"),
]

SHAPES: list[tuple[int, ...]] = [(20_000,), (40, 50), (7, 3)]
BOTH = pytest.mark.parametrize("fused", [None, True], ids=["unset", "fused"])
SCALE = 1024.0

Make = Callable[[Any], torch.optim.Optimizer]


def scaler_of(**options: Any) -> GradScaler:
    """A scaler that has seen its first loss, which is when it makes its tensors."""
    scaler = GradScaler("cpu", **{"init_scale": SCALE, "growth_interval": 2, **options})
    scaler.scale(torch.zeros(1))
    return scaler


def spoil(parameters: Sequence[Tensor]) -> None:
    """Make one gradient infinite."""
    parameters[1].grad.view(-1)[7] = math.inf


# -- whether the scaler leaves scaling to us --------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused": None}, {"fused": True}])
def test_amp_scaling_is_supported_exactly_when_fused_was_asked_for(options: dict[str, Any], tmp_path: Path) -> None:
    optimizer = tiered(seeded((10,)), tmp_path, **options)
    asked = options.get("fused") is True
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    optimizer.load_state_dict(tiered(seeded((10,)), tmp_path, fused=None if asked else True).state_dict())
    for each in (optimizer, *copies):
        assert getattr(each, "_step_supports_amp_scaling", False) == asked
        assert each.param_groups[0]["fused"] is True


@BOTH
def test_a_closure_is_refused_by_keyword_under_a_scaler_as_with_torch(fused: bool | None, tmp_path: Path) -> None:
    optimizer = tiered(seeded((10,)), tmp_path, fused=fused)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler_of().step(optimizer, closure=lambda: 1.0)


@BOTH
def test_a_scaler_that_is_off_passes_closures_on(fused: bool | None, tmp_path: Path) -> None:
    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path, fused=fused)
    scaler = GradScaler("cpu", enabled=False)

    def closure() -> float:
        set_gradients(parameters, 0)
        return 3.0

    assert scaler.step(optimizer, closure) == scaler.step(optimizer, closure=closure) == 3.0
    assert optimizer.state[parameters[0]]["step"] == 2


# -- whole runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"fused": True}, {"foreach": True}, {"fused": False}], ids=str)
@EVERY_TIERS
def test_scaled_steps_with_skips_and_clipping_have_the_bits_of_torch(
    tiers: str, asked: dict[str, Any], tmp_path: Path
) -> None:
    """Skipped at the first step and later, unscaled and clipped once, twice grown: weights, scales, counts, state."""

    def run(make: Make) -> tuple[list[Any], torch.optim.Optimizer, list[Any]]:
        parameters = seeded(*SHAPES)
        optimizer, scaler, seen = make(parameters), scaler_of(), []
        for step in range(6):
            optimizer.zero_grad()
            set_gradients(parameters, step, scale=scaler.get_scale())
            if step in (0, 3):
                spoil(parameters)
            if step == 4:
                scaler.unscale_(optimizer)
                seen.append(nn.utils.clip_grad_norm_(parameters, 1.0).item())
            scaler.step(optimizer)
            scaler.update()
            steps = [float(optimizer.state[p].get("step", 0.0)) for p in parameters]
            seen += [scaler.get_scale(), steps]
        return parameters, optimizer, seen

    mine, optimizer, seen = run(lambda parameters: tiered(parameters, tmp_path, tiers, **asked))
    theirs, reference, wanted = run(lambda parameters: _beside(parameters, asked))
    assert seen == wanted and len(set(map(str, seen))) > 6
    assert_same_parameters(mine, theirs)
    assert_same_state_dicts(optimizer, reference)


def _beside(parameters: Any, asked: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **asked) if asked else _unfused_scaling(parameters)


def _unfused_scaling(parameters: Any) -> torch.optim.Optimizer:
    """torch's fused kernel, with the scaler doing what it does where `fused` was left out."""
    optimizer = torchs(parameters)
    del optimizer._step_supports_amp_scaling
    return optimizer


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiers", ["gpu cpu nvme", "cpu nvme"])
def test_low_precision_parameters_are_unscaled_in_the_precision_of_their_master(
    tiers: str, dtype: torch.dtype, fused: bool | None, tmp_path: Path
) -> None:
    mine, theirs = seeded(*SHAPES, dtype=dtype), seeded(*SHAPES, dtype=dtype)
    optimizer, scaler = tiered(mine, tmp_path, tiers, fused=fused), scaler_of(growth_interval=100)
    reference = Reference([{**optimizer.param_groups[0], "params": theirs}])
    for step in range(4):
        set_gradients(mine, step, scale=scaler.get_scale())
        if is_skipped := step == 2:
            spoil(mine)
        scale = scaler.get_scale()
        for one, other in zip(mine, theirs, strict=True):
            set_gradient_of_any_dtype(other, one.grad.float() / scale)
        if dtype == torch.float16 and fused is None:
            with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):  # as with torch's AdamW
                scaler.step(optimizer)
            return
        scaler.step(optimizer)
        scaler.update()
        if not is_skipped:
            reference.step()
        assert_same_parameters(mine, theirs, step)
    assert_same_state(optimizer, reference)


@BOTH
def test_autocast_training_has_the_bits_of_torch(fused: bool | None, tmp_path: Path) -> None:
    """The whole idiom, with a real model: autocast, scaled loss, unscaled clipping, accumulation over two batches."""

    def run(make: Make) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 70), nn.ReLU(), nn.Linear(70, 70), nn.ReLU(), nn.Linear(70, 3))
        optimizer, scaler = make(model.parameters()), GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
        for step in range(4):
            for part in range(2):
                inputs = torch.randn(16, 30, generator=torch.Generator().manual_seed(10 * step + part))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(inputs).square().mean() / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return list(model.parameters())

    assert_same_parameters(run(lambda p: tiered(p, tmp_path, fused=fused)), run(torchs))


@BOTH
def test_one_scaler_skips_only_the_optimizer_whose_gradients_are_not_finite(fused: bool | None, tmp_path: Path) -> None:
    def run(make: Make) -> tuple[list[Any], list[float]]:
        first, second = seeded(*SHAPES), seeded(*SHAPES, seed=1)
        optimizers, scaler, scales = (make(first), make(second)), scaler_of(), []
        for step in range(5):
            for parameters in (first, second):
                set_gradients(parameters, step, scale=scaler.get_scale())
            if step in (1, 3):
                spoil(second if step == 1 else first)
            if step == 4:
                scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        counts = [float(o.state[p[0]]["step"]) for o, p in zip(optimizers, (first, second), strict=True)]
        assert counts == [4, 4]
        return [*first, *second], scales

    mine, scales = run(lambda parameters: tiered(parameters, tmp_path, fused=fused))
    theirs, wanted = run(torchs)
    assert scales == wanted
    assert_same_parameters(mine, theirs)


@BOTH
def test_scaler_and_optimizer_resumed_together_go_on_as_if_uninterrupted(fused: bool | None, tmp_path: Path) -> None:
    def steps(parameters: Any, optimizer: Any, scaler: Any, numbers: range) -> None:
        for step in numbers:
            set_gradients(parameters, step, scale=scaler.get_scale())
            if step == 3:
                spoil(parameters)
            scaler.step(optimizer)
            scaler.update()

    straight = seeded(*SHAPES)
    uninterrupted, scaler = tiered(straight, tmp_path, fused=fused), scaler_of()
    steps(straight, uninterrupted, scaler, range(3))
    buffer = io.BytesIO()
    torch.save((straight, uninterrupted.state_dict(), scaler.state_dict()), buffer)
    buffer.seek(0)
    steps(straight, uninterrupted, scaler, range(3, 7))
    weights, saved, saved_scaler = torch.load(buffer, weights_only=True)
    resumed = [nn.Parameter(value.detach().clone()) for value in weights]
    again, other = tiered(resumed, tmp_path, "gpu nvme", fused=fused), scaler_of(init_scale=2.0)
    again.load_state_dict(saved)
    other.load_state_dict(saved_scaler)
    steps(resumed, again, other, range(3, 7))
    assert_same_parameters(resumed, straight)
    assert_same_saved(again.state_dict(), uninterrupted.state_dict())
    assert other.state_dict() == scaler.state_dict()


# -- steps that do not happen -----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_step_changes_nothing_and_makes_no_state(
    dtype: torch.dtype, steps_before: int, fused: bool | None, tmp_path: Path
) -> None:
    parameters = seeded(*SHAPES, dtype=dtype)
    optimizer, scaler = tiered(parameters, tmp_path, fused=fused, amsgrad=True), scaler_of()
    train(optimizer, parameters, range(steps_before))
    set_gradients(parameters, 9)
    spoil(parameters)
    with nothing_changes(optimizer):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == SCALE / 2
    assert len(optimizer.state) == (len(SHAPES) if steps_before else 0)


@pytest.mark.parametrize(
    ("value", "shape"), [*((value, ()) for value in (1.0, 2.0, 0.5, -1.0, math.inf, math.nan, 1e-40)), (1.0, (1,))]
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_any_found_inf_but_zero_skips(steps_before: int, value: float, shape: Any, tmp_path: Path) -> None:
    """With several devices the scaler gives the number of those that found one."""
    parameters = seeded(*SHAPES)
    optimizer = tiered(parameters, tmp_path, fused=True)
    train(optimizer, parameters, range(steps_before))
    set_gradients(parameters, 5)
    gradients = [parameter.grad.clone() for parameter in parameters]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0]), torch.full(shape, value)
    with nothing_changes(optimizer):
        optimizer.step()
    assert_same_parameters([parameter.grad for parameter in parameters], gradients)
    optimizer.found_inf = torch.zeros(shape)
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == steps_before + 1


@BOTH
def test_without_any_gradient_the_scaler_says_what_it_says_with_torch(fused: bool | None, tmp_path: Path) -> None:
    def scaled_step(optimizer: torch.optim.Optimizer) -> None:
        scaler = scaler_of()
        scaler.step(optimizer)
        scaler.update()

    parameters = seeded((10,))
    optimizer = tiered(parameters, tmp_path, fused=fused)
    train(optimizer, parameters, [0])
    optimizer.zero_grad()
    with pytest.raises(AssertionError) as wanted:
        scaled_step(torch.optim.AdamW(seeded((10,)), fused=fused))
    with nothing_changes(optimizer), pytest.raises(AssertionError, match=str(wanted.value)):
        scaled_step(optimizer)


@BOTH
def test_a_parameter_without_gradient_takes_no_part_in_a_scaled_step(fused: bool | None, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded(*SHAPES)
        optimizer, scaler = make(parameters), scaler_of()
        for step in range(3):
            set_gradients(parameters, step, scale=scaler.get_scale())
            parameters[step].grad = None
            scaler.step(optimizer)
            scaler.update()
        assert [float(optimizer.state[parameter]["step"]) for parameter in parameters] == [2, 2, 2]
        return parameters

    assert_same_parameters(run(lambda parameters: tiered(parameters, tmp_path, fused=fused)), run(torchs))


@BOTH
@pytest.mark.parametrize("calls", ["unscale_ unscale_", "step unscale_", "step step", "unscale_ step step"])
def test_what_a_scaler_refuses_it_refuses_in_the_same_words(calls: str, fused: bool | None, tmp_path: Path) -> None:
    def say(make: Make) -> str:
        parameters = seeded((10,))
        optimizer, scaler = make(parameters), scaler_of()
        set_gradients(parameters, 0)
        *allowed, last = calls.split()
        for call in allowed:
            getattr(scaler, call)(optimizer)
        with pytest.raises(RuntimeError) as caught:
            getattr(scaler, last)(optimizer)
        return str(caught.value)

    assert say(lambda p: tiered(p, tmp_path, fused=fused)) == say(lambda p: torch.optim.AdamW(p, fused=fused))


# -- the scale inside the pass ----------------------------------------------------------------------------------


class Recorded(TorchDispatchMode):
    """Every operation of torch that reads or writes elements, with its arguments by name; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [returned.alias_info for returned in func._schema.returns]
        if not any(alias is not None and not alias.is_write for alias in aliases):
            self.calls.append((func.name(), kwargs or {}))
            self.sizes.append(_elements(result) + _elements(args))
        return result

    def on_many_elements(self) -> list[str]:
        """Those that read or write more than a scalar or two."""
        return [name for (name, _), size in zip(self.calls, self.sizes, strict=True) if size > 8]


def _elements(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.numel()
    return max(map(_elements, values), default=0) if isinstance(values, list | tuple) else 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_adds_no_operation_and_reaches_every_kernel_call(dtype: torch.dtype, tmp_path: Path) -> None:
    """What costs a pass over memory is the same, call for call, as in a step that is not scaled."""

    def record(scale: float | None) -> tuple[Recorded, list[Any]]:
        parameters = seeded((5000,), (7, 3), dtype=dtype)
        optimizer = tiered(parameters, tmp_path, "cpu", fused=True)  # what moves says which go together
        train(optimizer, parameters, [0])
        set_gradients(parameters, 1, scale=scale or 1.0)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor([scale]), torch.tensor([0.0])
        with Recorded() as recorded:
            optimizer.step()
        return recorded, parameters

    plain, wanted = record(None)
    scaled, parameters = record(16.0)
    assert scaled.on_many_elements() == plain.on_many_elements()
    kernels = [arguments for name, arguments in scaled.calls if "_fused_adamw_" in name]
    assert kernels and all(arguments["grad_scale"].item() == 16.0 for arguments in kernels)
    assert_same_parameters(parameters, wanted)


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_scale_of_the_users_own_is_taken_as_torch_takes_it(is_unscaled: bool, tmp_path: Path) -> None:
    """The scaler multiplies what it finds in `optimizer.grad_scale`, and takes it away after the step."""

    def run(make: Make) -> list[Any]:
        parameters = seeded(*SHAPES)
        optimizer, scaler = make(parameters), scaler_of()
        for step in range(2):
            set_gradients(parameters, step, scale=4 * scaler.get_scale())
            if is_unscaled:
                scaler.unscale_(optimizer)
            optimizer.grad_scale = torch.tensor([4.0])
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        return parameters

    assert_same_parameters(run(lambda parameters: tiered(parameters, tmp_path, fused=True)), run(torchs))


@BOTH
def test_gradients_after_a_scaled_step_are_those_that_torch_leaves(fused: bool | None, tmp_path: Path) -> None:
    """Unscaled: by the scaler, or by the kernel on its way."""

    def run(make: Make) -> list[Any]:
        parameters = seeded(*SHAPES)
        optimizer, scaler = make(parameters), scaler_of()
        set_gradients(parameters, 0, scale=SCALE)
        scaler.step(optimizer)
        return [parameter.grad for parameter in parameters]

    found = run(lambda parameters: tiered(parameters, tmp_path, fused=fused))
    assert_same_parameters(found, run(torchs if fused else _unfused_scaling))


@BOTH
def test_a_duplicate_in_a_group_is_scaled_as_torch_scales_it(fused: bool | None, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        first, second = seeded((3000,), (10,))
        optimizer, scaler = make([first, second, first]), scaler_of()
        for step in range(2):
            set_gradients([first, second], step, scale=scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        return [first, second]

    found = run(lambda parameters: tiered(parameters, tmp_path, fused=fused))
    assert_same_parameters(found, run(torchs if fused else _unfused_scaling))
