"""The answer to a question about a plan: values, and the plain form that JSON has. Bytes are bytes, times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierstore.forecast.pace import StepForecast


@dataclass(frozen=True, slots=True)
class TierForecast:
    """One tier: what is reserved, for how many chunks it is home, and how many lie there between steps.

    `is_staging`: the policy has no such tier, but chunks pass through it.
    """

    bytes: int
    extents: int
    homes: int
    resting: int
    is_staging: bool


@dataclass(frozen=True, slots=True)
class HostForecast:
    """Host memory in bytes: what is reserved, to the byte, and what is made while working.

    `scratch` is the most that updates use with all threads of this process. A copy of all state, as `state_dict()`
    gives it, takes `state_dict`, in files where `state_dict_is_mapped`.
    """

    cpu_tier: int
    gpu_stand_in: int
    record_buffer: int
    scratch: int
    state_dict: int
    state_dict_is_mapped: bool

    @property
    def total(self) -> int:
        """All that the optimizer takes of host memory, a state dict included where it is in memory."""
        mapped = self.state_dict if self.state_dict_is_mapped else 0
        return self.cpu_tier + self.gpu_stand_in + self.record_buffer + self.scratch + self.state_dict - mapped


@dataclass(frozen=True, slots=True)
class Endurance:
    """How long drives of `tbw` bytes each last: `bytes_per_day` are written to all of them together.

    `iteration_seconds` is what an iteration was taken to last.
    """

    tbw: int
    iteration_seconds: float
    bytes_per_day: float
    days: float | None  # None: nothing is written


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes it fit, found by planning again; `settings` by dotted key. `rounds`: numbers will differ."""

    change: str
    settings: Mapping[str, Any]
    rounds: bool
    step_seconds: float | None
    bytes_written_per_step: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer. Bytes are of one process; `ranks` processes share the machine. `why_not`: why it does not fit.

    `state` is by field of the record, `record_bytes` with each record padded to whole pages.
    """

    params: int
    dtypes: Mapping[str, int]
    parameter_bytes: int
    gradient_bytes: int
    state: Mapping[str, int]
    record_bytes: int
    chunk_bytes: int
    chunks: int
    order: str
    update: str
    ranks: int
    tiers: Mapping[str, TierForecast]
    host: HostForecast
    fits: bool
    why_not: str | None
    remedies: tuple[Remedy, ...]
    moved: Mapping[str, int]
    step: StepForecast | None
    endurance: Endurance | None
    warnings: tuple[str, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of state, over all fields."""
        return sum(self.state.values())

    @property
    def bytes_written_per_step(self) -> int | None:
        """To swap files, by this process; None where there is no step."""
        return None if self.step is None else sum(n for route, n in self.moved.items() if route.endswith(">nvme"))

    def to_dict(self) -> dict[str, Any]:
        """Answer plain values that JSON can hold."""
        plain = asdict(self)
        plain["state_bytes"] = self.state_bytes
        plain["host"]["total"] = self.host.total
        plain["step_seconds"] = None if self.step is None else self.step.seconds
        plain["bytes_written_per_step"] = self.bytes_written_per_step
        return plain
