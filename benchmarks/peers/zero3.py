"""DeepSpeed's ZeRO-3 with the optimizer's state offloaded to NVMe or to host memory, on one process.

The configuration is the fastest we found that keeps to the budget: `buffer_count` pinned float32 buffers of one
sub-group each are what DeepSpeed's swapper holds, so the sub-group is as large as fits. Both pipelines are on, clipping
(on by default) is off, buckets are as small as a layer. Gradients reach the optimizer by a backward, as it has no other
way in; that writes them to NVMe (`nvme`) or copies them (`cpu`) before the step, and does not count as its time.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.systems import AbsentError, Job, System
from benchmarks.peers.work import BETAS, EPS, LR, WEIGHT_DECAY, Gradients, Work, zero_with_gradient

BUFFERS = 12
"""Least `buffer_count` with which both pipelines run: master, two moments and gradient, of three sub-groups."""
AIO: dict[str, Any] = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}


class ZeroThree(System):
    """A DeepSpeed engine around layers whose backward gives exactly the work's gradients."""

    promise = "rounding"
    needs_backward = True

    @classmethod
    def load(cls, job: Job) -> None:
        """Import DeepSpeed, and build its operators, or load those that were built. Raises AbsentError."""
        if job.work.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        try:
            from deepspeed.ops import op_builder
        except ImportError as error:
            raise AbsentError(f"{error}: pip install 'tierstore[peers]'") from error
        import deepspeed

        _alone()
        try:
            op_builder.CPUAdamBuilder().load(verbose=False)
            if job.options["device"] == "nvme":
                op_builder.AsyncIOBuilder().load(verbose=False)
            deepspeed.init_distributed("nccl" if job.work.device == "cuda" else "gloo", verbose=False)
        except Exception as error:
            raise AbsentError(f"its operators do not build ({error}): it needs g++, ninja and libaio-dev") from error

    def __init__(self, job: Job) -> None:
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self._deepspeed = deepspeed
        super().__init__(job)
        buffers = job.options.get("offload", {}).get("buffer_count", BUFFERS)
        self._sub_group = sub_group_size(job.work, job.budget_bytes, buffers)
        self._config = configured(job, self._sub_group)
        self._engine, *_ = deepspeed.initialize(model=Layers(job.work), config=self._config)

    def backward(self) -> None:
        """Run forward and backward: gradients are partitioned and offloaded."""
        self._engine.backward(self._engine())

    def step(self) -> None:
        """Step the engine, which steps its offloaded AdamW."""
        self._engine.step()

    def weights(self) -> Iterable[Tensor]:
        """Gather every layer's weight."""
        for parameter in self._engine.module.parameters():
            with self._deepspeed.zero.GatheredParameters([parameter]):
                yield parameter.detach().clone()

    def described(self) -> dict[str, Any]:
        """Tell DeepSpeed's own configuration, and what its buffers take."""
        offload = self._config["zero_optimization"]["offload_optimizer"]
        if offload["device"] == "nvme":
            held = offload["buffer_count"] * 4 * self._sub_group
        else:
            held = self.work.state_bytes + 4 * self.work.numel
        return {"config": self._config, "optimizer_bytes": held, "build_seconds": build_seconds()}

    def close(self) -> None:
        """Let go of the engine; what DeepSpeed wrote stays in its folder, as it leaves it."""
        self._engine.destroy()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def sub_group_size(work: Work, budget_bytes: int, buffer_count: int = BUFFERS) -> int:
    """Answer the elements of the sub-group of whole layers whose float32 buffers come nearest to the budget."""
    layer = work.width**2
    return max(1, round(budget_bytes / (4 * buffer_count * layer))) * layer


def build_seconds() -> float:
    """Answer how long the operators took to build, whenever that was: the sum of what ninja noted beside them."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    total = 0.0
    for log in root.rglob(".ninja_log"):
        ends = [int(line.split()[1]) for line in log.read_text().splitlines() if not line.startswith("#")]
        total += max(ends, default=0) / 1e3
    return total


def configured(job: Job, sub_group: int) -> dict[str, Any]:
    """Write DeepSpeed's configuration; `options` overrides sections of it (aio, offload)."""
    layer = job.work.width**2
    offload: dict[str, Any] = {"device": job.options["device"], "pin_memory": True}
    if offload["device"] == "nvme":
        offload |= {"nvme_path": str(job.folder), "buffer_count": BUFFERS}
        offload |= {"pipeline_read": True, "pipeline_write": True}
    betas = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": betas},
        "bf16": {"enabled": job.work.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": layer,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": offload | job.options.get("offload", {}),
        },
        "aio": AIO | job.options.get("aio", {}),
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


class Layer(torch.nn.Module):
    """One weight; a module of its own, so that ZeRO gathers and gives back one at a time."""

    def __init__(self, work: Work, layer: int, gradients: Gradients) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(work.weight(layer))
        self._layer, self._gradients = layer, gradients

    def forward(self) -> Tensor:
        """Answer zero, with the weight in its graph."""
        return zero_with_gradient(self.weight, self._gradients, self._layer)


class Layers(torch.nn.Module):
    """The work's parameters as a model."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        gradients = work.gradients()
        self.layers = torch.nn.ModuleList(Layer(work, layer, gradients) for layer in range(work.layers))

    def forward(self) -> Tensor:
        """Answer zero."""
        return torch.stack([layer() for layer in self.layers]).sum()


def _alone() -> None:
    """Tell torch.distributed that this process is the only one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
