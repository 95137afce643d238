"""Every wait in the code is needed: with all of them numbers are right for every seed, without any one they are not.

The store runs on honest devices and engines, which do everything as late as they may and poison what is worth nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.fakes import HonestDevice, HonestTransfer, PoisoningDevice, Schedule, honest_parts
from tests.trial import CHUNKS, Trial, WrongBytesError
from tierstore.device import Event
from tierstore.flights import Flight
from tierstore.lanes import Lane
from tierstore.residency import Resident
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, ChunkStore, Setup
from tierstore.tiers import MemoryTier, Tier
from tierstore.traffic import Traffic
from tierstore.transfer import Ticket, TransferEngine

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

ON_DEVICE = {"gpu": 5, "cpu": 5, "nvme": 8}
ON_HOST = {"cpu": 5, "nvme": 12}
Place = tuple[str, Any]


def run_trial(folder: Path, seed: int, compute: str) -> None:
    capacity = ON_DEVICE if compute == "gpu" else ON_HOST
    parts = honest_parts(seed, asynchronous_host=compute == "cpu")
    Trial(folder, parts, seed, capacity=capacity, compute=compute).run()


@pytest.mark.parametrize("seed", range(24))
def test_store_computes_what_a_dict_computes_on_an_honest_device(tmp_path: Path, seed: int) -> None:
    run_trial(tmp_path, seed, "gpu")


@pytest.mark.parametrize("seed", range(12))
def test_store_computes_what_a_dict_computes_where_the_host_computes_late(tmp_path: Path, seed: int) -> None:
    run_trial(tmp_path, seed, "cpu")


def test_moves_that_are_over_are_forgotten(tmp_path: Path) -> None:
    """Each flight kept the one it had its extent from, and so all before it, as long as some move was under way."""
    trial = Trial(tmp_path, honest_parts(1), 1, capacity=ON_DEVICE, compute="gpu")
    of_others = sum(type(one) is Flight for one in gc.get_objects())  # of stores that earlier tests have left about
    counts: list[tuple[int, int]] = []

    def use(chunk: int, record: Tensor, is_fresh: bool) -> None:
        if chunk == CHUNKS // 2:
            alive = sum(type(one) is Flight for one in gc.get_objects()) - of_others
            counts.append((alive, len(trial.store._traffic._flights)))

    for order in (range(CHUNKS), range(CHUNKS - 1, -1, -1)) * 4:
        trial.store.run(order, order[::-1], use)
    trial.store.close()
    assert max(under_way for _, under_way in counts) > 5
    assert all(alive <= under_way + 1 for alive, under_way in counts)


def test_extents_of_deleted_chunks_are_waited_for_when_chunks_need_them() -> None:
    """Chunks were deleted while kernels were at them, and others made at once: there seemed to be no room."""
    schedule = Schedule(0)
    schedule.eagerness = 0.0
    gpu = HonestDevice(schedule=schedule)
    tiers = {"gpu": MemoryTier("gpu", gpu, 4096), "cpu": MemoryTier("cpu", PoisoningDevice(), 4096)}
    for tier in tiers.values():
        tier.grow(4, slab_extents=2)
    slabs = dict.fromkeys(tiers, 2)
    transfer = HonestTransfer(None, gpu, schedule=schedule)
    store = ChunkStore(
        Setup(tiers, frozenset(tiers), "fixed", slabs, transfer, IoStats("none", direct=False, paths=()))
    )
    for first in (0, 4):
        chunks = range(first, first + 4)
        store.add_chunks({chunk: ChunkInfo(4096, "gpu") for chunk in chunks})
        store.run(chunks, (), lambda chunk, record, is_fresh: gpu.launch(lambda: record.add_(1) and None))
        assert tiers["gpu"].arena.owned == 4
        for chunk in chunks:
            store.remove_chunk(chunk)
        assert tiers["gpu"].arena.draining == 4
        store.check()
    store.close()


# --- without one wait

Breaker = Callable[[pytest.MonkeyPatch], None]


def without_copy_waiting_for_the_update(patch: pytest.MonkeyPatch) -> None:
    begin = Lane._begin
    patch.setattr(
        Lane, "_begin", lambda lane, copy, in_flight: begin(lane, dataclasses.replace(copy, ready=None), in_flight)
    )


def without_hearing_the_copy_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "_end", lambda lane, event, copy: copy.ticket.resolve(None))


def without_write_waiting_for_the_update(patch: pytest.MonkeyPatch) -> None:
    file = TransferEngine._file
    patch.setattr(TransferEngine, "_file", lambda engine, *arguments: file(engine, *arguments[:-1], None))


def without_reading_out_waiting_for_the_update(patch: pytest.MonkeyPatch) -> None:
    read_out = HonestTransfer.read_out

    def hasty(engine: HonestTransfer, source: tuple[Tier, Any], into: Tensor, *, ready: Event | None) -> Ticket:
        return read_out(engine, source, into)

    patch.setattr(HonestTransfer, "read_out", hasty)


def without_waiting_for_what_is_read_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HonestTransfer, "wait_for", lambda engine, ticket, timeout: None)


def without_reading_out_waiting_for_the_move(patch: pytest.MonkeyPatch) -> None:
    """Read the extent that the chunk is leaving."""
    where = Traffic.wait_until_over

    def leave(traffic: Traffic, chunk: int) -> None:
        place = traffic.ledger._where[chunk]
        source = getattr(place, "source", None)
        if source is None:
            return where(traffic, chunk)
        traffic.ledger._where[chunk] = source  # as read_record would see it
        waiting = Traffic.settle

        def put_back(again: Traffic) -> None:
            patch.setattr(Traffic, "settle", waiting)
            if again.ledger._where.get(chunk) is source:
                again.ledger._where[chunk] = place
            waiting(again)

        patch.setattr(Traffic, "settle", put_back)
        return None

    patch.setattr(Traffic, "wait_until_over", leave)


def without_waiting_before_use(patch: pytest.MonkeyPatch) -> None:
    """Hand out transfers as ended, in the order they were submitted, as soon as somebody waits for one."""
    submit, next_ended, error = HonestTransfer.submit, HonestTransfer.next_ended, Ticket.error
    handed_out: set[Ticket] = set()
    submitted: dict[Ticket, None] = {}

    def remember(engine: HonestTransfer, *arguments: Any, **options: Any) -> Ticket:
        ticket = submit(engine, *arguments, **options)
        submitted[ticket] = None
        return ticket

    def hasty(engine: HonestTransfer, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        if not wait:
            while (ticket := next_ended(engine, wait=False)) in handed_out:
                pass
        else:
            ticket = next(one for one in submitted if one not in handed_out)
        if ticket is not None:
            handed_out.add(ticket)
        return ticket

    patch.setattr(HonestTransfer, "submit", remember)
    patch.setattr(HonestTransfer, "next_ended", hasty)
    patch.setattr(Ticket, "error", lambda ticket: error(ticket) if ticket.is_done() else None)


def without_making_a_chunk_waiting_for_its_extent(patch: pytest.MonkeyPatch) -> None:
    def make(traffic: Traffic, chunk: int) -> bool:
        flight = traffic._flights.of(chunk)
        if flight is None or flight.source is not None:
            return False
        traffic._flights.land(flight)
        traffic.ledger.create(chunk, flight.destination)
        return True

    patch.setattr(Traffic, "make", make)


def without_draining(patch: pytest.MonkeyPatch) -> None:
    give_up = Traffic.give_up

    def hasty(traffic: Traffic, chunk: int, place: Resident) -> None:
        traffic.last_use.pop(chunk, None)
        give_up(traffic, chunk, place)

    patch.setattr(Traffic, "give_up", hasty)


def without_drain_asking_the_event(patch: pytest.MonkeyPatch) -> None:
    def drain(traffic: Traffic, *, wait: bool = False) -> None:
        draining, traffic._draining = traffic._draining, []
        for place, _ in draining:
            traffic.tiers[place.tier].release(place.extent)

    patch.setattr(Traffic, "drain", drain)


def without_finishing_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HonestDevice, "finish", lambda device: None)


def without_following(kind: str, route: str, before: str) -> Breaker:
    """Let transfers on one route not follow those on another: a chunk's previous hop, or whoever leaves the extent."""

    def breaker(patch: pytest.MonkeyPatch) -> None:
        submit = HonestTransfer.submit
        places: dict[Ticket, tuple[Place, Place]] = {}

        def hasty(
            engine: HonestTransfer,
            source: tuple[Tier, Any],
            destination: tuple[Tier, Any],
            nbytes: int,
            *,
            after: Sequence[Ticket] = (),
            ready: Event | None = None,
        ) -> Ticket:
            begin, end = (source[0].name, source[1]), (destination[0].name, destination[1])

            def is_let_go(one: Ticket) -> bool:
                left, reached = places[one]
                relation = reached == begin if kind == "hop" else left == end
                return relation and f"{begin[0]}->{end[0]}" == route and "->".join(one.route) == before

            kept = [one for one in after if not is_let_go(one)]
            ticket = submit(engine, source, destination, nbytes, after=kept, ready=ready)
            places[ticket] = begin, end
            return ticket

        patch.setattr(HonestTransfer, "submit", hasty)

    return breaker


