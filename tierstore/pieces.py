"""Which bytes of which chunk belong to which named tensor. Pure book-keeping: it knows neither names nor values.

A tensor lies in pieces: whole chunks while it is larger than one, then the rest in the first gap that fits, in a chunk
shared with others of its kind. Every byte of a shared chunk is in one piece or in one gap, and neighbouring gaps are
one gap. A chunk exists as long as a piece of it does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import InvariantError
from tierstore.layout import round_up

PIECE_ALIGNMENT = 64
"""Pieces begin at multiples of so many bytes: a cache line, and enough for every dtype."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that may share a chunk: one dtype, one tier where they are used, one tier they were told to live in."""

    dtype: torch.dtype
    compute: str
    named: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes from `offset` on in a chunk's record."""

    chunk: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The byte behind it, rounded up to where the next piece may begin."""
        return self.offset + round_up(self.length, PIECE_ALIGNMENT)


class Shelf:
    """The chunks of named tensors, numbered downwards from -1, and the gaps in them."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._gaps: dict[int, list[tuple[int, int]]] = {}  # by chunk: where each gap begins and ends, in order
        self._of_kind: dict[Kind, dict[int, None]] = {}
        self._next = -1

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._gaps

    @property
    def chunks(self) -> set[int]:
        """The numbers of the chunks that exist."""
        return set(self._gaps)

    def fit(self, kind: Kind, nbytes: int) -> tuple[Piece, ...]:
        """Say where `nbytes` would lie, in existing chunks and new ones; take nothing yet."""
        whole, rest = divmod(nbytes, self.chunk_bytes)
        numbers = itertools.count(self._next, -1)
        pieces = [Piece(next(numbers), 0, self.chunk_bytes) for _ in range(whole)]
        if rest:
            chunk, offset = self._first_gap(kind, rest) or (next(numbers), 0)
            pieces.append(Piece(chunk, offset, rest))
        return tuple(pieces)

    def take(self, kind: Kind, pieces: Iterable[Piece]) -> None:
        """Give pieces that `fit` has just found to a tensor."""
        for piece in pieces:
            if piece.chunk not in self._gaps:
                self._gaps[piece.chunk] = [(0, self.chunk_bytes)]
                self._of_kind.setdefault(kind, {})[piece.chunk] = None
                self._next = min(self._next, piece.chunk - 1)
            self._carve(piece)

    def give_back(self, kind: Kind, pieces: Iterable[Piece]) -> list[int]:
        """Make gaps of pieces; return the chunks in which nothing is left, which are struck out."""
        empty = []
        for piece in pieces:
            gaps = self._gaps[piece.chunk] = _merged([*self._gaps[piece.chunk], (piece.offset, piece.end)])
            if gaps == [(0, self.chunk_bytes)]:
                empty.append(piece.chunk)
                del self._gaps[piece.chunk], self._of_kind[kind][piece.chunk]
        if not self._of_kind.get(kind, True):
            del self._of_kind[kind]
        return empty

    def check(self, pieces: Sequence[Piece]) -> None:
        """Raise InvariantError unless these pieces and the gaps fill every chunk, each byte once."""
        filled = Counter({chunk: sum(end - start for start, end in gaps) for chunk, gaps in self._gaps.items()})
        ranges: dict[int, list[tuple[int, int]]] = {chunk: list(gaps) for chunk, gaps in self._gaps.items()}
        for piece in pieces:
            filled[piece.chunk] += piece.end - piece.offset
            ranges.setdefault(piece.chunk, []).append((piece.offset, piece.end))
        for chunk, found in ranges.items():
            is_whole = filled[chunk] == self.chunk_bytes and _merged(found) == [(0, self.chunk_bytes)]
            if not is_whole or chunk not in self._gaps:
                raise InvariantError(f"pieces and gaps do not fill chunk {chunk} of {self.chunk_bytes} bytes: {found}")

    def _first_gap(self, kind: Kind, nbytes: int) -> tuple[int, int] | None:
        for chunk in self._of_kind.get(kind, ()):
            for start, end in self._gaps[chunk]:
                if end - start >= nbytes:
                    return chunk, start
        return None

    def _carve(self, piece: Piece) -> None:
        gaps = self._gaps[piece.chunk]
        at = next(at for at, (start, end) in enumerate(gaps) if start <= piece.offset and piece.end <= end)
        start, end = gaps[at]
        gaps[at : at + 1] = [gap for gap in ((start, piece.offset), (piece.end, end)) if gap[0] < gap[1]]


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
