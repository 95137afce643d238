"""The optimizer on an accelerator: chunks streamed through device memory, or gradients down and parameters up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tierstore import TieredAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SHAPES = [(300, 500), (1000,), (1,), (), (77, 33), (513, 1000), (0,)]
STEPS = 6


def make(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def train(parameters: list[Tensor], make_optimizer: Callable[[list[Tensor]], Any], steps: int = STEPS) -> Any:
    """Train with the same gradients every time; one parameter misses one step."""
    optimizer = make_optimizer(parameters)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.grad = None if (number, step) == (1, 2) else gradient
        optimizer.step()
    return optimizer


def policy(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    tiers = {"gpu": {"capacity": "1MiB"}, "cpu": {"capacity": "1MiB"}, "nvme": {"paths": [str(tmp_path)]}}
    return {"chunk_size": "256KiB", "tiers": tiers, **settings}


def test_chunks_streamed_through_the_device_give_the_bits_of_torchs_fused_kernel(tmp_path: Path) -> None:
    ours, theirs = make(torch.float32, "cuda"), make(torch.float32, "cuda")
    with train(ours, lambda p: TieredAdamW(p, lr=1e-2, policy=policy(tmp_path))) as optimizer:
        train(theirs, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
        optimizer.store.check()
        routes = optimizer.store.stats().routes
        assert {"nvme->cpu", "cpu->gpu", "gpu->cpu", "cpu->nvme"} <= set(routes)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_compute_on_the_cpu_gives_the_bits_of_the_cpu_kernel(tmp_path: Path) -> None:
    ours, theirs = make(torch.float32, "cuda"), make(torch.float32, "cpu")
    with train(ours, lambda p: TieredAdamW(p, lr=1e-2, policy=policy(tmp_path, compute="cpu"))):
        train(theirs, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["device", "cpu"])
def test_placement_does_not_change_low_precision_parameters(tmp_path: Path, dtype: torch.dtype, compute: str) -> None:
    tiny, roomy = make(dtype, "cuda"), make(dtype, "cuda")
    everything = {"tiers": {"gpu": {"capacity": "64MiB"}, "cpu": {"capacity": "64MiB"}}, "compute": compute}
    with train(tiny, lambda p: TieredAdamW(p, lr=1e-2, policy=policy(tmp_path, compute=compute))):
        pass
    with train(roomy, lambda p: TieredAdamW(p, lr=1e-2, policy=everything)):
        pass
    assert all(torch.equal(one, other) for one, other in zip(tiny, roomy, strict=True))


@pytest.mark.parametrize("master", ["split", "float32"])
@pytest.mark.parametrize("compute", ["device", "cpu"])
def test_a_master_of_either_kind_on_an_accelerator_gives_the_bits_of_one_in_memory(
    tmp_path: Path, master: str, compute: str
) -> None:
    streamed, roomy = make(torch.bfloat16, "cuda"), make(torch.bfloat16, "cuda")
    tiny = policy(tmp_path, compute=compute, state={"master": master})
    everything = {"tiers": {"gpu": {"capacity": "64MiB"}, "cpu": {"capacity": "64MiB"}}, "compute": compute}
    with train(streamed, lambda p: TieredAdamW(p, lr=1e-2, policy=tiny)) as optimizer:
        saved = optimizer.state_dict()["state"]
    with train(roomy, lambda p: TieredAdamW(p, lr=1e-2, policy=everything | {"state": {"master": "float32"}})) as other:
        wanted = other.state_dict()["state"]
    assert all(torch.equal(one, two) for one, two in zip(streamed, roomy, strict=True))
    assert all(torch.equal(saved[number]["master"], wanted[number]["master"]) for number in wanted)


def test_moments_in_the_parameters_dtype_give_the_bits_of_torchs_fused_kernel_on_bfloat16(tmp_path: Path) -> None:
    ours, theirs = make(torch.bfloat16, "cuda"), make(torch.bfloat16, "cuda")
    settings = policy(tmp_path, state={"master": "none", "moments": "parameter"})
    with train(ours, lambda p: TieredAdamW(p, lr=1e-2, policy=settings)):
        train(theirs, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("compute", ["device", "cpu"])
def test_updates_beside_backward_have_the_bits_of_updates_after_it(tmp_path: Path, compute: str, free: bool) -> None:
    def trained(update: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(6)]).cuda()
        settings = policy(tmp_path, compute=compute, update=update, free_gradients=free)
        with TieredAdamW(model.parameters(), lr=1e-2, policy=settings) as optimizer:
            for step in range(STEPS):
                inputs = torch.randn(64, 300, generator=torch.Generator().manual_seed(step)).cuda()
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    beside, after = trained("backward"), trained("step")
    assert all(torch.equal(one, other) for one, other in zip(beside, after, strict=True))


def test_an_accelerator_updates_a_chunk_in_one_call_however_many_parameters_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kernel = torch._fused_adamw_

    def counted(parameters: list[Tensor], *rest: Any, **options: Any) -> None:
        calls.append(len(parameters))
        kernel(parameters, *rest, **options)

    parameters = [torch.nn.Parameter(torch.randn(100, device="cuda")) for _ in range(500)]
    with TieredAdamW(parameters, policy=policy(tmp_path)) as optimizer:
        optimizer.store.check()
        chunks = -(-500 * 112 * 8 // (256 << 10))  # spans begin at multiples of 16 elements
        monkeypatch.setattr(torch, "_fused_adamw_", counted)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert sum(calls) == 500 and len(calls) <= chunks + 1


def test_model_moved_after_construction_is_bound_where_it_is(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    with TieredAdamW(model.parameters(), policy=policy(tmp_path)) as optimizer:
        model.cuda()
        model(torch.randn(8, 100, device="cuda")).sum().backward()
        optimizer.step()
        assert set(optimizer.store.stats().tiers) == {"gpu", "cpu", "nvme"}
        assert all(t.device.type == "cpu" for state in optimizer.state_dict()["state"].values() for t in state.values())


def test_state_dict_resumes_on_the_device(tmp_path: Path) -> None:
    straight = make(torch.float32, "cuda")
    with train(straight, lambda p: TieredAdamW(p, policy=policy(tmp_path))) as optimizer:
        saved, weights = optimizer.state_dict(), [p.detach().clone() for p in straight]
    resumed = [torch.nn.Parameter(weight.clone()) for weight in weights]
    other = TieredAdamW(resumed, policy=policy(tmp_path, compute="device"))
    other.load_state_dict(saved)
    reference = [torch.nn.Parameter(weight.clone()) for weight in weights]
    theirs = torch.optim.AdamW(reference, fused=True)
    theirs.load_state_dict(saved)
    train(resumed, lambda _: other, steps=3)
    train(reference, lambda _: theirs, steps=3)
    other.close()
    assert all(torch.equal(one, two) for one, two in zip(resumed, reference, strict=True))


@pytest.mark.parametrize("to", ["cpu", "nvme"])
def test_what_is_offloaded_leaves_the_devices_memory_and_comes_back_to_the_bit(tmp_path: Path, to: str) -> None:
    tiers = {"gpu": {"capacity": "64MiB"}, "cpu": {"capacity": "128MiB"}, "nvme": {"paths": [str(tmp_path)]}}
    settings = {"chunk_size": "4MiB", "adapt": False, "tiers": tiers}
    ours, theirs = make(torch.float32, "cuda"), make(torch.float32, "cuda")
    with train(ours, lambda p: TieredAdamW(p, lr=1e-2, policy=settings), steps=2) as optimizer:
        free = torch.cuda.mem_get_info()[0]
        with optimizer.offloaded("gpu", to=to) as done:
            assert done.memory_bytes == 64 << 20
            assert torch.cuda.mem_get_info()[0] - free >= 0.9 * done.memory_bytes
        optimizer.store.check()
        with optimizer.store.yielding("gpu", torch.cuda.mem_get_info()[0] + (16 << 20)):
            assert optimizer.store.stats().tiers["gpu"].capacity_bytes <= 48 << 20
        assert optimizer.store.stats().tiers["gpu"].capacity_bytes == 64 << 20
        train(ours, lambda p: optimizer, steps=2)
    reference = train(theirs, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), steps=2)
    train(theirs, lambda p: reference, steps=2)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_tier_grows_into_what_the_device_has_and_the_users_statistics_stay(tmp_path: Path) -> None:
    ours, theirs = make(torch.float32, "cuda"), make(torch.float32, "cuda")
    tiers = {"gpu": {}, "cpu": {}, "nvme": {"paths": [str(tmp_path)]}}
    before = torch.cuda.max_memory_allocated()
    with train(ours, lambda p: TieredAdamW(p, lr=1e-2, policy={"chunk_size": "64KiB", "tiers": tiers})) as optimizer:
        optimizer.store.adapt()
        stats = optimizer.store.stats()
        assert stats.promoted > 0 and stats.pressure["gpu"].total_bytes == torch.cuda.mem_get_info()[1]
        assert torch.cuda.max_memory_allocated() >= before
    train(theirs, lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_runs_out_of_device_memory_is_run_once_more(tmp_path: Path) -> None:
    parameters = make(torch.float32, "cuda")
    settings = {
        "adapt": False,
        "chunk_size": "4MiB",
        "tiers": {"gpu": {"capacity": "1GiB"}, "cpu": {"capacity": "2GiB"}},
    }
    with train(parameters, lambda p: TieredAdamW(p, lr=1e-2, policy=settings), steps=2) as optimizer:
        for parameter in parameters:
            parameter.grad = None
        drawn: list[Tensor] = []

        def needs_much() -> None:
            drawn.append(torch.rand(3, device="cuda"))
            free = torch.cuda.mem_get_info()[0]
            torch.empty(free + (200 << 20 if len(drawn) == 1 else -(64 << 20)), dtype=torch.uint8, device="cuda")

        optimizer.store.retry_on_oom(needs_much)
        assert len(drawn) == 2 and torch.equal(drawn[0], drawn[1])
        assert optimizer.store.stats().tiers["gpu"].capacity_bytes < 1 << 30
