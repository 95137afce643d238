"""Every update rule: the numbers of torch or of its paper, and the same bits wherever state lies and is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes import FaultyEngine
from tests.optimizer.cases import (
    KIB,
    Case,
    assert_same_parameters,
    draw_policy,
    fitted,
    least_chunk_bytes,
    real,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    state_bytes,
    train,
)
from tierstore import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD
from tierstore.build import Parts
from tierstore.errors import FailedStepError, InvariantError, TransferError
from tierstore.io.base import Kind
from tierstore.kernels import self_test
from tierstore.rules import Pieces
from tierstore.rules.base import block_sums
from tierstore.rules.lion import LionOptions, LionRule
from tierstore.tiered import TieredOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:the swap folder:UserWarning"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning"),
]

SHAPES: list[tuple[int, ...]] = [(9_000,), (3, 5), (), (70, 80), (1,), (0,), (2_049,)]

# -- against torch ----------------------------------------------------------------------------------------------

ADAM: list[dict[str, Any]] = [
    {},
    {"amsgrad": True, "weight_decay": 0.1},
    {"maximize": True, "betas": (0.8, 0.95), "eps": 1e-6},
    {"lr": torch.tensor(3e-3), "weight_decay": 0.05},
]
SGD: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9},
    {"momentum": 0.8, "dampening": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},  # torch's foreach adds into the gradients then
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
    {"lr": torch.tensor(3e-3), "momentum": 0.9},
]
PAIRS: list[tuple[Any, Any, dict[str, Any]]] = [
    *((TieredAdamW, torch.optim.AdamW, options) for options in ADAM),
    *((TieredAdam, torch.optim.Adam, options) for options in ADAM),
    *((TieredSGD, torch.optim.SGD, options) for options in SGD),
]
FORMULAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what we are told, and what torch is told
    "default": ({}, {"fused": True}),
    "fused": ({"fused": True}, {"fused": True}),
    "foreach": ({"foreach": True}, {"foreach": True}),
    "for-loop": ({"fused": False}, {"fused": False, "foreach": False}),
    "no foreach": ({"foreach": False}, {"fused": True}),
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize(("make", "like", "options"), PAIRS)
@pytest.mark.parametrize("tiers", ["cpu", "gpu cpu nvme"])
def test_the_formula_asked_for_is_torchs_to_the_bit(
    make: Any, like: Any, options: dict[str, Any], formula: str, tiers: str, tmp_path: Path
) -> None:
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    told, torch_told = FORMULAS[formula]
    if isinstance(options.get("lr"), Tensor) and formula == "foreach":
        pytest.skip("torch refuses a Tensor lr with foreach, and so do we: see test_bad_input")
    with make(mine, **options, **told, policy=small_policy(tmp_path, tiers.split(), chunk=16 * KIB)) as optimizer:
        reference = like(theirs, **options, **torch_told)
        for step in range(4):
            for parameters in (mine, theirs):
                set_gradients(parameters, step)
                if step or formula not in ("default", "fused", "no foreach") or "momentum" not in options:
                    parameters[step].grad = None  # torch's fused SGD cannot begin a momentum buffer late
            optimizer.step()
            reference.step()
            assert_same_parameters(mine, theirs, step)
            optimizer.store.check()
        saved, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
        assert saved.keys() == wanted.keys()
        for key, fields in wanted.items():
            assert saved[key].keys() == fields.keys()
            assert all(same_bits(saved[key][name], value) for name, value in fields.items())


@pytest.mark.parametrize(("make", "like"), [(TieredAdamW, torch.optim.AdamW), (TieredSGD, torch.optim.SGD)])
def test_groups_may_ask_for_formulas_of_their_own(make: Any, like: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [{"foreach": True}, {"fused": False}, {}]
    told: list[dict[str, Any]] = [
        {"foreach": True, "fused": False},
        {"foreach": False, "fused": False},
        {"fused": True},
    ]
    mine, theirs = seeded(*SHAPES[:4]), seeded(*SHAPES[:4])
    with make(
        [{"params": [p], **how} for p, how in zip(mine, asked, strict=False)], policy=small_policy(tmp_path)
    ) as optimizer:
        reference = like([{"params": [p], **how} for p, how in zip(theirs, told, strict=False)])
        optimizer.add_param_group({"params": mine[3:], "foreach": True})  # after the defaults have become `fused`
        reference.add_param_group({"params": theirs[3:], "foreach": True})
        train(optimizer, mine, range(3))
        train(reference, theirs, range(3))
        assert_same_parameters(mine, theirs)
        assert [group["fused"] for group in optimizer.param_groups] == [None, False, True, None]


# -- against the papers -----------------------------------------------------------------------------------------


def lion(x: Tensor, gradients: Sequence[Tensor], *, lr: float, betas: tuple[float, float], decay: float) -> Tensor:
    """Chen et al., algorithm 2."""
    x, m = x.double(), torch.zeros_like(x, dtype=torch.float64)
    for g in gradients:
        update = torch.sign(betas[0] * m + (1 - betas[0]) * g)
        x = x - lr * (update + decay * x)
        m = betas[1] * m + (1 - betas[1]) * g
    return x


def lamb(
    x: Tensor, gradients: Sequence[Tensor], *, lr: float, betas: tuple[float, float], decay: float, eps: float = 1e-6
) -> Tensor:
    """You et al., algorithm 2, one layer."""
    x = x.double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
        of_x, of_update = x.norm(), (r + decay * x).norm()
        ratio = of_x / of_update if of_x > 0 and of_update > 0 else 1.0
        x = x - lr * ratio * (r + decay * x)
    return x


@pytest.mark.parametrize(("make", "formula"), [(TieredLion, lion), (TieredLAMB, lamb)])
@pytest.mark.parametrize("sign", [1, -1], ids=["minimize", "maximize"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("tiers", ["cpu", "cpu nvme"])
def test_lion_and_lamb_are_those_of_their_papers(
    make: Any, formula: Callable[..., Tensor], sign: int, decay: float, tiers: str, tmp_path: Path
) -> None:
    steps = 5
    begun = [p.detach().double() for p in seeded(*SHAPES)]
    begun[1].zero_()  # a norm of 0
    mine = [torch.nn.Parameter(values.clone()) for values in begun]
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": decay, "maximize": sign < 0}
    seen: list[list[Tensor]] = [[] for _ in mine]
    with make(mine, **options, policy=small_policy(tmp_path, tiers.split(), chunk=32 * KIB)) as optimizer:
        for step in range(steps):
            set_gradients(mine, step)
            for gradients, parameter in zip(seen, mine, strict=True):
                assert parameter.grad is not None
                gradients.append(sign * parameter.grad.double())
            optimizer.step()
    for parameter, values, gradients in zip(mine, begun, seen, strict=True):
        wanted = formula(values, gradients, lr=1e-2, betas=(0.9, 0.95), decay=decay)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-12)


# -- wherever state lies ----------------------------------------------------------------------------------------


def _options_for(make: Any, choose: random.Random, group: dict[str, Any]) -> dict[str, Any]:
    """A drawn group's options, turned into those that the class has."""
    parameters, lr = group["params"], group["lr"]
    common = {"lr": lr, "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    if make is TieredSGD:
        momentum = choose.choice([0.0, 0.5, 0.9])
        is_nesterov = momentum > 0 and choose.random() < 0.5
        dampening = 0.0 if is_nesterov else choose.choice([0.0, 0.3])
        more = {"momentum": momentum, "dampening": dampening, "nesterov": is_nesterov}
    elif make is TieredLion:
        more = {"betas": group["betas"]}
    elif make is TieredLAMB:
        more = {"betas": group["betas"], "eps": group["eps"]}
        parameters = list(dict.fromkeys(parameters))  # one that occurs twice has no norm of its own
    else:
        more = {name: group[name] for name in ("betas", "eps", "amsgrad")}
        more |= choose.choice([{}, {"foreach": True, "lr": float(lr)}, {"fused": False}])
    return {**common, **more, "params": parameters}


MAKERS: dict[str, Any] = {kind.__name__: kind for kind in (TieredAdam, TieredSGD, TieredLion, TieredLAMB)}


def _check_placement(make: Any, seed: int, folder: Path) -> None:
    case = Case.draw(seed)
    groups_of = [
        [_options_for(make, choose, group) for group in case.make_groups()]
        for choose in (random.Random(seed) for _ in range(3))
    ]
    choose = random.Random(seed)
    state = state_bytes(groups_of[0])
    policies = [draw_policy(choose, [folder], least_chunk_bytes(groups_of[0]), state) for _ in range(2)]
    simple = {"chunk_size": max(64 * KIB, state // 4096 * 4096 + 4096), "tiers": {"cpu": {}}}
    optimizers = [fitted(groups, policy, make) for groups, policy in zip(groups_of, [simple, *policies], strict=True)]
    for step in range(3):
        for optimizer in optimizers:
            case.begin_step(optimizer.param_groups, step)
            optimizer.step()
            optimizer.store.check()
    parameters = [[p for group in groups for p in group["params"]] for groups in groups_of]
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for other, state_of, policy in zip(parameters[1:], states[1:], policies, strict=True):
        assert_same_parameters(other, parameters[0], f"{make.__name__}, seed {seed}, {policy}")
        assert state_of.keys() == states[0].keys()
        assert all(same_bits(state_of[key][n], v) for key, fields in states[0].items() for n, v in fields.items())
    for optimizer in optimizers:
        optimizer.close()


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("make", MAKERS)
def test_placement_changes_no_bit_of_any_rule(make: str, seed: int, tmp_path: Path) -> None:
    _check_placement(MAKERS[make], seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(9, 300))
@pytest.mark.parametrize("make", MAKERS)
def test_placement_changes_no_bit_of_any_rule_in_many_more_runs(make: str, seed: int, tmp_path: Path) -> None:
    _check_placement(MAKERS[make], seed, tmp_path)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 70_000), cuts=st.sets(st.integers(1, 68)), seed=st.integers(0, 9))
def test_sums_for_norms_are_the_same_however_a_parameter_is_cut(length: int, cuts: set[int], seed: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    ends = [0, *sorted(1024 * cut for cut in cuts if 1024 * cut < length), length]
    parts = [block_sums(values[start:end]) for start, end in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(parts), block_sums(values))


def test_a_rule_that_computes_other_bits_when_it_is_cut_is_refused() -> None:
    class Centred(LionRule):
        def update(self, pieces: Pieces, options: Any, *, is_first: bool, grad_scale: Tensor | None) -> None:
            torch._foreach_sub_(pieces.parameters, [g.mean() for g in pieces.gradients])

    options = LionOptions(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0, maximize=False)
    self_test(LionRule(), options, torch.float32)
    with pytest.raises(InvariantError, match="Lion to other bits when it is cut"):
        self_test(Centred(), options, torch.float32)


# -- state dicts ------------------------------------------------------------------------------------------------

STATED: dict[str, tuple[Callable[..., TieredOptimizer], Callable[..., torch.optim.Optimizer] | None]] = {
    "Adam": (partial(TieredAdam, weight_decay=0.1), partial(torch.optim.Adam, weight_decay=0.1, fused=True)),
    "SGD": (
        partial(TieredSGD, momentum=0.9, dampening=0.1),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.1, fused=True),
    ),
    "plain SGD": (TieredSGD, partial(torch.optim.SGD, fused=True)),
    "Lion": (TieredLion, None),
    "LAMB": (TieredLAMB, None),
}


@pytest.mark.parametrize("name", [name for name, (_, like) in STATED.items() if like])
def test_state_is_exchanged_with_torch_both_ways(name: str, tmp_path: Path) -> None:
    make, like = STATED[name]
    assert like is not None
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    optimizer, reference = make(mine, policy=small_policy(tmp_path)), like(theirs)
    train(optimizer, mine, range(2))
    train(reference, theirs, range(2))
    from_mine, from_theirs = optimizer.state_dict(), reference.state_dict()
    optimizer.load_state_dict(from_theirs)
    reference.load_state_dict(from_mine)
    train(optimizer, mine, range(2, 4))
    train(reference, theirs, range(2, 4))
    assert_same_parameters(mine, theirs)
    optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATED)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, _ = STATED[name]
    straight = seeded(*SHAPES, dtype=dtype)
    before = make(straight, policy=small_policy(tmp_path))
    train(before, straight, range(3))
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in straight]
    torch.save(before.state_dict(), tmp_path / "saved.pt")
    train(before, straight, range(3, 6))
    after = make(resumed, policy=small_policy(tmp_path, ["gpu", "cpu", "nvme"], chunk=32 * KIB))
    after.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    train(after, resumed, range(3, 6))
    assert_same_parameters(resumed, straight)
    before.close()
    after.close()


