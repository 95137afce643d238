"""Measured rates in a user's cache folder: kept, refused when they are not what they should be, measured by one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.ratecache import Key, RateCache, cache_folder, machine_key, path_key
from tierstore.rates import MachineRates, PathRates, SizeRates

KEY: Key = {"source": "/dev/one", "cores": 2}
RATES = PathRates(1e-4, 2e9, 3e9, (SizeRates(4096, 1e-3, 1e9), SizeRates(8192, 2e-3, 2e9)))


@pytest.fixture
def cache(tmp_path: Path) -> RateCache:
    return RateCache(tmp_path / "new" / "folder")


def only_file(cache: RateCache) -> Path:
    assert cache.folder is not None
    (file,) = cache.folder.iterdir()
    return file


def test_rates_are_found_again_under_their_key_only(cache: RateCache) -> None:
    saved = cache.save(RATES, KEY)
    again = RateCache(cache.folder)
    found = again.load(PathRates, KEY)
    assert found == saved and found.rates == RATES and found.measured_at.endswith("+00:00")
    assert again.load(PathRates, {**KEY, "cores": 3}) is None
    assert again.load(MachineRates, KEY) is None
    assert only_file(cache).stat().st_mode & 0o077 == 0


def _with(**changes: object) -> str:
    text = {
        "format": 1,
        "measured_at": "2026-01-01",
        "key": KEY,
        "rates": {
            "latency_seconds": 1e-4,
            "write_bytes_per_second": 2e9,
            "mixed_bytes_per_second": 3e9,
            "sizes": [{"request_bytes": 4096, "seconds_alone": 1e-3, "bytes_per_second": 1e9}],
        },
    }
    rates = {**text["rates"], **changes.pop("rates", {})}  # type: ignore[dict-item]
    return json.dumps({**text, "rates": rates, **changes})


def test_a_file_as_those_below_but_for_their_fault_is_taken(cache: RateCache) -> None:
    cache.save(RATES, KEY)
    only_file(cache).write_text(_with())
    found = cache.load(PathRates, KEY)
    assert found is not None and found.measured_at == "2026-01-01"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[1]",
        "\0\xff",
        " " * (1 << 20),
        _with(format=2),
        _with(more=1),
        _with(key={**KEY, "cores": 3}),
        _with(rates={"latency_seconds": -1.0}),
        _with(rates={"latency_seconds": 0}),
        _with(rates={"latency_seconds": "1e-4"}),
        _with(rates={"latency_seconds": float("inf")}),
        _with(rates={"write_bytes_per_second": float("nan")}),
        _with(rates={"sizes": []}),
        _with(rates={"sizes": [{"request_bytes": 0, "seconds_alone": 1e-3, "bytes_per_second": 1e9}]}),
    ],
)
def test_broken_file_is_left_aside_told_and_replaced(
    content: str, cache: RateCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.save(RATES, KEY)
    only_file(cache).write_text(content, encoding="latin-1")
    assert cache.load(PathRates, KEY) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(only_file(cache)) in record.getMessage()
    cache.save(RATES, KEY)
    found = cache.load(PathRates, KEY)
    assert found is not None and found.rates == RATES


def test_file_of_another_user_is_left_aside(cache: RateCache, caplog: pytest.LogCaptureFixture) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    cache.save(RATES, KEY)
    os.chown(only_file(cache), 12345, 12345)
    assert cache.load(PathRates, KEY) is None
    assert "another user's" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_makes_nobody_wait_and_is_not_kept_open(
    make: Callable[[Path], None], cache: RateCache, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder in the place of the file took a file descriptor at each look."""
    cache.save(RATES, KEY)
    file = only_file(cache)
    file.unlink()
    make(file)
    before = len(os.listdir("/proc/self/fd"))
    assert cache.load(PathRates, KEY) is None
    assert str(file) in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("place", ["file", "proc", "nowhere"])
def test_without_a_folder_to_write_to_rates_are_kept_for_the_process_and_told_once(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = {"file": tmp_path / "file" / "cache", "proc": Path("/proc/tierstore"), "nowhere": None}[place]
    key: Key = {**KEY, "test": f"{tmp_path}"}
    caplog.set_level(logging.INFO)
    cache = RateCache(folder)
    assert cache.load(PathRates, key) is None
    cache.save(RATES, key)
    cache.save(RATES, key)
    found = RateCache(folder).load(PathRates, key)
    assert found is not None and found.rates == RATES
    assert caplog.text.count("for this process only") == 1
    with cache.turn() as turn:
        assert turn.without and not turn.is_taken


def test_one_process_at_a_time_has_the_turn(cache: RateCache) -> None:
    with cache.turn() as turn:
        assert not turn.is_taken and not turn.without
        assert _in_child(cache)
    assert not _in_child(cache)


def test_child_forked_in_a_turn_does_not_keep_it(cache: RateCache) -> None:
    read, write = os.pipe()
    with cache.turn():
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
    try:
        with cache.turn() as turn:
            assert not turn.is_taken
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def _in_child(cache: RateCache) -> bool:
    """Whether another process finds the turn taken."""
    child = os.fork()
    if child == 0:
        with cache.turn() as turn:
            os._exit(turn.is_taken)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/tierstore"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/tierstore"),
        ({}, "~/.cache/tierstore"),
    ],
)
def test_cache_is_where_the_user_keeps_caches(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder).expanduser()


def test_folders_of_one_filesystem_have_one_key(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert path_key(tmp_path, engine="auto") == path_key(tmp_path / "a", engine="auto")
    assert path_key(tmp_path, engine="auto") != path_key(Path("/proc"), engine="auto")
    assert machine_key(1) != machine_key(2)
