"""What the command line says of checkpoints, and with which exit status; conversions there and back."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests.commands import exit_status
from tests.unit.test_checkpoint import save
from tests.unit.test_checkpoint_extra import same, trained
from tierstore import TieredAdamW
from tierstore.checkpoint import VALUES, Entry, Reader, Writer


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command; return its exit status, what it printed, and what it told as an error."""
    status = exit_status("checkpoint", *arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_inspect_shows_the_tree_with_shapes_steps_and_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Writer(tmp_path / "c", header={"lr": 0.25}) as writer:
        writer.add("params", 0, Entry("lay.w", (2, 2), (2, 1), torch.float32, {"exp_avg": torch.bfloat16}, 7.0))
        writer.write("params", 0, "exp_avg", 0, torch.tensor([3.0, 4.0, 0.0, float("nan")], dtype=torch.bfloat16))
        writer.commit()
    status, out, _ = run(capsys, "inspect", tmp_path / "c")
    assert status == 0
    for words in ("000000 lay.w  [2, 2] float32  step 7", "exp_avg  bfloat16", "norm 5  1 not finite", '{"lr": 0.25}'):
        assert words in out
    status, out, _ = run(capsys, "inspect", tmp_path / "c", "--json")
    found = json.loads(out)
    assert found["params"][0]["fields"]["exp_avg"] == {"dtype": "bfloat16", "nbytes": 8, "norm": 5.0, "not_finite": 1}
    assert found["header"] == {"lr": 0.25} and found["bytes"] == 8


def test_sizes_have_a_unit_however_crooked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "c", torch.randn(6_000_000), torch.randn(10), torch.randn(10))
    assert "22.9 MiB of values" in run(capsys, "verify", tmp_path / "c")[1]
    tree = run(capsys, "inspect", tmp_path / "c")[1]
    assert "3 of 22.9 MiB" in tree and "exp_avg  float32  40 B" in tree


def test_verify_names_all_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "c", torch.randn(6_000_000), torch.randn(10), torch.randn(10))
    assert run(capsys, "verify", tmp_path / "c")[0] == 0
    for file, place in (("000000/exp_avg/c.0", 100), ("000002/exp_avg/c.0", 7)):
        content = bytearray((tmp_path / "c/params" / file).read_bytes())
        content[place] ^= 1
        (tmp_path / "c/params" / file).write_bytes(content)
    document = tmp_path / "c/params/000001/zarr.json"
    document.write_text(document.read_text().replace("3.0", "4.0"))
    status, out, _ = run(capsys, "verify", tmp_path / "c")
    assert status == 1
    assert [line for line in out.splitlines() if "checksum" in line and "params/000000" in line]
    assert [line for line in out.splitlines() if "checksum" in line and "params/000002" in line]
    assert [line for line in out.splitlines() if "params/000001/zarr.json" in line]
    status, out, _ = run(capsys, "verify", tmp_path / "c", "--json")
    assert status == 1 and len(json.loads(out)["problems"]) == 3
    (tmp_path / "c/params/000001/exp_avg/c.0").unlink()
    assert run(capsys, "verify", tmp_path / "c")[0] == 1
    status, _, error = run(capsys, "verify", tmp_path / "nothing")
    assert status == 2 and error.startswith("error: ") and len(error.splitlines()) == 1


def test_verify_finds_what_torch_does_not_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.full((1000,), 7.0)}, tmp_path / "t.pt")
    assert run(capsys, "verify", tmp_path / "t.pt")[0] == 0
    content = (tmp_path / "t.pt").read_bytes()
    (tmp_path / "t.pt").write_bytes(content.replace(torch.full((1000,), 7.0).numpy().tobytes(), bytes(4000)))
    status, out, _ = run(capsys, "verify", tmp_path / "t.pt")
    assert status == 1 and "damaged" in out


