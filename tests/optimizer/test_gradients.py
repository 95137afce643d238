"""Whatever a script does to gradients between backward and step has the effect it has with torch's AdamW, to the bit.

Clipping and accumulation are compared with torch's fused AdamW; gradients set by hand, of layouts and dtypes where
torch's kernel is wrong or refuses, with `cases.Reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.beside import (
    EVERY_TIERS,
    nothing_changes,
    tiered,
    torchs,
    trained,
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
    pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning"),
]

Make = Callable[[Any], torch.optim.Optimizer]
Run = Callable[[Make], list[Any]]


def values_of(shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))


def assert_as_with_torch(run: Run, folder: Path, tiers: str = "cpu nvme") -> None:
    """Compare all tensors that a run returns."""
    assert_same_parameters(run(lambda parameters: tiered(parameters, folder, tiers)), run(torchs))


# -- clipping ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, float("inf")])
def test_clipping_by_norm_reaches_the_step(norm_type: float, foreach: bool | None, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50), ())
        optimizer, norms = make(parameters), []
        for step in range(3):
            set_gradients(parameters, step)
            norms.append(nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=norm_type, foreach=foreach))
            assert norms[-1] > 0.01
            optimizer.step()
        return [*parameters, *norms]

    assert_as_with_torch(run, tmp_path)


@pytest.mark.parametrize("foreach", [None, True, False])
@EVERY_TIERS
def test_clipping_by_value_reaches_the_step(tiers: str, foreach: bool | None, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50), ())
        optimizer = make(parameters)
        for step in range(3):
            set_gradients(parameters, step)
            nn.utils.clip_grad_value_(parameters, 0.3, foreach=foreach)
            optimizer.step()
        return parameters

    assert_as_with_torch(run, tmp_path, tiers)


def test_gradients_clipped_apart_from_the_optimizer_reach_the_step(tmp_path: Path) -> None:
    """As FSDP and pipelines do: the norm of some gradients, scaled by it with others; through the groups' lists."""

    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50))
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}])
        for step in range(3):
            set_gradients(parameters, step)
            norm = nn.utils.get_total_norm([parameters[0].grad])
            for group in optimizer.param_groups:
                nn.utils.clip_grads_with_norm_(group["params"], 0.5, norm)
            optimizer.step()
        return parameters

    assert_as_with_torch(run, tmp_path)


# -- gradients set by hand --------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda values: values.t().contiguous().t(),
    "every second": lambda values: values.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
    "rows of a wider one": lambda values: torch.cat([values, values + 1], 1)[:, : values.shape[1]],
    "part of a buffer": lambda values: torch.cat([torch.ones(5), values.reshape(-1)])[5:].view(values.shape),
    "expanded": lambda values: values[:1, :1].expand(values.shape),
    "expanded rows": lambda values: values[:1].expand(values.shape),
    "requires grad": lambda values: values.clone().requires_grad_(),
    "of a graph": lambda values: values.clone().requires_grad_() * 1.0,
    "negated lazily": lambda values: torch.complex(values, -values).conj().imag,
    "of a subclass": lambda values: values.as_subclass(type("Tagged", (Tensor,), {})),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tiers", ["gpu cpu nvme", "nvme"])
def test_a_gradient_of_any_layout_is_used_by_its_values_and_left_as_it_was(
    tiers: str, layout: str, tmp_path: Path
) -> None:
    """torch's fused kernel reads other strides wrongly, and an expanded gradient out of its bounds."""
    mine, theirs = seeded((140, 170)), seeded((140, 170))
    optimizer = tiered(mine, tmp_path, tiers)
    reference = Reference([{**optimizer.param_groups[0], "params": theirs}])
    for step in range(2):
        given = LAYOUTS[layout](values_of((140, 170), step))
        before = given.detach().clone()
        mine[0].grad, theirs[0].grad = given, before.as_subclass(Tensor)
        optimizer.step()
        reference.step()
        assert mine[0].grad is given and torch.equal(given.detach(), before)
        assert_same_parameters(mine, theirs, step)
    assert_same_state(optimizer, reference)