WAITS: dict[str, tuple[str, Breaker]] = {
    "a copy off the device waits for the update": ("gpu", without_copy_waiting_for_the_update),
    "a ticket waits for the copy's event": ("gpu", without_hearing_the_copy_end),
    "a write waits for the update in the host": ("cpu", without_write_waiting_for_the_update),
    "reading out waits for the update": ("gpu", without_reading_out_waiting_for_the_update),
    "reading out is waited for": ("gpu", without_waiting_for_what_is_read_out),
    "reading out waits for the move": ("gpu", without_reading_out_waiting_for_the_move),
    "use waits for arrival": ("gpu", without_waiting_before_use),
    "making waits for the extent to be left": ("gpu", without_making_a_chunk_waiting_for_its_extent),
    "a deleted chunk's extent drains": ("gpu", without_draining),
    "draining asks the event": ("gpu", without_drain_asking_the_event),
    "a step is finished": ("gpu", without_finishing_the_step),
    "up: the copy follows the read": ("gpu", without_following("hop", "cpu->gpu", "nvme->cpu")),
    "down: the write follows the copy": ("gpu", without_following("hop", "cpu->nvme", "gpu->cpu")),
    "the device's extent: in follows out": ("gpu", without_following("claim", "cpu->gpu", "gpu->cpu")),
    "the host's extent: a read follows the write": ("cpu", without_following("claim", "nvme->cpu", "cpu->nvme")),
    "the host's extent: a read follows the copy up": ("gpu", without_following("claim", "nvme->cpu", "cpu->gpu")),
    "the host's extent: a copy down follows the write": ("gpu", without_following("claim", "gpu->cpu", "cpu->nvme")),
    "the host's extent: a copy down follows one up": ("gpu", without_following("claim", "gpu->cpu", "cpu->gpu")),
    "the file's extent: a write follows the read": ("cpu", without_following("claim", "cpu->nvme", "nvme->cpu")),
}


@pytest.mark.parametrize("name", WAITS)
def test_without_a_wait_numbers_are_wrong(tmp_path: Path, name: str) -> None:
    compute, breaker = WAITS[name]
    with pytest.MonkeyPatch.context() as patch:
        breaker(patch)
        patch.setattr(ChunkStore, "check", lambda store: None)  # it would tell sooner, but not of the numbers
        assert any(goes_wrong(tmp_path, seed, compute) for seed in range(24)), "nothing goes wrong without it"


def goes_wrong(folder: Path, seed: int, compute: str) -> bool:
    """Whether a trial finds wrong bytes; whatever else a broken store raises does not count."""
    with contextlib.suppress(Exception):
        try:
            run_trial(folder, seed, compute)
        except WrongBytesError:
            return True
    return False
