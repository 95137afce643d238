"""What happens to a rule's state when options change, parameters occur twice, or an update fails: as with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.cases import KIB, assert_same_parameters, same_bits, seeded, set_gradients, small_policy, train
from tierstore import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD
from tierstore.errors import FailedStepError, InvariantError, StateDictError
from tierstore.rules import Pieces
from tierstore.rules.lion import LionRule

pytestmark = [
    pytest.mark.filterwarnings("ignore:the swap folder:UserWarning"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning"),
]

SHAPES: list[tuple[int, ...]] = [(9_000,), (3, 5), (70, 80)]
Make = Callable[[Any], torch.optim.Optimizer]


def beside(folder: Path, mine: Any, theirs: Any, run: Callable[[Make], list[Tensor]], **options: Any) -> None:
    """Run with our class and with torch's fused one, and compare parameters to the bit."""
    made: list[Any] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(mine(parameters, **options, policy=small_policy(folder)))
        return made[-1]

    found = run(make)
    made[-1].store.check()
    made[-1].close()
    assert_same_parameters(found, run(lambda parameters: theirs(parameters, **options, fused=True)))


# -- options that go away and come back -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "option", "values"),
    [
        (TieredSGD, torch.optim.SGD, "momentum", [0.9, 0.9, 0.0, 0.0, 0.9, 0.5]),
        (TieredSGD, torch.optim.SGD, "momentum", [0.0, 0.9, 0.0, 0.9]),
        (TieredSGD, torch.optim.SGD, "momentum", [0.0, 0.0, 0.9]),
        (TieredAdamW, torch.optim.AdamW, "amsgrad", [True, True, False, False, True]),
    ],
)
def test_an_option_that_goes_away_and_comes_back_finds_its_state(
    mine: Any, theirs: Any, option: str, values: list[Any], tmp_path: Path
) -> None:
    def run(make: Make) -> list[Tensor]:
        parameters = seeded(*SHAPES)
        optimizer = make([{"params": parameters, option: values[0]}])
        for step, value in enumerate(values):
            optimizer.param_groups[0][option] = value
            train(optimizer, parameters, [step])
        return list(parameters)

    beside(tmp_path, mine, theirs, run)


def test_a_scheduler_may_take_momentum_through_zero(tmp_path: Path) -> None:
    def run(make: Make) -> list[Tensor]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        scheduler = torch.optim.lr_scheduler.CyclicLR(
            optimizer, 1e-3, 1e-1, step_size_up=2, base_momentum=0.0, max_momentum=0.9
        )
        for step in range(9):
            train(optimizer, parameters, [step])
            scheduler.step()
        return list(parameters)

    beside(tmp_path, TieredSGD, torch.optim.SGD, run, momentum=0.9)


def test_state_kept_for_an_option_that_is_off_survives_a_checkpoint(tmp_path: Path) -> None:
    def run(make: Make) -> list[Tensor]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        train(optimizer, parameters, range(2))
        optimizer.param_groups[0]["momentum"] = 0.0
        train(optimizer, parameters, range(2, 3))
        resumed = [nn.Parameter(p.detach().clone()) for p in parameters]
        other = make(resumed)
        other.load_state_dict(optimizer.state_dict())
        other.param_groups[0]["momentum"] = 0.9
        train(other, resumed, range(3, 5))
        return list(resumed)

    beside(tmp_path, TieredSGD, torch.optim.SGD, run, momentum=0.9)


