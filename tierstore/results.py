"""Memory for tensors that are handed out: state that a caller reads, or takes away in a state dict.

Small results are ordinary memory. With an nvme tier, all beyond a grant of at most 64 MiB, and of no more than the cpu
tier has, are mappings of unnamed, reserved files in the swap folders, each tensor with a storage of its own over its
own part, so that reading state larger than memory does not take it. The file's space is given back when the last tensor
over it is gone.
"""

from __future__ import annotations

import math
import mmap
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import DiskFullError, SwapError
from tierstore.folders import swap_folders
from tierstore.layout import RECORD_ALIGNMENT, round_up
from tierstore.policy import TierPolicy
from tierstore.swapfile import SwapFile

MOST_GRANTED_BYTES = 64 << 20
"""Of results in ordinary memory, which comes on top of the cpu tier's; faster than a file for small models."""
FIRST_PIECE_BYTES = 1 << 20
MOST_PIECE_BYTES = 64 << 20
"""Reserved at once: each piece is twice the one before it, so that no more is reserved than twice what is taken."""


@dataclass
class _Piece:
    """A mapped part of a file, filled from the front."""

    view: memoryview
    used: int = 0


class Results:
    """Hands out 1-D CPU tensors: memory up to `granted_bytes` in all, file mappings beyond, in each folder in turn."""

    def __init__(self, granted_bytes: float, *folders: Path) -> None:
        self._granted_bytes = granted_bytes
        self._folders = deque(folders)
        self._in_memory = 0
        self._piece: _Piece | None = None
        self._next_bytes = FIRST_PIECE_BYTES

    @classmethod
    def under(cls, policy: TierPolicy, expected_bytes: int = 0) -> Results:
        """Grant MOST_GRANTED_BYTES, or the cpu tier's capacity if less; everything without an nvme tier to hold files.

        `expected_bytes`: if so much is going to be taken and is more than the grant, all of it is mapped.
        """
        cpu, nvme = policy.tiers.cpu, policy.tiers.nvme
        if nvme is None:
            return cls(math.inf)
        capacity = cpu.capacity if cpu is not None else "auto"
        granted = min(capacity, MOST_GRANTED_BYTES) if isinstance(capacity, int) else MOST_GRANTED_BYTES
        try:
            folders = swap_folders(nvme.paths, allows_shared=nvme.allow_shared_folder)
        except SwapError:  # no folder to swap in was needed so far, so state is in memory as it is
            return cls(math.inf)
        return cls(0 if expected_bytes > granted else granted, *folders)

    def are_mapped(self, nbytes: int) -> bool:
        """Whether so many bytes, the first that are asked for, would be mapped from a file."""
        return bool(self._folders) and nbytes > self._granted_bytes

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Make a 1-D tensor with a storage of its own, its values undefined. Raises DiskFullError."""
        nbytes = elements * dtype.itemsize
        if nbytes == 0 or self._in_memory + nbytes <= self._granted_bytes or not self._folders:
            self._in_memory += nbytes
            return torch.empty(elements, dtype=dtype, device="cpu")
        padded = round_up(nbytes, RECORD_ALIGNMENT)
        if self._piece is None or self._piece.used + padded > len(self._piece.view):
            self._piece = _Piece(self._map(max(self._next_bytes, padded)))
            self._next_bytes = min(2 * self._next_bytes, MOST_PIECE_BYTES)
        start = self._piece.used
        self._piece.used += padded
        return torch.frombuffer(self._piece.view[start : start + nbytes], dtype=dtype)

    def _map(self, nbytes: int) -> memoryview:
        """Map so many bytes in the folder whose turn it is, or in the next one that has room for them."""
        for more in reversed(range(len(self._folders))):
            folder = self._folders[0]
            self._folders.rotate(-1)
            try:
                return _map_reserved(folder, nbytes)
            except DiskFullError:
                if not more:
                    raise
        raise AssertionError("there is no folder")


def _reserve(file: SwapFile, nbytes: int) -> None:
    try:
        file.grow(nbytes)
    except DiskFullError as error:
        raise DiskFullError(
            error.errno,
            f"handing out state takes a copy of it: {nbytes:,} bytes are needed for that in {file.folder}, more than "
            f"are free there; free space, training can go on meanwhile",
            error.filename,
        ) from error


def _map_reserved(folder: Path, nbytes: int) -> memoryview:
    """Map `nbytes` of a new unnamed file. The mapping keeps the file; no descriptor stays open for it."""
    file = SwapFile(folder, direct=False)
    try:
        _reserve(file, nbytes)
        link = f"/proc/self/fd/{file.fd}"
        if os.path.exists(link):
            array: Any = torch.from_file(link, shared=True, size=nbytes, dtype=torch.uint8).numpy()
            return memoryview(array)
        return memoryview(mmap.mmap(file.fd, nbytes))  # keeps a descriptor of its own
    finally:
        file.close()
