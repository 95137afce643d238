"""What a peer must offer; those that keep all state in memory, and tierstore.

A system is made in its own process from a `Job`; its constructor may take as long as it likes. A
system says itself what it holds in host memory for the optimizer; the runner measures what it really takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY, Gradients, Work, zero_with_gradient
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


class System:
    """The same optimizer step, done by one peer; what most peers have nothing to do for is done here, by nothing."""

    promise: str = "bits"
    """How near its weights come to the reference: `bits`, `rounding` (another order of the same float32 arithmetic)
    or `other` (it keeps state of lower precision, so the work is not quite the same)."""
    writes_on: bool = False
    """Whether a step returns before its last bytes are written."""
    needs_backward: bool = False
    """Whether gradients reach it by a backward alone, so that there is no step without one."""

    def __init__(self, job: Job) -> None:
        self.work = job.work
        self.gradients = job.work.gradients()
        self.parameters: list[torch.nn.Parameter] = []

    @classmethod
    def load(cls, job: Job) -> None:
        """Import what is needed, before memory is measured. Raises AbsentError."""

    def backward(self) -> None:
        """Run a backward, which makes the same gradients anew; not measured as time of the step."""
        for layer, parameter in enumerate(self.parameters):
            parameter.grad = None
            zero_with_gradient(parameter, self.gradients, layer).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Update every parameter."""
        raise NotImplementedError

    def settle(self) -> None:
        """After the clock has stopped: write what the kernel would write later, during another system's turn."""

    def weights(self) -> Iterable[Tensor]:
        """Give every layer's weight, in order."""
        return self.parameters

    def described(self) -> dict[str, Any]:
        """Tell the configuration, and `optimizer_bytes` of host memory that it implies."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back everything the system gives back."""


class WithTorchsOptimizer(System):
    """One that makes an instance of torch's base class of optimizers."""

    @classmethod
    def load(cls, job: Job) -> None:
        """Let torch import its compiler, as it does with the first optimizer."""
        torch.optim.AdamW([torch.zeros(1)], fused=True)


class InMemory(WithTorchsOptimizer):
    """torch.optim.AdamW on float32 masters, all state in memory: gradients are cast, updated, masters cast back.

    With float32 parameters there is no master and nothing to cast. `implementation` is fused or foreach.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._implementation = job.options["implementation"]
        self.promise = "bits" if self._implementation == "fused" else "rounding"
        self.parameters = made_parameters(job.work, self.gradients)
        self._masters = [torch.nn.Parameter(p.detach().float()) if job.work.has_master else p for p in self.parameters]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **{self._implementation: True}
        )

    def step(self) -> None:
        """Cast all gradients, update all masters, cast all back, as mixed-precision scripts do."""
        if not self.work.has_master:
            self._optimizer.step()
            return
        for master, parameter in zip(self._masters, self.parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        self._optimizer.step()
        for master, parameter in zip(self._masters, self.parameters, strict=True):
            parameter.detach().copy_(master.detach())
            master.grad = None

    def described(self) -> dict[str, Any]:
        """Tell the formula; the state lies in memory whole."""
        held = self.work.state_bytes + (4 * self.work.numel if self.work.has_master else 0)
        return {"implementation": self._implementation, "optimizer_bytes": held if self.work.device == "cpu" else 0}


class Tierstore(WithTorchsOptimizer):
    """TieredAdamW with a cpu tier of the budget and the rest in swap files."""

    writes_on = True

    @classmethod
    def load(cls, job: Job) -> None:
        """Refuse a budget of nothing. Raises AbsentError."""
        if not job.budget_bytes:
            raise AbsentError("its memory is to be what another row takes, and that is not here")
        super().load(job)

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.parameters = made_parameters(job.work, self.gradients)
        self._policy: dict[str, Any] = {
            "tiers": {
                **({"gpu": {}} if job.work.device != "cpu" else {}),
                "cpu": {"capacity": job.budget_bytes},
                "nvme": {"paths": [str(job.folder)]},
            }
        }
        self._optimizer = TieredAdamW(
            self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, policy=self._policy
        )

    def step(self) -> None:
        """Step; write-backs go on and are the next step's to wait for."""
        self._optimizer.step()

    def described(self) -> dict[str, Any]:
        """Tell the policy and what the store says of itself."""
        stats = self._optimizer.store.stats().to_dict()
        held = stats["tiers"]["cpu"]["capacity_bytes"] if "cpu" in stats["tiers"] else 0
        return {"policy": self._policy, "optimizer_bytes": held, "stats": stats}

    def close(self) -> None:
        """Close the store: its files go with it."""
        self._optimizer.close()


def made_parameters(work: Work, gradients: Gradients) -> list[torch.nn.Parameter]:
    """Make every layer's parameter, its gradient in place."""
    made = []
    for layer in range(work.layers):
        parameter = torch.nn.Parameter(work.weight(layer))
        parameter.grad = gradients.of(layer)
        made.append(parameter)
    return made
