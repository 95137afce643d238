"""What was measured of swap paths, memory and arithmetic: values, with no judgement in them.

Every number is finite and above zero, or the value cannot be made from JSON: what a file says may end up as a queue
depth. Rates are bytes per second, memory and files alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class SizeRates:
    """Reads of one request size: seconds of one with nothing beside it, and bytes per second with several at once."""

    request_bytes: Count
    seconds_alone: Amount
    bytes_per_second: Amount


@dataclass(frozen=True, slots=True)
class PathRates:
    """A filesystem through direct I/O. `mixed` counts both directions; sizes are ascending, at least one."""

    latency_seconds: Amount  # of a read of 4 KiB
    write_bytes_per_second: Amount
    mixed_bytes_per_second: Amount
    sizes: Annotated[tuple[SizeRates, ...], Field(min_length=1)]

    @property
    def read_bytes_per_second(self) -> float:
        """The best that any request size reached."""
        return max(size.bytes_per_second for size in self.sizes)

    @property
    def best_bytes_per_second(self) -> float:
        """The most that goes through it in any direction, or in both."""
        return max(self.read_bytes_per_second, self.write_bytes_per_second, self.mixed_bytes_per_second)

    def at(self, request_bytes: int) -> SizeRates:
        """What was measured for the largest size that is no larger, or for the smallest."""
        return next((size for size in reversed(self.sizes) if size.request_bytes <= request_bytes), self.sizes[0])


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Memory and arithmetic. An element is one float32 parameter that fused AdamW updates, with its state."""

    copied_bytes_per_second: Amount  # read and written
    threads: Count
    elements_per_second: Amount
    elements_per_second_sparing_a_core: Amount | None  # with one thread fewer than cores; None: that is no fewer


@dataclass(frozen=True, slots=True)
class Rates:
    """What is known: of paths, by a name for people, with the day it was measured; and why the rest is not."""

    paths: dict[str, PathRates]
    machine: MachineRates | None
    measured_at: str | None  # ISO 8601, the oldest of these
    notes: tuple[str, ...] = ()
