"""Where state lies never changes a number: invariant 1, over everything that may be chosen.

Shapes, strides, dtypes, groups, gradients, capacities, chunk sizes, orders, engines, paths and thread counts are drawn
from seeds; parameters and the whole state are compared to the bit with `cases.Reference` after every step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.cases import (
    KIB,
    Case,
    Drawn,
    FourTiers,
    Reference,
    assert_same_parameters,
    assert_same_state,
    bits,
    draw_policy,
    fitted,
    is_gap_free,
    least_chunk_bytes,
    real,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    state_bytes,
    train,
)
from tierstore.layout import is_dense
from tierstore.optimizer import TieredAdamW

pytestmark = [
    pytest.mark.filterwarnings("ignore:the swap folder:UserWarning"),
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning"),
]

COMBINATIONS = 105
"""Each is trained under two policies: 210 combinations in the default run."""


def check_case(case: Case, policies: int, folder: Path) -> None:
    torch.set_num_threads(case.threads)
    choose = random.Random(case.seed)
    folders = [folder / "a", folder / "b"]
    for path in folders:
        path.mkdir(exist_ok=True)
    reference = Reference(case.make_groups())
    trained = []
    for _ in range(policies):
        groups = case.make_groups()
        policy = draw_policy(choose, folders, least_chunk_bytes(groups), state_bytes(groups))
        _give_tiers(groups, choose, list(policy["tiers"]))
        trained.append((groups, fitted(groups, policy), policy))
    for step in range(case.steps):
        case.begin_step(reference.groups, step)
        reference.step()
        for groups, optimizer, policy in trained:
            when = f"seed {case.seed}, step {step}, {policy}"
            case.begin_step(optimizer.param_groups, step)
            optimizer.step()
            optimizer.store.check()
            parameters = list(dict.fromkeys(p for group in groups for p in group["params"]))
            assert_same_parameters(parameters, reference.parameters, when)
            if step in (0, case.steps - 1):
                assert_same_state(optimizer, reference, when)
                optimizer.store.check()
    for _, optimizer, _ in trained:
        optimizer.close()


def _give_tiers(groups: list[dict[str, Any]], choose: random.Random, names: list[str]) -> None:
    for group in groups:
        if choose.random() < 0.15:
            group["tier"] = choose.choice(names)


@pytest.mark.parametrize("seed", range(COMBINATIONS))
def test_any_combination_has_the_bits_of_torch(seed: int, tmp_path: Path) -> None:
    check_case(Case.draw(seed), 2, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(COMBINATIONS, COMBINATIONS + 1500))
def test_any_of_many_more_combinations_has_the_bits_of_torch(seed: int, tmp_path: Path) -> None:
    check_case(Case.draw(seed), 3, tmp_path)


# -- torch's own optimizer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tiers", FourTiers.names)
def test_contiguous_float32_is_torch_fused_adamw_itself(tiers: str, threads: int, tmp_path: Path) -> None:
    """CASES 1: 513,000 elements, not a multiple of 1,024, in one layer."""
    torch.set_num_threads(threads)
    shapes = [(512, 1000), (1000,), (1,), (), (77, 33), (1023,)]
    mine, theirs = seeded(*shapes), seeded(*shapes)
    optimizer = TieredAdamW(mine, lr=1e-2, policy=small_policy(tmp_path, tiers.split(), chunk=128 * KIB))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
        optimizer.store.check()
        assert_same_parameters(mine, theirs, step)
    saved, wanted = optimizer.state_dict(), reference.state_dict()
    for number, fields in wanted["state"].items():
        assert all(same_bits(saved["state"][number][name], value) for name, value in fields.items())
    assert [set(group) for group in saved["param_groups"]] == [set(group) for group in wanted["param_groups"]]
    optimizer.close()


def test_duplicates_in_a_group_are_updated_once_per_occurrence_as_torch_does(tmp_path: Path) -> None:
    mine, theirs = seeded((3000,), (10,)), seeded((3000,), (10,))
    optimizer = TieredAdamW([mine[0], mine[1], mine[0]], lr=1e-2, policy=small_policy(tmp_path))
    reference = torch.optim.AdamW([theirs[0], theirs[1], theirs[0]], lr=1e-2, fused=True)
    for step in range(3):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        optimizer.step()
        reference.step()
        assert_same_parameters(mine, theirs, step)
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()
    assert optimizer.state[mine[0]]["step"] == reference.state[theirs[0]]["step"] == 6


def test_parameter_whose_state_is_larger_than_the_whole_cpu_tier_is_updated(tmp_path: Path) -> None:
    """CASES 2 and 3: one parameter of 90 chunks, its length no multiple of a chunk, through three extents."""
    (mine,), (theirs,) = seeded((176_513,)), seeded((176_513,))
    optimizer = TieredAdamW([mine], policy=small_policy(tmp_path, chunk=16 * KIB, extents=3))
    reference = torch.optim.AdamW([theirs], fused=True)
    train(optimizer, [mine], range(3))
    train(reference, [theirs], range(3))
    assert_same_parameters([mine], [theirs])
    assert optimizer.store.stats().tiers["nvme"].chunks > 80


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tail_of_a_large_parameter_is_updated_too(dtype: torch.dtype, tmp_path: Path) -> None:
    """CASES 2: the tail beyond the last whole request was lost."""
    (parameter,) = seeded((150_001,), dtype=dtype)
    reference = Reference([{**_options(), "params": [copy_of(parameter)]}])
    optimizer = TieredAdamW([parameter], lr=1e-2, policy=small_policy(tmp_path, chunk=64 * KIB))
    for step in range(3):
        set_gradients([parameter], step)
        set_gradients(reference.parameters, step)
        optimizer.step()
        reference.step()
    assert_same_parameters([parameter], reference.parameters)
    assert_same_state(optimizer, reference)


def test_hundreds_of_small_parameters_in_as_many_groups_share_chunks(tmp_path: Path) -> None:
    """CASES 4: sizes from 1 to 500, one group each; they must not take a file, or a megabyte, each."""
    sizes = [1 + (37 * number) % 500 for number in range(300)]

    def groups() -> list[dict[str, Any]]:
        parameters = seeded(*[(size,) for size in sizes])
        return [{**_options(lr=1e-3 * (1 + n % 5)), "params": [p]} for n, p in enumerate(parameters)]

    reference, mine = Reference(groups()), groups()
    optimizer = TieredAdamW(mine, policy=small_policy(tmp_path, chunk=32 * KIB))
    for step in range(3):
        set_gradients([p for group in mine for p in group["params"]], step)
        set_gradients(reference.parameters, step)
        optimizer.step()
        reference.step()
    assert_same_parameters([p for group in mine for p in group["params"]], reference.parameters)
    chunks = sum(tier.chunks for tier in optimizer.store.stats().tiers.values())
    assert chunks <= 1 + 2 * sum(sizes) * 8 // (32 * KIB)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.1])
def test_each_element_is_near_adamw_in_float64(weight_decay: float, tmp_path: Path) -> None:
    """CASES 5: the sizes that others got wrong, against the formula itself, element by element."""
    sizes = [(1,), (3,), (22,), (55,), (64,), (128,), (1023,), (1024,), (3, 4), (262_145,)]
    parameters = seeded(*sizes)
    parameters[8] = nn.Parameter(parameters[8].detach().t().contiguous().t())
    exact = [parameter.detach().double() for parameter in parameters]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in exact]
    policy = small_policy(tmp_path, chunk=64 * KIB)
    optimizer = TieredAdamW(parameters, lr=1e-2, weight_decay=weight_decay, policy=policy)
    for step in range(1, 4):
        set_gradients(parameters, step)
        optimizer.step()
        for value, (m, v), parameter in zip(exact, moments, parameters, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.double()
            value.mul_(1 - 1e-2 * weight_decay)
            m.mul_(0.9).add_(gradient, alpha=0.1)
            v.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            value.sub_(1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
            torch.testing.assert_close(parameter.detach().double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1_048_576, 1_048_577])
def test_a_million_elements_and_one_more_have_the_bits_of_torch(size: int, tmp_path: Path) -> None:
    """CASES 5, its two large sizes."""
    mine, theirs = seeded((size,)), seeded((size,))
    policy = small_policy(tmp_path, chunk=512 * KIB, extents=5)
    train(TieredAdamW(mine, policy=policy), mine, range(2))
    train(torch.optim.AdamW(theirs, fused=True), theirs, range(2))
    assert_same_parameters(mine, theirs)


# -- trajectories -----------------------------------------------------------------------------------------------


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 70), nn.Tanh(), nn.Linear(70, 10))


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 40, generator=generator)
    wanted = inputs[:, :10].sin() * inputs[:, 10:20]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_every_tier_set_learns_along_the_same_trajectory(tmp_path: Path) -> None:
    """CASES 21: a peer learned 25 times slower from one tier than from another."""
    model = make_model()
    wanted = losses_of(model, torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True), 150)
    assert wanted[-1] < wanted[0] / 5
    for name, policy in FourTiers(tmp_path):
        tiered = make_model()
        with TieredAdamW(tiered.parameters(), lr=3e-3, policy=policy) as optimizer:
            assert losses_of(tiered, optimizer, 150) == wanted, name
            assert_same_parameters(list(tiered.parameters()), list(model.parameters()), name)


def test_tiny_updates_of_a_bfloat16_parameter_accumulate(tmp_path: Path) -> None:
    """CASES 20: each update is far below a bfloat16's resolution; without the master it would never move."""
    parameter = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    optimizer = TieredAdamW([parameter], lr=1e-6, weight_decay=0.0, policy=small_policy(tmp_path))
    parameter.grad = torch.ones_like(parameter)
    for _ in range(100):
        optimizer.step()
    assert torch.equal(parameter, torch.ones_like(parameter))  # not yet a whole bfloat16 step
    for _ in range(3900):
        optimizer.step()
    master = optimizer.state[parameter]["master"]
    torch.testing.assert_close(master, torch.full_like(master, 1 - 4000e-6), rtol=0, atol=2e-4)
    assert torch.equal(parameter, master.to(torch.bfloat16))
    assert bool((parameter < 1).all())


