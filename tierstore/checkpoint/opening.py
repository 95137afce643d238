"""Opens a checkpoint of whatever kind there is at a path."""

from __future__ import annotations

import os

from tierstore.checkpoint.reader import Reader
from tierstore.checkpoint.torchfile import TorchFile, is_torch_file


def open_checkpoint(path: str | os.PathLike[str]) -> Reader | TorchFile:
    """Open a folder as our checkpoint, a file as one of torch's. Raises CheckpointError and its kinds."""
    return TorchFile(path) if is_torch_file(path) else Reader(path)