PRECISIONS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("gradient_dtype", PRECISIONS)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_gradient_of_another_precision_is_cast_to_that_of_the_update(
    dtype: torch.dtype, gradient_dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch's AdamW refuses it."""
    mine, theirs = seeded((20_000,), (7, 3), dtype=dtype), seeded((20_000,), (7, 3), dtype=dtype)
    optimizer = tiered(mine, tmp_path)
    reference = Reference([{**optimizer.param_groups[0], "params": theirs}])
    for step in range(2):
        for one, other in zip(mine, theirs, strict=True):
            gradient = values_of(one.shape, step).to(gradient_dtype)
            set_gradient_of_any_dtype(one, gradient)
            set_gradient_of_any_dtype(other, gradient)
        optimizer.step()
        reference.step()
    assert_same_parameters(mine, theirs)
    assert_same_state(optimizer, reference)


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype"), [(torch.float32, torch.complex64), (torch.complex64, torch.float32)]
)
def test_a_complex_gradient_of_a_real_parameter_is_refused_by_name_and_so_is_the_reverse(
    dtype: torch.dtype, gradient_dtype: torch.dtype, tmp_path: Path
) -> None:
    parameter = nn.Parameter(torch.ones(20_000, dtype=dtype))
    optimizer = tiered([parameter], tmp_path)
    parameter.grad = torch.ones(20_000, dtype=dtype)
    optimizer.step()
    set_gradient_of_any_dtype(parameter, torch.ones(20_000, dtype=gradient_dtype))
    with nothing_changes(optimizer), pytest.raises(RuntimeError, match=f"{gradient_dtype}.*{dtype}"):
        optimizer.step()


def test_one_gradient_may_belong_to_two_parameters(tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (20_000,))
        optimizer = make(parameters)
        for step in range(3):
            parameters[0].grad = parameters[1].grad = values_of((20_000,), step)
            optimizer.step()
        return parameters

    assert_as_with_torch(run, tmp_path)


def test_a_gradient_may_be_the_memory_of_its_parameter_or_of_another(tmp_path: Path) -> None:
    """A regulariser by hand. Parameters are updated in order, so that a later one sees what an earlier one became."""

    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (20_000,))
        optimizer = make(parameters)
        for _ in range(3):
            parameters[0].grad = parameters[0].detach()
            parameters[1].grad = values_of((20_000,), 1)
            optimizer.step()
        return parameters

    assert_as_with_torch(run, tmp_path)


@EVERY_TIERS
def test_gradients_that_are_views_of_one_flat_buffer_are_followed_when_it_changes(tiers: str, tmp_path: Path) -> None:
    """As DDP's buckets are with `gradient_as_bucket_view`."""

    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50))
        buffer = values_of((22_000,), 0)
        parameters[0].grad, parameters[1].grad = buffer[:20_000], buffer[20_000:].view(40, 50)
        optimizer = make(parameters)
        for _ in range(3):
            optimizer.step()
            buffer.mul_(-0.5)
        return parameters

    assert_as_with_torch(run, tmp_path, tiers)


def test_gradients_that_are_not_finite_spread_as_with_torch(tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,))
        optimizer = make(parameters)
        for step in range(2):
            set_gradients(parameters, step)
            parameters[0].grad[5], parameters[0].grad[1500] = float("nan"), float("inf")
            optimizer.step()
        assert int(parameters[0].isnan().sum()) == 2
        return parameters

    assert_as_with_torch(run, tmp_path)


# -- backward ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
@EVERY_TIERS
def test_gradients_of_several_backward_passes_add_up(tiers: str, set_to_none: bool, tmp_path: Path) -> None:
    """With set_to_none=False the unused head has zero gradients, so that it decays; else none, so that it does not."""

    def run(make: Make) -> list[Any]:
        torch.manual_seed(0)
        body, head, unused = nn.Linear(30, 700), nn.Linear(700, 3), nn.Linear(700, 3)
        parameters = [*body.parameters(), *head.parameters(), *unused.parameters()]
        optimizer = make(parameters)
        (body(values_of((4, 30), 0)).relu().sum() + unused(torch.ones(700)).sum()).backward()
        for step in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(3):
                head(body(values_of((4, 30), 10 * step + part)).relu()).square().mean().backward()
            optimizer.step()
        assert (unused.weight in optimizer.state) == (not set_to_none)
        return parameters

    assert_as_with_torch(run, tmp_path, tiers)


