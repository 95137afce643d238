"""A checkpoint that somebody made to do harm, or that a disk spoiled, is refused with a typed error, or does none."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from numcodecs import zstd

from tests import fuzzing
from tests.unit.test_checkpoint import load, random_bits, save
from tests.unit.test_checkpoint_extra import trained
from tierstore.checkpoint import Entry, Reader, TorchFile, Writer
from tierstore.checkpoint.blocks import checksum
from tierstore.checkpoint.examine import parts, total_bytes
from tierstore.checkpoint.torchfile import first_damaged
from tierstore.errors import CheckpointError, CheckpointValueError, DamagedCheckpointError, IncompleteCheckpointError

ARRAY = "params/000000/exp_avg"
GROUP = "params/000000"
MIB = 1 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint, to be copied."""
    path = tmp_path_factory.mktemp("sound") / "c"
    save(path, torch.arange(1_200_000.0), torch.arange(10.0))
    return path


@pytest.fixture
def victim(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound one, to be spoiled."""
    return Path(shutil.copytree(sound, tmp_path / "c"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the documents of a checkpoint, where readers find them."""
    document = json.loads((path / "zarr.json").read_text())
    change(document)
    (path / "zarr.json").write_text(json.dumps(document))


def nodes(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["consolidated_metadata"]["metadata"]
    return found


def setting(node: str, *keys: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    """A change: one value of one document."""

    def change(document: dict[str, Any]) -> None:
        target: Any = nodes(document)[node] if node else document
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


def both(*changes: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for one in changes:
            one(document)

    return change


HUGE = 1 << 62
SHARDING = ("codecs", 0, "configuration")
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "traversal": lambda d: nodes(d).update({"params/../../../etc": nodes(d)[GROUP]}),
    "absolute": lambda d: nodes(d).update({"/etc/passwd": nodes(d)[GROUP]}),
    "other section": lambda d: nodes(d).update({"secrets": nodes(d)["params"]}),
    "extra array": lambda d: nodes(d).update({GROUP + "/more": nodes(d)[ARRAY]}),
    "missing array": lambda d: nodes(d).pop(ARRAY),
    "missing entry": lambda d: [nodes(d).pop(ARRAY), nodes(d).pop(GROUP)],
    "written otherwise": lambda d: nodes(d).update({"params/0000000": nodes(d)[GROUP]}),
    "field with a path": setting(GROUP, "attributes", "fields", value={"../exp_avg": "float32"}),
    "field that is a dot": setting(GROUP, "attributes", "fields", value={"..": "float32"}),
    "negative shape": setting(GROUP, "attributes", "shape", value=[-1_200_000]),
    "product overflows": setting(GROUP, "attributes", "shape", value=[1 << 40, 1 << 40]),
    "many dimensions": both(
        setting(GROUP, "attributes", "shape", value=[1] * 100_000),
        setting(GROUP, "attributes", "strides", value=[1] * 100_000),
    ),
    "huge": both(setting(GROUP, "attributes", "shape", value=[1 << 47]), setting(ARRAY, "shape", value=[1 << 47])),
    "shape of floats": setting(GROUP, "attributes", "shape", value=[1_200_000.0]),
    "shape of booleans": setting(GROUP, "attributes", "shape", value=[True]),
    "overlapping": setting(GROUP, "attributes", "strides", value=[0]),
    "gaps": setting(GROUP, "attributes", "strides", value=[HUGE]),
    "other dtype": setting(GROUP, "attributes", "fields", value={"exp_avg": "float64"}),
    "unknown dtype": setting(GROUP, "attributes", "dtype", value="__class__"),
    "quantized": setting(GROUP, "attributes", "dtype", value="quint8"),
    "object dtype": setting(ARRAY, "data_type", value="O"),
    "step NaN": setting(GROUP, "attributes", "step", value=float("nan")),
    "step infinite": setting(GROUP, "attributes", "step", value=float("inf")),
    "step of 1e300": setting(GROUP, "attributes", "step", value=1e300),
    "step without end": setting(GROUP, "attributes", "step", value=10**400),
    "step negative": setting(GROUP, "attributes", "step", value=-1),
    "step of words": setting(GROUP, "attributes", "step", value="many"),
    "name of numbers": setting(GROUP, "attributes", "name", value=7),
    "array of other length": setting(ARRAY, "shape", value=[1_200_001]),
    "chunks of nothing": setting(ARRAY, *SHARDING, "chunk_shape", value=[0]),
    "negative chunks": setting(ARRAY, *SHARDING, "chunk_shape", value=[-1]),
    "gigantic chunk": both(
        setting(ARRAY, *SHARDING, "chunk_shape", value=[HUGE]),
        setting(ARRAY, "chunk_grid", "configuration", "chunk_shape", value=[HUGE]),
    ),
    "gigantic chunk count": setting(ARRAY, "chunk_grid", "configuration", "chunk_shape", value=[400_384 << 24]),
    "one element a chunk": both(
        setting(ARRAY, *SHARDING, "chunk_shape", value=[1]),
        setting(ARRAY, "chunk_grid", "configuration", "chunk_shape", value=[1 << 40]),
    ),
    "uneven chunks": setting(ARRAY, *SHARDING, "chunk_shape", value=[1023]),
    "big-endian": setting(ARRAY, *SHARDING, "codecs", 0, "configuration", "endian", value="big"),
    "codec of another kind": setting(ARRAY, *SHARDING, "codecs", 1, "name", value="numcodecs.pickle"),
    "shards in shards": setting(ARRAY, *SHARDING, "codecs", value=[{"name": "sharding_indexed", "configuration": {}}]),
    "keys of another kind": setting(ARRAY, "chunk_key_encoding", value={"name": "../x"}),
    "separator with a path": setting(ARRAY, "chunk_key_encoding", "configuration", "separator", value="/../"),
    "codecs that are none": setting(ARRAY, "codecs", value=7),
    "node that is none": lambda d: nodes(d).update({GROUP: 7}),
    "metadata that is none": lambda d: d.update(consolidated_metadata=[1]),
    "other format": setting("", "attributes", "format", value="other"),
    "later version": setting("", "attributes", "version", value=2),
    "count of words": setting("", "attributes", "complete", value={"params": "two"}),
    "more expected": setting("", "attributes", "complete", value={"params": 3}),
    "header that is none": setting("", "attributes", "header", value=[]),
    "saved at no time": setting("", "attributes", "saved_at", value=float("nan")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_metadata_is_refused_before_anything_is_allocated(victim: Path, name: str) -> None:
    edit(victim, CHANGES[name])
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match=str(victim)):
            Reader(victim)
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()


def deep(path: Path) -> None:
    (path / "zarr.json").write_text("[" * 100_000 + "]" * 100_000)


def deep_header(path: Path) -> None:
    text = json.dumps(json.loads((path / "zarr.json").read_text()))
    (path / "zarr.json").write_text(text.replace('"lr": 0.001', '"lr": ' + '{"a":' * 50_000 + "1" + "}" * 50_000))


def long_number(path: Path) -> None:
    text = (path / "zarr.json").read_text()
    (path / "zarr.json").write_text(text.replace("1200000", "6" * 10_000, 1))


def huge_document(path: Path) -> None:
    os.truncate(path / "zarr.json", 1 << 40)


def linked_file(path: Path) -> None:
    (path / ARRAY / "c.0").rename(path.parent / "elsewhere")
    (path / ARRAY / "c.0").symlink_to(path.parent / "elsewhere")


def linked_folder(path: Path) -> None:
    (path / GROUP).rename(path.parent / "elsewhere")
    (path / GROUP).symlink_to(path.parent / "elsewhere")


def linked_document(path: Path) -> None:
    (path / "zarr.json").rename(path.parent / "elsewhere")
    (path / "zarr.json").symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / ARRAY / "c.0").unlink()
    os.mkfifo(path / ARRAY / "c.0")


def folder_for_file(path: Path) -> None:
    (path / ARRAY / "c.0").unlink()
    (path / ARRAY / "c.0").mkdir()


def missing_file(path: Path) -> None:
    (path / ARRAY / "c.0").unlink()


def short_file(path: Path) -> None:
    os.truncate(path / ARRAY / "c.0", 4_000_000)


def empty_document(path: Path) -> None:
    (path / "zarr.json").write_bytes(b"")


@pytest.mark.parametrize(
    "spoil",
    [
        *(deep, deep_header, long_number, huge_document, linked_file, linked_folder, linked_document),
        *(pipe, folder_for_file, missing_file, short_file, empty_document),
    ],
)
def test_hostile_files_are_refused(victim: Path, spoil: Callable[[Path], None]) -> None:
    spoil(victim)
    with pytest.raises(DamagedCheckpointError, match=str(victim)):
        Reader(victim)


def with_index(path: Path, place: int, offset: int, nbytes: int) -> None:
    """Give a block of the first array another place, with a checksum of the index that is right."""
    file = path / ARRAY / "c.0"
    content = bytearray(file.read_bytes())
    begin = len(content) - 3 * 16 - 4
    content[begin + 16 * place : begin + 16 * place + 16] = offset.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    content[-4:] = checksum(bytes(content[begin:-4]))
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        *((2**64 - 1, 2**64 - 1), (2**64 - 1, 1), (0, 2**64 - 1), (2**63, 2**63), (0, 0), (0, 3)),
        *((10**6, 2**31), (4_800_000, 1_601_540), (4096, 1_601_540)),
    ],
)
def test_blocks_at_wrong_places_are_refused(victim: Path, offset: int, nbytes: int) -> None:
    with_index(victim, 1, offset, nbytes)
    with Reader(victim) as reader, pytest.raises(DamagedCheckpointError, match=r"params/000000/exp_avg") as caught:
        load(reader)
    assert "index" not in str(caught.value)  # that one is right


@pytest.mark.parametrize("kind", ["bomb", "unknown size", "no frame", "truncated frame", "two frames"])
def test_a_decompression_bomb_is_refused_before_it_is_decompressed(tmp_path: Path, kind: str) -> None:
    """A chunk of 400 bytes whose frame would become 64 MiB, does not say what it becomes, or is cut, is refused."""
    save(tmp_path / "c", torch.zeros(100), compression="zstd")
    good = zstd.compress(bytes(400), 1)
    frames = {
        "bomb": lambda: zstd.compress(bytes(64 * MIB), 1),
        "unknown size": lambda: good[:4] + b"\x00\x58" + good[6:],
        "no frame": lambda: b"\x50\x2a\x4d\x18" + bytes(40),
        "truncated frame": lambda: good[:-3],
        "two frames": lambda: good + zstd.compress(bytes(MIB), 1),
    }
    frame = frames[kind]()
    (tmp_path / "c" / ARRAY / "c.0").write_bytes(frame + checksum(frame))
    with Reader(tmp_path / "c") as reader:
        tracemalloc.start()
        try:
            words = "cannot be decompressed" if kind in ("truncated frame", "two frames") else "is a zstd frame of"
            with pytest.raises(DamagedCheckpointError, match=rf"c\.0.* {words}"):
                load(reader)
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
        finally:
            tracemalloc.stop()


def test_names_may_occur_twice_and_be_anything(tmp_path: Path) -> None:
    with Writer(tmp_path / "c", header={}) as writer:
        for number in range(2):
            writer.add("params", number, Entry("../../x\0", (), (), torch.float32, {}))
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        assert [entry.name for entry in reader.entries("params").values()] == ["../../x\0"] * 2


# --- fuzzing


def mutate(chance: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat or replace some bytes; words of JSON are replaced by other words."""
    kind = chance.randrange(6)
    place = chance.randrange(len(content) + 1)
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + chance.randbytes(chance.randrange(1, 9)) + content[place:]
    if kind == 2:
        return content[:place] + content[place + chance.randrange(1, 33) :]
    if kind == 3 and b'"' in content:
        words = [b"null", b"-1", b"0", b"1e309", b"[]", b"{}", b'"x"', b"9" * chance.choice([1, 19, 40]), b"true"]
        marks = [at for at in range(len(content)) if content[at : at + 2] == b": "]
        at = chance.choice(marks) + 2 if marks else 0
        end = min((found for found in (content.find(mark, at) for mark in b",}]") if found > at), default=at + 1)
        return content[:at] + chance.choice(words) + content[end:]
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice([1, 1, 4])):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def fuzz(tmp_path: Path, seed: int, tries: Iterable[int]) -> dict[str, int]:
    """Spoil small checkpoints, one after the other; every outcome is a typed error or the very same data."""
    chance = random.Random(seed)
    outcomes = {"refused": 0, "unharmed": 0}
    tensors = [random_bits(300, torch.float32), random_bits(40, torch.bfloat16), random_bits(70_000, torch.float64)]
    extra = {"rng": torch.arange(100.0), "epoch": 3, "t": (1, 2.5)}
    whole = {}
    for compression in ("none", "zstd"):
        path = tmp_path / compression
        with Writer(path, header={"lr": 1e-3}, compression=compression) as writer:  # type: ignore[arg-type]
            for number, values in enumerate(tensors):
                entry = Entry(f"p{number}", (len(values),), (1,), values.dtype, {"exp_avg": values.dtype}, 2.0)
                writer.add("params", number, entry)
                writer.write("params", number, "exp_avg", 0, values)
            writer.keep(extra)
            writer.commit()
        whole[path] = [file for file in sorted(path.rglob("*")) if file.is_file() and file.parent.name != "params"]
    for _ in tries:
        path = chance.choice(list(whole))
        file = path / "zarr.json" if chance.random() < 0.5 else chance.choice(whole[path])
        before = file.read_bytes()
        file.write_bytes(mutate(chance, before))
        outcomes[outcome(path, tensors, extra)] += 1
        file.write_bytes(before)
    return outcomes


def outcome(path: Path, tensors: list[torch.Tensor], extra: dict[str, Any]) -> str:
    """Read all of it as a careful caller does: shapes, dtypes and fields compared before anything is allocated."""
    try:
        with Reader(path) as reader:
            entries = reader.entries("params")
            for number, values in enumerate(tensors):
                entry = entries.get(number)
                if entry is None or entry.shape != values.shape or dict(entry.fields) != {"exp_avg": values.dtype}:
                    return "refused"
                assert load(reader, number).view(torch.uint8).equal(values.view(torch.uint8))
            found = reader.extra()
    except CheckpointError:
        return "refused"
    if isinstance(found, dict) and isinstance(found.get("rng"), torch.Tensor):
        rng = copy.copy(found["rng"])
        assert rng.shape != (100,) or rng.dtype != torch.float32 or rng.equal(extra["rng"])
    return "unharmed"


def fuzz_torch_file(path: Path, seed: int, tries: Iterable[int]) -> dict[str, int]:
    """Spoil a file of torch's: what comes is a typed error, or tensors of no more bytes than are stored."""
    chance = random.Random(seed)
    outcomes = {"refused": 0, "read": 0}
    trained(path, lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3})
    before = path.read_bytes()
    for _ in tries:
        path.write_bytes(mutate(chance, before))
        try:
            with TorchFile(path) as source:
                assert total_bytes(source) < 2 * len(before)
                for section in ("params", "model"):
                    for number, entry in source.entries(section).items():
                        for field in entry.fields:
                            sum(len(part) for _, part in parts(source, section, number, field))
                source.extra()
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    return outcomes


def test_random_damage_to_a_file_of_torchs_is_a_typed_error_or_is_read(tmp_path: Path) -> None:
    outcomes = fuzz_torch_file(tmp_path / "t.pt", seed=5, tries=range(60))
    assert outcomes["refused"] > 30 and outcomes["read"] > 5


ARCHIVE_DAMAGE = {
    "of two disks": (b"PK\x06\x07", 16, b"\x02"),
    "of no disk": (b"PK\x06\x07", 4, b"\xff"),
    "of a later version": (b"PK\x01\x02", 6, b"\xff"),
    "encrypted": (b"PK\x01\x02", 8, b"\x01"),
    "compressed in a way there is not": (b"PK\x01\x02", 10, b"\x63"),
    "with a name that is no text": (b"PK\x01\x02", 46, b"\xff\xff"),
}


@pytest.mark.parametrize("damage", ARCHIVE_DAMAGE)
def test_an_archive_that_says_what_cannot_be_is_a_typed_error_or_is_read(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.pt"
    trained(path, lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3})
    assert first_damaged(os.fspath(path)) is None
    mark, offset, value = ARCHIVE_DAMAGE[damage]
    content = bytearray(path.read_bytes())
    at = content.index(mark) + offset
    content[at : at + len(value)] = value
    path.write_bytes(content)
    assert isinstance(first_damaged(os.fspath(path)), str)
    with contextlib.suppress(DamagedCheckpointError), TorchFile(path) as source:
        source.extra()


@pytest.mark.parametrize(
    "content",
    [
        {"w": torch.zeros(1).expand(1 << 40)},
        {"w": torch.zeros(8).as_strided((1 << 20, 8), (0, 1))},
        {"state": {0: {"step": torch.zeros(2), "m": torch.zeros(1)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"step": float("nan"), "m": torch.zeros(1)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"step": 1e300, "m": torch.zeros(1)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"step": 10**400, "m": torch.zeros(1)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"m": torch.zeros(1), "v": torch.zeros(2)}}, "param_groups": [{"params": [0]}]},
        {"state": {0: {"m": torch.zeros(1)}}, "param_groups": [{"params": ["0"]}]},
        {"w": torch.zeros(3).to_sparse()},
    ],
)
def test_hostile_state_in_a_file_of_torchs_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "t.pt")
    with pytest.raises(DamagedCheckpointError, match=r"t\.pt"):
        TorchFile(tmp_path / "t.pt")


def test_random_damage_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, seed=5, tries=range(150))
    assert outcomes["refused"] > 40 and outcomes["unharmed"] > 10


@pytest.mark.fuzz
def test_random_damage_is_refused_or_does_no_harm_for_a_fixed_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = fuzz(tmp_path, fuzzing.SEED, fuzzing.timed())
    fuzzing.tell(capsys, "checkpoints", outcomes)
    assert outcomes["refused"] > 100 and outcomes["unharmed"] > 20


@pytest.mark.fuzz
def test_random_damage_to_a_file_of_torchs_is_found_or_read_for_a_fixed_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = fuzz_torch_file(tmp_path / "t.pt", fuzzing.SEED, fuzzing.timed())
    fuzzing.tell(capsys, "files of torch's", outcomes)
    assert outcomes["refused"] > 100 and outcomes["read"] > 20


def test_the_errors_are_of_one_family() -> None:
    for kind in (DamagedCheckpointError, IncompleteCheckpointError, CheckpointValueError):
        assert issubclass(kind, CheckpointError)
