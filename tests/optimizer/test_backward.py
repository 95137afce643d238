"""`update: backward`: the numbers of `update: step`, while backward still runs; and an error where that cannot be."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fakes import PATIENCE_SECONDS, FaultyEngine, HonestDevice, HonestStream, honest_parts
from tests.optimizer.cases import KIB, FourTiers, assert_same_parameters, laid_out, small_policy
from tests.optimizer.settings import assert_same_optimizers
from tierstore.build import Parts
from tierstore.errors import (
    BusyStoreError,
    FailedStepError,
    ForkedStoreError,
    PolicyError,
    StoreClosedError,
    TransferError,
)
from tierstore.io.base import Kind, Request
from tierstore.optimizer import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD
from tierstore.rules.adam import AdamWRule


def long(*values: Any) -> Any:
    """A case that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.long)


pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


class Net(nn.Module):
    """A layer that is used twice, one used in some steps, a frozen one; a 0-dim, a strided, a complex parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied, self.last = nn.Linear(60, 60), nn.Linear(60, 60), nn.Linear(60, 40)
        self.some, self.frozen, self.unused = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.strided = nn.Parameter(laid_out(torch.randn(3000), "strided"))
        self.to(dtype)
        self.phase = nn.Parameter(torch.randn(40, dtype=torch.complex64))
        self.frozen.requires_grad_(False)

    def forward(self, step: int) -> Tensor:
        inputs = torch.randn(4, 60, generator=torch.Generator().manual_seed(step)).to(self.scale.dtype)
        hidden = self.tied(self.tied(self.first(inputs)).sigmoid()).sigmoid()
        output = self.frozen(self.last(hidden) * self.scale)
        if step % 3 != 1:
            output = output + self.some(output)
        bend = self.strided.square().mean() + (self.phase * output.float()).abs().mean()
        loss: Tensor = output.square().mean() + bend
        return loss


def groups_of(net: Net) -> list[dict[str, Any]]:
    """Two groups; their chunks hold parameters that arrive early, late and never."""
    late = [*net.first.parameters(), *net.unused.parameters(), net.scale]
    rest = [parameter for parameter in net.parameters() if all(parameter is not other for other in late)]
    return [{"params": late, "lr": 3e-3}, {"params": rest, "weight_decay": 0.1}]


def is_under_way(optimizer: Any) -> bool:
    """Whether a backward has begun a step, in which nobody may come near the state."""
    try:
        optimizer.store  # noqa: B018
    except BusyStoreError:
        return True
    return False


def policy(folder: Path, tiers: str = "cpu nvme", **more: Any) -> dict[str, Any]:
    return small_policy(folder, tiers.split(), **{"update": "backward", **more})


def both(make: Any, folder: Path, tiers: str = "cpu nvme", dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Two equal nets with optimizers, of which the first updates in backward."""
    for update in ("backward", "step"):
        net = Net(dtype)
        yield net, make(groups_of(net), lr=1e-2, policy=policy(folder, tiers, update=update, **more))


def take_step(net: Net, optimizer: Any, step: int) -> bool:
    """Take a step; returns whether it was under way before `step()`."""
    optimizer.zero_grad()
    net(step).backward()
    was_under_way = is_under_way(optimizer)
    optimizer.step()
    return was_under_way


def assert_same(mine: Net, optimizer: Any, theirs: Net, reference: Any) -> None:
    assert_same_parameters(list(mine.parameters()), list(theirs.parameters()))
    assert_same_optimizers(optimizer, reference)


def assert_trains_alike(make: Any, folder: Path, *arguments: Any, **more: Any) -> None:
    (mine, optimizer), (theirs, reference) = both(make, folder, *arguments, **more)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.7) for one in (optimizer, reference)]
    was_under_way = []
    for step in range(7):
        if step == 5:
            for net in (mine, theirs):  # frozen and thawed between steps
                net.frozen.requires_grad_(True)
                net.last.requires_grad_(False)
        was_under_way.append(take_step(mine, optimizer, step))
        take_step(theirs, reference, step)
        for scheduler in schedulers:
            scheduler.step()
    assert was_under_way == [False] + [True] * 6  # the first is only watched
    optimizer.store.check()
    assert_same(mine, optimizer, theirs, reference)


