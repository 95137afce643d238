"""Streams, events, allocation and page-locking. The only module that names an accelerator's API.

A device gives memory in slabs, two copy streams, and an order between them and the stream that computes: an event is
recorded on one stream, and another stream or the host waits for it. `HostDevice` is host memory; it also stands in for
an accelerator (`device: cpu`), by the same protocol. `AcceleratorDevice` uses torch's device-neutral API where there is
one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore.errors import CapacityError, PolicyError

HUGE_PAGE = 2 << 20
REGISTER_PIECE = 256 << 30  # one cudaHostRegister call fails at 512 GiB


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

    def allocate(self, nbytes: int) -> Tensor:
        """Get a slab: a uint8 tensor of exactly `nbytes`, zeroed or not. Raises CapacityError."""

    def copy_stream(self, purpose: str) -> Stream:
        """Make a stream for copies in one direction."""

    def discard(self, extent: Tensor) -> None:
        """Hear that the bytes of an extent are worth nothing from now on."""

    def launch(self, work: Callable[[], None]) -> None:
        """Run tensor operations on the stream that computes, after what was launched before."""

    def record(self) -> Event:
        """Mark the point that all launched work leads to."""

    def finish(self) -> None:
        """Make the results of launched work visible to whoever uses the tensors next, as torch's own ops would be."""

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total bytes of the device."""

    def close(self) -> None:
        """Stop the streams."""


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

    def __init__(self, name: str = "cpu", *, page_lock: Callable[[Tensor], Callable[[], None]] | None = None) -> None:
        self.name = name
        self.torch_device = torch.device("cpu")
        self._page_lock = page_lock

    def allocate(self, nbytes: int) -> Tensor:
        slab = map_host_memory(nbytes)
        if self._page_lock is not None:
            weakref.finalize(slab, self._page_lock(slab)).atexit = False
        return slab

    def discard(self, extent: Tensor) -> None:
        pass

    def copy_stream(self, purpose: str) -> Stream:
        return _InlineStream()

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _DoneEvent()

    def finish(self) -> None:
        pass

    def memory_bytes(self) -> tuple[int, int]:
        import psutil  # noqa: PLC0415

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def close(self) -> None:
        pass


class _AcceleratorEvent:
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())


class _AcceleratorStream:
    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with self._stream:
            destination.copy_(source, non_blocking=True)

    def wait(self, event: Event) -> None:
        if isinstance(event, _AcceleratorEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def record(self) -> Event:
        return _AcceleratorEvent(self._stream.record_event())


class AcceleratorDevice:
    """A GPU, by torch's device-neutral API."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.name = str(device)

    def allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = self.memory_bytes()
            raise CapacityError(
                f"{self.name} has {free:,} of {total:,} bytes free, too few for {nbytes:,} bytes of the gpu tier: "
                f"lower tiers.gpu.capacity"
            ) from error

    def discard(self, extent: Tensor) -> None:
        pass

    def copy_stream(self, purpose: str) -> Stream:
        return _AcceleratorStream(torch.Stream(device=self.torch_device))

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _AcceleratorEvent(torch.accelerator.current_stream(self.torch_device).record_event())

    def finish(self) -> None:
        pass  # whoever reads the parameters queues behind the same stream

    def memory_bytes(self) -> tuple[int, int]:
        free, total = torch.get_device_module(self.torch_device).mem_get_info(self.torch_device)
        return int(free), int(total)

    def close(self) -> None:
        pass


def open_device(wanted: str, parameters_on: torch.device | None) -> Device | None:
    """Open the gpu tier's device: `auto` is the accelerator the parameters are on, `cpu` lets host memory stand in.

    Returns None when `auto` or an accelerator's name finds none. Raises PolicyError for a name torch does not know.
    """
    if wanted == "cpu":
        return HostDevice("stand-in")
    if wanted == "auto":
        if parameters_on is None or parameters_on.type in ("cpu", "meta"):
            return None
        return AcceleratorDevice(_with_index(parameters_on))
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise PolicyError(f"tiers.gpu.device: {wanted!r} is no device torch knows: {error}") from error
    current = torch.accelerator.current_accelerator(check_available=True)
    return AcceleratorDevice(_with_index(device)) if current is not None and current.type == device.type else None


def host_for(parameters_on: torch.device | None, *, pin_memory: bool) -> HostDevice:
    """Make the cpu tier's device; page-locked for the accelerator the parameters are on, if `pin_memory`."""
    is_accelerated = parameters_on is not None and parameters_on.type == "cuda"
    return HostDevice(page_lock=_register_with_cuda if pin_memory and is_accelerated else None)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, which host I/O cannot be part of."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda" and torch.cuda.is_current_stream_capturing()


def map_host_memory(nbytes: int) -> Tensor:
    """Map private anonymous memory as a uint8 tensor of exactly `nbytes`, on huge pages where the system has them.

    The memory is not inherited by a fork, and is unmapped when the last tensor on it goes. It takes up room only as it
    is touched. Raises CapacityError when the address space or the limit of this process is too small.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    padding = HUGE_PAGE if nbytes >= HUGE_PAGE else 0
    try:
        area = mmap.mmap(-1, nbytes + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise CapacityError(f"{nbytes:,} bytes of host memory cannot be mapped ({error}): lower tiers.cpu.capacity") from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, nothing else
                area.madvise(getattr(mmap, advice))
    # the tensor keeps the memoryview, which keeps the mapping; closing the mapping under it is impossible that way
    view = memoryview(area)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    start = -address % HUGE_PAGE if padding else 0
    return torch.frombuffer(view[start : start + nbytes], dtype=torch.uint8)


def _register_with_cuda(slab: Tensor) -> Callable[[], None]:
    """Page-lock a slab for CUDA, in pieces; return what undoes it."""
    runtime: Any = torch.cuda.cudart()
    address, nbytes = slab.data_ptr(), slab.numel()
    pieces = [(address + start, min(REGISTER_PIECE, nbytes - start)) for start in range(0, nbytes, REGISTER_PIECE)]
    for start, length in pieces:
        code = int(runtime.cudaHostRegister(start, length, 0))
        if code:
            raise CapacityError(
                f"{length:,} bytes of host memory cannot be page-locked (cudaHostRegister: error {code}): "
                f"lower tiers.cpu.capacity or set tiers.cpu.pin_memory: false"
            )

    def unregister() -> None:
        for start, _ in pieces:
            runtime.cudaHostUnregister(start)

    return unregister


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
