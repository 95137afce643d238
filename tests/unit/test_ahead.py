"""What is read ahead: buffers come in order and full, however many what belongs into them is shared by."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from torch import Tensor

from tests.fakes import PATIENCE_SECONDS
from tierstore.ahead import BUFFERS, LEAST_BYTES, Fill, ReadAhead

SMALL = LEAST_BYTES // 8
"""Bytes of buffers of which there are eight."""
LARGE = LEAST_BYTES


class Parcel:
    """What belongs into some buffers, one byte each; a thread of its own brings it once it was begun and may."""

    def __init__(self, value: int, error: Exception | None = None) -> None:
        self.is_begun = False
        self.may_arrive = threading.Event()
        self.buffers: list[Tensor] = []
        self._value = value
        self._error = error
        self._has_arrived = threading.Event()

    def begin(self) -> None:
        if not self.is_begun:
            self.is_begun = True
            threading.Thread(target=self._bring).start()

    def wait(self) -> None:
        assert self._has_arrived.wait(PATIENCE_SECONDS)
        if self._error is not None:
            raise self._error

    def _bring(self) -> None:
        assert self.may_arrive.wait(PATIENCE_SECONDS)
        for buffer in self.buffers:
            buffer[0] = self._value
        self._has_arrived.set()


def put_into(parcel: Parcel, buffer: Tensor, *, is_last: bool = True) -> Sequence[Parcel]:
    buffer[0] = 0
    parcel.buffers.append(buffer)
    if is_last:
        parcel.begin()
    return [parcel]


def taken(ahead: ReadAhead, count: int) -> Iterator[int]:
    for _ in range(count):
        yield int(ahead.wait_for_next()[0])


def test_the_next_ones_are_asked_for_while_the_first_one_is_on_its_way() -> None:
    parcels = [Parcel(number + 1) for number in range(BUFFERS)]
    are_all_asked_for = threading.Event()

    def ask_for_last(buffer: Tensor) -> Sequence[Parcel]:
        are_all_asked_for.set()
        return put_into(parcels[-1], buffer)

    fills = [*(partial(put_into, parcel) for parcel in parcels[:-1]), ask_for_last]
    with ReadAhead(fills, LARGE) as ahead:
        assert are_all_asked_for.wait(PATIENCE_SECONDS)
        for parcel in reversed(parcels):  # they arrive in any order
            parcel.may_arrive.set()
        assert list(taken(ahead, BUFFERS)) == [1, 2, 3]


@pytest.mark.parametrize("buffer_bytes", [SMALL, LARGE])
@pytest.mark.parametrize("shared_by", [1, 2, 3, 100])
def test_what_is_shared_by_more_buffers_than_there_are_is_begun_before_all_is_asked_for(
    buffer_bytes: int, shared_by: int
) -> None:
    """Whoever takes buffers waits for one that nobody would begin to fill, as no buffer is free to go on with."""
    count, parcels = 25, [Parcel(number + 1) for number in range(200)]
    for parcel in parcels:
        parcel.may_arrive.set()
    free = iter(parcels)
    now = [next(free)]

    def fill(number: int, buffer: Tensor) -> Sequence[Parcel]:
        if now[0].is_begun:
            now[0] = next(free)
        return put_into(now[0], buffer, is_last=number % shared_by == shared_by - 1)

    with ReadAhead((partial(fill, number) for number in range(count)), buffer_bytes) as ahead:
        found = list(taken(ahead, count))
    used = [parcel for parcel in parcels if parcel.buffers]
    assert found == [number + 1 for number, parcel in enumerate(used) for _ in parcel.buffers]
    if shared_by <= 2:  # of three buffers one may wait for the next
        assert {len(parcel.buffers) for parcel in used[:-1]} == {shared_by}


def test_who_asks_for_what_did_not_arrive_gets_its_error_and_those_before_get_theirs() -> None:
    parcels = [Parcel(1), Parcel(2, OSError("unreadable")), Parcel(3)]
    for parcel in parcels:
        parcel.may_arrive.set()
    with ReadAhead((partial(put_into, parcel) for parcel in parcels), LARGE) as ahead:
        assert int(ahead.wait_for_next()[0]) == 1
        with pytest.raises(OSError, match="unreadable"):
            ahead.wait_for_next()


def test_an_error_in_asking_comes_after_what_was_asked_for_before() -> None:
    parcel = Parcel(1)
    parcel.may_arrive.set()

    def refuse(buffer: Tensor) -> Sequence[Parcel]:
        raise OSError("no index")

    with ReadAhead([partial(put_into, parcel), refuse], LARGE) as ahead:
        assert int(ahead.wait_for_next()[0]) == 1
        with pytest.raises(OSError, match="no index"):
            ahead.wait_for_next()


def test_an_error_after_the_last_buffer_comes_to_who_leaves() -> None:
    parcel = Parcel(1)
    parcel.may_arrive.set()

    def fills() -> Iterator[Fill]:
        yield partial(put_into, parcel)
        raise OSError("no index")

    with pytest.raises(OSError, match="no index"), ReadAhead(fills(), LARGE) as ahead:
        assert int(ahead.wait_for_next()[0]) == 1
