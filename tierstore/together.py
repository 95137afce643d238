"""One checkpoint that several ranks write: each its own parts, in a folder of its own; rank 0 puts it in place.

Ranks agree before anything is written: on the path, on what each tensor is as a whole, and on who writes what several
have. Then each writes by itself, as for a checkpoint of its own, and no thread needs the others. When all have told
that they are done, rank 0 looks whether all is there, and lets it stand at the path in one instant.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tierstore.capture import SECTION
from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.replacement import check_keep_last
from tierstore.checkpoint.wholes import folder_of
from tierstore.checkpoint.writer import Writer
from tierstore.errors import CheckpointError, CheckpointFileError, CheckpointValueError
from tierstore.matching import listed
from tierstore.ranks import Ranks
from tierstore.saving import Compression, Content, OpenWriter, Path_, Save, begin
from tierstore.weights import SECTION as WEIGHTS
from tierstore.weights import checksum_of, identity

Item = tuple[str, int, Entry]
"""A section, a number in it, and the entry there."""
Boxes = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""By rank and entry: which part it is of a tensor, as a number; 0 for none."""

_log = logging.getLogger("tierstore.saving")


class SharedSave(Save):
    """This rank's part of a checkpoint on its way to disk. `wait` and `finish` are for all ranks to call.

    It is over when all have, and not before. `room`: on rank 0, the writer of the whole.
    """

    is_shared = True

    def __init__(
        self, ranks: Ranks, target: Path_, room: Writer | None, keep_last: int | None, path: Path_, *of_part: Any
    ) -> None:
        super().__init__(path, *of_part)
        self.path = Path(target)
        self._ranks = ranks
        self._room = room
        self._keep_last = keep_last
        self._is_over = False
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is there, or has failed, on all ranks."""
        return self._is_over

    @property
    def error(self) -> BaseException | None:
        """What went wrong, on whatever rank."""
        return self._error

    def finish(self) -> None:
        """Write what is left, hear that all others have, and let the checkpoint be there; raises nothing."""
        if self._is_over or self._pid != os.getpid():
            return
        with ExitStack() as ending:  # whatever is raised again meanwhile, all ranks come to the same ends
            ending.callback(self._leave)
            try:
                self._ranks.each(self._finish_part)
                self._ranks.each(self._put_in_place)
            except BaseException as error:
                ending.callback(self._ranks.meet)  # nobody is in the folder any more when rank 0 removes it
                self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Write no more of it: what stood at the path stays."""
        self._error = error
        super().give_up(error)

    def finish_alone(self) -> None:
        """Give it up unless it is over: it needs the other ranks, who may never come. Raises nothing."""
        if self._is_over or self._pid != os.getpid():
            return
        _log.error("%s is lost: call wait_for_checkpoint() on all ranks, while all is well", self.path)
        self._is_told = True
        self.give_up(CheckpointError(f"{self.path} was given up before all ranks had waited for it"))
        self._leave()

    def _finish_part(self) -> None:
        super().finish()
        if self._behind.error is not None:
            raise self._behind.error

    def _put_in_place(self) -> None:
        if self._room is not None:
            self._room.commit(keep_last=self._keep_last)

    def _leave(self) -> None:
        self._is_over = True
        if self._room is not None:
            self._room.close()


def begin_together(
    ranks: Ranks,
    path: Path_,
    content: Content,
    alone: Callable[[], AbstractContextManager[None]],
    *,
    compression: Compression,
    keep_last: int | None,
    open_writer: OpenWriter,
) -> SharedSave:
    """Begin a checkpoint of what all ranks have. Raises on all of them if one cannot."""
    ranks.each(partial(check_keep_last, keep_last))
    mine = _share(ranks, os.path.abspath(path), content)
    rooms: list[Writer] = []
    begun: list[SharedSave] = []

    def make_room() -> str:
        rooms.append(undoing.enter_context(open_writer(path, header=content.header, compression=compression)))
        return rooms[0].make_room(ranks.count)

    def start() -> None:
        kind = partial(SharedSave, ranks, path, rooms[0] if rooms else None, keep_last)
        own = _own_folder(folder, ranks.rank)
        begun.append(
            begin(own, mine, alone, compression=compression, keep_last=None, open_writer=open_writer, kind=kind)
        )

    with ExitStack() as undoing:
        folder = ranks.first(make_room)
        try:
            ranks.each(start)
        except BaseException as error:
            for save in begun:
                save.give_up(error)
            ranks.meet()  # nobody is in the folder any more when rank 0 removes it
            raise
        undoing.pop_all()
    return begun[0]