# -- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", ["gpu cpu nvme", "cpu nvme", *map(long, FourTiers.names[2:])])
def test_numbers_are_those_of_update_step_in_all_tiers(tiers: str, tmp_path: Path) -> None:
    assert_trains_alike(TieredAdamW, tmp_path, tiers)


@pytest.mark.parametrize("extents", [4, long(9), long(30)])
def test_numbers_are_the_same_whatever_room_there_is(extents: int, tmp_path: Path) -> None:
    assert_trains_alike(TieredAdamW, tmp_path, extents=extents, chunk=20 * KIB)


@pytest.mark.parametrize(
    ("dtype", "free"),
    [
        (torch.bfloat16, True),
        *(long(dtype, free) for dtype in (torch.bfloat16, torch.float64, torch.float32) for free in (True, False)),
    ],
)
def test_numbers_are_the_same_in_every_dtype_and_when_gradients_go(
    dtype: torch.dtype, free: bool, tmp_path: Path
) -> None:
    assert_trains_alike(TieredAdamW, tmp_path, "cpu nvme", dtype, free_gradients=free, chunk=32 * KIB)


@pytest.mark.parametrize("make", [TieredSGD, long(TieredAdam), long(TieredLion)])
def test_numbers_are_the_same_for_other_rules(make: Any, tmp_path: Path) -> None:
    assert_trains_alike(make, tmp_path)


@pytest.mark.parametrize(
    "flags", [{"fused": False, "lr": torch.tensor(1e-2)}, long({"foreach": True}), long({"amsgrad": True})]
)
def test_numbers_are_the_same_for_other_options(flags: dict[str, Any], tmp_path: Path) -> None:
    def make(groups: Any, lr: float, policy: Any) -> TieredAdamW:
        flagged = {name: value.clone() if isinstance(value, Tensor) else value for name, value in flags.items()}
        return TieredAdamW(groups, **{"lr": lr, **flagged}, policy=policy)

    assert_trains_alike(make, tmp_path, chunk=32 * KIB)


@pytest.mark.parametrize("seed", [0, *map(long, range(1, 6))])
def test_numbers_are_the_same_on_a_device_whose_work_comes_late(seed: int, tmp_path: Path) -> None:
    class HonestAdamW(TieredAdamW):
        parts = honest_parts(seed)

    (mine, optimizer), (theirs, reference) = both(HonestAdamW, tmp_path, "gpu cpu nvme")
    for step in range(4):
        take_step(mine, optimizer, step)
        take_step(theirs, reference, step)
    assert_same(mine, optimizer, theirs, reference)
    optimizer.close()
    reference.close()


def test_chunks_wait_for_the_stream_that_makes_their_gradients(tmp_path: Path) -> None:
    """Gradients are made late, by work on a stream of their own; what is read before is NaN."""
    made = honest_parts(0)
    device = made.open_device("auto", None)
    assert isinstance(device, HonestDevice)
    stream = HonestStream(device.schedule, "backward")
    stream.rank = 2.0  # the last to be run

    class TwoStreams(HonestDevice):
        def record(self) -> Any:
            is_backward = threading.current_thread() is threading.main_thread()
            return stream.record() if is_backward else super().record()

    two = TwoStreams(schedule=device.schedule)

    class StreamedAdamW(TieredAdamW):
        parts = Parts(
            open_device=lambda *_: two,
            host_for=made.host_for,
            open_engine=made.open_engine,
            open_transfer=made.open_transfer,
        )

    def late(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, right = parameter.grad.data, parameter.grad.clone()
        gradient.fill_(torch.nan)
        stream.add(lambda: gradient.copy_(right))

    torch.manual_seed(0)
    mine = nn.Sequential(*(nn.Linear(60, 60) for _ in range(4)))
    theirs = copy.deepcopy(mine)
    for parameter in mine.parameters():
        parameter.register_post_accumulate_grad_hook(late)
    optimizer = StreamedAdamW(mine.parameters(), policy=policy(tmp_path, "gpu cpu nvme"))
    reference = torch.optim.AdamW(theirs.parameters(), fused=True)
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):
            one.zero_grad()
            net(torch.full((2, 60), 0.1 * step)).square().sum().backward()
            if step == 0 and one is optimizer:
                stream.record().wait()  # a step that is all on one thread waits for nothing: torch's streams would
            one.step()
    assert_same_parameters(list(mine.parameters()), list(theirs.parameters()))
    optimizer.close()
    stream.close()


