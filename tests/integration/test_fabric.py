"""Lightning's Fabric: its wrapper, scaler and clipping, what it saves and loads; state moved between devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import AssertResumed, Make, Pair
from tests.integration.tiny import (
    TIER_SETS,
    TinyModel,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    loss_of,
    scaler_that_overflows,
    steps_counted,
    tiered,
    train,
)
from tierstore.errors import StateDictError

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")
from lightning.fabric.plugins import precision as fabric_precision  # noqa: E402
from lightning.fabric.utilities.optimizer import _optimizers_to_device  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level("ERROR", "lightning")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


# -- Fabric -------------------------------------------------------------------------------------------------------


class FabricRun:
    """A model and optimizer set up by Fabric."""

    def __init__(self, make: Make, *, seed: int = 0, kind: Any = "32-true", clip: str | None = "max_norm") -> None:
        if kind == "16-mixed":  # else Fabric takes bf16 instead on the CPU
            plugin = fabric_precision.MixedPrecision("16-mixed", "cpu", scaler_that_overflows())
            self.fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        else:
            self.fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=kind)
        self.clip = clip
        model = TinyModel(seed=seed).to(torch.bfloat16 if kind == "bf16-true" else torch.float32)
        self.inner = make(model.parameters())
        self.model, self.optimizer = self.fabric.setup(model, self.inner)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            loss = loss_of(self.model, number)
            self.fabric.backward(loss)
            if self.clip is not None:
                limit: dict[str, Any] = {self.clip: 0.5}
                self.fabric.clip_gradients(self.model, self.optimizer, **limit, error_if_nonfinite=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("tiers", TIER_SETS)
@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", ["max_norm", "clip_val"])
def test_run_is_that_of_fused_adamw(pair: Pair, tiers: str, kind: str, clip: str) -> None:
    make, make_reference = pair(tiers)
    mine, theirs = FabricRun(make, kind=kind, clip=clip), FabricRun(make_reference, kind=kind, clip=clip)
    assert mine.train(0, 10) == theirs.train(0, 10)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert_took_every_route(mine.inner, tiers)
    assert steps_counted(mine.inner) in (range(3, 8) if kind == "16-mixed" else [10])


def test_explicitly_fused_one_unscales_by_itself(pair: Pair) -> None:
    """As with torch's: the steps are the same, and clipping, before which Fabric would have to unscale, is refused."""
    make, make_reference = pair(fused=True)
    mine, theirs = [FabricRun(each, kind="16-mixed", clip=None) for each in (make, make_reference)]
    assert mine.train(0, 10) == theirs.train(0, 10)
    assert_same_models(mine.model, theirs.model)
    assert_same_bits(mine.optimizer.state_dict(), theirs.optimizer.state_dict())
    for run in (mine, theirs):
        run.clip = "max_norm"
        with pytest.raises(NotImplementedError, match="handling the unscaling"):
            run.train(10, 11)


@pytest.mark.parametrize("kind", ["32-true", "bf16-mixed", "bf16-true"])
def test_resumed_run_is_the_uninterrupted_one(
    tmp_path: Path, pair: Pair, assert_resumed: AssertResumed, kind: str
) -> None:
    straight = FabricRun(pair()[0], kind=kind)
    straight.train(0, 3)
    straight.fabric.save(tmp_path / "saved.ckpt", {"model": straight.model, "optimizer": straight.optimizer})
    losses = straight.train(3, 6)
    resumed = FabricRun(pair("gpu-cpu-nvme")[0], kind=kind, seed=1)
    resumed.train(20, 22)
    states = {"model": resumed.model, "optimizer": resumed.optimizer}
    resumed.fabric.load(tmp_path / "saved.ckpt", states, weights_only=True)
    assert resumed.train(3, 6) == losses
    assert_resumed(resumed.model, straight.model)
    assert_same_bits(resumed.optimizer.state_dict(), straight.optimizer.state_dict())
    assert_took_every_route(resumed.inner, "gpu-cpu-nvme")


def test_wrapper_of_fabric_sees_the_state_and_store_of_the_optimizer_it_wraps(tmp_path: Path) -> None:
    """The wrapper is of our class, but without its constructor: asked before the first step, it must make no store."""
    run = FabricRun(lambda parameters: tiered(parameters, tmp_path))
    first = next(iter(run.model.parameters()))
    assert dict(run.optimizer.state[first]) == {}
    store = run.optimizer.store
    run.train(0, 2)
    assert run.optimizer.store is run.inner.store is store
    assert_same_bits(dict(run.optimizer.state[first]), dict(run.inner.state[first]))
    assert float(run.inner.state[first]["exp_avg"].abs().sum()) > 0
    run.optimizer.close()
    with pytest.raises(RuntimeError, match="closed"):
        run.train(2, 3)


# -- state from device to device ----------------------------------------------------------------------------------


def test_moving_state_leaves_it_in_its_tiers(tmp_path: Path) -> None:
    """Lightning moves all but `step`, at set-up, resume and teardown."""
    model = TinyModel()
    with tiered(model.parameters(), tmp_path) as optimizer:
        _optimizers_to_device([optimizer], torch.device("cpu"))  # nothing there yet
        train(model, optimizer, range(3))
        before, moved = optimizer.state_dict(), optimizer.store.stats().to_dict()["routes"]
        _optimizers_to_device([optimizer], torch.device("cpu"))
        assert optimizer.store.stats().to_dict()["routes"] == moved
        assert_same_bits(optimizer.state_dict(), before)


def test_moving_state_to_where_there_are_no_values_changes_nothing(tmp_path: Path) -> None:
    model = TinyModel()
    with tiered(model.parameters(), tmp_path) as optimizer:
        train(model, optimizer, range(3))
        before = optimizer.state_dict()
        with pytest.raises(StateDictError, match="no values"):
            _optimizers_to_device([optimizer], torch.device("meta"))
        assert_same_bits(optimizer.state_dict(), before)
        train(model, optimizer, range(3, 4))