@pytest.mark.parametrize("source", ["Adam", "SGD", "Lion"])
@pytest.mark.parametrize("target", ["Adam", "SGD", "Lion", "LAMB"])
def test_state_of_another_rule_is_refused_with_everything_unchanged(source: str, target: str, tmp_path: Path) -> None:
    """LAMB's and Adam's differ in nothing but how they are used, so those are taken for each other's."""
    if source == target or {source, target} == {"Adam", "LAMB"}:
        pytest.skip("the same fields and options")
    made = [STATED[name][0](seeded(*SHAPES), policy=small_policy(tmp_path)) for name in (source, target)]
    for optimizer in made:
        train(optimizer, optimizer.param_groups[0]["params"], range(2))
    before = made[1].state_dict()
    with pytest.raises(ValueError, match=r"the state of parameter 0 is not|this is another optimizer's"):
        made[1].load_state_dict(made[0].state_dict())
    after = made[1].state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, fields in before["state"].items():
        assert all(same_bits(after["state"][key][name], value) for name, value in fields.items())
    for optimizer in made:
        optimizer.close()


# -- what each rule is about ------------------------------------------------------------------------------------


def test_sgd_without_momentum_keeps_and_reserves_nothing(tmp_path: Path) -> None:
    parameters = seeded(*SHAPES)
    with TieredSGD(parameters, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(2))
        assert len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}
        assert parameters[0] not in optimizer.state and dict(optimizer.state[parameters[0]]) == {}
        assert not any(tier.chunks for tier in optimizer.store.stats().tiers.values())


