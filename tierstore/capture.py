"""Copies the state of one moment out of its chunks, while training goes on: each chunk before it is changed next.

A chunk that a run is about to use is copied out of the extent that it is used in, which costs no read; those that no
run has come to are read where they are. What of a split master only the parameter holds is copied with its chunk, so
that it must not be changed by hand before. Copies go to a `WriteBehind`; one control thread makes them, the one that
may enter the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from tierstore.behind import Sink, WriteBehind
from tierstore.build import Plant
from tierstore.errors import CheckpointError
from tierstore.layout import Chunk, Layout
from tierstore.members import Member
from tierstore.records import MASTER, field_in_parts, high_half, is_split
from tierstore.scratch import Scratch
from tierstore.signals import break_point
from tierstore.store import Use
from tierstore.tensors import TieredStore

SECTION = "params"

Wanted = Mapping[int, Sequence[str]]
"""Fields, as others see them, of parameters by position."""


class Capture:
    """The chunks of one binding that are still to be copied. Errors are given to `behind`, and end it."""

    def __init__(
        self, wanted: Wanted, layout: Layout, members: Sequence[Member], store: TieredStore, plant: Plant
    ) -> None:
        self._wanted = wanted
        self._chunks = {
            chunk.number: chunk for chunk in layout.chunks if any(wanted.get(span.parameter) for span in chunk.spans)
        }
        self._members = members
        self._are_complex = frozenset(position for position in wanted if members[position].dtype.is_complex)
        self._store = store
        self._plant = plant
        self._behind: WriteBehind | None = None
        self._scratch = Scratch()  # of the thread that writes

    @property
    def buffer_bytes(self) -> int:
        """The largest that a buffer must be."""
        return max((chunk.record_bytes + _high_bytes(chunk) for chunk in self._chunks.values()), default=0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to be copied."""
        return not self._chunks

    def begin(self, behind: WriteBehind) -> None:
        """Copy what runs are about to use from now on."""
        self._behind = behind
        if self.is_over:
            behind.complete()

    def before(self, use: Use) -> Use:
        """Make of a use of chunks one that copies what is left to be copied of each first."""

        def capture_and_use(number: int, record: Tensor, is_fresh: bool) -> None:
            if number in self._chunks:
                self._take([self._chunks[number]], partial(self._copy, record))
            use(number, record, is_fresh)

        return use if self.is_over else capture_and_use

    def rest(self) -> None:
        """Copy all that is left, moving nothing. What breaks it off, as a second Ctrl-C does, ends the checkpoint."""
        while self._chunks:
            assert self._behind is not None
            try:
                break_point()
                self._take(list(islice(self._chunks.values(), self._behind.most_at_once)), self._read)
            except BaseException as error:
                self._give_up(CheckpointError(f"it was broken off before all was copied ({type(error).__name__})"))
                raise

    def _take(self, chunks: Sequence[Chunk], fill: Callable[[Sequence[tuple[Chunk, Tensor]]], None]) -> None:
        """Let chunks be copied into a buffer each by `fill`, and be written."""
        behind = self._behind
        assert behind is not None
        if behind.has_failed:
            self._chunks.clear()
            behind.complete()
            return
        taken: list[tuple[Chunk, Tensor]] = []
        try:
            for chunk in chunks:
                buffer, waited = behind.wait_for_buffer()
                self._store.count_write_wait(waited)
                taken.append((chunk, buffer))
        except Exception as error:  # no memory for one: this save ends, training goes on
            self._give_up(error)
            return
        try:
            fill(taken)
        except Exception as error:
            for _ in taken:
                behind.drop()
            self._give_up(error)
            return
        for chunk, buffer in taken:
            del self._chunks[chunk.number]
            write = partial(_write, chunk, buffer, self._wanted, self._are_complex, self._scratch)
            behind.put(buffer, write, _bytes_written(chunk, self._wanted))
        if not self._chunks:
            behind.complete()

    def _give_up(self, error: BaseException) -> None:
        assert self._behind is not None
        self._behind.fail(error)
        self._chunks.clear()

    def _copy(self, record: Tensor, taken: Sequence[tuple[Chunk, Tensor]]) -> None:
        """Copy a record that is about to be used, on the device it is used on."""
        ((chunk, buffer),) = taken

        def copy() -> None:
            buffer[: chunk.record_bytes].copy_(record[: chunk.record_bytes])
            self._copy_high_halves(chunk, buffer)

        self._plant.launch(chunk.cls.compute, copy)
        if chunk.cls.compute == "gpu" and self._plant.gpu is not None:
            self._plant.gpu.record().wait()

    def _read(self, taken: Sequence[tuple[Chunk, Tensor]]) -> None:
        records = [(chunk.number, buffer[: chunk.record_bytes]) for chunk, buffer in taken]
        are_made = self._store.read_records(records)
        for (chunk, buffer), (_, record), is_made in zip(taken, records, are_made, strict=True):
            if not is_made:
                record.zero_()
            self._copy_high_halves(chunk, buffer)

    def _copy_high_halves(self, chunk: Chunk, buffer: Tensor) -> None:
        """Copy what of split masters their parameters hold."""
        if not is_split(chunk.cls):
            return
        high = _high_part(chunk, buffer)
        for span in chunk.spans:
            if MASTER in self._wanted.get(span.parameter, ()):
                half = high_half(self._members[span.parameter]).narrow(0, span.start, span.length)
                high.narrow(0, span.offset, span.length).copy_(half)


def _high_bytes(chunk: Chunk) -> int:
    return chunk.elements * torch.bfloat16.itemsize if is_split(chunk.cls) else 0


def _high_part(chunk: Chunk, buffer: Tensor) -> Tensor:
    return buffer[chunk.record_bytes :][: _high_bytes(chunk)].view(torch.bfloat16)


def _bytes_written(chunk: Chunk, wanted: Wanted) -> int:
    """Bytes of fields as others see them."""
    sizes = {field.name: field.dtype.itemsize for field in chunk.cls.fields} | {MASTER: torch.float32.itemsize}
    return sum(span.length * sizes[name] for span in chunk.spans for name in wanted.get(span.parameter, ()))


def _write(
    chunk: Chunk, buffer: Tensor, wanted: Wanted, are_complex: frozenset[int], scratch: Scratch, sink: Sink
) -> None:
    """Write the wanted fields of a chunk from a buffer, knowing nothing else."""
    high = _high_part(chunk, buffer) if is_split(chunk.cls) else None
    for span in chunk.spans:
        half = None if high is None else high.narrow(0, span.offset, span.length)
        for name in wanted.get(span.parameter, ()):
            for start, values in field_in_parts(chunk, span, name, buffer, half, scratch):
                if span.parameter in are_complex:
                    pairs = torch.view_as_complex(values.view(-1, 2))
                    sink.write(SECTION, span.parameter, name, (span.start + start) // 2, pairs)
                else:
                    sink.write(SECTION, span.parameter, name, span.start + start, values)
