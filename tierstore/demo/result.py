"""What a run of the demo came to, and the same as JSON. Prints nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import tierstore
from tierstore.demo.meter import Meter
from tierstore.demo.options import Options
from tierstore.demo.policy import Chosen
from tierstore.demo.text import Text


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a training with torch's fused AdamW compares, to the bit. `first_step` is the first whose loss differs."""

    weights: int
    different_weights: int
    first_step: int | None
    reference_seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether every weight and every loss is the same."""
        return self.different_weights == 0 and self.first_step is None


@dataclass(frozen=True, slots=True)
class Result:
    """A run, or the part of it before it was interrupted; what was not come to is None."""

    options: Options
    text: Text
    chosen: Chosen
    device: str
    torch_version: str
    threads: int
    parameters: int
    state_bytes: int
    meter: Meter
    heldout_loss: float | None
    verdict: Verdict | None
    is_interrupted: bool
    total_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Answer plain values that JSON can hold; a number that is not finite is None."""
        losses, verdict, stats = self.meter.losses, self.verdict, self.meter.stats
        values = {
            "version": tierstore.__version__,
            "torch": self.torch_version,
            "device": self.device,
            "threads": self.threads,
            "seed": self.options.seed,
            "params": self.parameters,
            "state_bytes": self.state_bytes,
            "text": self.text.name,
            "text_bytes": len(self.text.training) + len(self.text.heldout),
            "unigram_entropy": self.text.unigram_entropy,
            "steps": len(losses),
            "interrupted": self.is_interrupted,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "heldout_loss": self.heldout_loss,
            "bit_equal": verdict.is_equal if verdict is not None else None,
            "verify": asdict(verdict) if verdict is not None else None,
            "seconds": self.meter.seconds,
            "total_seconds": self.total_seconds,
            "tokens_per_second": self.meter.tokens_per_second,
            "split_seconds": self.meter.split.parts(),
            "policy": self.chosen.policy.model_dump(mode="json", exclude_none=True),
            "policy_origin": self.chosen.origin,
            "stats": stats.to_dict() if stats is not None else None,
        }
        return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