def test_sgd_may_be_given_momentum_later_and_have_it_taken(tmp_path: Path) -> None:
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    with TieredSGD(mine, policy=small_policy(tmp_path)) as optimizer:
        reference = torch.optim.SGD(theirs, fused=True)
        for momentum in (0.0, 0.9, 0.5, 0.0, 0.9, 0.0):
            for either, parameters in ((optimizer, mine), (reference, theirs)):
                either.param_groups[0]["momentum"] = momentum
                train(either, parameters, range(2))
            assert_same_parameters(mine, theirs, momentum)


def test_a_momentum_buffer_that_torch_has_not_made_yet_is_made_at_the_next_step(tmp_path: Path) -> None:
    """torch's SGD saves None for it, where a parameter had no gradient or the checkpoint is old."""
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    with TieredSGD(mine, momentum=0.9, dampening=0.5, policy=small_policy(tmp_path)) as optimizer:
        reference = torch.optim.SGD(theirs, momentum=0.9, dampening=0.5, fused=True)
        train(optimizer, mine, range(1))
        train(reference, theirs, range(1))
        saved = reference.state_dict()
        for fields in saved["state"].values():
            fields["momentum_buffer"] = None
        optimizer.load_state_dict(saved)
        reference.load_state_dict(saved)
        train(optimizer, mine, range(1, 3))
        train(reference, theirs, range(1, 3))
        assert_same_parameters(mine, theirs)


