"""Checkpoints of several ranks: any parts of tensors are written, and any others are read from them, to the bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.commands import exit_status
from tierstore.checkpoint import Entry, Reader, Writer
from tierstore.checkpoint import parts as parts_module
from tierstore.checkpoint.entries import Whole
from tierstore.checkpoint.examine import shaped
from tierstore.checkpoint.parts import Part, Read, are_cells, boxes_of, gather, strides_in_order_of
from tierstore.checkpoint.wholes import folder_of
from tierstore.errors import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError
from tierstore.results import Results
from tierstore.sources import Source

Cuts = Sequence[Sequence[int]]
"""Where each dimension is cut: 0, ..., its size."""
Box = tuple[tuple[int, ...], tuple[int, ...]]


def cells(cuts: Cuts) -> Iterator[Box]:
    """The boxes of a grid."""
    for sides in itertools.product(*(list(itertools.pairwise(marks)) for marks in cuts)):
        yield tuple(begin for begin, _ in sides), tuple(end - begin for begin, end in sides)


def in_box(whole: Tensor, box: Box) -> Tensor:
    for dimension, (begin, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dimension, begin, size)
    return whole


def in_storage_order(values: Tensor, stride: Sequence[int]) -> Tensor:
    flat = torch.empty(values.numel(), dtype=values.dtype)
    flat.as_strided(values.shape, tuple(stride)).copy_(values)
    return flat


def stored_parts(whole: Tensor, stride: Sequence[int], cuts: Cuts) -> list[tuple[Part, Read]]:
    """The cells of a tensor in memory, each stored in the order of dimensions that `stride` tells."""
    found: list[tuple[Part, Read]] = []
    for offsets, shape in cells(cuts):
        own = strides_in_order_of(shape, stride)
        flat = in_storage_order(in_box(whole, (offsets, shape)), own)

        def read(start: int, into: Tensor, flat: Tensor = flat) -> None:
            assert start >= 0 and start + len(into) <= len(flat)
            into.copy_(flat[start : start + len(into)])

        found.append((Part(offsets, shape, own), read))
    return found


# -- geometry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "boxes", "covers"),
    [
        ((4, 3), [((0, 0), (4, 3))], True),
        ((4, 3), [((0, 0), (3, 3)), ((3, 0), (1, 3))], True),
        ((4, 3), [((0, 0), (3, 2)), ((3, 0), (1, 2)), ((0, 2), (3, 1)), ((3, 2), (1, 1))], True),
        ((4, 3), [((0, 0), (3, 3))], False),
        ((4, 3), [((0, 0), (3, 3)), ((2, 0), (2, 3))], False),
        ((4, 3), [((0, 0), (3, 3)), ((3, 0), (1, 3)), ((3, 0), (1, 3))], False),
        ((4, 3), [((0, 0), (3, 2)), ((3, 0), (1, 2)), ((0, 2), (3, 1))], False),
        ((), [((), ())], True),
        ((), [], False),
        ((0, 5), [((0, 0), (0, 5))], True),
    ],
)
def test_parts_cover_a_whole_if_they_are_the_cells_of_a_grid(shape: Any, boxes: Any, covers: bool) -> None:
    assert are_cells(shape, boxes) is covers


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of up to three dimensions, and dense strides in any order of them."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    return shape, strides_in_order_of(shape, order)


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Cuts:
    return [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]


@given(tensors(), st.data())
def test_any_run_of_a_tensor_is_cut_into_boxes_in_order(form: tuple[Any, Any], data: st.DataObject) -> None:
    shape, stride = form
    positions = torch.arange(int(np.prod(shape))).as_strided(shape, stride)
    start = data.draw(st.integers(0, positions.numel()))
    count = data.draw(st.integers(0, positions.numel() - start))
    found = [
        in_storage_order(in_box(positions, box), strides_in_order_of(box[1], stride))
        for box in boxes_of(shape, stride, start, count)
    ]
    assert torch.equal(torch.cat([*found, torch.arange(0)]), torch.arange(start, start + count))


@settings(deadline=None)
@given(tensors(), st.data(), st.sampled_from([8, 1 << 20]))
def test_any_part_is_gathered_from_any_parts_in_any_order(
    form: tuple[Any, Any], data: st.DataObject, window: int
) -> None:
    """However both are cut, and whatever order of dimensions each is stored in; also with a window of one element."""
    shape, stride = form
    whole = torch.arange(float(np.prod(shape)), dtype=torch.float64).reshape(shape)
    stored = stored_parts(whole, stride, data.draw(cuts_of(shape)))
    box = data.draw(st.sampled_from(list(cells(data.draw(cuts_of(shape))))))
    order = strides_in_order_of(box[1], data.draw(st.permutations(range(len(shape)))))
    wanted = in_storage_order(in_box(whole, box), order)
    start = data.draw(st.integers(0, len(wanted)))
    into = torch.full((data.draw(st.integers(0, len(wanted) - start)),), -1.0, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(parts_module, "WINDOW_BYTES", window)
        gather(Part(box[0], box[1], order), stored, start, into)
    assert torch.equal(into, wanted[start : start + len(into)])


def test_rows_are_read_straight_into_their_place_and_columns_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "WINDOW_BYTES", 4 * 600)
    whole = torch.arange(40_000.0).reshape(200, 200)
    largest = {"rows": 0, "columns": 0}
    for name, cuts in {"rows": [(0, 70, 200), (0, 200)], "columns": [(0, 200), (0, 70, 200)]}.items():
        into = torch.empty(40_000)
        counted = []

        def counting(read: Read, counted: list[tuple[int, bool]], into: Tensor) -> Read:
            def reading(start: int, values: Tensor) -> None:
                counted.append((len(values), values.untyped_storage().data_ptr() == into.untyped_storage().data_ptr()))
                read(start, values)

            return reading

        stored = [(part, counting(read, counted, into)) for part, read in stored_parts(whole, (200, 1), cuts)]
        gather(Part.all_of((200, 200), (200, 1)), stored, 0, into)
        assert torch.equal(into.view(200, 200), whole)
        largest[name] = max(count for count, is_straight in counted if not is_straight) if name == "columns" else 0
        assert all(is_straight for _, is_straight in counted) is (name == "rows")
        assert len(counted) == (2 if name == "rows" else len(counted))
    assert 300 < largest["columns"] <= 600


# -- the format ---------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {"w": (7, 999), "b": (5,), "one row": (1, 300), "none": (0, 4), "scalar": ()}
CUTS: dict[str, dict[str, Cuts]] = {
    "rows": {"w": [(0, 4, 7), (0, 999)], "b": [(0, 3, 5)], "one row": [(0, 1), (0, 300)]},
    "columns": {"w": [(0, 7), (0, 500, 999)], "b": [(0, 5)], "one row": [(0, 1), (0, 150, 300)]},
    "both": {"w": [(0, 4, 7), (0, 500, 999)], "b": [(0, 2, 3, 5)], "one row": [(0, 1), (0, 75, 150, 225, 300)]},
    "whole": {},
}


def tensor_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(SHAPES[name], generator=generator)


def save_parts(path: Path, cuts: dict[str, Cuts], *, ranks: int = 4) -> None:
    """Write all of SHAPES as that many ranks would; what a rank has nothing of it does not write."""
    with Writer(path, header={"lr": 0.5}) as room:
        folder = room.make_room(ranks)
        for rank in range(ranks):
            with Writer(f"{folder}/{folder_of(rank)}", header={}) as writer:
                for number, name in enumerate(SHAPES):
                    whole = tensor_of(name)
                    every = list(cells(cuts.get(name, [(0, size) for size in whole.shape])))
                    for offsets, shape in every[rank : rank + 1]:
                        of = None if shape == whole.shape else Whole(tuple(whole.shape), whole.stride(), offsets)
                        values = in_box(whole, (offsets, shape)).contiguous()
                        fields = {"exp_avg": torch.float32}
                        entry = Entry(name, shape, values.stride(), torch.float32, fields, 2.0, whole=of)
                        writer.add("params", number, entry)
                        writer.write("params", number, "exp_avg", 0, values.flatten())
                writer.keep({"rank": rank, "noise": torch.full((100,), float(rank))})
                writer.commit()
        room.commit()


@pytest.fixture(params=CUTS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_parts(tmp_path / "c", CUTS[request.param])
    return tmp_path / "c"


def test_parts_are_read_as_wholes(saved: Path) -> None:
    with Reader(saved) as reader:
        assert [entry.name for entry in reader.entries("params").values()] == list(SHAPES)
        assert reader.header == {"lr": 0.5}
        for number, name in enumerate(SHAPES):
            assert torch.equal(shaped(reader, "params", number, "exp_avg"), tensor_of(name))


def test_each_rank_gets_the_extra_that_it_kept_and_others_that_of_rank_0(saved: Path) -> None:
    with Reader(saved) as reader:
        assert [reader.extra(rank)["rank"] for rank in (0, 3, 4, 9)] == [0, 3, 0, 0]
        assert reader.extra(2)["noise"].eq(2.0).all()
        assert len(reader.entries("extra")) == 4


@pytest.mark.parametrize("wanted", CUTS)
def test_parts_are_read_from_other_parts(saved: Path, tmp_path: Path, wanted: str) -> None:
    with Reader(saved) as reader:
        source = Source(reader, Results(0, tmp_path))
        for number, name in enumerate(SHAPES):
            whole = tensor_of(name)
            for box in cells(CUTS[wanted].get(name, [(0, size) for size in whole.shape])):
                for order in (whole.stride(), tuple(reversed(range(len(box[1]))))):
                    own = strides_in_order_of(box[1], order)
                    into = torch.empty(in_box(whole, box).numel())
                    for start in range(0, len(into), 700):  # as chunks are cut
                        source.read("params", number, "exp_avg", Part(*box, own), start, into[start : start + 700])
                    assert torch.equal(into, in_storage_order(in_box(whole, box), own))


def test_zarr_opens_the_parts_and_what_they_say_puts_them_together(tmp_path: Path) -> None:
    save_parts(tmp_path / "c", CUTS["both"])
    group = zarr.open_group(tmp_path / "c", mode="r")
    assert group.attrs["ranks"] == 4
    whole = np.full(SHAPES["w"], np.nan, np.float32)
    for rank in range(4):
        part: Any = group[f"ranks/{rank:06d}/params/000000"]
        begin, shape = part.attrs["whole"]["offsets"], part.attrs["shape"]
        whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))] = part["exp_avg"][:].reshape(shape)
    assert np.array_equal(whole, tensor_of("w").numpy())


def test_commands_take_checkpoints_of_ranks(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parts(tmp_path / "other", CUTS["rows"], ranks=2)
    for command in (("verify", saved), ("inspect", saved), ("convert", saved, tmp_path / "t.pt")):
        assert exit_status("checkpoint", *command) == 0
    assert exit_status("checkpoint", "convert", "--nd", saved, tmp_path / "nd") == 0
    capsys.readouterr()
    assert exit_status("checkpoint", "diff", saved, tmp_path / "other") == 0
    assert capsys.readouterr().out == "no difference\n"
    states = torch.load(tmp_path / "t.pt")["optimizer"]["state"]
    for number, name in enumerate(SHAPES):
        assert torch.equal(states[number]["exp_avg"], tensor_of(name))
        nd: Any = zarr.open_group(tmp_path / "nd", mode="r")[f"params/{number:06d}/exp_avg"]
        assert np.array_equal(nd[...], tensor_of(name).numpy())


def test_verify_reads_what_every_rank_has_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_parts(tmp_path / "c", CUTS["both"])
    for file in ("ranks/000002/params/000000/exp_avg/c.0", "ranks/000003/extra/000000/values/c.0"):
        content = bytearray((tmp_path / "c" / file).read_bytes())
        content[50] ^= 1
        (tmp_path / "c" / file).write_bytes(content)
    document = tmp_path / "c/ranks/000001/params/000000/zarr.json"
    document.write_text(document.read_text().replace("2.0", "4.0"))
    assert exit_status("checkpoint", "verify", tmp_path / "c") == 1
    told = capsys.readouterr().out
    for words in ("000002/params/000000/exp_avg/c.0", "000003/extra/000000/values/c.0", "000001/params/000000/zarr"):
        assert words in told


# -- what is refused ----------------------------------------------------------------------------------------------


def edit(path: Path, rank: int, *keys: str, value: object) -> None:
    """Change what a rank's folder says of its part of `w`."""
    file = path / folder_of(rank) / "zarr.json"
    document = json.loads(file.read_text())
    target = document["consolidated_metadata"]["metadata"]["params/000000"]["attributes"]
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    file.write_text(json.dumps(document))


