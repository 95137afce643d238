"""What a policy says of swap files, as objects: its folders, the files in them, and what is told of both."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tierstore.folders import swap_folders
from tierstore.io import Engine
from tierstore.policy import NvmeTier
from tierstore.stats import IoStats
from tierstore.swapfile import SwapFile
from tierstore.tiers import FileTier, Tier


def folders_of(nvme: NvmeTier) -> list[Path]:
    """The folders of a policy's swap files. Raises PolicyError or SwapError."""
    return swap_folders(nvme.paths, allows_shared=nvme.allow_shared_folder)


def wants_direct(nvme: NvmeTier) -> bool | None:
    """Whether files are to be opened with O_DIRECT; None: where that works."""
    return None if nvme.io.direct == "auto" else nvme.io.direct


def open_files(nvme: NvmeTier, engine: Engine) -> list[SwapFile]:
    direct = wants_direct(nvme) if engine.supports_direct else False
    files: list[SwapFile] = []
    with ExitStack() as undo:
        for folder in folders_of(nvme):
            files.append(SwapFile(Path(folder), direct=direct))
            undo.callback(files[-1].close)
        undo.pop_all()
    return files


def io_stats(engine: Engine | None, tier: Tier | None) -> IoStats:
    if engine is None or not isinstance(tier, FileTier):
        return IoStats("none", direct=False, paths=())
    return IoStats(engine.name, all(file.direct for file in tier.files), tier.paths, tier.keeps_sums)
