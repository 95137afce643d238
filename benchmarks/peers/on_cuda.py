"""Peers that need CUDA: torchao's CPU offload and bitsandbytes' paged AdamW.

Neither does quite the same work with bfloat16 parameters: torchao keeps the moments in the parameter's dtype and no
master, bitsandbytes keeps float32 moments and no master. Their rows say so by `other`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from benchmarks.peers.systems import AbsentError, Job, System, made_parameters
from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY


class OnCuda(System):
    """An optimizer on CUDA parameters; torchao takes gradients from hooks alone."""

    promise = "other"
    writes_on = True
    needs_backward = True

    package: str

    @classmethod
    def load(cls, job: Job) -> None:
        """Import the package. Raises AbsentError, also where parameters are not on CUDA."""
        if job.work.device != "cuda":
            raise AbsentError("works on CUDA parameters only: --device cuda")
        try:
            importlib.import_module(cls.package)
        except ImportError as error:
            raise AbsentError(f"{error}: pip install 'tierstore[peers]'") from error

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.parameters = made_parameters(job.work, self.gradients)
        self._optimizer = self._made()

    def step(self) -> None:
        """Step."""
        self._optimizer.step()

    def described(self) -> dict[str, Any]:
        """Tell what host memory the state takes, at the parameter's dtype for torchao."""
        return {"optimizer_bytes": self._host_bytes()}

    def _made(self) -> Any:
        raise NotImplementedError

    def _host_bytes(self) -> int:
        raise NotImplementedError


class Torchao(OnCuda):
    """torchao's CPUOffloadOptimizer around torch's fused AdamW on the CPU."""

    package = "torchao.optim"

    def _made(self) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "fused": True}
        return CPUOffloadOptimizer(self.parameters, torch.optim.AdamW, **options)

    def _host_bytes(self) -> int:
        return 4 * self.work.numel * self.parameters[0].element_size()  # parameter, gradient, two moments


class Bitsandbytes(OnCuda):
    """bitsandbytes' PagedAdamW with 32-bit moments, in memory that the driver pages between GPU and host."""

    package = "bitsandbytes.optim"

    def _made(self) -> Any:
        from bitsandbytes.optim import PagedAdamW32bit

        return PagedAdamW32bit(self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def _host_bytes(self) -> int:
        return 8 * self.work.numel
