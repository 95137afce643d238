"""Transfers: each copies once, after those it follows, and its ticket tells the end, whatever it is."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fakes import PATIENCE_SECONDS, FaultyEngine, HonestDevice, PoisoningDevice, Schedule
from tierstore.arena import Extent
from tierstore.device import Device, HostDevice
from tierstore.errors import (
    EngineUnavailableError,
    StoreClosedError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from tierstore.io import Kind, open_engine
from tierstore.mapping import _areas, map_host_memory
from tierstore.swapfile import SwapFile
from tierstore.tiers import FileTier, MemoryTier, Tier
from tierstore.transfer import Ticket, TransferEngine

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

EXTENT = 8192
Place = tuple[Tier, Extent]


@dataclass
class Bench:
    """Three tiers of four extents, and the engine between them."""

    tiers: dict[str, Tier]
    engine: FaultyEngine
    transfer: TransferEngine

    def place(self, tier: str, fill: int | None = None) -> Place:
        """A new extent of a tier, filled with a value if it is memory."""
        place = self.tiers[tier], self.tiers[tier].arena.take()
        if fill is not None:
            self.bytes_at(place).fill_(fill)
        return place

    def bytes_at(self, place: Place) -> Tensor:
        tier, extent = place
        assert isinstance(tier, MemoryTier)
        return tier.bytes_at(extent, EXTENT)

    def copy(self, source: Place, destination: Place, **options: Any) -> Ticket:
        return self.transfer.submit(source, destination, EXTENT, **options)


@pytest.fixture(params=["stand-in", "honest"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    gpu: Device = HostDevice("stand-in") if request.param == "stand-in" else HonestDevice(3)
    tiers: dict[str, Tier] = {
        "gpu": MemoryTier("gpu", gpu, EXTENT),
        "cpu": MemoryTier("cpu", PoisoningDevice(), EXTENT),
        "nvme": FileTier("nvme", [SwapFile(tmp_path, direct=None)], EXTENT),
    }
    for tier in tiers.values():
        tier.grow(4, slab_extents=2)
    engine = FaultyEngine()
    bench = Bench(tiers, engine, TransferEngine(engine, gpu))
    yield bench
    engine.heal()
    engine.release()
    bench.transfer.close()
    for tier in tiers.values():
        tier.close()


def wait(ticket: Ticket) -> None:
    ticket.wait(PATIENCE_SECONDS)


def test_bytes_go_down_and_come_up_again(bench: Bench) -> None:
    way = [bench.place("gpu", 7), bench.place("cpu"), bench.place("nvme"), bench.place("cpu", 0), bench.place("gpu", 0)]
    after: tuple[Ticket, ...] = ()
    for source, destination in itertools.pairwise(way):
        after = (bench.copy(source, destination, after=after),)
    wait(after[0])
    assert torch.all(bench.bytes_at(way[-1]) == 7)
    assert torch.all(bench.bytes_at(way[0]) == 7)


def test_chunk_can_change_its_extent_within_a_tier_of_memory(bench: Bench) -> None:
    for tier in ("gpu", "cpu"):
        source, destination = bench.place(tier, 5), bench.place(tier, 0)
        wait(bench.copy(source, destination))
        assert torch.all(bench.bytes_at(destination) == 5)


def test_only_the_bytes_of_the_record_are_copied(bench: Bench) -> None:
    source, destination = bench.place("cpu", 1), bench.place("gpu", 2)
    wait(bench.transfer.submit(source, destination, 4096))
    assert torch.all(bench.bytes_at(destination)[:4096] == 1)
    assert torch.all(bench.bytes_at(destination)[4096:] == 2)


def test_transfer_begins_only_when_all_it_follows_have_landed(bench: Bench) -> None:
    bench.engine.hold()
    first = bench.copy(bench.place("cpu", 1), bench.place("nvme"))
    second = bench.copy(bench.place("cpu", 2), bench.place("nvme"))
    source, destination = bench.place("cpu", 3), bench.place("gpu", 0)
    follower = bench.copy(source, destination, after=(first, second))
    bench.engine.wait_until_held()
    assert not any(ticket.is_done() for ticket in (first, second, follower))
    assert torch.all(bench.bytes_at(destination) == 0)
    bench.engine.release()
    wait(follower)
    assert first.is_done() and second.is_done()
    assert torch.all(bench.bytes_at(destination) == 3)


def test_transfer_may_follow_one_that_has_landed(bench: Bench) -> None:
    source, middle, end = bench.place("cpu", 4), bench.place("nvme"), bench.place("cpu")
    first = bench.copy(source, middle)
    wait(first)
    wait(bench.copy(middle, end, after=(first,)))
    assert torch.all(bench.bytes_at(end) == 4)


def test_what_follows_a_failure_is_cancelled_down_the_chain(bench: Bench) -> None:
    bench.engine.spoil(errno.EIO, kind=Kind.WRITE)
    source, middle = bench.place("cpu", 1), bench.place("nvme")
    back, up = bench.place("cpu", 9), bench.place("gpu", 9)
    first = bench.copy(source, middle)
    second = bench.copy(middle, back, after=(first,))
    third = bench.copy(back, up, after=(second,))
    with pytest.raises(TransferCancelledError):
        wait(third)
    error = first.error()
    assert isinstance(error, TransferError) and error.errno == errno.EIO
    assert isinstance(second.error(), TransferCancelledError)
    assert torch.all(bench.bytes_at(back) == 9) and torch.all(bench.bytes_at(up) == 9)
    bench.engine.heal()
    wait(bench.copy(source, middle))  # the engine goes on


def test_one_failure_among_many_predecessors_is_enough(bench: Bench) -> None:
    bench.engine.spoil(errno.EIO, kind=Kind.WRITE, nth=2)
    writes = [bench.copy(bench.place("cpu", n), bench.place("nvme")) for n in range(3)]
    follower = bench.copy(bench.place("gpu", 1), bench.place("cpu"), after=writes)
    with pytest.raises(TransferCancelledError):
        wait(follower)
    assert [ticket.error() is None for ticket in writes] == [True, False, True]


def test_copy_that_cannot_be_made_fails_its_ticket_and_nothing_else(bench: Bench) -> None:
    source, destination = bench.place("cpu", 1), bench.place("gpu")
    extent = source[1]
    short = (source[0], Extent(extent.slab, 2 * EXTENT - 2, 2))  # a slab ends after two bytes
    ticket = bench.copy(short, destination)
    with pytest.raises(TransferError, match="from cpu to gpu failed"):
        wait(ticket)
    if isinstance(bench.tiers["gpu"].device, HostDevice):  # a real stream is done for after an error
        wait(bench.copy(source, destination))
        assert torch.all(bench.bytes_at(destination) == 1)


def test_refusal_of_the_engine_is_the_tickets_error(bench: Bench) -> None:
    bench.engine.close()
    ticket = bench.copy(bench.place("cpu", 1), bench.place("nvme"))
    assert isinstance(ticket.error(), StoreClosedError)


def test_no_route_leads_from_file_to_file(bench: Bench) -> None:
    with pytest.raises(TypeError, match="no route from nvme to nvme"):
        bench.copy(bench.place("nvme"), bench.place("nvme"))


def test_ticket_knows_its_route_bytes_and_time(bench: Bench) -> None:
    heard: list[Ticket] = []
    ticket = bench.copy(bench.place("cpu", 1), bench.place("nvme"))
    wait(ticket)
    ticket.when_done(heard.append)
    assert heard == [ticket]
    assert (ticket.route, ticket.nbytes) == (("cpu", "nvme"), EXTENT)
    assert ticket.seconds > 0
    assert ticket.error() is None


def test_waiting_too_long_says_what_took_too_long(bench: Bench) -> None:
    bench.engine.hold()
    ticket = bench.copy(bench.place("cpu", 1), bench.place("nvme"))
    with pytest.raises(TransferTimeoutError, match=r"moving 8,192 bytes from cpu to nvme took longer than 0\.0 s"):
        ticket.wait(0.0)


def test_ended_transfers_are_told_once_and_in_order(bench: Bench) -> None:
    assert bench.transfer.next_ended(wait=False) is None
    first = bench.copy(bench.place("gpu", 1), bench.place("cpu"))
    second = bench.copy(bench.place("cpu", 2), bench.place("nvme"), after=(first,))
    bench.engine.fail(errno.EIO, nth=2)
    third = bench.copy(bench.place("cpu", 3), bench.place("nvme"), after=(second,))
    told = [bench.transfer.next_ended(wait=True, timeout=PATIENCE_SECONDS) for _ in range(3)]
    assert told == [first, second, third]
    assert bench.transfer.next_ended(wait=True, timeout=0.0) is None


@pytest.mark.parametrize("tier", ["gpu", "cpu", "nvme"])
def test_record_is_read_out_of_any_tier(bench: Bench, tier: str) -> None:
    place = bench.place(tier, None if tier == "nvme" else 6)
    if tier == "nvme":
        wait(bench.copy(bench.place("cpu", 6), place))
    into = map_host_memory(4096)
    wait(bench.transfer.read_out(place, into))
    assert torch.all(into == 6)
    while (ended := bench.transfer.next_ended(wait=False)) is not None:
        assert ended.route[1] != "host"  # it is nobody's move


def test_closing_lets_end_what_was_submitted_and_what_follows_it(bench: Bench) -> None:
    bench.engine.hold()
    source, middle, end = bench.place("gpu", 8), bench.place("cpu"), bench.place("nvme")
    first = bench.copy(source, middle)
    second = bench.copy(middle, end, after=(first,))
    bench.engine.wait_until_held()
    closing = threading.Thread(target=bench.transfer.close)
    closing.start()
    assert not second.is_done()
    bench.engine.release()
    closing.join(PATIENCE_SECONDS)
    assert second.error() is None
    bench.transfer.close()


def test_nothing_is_begun_after_closing(bench: Bench) -> None:
    wait(bench.copy(bench.place("cpu", 1), bench.place("gpu")))
    bench.transfer.close()
    for route in (("cpu", "gpu"), ("cpu", "nvme")):
        ticket = bench.copy(*map(bench.place, route))
        assert isinstance(ticket.error(), StoreClosedError)


def test_everything_is_closed_whatever_one_close_raises(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def fail() -> None:
        raise OSError("injected")

    gpu = bench.tiers["gpu"].device
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine, "close", fail)
        patch.setattr(gpu, "close", lambda: closed.append("gpu"))
        with pytest.raises(OSError, match="injected"):
            bench.transfer.close()
    assert closed == ["gpu"]


@pytest.mark.parametrize("kind", ["threads", "libaio", "aiofiles"])
def test_memory_goes_back_at_once_when_a_tier_shrinks(tmp_path: Path, kind: str) -> None:
    """Tickets in reference cycles, and workers' last requests, kept slabs mapped until something else came along."""
    try:
        engine = open_engine(kind, threads=2, queue_depth=2, request_size=EXTENT)
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    gpu = MemoryTier("gpu", HostDevice("stand-in"), EXTENT)
    cpu = MemoryTier("cpu", HostDevice(), EXTENT)
    nvme = FileTier("nvme", [SwapFile(tmp_path, direct=None if engine.supports_direct else False)], EXTENT)
    for tier in (gpu, cpu, nvme):
        tier.grow(8, slab_extents=8)
    transfer = TransferEngine(engine, gpu.device)
    gone = [threading.Event() for _ in (gpu, cpu)]
    for tier, event in zip((gpu, cpu), gone, strict=True):
        weakref.finalize(mapping_of(tier), event.set)
    transfer = TransferEngine(engine, gpu.device)
    gc.disable()
    try:
        places = [[(tier, tier.arena.take()) for _ in range(8)] for tier in (gpu, cpu, nvme)]
        for upper in (0, 1, 0, 1):
            go_and_return(transfer, places[upper], places[upper + 1])
        for tier in (gpu, cpu):
            for _, extent in places.pop(0):
                tier.release(extent)
            tier.arena.condemn_last()
            tier.shrink()
        assert all(event.wait(PATIENCE_SECONDS) for event in gone)
    finally:
        gc.enable()
        transfer.close()
        nvme.close()


