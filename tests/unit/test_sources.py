"""Bits of a checkpoint's tensors: each read with its neighbours, and once, wherever it goes."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tierstore.checkpoint import Writer
from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.parts import Part, Read
from tierstore.checkpoint.reader import Reader, StoredBlocks, Use
from tierstore.errors import DamagedCheckpointError
from tierstore.results import Results
from tierstore.sources import WINDOW_BYTES, Source, Window

WINDOW = WINDOW_BYTES // 4
FIELDS = ("exp_avg", "exp_avg_sq")


class FailingReader:
    """Two fields whose values say where they are; the read numbered `fails_at` fills half of the memory, and fails."""

    path = "memory"

    def __init__(self, elements: int, fails_at: int | None = None) -> None:
        self.elements = elements
        self.fails_at = fails_at
        self.reads: list[tuple[str, int, int]] = []

    @property
    def header(self) -> Mapping[str, object]:
        return {}

    def entries(self, section: str) -> Mapping[int, Entry]:
        fields = dict.fromkeys(FIELDS, torch.float32)
        return {0: Entry("weight", (self.elements,), (1,), torch.float32, fields)}

    def parts(self, section: str, number: int, field: str) -> Sequence[tuple[Part, Read]]:
        return [(Part.all_of((self.elements,), (1,)), partial(self._read, field))]

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> None:
        return None

    def _read(self, field: str, start: int, into: Tensor) -> None:
        self.reads.append((field, start, len(into)))
        if len(self.reads) - 1 == self.fails_at:
            into[: len(into) // 2].fill_(-1.0)
            raise OSError("unreadable")
        into.copy_(values(field, start, len(into)))


def values(field: str, start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.float32) + FIELDS.index(field) / 2


@pytest.fixture
def results() -> Results:
    return Results(1 << 30)


def asked(source: Source, numel: int, cuts: Iterable[int], fields: Sequence[str] = FIELDS) -> dict[str, Tensor]:
    """Ask for fields bit by bit, in turn; wait when all is asked for."""
    part, found = Part.all_of((numel,), (1,)), {field: torch.zeros(numel) for field in fields}
    windows: list[Window] = []
    for start, stop in itertools.pairwise(cuts):
        for field, into in found.items():
            windows += source.want("params", 0, field, part, start, stop - start, into[start:stop])
    for window in windows:
        window.begin()
        window.wait()
    return found


def every(size: int, numel: int) -> list[int]:
    return [*range(0, numel, size), numel]


def test_bits_in_order_are_read_in_windows_whatever_cuts_them(results: Results) -> None:
    reader = FailingReader(2 * WINDOW + 5)
    found = asked(Source(reader, results), reader.elements, every(100_000, reader.elements))
    for field in FIELDS:
        assert torch.equal(found[field], values(field, 0, reader.elements))
    windows = [(0, WINDOW), (WINDOW, WINDOW), (2 * WINDOW, 5)]
    assert sorted(reader.reads) == [(field, *window) for field in FIELDS for window in windows]


def test_what_is_as_long_as_a_window_is_read_straight_to_its_place(results: Results) -> None:
    reader = FailingReader(3 * WINDOW)
    found = asked(Source(reader, results), reader.elements, [0, 10, 10 + WINDOW, 3 * WINDOW], ["exp_avg"])
    assert torch.equal(found["exp_avg"], values("exp_avg", 0, reader.elements))
    assert ("exp_avg", 10, WINDOW) in reader.reads


def test_a_window_that_could_not_be_read_serves_nobody(results: Results) -> None:
    source, into = Source(FailingReader(2 * WINDOW, fails_at=1), results), torch.zeros(10)
    part = Part.all_of((2 * WINDOW,), (1,))
    source.read("params", 0, "exp_avg", part, 0, into)
    assert torch.equal(into, values("exp_avg", 0, 10))
    with pytest.raises(OSError, match="unreadable"):
        source.read("params", 0, "exp_avg", part, 10, into)
    source.read("params", 0, "exp_avg", part, 10, into)
    assert torch.equal(into, values("exp_avg", 10, 10))


# -- blocks -------------------------------------------------------------------------------------------------------

ELEMENTS = 2_000_003
"""Four blocks of float32, of which none ends where a bit does."""


class CountingReader(Reader):
    """Notes which blocks are read."""

    def __init__(self, path: Path) -> None:
        self.begun: list[tuple[str, int]] = []
        super().__init__(path)

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> StoredBlocks | None:
        blocks = super().blocks(section, number, field, wanted)
        return blocks and StoredBlocks(blocks.elements, partial(self._note, field, blocks.begin))

    def _note(
        self, field: str, begin: Callable[[int, Use], Future[None] | None], number: int, use: Use
    ) -> Future[None] | None:
        self.begun.append((field, number))
        return begin(number, use)


@pytest.fixture(params=["none", "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with Writer(tmp_path / "c", header={}, compression=request.param) as writer:
        fields = dict.fromkeys(FIELDS, torch.float32)
        writer.add("params", 0, Entry("weight", (ELEMENTS,), (1,), torch.float32, fields))
        for field in FIELDS:
            writer.write("params", 0, field, 0, values(field, 0, ELEMENTS))
        writer.commit()
    return tmp_path / "c"


@pytest.mark.parametrize("size", [1000, 100_000, 600_001, ELEMENTS])
def test_every_block_is_read_once_whatever_cuts_it(saved: Path, results: Results, size: int) -> None:
    with CountingReader(saved) as reader:
        found = asked(Source(reader, results), ELEMENTS, every(size, ELEMENTS))
        assert all(torch.equal(found[field], values(field, 0, ELEMENTS)) for field in FIELDS)
        assert sorted(reader.begun) == [(field, number) for field in FIELDS for number in range(4)]


def test_a_block_that_had_to_begin_early_is_read_again_for_the_rest(saved: Path, results: Results) -> None:
    with CountingReader(saved) as reader:
        source, into = Source(reader, results), torch.zeros(ELEMENTS)
        for start in (0, 5000):  # `read` waits
            source.read("params", 0, "exp_avg", Part.all_of((ELEMENTS,), (1,)), start, into[start : start + 5000])
        assert torch.equal(into[:10_000], values("exp_avg", 0, 10_000))
        assert reader.begun == [("exp_avg", 0)] * 2


def test_bits_are_handed_to_whoever_takes_them_as_often_as_blocks_cut_them(saved: Path, results: Results) -> None:
    taken: dict[int, Tensor] = {}

    def put(start: int, bit: Tensor) -> None:
        taken[start] = bit.clone()

    with CountingReader(saved) as reader:
        windows = Source(reader, results).want(
            "params", 0, "exp_avg", Part.all_of((ELEMENTS,), (1,)), 999, ELEMENTS - 999, put
        )
        for window in windows:
            window.begin()
            window.wait()
    assert len(taken) == len(windows) == 4
    assert torch.equal(torch.cat([taken[start] for start in sorted(taken)]), values("exp_avg", 999, ELEMENTS - 999))


def test_a_filesystem_that_takes_no_advice_is_read_all_the_same(
    saved: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def refuse(fd: int, offset: int, nbytes: int, advice: int) -> None:
        refused.append(advice)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    part, into = Part.all_of((ELEMENTS,), (1,)), torch.full((ELEMENTS,), -1.0)
    with Reader(saved) as reader:
        Source(reader, results).read("params", 0, "exp_avg", part, 0, into)
    assert torch.equal(into, values("exp_avg", 0, ELEMENTS))
    assert set(refused) == {os.POSIX_FADV_WILLNEED}


def test_small_tensors_are_read_at_once_by_whoever_asks(tmp_path: Path, results: Results) -> None:
    with Writer(tmp_path / "c", header={}) as writer:
        for number in range(3):
            writer.add("params", number, Entry(str(number), (1000,), (1,), torch.float32, {"exp_avg": torch.float32}))
            writer.write("params", number, "exp_avg", 0, values("exp_avg", number, 1000))
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        source, into = Source(reader, results), torch.zeros(3, 1000)
        for number in range(3):
            for half in (0, 500):
                where = "params", number, "exp_avg", Part.all_of((1000,), (1,)), half, 500
                (window,) = source.want(*where, into[number, half : half + 500])
            assert torch.equal(into[number], values("exp_avg", number, 1000))
            window.wait()


def test_a_damaged_block_is_told_to_those_who_wait_for_it_and_to_no_other(saved: Path, results: Results) -> None:
    file = saved / "params/000000/exp_avg/c.0"
    content = bytearray(file.read_bytes())
    content[100] ^= 1  # in one of the blocks: compressed ones lie in any order
    file.write_bytes(content)
    part, into = Part.all_of((ELEMENTS,), (1,)), torch.full((ELEMENTS,), -1.0)
    with Reader(saved) as reader:
        windows = Source(reader, results).want("params", 0, "exp_avg", part, 0, ELEMENTS, into)
        errors = []
        for window in windows:
            try:
                window.wait()
            except DamagedCheckpointError as error:
                errors.append(f"elements {window.first:,} to {window.end:,} is damaged" in str(error))
                assert all((into[window.first : window.end] == -1).tolist())  # nobody gets what was not written
            else:
                own = slice(window.first, window.end)
                assert torch.equal(into[own], values("exp_avg", window.first, window.end - window.first))
    assert len(windows) == 4 and errors == [True]
