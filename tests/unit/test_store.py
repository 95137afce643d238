"""A store under faults: nothing is lost, nothing is left behind, and every error says what happened."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import processes
from tests.fakes import PATIENCE_SECONDS, FaultyEngine
from tests.processes import Child, barrier, run_script
from tierstore.build import Parts
from tierstore.errors import (
    CapacityError,
    DiskFullError,
    EngineUnavailableError,
    ForkedStoreError,
    LeaseError,
    StoreClosedError,
    SwapError,
    TransferError,
    WrongThreadError,
)
from tierstore.io import Kind, open_engine
from tierstore.retries import RETRIES
from tierstore.tensors import TieredStore
from tierstore.tiers import FileTier

CHUNK = 16 << 10
CPU_CHUNKS = 4


def policy(folder: Path, **io: Any) -> dict[str, Any]:
    """Four chunks of host memory, sixteen in swap files."""
    nvme = {"capacity": 16 * CHUNK, "paths": [str(folder)], "io": {"direct": False, **io}}
    return {"chunk_size": CHUNK, "tiers": {"cpu": {"capacity": CPU_CHUNKS * CHUNK}, "nvme": nvme}}


@pytest.fixture
def engine() -> FaultyEngine:
    return FaultyEngine()


@pytest.fixture
def store(tmp_path: Path, engine: FaultyEngine) -> Iterator[TieredStore]:
    store = TieredStore(policy(tmp_path), parts=Parts(open_engine=lambda *_, **__: engine))
    yield store
    engine.heal()
    engine.release()
    with contextlib.suppress(TransferError):
        store.wait()
    store.check()
    store.close()


def value_of(number: int, chunks: int = 1) -> Tensor:
    return torch.full((chunks * CHUNK,), number, dtype=torch.uint8)


def fill(store: TieredStore, count: int = CPU_CHUNKS) -> None:
    """Put tensors `0`, `1` ... of one chunk each, and wait for what that moved."""
    for number in range(count):
        store.put(f"{number}", value_of(number))
    store.wait()


def assert_holds(store: TieredStore, count: int = CPU_CHUNKS) -> None:
    store.check()
    for number in range(count):
        assert torch.equal(store.get(f"{number}"), value_of(number))


def end_moves(store: TieredStore) -> None:
    """Let every move under way end, well or badly, without hearing of errors."""
    for request in list(store._traffic._by_ticket):
        with contextlib.suppress(Exception):
            request.wait(PATIENCE_SECONDS)


# -- writing fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_write_that_fails_a_few_times_is_tried_again_and_nobody_notices(
    store: TieredStore, engine: FaultyEngine, code: int
) -> None:
    fill(store)
    engine.fail(code, kind=Kind.WRITE, times=RETRIES)
    store.evict(["0"])
    store.wait()
    assert store.where("0") == {"nvme": CHUNK}
    assert store.stats().io.retries == RETRIES
    assert not store.setup.tiers["nvme"].arena.quarantined
    assert_holds(store)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINVAL])
def test_a_write_back_that_cannot_be_done_is_done_elsewhere_with_a_warning(
    store: TieredStore, engine: FaultyEngine, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Eviction goes on behind the caller's back; the place that cannot be written is not used again."""
    fill(store)
    engine.spoil(code, kind=Kind.WRITE)
    store.evict(["0", "1"])
    store.wait()
    assert [store.where(name) for name in ("0", "1")] == [{"nvme": CHUNK}] * 2
    arena = store.setup.tiers["nvme"].arena
    assert (arena.quarantined, arena.lasting) == (1, 16)
    told = [record.getMessage() for record in caplog.records if record.name == "tierstore.store"]
    assert len(told) == 1
    for word in (f"[Errno {code}]", "chunk -1 ('0') from cpu to nvme", "nothing is lost", "1 extents more in"):
        assert word in told[0]
    assert store.stats().io.paths[0] in told[0]
    assert_holds(store)


