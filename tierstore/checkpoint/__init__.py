"""Checkpoints on disk: a format of Zarr v3 that other tools read, its writer and reader. Knows no optimizer:
`save` and `load` ask the one they are given.

docs/CHECKPOINTS.md describes the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.checkpoint.calls import load, save
    from tierstore.checkpoint.entries import VALUES, Entry
    from tierstore.checkpoint.opening import open_checkpoint
    from tierstore.checkpoint.reader import Reader
    from tierstore.checkpoint.torchfile import TorchFile
    from tierstore.checkpoint.writer import Writer

__all__ = ["VALUES", "Entry", "Reader", "TorchFile", "Writer", "load", "open_checkpoint", "save"]

_MODULES = {
    "Entry": "entries",
    "VALUES": "entries",
    "Reader": "reader",
    "TorchFile": "torchfile",
    "Writer": "writer",
    "load": "calls",
    "open_checkpoint": "opening",
    "save": "calls",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