# -- the parameter is the truth ---------------------------------------------------------------------------------


def _set_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter[: len(parameter) // 2].mul_(1.5)


def _set_data(parameter: nn.Parameter) -> None:
    parameter.data[3] = 7.0


def _replace_data(parameter: nn.Parameter) -> None:
    parameter.data = (parameter.data.float() * 0.5).to(parameter.dtype)


def _zero(parameter: nn.Parameter) -> None:
    parameter.data.zero_().neg_()  # -0.0 too is a value


@pytest.mark.parametrize("change", [_set_in_place, _set_data, _replace_data, _zero])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiers", FourTiers.names)
def test_weights_changed_between_steps_are_what_the_next_step_starts_from(
    tiers: str, dtype: torch.dtype, change: Any, tmp_path: Path
) -> None:
    """Invariant 10, by any means: a peer reverted weights that were loaded after construction.

    To the bit with whole masters; what is left in split ones is in test_split.
    """
    (parameter,) = seeded((30_000,), dtype=dtype)
    (copy,) = seeded((30_000,), dtype=dtype)
    policy = small_policy(tmp_path, tiers.split(), chunk=48 * KIB, state={"master": "float32"})
    optimizer = TieredAdamW([parameter], lr=1e-2, policy=policy)
    reference = Reference([{**_options(), "params": [copy]}])
    for step in range(4):
        if step:
            change(parameter)
            change(copy)
        set_gradients([parameter, copy], step)
        copy.grad = parameter.grad
        optimizer.step()
        reference.step()
        assert_same_parameters([parameter], [copy], step)
    assert_same_state(optimizer, reference)


def test_weights_loaded_into_a_bfloat16_model_are_adopted_and_equal_ones_keep_their_master(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    policy = small_policy(tmp_path, state={"master": "float32"})
    optimizer = TieredAdamW(model.parameters(), lr=1e-4, policy=policy)
    train(optimizer, list(model.parameters()), range(3))
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})  # not a bit changes
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert all(same_bits(optimizer.state[p]["master"], m) for p, m in zip(model.parameters(), masters, strict=True))
    other = make_model(seed=9).to(torch.bfloat16)
    with torch.no_grad():
        for loaded in other.parameters():
            loaded.add_(4)
    for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert not (parameter == loaded).any()  # for an element of equal value would keep its master
    model.load_state_dict(other.state_dict())
    optimizer.step()
    for parameter, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(parameter, loaded)
        assert same_bits(optimizer.state[parameter]["master"], loaded.float())


