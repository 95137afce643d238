"""Records cut into the fields and spans of their chunks. Making a view costs more than updating a small parameter does,
so the views are kept: as long as the store keeps its own view of the record, and so never longer than its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor

from tierstore.layout import Chunk

Fields = Mapping[str, list[Tensor]]
"""The fields of a record, each cut into the chunk's spans."""


class Cuts:
    """The views of records, by chunk."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Tensor], Fields]] = {}

    def of(self, chunk: Chunk, record: Tensor) -> Fields:
        """View a record field by field and span by span; nobody may change the lists."""
        kept = self._kept.get(chunk.number)
        if kept is not None and kept[0]() is record:
            return kept[1]
        fields = {kind.name: list(chunk.parts(record, kind.name)) for kind in chunk.cls.fields}
        views = self._kept

        def forget(gone: weakref.ref[Tensor], number: int = chunk.number) -> None:
            if number in views and views[number][0] is gone:
                del views[number]

        views[chunk.number] = weakref.ref(record, forget), fields
        return fields
