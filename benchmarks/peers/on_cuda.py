"""Peers that need CUDA: torchao's CPU offload and bitsandbytes' paged AdamW.

Neither does quite the same work with bfloat16 parameters: torchao keeps the moments in the parameter's dtype and no
master, bitsandbytes keeps float32 moments and no master. Their rows say so by `other`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.systems import AbsentError, Job, System, made_parameters
from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY, zero_with_gradient


class OnCuda(System):
    """An optimizer on CUDA parameters."""

    promise = "other"
    writes_on = True

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
        self._parameters = made_parameters(job.work)
        self._gradients = job.work.gradients()
        self._optimizer = self._made()

    def backward(self) -> None:
        """Run a backward: torchao takes gradients from its hooks alone."""
        for layer, parameter in enumerate(self._parameters):
            parameter.grad = None
            zero_with_gradient(parameter, self._gradients, layer).backward()

    def step(self) -> None:
        """Step."""
        self._optimizer.step()

    def weights(self) -> Iterable[Tensor]:
        """Give the parameters."""
        return self._parameters

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
        return CPUOffloadOptimizer(self._parameters, torch.optim.AdamW, **options)

    def _host_bytes(self) -> int:
        return 4 * self.work.numel * self._parameters[0].element_size()  # parameter, gradient, two moments


class Bitsandbytes(OnCuda):
    """bitsandbytes' PagedAdamW with 32-bit moments, in memory that the driver pages between GPU and host."""

    package = "bitsandbytes.optim"

    def _made(self) -> Any:
        from bitsandbytes.optim import PagedAdamW32bit

        return PagedAdamW32bit(self._parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def _host_bytes(self) -> int:
        return 8 * self.work.numel
