"""Peers that need CUDA: torchao's CPU offload and bitsandbytes' paged AdamW.

Neither does quite the same work with bfloat16 parameters: torchao keeps the moments in the parameter's dtype and no
master, bitsandbytes keeps float32 moments and no master. Their rows say so by `other`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.peers.systems import AbsentError, Job, made_parameters
from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY


class OnCuda:
    """An optimizer on CUDA parameters; gradients stay as they are between steps."""

    promise = "other"
    writes_on = True

    package: ClassVar[str]

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
        self._work = job.work
        self._parameters = made_parameters(job.work)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._optimizer = self._made()

    def backward(self) -> None:
        """Set the gradients again: torchao takes them away."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        torch.cuda.synchronize()

    def step(self) -> None:
        """Step, and wait for the device."""
        self._optimizer.step()
        torch.cuda.synchronize()

    def settle(self) -> None:
        """Do nothing: there are no files."""

    def weights(self) -> Iterable[Tensor]:
        """Give the parameters."""
        return self._parameters

    def described(self) -> dict[str, Any]:
        """Tell what host memory the state takes, at the parameter's dtype for torchao."""
        return {"optimizer_bytes": self._host_bytes()}

    def close(self) -> None:
        """Do nothing: there are no files."""

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
        return 4 * self._work.numel * self._parameters[0].element_size()  # parameter, gradient, two moments


class Bitsandbytes(OnCuda):
    """bitsandbytes' PagedAdamW with 32-bit moments, in memory that the driver pages between GPU and host."""

    package = "bitsandbytes.optim"

    def _made(self) -> Any:
        from bitsandbytes.optim import PagedAdamW32bit

        return PagedAdamW32bit(self._parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    def _host_bytes(self) -> int:
        return 8 * self._work.numel
