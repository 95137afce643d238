"""What all benchmarks share: the command line, the raw device, rounds, what is recorded, how it is shown.

A benchmark is a module with a `measure(...) -> Report` that verifies what it moved, and a `main` that takes the options
defined in `command`, measures, and publishes the report.
"""

from benchmarks.harness.command import (
    Device,
    Folders,
    Json,
    Plot,
    Quick,
    Rounds,
    bytes_of,
    command,
    device_of,
    folders_of,
    open_console,
    publish,
)
from benchmarks.harness.environment import environment
from benchmarks.harness.pattern import VerificationError, fill, verify
from benchmarks.harness.rawdevice import RawDevice, Sample, fio_entries, request_of
from benchmarks.harness.report import Check, Column, Report, Table
from benchmarks.harness.rounds import interleave, median, ratio

__all__ = [
    "Check",
    "Column",
    "Device",
    "Folders",
    "Json",
    "Plot",
    "Quick",
    "RawDevice",
    "Report",
    "Rounds",
    "Sample",
    "Table",
    "VerificationError",
    "bytes_of",
    "command",
    "device_of",
    "environment",
    "fill",
    "fio_entries",
    "folders_of",
    "interleave",
    "median",
    "open_console",
    "publish",
    "ratio",
    "request_of",
    "verify",
]
