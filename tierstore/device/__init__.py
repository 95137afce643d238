"""Streams, events, allocation and page-locking: one protocol, for host memory and for accelerators."""

from tierstore.device.accelerator import (
    AcceleratorDevice,
    host_for,
    is_capturing,
    is_out_of_memory,
    may_still_move_to_accelerator,
    open_device,
    present_accelerator,
    random_state,
    release_unused_memory,
    set_random_state,
    wait_for_all_work,
)
from tierstore.device.base import Device, DeviceMemory, Event, HostDevice, Stream

__all__ = [
    "AcceleratorDevice",
    "Device",
    "DeviceMemory",
    "Event",
    "HostDevice",
    "Stream",
    "host_for",
    "is_capturing",
    "is_out_of_memory",
    "may_still_move_to_accelerator",
    "open_device",
    "present_accelerator",
    "random_state",
    "release_unused_memory",
    "set_random_state",
    "wait_for_all_work",
]