HUGE = 1 << 60
CHANGES: dict[str, tuple[tuple[str, ...], object]] = {
    "overlapping": (("whole", "offsets"), [3, 0]),
    "outside": (("whole", "offsets"), [5, 0]),
    "before": (("whole", "offsets"), [-1, 0]),
    "of fewer dimensions": (("whole", "offsets"), [4]),
    "of another shape": (("whole", "shape"), [8, 999]),
    "of an absurd shape": (("whole", "shape"), [HUGE, HUGE]),
    "of strides with gaps": (("whole", "strides"), [1000, 1]),
    "of another order": (("whole", "strides"), [1, 7]),
    "of another name": (("name",), "v"),
    "of another step": (("step",), 3.0),
    "of another group": (("attributes",), {"group": 1}),
    "of no whole": (("whole",), None),
    "of a list": (("whole",), [1, 2]),
    "of no offsets": (("whole",), {"shape": [7, 999], "strides": [999, 1]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_contradict_each_other_are_refused(tmp_path: Path, change: str) -> None:
    save_parts(tmp_path / "c", CUTS["rows"], ranks=2)
    keys, value = CHANGES[change]
    edit(tmp_path / "c", 1, *keys, value=value)
    with pytest.raises(DamagedCheckpointError):
        Reader(tmp_path / "c")


@pytest.mark.parametrize("ranks", [-1, True, "2", 1 << 40, 3, 1])
def test_another_number_of_ranks_is_refused(tmp_path: Path, ranks: object) -> None:
    save_parts(tmp_path / "c", CUTS["rows"], ranks=2)
    document = json.loads((tmp_path / "c/zarr.json").read_text())
    document["attributes"]["ranks"] = ranks
    (tmp_path / "c/zarr.json").write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpointError):
        Reader(tmp_path / "c")


def test_a_folder_of_ranks_within_ranks_is_refused(tmp_path: Path) -> None:
    save_parts(tmp_path / "c", CUTS["whole"], ranks=1)
    inner = tmp_path / "c" / folder_of(0)
    document = json.loads((inner / "zarr.json").read_text())
    document["attributes"]["ranks"] = 1
    (inner / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(DamagedCheckpointError, match="of ranks itself"):
        Reader(tmp_path / "c")


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_not_complete_is_not_committed(tmp_path: Path, ranks: int) -> None:
    """A part that is missing, because its rank has not written it, and a rank's folder that is not there."""
    save_parts(tmp_path / "c", CUTS["whole"], ranks=1)
    with Writer(tmp_path / "c", header={}) as room:
        folder = room.make_room(ranks)
        with Writer(f"{folder}/{folder_of(0)}", header={}) as writer:
            whole = Whole((4, 2), (2, 1), (0, 0))
            entry = Entry("w", (2, 2), (2, 1), torch.float32, {"exp_avg": torch.float32}, whole=whole)
            writer.add("params", 0, entry)
            writer.write("params", 0, "exp_avg", 0, torch.zeros(4))
            writer.commit()
        with pytest.raises(CheckpointError):
            room.commit()
    with Reader(tmp_path / "c") as reader:
        assert torch.equal(shaped(reader, "params", 0, "exp_avg"), tensor_of("w"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_of_a_rank_shows_its_parts_alone(tmp_path: Path) -> None:
    save_parts(tmp_path / "c", CUTS["rows"], ranks=2)
    with Reader(tmp_path / "c" / folder_of(1)) as reader:
        assert torch.equal(shaped(reader, "params", 0, "exp_avg"), tensor_of("w")[4:])
    (tmp_path / "c/zarr.json").unlink()
    with pytest.raises(IncompleteCheckpointError, match="never finished"):
        Reader(tmp_path / "c")
