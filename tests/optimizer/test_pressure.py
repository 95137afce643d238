"""Tiers under pressure: whatever is taken from them and given back while training, no bit of it changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fakes import ActivationDevice, CurveProbe
from tests.optimizer.cases import KIB, MIB, assert_same_parameters, seeded, train
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.errors import CapacityError, DiskFullError, PolicyError, StoreClosedError
from tierstore.probes import Probe
from tierstore.stats import Stats
from tierstore.swapfile import SwapFile

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

CHUNK = 16 * KIB
CHUNKS = 40
"""Of the model below, or a few more."""
STEPS = 30
MOST_STEPS = 80


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 200))


class Job:
    """A training run whose losses are kept; `before` is called with the number of each step."""

    def __init__(self, folder: Path, tiers: dict[str, Any], parts: Parts | None = None, **settings: Any) -> None:
        class Optimizer(TieredAdamW):
            pass

        Optimizer.parts = parts or Parts()
        self.model = make_model()
        for tier in tiers:
            if tier == "nvme":
                tiers[tier] = {"paths": [str(folder)], **tiers[tier]}
        policy = {"chunk_size": CHUNK, "tiers": tiers, **settings}
        self.optimizer = Optimizer(self.model.parameters(), lr=1e-2, policy=policy)
        self.losses: list[float] = []
        self.stats: list[Stats] = []

    def train(self, steps: int = STEPS, before: Callable[[int], None] = lambda step: None) -> Job:
        chance = torch.Generator().manual_seed(1)
        for step in range(steps):
            before(step)
            inputs = torch.randn(8, 64, generator=chance)
            loss = functional.mse_loss(self.model(inputs), torch.ones(8, 200))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.stats.append(self.optimizer.store.stats())
            self.optimizer.store.check()
        return self

    def extents(self, tier: str) -> list[int]:
        """How many extents a tier had after each step."""
        return [stats.tiers[tier].capacity_bytes // CHUNK if tier in stats.tiers else 0 for stats in self.stats]


@pytest.fixture
def undisturbed() -> list[float]:
    """The losses with torch's own AdamW, on as many threads as the test has: with others, MKL has other bits."""
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    chance = torch.Generator().manual_seed(1)
    for _ in range(MOST_STEPS):
        loss = functional.mse_loss(model(torch.randn(8, 64, generator=chance)), torch.ones(8, 200))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def under(
    folder: Path, curve: Sequence[int], tiers: dict[str, Any], *, total: int, **settings: Any
) -> tuple[Job, CurveProbe]:
    """A run while others take what a curve says, in extents, of a machine of `total`."""
    probe = CurveProbe(total * CHUNK, [extents * CHUNK for extents in curve])
    job = Job(folder, tiers, Parts(open_probe=lambda **_: probe), **settings)
    probe.store = job.optimizer.store
    return job.train(), probe


MARKS = {"high": 0.8, "low": 0.6}