def test_a_full_disk_sends_what_cannot_be_written_to_memory(
    store: TieredStore, engine: FaultyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as there is room: after that the error names the numbers, and everything can still be read."""
    fill(store)
    refuse_to_grow(store, monkeypatch)
    engine.spoil(errno.ENOSPC, kind=Kind.WRITE, times=None)
    store.evict(["0"])
    store.wait()
    with pytest.raises(TransferError, match=r"chunk -\d .*no room for it elsewhere: .*raise tiers\.") as error:
        fill(store, 9)
    assert error.value.errno == errno.ENOSPC
    for number in range(CPU_CHUNKS):
        assert store.where(f"{number}") == {"cpu": CHUNK}
    engine.heal()
    fill(store, 9)
    assert_holds(store, 9)


def refuse_to_grow(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk have no more room than is reserved."""

    def full(*_: object) -> None:
        raise DiskFullError(errno.ENOSPC, "full", "here")

    monkeypatch.setattr(store.setup.tiers["nvme"], "grow_on", full)


def test_each_error_is_raised_once(store: TieredStore, engine: FaultyEngine) -> None:
    fill(store, 6)
    store.evict(store.names())
    store.wait()
    engine.spoil(kind=Kind.READ, times=2)
    store.prefetch(["0", "1"])
    end_moves(store)
    with pytest.raises(TransferError) as error:
        store.get("2")
    assert "also: " in error.value.__notes__[0]
    engine.heal()
    assert_holds(store, 6)


def test_a_put_that_cannot_make_room_keeps_the_old_value(store: TieredStore, engine: FaultyEngine) -> None:
    """The disk refuses every write: the new value needs a chunk that one of the others would have to make room for."""
    fill(store)
    engine.fail(kind=Kind.WRITE, times=None)
    for attempt in (lambda: store.put("new", value_of(9)), lambda: store.put("1", value_of(9, 2))):
        with pytest.raises(TransferError):
            attempt()
        store.check()
        assert store.names() == ["0", "1", "2", "3"]
    engine.heal()
    with contextlib.suppress(TransferError):
        store.wait()
    assert_holds(store)
    store.put("1", value_of(1))
    store.put("4", value_of(4))
    assert_holds(store, 5)


def test_deleting_a_tensor_keeps_the_error_of_another(store: TieredStore, engine: FaultyEngine) -> None:
    """Deletion waits for the chunk's own move, and hears of others meanwhile."""
    fill(store, 6)
    store.evict(store.names())
    store.wait()
    engine.hold()
    engine.spoil(kind=Kind.READ)
    store.prefetch(["0", "1"])
    engine.wait_until_held()
    deleting = threading.Thread(target=lambda: store.delete("1"))
    deleting.start()
    engine.release()
    deleting.join()
    end_moves(store)
    with pytest.raises(TransferError, match=r"\('0'\)"):
        store.get("2")
    assert store.names() == ["0", "2", "3", "4", "5"]
    engine.heal()
    assert torch.equal(store.get("0"), value_of(0))


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_put_of_many_chunks_is_whole_or_not_at_all(store: TieredStore, engine: FaultyEngine, nth: int) -> None:
    """Whichever request fails, the name has either its old value or the new one."""
    old, new = value_of(7, 5), value_of(8, 6)
    fill(store)
    store.put("large", old)
    engine.fail(nth=nth)
    with contextlib.suppress(TransferError):
        store.put("large", new)
        old = new
    store.check()
    engine.heal()
    with contextlib.suppress(TransferError):
        store.wait()
    store.run([], [], lambda *_: None)  # an optimizer in the same store is not kept from its next step
    assert torch.equal(store.get("large"), old)
    assert_holds(store)


# -- reading fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_short", [False, True])
def test_a_failed_read_says_where_and_loses_nothing(store: TieredStore, engine: FaultyEngine, is_short: bool) -> None:
    """Not even the chunk that could not be read is given up: its bytes may be there the next time."""
    fill(store, 9)
    store.evict(["8"])
    store.wait()
    if is_short:
        engine.shorten(0)
    else:
        engine.spoil(kind=Kind.READ)
    with pytest.raises(TransferError) as error:
        store.get("8")
    text = str(error.value)
    assert error.value.errno == errno.EIO
    assert "chunk -9 ('8') from nvme to cpu failed" in text
    assert "offset" in text
    assert str(error.value.filename).startswith(str(store.stats().io.paths[0]))
    assert store.where("8") == {"nvme": CHUNK}
    engine.heal()
    assert_holds(store, 9)


def test_a_failed_prefetch_is_the_next_calls_error(store: TieredStore, engine: FaultyEngine) -> None:
    fill(store, 6)
    store.evict(store.names())
    store.wait()
    engine.spoil(kind=Kind.READ)
    store.prefetch(["0", "1"])
    end_moves(store)
    with pytest.raises(TransferError, match=r"\('0'\) from nvme to cpu"):
        store.prefetch(["2"])
    engine.heal()
    assert_holds(store, 6)


def test_a_truncated_swap_file_is_an_error_for_what_was_in_it_alone(store: TieredStore) -> None:
    """What is gone is gone, but is not passed off as zeros; everything else is there, and new values can be put."""
    fill(store)
    store.evict(["0"])
    store.wait()
    nvme = store.setup.tiers["nvme"]
    assert isinstance(nvme, FileTier)
    os.ftruncate(nvme.files[0].fd, 0)
    for _ in range(2):
        with pytest.raises(TransferError, match=r"unexpected end of file at byte 0.*truncated"):
            store.get("0")
        store.check()
    for number in (1, 2, 3):
        assert torch.equal(store.get(f"{number}"), value_of(number))
    store.delete("0")
    fill(store, 9)
    assert_holds(store, 9)


# -- leases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 14))
def test_a_lease_that_cannot_be_written_back_keeps_its_changes(
    store: TieredStore, engine: FaultyEngine, nth: int
) -> None:
    """Whichever request fails while a tensor larger than the cpu tier is gathered or scattered."""
    expected = value_of(5, 6)
    store.put("large", expected)
    fill(store)
    engine.fail(nth=nth)
    with contextlib.suppress(TransferError), store.lease("large") as tensor:
        tensor.copy_(expected := value_of(6, 6))
    engine.heal()
    store.check()
    with contextlib.suppress(TransferError):
        store.wait()
    assert torch.equal(store.get("large"), expected)
    with store.lease("large") as tensor:
        assert torch.equal(tensor, expected)
        tensor[0] = 99
    expected[0] = 99
    assert not store._gathered
    assert torch.equal(store.get("large"), expected)
    assert_holds(store)


def test_changes_that_were_kept_in_memory_are_evicted_too(store: TieredStore, engine: FaultyEngine) -> None:
    store.put("large", value_of(5, 6))
    lease = store.lease("large")
    lease.__enter__().fill_(6)
    engine.fail(times=None)
    with pytest.raises(TransferError) as error:
        lease.__exit__(None, None, None)
    assert "the changes of 'large' are kept in memory" in error.value.__notes__[-1]
    with contextlib.suppress(TransferError):
        store.evict(["large"])
    engine.heal()
    end_moves(store)
    with contextlib.suppress(TransferError):
        store.wait()
    store.evict(["large"])
    store.wait()
    assert store.where("large") == {"nvme": 6 * CHUNK}
    assert torch.equal(store.get("large"), value_of(6, 6))


def test_a_leased_chunk_does_not_move_for_others(store: TieredStore) -> None:
    fill(store, 9)
    with store.lease("2") as tensor:
        assert_holds(store, 9)
        assert store.where("2") == {"cpu": CHUNK}
        tensor.fill_(2)
    assert_holds(store, 9)


def test_closing_within_a_lease_is_told_at_its_end(tmp_path: Path) -> None:
    store = TieredStore(policy(tmp_path))
    store.put("a", torch.ones(3))
    lease = store.lease("a")
    tensor = lease.__enter__()
    store.close()
    assert tensor.tolist() == [1, 1, 1]
    with pytest.raises(StoreClosedError):
        lease.__exit__(None, None, None)


# -- threads, forks, the end ------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[TieredStore], object]] = {
    "put": lambda store: store.put("b", torch.ones(1)),
    "get": lambda store: store.get("0"),
    "lease": lambda store: store.lease("0").__enter__(),
    "prefetch": lambda store: store.prefetch(["0"]),
    "evict": lambda store: store.evict(["0"]),
    "where": TieredStore.where,
    "delete": lambda store: store.delete("0"),
    "names": TieredStore.names,
    "in": lambda store: "0" in store,
    "len": len,
    "resize": lambda store: store.resize("cpu", "1MiB"),
    "stats": TieredStore.stats,
    "check": TieredStore.check,
    "wait": TieredStore.wait,
    "with": TieredStore.__enter__,
}
"""Every method but `close`."""


