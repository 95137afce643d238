"""What a device is, and host memory as one.

A device gives memory in slabs, copy streams, and an order between them and the stream that computes: an event is
recorded on one stream, and another stream or the host waits for it. `HostDevice` is host memory; it also stands in for
an accelerator (`device: cpu`), by the same protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tierstore.mapping import PageLock, map_host_memory


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory as its driver (free, total) and torch's allocator say it, the latter for this process alone.

    `peak_bytes` is the most that tensors took since the user last reset that statistic. `returned_bytes` is what the
    allocator has given back in all, apart from `release_unused`. What nobody counts, as of the host's memory, is 0.
    """

    free_bytes: int
    total_bytes: int
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    returned_bytes: int = 0


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the host until the stream has come to this point."""

    def query(self) -> bool:
        """Whether the stream has come to this point."""


class Stream(Protocol):
    """Work that is done in the order in which it was queued."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Queue a copy between two uint8 tensors of one length; both must stay valid until it is done."""

    def wait(self, event: Event) -> None:
        """Let what is queued from now on begin after `event`."""

    def record(self) -> Event:
        """Mark the point that all work queued so far leads to."""


class Device(Protocol):
    """What allocates memory, copies, and computes."""

    name: str
    torch_device: torch.device
    takes_memory_at_once: bool  # else as it is touched

    def allocate(self, nbytes: int) -> Tensor:
        """Get a slab: a uint8 tensor of exactly `nbytes`, of any content, that any stream may use at once.

        Raises CapacityError.
        """

    def copy_stream(self, purpose: str) -> Stream:
        """Make a stream for copies in one direction."""

    def discard(self, extent: Tensor) -> None:
        """Hear that the bytes of an extent are worth nothing from now on."""

    def launch(self, work: Callable[[], None]) -> None:
        """Run tensor operations on the stream that computes, after what was launched before."""

    def record(self) -> Event:
        """Mark the point that all launched work leads to."""

    def wait(self, event: Event) -> None:
        """Let what this thread launches from now on begin after `event`."""

    def keep(self, tensor: Tensor) -> None:
        """Hear that what this thread launches next reads a tensor of the device that another stream may give up."""

    def finish(self) -> None:
        """Make the results of launched work visible to whoever uses the tensors next, as torch's own ops would be.

        Raises the error of launched work that failed, where the device keeps it until now.
        """

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def memory_now(self) -> DeviceMemory:
        """What the device's memory is used for; resets no statistics."""

    def release_unused(self) -> None:
        """Give memory that torch's allocator keeps and nobody uses back to the device."""

    def close(self) -> None:
        """Wait for all work on all streams: memory may be given back now. The device can be used again."""


class _DoneEvent:
    """An event of work that is over when it returns."""

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _InlineStream:
    """Copies at once, on the calling thread."""

    def copy(self, destination: Tensor, source: Tensor) -> None:
        destination.copy_(source)

    def wait(self, event: Event) -> None:
        event.wait()

    def record(self) -> Event:
        return _DoneEvent()


class HostDevice:
    """Host memory: what the cpu tier is made of, and what stands in for an accelerator."""

    def __init__(self, name: str = "cpu", *, page_lock: PageLock | None = None) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self.takes_memory_at_once = page_lock is not None
        self._page_lock = page_lock

    def allocate(self, nbytes: int) -> Tensor:
        return map_host_memory(nbytes, page_lock=self._page_lock)

    def discard(self, extent: Tensor) -> None:
        pass

    def copy_stream(self, purpose: str) -> Stream:
        return _InlineStream()

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _DoneEvent()

    def wait(self, event: Event) -> None:
        event.wait()

    def keep(self, tensor: Tensor) -> None:
        pass

    def finish(self) -> None:
        pass

    def memory_bytes(self) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def memory_now(self) -> DeviceMemory:
        return DeviceMemory(*self.memory_bytes())

    def release_unused(self) -> None:
        pass

    def close(self) -> None:
        pass
