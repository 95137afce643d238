"""Parts of a checkpoint's tensors: each read with its neighbours, in memory that the next ones take over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.parts import Part, Read
from tierstore.results import Results
from tierstore.sources import WINDOW_BYTES, Source

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

    def _read(self, field: str, start: int, into: Tensor) -> None:
        self.reads.append((field, start, len(into)))
        if len(self.reads) - 1 == self.fails_at:
            into[: len(into) // 2].fill_(-1.0)
            raise OSError("unreadable")
        into.copy_(values(field, start, len(into)))


def values(field: str, start: int, count: int) -> Tensor:
    return torch.arange(start, start + count, dtype=torch.float32) + FIELDS.index(field) / 2


def part(source: Source, field: str, start: int, count: int) -> Tensor:
    into, elements = torch.zeros(count), source.reader.entries("params")[0].shape
    source.read("params", 0, field, Part.all_of(elements, (1,)), start, into)
    return into


@pytest.fixture
def results() -> Results:
    return Results(1 << 30)


def test_parts_in_order_are_read_in_windows_whatever_cuts_them(results: Results) -> None:
    reader = FailingReader(2 * WINDOW + 5)
    source, size = Source(reader, results), 100_000
    for start in range(0, reader.elements, size):
        for field in FIELDS:
            count = min(size, reader.elements - start)
            assert torch.equal(part(source, field, start, count), values(field, start, count))
    windows = [(0, WINDOW), (WINDOW, WINDOW), (2 * WINDOW, 5)]
    assert sorted(reader.reads) == [(field, *window) for field in FIELDS for window in windows]


def test_memory_of_a_window_that_could_not_be_read_serves_nobody(results: Results) -> None:
    """It is that of the window before, whose values are gone: they must be read again."""
    source = Source(FailingReader(2 * WINDOW, fails_at=1), results)
    assert torch.equal(part(source, "exp_avg", 0, 10), values("exp_avg", 0, 10))
    with pytest.raises(OSError, match="unreadable"):
        part(source, "exp_avg", WINDOW, 10)
    assert torch.equal(part(source, "exp_avg", 0, 10), values("exp_avg", 0, 10))
