"""Checkpoints on disk: a format of Zarr v3 that other tools read, its writer and reader. Knows nothing of optimizers.

docs/CHECKPOINTS.md describes the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore.checkpoint.entries import VALUES, Entry
    from tierstore.checkpoint.reader import Reader
    from tierstore.checkpoint.writer import Writer

__all__ = ["VALUES", "Entry", "Reader", "Writer"]

_MODULES = {"Entry": "entries", "VALUES": "entries", "Reader": "reader", "Writer": "writer"}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
