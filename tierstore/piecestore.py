"""Values of bytes in a chunk store: finds them room, enlarges tiers for it, and copies in and out.

It knows neither names nor dtypes; a value is the pieces it lies in. Its chunks are numbered below zero, so that an
optimizer's, from zero on, can be in the same store. A value is written whole or not at all, unless it is overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tierstore.device import Device
from tierstore.errors import CapacityError, InvariantError, LeaseError, TransferTimeoutError
from tierstore.growth import grow_to_fit, slab_extents_of
from tierstore.pieces import Kind, Piece, Shelf
from tierstore.placement import Asked, Need
from tierstore.rebalance import Rebalance
from tierstore.store import ChunkInfo, ChunkStore, Setup, Use


class PieceStore(ChunkStore):
    """A chunk store that keeps pieces; the tiers in `growing` become larger as that is needed."""

    def __init__(self, setup: Setup, *, describe: Callable[[int], str], growing: Mapping[str, Asked]) -> None:
        super().__init__(setup, describe=describe)
        self._growing = dict(growing)
        self._shelf = Shelf(self._extent_bytes)
        self._abandoned: set[int] = set()  # chunks without a piece that could not be removed yet

    # -- copying ------------------------------------------------------------------------------------------------

    def _write_anew(self, kind: Kind, raw: Tensor) -> tuple[Piece, ...]:
        """Find room for a value and write it. Raises CapacityError or DiskFullError, or what stopped a move."""
        pieces = self._reserve(kind, raw.numel())
        try:
            self._write(kind, pieces, raw)
        except BaseException:
            self._give_back(kind, pieces)
            raise
        return pieces

    def _write_at_once(self, kind: Kind, pieces: Sequence[Piece], raw: Tensor) -> bool:
        """Overwrite a value with all its chunks held, so that nothing can fail between. False: there is no room to."""
        device = self._device(kind)
        with contextlib.ExitStack() as held:
            try:
                records = [held.enter_context(self.lease_chunk(piece.chunk)) for piece in pieces]
            except CapacityError:
                return False
            for piece, part, record in zip(pieces, _parts(pieces, raw), records, strict=True):
                device.launch(partial(_copy_bytes, inside(record, piece), part))
            device.finish()
        return True

    def _write(self, kind: Kind, pieces: Sequence[Piece], raw: Tensor) -> None:
        """Overwrite a value; if that fails half-way, so is the value."""
        self._visit(kind, pieces, raw, _copy_bytes)

    def _read(self, kind: Kind, pieces: Sequence[Piece], raw: Tensor) -> None:
        """Copy a value into `raw` (1-D uint8, on any device)."""
        self._visit(kind, pieces, raw, lambda kept, part: _copy_bytes(part, kept))

    def _visit(self, kind: Kind, pieces: Sequence[Piece], raw: Tensor, copy: Callable[[Tensor, Tensor], None]) -> None:
        """Bring the pieces to where they are used, one after another, and launch `copy(piece, part of raw)` there."""
        device = self._device(kind)
        both = {piece.chunk: (piece, part) for piece, part in zip(pieces, _parts(pieces, raw), strict=True)}

        def use(chunk: int, record: Tensor, is_fresh: bool) -> None:
            piece, part = both[chunk]
            device.launch(partial(copy, inside(record, piece), part))

        self._pass_over(list(both), use)
        device.finish()

    def _pass_over(self, chunks: Sequence[int], use: Use) -> None:
        """Use chunks as a run does, except that breaking off leaves the store fit for runs: no value is half of two."""
        self._return()
        self._raise_errors()
        self._serve()
        before = self._broken_off, self._failure
        try:
            self._execute(chunks, (), use)
        finally:
            self._broken_off, self._failure = before

    # -- chunks -------------------------------------------------------------------------------------------------

    def _reserve(self, kind: Kind, nbytes: int) -> tuple[Piece, ...]:
        """Find room for a tensor, in new chunks as far as it takes any. Raises CapacityError or DiskFullError."""
        self._return()
        self._sweep()
        pieces = self._shelf.fit(kind, nbytes)
        info = ChunkInfo(self._extent_bytes, kind.compute, kind.named)
        new = {piece.chunk: info for piece in pieces if piece.chunk not in self._shelf}
        if new:
            self._grow_for(new)
            self.add_chunks(new)
        self._shelf.take(kind, pieces)
        return pieces

    def _grow_for(self, new: Mapping[int, ChunkInfo]) -> None:
        """Enlarge tiers without a given capacity until new chunks find a home too."""
        if not self._growing:
            return
        arenas = {name: tier.arena for name, tier in self.setup.tiers.items()}
        slabs = {name: max(self.setup.slab_extents[name], slab_extents_of(a.capacity)) for name, a in arenas.items()}
        needs = [Need(info.compute, info.named, self._ledger.home(chunk)) for chunk, info in self._infos.items()]
        needs += [Need(info.compute, info.named) for info in new.values()]
        rooms = grow_to_fit(
            needs, self._rooms(), self._growing, slabs, order=self.setup.order, extent_bytes=self._extent_bytes
        )
        for name in reversed(self._line):  # files first: a full disk must change nothing
            missing = rooms[name].extents - arenas[name].lasting
            self.setup.tiers[name].grow(missing, slab_extents=slabs[name])

    def _carry_out(self, plan: Rebalance) -> None:
        """Resize tiers under pressure: from then on those that grow do so no further than pressure allows."""
        super()._carry_out(plan)
        for name in plan.sizes.keys() & self._growing.keys() - {"nvme"}:
            self._growing[name] = replace(self._growing[name], limit=self.setup.tiers[name].arena.lasting)

    def _check_pieces(self, values: Iterable[Sequence[Piece]]) -> None:
        """Raise InvariantError unless these values, and gaps, fill the chunks below zero, each byte once."""
        self._shelf.check([piece for pieces in values for piece in pieces])
        there = {chunk for chunk in self._ledger if chunk < 0}
        wanted = self._shelf.chunks | self._abandoned
        if there != wanted:
            raise InvariantError(f"chunks without a piece: {there - wanted}; pieces without a chunk: {wanted - there}")

    def _device(self, kind: Kind) -> Device:
        """The device of the tier where values of a kind are used."""
        return self._traffic.memory(kind.compute).device

    def _give_back(self, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Free a value's pieces, and the chunks in which nothing else is left."""
        self._abandoned.update(self._shelf.give_back(kind, pieces))
        self._sweep()

    def _sweep(self) -> None:
        """Remove chunks without a piece; one whose move does not end is left for the next time."""
        for chunk in sorted(self._abandoned):
            with contextlib.suppress(LeaseError, TransferTimeoutError):
                self.remove_chunk(chunk)
                self._abandoned.discard(chunk)


def inside(record: Tensor, piece: Piece) -> Tensor:
    """View a piece's bytes in the record of its chunk."""
    return record[piece.offset : piece.offset + piece.length]


def _copy_bytes(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source)


def _parts(pieces: Sequence[Piece], raw: Tensor) -> tuple[Tensor, ...]:
    """Cut a value's bytes as its pieces are cut."""
    return torch.split(raw, [piece.length for piece in pieces]) if pieces else ()