def test_accumulation_updates_with_the_last_backward_only(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    for step in range(4):
        for net, one in ((mine, optimizer), (theirs, reference)):
            one.zero_grad()
            with one.accumulating():
                net(10 + step).backward()  # reaches parameters that the last one does not, in some steps
                net(20 + step).backward()
                assert not is_under_way(one)
            net(step).backward()
            one.step()
    assert_same(mine, optimizer, theirs, reference)


def test_a_closure_that_runs_backward_is_called_first(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    seen = []
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):

            def closure(net: Net = net, one: Any = one, step: int = step) -> Tensor:
                one.zero_grad()
                loss = net(step)
                loss.backward()
                seen.append(is_under_way(one))
                return loss

            one.step(closure)
    assert seen == [False, False, True, False, True, False]
    assert_same(mine, optimizer, theirs, reference)


def checkpointed(net: Net) -> Callable[[int], Tensor]:
    return lambda step: checkpoint(net, step, use_reentrant=False)


def compiled(net: Net) -> Callable[[int], Tensor]:
    return torch.compile(net, backend="aot_eager")


@pytest.mark.parametrize("wrapped", [checkpointed, long(compiled)])
def test_checkpointed_and_compiled_models_train_alike(wrapped: Any, tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):
            one.zero_grad()
            wrapped(net)(step).backward()
            one.step()
    assert_same(mine, optimizer, theirs, reference)


def test_gradients_set_by_hand_are_stepped_as_ever(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):
            take_step(net, one, step)
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            one.step()
    assert_same(mine, optimizer, theirs, reference)


def test_state_that_is_looked_at_and_changed_counts(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):
            take_step(net, one, step)
            one.state[net.last.weight]["exp_avg"].mul_(0.5)
    assert_same(mine, optimizer, theirs, reference)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate:UserWarning")
def test_a_parameter_twice_in_a_group_is_left_to_the_step(tmp_path: Path) -> None:
    nets = [nn.Linear(60, 60), nn.Linear(60, 60)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        TieredAdamW([net.weight, net.bias, net.weight], policy=policy(tmp_path, update=update))
        for net, update in zip(nets, ("backward", "step"), strict=True)
    ]
    for _ in range(3):
        for net, one in zip(nets, optimizers, strict=True):
            one.zero_grad()
            net(torch.ones(2, 60)).square().sum().backward()
            one.step()
    assert_same_optimizers(*optimizers)


def test_parameters_replaced_and_added_are_watched_and_those_left_are_not(tmp_path: Path) -> None:
    net = Net()
    optimizer = TieredAdamW(net.last.parameters(), lr=1e-2, policy=policy(tmp_path))
    for step in range(2):
        take_step(net, optimizer, step)
    optimizer.add_param_group({"params": list(net.tied.parameters())})
    old, net.last.weight = net.last.weight, nn.Parameter(net.last.weight.detach().clone())
    optimizer.param_groups[0]["params"][0] = net.last.weight
    for step in range(2, 5):
        take_step(net, optimizer, step)
    assert not old._post_accumulate_grad_hooks
    assert len(net.last.weight._post_accumulate_grad_hooks or ()) == 1
    assert [float(optimizer.state[p]["step"]) for p in (net.last.weight, net.last.bias, net.tied.weight)] == [5, 5, 3]


# -- overlap ----------------------------------------------------------------------------------------------------


class Telling(AdamWRule):
    """Tells when it updates."""

    happened: ClassVar[list[str]] = []
    updated = threading.Event()
    count: ClassVar[threading.Semaphore] = threading.Semaphore(0)

    def update(self, *arguments: Any, **more: Any) -> None:
        super().update(*arguments, **more)
        self.happened.append("update")
        self.updated.set()
        self.count.release()


class TellingEngine(FaultyEngine):
    """Tells when it reads."""

    read = threading.Event()

    def transfer(self, request: Request) -> int:
        if request.operation.kind is Kind.READ:
            Telling.happened.append("read")
            self.read.set()
        return super().transfer(request)


class TellingAdamW(TieredAdamW):
    rule = Telling()
    parts = Parts(open_engine=lambda *_, **__: TellingEngine(threads=2))


def wait_for_an_update(_: Tensor) -> None:
    Telling.updated.wait(PATIENCE_SECONDS)


def test_chunks_are_read_and_updated_before_backward_is_over(tmp_path: Path) -> None:
    """Backward does not end before a chunk was updated, and step() is not called before one was read."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    optimizer = TellingAdamW(net.parameters(), policy=policy(tmp_path))
    for step in range(3):
        optimizer.zero_grad()
        optimizer.store.wait()
        for event in (Telling.updated, TellingEngine.read):
            event.clear()
        Telling.happened.clear()
        inputs = torch.ones(2, 60, requires_grad=True)
        if step:
            inputs.register_hook(wait_for_an_update)
        net(inputs).square().sum().backward()
        Telling.happened.append("backward is over")
        if step:
            assert TellingEngine.read.wait(PATIENCE_SECONDS)
        optimizer.step()
        happened = [what for what in Telling.happened if what != "read"]
        assert (happened.index("update") < happened.index("backward is over")) == bool(step)


def test_a_parameter_that_was_thawed_and_has_no_gradient_yet_keeps_one_backward_from_updating(tmp_path: Path) -> None:
    """The step after it makes room for its state."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    thawed = nn.Parameter(torch.ones(3000), requires_grad=False)
    optimizer = TellingAdamW([*net.parameters(), thawed], policy=policy(tmp_path))
    has_updated = []
    for step in range(5):
        thawed.requires_grad_(step >= 2)
        optimizer.zero_grad()
        Telling.happened.clear()
        inputs = torch.ones(2, 60, requires_grad=True)
        if step in (1, 3, 4):
            Telling.updated.clear()
            inputs.register_hook(wait_for_an_update)
        net(inputs).square().sum().backward()
        Telling.happened.append("backward is over")
        optimizer.step()
        happened = [what for what in Telling.happened if what != "read"]
        has_updated.append(happened.index("update") < happened.index("backward is over"))
    assert has_updated == [False, True, False, True, True]


def tell_of_waits(changed: threading.Condition) -> threading.Event:
    """Have a condition tell while somebody waits on it."""
    waiting, wait = threading.Event(), changed.wait

    def told(timeout: float | None = None) -> bool:
        waiting.set()
        try:
            return wait(timeout)
        finally:
            waiting.clear()

    changed.wait = told  # type: ignore[method-assign]
    return waiting


def test_a_step_finds_nothing_left_where_gradients_came_as_expected(tmp_path: Path) -> None:
    """Of eleven chunks seven hold the last four of six layers alone; the run then waits for the others."""
    torch.manual_seed(0)
    mine = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    theirs = copy.deepcopy(mine)
    optimizer = TellingAdamW(mine.parameters(), lr=1e-2, policy=policy(tmp_path))
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    waiting = tell_of_waits(optimizer._backward._changed)

    def wait_for_late_layers(_: Tensor) -> None:
        for _ in range(7):
            assert Telling.count.acquire(timeout=PATIENCE_SECONDS)
        assert waiting.wait(PATIENCE_SECONDS)

    for step in range(2):
        for net, one in ((mine, optimizer), (theirs, reference)):
            one.zero_grad()
            hidden = net[1](net[0](torch.ones(2, 60)))
            Telling.count = threading.Semaphore(0)
            if step and net is mine:
                hidden.register_hook(wait_for_late_layers)
            net[2:](hidden).square().sum().backward()
        if step:
            let_it_update(optimizer)
        else:
            optimizer.step()
        reference.step()
    assert_same_parameters(list(mine.parameters()), list(theirs.parameters()))
    optimizer.close()


def test_what_the_next_backward_needs_first_is_read_when_a_step_ends(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    optimizer = TieredAdamW(net.parameters(), policy=policy(tmp_path))
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 60)).square().sum().backward()
        optimizer.step()
    optimizer.store.wait()
    position = len(optimizer.bound()[0].members) - 1  # the last bias, whose gradient comes first
    chunk = optimizer.bound()[0].layout.spans_of[position][0][0].number
    assert optimizer.store.tier_of(chunk) == "cpu"


