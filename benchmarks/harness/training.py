"""The work of step benchmarks: one model, one batch, and contenders that train copies of it with different optimizers.

Every contender starts from the same weights and sees the same batch, so that those with the same arithmetic end with
the same bits, which is what is verified. A turn is one whole iteration (forward, backward, step) and then steps back to
back with the same gradients: the first says how a step lies among the rest, the others what it costs when nothing
hides its write-backs. Both begin behind a step of the same kind, so what is still under way then is part of both.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.harness.pattern import VerificationError
from tierstore import TieredAdamW
from tierstore.device import present_accelerator, wait_for_all_work
from tierstore.stats import Stats, StepStats

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Steps(Protocol):
    """What a contender's optimizer must be able to do."""

    def step(self) -> Any:
        """Update the parameters from their gradients."""


class Chain(nn.Module):
    """Square linear layers with residuals: as many parameters as asked for and no more arithmetic than that needs."""

    def __init__(self, layers: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers))
        self._width = width

    def forward(self, x: Tensor) -> Tensor:
        """Answer the loss of a batch of rows of `width`."""
        for layer in self.layers:
            x = nn.functional.rms_norm(x + layer(x), (self._width,))
        return x.square().sum()


@dataclass(frozen=True)
class Work:
    """What is trained. `layers` layers of `width` x `width` parameters; rows of a batch; where."""

    layers: int
    width: int
    rows: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: present_accelerator() or torch.device("cpu"))

    @property
    def parameters(self) -> int:
        """How many there are."""
        return self.layers * self.width**2

    def make(self) -> tuple[Chain, Tensor]:
        """The model and the batch, the same every time."""
        torch.manual_seed(7)
        model = Chain(self.layers, self.width, self.dtype)
        batch = torch.randn(self.rows, self.width, dtype=self.dtype)
        return model.to(self.device), batch.to(self.device)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took: seconds of the whole iteration, and of one step of those back to back, with its traffic."""

    forward: float
    backward: float
    in_iteration: float  # the step of the whole iteration
    step: float  # one of those back to back; what follows is of one of them, too
    update: float
    read_wait: float
    write_wait: float
    cpu_seconds: float
    moved: Mapping[str, float]  # bytes by route
    bound: str  # what the store says the steps could not be faster than


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one whole iteration took, in seconds, and what it moved from and to files; a mean of those in a row."""

    forward: float
    backward: float
    step: float
    bytes: float

    @property
    def whole(self) -> float:
        """From its first forward to the end of its step."""
        return self.forward + self.backward + self.step


class Contender:
    """A copy of the model, and the optimizer that trains it."""

    def __init__(self, work: Work, model: Chain, batch: Tensor, optimizer_of: Callable[[Chain], Steps]) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer_of(self.model)
        self.steps = 0
        self._work = work
        self._batch = batch

    @property
    def tiered(self) -> TieredAdamW | None:
        """The optimizer, if it is tierstore's."""
        return self.optimizer if isinstance(self.optimizer, TieredAdamW) else None

    def turn(self, back_to_back: int) -> Turn:
        """Train one iteration and so many steps more."""
        forward, backward, in_iteration = self._train()
        began, before, cpu = self._now(), self._stats(), time.process_time()
        for _ in range(back_to_back):
            self.step()
        burst = self._now() - began
        cpu = time.process_time() - cpu
        after = self._stats()
        step = _difference(before.step, after.step) if before and after else None
        return Turn(
            forward,
            backward,
            in_iteration,
            burst / back_to_back,
            step.update_seconds / back_to_back if step else burst / back_to_back,
            step.read_wait_seconds / back_to_back if step else 0.0,
            step.write_wait_seconds / back_to_back if step else 0.0,
            cpu / back_to_back,
            _moved(before, after, back_to_back),
            step.bound if step else "",
        )

    def iterate(self, count: int) -> Iteration:
        """Train so many whole iterations, one after another."""
        before = self._stats()
        sums = [sum(part) for part in zip(*(self._train() for _ in range(count)), strict=True)]
        moved = sum(nbytes for route, nbytes in _moved(before, self._stats(), count).items() if "nvme" in route)
        forward, backward, step = (sum_ / count for sum_ in sums)
        return Iteration(forward, backward, step, moved)

    def _train(self) -> tuple[float, float, float]:
        """Train one iteration; the seconds of forward, backward and step."""
        self.model.zero_grad()
        marks = [self._now()]
        loss = self.model(self._batch)
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        self.step()
        marks.append(self._now())
        forward, backward, step = (end - begin for begin, end in itertools.pairwise(marks))
        return forward, backward, step

    def step(self) -> None:
        """One step with the gradients there are."""
        self.optimizer.step()
        self.steps += 1

    def close(self) -> None:
        """Give back what the optimizer holds."""
        if self.tiered is not None:
            self.tiered.close()

    def _stats(self) -> Stats | None:
        return self.tiered.store.stats() if self.tiered is not None else None

    def _now(self) -> float:
        wait_for_all_work(self._work.device)
        return time.perf_counter()


class HandMaster:
    """Mixed precision by hand: float32 masters in torch's fused AdamW, cast to the parameters after each step."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self._parameters = list(parameters)
        self._masters = [parameter.detach().float() for parameter in self._parameters]
        for master in self._masters:
            master.grad = torch.empty_like(master)
        self._optimizer = torch.optim.AdamW(self._masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Cast the gradients, step, cast the parameters."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert master.grad is not None and parameter.grad is not None
            master.grad.copy_(parameter.grad)
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)


def torch_fused(model: nn.Module, lr: float) -> Steps:
    """torch's fused AdamW, with masters by hand where precision is low: the arithmetic that tierstore has."""
    is_low = next(model.parameters()).dtype is not torch.float32
    return HandMaster(model.parameters(), lr) if is_low else torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def verify_equal(contenders: Mapping[str, Contender]) -> int:
    """Answer the bytes of parameters that were compared, all with the first contender's. Raises VerificationError."""
    (first, reference), *others = contenders.items()
    verified = 0
    for name, contender in others:
        if contender.steps != reference.steps:
            raise VerificationError(f"{name} took {contender.steps} steps, {first} took {reference.steps}")
        verified += verify_bits(f"{name} beside {first}", contender.model.parameters(), reference.model.parameters())
    return verified


def verify_bits(what: str, found: Iterable[Tensor], expected: Iterable[Tensor]) -> int:
    """Answer the bytes that were compared, as bits: NaN is equal to itself. Raises VerificationError."""
    kinds = {2: torch.int16, 4: torch.int32}
    verified = 0
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        kind = kinds[one.element_size()]
        if not torch.equal(one.detach().view(kind), other.detach().view(kind)):
            raise VerificationError(f"{what}: parameter {number} has other bits")
        verified += one.numel() * one.element_size()
    return verified


def _difference(before: StepStats, after: StepStats) -> StepStats:
    """What the steps in between add to the sums."""
    sums = [each.name for each in fields(after) if not isinstance(getattr(after, each.name), bool)]
    return replace(after, **{name: getattr(after, name) - getattr(before, name) for name in sums})


def _moved(before: Stats | None, after: Stats | None, steps: int) -> dict[str, float]:
    if before is None or after is None:
        return {}
    already = {name: route.bytes for name, route in before.routes.items()}
    return {name: (route.bytes - already.get(name, 0)) / steps for name, route in after.routes.items()}
