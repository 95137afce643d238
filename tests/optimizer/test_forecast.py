"""A plan says to the byte what a binding reserves and what its steady steps move, for every kind of policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import tierstore
from tests.optimizer.cases import KIB, MIB
from tierstore import TieredAdamW, TieredLion, TieredSGD
from tierstore.forecast import forecast as forecasting
from tierstore.forecast.answer import Forecast
from tierstore.forecast.steady import Chunks, Moved, steady_step
from tierstore.tiered import TieredOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5
"""After which retention has settled; two more are measured, one there and one back."""


def model(dtype: torch.dtype, *, blocks: int = 12) -> nn.Module:
    """Layers of several shapes: chunks end within parameters, and hold several."""
    torch.manual_seed(3)
    parts: list[nn.Module] = [nn.Embedding(300, 64)]
    for _ in range(blocks):
        parts += [nn.Linear(64, 192), nn.LayerNorm(64)]
    return nn.Sequential(*parts).to(dtype)


def files(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"paths": [str(folder)], **settings}


def two_folders(folder: Path) -> list[str]:
    found = [folder / "one", folder / "two"]
    for one in found:
        one.mkdir(exist_ok=True)
    return [str(one) for one in found]


BF16, FP32 = torch.bfloat16, torch.float32
STAND_IN = {"device": "cpu"}
SMALL = 16 * KIB
CASES: dict[str, tuple[torch.dtype, Callable[[Path], dict[str, Any]]]] = {
    "all in memory": (FP32, lambda at: {"tiers": {"cpu": {}}}),
    "bf16 in memory": (BF16, lambda at: {"tiers": {"cpu": {"capacity": "64MiB"}}}),
    "nothing stays": (
        FP32,
        lambda at: {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": 3 * SMALL}, "nvme": files(at)}},
    ),
    "a third stays": (
        FP32,
        lambda at: {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": "450KiB"}, "nvme": files(at)}},
    ),
    "fixed order": (
        FP32,
        lambda at: {"order": "fixed", "chunk_size": SMALL, "tiers": {"cpu": {"capacity": "450KiB"}, "nvme": files(at)}},
    ),
    "files too small for all": (
        FP32,
        lambda at: {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": "1MiB"}, "nvme": files(at, capacity="900KiB")}},
    ),
    "bf16, split by itself": (
        BF16,
        lambda at: {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": "300KiB"}, "nvme": files(at)}},
    ),
    "bf16, whole masters": (
        BF16,
        lambda at: {
            "chunk_size": SMALL,
            "state": {"master": "float32"},
            "tiers": {"cpu": {"capacity": "300KiB"}, "nvme": files(at)},
        },
    ),
    "bf16, small moments": (
        BF16,
        lambda at: {
            "state": {"master": "none", "moments": "parameter"},
            "tiers": {"cpu": {"capacity": "200KiB"}, "nvme": files(at)},
        },
    ),
    "staging only": (FP32, lambda at: {"chunk_size": SMALL, "tiers": {"nvme": files(at)}}),
    "two paths": (
        FP32,
        lambda at: {
            "chunk_size": SMALL,
            "tiers": {"cpu": {"capacity": "300KiB"}, "nvme": {"paths": two_folders(at)}},
        },
    ),
    "three tiers": (
        FP32,
        lambda at: {
            "chunk_size": SMALL,
            "tiers": {"gpu": {**STAND_IN, "capacity": "200KiB"}, "cpu": {"capacity": "300KiB"}, "nvme": files(at)},
        },
    ),
    "three tiers, fixed": (
        FP32,
        lambda at: {
            "order": "fixed",
            "chunk_size": SMALL,
            "tiers": {"gpu": {**STAND_IN, "capacity": "200KiB"}, "cpu": {"capacity": "300KiB"}, "nvme": files(at)},
        },
    ),
    "gpu and cpu": (FP32, lambda at: {"chunk_size": SMALL, "tiers": {"gpu": STAND_IN, "cpu": {"capacity": "4MiB"}}}),
    "named places": (
        FP32,
        lambda at: {
            "chunk_size": SMALL,
            "placement": [{"params": "0.*", "tier": "cpu"}, {"params": "*.bias", "tier": "nvme"}],
            "tiers": {"cpu": {"capacity": "600KiB"}, "nvme": files(at)},
        },
    ),
    "chunks by themselves": (FP32, lambda at: {"tiers": {"cpu": {"capacity": "700KiB"}, "nvme": files(at)}}),
}


def on_meta(trained: nn.Module) -> nn.Module:
    return trained.to("meta")


def moved_in_two_steps(optimizer: TieredOptimizer, trained: nn.Module) -> Counter[str]:
    """Bytes by route in two steady steps, with everything they leave behind."""
    for parameter in trained.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    for _ in range(STEPS):
        optimizer.step()
    optimizer.store.wait()
    before = {name: route.bytes for name, route in optimizer.store.stats().routes.items()}
    for _ in range(2):
        optimizer.step()
    optimizer.store.wait()
    moved = {name: route.bytes - before.get(name, 0) for name, route in optimizer.store.stats().routes.items()}
    return Counter({name: nbytes for name, nbytes in moved.items() if nbytes})


def agree(answer: Forecast, optimizer: TieredOptimizer) -> None:
    """The binding has the tiers, the chunks and the homes of the plan."""
    binding, _ = optimizer.bound()
    reserved = {name: tier.arena.capacity * tier.arena.extent_bytes for name, tier in binding.store.setup.tiers.items()}
    assert {name: tier.bytes for name, tier in answer.tiers.items() if tier.bytes} == reserved
    chunks = binding.layout.chunks
    assert (answer.chunks, answer.record_bytes) == (len(chunks), sum(chunk.record_bytes for chunk in chunks))
    assert (
        answer.chunk_bytes == len(binding._record) == next(iter(binding.store.setup.tiers.values())).arena.extent_bytes
    )
    homes = Counter(binding.store.home_of(chunk.number) for chunk in chunks)
    assert {name: tier.homes for name, tier in answer.tiers.items() if tier.homes} == homes


LONG = ("bf16, whole masters", "bf16, small moments", "gpu and cpu", "two paths")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES])
def test_a_plan_on_meta_agrees_to_the_byte_with_the_binding_and_its_steady_steps(case: str, tmp_path: Path) -> None:
    dtype, policy_at = CASES[case]
    policy = policy_at(tmp_path)
    answer = tierstore.plan(on_meta(model(dtype)), policy)
    trained = model(dtype)
    with TieredAdamW(trained.named_parameters(), policy=policy) as optimizer:
        agree(answer, optimizer)
        twice = {route: 2 * nbytes for route, nbytes in answer.moved.items()}
        assert moved_in_two_steps(optimizer, trained) == Counter(twice)
        resting = Counter(optimizer.store.tier_of(chunk.number) for chunk in optimizer.bound()[0].layout.chunks)
        assert {name: tier.resting for name, tier in answer.tiers.items() if tier.resting} == resting
        assert scratch_of(optimizer) <= answer.host.scratch
        saved = optimizer.state_dict()["state"].values()
        assert answer.host.state_dict == sum(v.nbytes for one in saved for k, v in one.items() if k != "step")


def scratch_of(optimizer: TieredOptimizer) -> int:
    return int(optimizer._held.scratch.nbytes)


@pytest.mark.parametrize(
    ("kind", "options"), [(TieredAdamW, {"amsgrad": True}), (TieredSGD, {"momentum": 0.9}), (TieredLion, {})]
)
def test_other_optimizers_are_planned_with_the_fields_of_their_rules(
    kind: type[TieredOptimizer], options: Mapping[str, Any], tmp_path: Path
) -> None:
    policy = {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": "200KiB"}, "nvme": files(tmp_path)}}
    answer = tierstore.plan(model(FP32), policy, optimizer=kind, **options)
    trained = model(FP32)
    with kind(trained.named_parameters(), policy=policy, **options) as optimizer:
        agree(answer, optimizer)
        assert answer.state_bytes == sum(spec.cls.bytes_of(spec.elements) for spec in specs_of(optimizer))


def specs_of(optimizer: TieredOptimizer) -> Any:
    from tierstore.blueprint import draw

    held = optimizer._held
    return draw(optimizer.bound()[0].members, optimizer.param_groups, held.policy, held.parts).specs


def test_groups_frozen_tied_and_complex_parameters_are_planned_as_they_are_bound(tmp_path: Path) -> None:
    def groups() -> list[dict[str, Any]]:
        tied, frozen = Parameter(torch.zeros(40, 300)), Parameter(torch.zeros(5000), requires_grad=False)
        complex_ = Parameter(torch.zeros(700, dtype=torch.complex64))
        return [
            {"params": [tied, frozen, Parameter(torch.zeros(0))], "tier": "cpu"},
            {"params": [complex_, Parameter(torch.zeros(30_000)), Parameter(torch.zeros(9000, dtype=torch.float64))]},
        ]

    policy = {"chunk_size": SMALL, "tiers": {"cpu": {"capacity": "200KiB"}, "nvme": files(tmp_path)}}
    answer = tierstore.plan(groups(), policy)
    with TieredAdamW(groups(), policy=policy) as optimizer:
        agree(answer, optimizer)
    assert answer.gradient_bytes == answer.parameter_bytes - 20_000


def test_updates_beside_backward_are_planned_in_the_order_in_which_gradients_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk, the only one that is smaller, comes first."""
    planned: list[Sequence[int]] = []

    def watched(chunks: Chunks, *arguments: Any, **options: Any) -> Moved:
        planned.append(chunks.record_bytes)
        return steady_step(chunks, *arguments, **options)

    monkeypatch.setattr(forecasting, "steady_step", watched)
    policy = {
        "update": "backward",
        "chunk_size": SMALL,
        "tiers": {"cpu": {"capacity": "250KiB"}, "nvme": files(tmp_path)},
    }
    trained = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    answer = tierstore.plan(trained, policy)
    assert all(
        not parameter._post_accumulate_grad_hooks for parameter in trained.parameters()
    )  # looked at, not watched
    with TieredAdamW(trained.named_parameters(), policy=policy) as optimizer:
        agree(answer, optimizer)
        batch = torch.ones(2, 64)

        def iterate(count: int) -> Counter[str]:
            for _ in range(count):
                optimizer.zero_grad()
                trained(batch).sum().backward()
                optimizer.step()
            optimizer.store.wait()
            return Counter({name: route.bytes for name, route in optimizer.store.stats().routes.items()})

        before = iterate(STEPS)
        moved = iterate(2) - before
        assert optimizer._backward is not None
        binding = optimizer.bound()[0]
        order = [binding.layout.chunks[number].record_bytes for number in optimizer._backward.order_of(binding)]
    assert planned == [order] and order != order[::-1]
    assert moved == Counter({route: 2 * nbytes for route, nbytes in answer.moved.items()})


