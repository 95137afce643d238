"""How many steps each parameter has made. Numbers until somebody asks for one, because most parameters share theirs.

A count that was given out is a tensor of its parameter's own, as torch's is: it counts on in place, and what is written
into it counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

from torch import Tensor

from tierstore.guard import in_plain_torch
from tierstore.rules import step_count


class StepCounts(MutableMapping[int, Tensor]):
    """Step counts (0-dim float32, on the CPU) by a parameter's position; a parameter has state exactly if it is here.

    Looking one up gives it out. A tensor that is set is copied, unless it is the one that was given out.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, float] = {}
        self._given: dict[int, Tensor] = {}

    def numbers(self) -> Mapping[int, float]:
        """All counts as they are now; gives none out."""
        for position, count in self._given.items():
            self._numbers[position] = count.item()
        return self._numbers

    def number(self, position: int) -> float | None:
        """A count as it is now, which is not given out; None for a parameter without state."""
        given = self._given.get(position)
        return self._numbers.get(position) if given is None else given.item()

    def copy_of(self, position: int) -> Tensor:
        """A count as a tensor that nobody else has."""
        count = self._given.get(position)
        return step_count(self._numbers[position]) if count is None else count.clone()

    def advance(self, counts: Mapping[int, Tensor]) -> None:
        """Let counts be what these tensors, many of which may be one, are now."""
        keys = list(map(id, counts.values()))
        numbers = {key: count.item() for key, count in dict(zip(keys, counts.values(), strict=True)).items()}
        self._numbers.update(zip(counts, map(numbers.__getitem__, keys), strict=True))
        for position in self._given.keys() & counts.keys():
            self._given[position].fill_(self._numbers[position])

    def __getitem__(self, position: int) -> Tensor:
        if position not in self._given:
            with in_plain_torch():  # it must serve later steps
                self._given[position] = step_count(self._numbers[position])
        return self._given[position]

    def __setitem__(self, position: int, count: Tensor) -> None:
        if self._given.get(position) is not count:
            self._given.pop(position, None)
        self._numbers[position] = count.item()

    def __delitem__(self, position: int) -> None:
        del self._numbers[position]
        self._given.pop(position, None)

    def __contains__(self, position: object) -> bool:
        return position in self._numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def clear(self) -> None:
        """Forget all counts."""
        self._numbers.clear()
        self._given.clear()
