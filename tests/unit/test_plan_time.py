"""How long plans take on a model machine, against what no schedule can beat; and what they move, against the same.

The model: one thread issues and updates in the plan's order, as the store does; a link carries one chunk at a time, or
one each way where it is duplex; a move begins when its chunk has come as far as that and its extent has been left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.calls import calls_of
from tierstore.placement import PIPELINE_EXTENTS, spread
from tierstore.planning import ChunkView, Move, plan_step

LINE = ("cpu", "nvme")
STEPS = 6  # the last half of which is steady


@dataclass(eq=False)
class Transfer:
    """One move on the link."""

    issued: float
    direction: str
    after: tuple[Transfer, ...]
    end: float | None = None

    @property
    def ready(self) -> float | None:
        """When it can begin; None while something it follows has not ended."""
        ends = [one.end for one in self.after]
        return None if None in ends else max(self.issued, *(end for end in ends if end is not None), 0.0)


class Machine:
    """A cpu tier of `extents`, and files. A chunk takes a second each way, and `update` seconds to be updated."""

    def __init__(self, homes: Sequence[str], extents: int, *, update: float, is_duplex: bool) -> None:
        self.homes = homes
        self.at: dict[int, str | None] = dict.fromkeys(range(len(homes)))
        self.now = 0.0
        self.moves = 0  # of chunks that have bytes, over the link, in the last step
        self._update, self._is_duplex = update, is_duplex
        self._free = extents
        self._leaving: deque[Transfer] = deque()  # write-backs whose extents are promised to nobody
        self._last: dict[int, Transfer] = {}  # of each chunk
        self._pending: list[Transfer] = []
        self._link_free = dict.fromkeys(["cpu", "nvme"], 0.0)

    def step(self, order: Sequence[int], upcoming: Sequence[int]) -> None:
        """Carry out the plan of one step."""
        views = {chunk: ChunkView(tier, self.homes[chunk], "cpu") for chunk, tier in self.at.items()}
        room = {"cpu": self._free + len(self._leaving), "nvme": len(self.homes)}
        self.moves = 0
        for action in plan_step(order, upcoming, views, room, LINE).actions:
            if isinstance(action, Move):
                self._issue(action)
            else:
                last = self._last.get(action.chunk)
                self.now = max(self.now, self._end_of(last) if last is not None else 0.0) + self._update

    def _issue(self, move: Move) -> None:
        after = [self._last[move.chunk]] if move.chunk in self._last else []
        self.at[move.chunk] = move.destination
        if move.destination == "cpu":
            if self._free:
                self._free -= 1
            else:
                after.append(self._leaving.popleft())
        if move.source is None:  # nothing is moved, but the extent must have been left
            if after:
                self._last[move.chunk] = after[-1]
            return
        self.moves += 1
        transfer = Transfer(self.now, move.destination, tuple(after))
        self._last[move.chunk] = transfer
        self._pending.append(transfer)
        if move.source == "cpu":
            self._leaving.append(transfer)

    def _end_of(self, transfer: Transfer) -> float:
        """Let the link carry what can begin first, until this one has ended."""
        while transfer.end is None:
            able = [(ready, number) for number, one in enumerate(self._pending) if (ready := one.ready) is not None]
            ready, number = min((max(ready, self._free_at(self._pending[number])), number) for ready, number in able)
            carried = self._pending.pop(number)
            carried.end = self._link_free[carried.direction] = ready + 1.0
        return transfer.end

    def _free_at(self, transfer: Transfer) -> float:
        return self._link_free[transfer.direction] if self._is_duplex else max(self._link_free.values())


def steady(
    homes: Sequence[str], extents: int, *, update: float, is_alternating: bool, is_duplex: bool = False
) -> tuple[float, int]:
    """Seconds and moves per step, one step right after another."""
    machine = Machine(homes, extents, update=update, is_duplex=is_duplex)
    order, began, moves = list(range(len(homes))), 0.0, 0
    for step in range(STEPS):
        if step == STEPS // 2:
            began, moves = machine.now, 0
        upcoming = order[::-1] if is_alternating else order
        machine.step(order, upcoming)
        order, moves = upcoming, moves + machine.moves
    return (machine.now - began) / (STEPS - STEPS // 2), moves // (STEPS - STEPS // 2)


@pytest.mark.parametrize("count", [7, 24])
def test_alternating_order_moves_no_more_than_any_schedule_must_for_every_size_of_the_cpu_tier(count: int) -> None:
    """2 (M - n) over the link for n extents, all of which are pipeline and retention at once."""
    for extents in range(1, count + PIPELINE_EXTENTS + 1):
        _, moves = steady(["nvme"] * count, extents, update=1.0, is_alternating=True)
        assert moves == 2 * max(0, count - extents)


@pytest.mark.parametrize("is_alternating", [True, False])
def test_as_many_chunks_stay_as_there_are_extents_but_eight(is_alternating: bool) -> None:
    """K of M chunks for K + 8 extents: those with homes in cpu, in fixed order; whichever are last, in alternating."""
    for kept in range(25):
        homes = ["cpu" if is_pinned else "nvme" for is_pinned in spread(kept, 24)]
        homes = ["nvme"] * 24 if is_alternating else homes
        _, moves = steady(homes, kept + PIPELINE_EXTENTS, update=1.0, is_alternating=is_alternating)
        assert moves <= 2 * (24 - kept)


UPDATES = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("extents", [8, 16, 24, 48, 70, 82])
def test_alternating_order_takes_no_more_than_five_percent_over_the_bound(extents: int, update: float) -> None:
    seconds, _ = steady(["nvme"] * 82, extents, update=update, is_alternating=True)
    assert seconds <= 1.05 * max(2.0 * (82 - extents), 82 * update)


@pytest.mark.parametrize("is_duplex", [False, True])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("pinned", [0, 8, 16, 40, 62, 74])
def test_fixed_order_with_spread_homes_takes_no_more_than_ten_percent_over_the_bound(
    pinned: int, update: float, is_duplex: bool
) -> None:
    """Homes in a row, instead of spread, take up to half as long again: see the next test."""
    homes = ["cpu" if is_pinned else "nvme" for is_pinned in spread(pinned, 82)]
    seconds, _ = steady(homes, pinned + PIPELINE_EXTENTS, update=update, is_alternating=False, is_duplex=is_duplex)
    assert seconds <= 1.1 * max((1.0 if is_duplex else 2.0) * (82 - pinned), 82 * update)


def test_homes_in_a_row_are_what_spreading_them_is_good_for() -> None:
    rows = ["cpu"] * 40 + ["nvme"] * 42
    seconds, _ = steady(rows, 40 + PIPELINE_EXTENTS, update=1.0, is_alternating=False)
    assert seconds > 1.3 * max(2.0 * 42, 82.0)


def test_planning_costs_a_few_calls_per_chunk() -> None:
    """Of each hundred chunks ten stay: 18 moves for ten updates, and no more calls per chunk for ten times as many."""

    def calls_per_chunk(count: int) -> float:
        views = {chunk: ChunkView("cpu" if chunk < count // 10 else "nvme", "nvme", "cpu") for chunk in range(count)}
        room = {"cpu": 0, "nvme": count // 10}
        order = range(count)
        return calls_of(lambda: plan_step(order, order[::-1], views, room, LINE)) / count

    assert calls_per_chunk(4000) < 1.1 * calls_per_chunk(400) < 80
