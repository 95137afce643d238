"""What a peer must offer, and the peers that need no more than torch: those that keep all state in memory, and tierstore.

A system is made in its own process from a `Job`; its constructor may take as long as it likes. A
system says itself what it holds in host memory for the optimizer; the runner measures beside it what it really takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY, Work
from tierstore import TieredAdamW


class AbsentError(Exception):
    """The system cannot be had here; the message says why and what to install."""


@dataclass(frozen=True, slots=True)
class Job:
    """One system's orders: `budget_bytes` of host memory for the optimizer, `folder` for whatever it writes."""

    system: str
    work: Work
    budget_bytes: int
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)


class System(Protocol):
    """The same optimizer step, done by one peer."""

    promise: ClassVar[str]
    """How near its weights come to the reference: `bits`, `rounding` (another order of the same float32 arithmetic)
    or `other` (it keeps state of lower precision, so the work is not quite the same)."""
    writes_on: ClassVar[bool]
    """Whether a step returns before its last bytes are written."""

    def __init__(self, job: Job) -> None: ...

    @staticmethod
    def load(job: Job) -> None:
        """Import what is needed, before memory is measured. Raises AbsentError."""

    def backward(self) -> None:
        """Bring the gradients to where the step takes them from; not measured as time of the step."""

    def step(self) -> None:
        """Update every parameter."""

    def settle(self) -> None:
        """After the clock has stopped: write what the kernel would write later, during another system's turn."""

    def weights(self) -> Iterable[Tensor]:
        """Give every layer's weight, in order."""

    def described(self) -> dict[str, Any]:
        """Tell the configuration, and `optimizer_bytes` of host memory that it implies."""

    def close(self) -> None:
        """Give back everything the system gives back."""


class InMemory:
    """torch.optim.AdamW on float32 masters, all state in memory: gradients are cast, updated, masters cast back.

    With float32 parameters there is no master and nothing to cast. `implementation` is fused or foreach.
    """

    promise = "bits"
    writes_on = False

    @staticmethod
    def load(job: Job) -> None:
        """Do nothing: torch is there."""

    def __init__(self, job: Job) -> None:
        self._work = job.work
        self._implementation = job.options["implementation"]
        self.promise = "bits" if self._implementation == "fused" else "rounding"
        self._parameters = made_parameters(job.work)
        self._masters = [
            torch.nn.Parameter(p.detach().float()) if job.work.has_master else p for p in self._parameters
        ]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **{self._implementation: True}
        )

    def backward(self) -> None:
        """Do nothing: gradients stay as they are."""

    def step(self) -> None:
        """Cast all gradients, update all masters, cast all back, as mixed-precision scripts do."""
        if not self._work.has_master:
            self._optimizer.step()
            return
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.detach().copy_(master.detach())
            master.grad = None

    def settle(self) -> None:
        """Do nothing: no page of a file is dirty."""

    def weights(self) -> Iterable[Tensor]:
        """Give the parameters."""
        return self._parameters

    def described(self) -> dict[str, Any]:
        """Tell the formula; the state lies in memory whole."""
        held = self._work.state_bytes + (4 * self._work.numel if self._work.has_master else 0)
        return {"implementation": self._implementation, "optimizer_bytes": held if self._work.device == "cpu" else 0}

    def close(self) -> None:
        """Do nothing: there are no files."""


class Tierstore:
    """TieredAdamW with a cpu tier of the budget and the rest in swap files."""

    promise = "bits"
    writes_on = True

    @staticmethod
    def load(job: Job) -> None:
        """Do nothing: tierstore is there."""

    def __init__(self, job: Job) -> None:
        self._parameters = made_parameters(job.work)
        self._policy: dict[str, Any] = {
            "tiers": {"cpu": {"capacity": job.budget_bytes}, "nvme": {"paths": [str(job.folder)]}},
            **job.options.get("policy", {}),
        }
        self._optimizer = TieredAdamW(
            self._parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, policy=self._policy
        )

    def backward(self) -> None:
        """Do nothing: gradients stay as they are."""

    def step(self) -> None:
        """Step; write-backs go on and are the next step's to wait for."""
        self._optimizer.step()

    def settle(self) -> None:
        """Do nothing: no page of a file is dirty."""

    def weights(self) -> Iterable[Tensor]:
        """Give the parameters."""
        return self._parameters

    def described(self) -> dict[str, Any]:
        """Tell the policy and what the store says of itself."""
        stats = self._optimizer.store.stats().to_dict()
        held = stats["tiers"]["cpu"]["capacity_bytes"] if "cpu" in stats["tiers"] else 0
        return {"policy": self._policy, "optimizer_bytes": held, "stats": stats}

    def close(self) -> None:
        """Close the store: its files go with it."""
        self._optimizer.close()


def made_parameters(work: Work) -> list[torch.nn.Parameter]:
    """Make every layer's parameter, its gradient in place."""
    gradients, made = work.gradients(), []
    for layer in range(work.layers):
        parameter = torch.nn.Parameter(work.weight(layer))
        parameter.grad = gradients.of(layer)
        made.append(parameter)
    return made
