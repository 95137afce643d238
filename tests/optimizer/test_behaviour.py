"""What torch checks of all its optimizers, checked of ours: training.

In both settings and with each of torch's implementations. torch's own AdamW is the judge where it can be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.optimizer.cases import (
    assert_same_parameters,
    bits,
    laid_out,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    train,
)
from tests.optimizer.settings import (
    EVERY_IMPLEMENTATION,
    EVERY_SETTING,
    IMPLEMENTATIONS,
    Make,
    assert_same_optimizers,
    fused,
    parameters_of,
    trained,
)
from tierstore.optimizer import TieredAdam, TieredAdamW, TieredSGD

pytestmark = pytest.mark.usefixtures("swap_folder")


def cubes(dtype: torch.dtype, layout: str = "row-major") -> list[nn.Parameter]:
    """Parameters of all ranks from 0 to 3, of eight chunks and more together."""
    shapes: list[tuple[int, ...]] = [(), (3,), (140, 150), (5, 7, 20)]
    if not dtype.is_complex:
        return [nn.Parameter(laid_out(p.detach(), layout)) for p in seeded(*shapes, dtype=dtype)]
    parts = zip(seeded(*shapes, dtype=dtype.to_real()), seeded(*shapes, dtype=dtype.to_real(), seed=1), strict=True)
    return [nn.Parameter(laid_out(torch.complex(one.detach(), other.detach()), layout)) for one, other in parts]


# -- the right direction ----------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "no scheduler": lambda optimizer: None,
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=5),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=2),
    "both, two groups": lambda optimizer: (SCHEDULERS["StepLR"](optimizer), SCHEDULERS["ReduceLROnPlateau"](optimizer)),
}


def fit(make: Make, layout: str, scheduler: str) -> tuple[list[float], list[nn.Parameter]]:
    """Fit a linear map, and answer with the losses."""
    weight, bias = (nn.Parameter(laid_out(p.detach(), layout)) for p in seeded((140, 150), (140,)))
    inputs, wanted = seeded((150, 8), (140, 8), seed=1)
    groups = [{"params": [weight]}, {"params": [bias], "lr": 1e-2}]
    optimizer = make(groups if scheduler == "both, two groups" else [weight, bias], lr=1e-1)
    schedulers = SCHEDULERS[scheduler](optimizer)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = (weight @ inputs.detach() + bias[:, None] - wanted.detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for one in schedulers if isinstance(schedulers, tuple) else [schedulers] if schedulers else []:
            one.step(*[losses[-1]] if isinstance(one, lr_scheduler.ReduceLROnPlateau) else [])
    return losses, [weight, bias]


@pytest.mark.parametrize("layout", ["row-major", "reversed", "strided"])
@pytest.mark.parametrize(
    ("flags", "scheduler"),
    [*(({}, name) for name in SCHEDULERS), ({"foreach": True}, "no scheduler"), ({"fused": False}, "no scheduler")],
)
@EVERY_SETTING
def test_it_goes_in_the_right_direction_as_torch_does(setting: Make, flags: Any, layout: str, scheduler: str) -> None:
    """Strided parameters too, which torch's fused kernel corrupts: there its for-loop is the judge, nearly."""
    losses, parameters = fit(lambda *a, **k: setting(*a, **k, **flags), layout, scheduler)
    judge = {"fused": False} if layout == "strided" else flags
    wanted, theirs = fit(lambda *a, **k: fused(*a, **k, **judge), layout, scheduler)
    assert losses[-1] < losses[0] / 4
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    if layout == "row-major":
        assert_same_parameters(parameters, theirs)


# -- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-dim", "1-element"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EVERY_SETTING
def test_tensor_options_train_as_the_numbers_they_hold(setting: Make, dtype: torch.dtype, shape: Any) -> None:
    """Given to all, given to a group, and changed in place on the way."""
    rate, first, second = (torch.full(shape, value, dtype=dtype) for value in (1e-2, 0.8, 0.99))
    mine, theirs = cubes(torch.float32), cubes(torch.float32)

    def groups(parameters: list[nn.Parameter], lr: Any) -> list[dict[str, Any]]:
        return [{"params": parameters[:2]}, {"params": parameters[2:], "lr": lr}]

    optimizers = [
        setting(groups(mine, rate.clone()), lr=rate, betas=(first, second)),
        fused(groups(theirs, rate.item()), lr=rate.item(), betas=(first.item(), second.item())),
    ]
    for step in range(4):
        for optimizer, parameters in zip(optimizers, (mine, theirs), strict=True):
            train(optimizer, parameters, [step])
        rate.mul_(0.5)
        optimizers[1].param_groups[0]["lr"] = rate.item()
    assert_same_parameters(mine, theirs)