def test_diff_tells_hyper_parameters_shapes_steps_and_values_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def saved(name: str, lr: float, change: float, step: float, order: list[str]) -> Path:
        with Writer(tmp_path / name, header={"lr": lr, "betas": [0.9, 0.99]}) as writer:
            for number, key in enumerate(order):
                stride = (3, 1) if name == "a" else (1, 2)
                writer.add("params", number, Entry(key, (2, 3), stride, torch.float32, {"m": torch.float32}, step))
                values = torch.arange(6.0).reshape(2, 3).clone()
                values[1, 2] += change if key == "w" else 0.0
                ordered = values if name == "a" else values.t()
                writer.write("params", number, "m", 0, ordered.flatten())
            writer.keep({"rng": torch.arange(100) + int(change), "epoch": step})
            writer.commit()
        return tmp_path / name

    one = saved("a", 0.1, 0.0, 3.0, ["w", "v"])
    assert run(capsys, "diff", one, saved("b", 0.1, 0.0, 3.0, ["v", "w"]))[:2] == (0, "no difference\n")
    status, out, _ = run(capsys, "diff", one, saved("b", 0.2, 1.5, 4.0, ["v", "w", "x"]))
    assert status == 1
    for words in (
        "header.lr: 0.1 and 0.2",
        "params/w: step 3.0 and 4.0",
        "extra.epoch: 3.0 and 4.0",
        f"params/x: only in {tmp_path}/b",
    ):
        assert words in out
    assert "extra.rng: a tensor and another" in out
    assert "params/w/m: 1 of 6 elements differ, by at most 1.5" in out and "params/v/m" not in out
    found = json.loads(run(capsys, "diff", one, tmp_path / "b", "--json")[1])
    assert {"place": "params/w/m", "max_abs": 1.5, "elements": 1} in [
        {key: value for key, value in difference.items() if key != "text"} for difference in found["differences"]
    ]
    assert run(capsys, "diff", one, tmp_path / "none")[0] == 2


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_torchs_file_becomes_a_checkpoint_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compression: str
) -> None:
    def wrap(model: Any, optimizer: Any) -> Any:
        return {"model": model, "optimizer": optimizer, "epoch": 3, "rng": torch.get_rng_state()}

    trained(tmp_path / "t.pt", wrap)
    assert run(capsys, "convert", tmp_path / "t.pt", tmp_path / "c", "--compression", compression)[0] == 0
    assert run(capsys, "verify", tmp_path / "c")[0] == 0
    assert run(capsys, "diff", tmp_path / "t.pt", tmp_path / "c")[:2] == (0, "no difference\n")
    assert run(capsys, "convert", tmp_path / "c", tmp_path / "back.pt")[0] == 0
    before, after = (torch.load(tmp_path / name, weights_only=True) for name in ("t.pt", "back.pt"))
    assert same(dict(after["model"]), dict(before["model"]))
    assert same(after["optimizer"], before["optimizer"])
    assert same(after["extra"], {"epoch": before["epoch"], "rng": before["rng"]})
    assert run(capsys, "diff", tmp_path / "c", tmp_path / "back.pt")[:2] == (0, "no difference\n")
    assert sorted(os.listdir(tmp_path)) == ["back.pt", "c", "t.pt"]


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "a tuple": ((1, 2), (1, 3), "extra[1]: 2 and 3"),
    "a tuple and a list": ((1, 2), [1, 2], "extra: (1, 2) and [1, 2]"),
    "keys that are no text": ({5: "x"}, {5: "y"}, "extra.5: x and y"),
    "a key more": ({5: "x"}, {5: "x", 6: "z"}, "extra.6: only in the second"),
    "no number": (math.nan, 1.0, "extra: nan and 1.0"),
    "a large number": (2**70, 2**70 + 1, f"extra: {2**70} and {2**70 + 1}"),
    "bytes": (b"ab", b"ac", "extra: b'ab' and b'ac'"),
    "long bytes": (bytes(300), bytes(301), "extra: bytes and another"),
    "a small tensor": (torch.zeros(2), torch.ones(2), "extra: tensor([0., 0.]) and tensor([1., 1.])"),
    "a large tensor": (torch.zeros(2000), torch.ones(2000), "extra: a tensor and another"),
    "a tensor and none": (torch.zeros(2000), None, "extra: a tensor and None"),
    "an array": (np.zeros(500), np.ones(500), "extra: an array and another"),
    "a numpy number": (np.float32(1.5), np.float32(2.5), "extra: 1.5 and 2.5"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_diff_shows_values_and_not_how_they_are_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    *values, wanted = OTHERS[name]
    for number, value in enumerate(values):
        with Writer(tmp_path / str(number), header={}) as writer:
            writer.keep(value)
            writer.commit()
    assert run(capsys, "diff", tmp_path / "0", tmp_path / "1")[:2] == (1, f"{wanted}\n")
    assert run(capsys, "diff", tmp_path / "0", tmp_path / "0")[:2] == (0, "no difference\n")


@pytest.mark.parametrize("extra", [None, {}, {"epoch": 3, "betas": (0.9, 0.99)}], ids=["none", "empty", "some"])
def test_an_optimizers_checkpoint_is_the_same_after_a_way_through_a_file_of_torchs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: Any
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    with TieredAdamW(model.named_parameters(), policy={"tiers": {"cpu": {}}}) as optimizer:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "c", model, extra)
    for source, target in (("c", "t.pt"), ("t.pt", "back")):
        assert run(capsys, "convert", tmp_path / source, tmp_path / target)[0] == 0
    for other in ("t.pt", "back"):
        assert run(capsys, "diff", tmp_path / "c", tmp_path / other)[:2] == (0, "no difference\n")


