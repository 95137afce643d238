"""A small training run as a user writes one: it keeps itself now and then, and goes on where it was kept.

Resumed means resumed: dropout's random numbers and the place in the data are kept too. The run says on a board, which
outlives it, what it is doing; and may be told to do something (to die, say) at some call of some phase.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from tests.crash import keeping
from tierstore.checkpoint.writer import Writer
from tierstore.optimizer import TieredAdamW

STEPS = 12
KEPT_EVERY = 3
WIDTH = 48
KIB = 1 << 10
CHUNK = 16 * KIB

PHASES = ("between", "binding", "step", "checkpoint", "over")
"""What a run can be doing; `binding` includes taking up a checkpoint, `between` is the model's own work."""

BESIDE = "beside"
"""What it is doing too while a checkpoint is written beside it, in `between` and `step`."""


@dataclass(frozen=True)
class Mode:
    """A way to train; in all of them most of the state is in swap files, in 20 chunks or so."""

    update: str = "step"
    dtype: torch.dtype = torch.float32
    tiers: tuple[str, ...] = ("cpu", "nvme")
    paths: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    waits: bool = True  # for a checkpoint to be written

    def policy(self, folder: Path) -> dict[str, Any]:
        """The policy, with swap folders made in a folder."""
        paths = [folder / f"swap-{number}" for number in range(self.paths)]
        for path in paths:
            path.mkdir(exist_ok=True)
        tiers: dict[str, Any] = {"cpu": {"capacity": 4 * CHUNK}, "nvme": {"paths": list(map(str, paths))}}
        if "gpu" in self.tiers:
            tiers["gpu"] = {"device": "cpu", "capacity": 4 * CHUNK}
        return {"chunk_size": CHUNK, "update": self.update, "tiers": tiers, **self.options}


MODES = {
    "step": Mode(),
    "backward": Mode(update="backward"),
    "split": Mode(dtype=torch.bfloat16, options={"state": {"master": "split"}}),
    "several paths": Mode(paths=3, waits=False),
    "three tiers": Mode(tiers=("gpu", "cpu", "nvme")),
    "split in backward": Mode(
        update="backward",
        dtype=torch.bfloat16,
        waits=False,
        paths=2,
        options={"state": {"master": "split"}, "free_gradients": True},
    ),
}


class Board:
    """What a run is doing, in a file that is still there when the run no longer is."""

    def __init__(self, path: Path) -> None:
        with open(path, "ab+") as file:
            os.ftruncate(file.fileno(), 8)
            self._bytes = mmap.mmap(file.fileno(), 8)

    @property
    def phase(self) -> str:
        """The phase the run is, or was, in."""
        return PHASES[self._bytes[0]]

    @phase.setter
    def phase(self, name: str) -> None:
        self._bytes[0] = PHASES.index(name)

    @property
    def doing(self) -> str:
        """The phase, or that a checkpoint is written beside it."""
        return BESIDE if self.is_writing and self.phase in ("between", "step") else self.phase

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is, or was, begun and neither there nor given up."""
        return bool(self._bytes[2])

    @is_writing.setter
    def is_writing(self, is_writing: bool) -> None:
        self._bytes[2] = is_writing

    @property
    def kept(self) -> int:
        """The last step of which a checkpoint was written for certain."""
        return self._bytes[1]

    @kept.setter
    def kept(self, step: int) -> None:
        self._bytes[1] = step


@dataclass(frozen=True)
class Appointment:
    """At its `nth` call of a phase, or of a step beside which a checkpoint is written, the run gets a signal."""

    phase: str
    nth: int
    number: int = signal.SIGKILL


class Watch:
    """Counts the calls that the main thread makes in each phase, Python's and C's, and keeps an appointment."""

    def __init__(self, board: Board, appointment: Appointment | None) -> None:
        self.board = board
        self.calls = dict.fromkeys((*PHASES, BESIDE), 0)
        self.appointment = appointment
        self.run: Any = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say that the run is in a phase."""
        before, self.board.phase = self.board.phase, name
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.board.phase = before

    def _count(self, frame: FrameType, event: str, what: object) -> None:
        for name in {self.board.phase, self.board.doing}:
            self.calls[name] += 1
            wanted = self.appointment
            if wanted is not None and wanted.phase == name and self.calls[name] == wanted.nth:
                self.appointment = None
                os.kill(os.getpid(), wanted.number)


class Run:
    """One life of a training run in a folder."""

    def __init__(self, folder: Path, mode: Mode, watch: Watch) -> None:
        self.folder, self.watch, self.mode = folder, watch, mode
        watch.run = self
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, 4 * WIDTH), nn.GELU()]
        self.model = nn.Sequential(*layers, nn.Linear(4 * WIDTH, WIDTH)).to(mode.dtype)
        self.position = 0
        with watch.phase("binding"):
            policy = mode.policy(folder)
            self.optimizer = _telling(watch.board)(self.model.named_parameters(), lr=1e-3, policy=policy)
            extra = keeping.load(folder, self.model, self.optimizer)
            if extra is not None:
                self.position = int(extra["position"])
                torch.set_rng_state(extra["random"])
            assert self.position >= watch.board.kept, "a checkpoint that was written is gone"
            self.optimizer.store.check()

    def go_on(self, *, to: int = STEPS, after_step: Callable[[Run], None] = lambda run: None) -> None:
        """Train up to a step."""
        while self.position < to:
            self.optimizer.zero_grad()
            loss = self._loss()
            in_step = self.watch.phase("step")
            with in_step if self.mode.update == "backward" else contextlib.nullcontext():
                loss.backward()
                with contextlib.nullcontext() if self.mode.update == "backward" else in_step:
                    self.optimizer.step()
            self.position += 1
            after_step(self)
            if self.position % KEPT_EVERY == 0:
                self.keep()

    def keep(self) -> None:
        """Write a checkpoint."""
        with self.watch.phase("checkpoint"):
            extra = {"position": self.position, "random": torch.get_rng_state()}
            keeping.save(self.folder, self.model, self.optimizer, extra, wait=self.mode.waits)
        if self.mode.waits:
            self.watch.board.kept = self.position

    def _loss(self) -> Tensor:
        """Of the batch at the present place in the data."""
        generator = torch.Generator().manual_seed(1000 + self.position)
        inputs = torch.randn(8, WIDTH, generator=generator).to(self.mode.dtype)
        loss: Tensor = (self.model(inputs) - inputs).square().mean()
        return loss

    def outcome(self) -> dict[str, Any]:
        """All that training has made, to be compared."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}


def _telling(board: Board) -> type[TieredAdamW]:
    """An optimizer whose checkpoints are on the board from the first byte until they are there or given up."""

    class TellingWriter(Writer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            board.is_writing = True
            super().__init__(*arguments, **options)

        def close(self) -> None:
            super().close()
            board.is_writing = False

    return type("Telling", (TieredAdamW,), {"open_writer": TellingWriter})


def live(folder: Path, mode: str, appointment: Appointment | None) -> dict[str, int]:
    """Train to the end, from the newest checkpoint if there is one; return how many calls each phase has made."""
    watch = Watch(Board(folder / "board"), appointment)
    watch.board.phase, watch.board.is_writing = "between", False
    run = Run(folder, MODES[mode], watch)
    run.go_on()
    torch.save(run.outcome(), folder / "outcome")
    run.optimizer.close()
    watch.board.phase = "over"
    return watch.calls