@pytest.mark.parametrize("order", ["alternating", "fixed"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_tier_shrinks_as_others_take_memory_and_grows_when_they_give_it_back(
    tmp_path: Path, undisturbed: list[float], order: str, update: str
) -> None:
    """100 extents of memory: what others have rises from 20 to 70 within ten steps, stays, and falls again."""
    curve = [20] * 4 + list(range(20, 70, 5)) + [70] * 4 + [20] * 20
    tiers = {"cpu": {"capacity": CHUNKS * CHUNK, "watermarks": MARKS}, "nvme": {}}
    order = "fixed" if update == "backward" else order
    job, probe = under(tmp_path, curve, tiers, total=100, order=order, update=update)
    assert job.losses == undisturbed[: len(job.losses)]
    sizes = job.extents("cpu")
    assert sizes[2] == CHUNKS and min(sizes) <= 80 - 70 and sizes[-1] == CHUNKS
    assert all(before - after <= 2 * max(8, CHUNKS // 8) for before, after in pairwise(sizes))
    stats = job.stats[-1]
    kinds = [decision.kind for decision in stats.decisions]
    assert stats.spilled > 0 and kinds.count("spill") >= 2 and kinds.count("promote") >= 2
    told = next(decision for decision in stats.decisions if decision.kind == "spill")
    assert "cpu shrinks: 40 -> " in told.what and "over the high watermark of 80%" in told.reason
    assert stats.pressure["cpu"].total_bytes == 100 * CHUNK and max(probe.seen) > 0.8
    job.optimizer.close()


def test_a_swing_within_the_watermarks_moves_nothing(tmp_path: Path, undisturbed: list[float]) -> None:
    chance = random.Random(1)
    curve = [chance.randint(22, 38) for _ in range(STEPS)]
    tiers = {"cpu": {"capacity": 40 * CHUNK, "watermarks": MARKS}, "nvme": {}}
    job, probe = under(tmp_path, curve, tiers, total=100)
    assert job.losses == undisturbed[: len(job.losses)]
    assert set(job.extents("cpu")) == {40} and max(probe.seen) > 0.75 and min(probe.seen) < 0.65
    job.optimizer.close()


def test_a_swing_across_the_watermarks_moves_no_more_than_its_bound(tmp_path: Path, undisturbed: list[float]) -> None:
    """Others take and give half of the machine from step to step, the worst there can be."""
    curve = [20, 70] * STEPS
    tiers = {"cpu": {"capacity": 40 * CHUNK, "watermarks": MARKS}, "nvme": {}}
    job, _ = under(tmp_path, curve, tiers, total=100)
    assert job.losses == undisturbed[: len(job.losses)]
    sizes = job.extents("cpu")
    assert all(abs(before - after) <= 10 for before, after in pairwise(sizes))
    spilled = [stats.spilled for stats in job.stats]
    assert spilled[-1] > 10 and all(after - before <= 10 for before, after in pairwise(spilled))
    job.optimizer.close()


def test_files_join_when_what_memory_held_no_longer_fits(tmp_path: Path, undisturbed: list[float]) -> None:
    curve = [10] * 5 + [75] * 15 + [10] * 15
    tiers = {"cpu": {"capacity": "auto", "watermarks": MARKS}, "nvme": {}}
    job, _ = under(tmp_path, curve, tiers, total=100)
    assert job.losses == undisturbed[: len(job.losses)]
    assert "nvme" not in job.stats[2].tiers and job.stats[2].io.engine == "none"
    assert min(job.extents("cpu")) <= 8 and job.extents("nvme")[15] > 30
    assert job.stats[15].bytes_written > 0 and job.stats[-1].io.engine != "none"
    assert job.extents("cpu")[-1] == job.extents("cpu")[0]
    assert job.stats[-1].tiers["nvme"].chunks == 0 and job.stats[-1].promoted > 0
    job.optimizer.close()


def test_what_cannot_shrink_says_so_once_and_goes_on(tmp_path: Path, undisturbed: list[float]) -> None:
    tiers = {"cpu": {"capacity": "auto", "watermarks": MARKS}, "nvme": {"capacity": 8 * CHUNK}}
    job, _ = under(tmp_path, [90], tiers, total=100)
    assert job.losses == undisturbed[: len(job.losses)]
    held = [decision for decision in job.stats[-1].decisions if decision.kind == "hold"]
    assert len(held) == 1 and "what is left is needed" in held[0].reason
    job.optimizer.close()


def test_nothing_adapts_where_the_policy_says_so(tmp_path: Path, undisturbed: list[float]) -> None:
    tiers = {"cpu": {"capacity": 40 * CHUNK, "watermarks": MARKS}, "nvme": {}}
    job, _ = under(tmp_path, [90], tiers, total=100, adapt=False)
    assert job.losses == undisturbed[: len(job.losses)] and set(job.extents("cpu")) == {40} and job.stats[-1].pressure
    job.optimizer.close()


def test_a_full_disk_leaves_tiers_as_they_are(
    tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There seemed to be room for the files, and somebody else was faster."""
    probe = CurveProbe(100 * CHUNK, [90 * CHUNK])
    tiers = {"cpu": {"capacity": "auto", "watermarks": MARKS}, "nvme": {}}
    job = Job(tmp_path, tiers, Parts(open_probe=lambda **_: probe))
    probe.store = job.optimizer.store
    monkeypatch.setattr(SwapFile, "grow", _raise)
    job.train()
    assert job.losses == undisturbed[: len(job.losses)]
    held = [decision for decision in job.stats[-1].decisions if decision.kind == "hold"]
    assert len(held) == 1 and "No space left" in held[0].reason
    job.optimizer.close()


def _raise(*_: object) -> Any:
    raise DiskFullError(28, "No space left on device")


class OnDevice:
    """Parts with a stand-in for an accelerator."""

    def __init__(self, total: int) -> None:
        self.device = ActivationDevice(total * CHUNK)
        probe = partial(Probe, clock=lambda: 0.0)  # measures at every step
        self.parts = Parts(open_device=lambda *_: self.device, open_probe=probe)


@pytest.mark.parametrize("order", ["alternating", "fixed"])
def test_a_devices_tier_takes_only_what_stays_free_at_the_peak(
    tmp_path: Path, undisturbed: list[float], order: str
) -> None:
    """Forward and backward need 40 of 100 extents, then more from step to step, at last 75, and then 20.

    The allocator keeps what the 75 have taken until it is asked, now and then, to give it back.
    """
    on = OnDevice(100)
    marks = {"high": 0.95, "low": 0.85}
    tiers = {"gpu": {"device": "cpu", "watermarks": marks}, "cpu": {}, "nvme": {}}
    job = Job(tmp_path, tiers, on.parts, order=order)
    need = [40] * 8 + list(range(44, 76, 4)) + [75] * 4 + [20] * 60

    job.train(MOST_STEPS, before=lambda step: on.device.activate(need[step] * CHUNK))
    sizes = job.extents("gpu")
    assert job.losses == undisturbed[: len(job.losses)]
    assert max(sizes[:2]) <= 4 < sizes[7] <= 60  # it starts with what chunks stream through, and grows after two steps
    assert sizes[18] <= 25
    assert sizes[-1] == CHUNKS and on.device.releases <= 12
    assert job.stats[-1].promoted > 0 and "gpu" in job.stats[-1].pressure
    job.optimizer.close()


def test_a_capacity_can_be_cut_to_the_least_and_given_back_while_training(
    tmp_path: Path, undisturbed: list[float]
) -> None:
    tiers = {"gpu": {"device": "cpu", "capacity": 8 * CHUNK}, "cpu": {"capacity": 20 * CHUNK}, "nvme": {}}
    job = Job(tmp_path, tiers)
    sizes: dict[int, dict[str, int]] = {
        5: {"gpu": 3, "cpu": 4},
        12: {"cpu": 40, "gpu": 40},
        20: {"gpu": 3},
        24: {"cpu": 4},
    }

    def resize(step: int) -> None:
        for tier, extents in sizes.get(step, {}).items():
            job.optimizer.store.resize(tier, extents * CHUNK)

    job.train(before=resize)
    assert job.losses == undisturbed[: len(job.losses)]
    assert job.extents("gpu")[6] == 3 and job.extents("gpu")[14] == 40
    job.optimizer.close()


# -- for a while, and once more ---------------------------------------------------------------------------------------


def steady(folder: Path, total: int, *, gpu: int = 30, **settings: Any) -> tuple[Job, ActivationDevice]:
    """A run whose device has so many extents of memory, of which its tier has a given number."""
    on = OnDevice(total)
    tiers = {"gpu": {"device": "cpu", "capacity": gpu * CHUNK}, "cpu": {"capacity": 20 * CHUNK}, "nvme": {}}
    return Job(folder, tiers, on.parts, adapt=False, **settings), on.device


def test_a_tier_yields_what_is_asked_for_and_has_it_again_afterwards(tmp_path: Path, undisturbed: list[float]) -> None:
    job, device = steady(tmp_path, 50)

    def before(step: int) -> None:
        if step in (4, 9):
            with job.optimizer.store.yielding("gpu", 40 * CHUNK):
                assert device.allocated <= 10 * CHUNK
                device.activate(40 * CHUNK)
                job.optimizer.store.check()
            device.release_unused()

    job.train(before=before)
    assert job.losses == undisturbed[: len(job.losses)]
    assert job.extents("gpu")[-1] == 30
    told = [decision for decision in job.stats[-1].decisions if decision.kind in ("spill", "promote")]
    assert len(told) == 4 and "bytes are asked for" in told[0].reason
    job.optimizer.close()


def test_steps_may_be_made_while_a_tier_yields(tmp_path: Path, undisturbed: list[float]) -> None:
    job, device = steady(tmp_path, 50)
    job.train(3)
    with job.optimizer.store.yielding("gpu", 45 * CHUNK):
        losses = list(job.losses)
        set_back(job)
        job.train(3)
        assert job.losses == [*losses, *losses]
        assert device.allocated <= 5 * CHUNK
    job.optimizer.close()


def set_back(job: Job) -> None:
    """Begin from the beginning."""
    job.model.load_state_dict(make_model().state_dict())
    job.optimizer.load_state_dict({**job.optimizer.state_dict(), "state": {}})


def test_what_is_free_already_need_not_be_yielded(tmp_path: Path) -> None:
    job, device = steady(tmp_path, 500)
    job.train(2)
    with job.optimizer.store.yielding("gpu", 300 * CHUNK):
        assert device.allocated == 30 * CHUNK
    job.optimizer.close()


def test_more_than_a_tier_can_yield_is_refused_before_anything_moves(tmp_path: Path) -> None:
    job, device = steady(tmp_path, 50)
    job.train(2)
    with pytest.raises(CapacityError, match=r"offload\(\) empties a tier"), job.optimizer.store.yielding("gpu", MIB):
        pytest.fail("the body must not run")
    assert device.allocated == 30 * CHUNK
    with pytest.raises(PolicyError, match="allowed: a memory tier"), job.optimizer.store.yielding("nvme", MIB):
        pytest.fail("the body must not run")
    job.train(1)
    job.optimizer.close()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["dropped gradients", "gradients of zero"])
def test_what_runs_out_of_memory_is_run_once_more_with_room(tmp_path: Path, set_to_none: bool) -> None:
    """The third step needs more than is there; dropout tells whether random numbers were put back."""

    def losses(job: Job, need: Callable[[int], None]) -> list[float]:
        found = []
        chance = torch.Generator().manual_seed(1)
        torch.manual_seed(5)
        for step in range(6):
            inputs = torch.randn(8, 64, generator=chance)

            def forward_and_backward(step: int = step, inputs: torch.Tensor = inputs) -> torch.Tensor:
                noise = random.random() + float(np.random.random())
                loss = functional.dropout(job.model(inputs) + noise).square().mean()
                loss.backward()
                need(step)
                return loss.detach()

            random.seed(step)
            np.random.seed(step)
            found.append(job.optimizer.store.retry_on_oom(forward_and_backward).item())
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none)
            job.optimizer.store.check()
        return found

    job, device = steady(tmp_path, 50)
    other, _ = steady(tmp_path, 50)
    calls: list[int] = []

    def need(step: int) -> None:
        calls.append(step)
        device.activate((40 if step in (2, 4) else 10) * CHUNK)

    assert losses(job, need) == losses(other, lambda step: None)
    assert calls == [0, 1, 2, 2, 3, 4, 5]
    decision = next(one for one in job.optimizer.store.stats().decisions if one.kind == "spill")
    assert "tried to allocate" in decision.reason
    job.optimizer.close()
    other.optimizer.close()


@pytest.mark.parametrize("set_to_none", [True, False], ids=["dropped gradients", "gradients of zero"])
def test_a_parameter_that_no_run_uses_is_updated_as_if_memory_had_not_run_out(set_to_none: bool) -> None:
    """A gradient of zero moves a parameter, by decay and by its moments; without one it is left alone."""

    def train(fails_at: int) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.ones(3000)) for _ in range(3)]
        to_fail = {fails_at}
        with TieredAdamW(parameters, lr=1e-2, policy={"tiers": {"cpu": {}}}) as optimizer:
            for step in range(4):
                used = parameters if step % 2 == 0 else parameters[:1]  # the last two are frozen, or a head nobody uses

                def forward_and_backward(used: Sequence[nn.Parameter] = used, step: int = step) -> None:
                    sum(parameter.square().sum() for parameter in used).backward()
                    if step in to_fail:
                        to_fail.remove(step)
                        raise torch.OutOfMemoryError("tried to allocate")

                optimizer.store.retry_on_oom(forward_and_backward, tier="cpu")
                optimizer.step()
                optimizer.zero_grad(set_to_none)
        return [parameter.detach() for parameter in parameters]

    undisturbed = train(-1)
    for fails_at in range(4):
        assert all(map(torch.equal, train(fails_at), undisturbed))


def test_what_runs_out_of_memory_twice_says_so(tmp_path: Path) -> None:
    job, device = steady(tmp_path, 50)
    job.train(2)
    with pytest.raises(torch.OutOfMemoryError):
        job.optimizer.store.retry_on_oom(lambda: device.activate(60 * CHUNK))
    job.train(2)
    job.optimizer.close()


def test_other_errors_are_not_retried(tmp_path: Path) -> None:
    job, _ = steady(tmp_path, 50)
    job.train(2)
    calls = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        job.optimizer.store.retry_on_oom(fail)
    assert len(calls) == 1
    job.optimizer.close()


def test_gradients_of_an_earlier_backward_cannot_be_had_again(tmp_path: Path) -> None:
    job, device = steady(tmp_path, 50)
    job.train(2)
    job.model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        job.optimizer.store.retry_on_oom(lambda: device.activate(60 * CHUNK))
    assert "gradients of an earlier backward" in caught.value.__notes__[0]
    job.optimizer.close()


# -- from other threads -----------------------------------------------------------------------------------------------


def test_another_thread_asks_for_a_size_and_the_next_step_gives_it(tmp_path: Path, undisturbed: list[float]) -> None:
    job, _ = steady(tmp_path, 500)
    job.train(2)
    store = job.optimizer.store
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.request_resize, "gpu", 5 * CHUNK).result()
        wrong = pool.submit(store.request_resize, "cpu", "16KiB").result()
        given_up = pool.submit(store.request_resize, "cpu", "160KiB").result()
        assert given_up.cancel() and not asked.done()
        with pytest.raises(PolicyError, match="found tier 'disk'"):
            pool.submit(store.request_resize, "disk", "1MiB").result()
    job.train(1)
    assert asked.result() == 5 * CHUNK and job.extents("gpu")[-1] <= 5 and job.extents("cpu")[-1] == 20
    with pytest.raises(CapacityError, match=r"raise tiers\.cpu\.capacity"):
        wrong.result()
    late = store.request_resize("gpu", 8 * CHUNK)
    job.optimizer.close()
    for refused in (late, store.request_resize("gpu", 8 * CHUNK)):
        with pytest.raises(StoreClosedError):
            refused.result()


@pytest.mark.parametrize("steps", [0, 2])
def test_sizes_that_were_asked_for_outlast_another_binding(tmp_path: Path, steps: int) -> None:
    """With a new group the sizes of the policy came back, and what another thread had asked for was refused."""
    tiers = {
        "gpu": {"device": "cpu", "capacity": 6 * CHUNK},
        "cpu": {},
        "nvme": {"paths": [str(tmp_path)], "capacity": 100 * CHUNK},
    }
    settings = {"chunk_size": CHUNK, "adapt": False, "tiers": tiers}
    mine, theirs = seeded((60_000,), (3000,)), seeded((60_000,), (3000,))
    optimizer = TieredAdamW(mine[:1], lr=1e-2, policy=settings)
    reference = torch.optim.AdamW(theirs[:1], lr=1e-2, fused=True)

    train(optimizer, mine, range(steps))
    train(reference, theirs, range(steps))
    optimizer.store.resize("cpu", 20 * CHUNK)
    asked = optimizer.store.request_resize("gpu", 8 * CHUNK)
    optimizer.add_param_group({"params": mine[1:]})
    train(optimizer, mine, [steps])
    reference.add_param_group({"params": theirs[1:]})
    train(reference, theirs, [steps])
    sizes = {name: tier.capacity_bytes // CHUNK for name, tier in optimizer.store.stats().tiers.items()}
    assert asked.result() == 8 * CHUNK and sizes == {"gpu": 8, "cpu": 20, "nvme": 100}
    assert_same_parameters(mine, theirs)
    optimizer.close()


@pytest.mark.parametrize("by", ["resize", "request_resize"])
def test_whether_a_new_group_fits_is_found_with_the_sizes_that_were_asked_for(tmp_path: Path, by: str) -> None:
    """It was looked up in the policy's: a group was taken for which there was no room any more, and then every step,
    every state dict and even a resize was refused; and one for which room had been made was refused.
    """
    tiers = {"cpu": {"capacity": 8 * CHUNK}, "nvme": {"paths": [str(tmp_path)], "capacity": 40 * CHUNK}}
    mine, theirs = seeded((30_000,), (60_000,)), seeded((30_000,), (60_000,))
    optimizer = TieredAdamW(mine[:1], lr=1e-2, policy={"chunk_size": CHUNK, "adapt": False, "tiers": tiers})
    reference = torch.optim.AdamW(theirs[:1], lr=1e-2, fused=True)

    train(optimizer, mine, [0])
    getattr(optimizer.store, by)("nvme", 16 * CHUNK)
    with pytest.raises(CapacityError, match="need a home"):
        optimizer.add_param_group({"params": mine[1:]})
    assert len(optimizer.param_groups) == 1 and optimizer.state_dict()["state"].keys() == {0}
    train(optimizer, mine, [1])
    getattr(optimizer.store, by)("nvme", 50 * CHUNK)
    optimizer.add_param_group({"params": mine[1:]})
    train(optimizer, mine, [2])
    train(reference, theirs, [0, 1])
    reference.add_param_group({"params": theirs[1:]})
    train(reference, theirs, [2])
    assert_same_parameters(mine, theirs)
    optimizer.close()
