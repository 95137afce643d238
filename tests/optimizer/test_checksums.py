"""What is read is what was written, or it is said that it is not: `io.checksum`, on real swap files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.fakes import FaultyEngine
from tests.optimizer.cases import KIB, same_bits, seeded, set_gradients, small_policy
from tests.optimizer.test_faults import Run
from tierstore.errors import ChecksumError, EngineUnavailableError
from tierstore.io import open_engine
from tierstore.io.base import Kind
from tierstore.optimizer import TieredAdamW
from tierstore.residency import Resident

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

REQUEST = 4 * KIB  # so that a record has several


class CheckedRun(Run):
    """A training run with checksums on an engine that can be made to lie, beside torch's."""

    io: ClassVar[dict[str, Any]] = {"checksum": True}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[CheckedRun]:
    made = CheckedRun(tmp_path)
    yield made
    made.engine.heal()
    made.optimizer.close()


def chunks_in_file(optimizer: TieredAdamW) -> dict[int, tuple[int, int, int]]:
    """Descriptor, offset and record bytes of each chunk whose valid copy is in the swap file."""
    store, found = optimizer.store, {}
    store.wait()
    for chunk, info in store._infos.items():
        place = store._ledger.where(chunk)
        if isinstance(place, Resident) and place.tier == "nvme":
            file, offset = store.setup.tiers["nvme"].range_at(place.extent)  # type: ignore[attr-defined]
            found[chunk] = file.fd, offset, info.record_bytes
    return found


