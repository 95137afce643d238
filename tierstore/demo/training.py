"""How the model is trained, whichever optimizer updates it: the demo's own and the one it is compared with.

What a training does is decided by its course and the model it is given: batches come from a generator of their own, and
each part of a step is over before the clock is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import LambdaLR

from tierstore.demo.model import ByteTransformer
from tierstore.device import wait_for_all_work

WARMUP_STEPS = 10
LAST_RATE = 0.1
"""Of the full learning rate, in the last step; the way there is half a cosine."""
HELDOUT_WINDOWS = 64
"""At most so many windows, evenly spread, are looked at to know the held-out loss."""


@dataclass(frozen=True, slots=True)
class Course:
    """What two trainings have in common when they are to be compared."""

    steps: int
    batch: int
    context: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: its loss in nats per byte, before the update, and where the time went."""

    loss: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds


def train(
    model: ByteTransformer, optimizer: torch.optim.Optimizer, text: Tensor, course: Course
) -> Iterator[StepResult]:
    """Train step by step; stop asking to stop. `text` is uint8 on the CPU, longer than the context."""
    device = next(model.parameters()).device
    chance = torch.Generator().manual_seed(course.seed)
    schedule = LambdaLR(optimizer, lambda step: _rate_at(step, course.steps))
    for _ in range(course.steps):
        began = time.perf_counter()
        loss = _loss(model, _batch(text, course, chance).to(device))
        value = loss.item()
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        wait_for_all_work(device)
        backward = time.perf_counter()
        optimizer.step()
        wait_for_all_work(device)
        updated = time.perf_counter()
        optimizer.zero_grad()
        schedule.step()
        yield StepResult(value, forward - began, backward - forward, updated - backward)


def heldout_losses(model: ByteTransformer, text: Tensor, *, batch: int, context: int) -> Iterator[float]:
    """The loss in nats per byte over more and more of a text that was not trained on; the last is over all of it."""
    device = next(model.parameters()).device
    windows = (len(text) - 1) // context
    count = min(HELDOUT_WINDOWS, windows)
    starts = [number * windows // count * context for number in range(count)]
    total = 0.0
    for first in range(0, count, batch):
        chosen = starts[first : first + batch]
        with torch.no_grad():
            total += _loss(model, _windows(text, chosen, context).to(device)).item() * len(chosen)
        yield total / (first + len(chosen))


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make two trainings on an accelerator do the same arithmetic; on the CPU they do so anyway."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for to be deterministic
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the backward pass of the others adds in any order
            yield
    finally:
        torch.use_deterministic_algorithms(was)


def _rate_at(step: int, steps: int) -> float:
    """The share of the full learning rate in a step, counted from 0."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)


def _batch(text: Tensor, course: Course, chance: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - course.context, (course.batch,), generator=chance)
    return _windows(text, starts.tolist(), course.context)


def _windows(text: Tensor, starts: list[int], context: int) -> Tensor:
    """Runs of `context` bytes and the one after, as int64."""
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def _loss(model: ByteTransformer, windows: Tensor) -> Tensor:
    logits: Tensor = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