def test_ranks_of_the_plan_divide_what_the_launcher_s_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = {"tiers": {"cpu": {"capacity": "0.1%"}, "nvme": files(tmp_path)}}
    alone, of_four = tierstore.plan(model(FP32), policy), tierstore.plan(model(FP32), policy, ranks=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    launched = tierstore.plan(model(FP32), policy)
    assert alone.tiers["cpu"].bytes > of_four.tiers["cpu"].bytes == launched.tiers["cpu"].bytes
    with TieredAdamW(model(FP32).parameters(), policy=policy) as optimizer:
        agree(launched, optimizer)


def test_a_plan_for_sizes_beyond_this_machine_reserves_nothing_and_warns(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    answer = tierstore.plan(
        "70B", {"tiers": {"cpu": {"capacity": "900GiB"}, "nvme": {"capacity": "90TB", "paths": [str(tmp_path)]}}}
    )
    assert answer.fits and set(tmp_path.iterdir()) == before
    of_memory, of_disk, of_rates = answer.warnings
    assert "900.0 GiB" in of_memory and str(tmp_path) in of_disk and "never measured" in of_rates


def test_what_rates_choose_at_binding_a_plan_chooses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore import build
    from tierstore.build import Parts
    from tierstore.forecast import machine
    from tierstore.rates import MachineRates, PathRates, Rates, SizeRates

    path = PathRates(1e-4, 2e8, 2e8, (SizeRates(512 * KIB, 1e-3, 2e8), SizeRates(2 * MIB, 1e-3, 2e8)))
    rates = Rates({"a disk": path}, MachineRates(1e10, 2, 5e8, 2e8), "2026-01-01")
    monkeypatch.setattr(build, "TUNED_ABOVE_BYTES", 64 * KIB)
    monkeypatch.setattr(machine, "find_rates", lambda *_, **__: rates)
    policy = {
        "tiers": {"cpu": {"capacity": "60MiB"}, "nvme": files(tmp_path)},
        "placement": [{"params": "*", "tier": "nvme"}],
    }
    wide = Parameter(torch.zeros(16 * MIB // 8))
    tuned = tierstore.plan([("wide", Parameter(wide.to("meta")))], policy)

    class Tuned(TieredAdamW):
        parts = replace(Parts(), find_rates=lambda *_, **__: rates)

    with Tuned([("wide", wide)], policy=policy) as optimizer:
        agree(tuned, optimizer)
        assert optimizer.bound()[0].plant.tuning is not None
