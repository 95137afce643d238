"""Tiers under pressure: whatever is taken from them and given back while training, no bit of it changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fakes import ActivationDevice, CurveProbe
from tests.optimizer.cases import KIB
from tierstore import TieredAdamW
from tierstore.build import Parts
from tierstore.probes import Probe
from tierstore.stats import Stats

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


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    """The losses with torch's own AdamW."""
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
    assert all(after - before <= 10 for before, after in pairwise(spilled))
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
    assert (
        job.losses == undisturbed[: len(job.losses)] and set(job.extents("cpu")) == {40} and not job.stats[-1].pressure
    )
    job.optimizer.close()


def test_a_full_disk_leaves_tiers_as_they_are(tmp_path: Path, undisturbed: list[float]) -> None:
    """There seemed to be room for the files, and somebody else was faster."""

    class Refusing(Job):
        pass

    probe = CurveProbe(100 * CHUNK, [90 * CHUNK])
    tiers = {"cpu": {"capacity": "auto", "watermarks": MARKS}, "nvme": {}}
    job = Refusing(tmp_path, tiers, Parts(open_probe=lambda **_: probe))
    probe.store = job.optimizer.store
    (tmp_path / "x").mkdir()
    job.optimizer.store.setup.later["nvme"] = _raise  # type: ignore[index]
    job.train()
    assert job.losses == undisturbed[: len(job.losses)]
    held = [decision for decision in job.stats[-1].decisions if decision.kind == "hold"]
    assert held and "No space left" in held[0].what
    job.optimizer.close()


def _raise() -> Any:
    raise OSError(28, "No space left on device")


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