@EVERY_SETTING
def test_a_group_overrides_every_option(setting: Make) -> None:
    def groups() -> list[dict[str, Any]]:
        parameters = seeded(*[(2500,)] * 7)
        given: list[dict[str, Any]] = [
            *[{}, {"lr": 0.1}, {"betas": (0.5, 0.6)}, {"eps": 1e-2}, {"weight_decay": 0.5}],
            *[{"amsgrad": True}, {"maximize": True}],
        ]
        return [{"params": [parameter], **options} for parameter, options in zip(parameters, given, strict=True)]

    mine, theirs = setting(groups(), lr=1e-2), fused(groups(), lr=1e-2)
    plain = seeded(*[(2500,)] * 7)
    for optimizer in (mine, theirs, fused(plain, lr=1e-2)):
        train(optimizer, parameters_of(optimizer), range(3))
    assert_same_optimizers(mine, theirs)
    differing = [not torch.equal(one, other) for one, other in zip(parameters_of(mine), plain, strict=True)]
    assert differing == [False, *[True] * 6]


ASKED = {"foreach": {"foreach": True}, "for-loop": {"fused": False}, "fused": {"fused": True}}


@pytest.mark.parametrize("asked", ASKED)
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_a_group_gets_the_implementation_it_asks_for(setting: Make, flags: Any, asked: str) -> None:
    """Whatever the other groups have; and torch's AdamW goes on with it."""
    parameters, theirs = seeded((4000,), (4000,)), seeded((4000,), (4000,))
    optimizer = setting([{"params": parameters[:1]}, {"params": parameters[1:], **ASKED[asked]}], lr=1e-2, **flags)
    references = [fused(theirs[:1], lr=1e-2, **flags), fused(theirs[1:], lr=1e-2, **ASKED[asked])]
    train(optimizer, parameters, range(3))
    for step in range(3):
        set_gradients(theirs, step)
        for reference in references:
            reference.step()
    assert_same_parameters(parameters, theirs)
    resumed = torch.optim.AdamW([{"params": theirs[:1]}, {"params": theirs[1:]}])
    resumed.load_state_dict(optimizer.state_dict())
    train(optimizer, parameters, range(3, 5))
    train(resumed, theirs, range(3, 5))
    assert_same_parameters(parameters, theirs)


def test_implementations_differ_in_bits() -> None:
    """Or the tests above tell nothing; but foreach and for-loop agree on the CPU, unless options are Tensors."""
    found = []
    for flags in IMPLEMENTATIONS.values():
        parameters = seeded((4000,))
        train(fused(parameters, lr=1e-2, **flags), parameters, range(3))
        found.append(parameters[0].detach())
    assert not torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])


# -- kinds of parameters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "amsgrad"), [(torch.complex64, False), (torch.complex128, True)])
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_complex_parameters_train_as_torch_trains_them(
    setting: Make, flags: Any, dtype: torch.dtype, amsgrad: bool
) -> None:
    """torch's fused kernel refuses them, so that ours, which takes them as pairs, is held to its for-loop, nearly."""
    mine, theirs = cubes(dtype), cubes(dtype)
    optimizer = setting(mine, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, **flags)
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, amsgrad=amsgrad, **(flags or {"fused": False}))
    for step in range(4):
        train_complex(optimizer, mine, step)
        train_complex(reference, theirs, step)
    if flags:
        assert_same_optimizers(optimizer, reference)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    for parameter, other in zip(mine, theirs, strict=True):
        for name, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[parameter][name], value, rtol=1e-5, atol=1e-7)


