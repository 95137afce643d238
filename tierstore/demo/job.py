"""Runs the demo from start to end: prepare, train, look at held-out text, train again to compare, sum up.

Whatever happens, the optimizer is closed, and with it the swap files are gone. Ctrl-C is heard between two steps.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from torch import Tensor

from tierstore.demo.interrupt import Interrupt
from tierstore.demo.meter import Meter
from tierstore.demo.model import ByteTransformer, Size, make_model
from tierstore.demo.options import DIFFERENT, DONE, DemoError, Options
from tierstore.demo.policy import choose_policy
from tierstore.demo.result import Result, Verdict
from tierstore.demo.summary import print_header, print_summary
from tierstore.demo.text import Text, read_text
from tierstore.demo.training import Course, heldout_losses, repeatable, train
from tierstore.demo.view import View, open_view
from tierstore.device import present_accelerator
from tierstore.optimizer import TieredAdamW
from tierstore.output import INTERRUPTED, STDOUT, check_target, write_json

_STATE_BYTES = 8
"""Of a float32 parameter: two float32 moments."""


def run(options: Options) -> int:
    """Run it, print what it shows, and return the exit status. Raises TierstoreError for what cannot be carried out."""
    tables = sys.stderr if options.json == STDOUT else sys.stdout
    console = Console(file=tables, markup=False, emoji=False, highlight=False)
    check_target(options.json)
    with Interrupt() as interrupt, _notes_on(console):
        text = read_text(options.text, context=options.context)
        result = _Job(options, text, _device(options.device), console, interrupt).run()
        print_summary(console, result)
        write_json(options.json, result.to_dict())
    if result.is_interrupted:
        return INTERRUPTED
    return DONE if result.verdict is None or result.verdict.is_equal else DIFFERENT


class _Job:
    """One run; `interrupt` ends it after the step in hand."""

    def __init__(
        self, options: Options, text: Text, device: torch.device, console: Console, interrupt: Interrupt
    ) -> None:
        self._options = options
        self._text = text
        self._device = device
        self._console = console
        self._interrupt = interrupt
        self._size = Size(options.width, options.layers, options.context)
        self._course = Course(options.steps, options.batch, options.context, options.learning_rate, options.seed)
        self._training = _tensor(text.training)

    def run(self) -> Result:
        """Train, and compare if that is asked for."""
        began = time.perf_counter()
        meter, heldout, verdict = self._meter(), None, None
        with repeatable(self._device):
            model = self._model()
            parameters = sum(parameter.numel() for parameter in model.parameters())
            state_bytes = _STATE_BYTES * parameters
            chosen = choose_policy(self._options, state_bytes=state_bytes, on_accelerator=self._device.type != "cpu")
            rate = self._options.learning_rate
            with TieredAdamW(model.named_parameters(), lr=rate, policy=chosen.policy) as optimizer:
                print_header(
                    self._console,
                    options=self._options,
                    text=self._text,
                    chosen=chosen,
                    stats=optimizer.store.stats(),  # room is reserved from here on
                    parameters=parameters,
                    state_bytes=state_bytes,
                )
                with open_view(self._console, plain=self._options.plain) as view:
                    self._train_tiered(model, optimizer, meter, view)
                    heldout = self._look_at_heldout(model, view)
                    if self._options.verify and not self._interrupt.is_heard:
                        verdict = self._compare(model, meter.losses, view)
        return Result(
            options=self._options,
            text=self._text,
            chosen=chosen,
            device=str(self._device),
            torch_version=torch.__version__,
            threads=torch.get_num_threads(),
            parameters=parameters,
            state_bytes=state_bytes,
            meter=meter,
            heldout_loss=heldout,
            verdict=verdict,
            is_interrupted=self._interrupt.is_heard,
            total_seconds=time.perf_counter() - began,
        )

    def _model(self) -> ByteTransformer:
        return make_model(self._size, seed=self._options.seed, device=self._device)

    def _meter(self) -> Meter:
        return Meter(steps=self._course.steps, tokens=self._course.batch * self._course.context)

    def _train_tiered(self, model: ByteTransformer, optimizer: TieredAdamW, meter: Meter, view: View) -> None:
        view.begin("training with TieredAdamW")
        for result in train(model, optimizer, self._training, self._course):
            view.show(meter.record(result, optimizer.store.stats()))
            if self._interrupt.is_heard:
                break

    def _look_at_heldout(self, model: ByteTransformer, view: View) -> float | None:
        """The held-out loss; None if there was no time for it."""
        if self._interrupt.is_heard:
            return None
        view.begin("looking at held-out text")
        loss = None
        for loss in heldout_losses(  # noqa: B007
            model, _tensor(self._text.heldout), batch=self._course.batch, context=self._course.context
        ):
            if self._interrupt.is_heard:
                return None
        return loss

    def _compare(self, model: ByteTransformer, losses: list[float], view: View) -> Verdict | None:
        """Train the same with torch's own optimizer; None if there was no time for it."""
        view.begin("training again with torch.optim.AdamW(fused=True)")
        reference, meter = self._model(), self._meter()
        optimizer = torch.optim.AdamW(reference.named_parameters(), lr=self._options.learning_rate, fused=True)
        for result in train(reference, optimizer, self._training, self._course):
            progress, first = meter.record(result, None), _first_different(losses, meter.losses)
            view.show(progress, "losses equal so far" if first is None else f"losses differ from step {first} on")
            if self._interrupt.is_heard:
                return None
        pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
        return Verdict(
            weights=sum(ours.numel() for ours, _ in pairs),
            different_weights=sum(_different(ours.detach(), theirs.detach()) for ours, theirs in pairs),
            first_step=_first_different(losses, meter.losses),
            reference_seconds=meter.seconds,
        )


def _different(ours: Tensor, theirs: Tensor) -> int:
    """How many elements differ in any bit."""
    return int((ours.view(torch.int32) != theirs.view(torch.int32)).sum())


def _first_different(ours: list[float], theirs: list[float]) -> int | None:
    """The first step of both, counted from 1, whose losses differ; two that are not a number do not."""
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if mine != other and (mine == mine or other == other):
            return step
    return None


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _device(wanted: str) -> torch.device:
    """The device to train on; `auto` is an accelerator if pinned memory and streams work there, else the CPU."""
    present = present_accelerator()
    if wanted == "auto":
        return present if present is not None and present.type == "cuda" else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise DemoError(f"--device {wanted}: torch knows no such device; try cpu or cuda") from error
    if device.type != "cpu" and (present is None or present.type != device.type):
        here = "no accelerator" if present is None else str(present)
        raise DemoError(f"--device {wanted}: this machine has {here}; try --device cpu")
    return device


@contextmanager
def _notes_on(console: Console) -> Iterator[None]:
    """Print warnings as notes of one line, not as lines of code."""

    def note(message: Warning | str, *_: object, **__: object) -> None:
        console.print(f"note: {message}", style="yellow", soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = note
        yield