def test_zero_grad_zeroes_in_place_or_takes_gradients_away(tmp_path: Path) -> None:
    parameters, optimizer = trained(tmp_path)
    given = parameters[0].grad
    optimizer.zero_grad(set_to_none=False)
    assert parameters[0].grad is given and not given.any()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
    with nothing_changes(optimizer):
        assert optimizer.step() is None


@EVERY_TIERS
def test_several_steps_may_be_taken_on_one_gradient(tiers: str, tmp_path: Path) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50))
        optimizer = make(parameters)
        for step in range(2):
            set_gradients(parameters, step)
            for _ in range(3):
                optimizer.step()
        assert optimizer.state[parameters[0]]["step"] == 6
        return parameters

    assert_as_with_torch(run, tmp_path, tiers)


def test_gradients_that_carry_a_graph_are_used(tmp_path: Path) -> None:
    """A gradient penalty: `.grad` itself requires gradients, and the graph through it stays usable after the step."""

    def run(make: Make) -> list[Any]:
        weights, bias = seeded((40, 50), (50,))
        optimizer = make([weights, bias])
        for _ in range(3):
            optimizer.zero_grad()
            gradients = torch.autograd.grad((weights @ bias).pow(3).sum(), [weights, bias], create_graph=True)
            penalty = sum((gradient.square().sum() for gradient in gradients), torch.zeros(())) * 1e-6
            penalty.backward(create_graph=True)
            assert weights.grad is not None and weights.grad.requires_grad
            optimizer.step()
        assert weights.is_leaf and weights.grad_fn is None
        return [weights, bias]

    assert_as_with_torch(run, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_duplicates_in_a_group_count_twice_also_for_low_precision(
    amsgrad: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    mine, theirs = seeded((20_000,), (10,), dtype=dtype), seeded((20_000,), (10,), dtype=dtype)
    optimizer = tiered([mine[0], mine[1], mine[0]], tmp_path, amsgrad=amsgrad)
    reference = Reference([{**optimizer.param_groups[0], "params": [theirs[0], theirs[1], theirs[0]]}])
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
    assert_same_parameters(mine, theirs)
    assert_same_state(optimizer, reference)


# -- closures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["position", "keyword"])
@pytest.mark.parametrize("returned", ["tensor", "float", "None", "tuple"])
def test_a_closure_runs_once_with_gradients_on_and_what_it_returns_comes_back(
    returned: str, by: str, tmp_path: Path
) -> None:
    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50))
        optimizer = make(parameters)
        for number in range(3):
            calls: list[Any] = []

            def closure(calls: list[Any] = calls, number: int = number) -> Any:
                optimizer.zero_grad()
                loss = sum((p * values_of(p.shape, number)).square().sum() for p in parameters)
                loss.backward()
                kinds = {"tensor": loss, "float": loss.item(), "None": None, "tuple": (loss, 1)}
                calls.append(kinds[returned])
                return calls[-1]

            with torch.no_grad():
                result = optimizer.step(closure) if by == "position" else optimizer.step(closure=closure)
                assert not torch.is_grad_enabled()
            assert len(calls) == 1 and result is calls[0]
        return parameters

    assert_as_with_torch(run, tmp_path)


def test_a_closure_may_change_everything_that_the_step_then_uses(tmp_path: Path) -> None:
    """Weights, learning rate, gradients of several backward passes, state: the step begins when the closure is done."""

    def run(make: Make) -> list[Any]:
        parameters = seeded((20_000,), (40, 50))
        optimizer = make(parameters)
        train(optimizer, parameters, [0])

        def closure() -> None:
            optimizer.zero_grad()
            parameters[0].data.mul_(0.5)
            optimizer.param_groups[0]["lr"] = 0.3
            optimizer.state[parameters[1]]["exp_avg"].zero_()
            for _ in range(2):
                sum(parameter.square().sum() for parameter in parameters).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)

        optimizer.step(closure)
        return parameters

    assert_as_with_torch(run, tmp_path)


def test_a_closure_that_leaves_no_gradients_makes_no_step(tmp_path: Path) -> None:
    _, optimizer = trained(tmp_path)
    optimizer.zero_grad()
    with nothing_changes(optimizer):
        assert optimizer.step(lambda: 5.0) == 5.0