def train_complex(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], step: int) -> None:
    """A step on the gradients of a loss of both parts."""
    optimizer.zero_grad()
    loss = sum((parameter.real.square() * (step + 1) + parameter.imag.sin()).sum() for parameter in parameters)
    assert isinstance(loss, Tensor)
    loss.backward()
    optimizer.step()


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_a_complex_parameter_trains_as_its_two_real_parts(setting: Make, flags: Any) -> None:
    (whole,), parts = cubes(torch.complex64)[2:3], seeded((140, 150), (140, 150))
    pairs = [nn.Parameter(torch.view_as_real(whole.detach()).clone())]
    optimizers = [setting([whole], lr=1e-2, **flags), setting(pairs, lr=1e-2, **flags)]
    for step in range(3):
        set_gradients(parts, step)
        whole.grad = torch.complex(*[part.grad for part in parts if part.grad is not None])
        pairs[0].grad = torch.view_as_real(whole.grad)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(bits(whole), bits(pairs[0]))


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_each_of_several_dtypes_trains_as_if_it_were_alone(setting: Make, flags: Any) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

    def parameters() -> list[list[nn.Parameter]]:
        return [seeded((60, 70), (9,), dtype=dtype, seed=number) for number, dtype in enumerate(dtypes)]

    together, apart = parameters(), parameters()
    mixed = setting([one for several in zip(*together, strict=True) for one in several], **flags)
    alone = [setting(several, **flags) for several in apart]
    for step in range(3):
        for several in [*together, *apart]:
            set_gradients(several, step)
        for optimizer in [mixed, *alone]:
            optimizer.step()
    for several, others in zip(together, apart, strict=True):
        assert_same_parameters(several, others)
    for several, theirs in zip(together[:2], parameters()[:2], strict=True):  # and torch's, where it has our precision
        train(fused(theirs, **flags), theirs, range(3))
        assert_same_parameters(several, theirs)


# -- steps that change nothing ----------------------------------------------------------------------------------


def copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def assert_unchanged(optimizer: Any, before: Sequence[Tensor], saved: dict[str, Any]) -> None:
    assert_same_parameters(parameters_of(optimizer), before)
    found = optimizer.state_dict()
    assert found["param_groups"] == saved["param_groups"]
    for key, fields in saved["state"].items():
        assert all(same_bits(found["state"][key][name], value) for name, value in fields.items())


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_a_step_without_any_gradient_changes_nothing(setting: Make, flags: Any) -> None:
    _, optimizer = trained(setting, weight_decay=0.1, **flags)
    before, saved = copies(parameters_of(optimizer)), optimizer.state_dict()
    optimizer.zero_grad()
    assert optimizer.step() is None
    assert optimizer.step(lambda: 7) == 7
    assert_unchanged(optimizer, before, saved)


@pytest.mark.parametrize("amsgrad", [False, True])
@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_zero_gradients_without_decay_change_no_parameter(setting: Make, flags: Any, amsgrad: bool) -> None:
    parameters = cubes(torch.float32)
    before = copies(parameters)
    optimizer = setting(parameters, lr=0.1, weight_decay=0.0, amsgrad=amsgrad, **flags)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert_same_parameters(parameters, before)
    assert all(state["step"] == 3 and not state["exp_avg"].any() for state in optimizer.state.values())


@pytest.mark.parametrize("found", [1.0, 3.0, 0.5])
@EVERY_SETTING
def test_it_does_not_step_if_infinities_were_found(setting: Make, found: float) -> None:
    """By any number but zero; and with zero it divides by the scale, as torch's fused kernel does."""
    _, optimizer = trained(setting, weight_decay=0.1, fused=True)
    before, saved = copies(parameters_of(optimizer)), optimizer.state_dict()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(found)
    optimizer.step()
    assert_unchanged(optimizer, before, saved)
    _, reference = trained(fused, weight_decay=0.1, fused=True)
    optimizer.found_inf = torch.tensor(0.0)
    reference.grad_scale, reference.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    optimizer.step()
    reference.step()
    assert_same_optimizers(optimizer, reference)


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("cls", [TieredAdamW, TieredAdam, TieredSGD])
def test_a_group_of_any_implementation_is_trained_on_unscaled_gradients(cls: Any, asked: str, tmp_path: Path) -> None:
    """With `fused=True` a GradScaler leaves the division to the optimizer; a group may ask for another implementation.

    torch's own optimizers refuse the for-loop there, in the middle of training.
    """
    options = {"lr": 0.1} | ({"momentum": 0.9} if cls is TieredSGD else {"eps": 1.0})
    parameters, others = seeded((6000,), (3,)), seeded((6000,), (3,))
    groups = [{"params": parameters, **ASKED[asked]}]
    optimizer = cls(groups, fused=True, policy=small_policy(tmp_path), **options)
    unscaled = cls(others, policy=small_policy(tmp_path), **options, **ASKED[asked])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # and stays so; a power of two divides exactly
    for step in range(3):
        set_gradients(parameters, step, scale=1024.0)
        scaler.scale(torch.zeros(1))
        scaler.step(optimizer)
        scaler.update()
        train(unscaled, others, [step])
    assert_same_parameters(parameters, others)