def flip_bit(fd: int, bit: int) -> None:
    """Flip a bit of a file that may be open for direct I/O, past its descriptor."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        byte = os.pread(other, 1, bit // 8)[0] ^ (1 << bit % 8)
        os.pwrite(other, bytes([byte]), bit // 8)
        os.fsync(other)
    finally:
        os.close(other)


@pytest.mark.parametrize("engine", ["threads", "libaio", "aiofiles"])
def test_a_bit_flipped_anywhere_in_the_swap_file_is_found_and_named(engine: str, tmp_path: Path) -> None:
    """In fields, in the gaps between them and in the padding behind; flipped back, all is well."""
    try:
        open_engine(engine, threads=None, queue_depth=None, request_size=None).close()
    except EngineUnavailableError as error:
        pytest.skip(str(error))
    policy = small_policy(tmp_path)
    policy["tiers"]["nvme"]["io"] = {"engine": engine, "checksum": True, "request_size": REQUEST}
    parameters = seeded((19_000,), (50,), (13_000,))
    with TieredAdamW(parameters, lr=1e-2, policy=policy) as optimizer:
        set_gradients(parameters, 0)
        optimizer.step()
        chunks = chunks_in_file(optimizer)
        assert len(chunks) > 8
        into, chance = optimizer.store.setup.tiers["cpu"].device.allocate(16 * KIB), random.Random(7)  # type: ignore[attr-defined]
        places = [(chunk, chance.randrange(chunks[chunk][2] * 8)) for chunk in chunks for _ in range(6)]
        places += [(chunk, bit) for chunk, (_, _, nbytes) in chunks.items() for bit in (0, nbytes * 8 - 1)]
        for chunk, bit in places:
            fd, offset, nbytes = chunks[chunk]
            flip_bit(fd, offset * 8 + bit)
            with pytest.raises(ChecksumError) as caught:
                optimizer.store.read_record(chunk, into[:nbytes])
            text = str(caught.value)
            assert f"chunk {chunk} (param." in text and "from nvme to host" in text and str(tmp_path) in text
            assert f"bytes from byte {offset + bit // 8 // REQUEST * REQUEST} on" in text
            assert "its only copy, in nvme, is damaged" in text
            flip_bit(fd, offset * 8 + bit)
            assert optimizer.store.read_record(chunk, into[:nbytes])
        optimizer.store.check()


def test_a_step_that_would_use_damaged_state_fails_and_all_other_state_is_whole(run: CheckedRun) -> None:
    saved = run.save()
    chunks = chunks_in_file(run.optimizer)
    for chunk, (fd, offset, _) in chunks.items():
        flip_bit(fd, offset * 8 + 77)
        named = pytest.raises(ChecksumError, match=rf"chunk {chunk} \(param\.\d.*from nvme to cpu")
        with named, run.optimizer.store.lease_chunk(chunk):
            pytest.fail("it could be used")
        run.optimizer.store.check()
        flip_bit(fd, offset * 8 + 77)
    fd, offset, _ = chunks[min(chunks)]
    flip_bit(fd, offset * 8 + 77)
    with pytest.raises(ChecksumError):
        run.step()
    run.resume(saved)
    run.step()
    run.assert_right()


def test_without_checksums_the_same_goes_unnoticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    fd, offset, _ = chunks_in_file(run.optimizer).popitem()[1]
    before = run.optimizer.state_dict()["state"]
    flip_bit(fd, offset * 8 + 77)
    after = run.optimizer.state_dict()["state"]
    assert not all(same_bits(after[key][name], before[key][name]) for key in before for name in before[key])
    run.optimizer.close()


def test_a_read_that_went_wrong_on_its_way_is_made_again(run: CheckedRun) -> None:
    for nth in range(1, 12, 3):
        run.engine.lie(nth=nth, kind=Kind.READ)
        run.step()
        run.optimizer.store.wait()
    run.assert_right()
    assert run.optimizer.store.stats().io.misread == 4
    assert run.optimizer.store.stats().io.checksum


def test_a_read_that_goes_wrong_twice_is_an_error_with_both_sums(run: CheckedRun) -> None:
    saved = run.save()
    run.engine.lie(times=2, kind=Kind.READ)
    with pytest.raises(ChecksumError, match=r"checksum \(xxh3\) is [0-9a-f]{16} both times, and was [0-9a-f]{16}"):
        run.step()
    run.engine.heal()
    run.resume(saved)
    run.step()
    run.assert_right()


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_whichever_write_of_a_step_puts_other_bytes_into_the_file_it_is_found(every: int, tmp_path: Path) -> None:
    """The engine says that all went well. What was written falsely may never be read; if it is, that is told."""
    told = quiet = 0
    for nth in range(1, 25, every):
        run = CheckedRun(tmp_path)
        saved = run.save()
        run.engine.lie(nth=nth, kind=Kind.WRITE)
        try:
            for _ in range(3):
                run.step()
            run.assert_right()
            quiet += 1
        except ChecksumError:
            told += 1
            run.resume(saved)
        run.optimizer.store.check()
        run.optimizer.close()
    assert told >= 3 and told + quiet == len(range(1, 25, every))


def test_numbers_are_those_without_checksums(run: CheckedRun) -> None:
    for _ in range(4):
        run.step()
    run.assert_right()


def test_state_that_is_put_by_name_is_checked_too(tmp_path: Path) -> None:
    from tierstore import TieredStore

    settings = {"capacity": "1MiB", "paths": [str(tmp_path)], "io": {"checksum": True}}
    policy = {"chunk_size": "16KiB", "tiers": {"cpu": {"capacity": "64KiB"}, "nvme": settings}}
    with TieredStore(policy) as store:
        values = {f"value {number}": torch.arange(3000) + number for number in range(12)}
        for name, value in values.items():
            store.put(name, value)
        store.evict(list(values))
        store.wait()
        for name, value in values.items():
            assert torch.equal(store.get(name), value)
        assert store.stats().io.checksum


def test_engine_counts_and_sums_survive_requests_that_are_cut_short(run: CheckedRun) -> None:
    run.engine.shorten(4096)
    run.engine.interrupt(5)
    run.step()
    run.optimizer.store.wait()
    run.engine.heal()
    run.assert_right()
    assert isinstance(run.engine, FaultyEngine) and run.engine.misread == 0