def test_lamb_visits_the_chunks_of_one_that_is_cut_twice_and_all_others_once(tmp_path: Path) -> None:
    parameters = seeded((10,), (20_000,), (30,))  # 8 bytes an element: 16 KiB hold 2,048
    with TieredLAMB(parameters, policy=small_policy(tmp_path, ["cpu"])) as optimizer:
        train(optimizer, parameters, range(1))
        binding, _ = optimizer.bound()
        used: list[int] = []
        run = binding.run
        binding.run = lambda order, *rest, **more: (used.extend(order), run(order, *rest, **more))  # type: ignore[method-assign]
        train(optimizer, parameters, range(1, 2))
        count = len(binding.layout.chunks)
        assert used == [*range(count), *reversed(range(count - 1))]


def test_lamb_refuses_a_parameter_that_occurs_twice(tmp_path: Path) -> None:
    parameters = seeded((10,))
    with TieredLAMB([parameters[0], parameters[0]], policy=small_policy(tmp_path, ["cpu"])) as optimizer:
        before = parameters[0].detach().clone()
        with pytest.raises(RuntimeError, match=r"param\.0 occurs twice"):
            train(optimizer, parameters, range(1))
        assert same_bits(parameters[0], before) and len(optimizer.state) == 0


@pytest.mark.parametrize("nth", [1, 4, 8, 11, 13])
def test_a_lamb_step_that_breaks_off_on_either_visit_is_told_and_can_be_made_good(nth: int, tmp_path: Path) -> None:
    """Between the visits moments are of the new step and parameters of the old: that must not pass for either."""
    engines: list[FaultyEngine] = []

    def open_engine(*_: Any, **__: Any) -> FaultyEngine:
        engines.append(FaultyEngine(threads=1, request_size=16 * KIB))
        return engines[-1]

    class OnFaultyDisk(TieredLAMB):
        parts = Parts(open_engine=open_engine)

    mine, theirs = seeded((20_000,), (30,)), seeded((20_000,), (30,))
    optimizer = OnFaultyDisk(mine, policy=small_policy(tmp_path))
    undisturbed = TieredLAMB(theirs, policy={"tiers": {"cpu": {}}})
    train(optimizer, mine, range(2))
    train(undisturbed, theirs, range(3))
    saved, weights = optimizer.state_dict(), [p.detach().clone() for p in mine]
    optimizer.store.wait()
    engines[0].spoil(nth=nth, kind=Kind.READ)
    with pytest.raises(TransferError):
        train(optimizer, mine, range(2, 3))
    engines[0].heal()
    if optimizer.store.broken_off is not None:
        with pytest.raises(FailedStepError, match="load_state_dict"):
            optimizer.step()
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            for parameter, value in zip(mine, weights, strict=True):
                parameter.copy_(value)
    else:
        assert_same_parameters(mine, weights, "nothing has changed")
    train(optimizer, mine, range(2, 3))
    assert_same_parameters(mine, theirs)
    optimizer.close()
    undisturbed.close()