@EVERY_IMPLEMENTATION
@EVERY_SETTING
def test_gradients_are_not_written_to(setting: Make, flags: Any) -> None:
    """With maximize and decay, for which an implementation may be tempted to."""
    parameters = cubes(torch.float32) + cubes(torch.complex64) + cubes(torch.bfloat16)
    optimizer = setting(parameters, maximize=True, weight_decay=0.1, **flags)
    for step in range(2):
        set_gradients(parameters, step)
        gradients = [parameter.grad for parameter in parameters]
        before = [gradient.clone() for gradient in gradients if gradient is not None]
        optimizer.step()
        assert_same_parameters([gradient for gradient in gradients if gradient is not None], before)
        assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, gradients, strict=True))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph:UserWarning")
@EVERY_SETTING
def test_gradients_with_a_graph_are_taken_as_values(setting: Make) -> None:
    """`backward(create_graph=True)` leaves such ones."""
    mine, theirs = cubes(torch.float32), cubes(torch.float32)
    for parameters, make in ((mine, setting), (theirs, fused)):
        optimizer = make(parameters, lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            sum(parameter.pow(3).sum() for parameter in parameters).backward(create_graph=True)
            assert parameters[2].grad.requires_grad
            optimizer.step()
        assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
    assert_same_parameters(mine, theirs)


# -- what a process may set -------------------------------------------------------------------------------------


@contextlib.contextmanager
def default(what: torch.dtype | str) -> Iterator[None]:
    """Another default dtype or device (`meta`, which has no values, stands in for an accelerator) in this process."""
    if isinstance(what, torch.dtype):
        torch.set_default_dtype(what)
    else:
        torch.set_default_device(what)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("what", [torch.float64, "meta"], ids=["default dtype", "default device"])
@EVERY_SETTING
def test_defaults_of_the_process_do_not_reach_what_the_optimizer_makes(setting: Make, what: Any) -> None:
    """A script may call `torch.set_default_device` or `set_default_dtype`."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]

    def groups() -> list[dict[str, Any]]:
        kinds = [(dtype, flags) for dtype in dtypes for flags in IMPLEMENTATIONS.values()]
        return [{"params": seeded((2500,), (), (3,), dtype=dtype), **flags} for dtype, flags in kinds]

    both = [groups(), groups()]
    gradients = [parameter for group in both[0] for parameter in group["params"]]
    set_gradients(gradients, 0)

    def run(groups: list[dict[str, Any]]) -> Any:
        optimizer = setting(groups, lr=1e-2, amsgrad=True)
        parameters = parameters_of(optimizer)
        for parameter, other in zip(parameters, gradients, strict=True):
            parameter.grad = other.grad
        for step in range(3):
            optimizer.step()
            assert all(state["step"].dtype is torch.float32 for state in optimizer.state.values())
            if step == 1:
                optimizer.state[parameters[0]]["exp_avg"].mul_(0.5)
                optimizer.state[parameters[0]] = {**optimizer.state[parameters[0]], "step": 2}
                optimizer.load_state_dict(optimizer.state_dict())
        return optimizer

    wanted = run(both[0])
    with default(what):
        found = run(both[1])
        saved = found.state_dict()
    assert_same_optimizers(found, wanted)
    for state in [*found.state.values(), *saved["state"].values()]:
        assert {value.device.type for value in state.values()} == {"cpu"}
