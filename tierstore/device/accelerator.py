"""Accelerators. The only module that names their API.

`AcceleratorDevice` is whatever accelerator torch has a module of streams and events for.

Who keeps its memory safe: an extent is used again only after the host has seen the event of the last work on it, and a
slab is given back only when none of its extents is in use or the whole device has come to rest. So torch's allocator
need not be told which streams use a slab (`Tensor.record_stream`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tierstore.device.base import Device, DeviceMemory, Event, HostDevice, Stream
from tierstore.errors import CapacityError, PolicyError

REGISTER_PIECE = 256 << 30  # one cudaHostRegister call fails at 512 GiB
REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, whichever is current

_COUNTED = (
    *("reserved_bytes.all.current", "allocated_bytes.all.current", "allocated_bytes.all.peak"),
    "reserved_bytes.all.freed",
)
_TOO_LITTLE = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
_log = logging.getLogger("tierstore.device")


class _AcceleratorEvent:
    """An event of the device's own module: mixing those with torch.Event waits for the wrong thing, in silence."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())


class _AcceleratorStream:
    """One copy stream; used by one thread, on which it makes its device the current one while it queues."""

    def __init__(self, device: AcceleratorDevice) -> None:
        self._device = device
        self._module = device.module
        self._stream = self._module.Stream(device=device.torch_device)

    def copy(self, destination: Tensor, source: Tensor) -> None:
        with self._module.stream(self._stream):
            destination.copy_(source, non_blocking=True)

    def wait(self, event: Event) -> None:
        if isinstance(event, _AcceleratorEvent):
            self._stream.wait_event(event.event)
        else:
            event.wait()

    def record(self) -> Event:
        return self._device.record_on(self._stream)


class AcceleratorDevice:
    """A GPU. Work is launched on the stream that is current where `launch` and `record` are called."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self.name = str(device)
        self.module: Any = torch.get_device_module(device)
        self.takes_memory_at_once = True
        self._released_bytes = 0

    def allocate(self, nbytes: int) -> Tensor:
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = self.memory_bytes()
            raise CapacityError(
                f"{self.name} has {free:,} of {total:,} bytes free, too few for {nbytes:,} bytes of the gpu tier: "
                f"lower tiers.gpu.capacity"
            ) from error
        # torch may hand out memory that kernels queued on this stream still use; copy streams would not wait for them
        self.module.current_stream(self.torch_device).synchronize()
        return slab

    def discard(self, extent: Tensor) -> None:
        pass

    def copy_stream(self, purpose: str) -> Stream:
        return _AcceleratorStream(self)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return self.record_on(self.module.current_stream(self.torch_device))

    def wait(self, event: Event) -> None:
        assert isinstance(event, _AcceleratorEvent)  # what `record` gives
        self.module.current_stream(self.torch_device).wait_event(event.event)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self.module.current_stream(self.torch_device))

    def record_on(self, stream: Any) -> Event:
        """Mark the point that all work queued on one of the device's streams leads to."""
        # a thread that waits for a CUDA event keeps a core busy unless the event is a blocking one
        event = self.module.Event(blocking=True) if self.torch_device.type == "cuda" else self.module.Event()
        event.record(stream)
        return _AcceleratorEvent(event)

    def finish(self) -> None:
        pass  # whoever reads the parameters queues behind the same stream

    def memory_bytes(self) -> tuple[int, int]:
        free, total = self.module.mem_get_info(self.torch_device)
        return int(free), int(total)

    def memory_now(self) -> DeviceMemory:
        counts = self._counts()
        reserved, allocated, peak, returned = (int(counts.get(name, 0)) for name in _COUNTED)
        return DeviceMemory(*self.memory_bytes(), reserved, allocated, peak, returned - self._released_bytes)

    def release_unused(self) -> None:
        if not hasattr(self.module, "empty_cache"):
            return
        before = self.memory_now().returned_bytes
        with self.module.device(self.torch_device):  # else torch may make a context on the one that is current
            self.module.empty_cache()
        self._released_bytes += self.memory_now().returned_bytes - before

    def _counts(self) -> Mapping[str, int]:
        """The allocator's statistics; none where it keeps none, as one that the user has plugged in."""
        try:
            return self.module.memory_stats(self.torch_device) if hasattr(self.module, "memory_stats") else {}
        except RuntimeError:
            return {}

    def close(self) -> None:
        torch.accelerator.synchronize(self.torch_device)


