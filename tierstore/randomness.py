"""The state of random numbers at one moment: torch's, on the CPU and on one device, numpy's and Python's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.device import present_accelerator, random_state, set_random_state


@dataclass(frozen=True, slots=True)
class Randomness:
    """What a computation that is repeated must begin with, to be the same."""

    device: torch.device
    on_cpu: Tensor
    on_device: Tensor | None
    of_numpy: dict[str, Any]
    of_python: object

    @classmethod
    def now(cls) -> Randomness:
        """Take note of them, those of the accelerator in use too; numbers may be drawn afterwards."""
        device = present_accelerator() or torch.device("cpu")
        of_numpy = np.random.get_state(legacy=False)
        return cls(device, torch.get_rng_state(), random_state(device), of_numpy, random.getstate())

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.on_cpu)
        if self.on_device is not None:
            set_random_state(self.device, self.on_device)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)  # type: ignore[arg-type]