@pytest.mark.parametrize("through", ["steps", "checkpoint"])
def test_momentum_given_later_begins_with_the_gradient_in_low_precision_too(through: str, tmp_path: Path) -> None:
    """The master is state, but no momentum: the buffer began as zeros, and was dampened."""
    parameter, wanted = (nn.Parameter(torch.zeros(3000, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    optimizer = TieredSGD([parameter], lr=1.0, dampening=0.75, policy=small_policy(tmp_path))
    reference = torch.optim.SGD([wanted], lr=1.0, dampening=0.75, fused=True)
    for step in range(3):
        parameter.grad, wanted.grad = torch.ones_like(parameter), torch.ones_like(wanted)
        if step == 1:
            if through == "checkpoint":
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = 0.5
        optimizer.step()
        reference.step()
        assert torch.equal(parameter.float(), wanted)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], reference.state[wanted]["momentum_buffer"])
    optimizer.close()


@pytest.mark.parametrize("how", ["pop", "del", "None", "clear all"])
def test_a_momentum_buffer_taken_away_is_made_again_by_the_next_step(how: str, tmp_path: Path) -> None:
    def run(make: Make) -> list[Tensor]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        train(optimizer, parameters, range(2))
        for parameter in parameters:
            if how == "pop":
                optimizer.state[parameter].pop("momentum_buffer")
            elif how == "del":
                del optimizer.state[parameter]["momentum_buffer"]
            elif how == "None":
                optimizer.state[parameter]["momentum_buffer"] = None
        if how == "clear all":
            optimizer.state.clear()
        train(optimizer, parameters, range(2, 4))
        return list(parameters)

    beside(tmp_path, TieredSGD, torch.optim.SGD, run, momentum=0.9, dampening=0.5)


def test_a_step_without_momentum_after_a_reset_leaves_no_buffer_behind(tmp_path: Path) -> None:
    """There was room for one, which the step made and did not use; the next one with momentum went on from zeros."""

    def run(make: Make) -> list[Tensor]:
        parameters = seeded(*SHAPES)
        optimizer = make(parameters)
        for momentum in (0.9, 0.0, 0.9):
            optimizer.param_groups[0]["momentum"] = momentum
            train(optimizer, parameters, range(2))
            assert [p in optimizer.state and len(optimizer.state[p]) > 0 for p in parameters] == [momentum > 0] * 3
            if momentum:
                optimizer.state.clear()
        return list(parameters)

    beside(tmp_path, TieredSGD, torch.optim.SGD, run, momentum=0.9, dampening=0.5)


def test_a_field_without_which_no_step_can_be_taken_cannot_be_taken_away(tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    with TieredAdamW(parameters, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(1))
        with pytest.raises(TypeError, match="'exp_avg' cannot be taken away alone"):
            optimizer.state[parameters[0]].pop("exp_avg")
        with pytest.raises(TypeError, match="'exp_avg' cannot be taken away alone"):
            optimizer.state[parameters[0]]["exp_avg"] = None
        with pytest.raises(KeyError):
            optimizer.state[parameters[0]].pop("max_exp_avg_sq")


# -- parameters that occur twice --------------------------------------------------------------------------------

TWICE: list[tuple[Any, Any, dict[str, Any]]] = [
    (TieredSGD, torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (TieredSGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "fused": False, "foreach": False}),
    (TieredSGD, torch.optim.SGD, {"fused": True}),
    (TieredAdamW, torch.optim.AdamW, {"fused": True}),
    (TieredAdamW, torch.optim.AdamW, {"fused": False, "foreach": False}),
    (TieredAdam, torch.optim.Adam, {"amsgrad": True, "fused": False, "foreach": False}),
]


@pytest.mark.parametrize(("mine", "theirs", "options"), TWICE)
def test_a_parameter_that_occurs_twice_is_updated_as_by_torch(
    mine: Any, theirs: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    ours, others = seeded(*SHAPES), seeded(*SHAPES)
    optimizer = mine([ours[0], ours[1], ours[0], ours[2]], lr=1e-2, **options, policy=small_policy(tmp_path))
    reference = theirs([others[0], others[1], others[0], others[2]], lr=1e-2, **options)
    for step in range(3):
        train(optimizer, ours, [step])
        train(reference, others, [step])
        assert_same_parameters(ours, others, step)
    optimizer.close()


# -- what has no state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"fused": True}, {"fused": False, "foreach": False}])
def test_parameters_without_state_of_any_layout_are_updated(options: dict[str, Any], tmp_path: Path) -> None:
    def parameters() -> list[nn.Parameter]:
        base = torch.randn(40, 60, generator=torch.Generator().manual_seed(3))
        return [nn.Parameter(base.clone()[:, ::2]), nn.Parameter(base.clone().t()), nn.Parameter(base[0, 0].clone())]

    mine, theirs = parameters(), [nn.Parameter(p.detach().contiguous()) for p in parameters()]
    optimizer = TieredSGD(mine, lr=0.1, weight_decay=0.1, **options, policy=small_policy(tmp_path))
    reference = torch.optim.SGD(theirs, lr=0.1, weight_decay=0.1, **options)
    for step in range(2):
        train(optimizer, mine, [step])
        train(reference, theirs, [step])
    assert_same_parameters(mine, theirs)
    optimizer.close()


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_an_update_without_state_that_fails_after_others_is_told_and_refused(momentum: float, tmp_path: Path) -> None:
    """Some parameters are of the new step then: the next one must not be taken as if none were."""
    mine = seeded((3000,), (50,), (70,))
    groups = [{"params": mine[:1], "momentum": momentum}, {"params": mine[1:2]}, {"params": mine[2:], "fused": False}]
    optimizer = TieredSGD(groups, lr=0.1, policy=small_policy(tmp_path))
    train(optimizer, mine, range(1))
    saved = optimizer.state_dict()
    optimizer.param_groups[2]["lr"] = _Unlucky(0.1)
    with pytest.raises(ArithmeticError) as error:
        train(optimizer, mine, range(1, 2))
    assert "Updated: param.0, param.1" in error.value.__notes__[0]
    optimizer.param_groups[2]["lr"] = 0.1
    with pytest.raises(FailedStepError, match=r"Updated: param\.0, param\.1.*load_state_dict"):
        optimizer.step()
    optimizer.load_state_dict(saved)
    train(optimizer, mine, range(2, 3))
    optimizer.close()


class _Unlucky(float):
    """A number until it is calculated with."""

    def __neg__(self) -> float:
        raise ArithmeticError("no luck")


# -- formulas ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_what_cannot_be_honoured_is_refused_when_it_is_asked_for_later_too(option: str, tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    with TieredAdamW(parameters, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(1))
        before = [p.detach().clone() for p in parameters]
        optimizer.param_groups[0][option] = True
        with pytest.raises(RuntimeError, match=f"does not support `{option}`"):
            optimizer.step()
        assert_same_parameters(parameters, before)


@pytest.mark.parametrize("make", [TieredLion, TieredLAMB])
@pytest.mark.parametrize("option", [{"foreach": True}, {"fused": True}, {"fused": False}])
def test_a_rule_with_one_formula_refuses_the_choice_of_another(make: Any, option: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has one formula"):
        make([{"params": seeded((5,)), **option}], policy=small_policy(tmp_path))


@pytest.mark.parametrize("make", [TieredLion, TieredLAMB])
@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999)])
def test_betas_that_are_no_pair_are_refused(make: Any, betas: Any) -> None:
    with pytest.raises(ValueError, match="betas must be a pair"):
        make(seeded((5,)), betas=betas)


@pytest.mark.parametrize(("mine", "theirs"), [(TieredAdamW, torch.optim.AdamW), (TieredSGD, torch.optim.SGD)])
def test_torch_goes_on_from_the_state_of_a_complex_parameter(mine: Any, theirs: Any, tmp_path: Path) -> None:
    """torch's fused formula refuses complex parameters, so that it must not be told to use it."""
    parameter = nn.Parameter(torch.randn(300, dtype=torch.complex64, generator=torch.Generator().manual_seed(1)))
    other = nn.Parameter(parameter.detach().clone())
    with mine([parameter], lr=1e-2, policy=small_policy(tmp_path)) as optimizer:
        reference = theirs([other], lr=1e-2)
        train(optimizer, [parameter], range(2))
        train(reference, [other], range(2))
        reference.load_state_dict(optimizer.state_dict())
        train(optimizer, [parameter], range(2, 3))
        train(reference, [other], range(2, 3))
        torch.testing.assert_close(parameter.detach(), other.detach())


def test_a_binding_tests_its_rule_and_is_not_made_if_the_rule_fails(tmp_path: Path) -> None:
    class Centred(LionRule):
        def update(self, pieces: Pieces, options: Any, *, is_first: bool, grad_scale: Tensor | None) -> None:
            torch._foreach_sub_(pieces.parameters, [g.mean() for g in pieces.gradients])

    class Optimizer(TieredLion):
        rule = Centred()

    parameters = seeded(*SHAPES)
    with (
        Optimizer(parameters, policy=small_policy(tmp_path)) as optimizer,
        pytest.raises(InvariantError, match="to other bits when it is cut"),
    ):
        train(optimizer, parameters, range(1))


def test_lamb_sums_its_norms_in_one_order_whichever_way_a_step_goes(tmp_path: Path) -> None:
    """Over float64 an order of summation shows in the bits."""
    runs = []
    for extents, order in ((3, "alternating"), (3, "fixed"), (200, "fixed")):
        parameters = [nn.Parameter(p.detach().double()) for p in seeded((30_000,), (9,))]
        policy = small_policy(tmp_path, chunk=16 * KIB, extents=extents, order=order)
        with TieredLAMB(parameters, lr=1e-2, policy=policy) as optimizer:
            train(optimizer, parameters, range(5))
        runs.append(parameters)
    assert_same_parameters(runs[1], runs[0])
    assert_same_parameters(runs[2], runs[0])


def test_a_field_given_values_of_another_kind_is_refused_naming_it(tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    set_gradients(parameters, 0)
    with TieredAdamW(parameters, policy=small_policy(tmp_path)) as optimizer:
        optimizer.step()
        before = optimizer.state[parameters[0]]["exp_avg"].clone()
        for wrong in ("text", 3, {}, torch.zeros(4)):
            with pytest.raises((StateDictError, TypeError), match="exp_avg"):
                optimizer.state[parameters[0]]["exp_avg"] = wrong
        assert same_bits(optimizer.state[parameters[0]]["exp_avg"], before)
