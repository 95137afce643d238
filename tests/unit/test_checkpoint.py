"""Checkpoints on disk: what is written is what is read, by us and by zarr, whatever the parts and the dtypes."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fakes import PATIENCE_SECONDS, FewThreads, RecordingFiles
from tierstore.checkpoint import Entry, Reader, Writer
from tierstore.checkpoint.blocks import THREADS, Buffer, Readers, checksum
from tierstore.checkpoint.files import Files
from tierstore.checkpoint.geometry import BLOCK_BYTES, PAGE_BYTES, SINGLE_BYTES, Compression, geometry_for
from tierstore.checkpoint.tree import Tree
from tierstore.errors import CheckpointFileError, CheckpointValueError, DamagedCheckpointError, NoThreadError

COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")


def flat_entry(values: Tensor, name: str = "w", step: float | None = 3.0) -> Entry:
    return Entry(name, (len(values),), (1,), values.dtype, {"exp_avg": values.dtype}, step)


def save(path: Path, *tensors: Tensor, compression: Compression = "none", files: Files | None = None) -> None:
    """Save 1-D tensors as parameters 0, 1, ..."""
    with Writer(path, header={"lr": 1e-3}, compression=compression, files=files) as writer:
        for number, values in enumerate(tensors):
            writer.add("params", number, flat_entry(values))
            writer.write("params", number, "exp_avg", 0, values)
        writer.commit()


def load(reader: Reader, number: int = 0, field: str = "exp_avg") -> Tensor:
    entry = reader.entries("params")[number]
    values = torch.empty(entry.numel, dtype=entry.fields[field])
    reader.read("params", number, field, 0, values)
    return values


def bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def random_bits(elements: int, dtype: torch.dtype) -> Tensor:
    """Any bit pattern, NaNs with payloads among them; of bool only 0 and 1."""
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "uint16",
    torch.float8_e4m3fn: "uint8",
    torch.float8_e5m2: "uint8",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.int64: "int64",
    torch.uint16: "uint16",
    torch.bool: "bool",
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_dtype_comes_back_bit_by_bit_and_zarr_reads_the_same(tmp_path: Path, compression: Compression) -> None:
    tensors = [random_bits(1000 + number, dtype) for number, dtype in enumerate(DTYPES)]
    save(tmp_path / "c", *tensors, compression=compression)
    group = zarr.open_group(tmp_path / "c", mode="r")
    with Reader(tmp_path / "c") as reader:
        for number, (values, stored) in enumerate(zip(tensors, DTYPES.values(), strict=True)):
            assert reader.entries("params")[number] == flat_entry(values)
            assert bits(load(reader, number)).equal(bits(values))
            array = group[f"params/{number:06d}/exp_avg"]
            assert isinstance(array, zarr.Array)
            assert str(array.dtype) == stored
            assert np.asarray(array[:]).tobytes() == bits(values).numpy().tobytes()
            assert array.attrs["dtype"] == str(values.dtype).removeprefix("torch.")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_an_array_of_one_block_that_is_not_small_is_a_shard(tmp_path: Path, compression: Compression) -> None:
    values = random_bits(SINGLE_BYTES // 4 + 1, torch.float32)
    save(tmp_path / "c", values, compression=compression)
    array = zarr.open_array(tmp_path / "c/params/000000/exp_avg", mode="r")
    assert array.shards == array.chunks == (263_168,)
    assert np.asarray(array[:]).tobytes() == bits(values).numpy().tobytes()
    with Reader(tmp_path / "c") as reader:
        assert bits(load(reader)).equal(bits(values))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_arrays_of_many_blocks_and_shards_come_back(
    tmp_path: Path, compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.checkpoint.geometry.SHARD_BLOCKS", 3)
    monkeypatch.setattr("tierstore.checkpoint.reader._MOST_INDEXES", 1)  # one is forgotten while others read by it
    values = random_bits(8 * BLOCK_BYTES // 4 + 12_345, torch.float32)
    save(tmp_path / "c", values, compression=compression)
    assert len(list((tmp_path / "c/params/000000/exp_avg").glob("c.*"))) > 2
    array = zarr.open_array(tmp_path / "c/params/000000/exp_avg", mode="r")
    assert np.asarray(array[:]).tobytes() == bits(values).numpy().tobytes()
    with Reader(tmp_path / "c") as reader:
        assert bits(load(reader)).equal(bits(values))
        for start, count in [(0, 1), (BLOCK_BYTES // 4 - 1, 2), (len(values) - 1, 1), (1_000_003, 777_777), (5, 0)]:
            part = torch.empty(count)
            reader.read("params", 0, "exp_avg", start, part)
            assert bits(part).equal(bits(values[start : start + count]))


@given(
    cuts=st.lists(st.integers(0, 1_400_000), max_size=6, unique=True),
    order=st.randoms(use_true_random=False),
    compression=st.sampled_from(COMPRESSIONS),
)
@settings(max_examples=10, deadline=None)
def test_parts_in_any_order_make_the_same_array(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], order: object, compression: Compression
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    values = torch.arange(1_400_000, dtype=torch.int32)
    edges = [0, *sorted(cuts), len(values)]
    parts = list(pairwise(edges))
    order.shuffle(parts)  # type: ignore[attr-defined]
    with Writer(folder / "c", header={}, compression=compression) as writer:
        writer.add("params", 0, flat_entry(values))
        for begin, end in parts:
            writer.write("params", 0, "exp_avg", begin, values[begin:end])
        writer.commit()
    with Reader(folder / "c") as reader:
        assert load(reader).equal(values)


def test_what_was_written_may_change_as_soon_as_write_returns(tmp_path: Path) -> None:
    values = torch.arange(3_000_000, dtype=torch.int32)
    with Writer(tmp_path / "c", header={}) as writer:
        writer.add("params", 0, flat_entry(values))
        buffer = torch.empty(250_000, dtype=torch.int32)
        for start in range(0, len(values), len(buffer)):
            buffer.copy_(values[start : start + len(buffer)])
            writer.write("params", 0, "exp_avg", start, buffer)
            buffer.fill_(-1)
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        assert load(reader).equal(values)


def test_another_tools_chunks_are_read(tmp_path: Path) -> None:
    """Arrays written anew by zarr, sharded or not, with its default compression and chunk names, are still ours."""
    values = torch.randn(100_003)
    layouts: list[Mapping[str, object]] = [
        {"chunks": (1000,)},
        {"chunks": (1000,), "shards": (10_000,)},
        {"chunks": (1009,), "shards": (10_090,), "compressors": None},
        {"chunks": (100_003,), "compressors": None},
        {"chunks": (3000,), "chunk_key_encoding": {"name": "v2", "separator": "."}},
    ]
    save(tmp_path / "c", *[values] * len(layouts))
    group = zarr.open_group(tmp_path / "c", mode="r+", use_consolidated=False)
    for number, layout in enumerate(layouts):
        array = group.create_array(
            f"params/{number:06d}/exp_avg", shape=values.shape, dtype="float32", overwrite=True, **layout
        )
        array[:] = values.numpy()
    document = json.loads((tmp_path / "c/zarr.json").read_text())
    del document["consolidated_metadata"]
    (tmp_path / "c/zarr.json").write_text(json.dumps(document))
    with Reader(tmp_path / "c") as reader:
        for number in range(len(layouts)):
            assert load(reader, number).equal(values)


class _RefusingTree(Tree):
    """On a filesystem without direct I/O, which refuses a thread other than the first one when it is let."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.main = threading.current_thread()
        self.is_tried, self.may_refuse = threading.Event(), threading.Event()

    def _open(self, name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            if threading.current_thread() is not self.main:
                self.is_tried.set()
                assert self.may_refuse.wait(PATIENCE_SECONDS)
            raise OSError(errno.EINVAL, "no direct I/O here", name)
        return super()._open(name, flags)


def test_every_thread_goes_on_where_direct_reads_are_refused(tmp_path: Path) -> None:
    """Blocks are read by several threads. What one found out of the filesystem was taken by the next, whose direct
    read was under way, for a sign that it had not read directly: its refusal was raised, now and then, and the load of
    an intact checkpoint failed.
    """
    (tmp_path / "c").mkdir()
    (tmp_path / "c/block").write_bytes(b"values")

    def read(tree: Tree) -> bytes:
        return tree.read_into("block", 0, 6, np.empty(3 * PAGE_BYTES, np.uint8)).tobytes()

    with closing(_RefusingTree(str(tmp_path / "c"))) as tree, ThreadPoolExecutor(1) as other:
        late = other.submit(read, tree)
        assert tree.is_tried.wait(PATIENCE_SECONDS)
        assert read(tree) == b"values"
        tree.may_refuse.set()
        assert late.result() == b"values"


def test_an_index_is_read_once_however_many_threads_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block lies is found out by the threads that read; the one that asks for many waits for no disk."""
    values = random_bits(16 * BLOCK_BYTES // 4, torch.float32)
    save(tmp_path / "c", values)
    readers: list[threading.Thread] = []
    read_range = Tree.read_range

    def noted(tree: Tree, name: str, offset: int, nbytes: int) -> bytes:
        readers.append(threading.current_thread())
        return read_range(tree, name, offset, nbytes)

    with Reader(tmp_path / "c") as reader:
        monkeypatch.setattr(Tree, "read_range", noted)
        assert bits(load(reader)).equal(bits(values))
    assert len(readers) == 1 and readers[0] is not threading.current_thread()


def test_without_a_thread_every_block_is_refused_and_leaving_leaves_nothing(tmp_path: Path) -> None:
    """A block was taken and never written: its buffer was lost, and whoever left waited for it for ever."""
    values = random_bits(10 * BLOCK_BYTES // 4, torch.float32)
    with FewThreads(), Writer(tmp_path / "c", header={}) as writer:
        writer.add("params", 0, flat_entry(values))
        for block in values.split(BLOCK_BYTES // 4):  # more than there are buffers
            with pytest.raises(NoThreadError, match="'tierstore-checkpoint-0' could not be started"):
                writer.write("params", 0, "exp_avg", 0, block)
            writer._arrays[("params", 0, "exp_avg")]._begun[0] = False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there_are", range(THREADS + 1))
def test_blocks_are_written_and_read_by_as_many_threads_as_there_are(tmp_path: Path, there_are: int) -> None:
    """Without any, nothing is written to the reader's memory: a read that was refused once did so after its end."""
    values = random_bits(10 * BLOCK_BYTES // 4, torch.float32)
    with FewThreads(max(there_are, 1) + 1):
        save(tmp_path / "c", values)
    with Reader(tmp_path / "c") as reader:
        into = torch.zeros_like(values)
        with FewThreads(there_are + 1):
            if there_are == 0:
                with pytest.raises(NoThreadError):
                    reader.read("params", 0, "exp_avg", 0, into)
            else:
                assert bits(load(reader)).equal(bits(values))
        assert not into.any()
        assert bits(load(reader)).equal(bits(values))


@pytest.mark.parametrize("block_bytes", [PAGE_BYTES, BLOCK_BYTES, 64 << 20])
def test_threads_that_read_have_buffers_of_their_own_and_whoever_asks_another(block_bytes: int) -> None:
    """All of them are held up at once, and still there is one for who reads here; whatever the size, two threads."""
    readers = Readers(block_bytes)
    held, addresses, may_end = threading.Semaphore(0), list[int](), threading.Event()

    def hold(buffer: Buffer) -> None:
        addresses.append(buffer.ctypes.data)
        held.release()
        assert may_end.wait(PATIENCE_SECONDS)

    count = THREADS if block_bytes <= BLOCK_BYTES else 2
    futures = [readers.submit(hold) for _ in range(2 * count)]
    for _ in range(count):
        assert held.acquire(timeout=PATIENCE_SECONDS)
    readers.work_here(lambda buffer: addresses.append(buffer.ctypes.data))
    assert len(set(addresses)) == count + 1
    may_end.set()
    for future in futures:
        future.result()
    assert len(set(addresses)) == count + 1
    readers.close()


def test_a_read_that_ends_early_reads_no_block_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt, too, once ended a read of which all blocks were asked for, while threads went on writing them."""
    save(tmp_path / "c", random_bits(10 * BLOCK_BYTES // 4, torch.float32))
    last_is_left, begun = threading.Event(), list[int]()
    submit, read_into = Readers.submit, Tree.read_into

    def submitted(readers: Readers, work: Callable[[Buffer], None]) -> Future[None]:
        future = submit(readers, work)
        asked.append(future)
        if len(asked) == 10:
            future.add_done_callback(lambda _: last_is_left.set())
        return future

    def read(tree: Tree, name: str, offset: int, nbytes: int, buffer: Buffer) -> Buffer:
        begun.append(offset)
        if offset == 0:
            raise KeyboardInterrupt
        assert last_is_left.wait(PATIENCE_SECONDS)
        return read_into(tree, name, offset, nbytes, buffer)

    asked = list[Future[None]]()
    monkeypatch.setattr(Readers, "submit", submitted)
    monkeypatch.setattr(Tree, "read_into", read)
    with Reader(tmp_path / "c") as reader:
        with pytest.raises(KeyboardInterrupt):
            load(reader)
        assert all(future.done() for future in asked)
        assert len(begun) <= THREADS + 1


def test_a_codec_that_is_not_read_is_named(tmp_path: Path) -> None:
    save(tmp_path / "c", torch.randn(100))
    group = zarr.open_group(tmp_path / "c", mode="r+", use_consolidated=False)
    codec = zarr.codecs.GzipCodec()
    group.create_array(
        "params/000000/exp_avg", shape=(100,), chunks=(10,), dtype="float32", compressors=[codec], overwrite=True
    )
    document = json.loads((tmp_path / "c/zarr.json").read_text())
    del document["consolidated_metadata"]
    (tmp_path / "c/zarr.json").write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpointError, match=r"params/000000/exp_avg.*gzip"):
        Reader(tmp_path / "c")


def test_zarr_opens_it_by_one_file_and_finds_names_shapes_and_steps(tmp_path: Path) -> None:
    name = "a name/../\u00e9" * 100
    entry = Entry(name, (10, 100), (1, 10), torch.bfloat16, {"exp_avg": torch.bfloat16}, 7.0, {"group": 1})
    with Writer(tmp_path / "c", header={"groups": [{"lr": 0.1}]}) as writer:
        writer.add("params", 12, entry)
        writer.write("params", 12, "exp_avg", 0, torch.zeros(1000, dtype=torch.bfloat16))
        writer.commit()
    group = zarr.open_group(tmp_path / "c", mode="r", use_consolidated=True)
    assert group["params/000012"].attrs.asdict() == {
        "name": name,
        "shape": [10, 100],
        "strides": [1, 10],
        "dtype": "bfloat16",
        "step": 7.0,
        "fields": {"exp_avg": "bfloat16"},
        "attributes": {"group": 1},
    }
    attributes = group.attrs.asdict()
    assert attributes["header"] == {"groups": [{"lr": 0.1}]}
    assert attributes["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert attributes["torch"] == torch.__version__


def test_scalars_and_empty_tensors_are_stored(tmp_path: Path) -> None:
    with Writer(tmp_path / "c", header={}) as writer:
        writer.add("params", 0, Entry("", (), (), torch.float32, {"exp_avg": torch.float32}))
        writer.add("params", 1, Entry("", (0, 3), (3, 1), torch.float32, {"exp_avg": torch.float32}))
        writer.write("params", 0, "exp_avg", 0, torch.tensor([2.5]))
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        assert load(reader, 0).tolist() == [2.5]
        assert load(reader, 1).tolist() == []
        assert list(reader.entries("model")) == []


# --- what is refused


def test_elements_given_twice_or_never_or_beyond_the_end_are_refused(tmp_path: Path) -> None:
    values = torch.zeros(1_400_000)
    with Writer(tmp_path / "c", header={}) as writer:
        writer.add("params", 0, flat_entry(values))
        writer.write("params", 0, "exp_avg", 100, values[100:1_000_000])
        for start in (200, 500_000, 999_999):  # of three blocks the one between is there as a whole
            with pytest.raises(CheckpointValueError, match="twice"):
                writer.write("params", 0, "exp_avg", start, values[:1])
        with pytest.raises(CheckpointValueError, match="1,400,000"):
            writer.write("params", 0, "exp_avg", 1_399_999, values[:2])
        with pytest.raises(CheckpointValueError, match=r"params/000000/exp_avg \('w'\): 400,100 of 1,400,000"):
            writer.commit()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry("x", (4,), (2,), torch.float32, {}), "strides"),
        (Entry("x", (2, 2), (1, 1), torch.float32, {}), "strides"),
        (Entry("x", (4,), (1,), torch.float32, {"a/b": torch.float32}), "a/b"),
        (Entry("x", (4,), (1,), torch.float32, {".": torch.float32}), "field's name"),
        (Entry("x", (4,), (1,), torch.float32, {}, step=float("nan")), "step"),
        (Entry("x", (4,), (1, 1), torch.float32, {}), "dimensions"),
        (Entry("x", (4,), (1,), torch.quint8, {}), "quint8"),
    ],
)
def test_an_entry_that_cannot_be_stored_is_refused_when_it_is_added(tmp_path: Path, entry: Entry, words: str) -> None:
    with Writer(tmp_path / "c", header={}) as writer, pytest.raises(CheckpointValueError, match=words):
        writer.add("params", 0, entry)


def test_a_header_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="header"):
        Writer(tmp_path / "c", header={"lr": float("nan")})
    assert os.listdir(tmp_path) == []


def test_a_block_that_was_changed_on_disk_is_found_and_named(tmp_path: Path) -> None:
    save(tmp_path / "c", torch.randn(BLOCK_BYTES))
    file = tmp_path / "c/params/000000/exp_avg/c.0"
    content = bytearray(file.read_bytes())
    content[2 * BLOCK_BYTES] ^= 1
    file.write_bytes(content)
    with Reader(tmp_path / "c") as reader:
        with pytest.raises(DamagedCheckpointError, match=r"c\.0, elements .* is damaged"):
            load(reader)
        good = torch.empty(1000)
        reader.read("params", 0, "exp_avg", 0, good)  # what is not damaged can still be read


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, BLOCK_BYTES + 3])
def test_the_checksum_of_an_array_is_that_of_its_bytes_wherever_it_lies(nbytes: int) -> None:
    """Arrays are summed by the C function itself, which is given an address and a length."""
    values = random_bits(nbytes + 3, torch.uint8).numpy()
    for begin in range(4):
        part = values[begin : begin + nbytes]
        assert checksum(part) == google_crc32c.value(part.tobytes()).to_bytes(4, "little")
    part.flags.writeable = False
    assert checksum(part) == checksum(part.tobytes())


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    class FullFiles(Files):
        def reserve(self, path: str, nbytes: int) -> None:
            raise CheckpointFileError(28, "no space", path)

    with pytest.raises(CheckpointFileError, match="no space"):
        save(tmp_path / "c", torch.randn(1_000_000), files=FullFiles())
    assert os.listdir(tmp_path) == []


def test_a_tiny_filesystem_fills_and_the_old_checkpoint_stays(small_disk: Path) -> None:
    save(small_disk / "c", torch.ones(1_000_000))
    with pytest.raises(CheckpointFileError) as caught:
        save(small_disk / "c", torch.zeros(30_000_000))
    assert caught.value.errno == 28
    assert [name for name in os.listdir(small_disk) if name != "lost+found"] == ["c"]
    with Reader(small_disk / "c") as reader:
        assert load(reader).equal(torch.ones(1_000_000))


# --- sizes


def test_blocks_are_cut_where_spans_are_and_waste_little() -> None:
    for elements in (1, 1000, 262_144, 262_145, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 1, 1_000_003, 3_000_000_000):
        for itemsize in (1, 2, 4, 8):
            geometry = geometry_for(elements, itemsize, "none")
            assert geometry.block_bytes <= BLOCK_BYTES
            assert geometry.blocks * geometry.block_elements >= elements
            stored = geometry.blocks * geometry.slot_bytes + geometry.shards * geometry.index_bytes
            assert bool(geometry.shard_blocks) == (elements * itemsize > SINGLE_BYTES)
            if geometry.shard_blocks:
                assert geometry.block_elements % 1024 == 0
                assert stored <= elements * itemsize * 1.03 + 2 * geometry.slot_bytes


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    for tensors in ([torch.randn(1_000_000)], [torch.randn(3)] * 70):
        files = RecordingFiles()
        for _ in range(2):
            save(tmp_path / "c", *tensors, files=files)
        in_checkpoints = [path for unsynced in files.at_renames for path in unsynced if ".tierstore-" in path]
        assert len(files.at_renames) == 2
        assert in_checkpoints == []
        assert str(tmp_path) not in files.unsynced


def test_more_half_known_blocks_than_memory_is_granted_for_wait_in_a_file(tmp_path: Path) -> None:
    """The first half of each of 24 blocks, 48 MiB of them, then the second halves, backwards."""
    values = torch.arange(48 << 20, dtype=torch.int64).to(torch.uint8)
    half = BLOCK_BYTES // 2
    with Writer(tmp_path / "c", header={}) as writer:
        writer.add("params", 0, flat_entry(values))
        for start in range(0, len(values), BLOCK_BYTES):
            writer.write("params", 0, "exp_avg", start, values[start : start + half])
        assert f"{tmp_path}/" in Path("/proc/self/maps").read_text()  # where they wait
        for start in range(len(values) - half, 0, -BLOCK_BYTES):
            writer.write("params", 0, "exp_avg", start, values[start : start + half])
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        assert load(reader).equal(values)