def open_device(wanted: str, parameters_on: torch.device | None) -> Device | None:
    """Open the gpu tier's device: `auto` is the accelerator the parameters are on, `cpu` lets host memory stand in.

    Returns None when `auto` or an accelerator's name finds none. Raises PolicyError for a name torch does not know.
    """
    if wanted == "cpu":
        return HostDevice("stand-in")
    if wanted == "auto":
        if parameters_on is None or parameters_on.type in ("cpu", "meta"):
            return None
        return _open_accelerator(parameters_on)
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise PolicyError(f"tiers.gpu.device: {wanted!r} is no device torch knows: {error}") from error
    current = _accelerator()
    if current is None or current.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        return None
    if device.index is None and parameters_on is not None and parameters_on.type == device.type:
        device = parameters_on
    return _open_accelerator(device)


def _open_accelerator(device: torch.device) -> Device | None:
    """Open an accelerator, unless torch has no streams for it."""
    if not hasattr(torch.get_device_module(device), "Stream"):
        return None
    return AcceleratorDevice(_with_index(device))


def host_for(parameters_on: torch.device | None, *, pin_memory: bool) -> HostDevice:
    """Make the cpu tier's device; page-locked for the accelerator the parameters are on, if `pin_memory`."""
    if not pin_memory or parameters_on is None or parameters_on.type != "cuda":
        return HostDevice()
    return HostDevice(page_lock=functools.partial(_register_with_cuda, parameters_on))


def may_still_move_to_accelerator(device: torch.device) -> bool:
    """Whether parameters on `device` may be on their way to an accelerator: they are on none, and there is one."""
    return device.type == "meta" or (device.type == "cpu" and torch.accelerator.is_available())


def present_accelerator() -> torch.device | None:
    """The accelerator that torch has here, by the index of the current one; None if there is none that works."""
    accelerator = _accelerator()
    return None if accelerator is None else _with_index(accelerator)


def wait_for_all_work(device: torch.device) -> None:
    """Wait until an accelerator has done all it was given; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host had too little memory, as torch and Python say it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _TOO_LITTLE)


def release_unused_memory() -> None:
    """Let torch give back what it keeps of the accelerator in use, if there is one."""
    device = present_accelerator()
    if device is not None:
        AcceleratorDevice(device).release_unused()


def random_state(device: torch.device) -> Tensor | None:
    """The state of a device's random numbers; None for the CPU, whose are torch's own, and where there are none."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    state: Tensor | None = module.get_rng_state(device) if hasattr(module, "get_rng_state") else None
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put back what `random_state` gave."""
    torch.get_device_module(device).set_rng_state(state, device)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph, which host I/O cannot be part of."""
    accelerator = _accelerator()
    return accelerator is not None and accelerator.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _accelerator() -> torch.device | None:
    """The kind of accelerator that torch has here, if one works; older torch raises if there is none."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _register_with_cuda(device: torch.device, address: int, nbytes: int) -> Callable[[], None]:
    """Page-lock host memory for CUDA, in pieces, all or nothing; return what undoes it."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    done: list[int] = []

    def unregister() -> None:
        while done:
            code = int(runtime.cudaHostUnregister(done.pop()))
            if code:
                _log.warning("cudaHostUnregister: error %d", code)
                _forget_cuda_error(device)

    with torch.cuda.device(device):
        for start in range(0, nbytes, REGISTER_PIECE):
            length = min(REGISTER_PIECE, nbytes - start)
            code = int(runtime.cudaHostRegister(address + start, length, REGISTER_PORTABLE))
            if code:
                _forget_cuda_error(device)
                unregister()
                raise CapacityError(
                    f"{nbytes:,} bytes of host memory cannot be page-locked (cudaHostRegister: error {code}): "
                    f"lower tiers.cpu.capacity or set tiers.cpu.pin_memory: false"
                )
            done.append(address + start)
    return unregister


def _forget_cuda_error(device: torch.device) -> None:
    """Launch a kernel that takes the blame for a call that failed: torch would blame the user's next one."""
    with contextlib.suppress(RuntimeError):
        torch.ones((), device=device)


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