def test_a_second_thread_is_told_while_the_first_is_inside(store: TieredStore, engine: FaultyEngine) -> None:
    fill(store, 6)
    store.evict(store.names())
    store.wait()
    engine.hold()
    found: list[Tensor] = []
    first = threading.Thread(target=lambda: found.append(store.get("0")), name="first")
    first.start()
    engine.wait_until_held()
    for call in (*CALLS.values(), TieredStore.close):
        with pytest.raises(WrongThreadError, match="MainThread"):
            call(store)
    engine.release()
    first.join()
    assert torch.equal(found[0], value_of(0))
    assert_holds(store, 6)


def test_a_lease_ends_though_another_thread_is_inside(store: TieredStore, engine: FaultyEngine) -> None:
    """Its end waits for the other to leave; had it failed, the chunk would be held for ever."""
    fill(store, 6)
    store.evict(store.names())
    store.wait()
    lease = store.lease("1")
    lease.__enter__().fill_(1)
    engine.hold()
    first = threading.Thread(target=lambda: store.get("0"))
    first.start()
    engine.wait_until_held()
    second = threading.Thread(target=lambda: lease.__exit__(None, None, None))
    second.start()
    engine.release()
    first.join()
    second.join()
    store.evict(["1"])
    assert_holds(store, 6)


