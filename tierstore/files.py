"""The folders and files of an nvme tier, as its policy asks for them. Reserves nothing."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tierstore.io import Engine
from tierstore.policy import NvmeTier
from tierstore.swapfile import SwapFile, swap_folders


def folders_of(nvme: NvmeTier) -> list[Path]:
    """The folders of a policy's swap files. Raises PolicyError or SwapError."""
    return swap_folders(nvme.paths, allows_shared=nvme.allow_shared_folder)


def wants_direct(nvme: NvmeTier) -> bool | None:
    """Whether files are to be opened with O_DIRECT; None: where that works."""
    return None if nvme.io.direct == "auto" else nvme.io.direct


def open_files(nvme: NvmeTier, engine: Engine) -> list[SwapFile]:
    """One swap file in each folder, opened as policy and engine can do. Raises PolicyError or SwapError, none left."""
    direct = wants_direct(nvme)
    if not engine.supports_direct:
        direct = False
    files: list[SwapFile] = []
    with ExitStack() as undo:
        for folder in folders_of(nvme):
            files.append(SwapFile(Path(folder), direct=direct))
            undo.callback(files[-1].close)
        undo.pop_all()
    return files