# -- what is refused --------------------------------------------------------------------------------------------


def fresh(folder: Path, steps: int = 0, make: Any = TieredAdamW, tiers: str = "cpu", **more: Any) -> tuple[Net, Any]:
    """A net and its optimizer after some steps: after the first one, updates follow backward."""
    net = Net()
    optimizer = make(groups_of(net), lr=1e-2, policy=policy(folder, tiers, **more))
    for step in range(steps):
        take_step(net, optimizer, step)
    return net, optimizer


def let_it_update(optimizer: Any) -> None:
    """Wait until the run beside backward has updated all it can."""
    optimizer._backward._open[0].wait_for_end()


def values_of(net: Net) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def clip(net: Net, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    optimizer.step()


def replace(net: Net, optimizer: Any) -> None:
    assert net.scale.grad is not None
    net.scale.grad = net.scale.grad.clone()
    optimizer.step()


def drop(net: Net, optimizer: Any) -> None:
    net.scale.grad = None
    optimizer.step()


def schedule(net: Net, optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] *= 0.5
    optimizer.step()


def scale(net: Net, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    net.phase.grad = None  # complex, which scalers refuse
    scaler.step(optimizer)


def backward_again(net: Net, optimizer: Any) -> None:
    net.scale.square().backward()


def accumulate_late(net: Net, optimizer: Any) -> None:
    with optimizer.accumulating():
        raise AssertionError


REFUSED: list[tuple[Callable[[Net, Any], None], str]] = [
    (clip, "changed or dropped between backward and step"),
    (replace, "changed or dropped between backward and step"),
    (drop, "changed or dropped between backward and step"),
    (schedule, "after step"),
    (scale, "GradScaler"),
    (backward_again, r"second backward.*optimizer\.accumulating\(\)"),
    (accumulate_late, r"accumulating\(\) after a backward"),
]


@pytest.mark.parametrize(("change", "story"), REFUSED)
@pytest.mark.parametrize("free", [False, long(True)])
def test_what_cannot_be_had_is_refused_at_the_first_step_before_anything_changes(
    change: Callable[[Net, Any], None], story: str, free: bool, tmp_path: Path
) -> None:
    net, optimizer = fresh(tmp_path, free_gradients=free)
    before = values_of(net)
    net(0).backward()
    with pytest.raises(RuntimeError, match=story):
        change(net, optimizer)
    assert_same_parameters(list(net.parameters()), before)
    assert not optimizer.state
    optimizer.zero_grad()
    optimizer.param_groups[1]["lr"] = 1e-2
    take_step(net, optimizer, 0)


@pytest.mark.parametrize(("change", "story"), REFUSED)
def test_what_cannot_be_had_breaks_a_later_step_off(
    change: Callable[[Net, Any], None], story: str, tmp_path: Path
) -> None:
    net, optimizer = fresh(tmp_path, steps=2)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    net.zero_grad()
    net(3).backward()
    let_it_update(optimizer)
    with pytest.raises(RuntimeError, match=story):
        change(net, optimizer)
    net(3).backward()
    with pytest.raises(FailedStepError, match="load_state_dict"):
        optimizer.step()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    take_step(net, optimizer, 3)
    assert float(optimizer.state[net.scale]["step"]) == 3


def test_clipping_is_noticed_after_nearly_all_gradients_have_gone(tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=3, free_gradients=True)
    optimizer.zero_grad()
    net(3).backward()
    let_it_update(optimizer)
    assert sum(parameter.grad is not None for parameter in net.parameters()) == 2  # one of each group
    with pytest.raises(RuntimeError, match="changed or dropped"):
        clip(net, optimizer)


def test_a_rule_with_norms_an_alternating_order_and_reduced_gradients_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyError, match="LAMB needs norms"):
        TieredLAMB(Net().parameters(), policy=policy(tmp_path))
    with pytest.raises(PolicyError, match="order: found 'alternating'; allowed: auto or fixed with update: backward"):
        fresh(tmp_path, order="alternating")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    net = nn.Linear(3, 3)
    optimizer = TieredAdamW(net.parameters(), policy=policy(tmp_path, "cpu"))
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        net(torch.ones(1, 3)).sum().backward()
    optimizer.close()


def test_a_reentrant_checkpoint_is_refused(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    optimizer = TieredAdamW(net.parameters(), policy=policy(tmp_path))
    hidden = torch.ones(1, 9, requires_grad=True)
    for layer in net:
        hidden = checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        hidden.sum().backward()
    optimizer.close()


# -- steps that do not come -------------------------------------------------------------------------------------


def test_an_iteration_that_has_updated_nothing_can_be_given_up(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    mine(7).backward()
    optimizer.zero_grad()
    mine(8).backward()
    mine.zero_grad()  # which the optimizer does not hear of
    for step in range(3):
        for net, one in ((mine, optimizer), (theirs, reference)):
            take_step(net, one, step)
    assert_same(mine, optimizer, theirs, reference)


class Broken(torch.autograd.Function):
    """Raises in backward, once something was updated."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Tensor:
        Telling.updated.wait(PATIENCE_SECONDS)
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_a_backward_that_failed_after_updates_is_told_and_a_load_goes_on(zero: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(60, 60) for _ in range(6)))
    optimizer = TellingAdamW(net.parameters(), policy=policy(tmp_path))

    def run_backward(inputs: Tensor) -> None:
        net(inputs).square().sum().backward()

    run_backward(torch.ones(2, 60))
    optimizer.step()
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    Telling.updated.clear()
    with pytest.raises(RuntimeError, match="out of memory"):
        run_backward(Broken.apply(torch.ones(2, 60, requires_grad=True)))
    net.zero_grad()
    told = optimizer.zero_grad if zero == "optimizer" else partial(run_backward, torch.ones(2, 60))
    with pytest.raises(FailedStepError, match=r"step\(\) was not called.*Load parameters"):
        told()
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    run_backward(torch.ones(2, 60))
    optimizer.step()
    assert all(float(state["step"]) == 2 for state in optimizer.state.values())


def test_a_load_gives_up_what_backward_has_begun(tmp_path: Path) -> None:
    (mine, optimizer), (theirs, reference) = both(TieredAdamW, tmp_path)
    for step in range(2):
        take_step(mine, optimizer, step)
        take_step(theirs, reference, step)
    saved = copy.deepcopy((mine.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    mine(5).backward()
    optimizer.load_state_dict(saved[1])  # first: until then what backward has begun may go on
    mine.load_state_dict(saved[0])
    for step in range(2, 4):
        take_step(mine, optimizer, step)
        take_step(theirs, reference, step)
    assert_same(mine, optimizer, theirs, reference)


def test_until_the_step_all_else_is_a_clear_error(tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=2)
    optimizer.zero_grad()
    net(2).backward()
    uses: Sequence[Callable[[], object]] = (
        optimizer.state_dict,
        lambda: optimizer.state[net.scale]["exp_avg"],
        lambda: optimizer.store,
        lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        lambda: copy.deepcopy(optimizer),
    )
    for use in uses:
        with pytest.raises(BusyStoreError, match=r"call step\(\) first"):
            use()
    optimizer.step()
    for use in uses:
        use()


# -- faults -----------------------------------------------------------------------------------------------------


def test_a_read_that_fails_in_backward_is_raised_by_the_step_and_a_load_goes_on(tmp_path: Path) -> None:
    engine = FaultyEngine(threads=2)

    class FaultyAdamW(TieredAdamW):
        parts = Parts(open_engine=lambda *_, **__: engine)

    (mine, optimizer), (theirs, reference) = both(FaultyAdamW, tmp_path)
    for step in range(2):
        take_step(mine, optimizer, step)
        take_step(theirs, reference, step)
    saved = copy.deepcopy((mine.state_dict(), optimizer.state_dict()))
    optimizer.zero_grad()
    engine.spoil(kind=Kind.READ)
    mine(2).backward()
    with pytest.raises(TransferError, match="cannot be read now"):
        optimizer.step()
    mine.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    take_step(mine, optimizer, 2)
    take_step(theirs, reference, 2)
    assert_same(mine, optimizer, theirs, reference)


class Failing(AdamWRule):
    """Fails when told."""

    fails: ClassVar[bool] = False

    def update(self, *arguments: Any, **more: Any) -> None:
        super().update(*arguments, **more)
        if self.fails:
            raise RuntimeError("broken")


class FailingAdamW(TieredAdamW):
    rule = Failing()


def test_an_update_that_fails_in_backward_is_raised_by_the_step_with_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = fresh(tmp_path, steps=2, make=FailingAdamW)
    optimizer.zero_grad()
    monkeypatch.setattr(Failing, "fails", True)
    net(2).backward()
    with pytest.raises(RuntimeError, match="broken") as raised:
        optimizer.step()
    assert "this step broke off" in raised.value.__notes__[0]
    monkeypatch.setattr(Failing, "fails", False)
    with pytest.raises(FailedStepError, match="broke off"):
        optimizer.step()


def backward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "tierstore backward"]


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_no_thread_and_no_hook_is_left_behind(how: str, tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=2)
    optimizer.zero_grad()
    net.last(torch.ones(2, 60)).sum().backward()  # some of what is expected never comes
    assert backward_threads()
    if how == "closed":
        optimizer.close()
        with pytest.raises(StoreClosedError):
            optimizer.step()
    else:
        watched = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert watched() is None
    assert not backward_threads()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in net.parameters())


def test_copies_of_models_and_optimizers_have_hooks_of_their_own(tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=2)
    alone = copy.deepcopy(net)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in alone.parameters())
    pickle.loads(pickle.dumps(net))
    other_net, other = copy.deepcopy((net, optimizer))
    for step in range(2, 5):
        take_step(net, optimizer, step)
        take_step(other_net, other, step)
    assert_same(net, optimizer, other_net, other)


def test_a_fork_does_not_wait_for_its_parents_thread(tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=2)
    optimizer.zero_grad()
    net(2).backward()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                optimizer.step()
            except ForkedStoreError:
                code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.step()
    assert float(optimizer.state[net.scale]["step"]) == 3


@pytest.fixture
def _interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_in_backward_is_told_like_any_iteration_without_a_step(tmp_path: Path) -> None:
    net, optimizer = fresh(tmp_path, steps=2)

    def interrupt(_: Tensor) -> None:
        let_it_update(optimizer)
        signal.raise_signal(signal.SIGINT)

    optimizer.zero_grad()
    handle = net.first.bias.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net(2).backward()
    handle.remove()
    with pytest.raises(FailedStepError, match=r"step\(\) was not called"):
        optimizer.zero_grad()


@pytest.mark.usefixtures("_interruptible")
def test_ctrl_c_while_a_run_begins_leaves_none_that_nobody_ends(tmp_path: Path) -> None:
    """Python waits for a thread that starts, which is where an interrupt was likely to be raised: the run went on, and
    since nobody knew of it all calls were refused from then on, as another thread was inside.
    """
    (net, optimizer), (other, reference) = (fresh(tmp_path, steps=2) for _ in range(2))
    saved, weights = optimizer.state_dict(), copy.deepcopy(net.state_dict())

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is threading.Thread.start.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    optimizer.zero_grad()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            net(2).backward()
    finally:
        sys.setprofile(None)
    (run,) = optimizer._backward._open
    with contextlib.suppress(FailedStepError):  # if something was updated already
        optimizer.zero_grad()
    assert not run.thread.is_alive()
    net.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for step in range(2, 5):
        take_step(net, optimizer, step)
        take_step(other, reference, step)
    assert_same(net, optimizer, other, reference)


def test_one_backward_never_updates_by_two_optimizers(swap_folder: Path) -> None:
    """A notebook's cell that is run again makes a new optimizer while the old one still lives, and still hears."""
    policy = {**small_policy(swap_folder), "update": "backward"}
    layer, inputs = nn.Linear(64, 64), torch.ones(2, 64)

    def train(optimizer: TieredAdamW) -> None:
        for _ in range(2):
            layer(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    old = TieredAdamW(layer.parameters(), policy=policy)
    train(old)
    new = TieredAdamW(layer.parameters(), policy=policy)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"two optimizers .* shape \(64.*close\(\) of the one"):
        train(new)
    assert torch.equal(layer.weight, before)
    new.zero_grad()
    with old.accumulating():
        train(new)
    old.close()
    train(new)
    scheduler = torch.optim.lr_scheduler.ConstantLR(new)  # which makes a cycle, and is not called
    new = TieredAdamW(layer.parameters(), policy=policy)
    del scheduler
    train(new)
    new.close()


def test_an_old_optimizer_that_hears_another_ones_backward_says_to_close_it(swap_folder: Path) -> None:
    policy = {**small_policy(swap_folder), "update": "backward"}
    layer, inputs = nn.Linear(64, 64), torch.ones(2, 64)
    old, new = TieredAdamW(layer.parameters(), policy=policy), torch.optim.AdamW(layer.parameters())
    for optimizer in (old, old, new):
        layer(inputs).square().mean().backward()
        if optimizer is new:
            let_it_update(old)  # before it finds the gradients gone, and updates nothing
        optimizer.step()
        optimizer.zero_grad()
    loss = layer(inputs).square().mean()
    with pytest.raises(FailedStepError, match=r"if another optimizer is used now, close\(\) this one"):
        loss.backward()
    old.close()
