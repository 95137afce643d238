"""`save` and `load` as functions, for who has the path first. What they do is the optimizer's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import nn

from tierstore.checkpoint.geometry import Compression

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Path = str | os.PathLike[str]


class Waitable(Protocol):
    """A checkpoint on its way."""

    def wait(self) -> None:
        """Wait until it is complete and on the disk."""


class Checkpointable(Protocol):
    """An optimizer that saves and loads checkpoints."""

    def save_checkpoint(
        self,
        path: Path,
        model: nn.Module | None = None,
        extra: object = None,
        wait: bool = True,
        *,
        compression: Compression = "none",
        keep_last: int | None = None,
        if_busy: Literal["wait", "error"] = "wait",
        process_group: ProcessGroup | None = None,
    ) -> Waitable:
        """Save one."""

    def load_checkpoint(
        self,
        path: Path,
        model: nn.Module | None = None,
        *,
        params: str | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Any:
        """Load one, and return its `extra`."""


def save(
    path: Path,
    optimizer: Checkpointable,
    model: nn.Module | None = None,
    extra: object = None,
    wait: bool = True,
    *,
    compression: Compression = "none",
    keep_last: int | None = None,
    if_busy: Literal["wait", "error"] = "wait",
    process_group: ProcessGroup | None = None,
) -> Waitable:
    """Save an optimizer's state, and a model's weights; see `save_checkpoint` of the optimizer."""
    return optimizer.save_checkpoint(
        path,
        model,
        extra,
        wait,
        compression=compression,
        keep_last=keep_last,
        if_busy=if_busy,
        process_group=process_group,
    )


def load(
    path: Path,
    optimizer: Checkpointable,
    model: nn.Module | None = None,
    *,
    params: str | None = None,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint into an optimizer, and a model; see `load_checkpoint` of the optimizer. Returns its `extra`."""
    return optimizer.load_checkpoint(path, model, params=params, process_group=process_group)
