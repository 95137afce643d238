"""Processes that save or load one checkpoint together: they tell each other what they have, and what went wrong.

Nothing but `exchange` is a collective, and every rank comes to each one whatever happens to it in between: errors
travel as values. So no rank waits for one that has failed, unless its process is gone; then the process group's own
timeout ends the wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from tierstore.contents import is_sharded
from tierstore.errors import CheckpointValueError, RanksError

T = TypeVar("T")

MOST_TOLD = 8
"""Errors of ranks that a message names."""


class Ranks:
    """Rank `rank` of `count`, of which all call the same methods in the same order. For the thread that trains.

    `gather` gives everybody's values, in the order of ranks.
    """

    def __init__(self, rank: int, count: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank = rank
        self.count = count
        self._gather = gather
        self._is_broken = False

    @classmethod
    def of(cls, tensors: Iterable[Tensor], process_group: dist.ProcessGroup | None) -> Ranks | None:
        """The ranks of a process group, the default one where none is given; None if nothing is sharded and none is.

        Raises CheckpointValueError in a process that is not in it.
        """
        if process_group is None and not any(is_sharded(tensor) for tensor in tensors):
            return None
        rank, count = dist.get_rank(process_group), dist.get_world_size(process_group)
        if rank < 0:
            raise CheckpointValueError("this process is none of the process group: call on its ranks alone")

        def gather(value: Any) -> list[Any]:
            values = [None] * count
            dist.all_gather_object(values, value, group=process_group)
            return values

        return cls(rank, count, gather)

    def exchange(self, value: T) -> list[T]:
        """Tell everybody a small value, and hear theirs. Raises RanksError if some do not answer."""
        try:
            return self._gather(value)
        except Exception as error:
            self._is_broken = True
            raise RanksError(f"rank {self.rank} of {self.count} waits for the others in vain ({error})") from error

    def each(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank. Raises on all of them if it fails on any.

        The same kind of error on all ranks is raised as it is, everything else as a RanksError.
        """
        result, error = _attempt(work)
        told = self.exchange(None if error is None else (type(error).__name__, str(error)))
        failed = {rank: found for rank, found in enumerate(told) if found is not None}
        if error is not None and not isinstance(error, Exception):
            raise error  # a signal's, say
        if error is not None and len(failed) == self.count and len({kind for kind, _ in failed.values()}) == 1:
            raise error
        if failed:
            raise RanksError(_listed(failed, self.count)) from error
        (value,) = result
        return value

    def first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0, and tell everybody the result, which is small."""
        mine = self.each(lambda: work() if self.rank == 0 else None)
        return self.exchange(mine)[0]  # type: ignore[return-value]

    def meet(self) -> None:
        """Wait until all are here, or it is known that one will not come."""
        if not self._is_broken:
            with contextlib.suppress(RanksError):
                self.exchange(None)


def agree(ranks: Ranks | None, work: Callable[[], T]) -> T:
    """Do `work`, on each of the ranks if there are any."""
    return work() if ranks is None else ranks.each(work)


def _attempt(work: Callable[[], T]) -> tuple[list[T], BaseException | None]:
    try:
        return [work()], None
    except BaseException as error:
        return [], error


def _listed(failed: dict[int, tuple[str, str]], count: int) -> str:
    shown = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in list(failed.items())[:MOST_TOLD])
    more = f"; and {len(failed) - MOST_TOLD} more" if len(failed) > MOST_TOLD else ""
    return f"{len(failed)} of {count} ranks failed, so none goes on: {shown}{more}"