def mapping_of(tier: MemoryTier) -> mmap.mmap:
    """The mapping that a tier's only slab lies in."""
    return next(area for area in _areas if tier._slabs[0].data_ptr() == address_of(area))


def address_of(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def go_and_return(transfer: TransferEngine, one: list[Place], other: list[Place]) -> None:
    """Copy every extent of one tier to another and back, each way after the other, and hear of the end."""
    there = [transfer.submit(source, end, EXTENT) for source, end in zip(one, other, strict=True)]
    back = [
        transfer.submit(end, source, EXTENT, after=(first,))
        for source, end, first in zip(one, other, there, strict=True)
    ]
    for _ in (*there, *back):
        assert transfer.next_ended(wait=True, timeout=PATIENCE_SECONDS) is not None
    assert all(ticket.error() is None for ticket in back)


def test_device_has_come_to_rest_when_transfers_are_closed() -> None:
    """Slabs are given back next: kernels must not be at them."""
    schedule = Schedule(0)
    schedule.eagerness = 0.0
    gpu, ran = HonestDevice(schedule=schedule), []
    gpu.launch(lambda: ran.append("launched"))
    TransferEngine(None, gpu).close()
    assert ran == ["launched"]


def test_thread_of_a_lane_that_dies_fails_what_it_had_and_what_comes_and_no_other_lane(bench: Bench) -> None:
    """It dies between taking a copy and knowing it; the stream of the honest device has others under way."""
    if isinstance(bench.tiers["gpu"].device, HonestDevice):  # type: ignore[attr-defined]
        bench.tiers["gpu"].device.schedule.eagerness = 0.0  # type: ignore[attr-defined]
    wait(bench.copy(bench.place("cpu", 1), bench.place("gpu", 0)))
    (lane,) = (thread for thread in threading.enumerate() if thread.name == "tierstore-cpu-gpu")
    assert lane.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(lane.ident), ctypes.py_object(SystemExit))
    tickets = [bench.copy(bench.place("cpu", 2), bench.place("gpu", 0)) for _ in range(2)]
    lane.join(PATIENCE_SECONDS)
    source = bench.place("cpu", 3)
    wait(bench.copy(source, bench.place("nvme")))
    tickets.append(bench.copy(source, bench.place("gpu", 0)))
    for ticket in tickets:
        with pytest.raises(TransferError, match=r"from cpu to gpu failed: the thread for it died of SystemExit"):
            wait(ticket)