def test_two_threads_may_take_turns(store: TieredStore) -> None:
    fill(store, 6)
    for number in range(6):
        thread = threading.Thread(target=lambda number=number: store.put(f"{number}", value_of(number)))
        thread.start()
        thread.join()
    assert_holds(store, 6)


def test_a_fork_is_told_and_the_parent_goes_on(store: TieredStore) -> None:
    fill(store, 6)
    child = os.fork()
    if not child:
        answers = set()
        for call in CALLS.values():
            try:
                call(store)
                answers.add("no error")
            except BaseException as error:
                answers.add(type(error).__name__)
        store.close()
        del store
        gc.collect()
        os._exit(0 if answers == {ForkedStoreError.__name__} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_holds(store, 6)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_after_close_every_call_is_refused_but_close(tmp_path: Path, call: Callable[[TieredStore], object]) -> None:
    store = TieredStore(policy(tmp_path))
    store.put("0", torch.ones(1))
    store.close()
    with pytest.raises(StoreClosedError):
        call(store)
    store.close()
    assert store.is_closed


def test_closing_waits_for_what_is_under_way(tmp_path: Path, engine: FaultyEngine) -> None:
    store = TieredStore(policy(tmp_path), parts=Parts(open_engine=lambda *_, **__: engine))
    fill(store)
    engine.hold()
    store.evict(store.names())
    engine.wait_until_held()
    closing = threading.Thread(target=store.close)
    closing.start()
    engine.release()
    closing.join()
    assert store.is_closed


def test_an_error_in_the_with_block_closes_the_store(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), TieredStore(policy(tmp_path)) as store:
        raise ZeroDivisionError
    assert store.is_closed


def test_a_store_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(SwapError, match="does not exist"):
        TieredStore(policy(tmp_path / "missing"))
    broken = policy(tmp_path)
    broken["tiers"]["nvme"]["capacity"] = "8000TiB"
    with pytest.raises((SwapError, CapacityError)):
        TieredStore(broken)
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())


