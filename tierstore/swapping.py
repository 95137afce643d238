"""What a policy says of swap files, as objects: its folders, files in them, an engine, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tierstore.errors import PolicyError
from tierstore.folders import swap_folders
from tierstore.io import Engine
from tierstore.policy import NvmeTier
from tierstore.rates import Rates
from tierstore.stats import IoStats
from tierstore.swapfile import SwapFile
from tierstore.tiers import FileTier, Tier
from tierstore.tuning import Tuning, per_second

_log = logging.getLogger("tierstore.build")


def folders_of(nvme: NvmeTier) -> list[Path]:
    """The folders of a policy's swap files. Raises PolicyError or SwapError."""
    return swap_folders(nvme.paths, allows_shared=nvme.allow_shared_folder)


def wants_direct(nvme: NvmeTier) -> bool | None:
    """Whether files are to be opened with O_DIRECT; None: where that works."""
    return None if nvme.io.direct == "auto" else nvme.io.direct


def open_files(nvme: NvmeTier, engine: Engine) -> list[SwapFile]:
    """Open a file in each folder, as the engine can read it. Raises SwapError, with none of them left open."""
    direct = wants_direct(nvme) if engine.supports_direct else False
    files: list[SwapFile] = []
    with ExitStack() as undo:
        for folder in folders_of(nvme):
            files.append(SwapFile(Path(folder), direct=direct))
            undo.callback(files[-1].close)
        undo.pop_all()
    return files


def open_nvme_engine(nvme: NvmeTier, open_engine: Callable[..., Engine], tuning: Tuning | None) -> Engine:
    """Open the engine of a policy, with what is chosen where the policy says `auto`. Raises PolicyError."""
    io = nvme.io
    threads, depth, size = (
        None if value == "auto" else value for value in (io.threads, io.queue_depth, io.request_size)
    )
    if tuning is not None:
        threads, depth, size = (choice.value for choice in (tuning.threads, tuning.queue_depth, tuning.request_size))
    engine = open_engine(io.engine, threads=threads, queue_depth=depth, request_size=size)
    engine.timeout_seconds = io.timeout
    if io.direct is True and not engine.supports_direct:
        engine.close()
        raise PolicyError(
            f"tiers.nvme.io.direct: true, but the {engine.name} engine is buffered: choose threads or libaio"
        )
    return engine


def open_file_tier(nvme: NvmeTier, engine: Engine, extent_bytes: int) -> FileTier:
    """Open a policy's files, of no size yet, as a tier. Raises SwapError, with none of them left open."""
    tier = FileTier("nvme", open_files(nvme, engine), extent_bytes, checksum=nvme.io.checksum)
    try:
        for file in tier.files:
            engine.prepare(file.path)
    except BaseException:
        tier.close()
        raise
    return tier


def io_stats(engine: Engine | None, tier: Tier | None) -> IoStats:
    """What is known of files and engine from the beginning on."""
    if engine is None or not isinstance(tier, FileTier):
        return IoStats("none", direct=False, paths=())
    return IoStats(engine.name, all(file.direct for file in tier.files), tier.paths, tier.keeps_sums)


def tell_rates(rates: Rates, tuning: Tuning | None) -> None:
    """Log what was measured, and what was chosen by it."""
    for name, path in rates.paths.items():
        _log.info(
            "calibrated %s: reads %s, writes %s, both at once %s; 4KiB in %.2f ms (%s)",
            name,
            *map(per_second, (path.read_bytes_per_second, path.write_bytes_per_second, path.mixed_bytes_per_second)),
            path.latency_seconds * 1e3,
            rates.measured_at,
        )
    for note in rates.notes:
        _log.info("calibration: %s", note)
    if tuning is None:
        _log.info("without rates of a swap path the defaults stay")
        return
    for choice in tuning:
        _log.info("%s", choice)
    if tuning.bound:
        _log.info("%s", tuning.bound)
