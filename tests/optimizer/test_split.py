"""`state.master: split` and `state.moments: parameter`: fewer bytes in the record, and nothing that shows elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.cases import same_bits
from tierstore import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD

SHAPES = [(300, 1000), (77, 33), (), (1025,), (5, 3)]
SPLIT = ("exp_avg", "exp_avg_sq", "remainder", "tie")
WHOLE = ("master", "exp_avg", "exp_avg_sq")
Make = Callable[..., Any]


def parameters(dtype: torch.dtype = torch.bfloat16, seed: int = 0, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer: Any, steps: range) -> None:
    """Step with gradients that depend on nothing but the number of the step."""
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in found:
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def in_memory(**state: str) -> dict[str, Any]:
    return {"tiers": {"cpu": {}}, "state": state}


def in_files(folder: Path, extents: int = 3, **state: str) -> dict[str, Any]:
    tiers = {"cpu": {"capacity": extents * (256 << 10)}, "nvme": {"paths": [str(folder)]}}
    return {"chunk_size": "256KiB", "tiers": tiers, "state": state}


def in_three_tiers(folder: Path, **state: str) -> dict[str, Any]:
    policy = in_files(folder, **state)
    policy["tiers"]["gpu"] = {"device": "cpu", "capacity": "768KiB"}
    return policy


def fields(optimizer: Any) -> set[tuple[str, ...]]:
    """The names of the fields in the records."""
    return {tuple(field.name for field in chunk.cls.fields) for chunk in optimizer.bound()[0].layout.chunks}


def assert_same(one: Any, other: Any) -> None:
    """Compare parameters and the whole state of two optimizers, to the bit."""
    pairs = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in (one, other)]
    assert all(same_bits(here, there) for here, there in zip(*pairs, strict=True))
    found, wanted = one.state_dict()["state"], other.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for number, state in wanted.items():
        assert list(found[number]) == list(state)
        assert all(same_bits(found[number][name], value) for name, value in state.items())


@pytest.mark.parametrize("make_policy", [lambda _: in_memory(master="split"), in_files, in_three_tiers])
def test_split_masters_have_the_bits_of_float32_ones(tmp_path: Path, make_policy: Make) -> None:
    whole = TieredAdamW(parameters(), lr=3e-3, policy=in_memory(master="float32"))
    with TieredAdamW(parameters(), lr=3e-3, policy=make_policy(tmp_path)) as split:
        train(whole, range(12))
        train(split, range(12))
        assert fields(split) == {SPLIT}
        assert_same(split, whole)
        masters = torch.cat([state["master"].reshape(-1) for state in whole.state.values()])
        is_tie = masters.view(torch.int32) & 0x1FFFF == 0x8000
        assert is_tie.any()  # else no tie bit was put to the test


@pytest.mark.long
@pytest.mark.parametrize("make", [TieredAdamW, TieredLAMB, TieredLion])
def test_split_masters_have_the_bits_of_float32_ones_over_a_long_run(tmp_path: Path, make: Make) -> None:
    whole = make(parameters(), lr=3e-3, policy=in_memory(master="float32"))
    with make(parameters(), lr=3e-3, policy=in_files(tmp_path, 4)) as split:
        train(whole, range(2000))
        train(split, range(2000))
        assert_same(split, whole)


@pytest.mark.parametrize(
    ("named", "extents", "wanted"),
    [
        (None, 64, {WHOLE}),  # all of it fits in memory
        (None, 3, {SPLIT}),
        ("cpu", 20, {WHOLE, SPLIT}),  # what has its home in memory stays there
    ],
)
def test_auto_splits_what_moves_from_step_to_step(
    tmp_path: Path, named: str | None, extents: int, wanted: set[tuple[str, ...]]
) -> None:
    first, second = parameters(shapes=[(300, 1000)]), parameters(shapes=[(300, 1000)])
    groups = [{"params": first, **({"tier": named} if named else {})}, {"params": second}]
    with TieredAdamW(groups, policy=in_files(tmp_path, extents)) as optimizer:
        assert fields(optimizer) == wanted
        train(optimizer, range(3))
        assert fields(optimizer) == wanted
    with TieredAdamW(parameters(torch.float16), policy=in_files(tmp_path)) as halves:
        assert fields(halves) == {WHOLE}


def test_a_state_dict_is_the_same_and_loads_whatever_masters_are_made_of(tmp_path: Path) -> None:
    with TieredAdamW(parameters(), policy=in_files(tmp_path)) as split:
        train(split, range(5))
        saved, weights = split.state_dict(), [p.detach().clone() for p in split.param_groups[0]["params"]]
        train(split, range(5, 8))
        for policy in (in_memory(master="float32"), in_memory(master="split")):
            resumed = TieredAdamW(parameters(seed=1), policy=policy)
            resumed.load_state_dict(saved)  # before the weights, which the masters are not those of
            for parameter, weight in zip(resumed.param_groups[0]["params"], weights, strict=True):
                parameter.data.copy_(weight)
            assert_same_states(resumed.state_dict(), saved)
            train(resumed, range(5, 8))
            assert_same(resumed, split)


def assert_same_states(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for number, state in wanted["state"].items():
        assert all(same_bits(found["state"][number][name], value) for name, value in state.items())


def test_a_master_that_is_handed_out_is_written_through(tmp_path: Path) -> None:
    with TieredAdamW(parameters(), policy=in_files(tmp_path)) as optimizer:
        train(optimizer, range(2))
        parameter = optimizer.param_groups[0]["params"][1]
        master = optimizer.state[parameter]["master"]
        assert optimizer.state[parameter]["master"] is master
        assert same_bits(master.bfloat16(), parameter)
        nearest = parameter.detach().float()
        finer = torch.nextafter(nearest, torch.tensor(torch.inf))
        master.data.copy_(finer)
        assert same_bits(optimizer.state_dict()["state"][1]["master"], finer)
        optimizer.state[parameter]["master"] = nearest
        assert same_bits(optimizer.state[parameter]["master"], nearest)


def test_overwritten_weights_are_what_the_next_step_starts_from_to_half_a_unit(tmp_path: Path) -> None:
    """Zeros and infinities among them, whose old remainders would make NaN of them."""
    with TieredAdamW(parameters(), lr=0.0, weight_decay=0.0, policy=in_files(tmp_path)) as optimizer:
        optimizer.param_groups[0]["lr"] = 1e-2
        train(optimizer, range(4))
        optimizer.param_groups[0]["lr"] = 0.0
        parameter = optimizer.param_groups[0]["params"][0]
        assert (optimizer.state[parameter]["master"] < parameter.float()).any()  # negative remainders
        values = torch.full((300, 1000), 3.0, dtype=torch.bfloat16)
        values[:100], values[100:200, ::2] = 0.0, torch.inf
        values[200] = torch.nan
        parameter.data.copy_(values)
        train(optimizer, range(1))
        is_number = values.isfinite()
        assert torch.equal(parameter.isnan(), values.isnan())
        assert torch.equal(parameter[is_number], values[is_number])
        assert torch.all(parameter[values.isinf()] >= torch.finfo(torch.bfloat16).max)


def test_a_new_binding_may_make_masters_of_another_kind(tmp_path: Path) -> None:
    """Room for the first parameters, and not for those that join them; and back, when they are gone."""
    whole = TieredAdamW(parameters(), policy=in_memory(master="float32"))
    with TieredAdamW(parameters(), policy=in_files(tmp_path, 24)) as optimizer:
        for one in (whole, optimizer):
            train(one, range(2))
        assert fields(optimizer) == {WHOLE}
        for one in (whole, optimizer):
            one.add_param_group({"params": parameters(seed=1, shapes=[(500, 1000)])})
            train(one, range(2, 4))
        assert fields(optimizer) == {SPLIT}
        assert_same(optimizer, whole)
        for one in (whole, optimizer):
            gone = one.param_groups.pop()["params"][0]
            with pytest.warns(UserWarning, match="have left"):
                train(one, range(4, 6))
            del one.state[gone]
        assert fields(optimizer) == {WHOLE}
        assert_same(optimizer, whole)


def test_a_parameter_that_gives_up_its_values_takes_no_more_than_its_master_with_it(tmp_path: Path) -> None:
    first, second = parameters(shapes=[(300, 1000)]), parameters(seed=1, shapes=[(300, 1000)])
    with TieredAdamW([{"params": first}, {"params": second}], policy=in_files(tmp_path)) as optimizer:
        train(optimizer, range(2))
        exp_avg = optimizer.state[second[0]]["exp_avg"].clone()
        del optimizer.param_groups[1]
        weights, second[0].data = second[0].data, torch.empty(0, dtype=torch.bfloat16)
        with pytest.warns(UserWarning, match="have left"):
            train(optimizer, range(2, 3))
        assert list(optimizer.state[second[0]]) == ["step", "exp_avg", "exp_avg_sq"]
        second[0].data = weights
        optimizer.add_param_group({"params": second})
        assert same_bits(optimizer.state[second[0]]["exp_avg"], exp_avg)
        assert same_bits(optimizer.state[second[0]]["master"], weights.float())


# -- moments in the parameter's dtype ---------------------------------------------------------------------------

OTHERS: list[tuple[Make, dict[str, Any]]] = [
    (TieredAdam, {}),
    (TieredAdamW, {"amsgrad": True}),
    (TieredSGD, {"lr": 0.01, "momentum": 0.9}),
    (TieredSGD, {"lr": 0.01}),
    (TieredLion, {"lr": 1e-3}),
    (TieredLAMB, {"lr": 1e-3}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_masters_moments_of_the_parameters_dtype_are_torchs(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = torch.optim.AdamW(parameters(dtype), lr=1e-2, fused=True)
    policy = in_three_tiers(tmp_path, master="none", moments="parameter")
    with TieredAdamW(parameters(dtype), lr=1e-2, policy=policy) as ours:
        train(theirs, range(6))
        train(ours, range(3))
        ours.load_state_dict(ours.state_dict())
        train(ours, range(3, 6))
        assert_same(ours, theirs)
        ours.load_state_dict(theirs.state_dict())
        train(theirs, range(6, 8))
        train(ours, range(6, 8))
        assert_same(ours, theirs)


@pytest.mark.parametrize(("make", "options"), [(TieredAdamW, {"lr": 1e-2}), *OTHERS[:-1]])
@pytest.mark.parametrize("master", ["split", "float32"])
def test_moments_of_the_parameters_dtype_are_rounded_after_each_step(
    tmp_path: Path, make: Make, options: dict[str, Any], master: str
) -> None:
    """The same as a state whose moments are float32 and are rounded, by hand, between steps.

    Not with LAMB, which reads its moments again, rounded, when it has the norms.
    """
    exact = make(parameters(), **options, policy=in_memory(master="float32"))
    with make(parameters(), **options, policy=in_files(tmp_path, master=master, moments="parameter")) as optimizer:
        for step in range(3):
            train(exact, range(step, step + 1))
            train(optimizer, range(step, step + 1))
            for state in exact.state.values():
                for name in set(state) - {"step", "master"}:
                    state[name] = state[name].bfloat16()
        for one, other in zip(optimizer.param_groups[0]["params"], exact.param_groups[0]["params"], strict=True):
            assert same_bits(one, other)
            for name, value in optimizer.state[one].items():
                assert value.dtype == (torch.bfloat16 if name not in ("step", "master") else torch.float32)
                assert torch.equal(value.float(), exact.state[other][name].float())


@pytest.mark.parametrize(("make", "options"), OTHERS)
@pytest.mark.parametrize("settings", [{"master": "none", "moments": "parameter"}, {}])
def test_every_rule_has_the_same_bits_in_memory_and_in_files_whatever_its_state_is_made_of(
    tmp_path: Path, make: Make, options: dict[str, Any], settings: dict[str, str]
) -> None:
    roomy = make(parameters(), **options, policy=in_memory(**settings))
    with make(parameters(), **options, policy=in_files(tmp_path, **settings)) as tiny:
        for one in (roomy, tiny):
            train(one, range(3))
        assert_same(tiny, roomy)


def test_a_state_of_torchs_bfloat16_adamw_loads_with_its_moments_as_they_are(tmp_path: Path) -> None:
    theirs = torch.optim.AdamW(parameters(), fused=True)
    train(theirs, range(3))
    ours = [nn.Parameter(p.detach().clone()) for p in theirs.param_groups[0]["params"]]
    with TieredAdamW(ours, policy=in_files(tmp_path, moments="parameter")) as optimizer:
        optimizer.load_state_dict(theirs.state_dict())
        for one, other in zip(ours, theirs.param_groups[0]["params"], strict=True):
            assert same_bits(optimizer.state[one]["exp_avg"], theirs.state[other]["exp_avg"])
            assert same_bits(optimizer.state[one]["master"], one.float())
        train(optimizer, range(3, 4))


def test_records_hold_what_is_read_and_written_per_parameter_and_no_more(tmp_path: Path) -> None:
    def bytes_per_element(**state: str) -> float:
        with TieredAdamW(parameters(shapes=[(512, 1024)]), policy=in_files(tmp_path, **state)) as optimizer:
            return sum(chunk.record_bytes for chunk in optimizer.bound()[0].layout.chunks) / (512 * 1024)

    assert bytes_per_element() == pytest.approx(20.25 / 2, rel=0.02)
    assert bytes_per_element(moments="parameter") == pytest.approx(12.25 / 2, rel=0.02)