def _own_folder(folder: str, rank: int) -> str:
    own = f"{folder}/{folder_of(rank)}"
    if not os.path.isdir(os.path.dirname(own)):
        reason = f"rank 0 has made this folder, and rank {rank} does not see it: save where all ranks do"
        raise CheckpointFileError(errno.ENOENT, reason, folder)
    return own


def _share(ranks: Ranks, path: str, content: Content) -> Content:
    """What of the content this rank writes: the lowest of those that have the same part does.

    Raises CheckpointValueError, on all ranks, where they do not have the same tensors, or do not save to one path.
    """
    entries = [(SECTION, *item) for item in content.params.items()] + [(WEIGHTS, *i) for i in content.model.items()]
    forms = [path, *(f"{section}/{number}: {entry.of_whole()}" for section, number, entry in entries)]
    boxes = np.array([_box(entry) for _, _, entry in entries], np.int64)
    told = ranks.exchange((hashlib.sha256("\n".join(forms).encode()).digest(), boxes.tobytes()))
    if len({digest for digest, _ in told}) > 1:
        raise CheckpointValueError(_difference(ranks.exchange(forms)))
    boxes_of = np.stack([np.frombuffer(its, np.int64) for _, its in told])
    _refuse_what_differs(ranks, content, entries, boxes_of)
    lowest = (boxes_of == boxes).argmax(0)
    mine = [entry for entry, box, rank in zip(entries, boxes, lowest, strict=True) if box and rank == ranks.rank]
    of_section = {name: {n: entry for section, n, entry in mine if section == name} for name in (SECTION, WEIGHTS)}
    return replace(content, params=of_section[SECTION], model=of_section[WEIGHTS])


def _box(entry: Entry) -> int:
    """A number that stands for the box that a part is; 0 for one without elements of a tensor that has some."""
    part = entry.part
    if not part.numel and entry.of_whole().numel:
        return 0
    digest = hashlib.sha256(repr((part.offsets, part.shape)).encode()).digest()
    return int.from_bytes(digest[:7]) + 1


def _refuse_what_differs(ranks: Ranks, content: Content, entries: Sequence[Item], boxes_of: Boxes) -> None:
    """Compare the parameters that several ranks have, of which one alone will write each.

    Their values in memory, not their state: where state differs, they do after the next step. Raises
    CheckpointValueError on all ranks.
    """
    boxes, learned = boxes_of[ranks.rank], content.learned
    has_twin = ((boxes_of == boxes) & (boxes != 0)).sum(0) > 1

    def add_up() -> bytes:
        sums, known = np.zeros(len(entries), np.uint64), dict[tuple[Any, ...], int]()
        for at in has_twin.nonzero()[0]:
            tensor = learned.get(entries[at][:2])
            if tensor is not None:
                key = identity(tensor)
                known[key] = sums[at] = known.get(key) or checksum_of(tensor)
        return sums.tobytes()

    sums_of = np.stack([np.frombuffer(its, np.uint64) for its in ranks.exchange(ranks.each(add_up))])
    lowest_of = np.stack([(boxes_of == its).argmax(0) for its in boxes_of])
    differs = sums_of != np.take_along_axis(sums_of, lowest_of, 0)
    if differs.any():
        names = list(dict.fromkeys(entries[at][2].name for at in differs.any(0).nonzero()[0]))
        others = listed([str(rank) for rank in differs.any(1).nonzero()[0]])
        raise CheckpointValueError(
            f"parameters that several ranks have, of which the lowest one's are saved, have other values on rank "
            f"{others}: {listed(names)}. Save with the process_group of those that have the same, to a path of their "
            f"own, or make them equal first (torch.distributed.broadcast)"
        )


def _difference(by_rank: Sequence[Sequence[str]]) -> str:
    """What is not the same on all ranks: the first of it."""
    for of_each in zip_longest(*by_rank, fillvalue="nothing"):
        for rank, form in enumerate(of_each):
            if form != of_each[0]:
                return (
                    f"rank 0 has {of_each[0][:300]}, and rank {rank} {form[:300]}: ranks that save together need one "
                    f"path, and the same parameters in the same order, at the same step; name those by process_group"
                )
    raise AssertionError(by_rank)