def test_with_check_parameters_off_the_master_alone_is_believed(tmp_path: Path) -> None:
    (parameter,) = seeded((2000,), dtype=torch.bfloat16)
    optimizer = TieredAdamW([parameter], lr=0.0, policy=small_policy(tmp_path, check_parameters=False))
    train(optimizer, [parameter], [0])
    before = parameter.detach().clone()
    parameter.data.zero_()
    train(optimizer, [parameter], [1])
    assert same_bits(parameter, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_lr_and_zero_gradients_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """torch's DCP makes state by such a step: -0.0, denormals and infinities must come through."""
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, float("inf"), -float("inf"), 1.0, 3e38])
    parameter = nn.Parameter(values.to(dtype))
    before = parameter.detach().clone()
    optimizer = TieredAdamW([parameter], lr=0.0, policy=small_policy(tmp_path))
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(bits(parameter), bits(before))


# -- step counts, gradients -------------------------------------------------------------------------------------


def _options(**given: Any) -> dict[str, Any]:
    usual = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False, "maximize": False}
    return {**usual, **given}


def copy_of(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


@pytest.mark.parametrize("order", ["alternating", "fixed"])
def test_chunks_of_one_parameter_share_their_bias_correction(order: str, tmp_path: Path) -> None:
    """CASES 16: equal elements stay equal across 30 chunks; a parameter stepped alone later has its own count."""
    long, other = nn.Parameter(torch.ones(60_000)), nn.Parameter(torch.ones(100))
    optimizer = TieredAdamW([other, long], lr=1e-2, policy=small_policy(tmp_path, order=order))
    for _ in range(3):
        long.grad = torch.ones_like(long)
        optimizer.step()
        assert torch.equal(long, long[0].expand_as(long))
    assert torch.equal(other, torch.ones_like(other)) and other not in optimizer.state
    other.grad = torch.ones_like(other)
    optimizer.step()
    assert optimizer.state[other]["step"] == 1 and optimizer.state[long]["step"] == 4
    (fresh,) = seeded((100,))
    fresh.data.fill_(1.0)
    fresh.grad = torch.ones_like(fresh)
    torch.optim.AdamW([fresh], lr=1e-2, fused=True).step()
    assert_same_parameters([other], [fresh])


@pytest.mark.parametrize("tiers", FourTiers.names)
def test_parameters_without_gradients_neither_step_nor_decay(tiers: str, tmp_path: Path) -> None:
    """CASES 17: every pattern of skipping, beside parameters that do not skip, in the same chunks."""
    shapes = [(700,)] * 8 + [(5000,)]
    mine, theirs = seeded(*shapes), seeded(*shapes)
    optimizer = TieredAdamW(mine, lr=1e-2, weight_decay=0.1, policy=small_policy(tmp_path, tiers.split()))
    reference = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(8):
        for parameters in (mine, theirs):
            set_gradients(parameters, step)
            for number, parameter in enumerate(parameters[:8]):
                if step < 3 and not number >> step & 1:
                    parameter.grad = None
                if step >= 5 and number % 3 == 0:
                    parameter.grad = None
        optimizer.step()
        reference.step()
        optimizer.store.check()
        assert_same_parameters(mine, theirs, step)
        for one, other in zip(mine, theirs, strict=True):
            assert (one in optimizer.state) == (other in reference.state)
            if one in optimizer.state:
                assert optimizer.state[one]["step"] == reference.state[other]["step"]


def test_accumulated_and_clipped_gradients_and_an_unused_head_have_the_bits_of_torch(tmp_path: Path) -> None:
    """CASES 18 and 19: four backward passes, two losses, a head used, unused and used again, clipping in between."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(30, 60), nn.Linear(60, 5), nn.Linear(60, 5)

        def forward(self, inputs: Tensor, both: bool) -> list[Tensor]:
            hidden = self.body(inputs).relu()
            return [self.one(hidden), self.two(hidden)] if both else [self.one(hidden)]

    def run(make: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = TwoHeads()
        optimizer = make(model.parameters())
        for step in range(6):
            optimizer.zero_grad()
            for part in range(4):
                generator = torch.Generator().manual_seed(10 * step + part)
                outputs = model(torch.randn(8, 30, generator=generator), step % 2 == 0)
                for output in outputs[:-1]:
                    output.square().mean().backward(retain_graph=True)
                outputs[-1].abs().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            assert norm > 0.05
            optimizer.step()
        return list(model.parameters())

    wanted = run(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
    unclipped = run(lambda parameters: _without_clipping(torch.optim.AdamW(parameters, lr=1e-2, fused=True)))
    found = run(lambda parameters: TieredAdamW(parameters, lr=1e-2, policy=small_policy(tmp_path)))
    assert_same_parameters(found, wanted)
    assert not torch.equal(wanted[0], unclipped[0])  # clipping had an effect


def _without_clipping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def undo(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(100)

    optimizer.register_step_pre_hook(undo)
    return optimizer


def test_gradients_are_left_as_they_were(tmp_path: Path) -> None:
    parameters = seeded((3000,), (40, 50))
    optimizer = TieredAdamW(parameters, maximize=True, policy=small_policy(tmp_path))
    set_gradients(parameters, 0)
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    optimizer.step()
    assert_same_parameters([parameter.grad for parameter in parameters], before)


def test_sparse_gradients_are_refused_in_torchs_words(tmp_path: Path) -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = TieredAdamW(embedding.parameters(), policy=small_policy(tmp_path))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    assert not optimizer.state


def test_density_is_what_looking_at_every_address_says() -> None:
    """The package decides by strides what the reference decides by addresses."""
    for seed in range(300):
        choose = random.Random(seed)
        shape = tuple(choose.choice([1, 1, 2, 3, 4]) for _ in range(choose.choice([0, 1, 2, 3, 4])))
        strides = tuple(choose.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in shape)
        tensor = torch.zeros(200).as_strided(shape, strides)
        assert is_dense(real(tensor)) == is_gap_free(tensor), (shape, strides)


def test_a_parameter_drawn_twice_is_the_same(tmp_path: Path) -> None:
    """The makers must give equal runs, or every comparison above is void."""
    case = Case.draw(5)
    one, other = case.make_groups(), case.make_groups()
    for first, second in zip(one, other, strict=True):
        assert_same_parameters(first["params"], second["params"])
    assert all(isinstance(drawn, Drawn) for drawn in case.drawn())
