"""Runs of plans: what their waits are put down to, and when they leave a core to reading and writing."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes import Clock, FaultyEngine
from tests.simulator import RECORD_BYTES, DistantTier, RandomTransfer
from tierstore import TieredStore, cores, execution
from tierstore.build import Parts
from tierstore.device import HostDevice
from tierstore.execution import TOGETHER
from tierstore.io import Operation
from tierstore.layout import HUGE_PAGE
from tierstore.pages import lies_on_small_pages
from tierstore.stats import IoStats
from tierstore.store import ChunkInfo, ChunkStore, Setup
from tierstore.tiers import MemoryTier, Tier
from tierstore.transfer import Ticket


class InOrder(RandomTransfer):
    """Ends transfers one by one, in the order in which they can begin, when somebody waits; that takes its time."""

    def __init__(self, clock: Clock, seconds: dict[tuple[str, str], float]) -> None:
        super().__init__(random.Random(0))
        self.ended: Counter[tuple[str, str]] = Counter()  # while somebody waited
        self._clock = clock
        self._seconds = seconds

    def next_ended(self, *, wait: bool, timeout: float | None = None) -> Ticket | None:
        while wait and self._ended.empty():
            job = next(job for job in self._jobs if all(ticket.is_done() for ticket in job.after))
            self._jobs.remove(job)
            self._clock.now += self._seconds[job.ticket.route]
            self.ended[job.ticket.route] += 1
            job.ticket.begin()
            job.ticket.resolve(self._copy(job))
        return super().next_ended(wait=False)

    def submit(self, *arguments: object, **options: object) -> Ticket:
        self._chance.random = lambda: 1.0  # type: ignore[method-assign]
        return super().submit(*arguments, **options)  # type: ignore[arg-type]


READ, WRITE = ("nvme", "cpu"), ("cpu", "nvme")
ORDER = range(12)


class Bench:
    """A store of 12 chunks, 4 of which have room in memory, whose updates take a second each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, read: float, write: float) -> None:
        self.clock = Clock()
        monkeypatch.setattr("tierstore.traffic.time.perf_counter", self.clock)
        self.transfer = InOrder(self.clock, {READ: read, WRITE: write})
        tiers: dict[str, Tier] = {
            "cpu": MemoryTier("cpu", HostDevice(), RECORD_BYTES),
            "nvme": DistantTier("nvme", RECORD_BYTES),
        }
        tiers["cpu"].grow(4, slab_extents=4)
        tiers["nvme"].grow(12, slab_extents=4)
        io = IoStats("none", direct=False, paths=())
        self.store = ChunkStore(
            Setup(tiers, frozenset(tiers), "alternating", dict.fromkeys(tiers, 4), self.transfer, io)
        )
        self.store.add_chunks({chunk: ChunkInfo(RECORD_BYTES, "cpu") for chunk in ORDER})
        self.threads: list[int] = []
        self._is_reversed = False

    def step(self) -> None:
        order = list(ORDER)[:: -1 if self._is_reversed else 1]
        self.store.run(order, order[::-1], self._use)
        self._is_reversed ^= True

    def _use(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        self.clock.now += 1.0
        self.threads.append(torch.get_num_threads())


def test_a_wait_is_put_down_to_the_copy_that_the_chunk_stands_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read into an extent that a write is still leaving is waited for as a write until that has landed."""
    bench = Bench(monkeypatch, read=1.0, write=100.0)
    bench.step()
    bench.transfer.ended.clear()
    bench.step()
    last = bench.store.stats().last_step
    assert bench.transfer.ended[READ] == 8
    assert bench.transfer.ended[WRITE] > 4
    assert last.read_wait_seconds == 8 * 1.0
    assert last.write_wait_seconds == bench.transfer.ended[WRITE] * 100.0
    assert last.update_seconds == pytest.approx(12.0)
    assert (last.bytes_read, last.bytes_written, last.bound) == (8 * RECORD_BYTES, 8 * RECORD_BYTES, "write")


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cores, "available", lambda: 2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_step_after_one_that_files_held_up_leaves_a_core_free(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, read=1.0, write=1.0)
    bench.step()  # reads nothing
    bench.step()  # finds out
    bench.step()
    assert bench.threads == [2] * 24 + [1] * 12
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_step_that_waits_for_little_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, read=0.05, write=0.05)
    for _ in range(4):
        bench.step()
    assert bench.threads == [2] * 48


@pytest.mark.usefixtures("two_threads")
def test_a_run_that_moves_nothing_over_files_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, read=1.0, write=1.0)
    bench.step()
    bench.step()
    bench.store.run([0, 1], [1, 0], bench._use)
    assert bench.threads[24:] == [2, 2]


@pytest.mark.usefixtures("two_threads")
def test_a_run_beside_others_that_compute_leaves_a_core_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, read=1.0, write=1.0)
    bench.store.run(ORDER, ORDER, bench._use, ready=lambda chunk: None)
    assert bench.threads == [1] * 12
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_core_is_left_free_on_the_calling_thread_alone_and_taken_back_whatever_happens() -> None:
    found = []

    def work() -> None:
        with cores.leaving_one_free():
            found.append(torch.get_num_threads())
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert found == [1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("threads", "machine", "inside"), [(1, 8, 1), (4, 1, 4), (4, 8, 4), (8, 8, 7), (4, 2, 1)])
def test_threads_that_are_few_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, threads: int, machine: int, inside: int
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(cores, "available", lambda: machine)
    try:
        torch.set_num_threads(threads)
        with cores.leaving_one_free():
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


class Together:
    """Uses that are only gathered, and what was held when they were launched."""

    def __init__(self, store: ChunkStore, fails_at: int = -1) -> None:
        self.launched: list[list[int]] = []
        self._store = store
        self._gathered: list[int] = []
        self._fails_at = fails_at

    def use(self, chunk: int, record: Tensor, is_fresh: bool) -> None:
        self._gathered.append(chunk)

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        ledger = self._store._ledger
        assert {chunk for chunk in ORDER_OF_MANY if chunk in ledger and ledger.is_leased(chunk)} == set(gathered)
        if self._fails_at in gathered:
            raise ValueError("launched work failed")
        self.launched.append(gathered)

    def run(self, order: Sequence[int], ready: Callable[[int], None] | None = None) -> None:
        self._store.run(order, order, self.use, flush=self.flush, ready=ready)


ORDER_OF_MANY = range(3 * TOGETHER)


@pytest.fixture
def many() -> Iterator[TieredStore]:
    with TieredStore({"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "1MiB"}}}) as store:
        store.add_chunks({chunk: ChunkInfo(16 << 10, "cpu") for chunk in ORDER_OF_MANY})
        store.run(ORDER_OF_MANY, (), lambda *_: None)
        yield store


def test_chunks_that_are_there_are_used_together_in_order_and_each_is_held_meanwhile(many: TieredStore) -> None:
    together = Together(many)
    together.run(ORDER_OF_MANY)
    assert together.launched == [list(ORDER_OF_MANY[first : first + TOGETHER]) for first in (0, 16, 32)]
    many.check()
    assert not any(many._ledger.is_leased(chunk) for chunk in ORDER_OF_MANY)


def test_uses_that_wait_to_be_ready_are_launched_too(many: TieredStore) -> None:
    """They were gathered, counted as used, and done by nobody."""
    together, ready = Together(many), list[int]()
    together.run([0, 1, 2], ready.append)
    assert together.launched == [[0, 1, 2]] and ready == [0, 1, 2]


def test_a_chunk_that_is_used_twice_is_not_held_twice(many: TieredStore) -> None:
    together = Together(many)
    together.run([0, 1, 2, 1, 2, 0])
    assert together.launched == [[0, 1, 2], [1, 2, 0]]


def test_of_chunks_used_together_all_count_as_used_when_their_launch_fails_and_those_after_do_not(
    many: TieredStore,
) -> None:
    together = Together(many, fails_at=TOGETHER + 3)
    with pytest.raises(ValueError, match="launched work failed"):
        together.run(ORDER_OF_MANY)
    assert many.broken_off == tuple(ORDER_OF_MANY[: 2 * TOGETHER])
    assert not any(many._ledger.is_leased(chunk) for chunk in ORDER_OF_MANY)
    many.check()


def test_chunks_held_together_are_let_go_though_the_end_of_one_use_fails(
    many: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = many._execution.end_use

    def end_use(chunk: int) -> None:
        inner(chunk)
        if chunk == 2:
            raise ValueError("its event could not be recorded")

    monkeypatch.setattr(many._execution, "end_use", end_use)
    with pytest.raises(ValueError, match="event"):
        Together(many).run(ORDER_OF_MANY)
    assert not any(many._ledger.is_leased(chunk) for chunk in ORDER_OF_MANY)


def test_moves_wait_for_a_few_uses_while_enough_others_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for none where links would run dry, or where the next chunk has to come first."""
    bench = Bench(monkeypatch, read=1.0, write=1.0)
    bench.step()
    order = list(ORDER)[::-1]
    singly = [[chunk] for chunk in order]
    for busy, launched in ((0, [[11, 10, 9, 8], *singly[4:]]), (99, singly)):
        monkeypatch.setattr(execution, "BUSY", busy)
        together = Together(bench.store)
        together.run(order)
        assert together.launched == launched
        bench.store.check()
        together.run(order[::-1])
    assert bench.transfer.ended[READ] > 0


class Watching(FaultyEngine):
    """Remembers what memory and which bytes of the file each operation is about."""

    def __init__(self) -> None:
        super().__init__(request_size=1 << 20)
        self.operations: list[tuple[int, int, int]] = []

    def submit(self, operation: Operation) -> None:
        address = torch.frombuffer(operation.buffer, dtype=torch.uint8).data_ptr()
        self.operations.append((address, len(operation.buffer), operation.offset))
        super().submit(operation)


@pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")
def test_a_chunk_is_moved_by_one_system_call_between_its_extent_and_the_file(tmp_path: Path) -> None:
    engine = Watching()
    policy = {
        "chunk_size": "64KiB",
        "tiers": {"cpu": {"capacity": "256KiB"}, "nvme": {"capacity": "1MiB", "paths": [str(tmp_path)]}},
    }
    with TieredStore(policy, parts=Parts(open_engine=lambda *_, **__: engine)) as store:
        store.put("value", torch.zeros(12 << 16, dtype=torch.uint8))
        store.get("value")
        store.wait()
        moves = sum(route.moves for route in store.stats().routes.values())
        slabs = [one for tier in store.setup.tiers.values() if isinstance(tier, MemoryTier) for one in tier.ranges()]
    own = [one for one in engine.operations if one[1] == 64 << 10]  # the others look whether direct I/O works
    assert moves == len(own) == engine.requests > 16
    for address, nbytes, offset in own:
        assert any(begin <= address and address + nbytes <= begin + length for begin, length in slabs)
        assert address % 4096 == offset % 4096 == 0


SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:      {first} kB
VmFlags: rd wr
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
Rss:                1024 kB
AnonHugePages:         0 kB
7f0001000000-7f0001400000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:         0 kB
"""


@pytest.mark.parametrize(("huge_kilobytes", "small"), [(4096, False), (2560, False), (2048, True), (0, True)])
def test_memory_is_on_small_pages_when_less_than_half_of_it_is_on_huge_ones(
    tmp_path: Path, huge_kilobytes: int, small: bool
) -> None:
    (tmp_path / "smaps").write_text(SMAPS.format(first=huge_kilobytes))
    slab = (0x7F0000000000, 0x500000)  # the tail of which is a mapping of its own
    assert lies_on_small_pages([slab], tmp_path / "smaps") == small
    assert not lies_on_small_pages([(slab[0], 1 << 20)], tmp_path / "smaps")
    assert not lies_on_small_pages([slab], tmp_path / "absent")


PR_SET_THP_DISABLE = 41


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no huge pages")
def test_what_the_kernel_says_of_memory_with_and_without_huge_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("huge pages are switched off here")
    system = ctypes.CDLL(None)
    tier = MemoryTier("cpu", HostDevice(), 4 * HUGE_PAGE)
    tier.grow(1, slab_extents=1)
    tier._slabs[0].zero_()
    assert system.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        tier.grow(1, slab_extents=1)
        tier._slabs[1].zero_()
        with_them, without = tier.ranges()
        # asked while still switched off: once allowed, the kernel gathers small pages into huge ones when it likes
        assert lies_on_small_pages([without])
        assert not lies_on_small_pages([with_them])
    finally:
        system.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)