@pytest.mark.parametrize("make", [TieredSGD, TieredLion, TieredLAMB, TieredAdam])
def test_sparse_gradients_are_refused_by_every_rule(make: Any, tmp_path: Path) -> None:
    parameters = seeded((10, 3))
    parameters[0].grad = torch.randn(10, 3).to_sparse()
    with (
        make(parameters, policy=small_policy(tmp_path, ["cpu"])) as optimizer,
        pytest.raises(RuntimeError, match="not support sparse gradients"),
    ):
        optimizer.step()


@pytest.mark.parametrize("make", [TieredLion, TieredLAMB])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
    ],
)
def test_options_that_no_rule_can_work_with_are_refused(make: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(seeded((3,)), **options)


def test_real_parts_of_complex_parameters_are_updated_as_pairs(tmp_path: Path) -> None:
    """Lion's signs and LAMB's norms are of real numbers: of a complex parameter's pairs."""
    values = torch.randn(3_000, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    for make in (TieredLion, TieredLAMB, TieredSGD):
        one, pairs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(real(values).clone())
        one.grad = values.flip(0).clone()
        pairs.grad = real(one.grad).clone()
        with (
            make([one], lr=1e-2, policy=small_policy(tmp_path)) as optimizer,
            make([pairs], lr=1e-2, policy=small_policy(tmp_path)) as other,
        ):
            for _ in range(3):
                optimizer.step()
                other.step()
        assert same_bits(real(one.detach()), pairs.detach())