def test_fifty_stores_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def once() -> None:
        with TieredStore(policy(tmp_path)) as store:
            fill(store, 6)
            assert_holds(store, 6)

    once()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(50):
        once()
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads
    assert not list(tmp_path.iterdir())


def test_two_stores_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    with TieredStore(policy(tmp_path)) as one, TieredStore(policy(tmp_path)) as other:
        for number in range(9):
            one.put(f"{number}", value_of(number))
            other.put(f"{number}", value_of(100 + number))
        for number in range(9):
            assert torch.equal(one.get(f"{number}"), value_of(number))
            assert torch.equal(other.get(f"{number}"), value_of(100 + number))
        one.check()
        other.check()


# -- other processes --------------------------------------------------------------------------------------------


def filled(folder: Path, base: int = 0) -> TieredStore:
    store = TieredStore(policy(folder))
    for number in range(9):
        store.put(f"{number}", value_of(base + number))
    return store


def fill_and_look(folder: Path, base: int, both: Any) -> None:
    with filled(folder, base) as store:
        both.wait()
        for number in range(9):
            assert torch.equal(store.get(f"{number}"), value_of(base + number))
        store.check()


def test_two_processes_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    both = barrier(2)
    with Child(fill_and_look, tmp_path, 0, both) as one, Child(fill_and_look, tmp_path, 100, both) as other:
        one.result()
        other.result()


def fill_and_stay(folder: Path, both: Any) -> None:
    store = filled(folder)
    store.check()
    both.wait()
    signal.pause()


def test_nothing_is_left_after_a_process_was_killed(tmp_path: Path) -> None:
    both = barrier(2)
    with Child(fill_and_stay, tmp_path, both) as child:
        both.wait()
        child.send(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def forget(folder: Path) -> tuple[int, int]:
    """Forget a store; return how many threads there are then, and how many descriptors fewer."""
    store = filled(folder)
    gc.collect()
    gc.disable()
    store.put("large", torch.ones(5 * CHUNK, dtype=torch.uint8))
    with store.lease("large") as tensor:
        tensor.zero_()
    del tensor
    store.evict(["large"])
    before = len(os.listdir("/proc/self/fd"))
    del store
    return threading.active_count(), before - len(os.listdir("/proc/self/fd"))


def test_a_forgotten_store_takes_its_threads_and_files_along(tmp_path: Path) -> None:
    """Without the collector's help: nothing in a store is in a cycle with it."""
    assert processes.call(forget, tmp_path) == (1, 1)


def test_a_store_forgotten_at_exit_is_no_error(tmp_path: Path) -> None:
    script = """
        from pathlib import Path
        from tests.unit.test_store import filled
        store = filled(Path(folder))
        store.evict(store.names())
        print("done")
        """
    assert run_script(script, tmp_path, to_its_end=True) == "done\n"


# -- engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["threads", "libaio", "aiofiles"])
def test_every_method_works_on_every_engine(tmp_path: Path, name: str) -> None:
    try:
        open_engine(name, threads=1, queue_depth=1, request_size=None).close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    with TieredStore(policy(tmp_path, engine=name, direct="auto")) as store:
        fill(store, 9)
        store.put("large", value_of(50, 6))
        with store.lease("large") as tensor, store.lease("8") as other:
            tensor.fill_(51)
            other.fill_(8)
            with pytest.raises(LeaseError):
                store.delete("8")
        store.evict(store.names())
        store.wait()
        assert all(set(place) == {"nvme"} for place in store.where().values())
        store.prefetch(["1", "2"])
        store.wait()
        assert store.where("1") == {"cpu": CHUNK}
        assert store.resize("nvme", 20 * CHUNK) == 20 * CHUNK
        assert_holds(store, 9)
        assert torch.equal(store.get("large"), value_of(51, 6))
        assert ("large" in store, len(store), store.names()[0]) == (True, 10, "0")
        store.delete("large")
        stats = store.stats()
        assert stats.io.engine == name
        assert stats.routes["cpu->nvme"].moves > 0
        store.check()