def test_an_optimizers_own_state_dict_comes_back_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer = trained(tmp_path / "t.pt", lambda model, optimizer: optimizer)
    run(capsys, "convert", tmp_path / "t.pt", tmp_path / "c")
    run(capsys, "convert", tmp_path / "c", tmp_path / "back.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    assert same(torch.load(tmp_path / "back.pt"), torch.load(tmp_path / "t.pt"))


def test_nd_arrays_have_the_tensors_shapes_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [torch.randn(50, 30, 2), torch.randn(40, 30).to(torch.bfloat16).t(), torch.tensor(3.0), torch.empty(0, 2)]
    with Writer(tmp_path / "c", header={}) as writer:
        for number, tensor in enumerate(tensors):
            writer.add(
                "model",
                number,
                Entry(f"t{number}", tuple(tensor.shape), tensor.stride(), tensor.dtype, {VALUES: tensor.dtype}),
            )
            writer.write("model", number, VALUES, 0, tensor.as_strided((tensor.numel(),), (1,)))
        writer.commit()
    assert run(capsys, "convert", "--nd", tmp_path / "c", tmp_path / "nd")[0] == 0
    group = zarr.open_group(tmp_path / "nd", mode="r")
    for number, tensor in enumerate(tensors):
        array = group[f"model/{number:06d}/{VALUES}"]
        assert isinstance(array, zarr.Array)
        assert torch.as_tensor(array[...]).equal(tensor.float())
        assert group[f"model/{number:06d}"].attrs["name"] == f"t{number}"
        named = array.metadata.dimension_names or ()  # xarray asks for them
        assert named == tuple(f"dim_{axis}" for axis in range(tensor.dim()))
    status, _, error = run(capsys, "convert", "--nd", tmp_path / "c", tmp_path / "nd")
    assert status == 2 and "exists" in error


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.pt").write_text("not torch's")
    (tmp_path / "folder").mkdir()
    save(tmp_path / "c", torch.zeros(3))
    assert run(capsys, "convert", tmp_path / "t.pt", tmp_path / "new")[0] == 2
    assert run(capsys, "convert", tmp_path / "c", tmp_path / "folder")[0] == 2
    (tmp_path / "mine").write_text("precious")
    status, _, error = run(capsys, "convert", tmp_path / "c", tmp_path / "mine")
    assert status == 2 and "exists: name a new file" in error and (tmp_path / "mine").read_text() == "precious"
    assert run(capsys, "convert", tmp_path / "c", tmp_path / "no/such/folder.pt")[0] == 2
    assert sorted(os.listdir(tmp_path)) == ["c", "folder", "mine", "t.pt"]
    with Reader(tmp_path / "c") as reader:
        assert len(reader.entries("params")) == 1


FULL_DISK = {  # what is told: what cannot be done, and why
    "a mapped copy": ([], 30_000_000, "no room for a mapped copy"),
    "arrays": (["--nd"], 30_000_000, "the arrays cannot be written: No space left on device"),
    "a file of torch's": ([], 14_000_000, "the file cannot be written: No space left on device"),  # 53 MiB, in memory
}


@pytest.mark.parametrize(("options", "elements", "words"), FULL_DISK.values(), ids=FULL_DISK)
def test_a_conversion_onto_a_full_disk_tells_of_it_and_leaves_nothing(
    small_disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    elements: int,
    words: str,
) -> None:
    save(tmp_path / "c", torch.ones(elements))
    (small_disk / "others").write_bytes(bytes(70 << 20))
    before = sorted(os.listdir(small_disk))
    status, _, error = run(capsys, "convert", *options, tmp_path / "c", small_disk / "target")
    assert status == 2 and words in error and str(small_disk) in error
    assert sorted(os.listdir(small_disk)) == before


def test_arrays_of_a_damaged_checkpoint_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "c", torch.ones(1000), torch.ones(1000))
    damaged = tmp_path / "c/params/000001/exp_avg/c.0"
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    status, _, error = run(capsys, "convert", "--nd", tmp_path / "c", tmp_path / "nd")
    assert status == 2 and str(damaged) in error
    assert os.listdir(tmp_path) == ["c"]


def test_what_only_one_of_two_checkpoints_has_is_told_in_its_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"layer{number}" for number in range(12)]
    torch.save({name: torch.zeros(1) for name in ["both", *names]}, tmp_path / "one.pt")
    torch.save({"both": torch.zeros(1)}, tmp_path / "other.pt")
    for pair in (("one.pt", "other.pt"), ("other.pt", "one.pt")):
        _, out, _ = run(capsys, "diff", *(tmp_path / name for name in pair))
        told = [line for line in out.splitlines() if "only in" in line and line.startswith("model/")]
        assert told == [f"model/{name}: only in {tmp_path}/one.pt" for name in names]
