"""What a caller keeps beside tensors comes back with its types, or is refused by its key's path; torch's files too."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tierstore.checkpoint import Reader, TorchFile, Writer, open_checkpoint
from tierstore.checkpoint.extra import decode, encode
from tierstore.errors import CheckpointValueError, DamagedCheckpointError


def same(one: Any, other: Any) -> bool:
    """Equal in type and to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return alike and one.flatten().view(torch.uint8).equal(other.flatten().view(torch.uint8))
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) for a, b in zip(one.values(), other.values(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return repr(one) == repr(other)


def test_random_states_and_all_kinds_of_values_come_back(tmp_path: Path) -> None:
    extra = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "large": torch.randn(300, 400).t(),
        "small": torch.randn(3, 4).to(torch.bfloat16).t(),
        "array": np.arange(1000, dtype=np.int16).reshape(10, 100),
        "big-endian": np.arange(3, dtype=">i4").astype("i4"),
        "scalars": (np.float32(0.1), np.bool_(True), np.uint64(2**63)),
        "bytes": (b"", b"abc", bytes(range(256)) * 40),
        "ordered": OrderedDict(b=1, a=2),
        "keys": {1: "int", "1": "str", None: 0, (1, "x"): 2.0, 1.5: 3, b"b": 4},
        "$tuple": ["not a tag"],
        "size": torch.Size([2, 3]),
        "empty": [[], (), {}, torch.empty(0, 3), np.empty((2, 0))],
        "surrogate": "\ud800",
        "view": torch.arange(1000)[::2],
        "expanded": torch.tensor(1.5).expand(3),
    }
    with Writer(tmp_path / "c", header={}) as writer:
        writer.keep(extra)
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        found = reader.extra()
    extra["view"], extra["expanded"] = extra["view"].clone(), torch.full((3,), 1.5)
    assert same(found, extra)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(width=64) | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=10,
)


@given(plain)
@settings(max_examples=40, deadline=None)
def test_every_plain_value_survives_json(value: Any) -> None:
    kept: list[Tensor] = []

    def keep(name: str, tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    assert same(decode(encode(value, keep), kept.__getitem__), value)


class Custom(dict[str, int]):
    """A kind of dict, which would not come back as one."""


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, {"b": object()}]}, r"extra\['a'\]\[1\]\['b'\] is a builtins.object"),
        ({"a": {1, 2}}, r"extra\['a'\] is a builtins.set"),
        ([Custom()], r"extra\[0\] is a .*Custom"),
        ([np.array(["x"])], r"extra\[0\]"),
        ([np.array([object()])], r"extra\[0\]"),
        ({frozenset(): 1}, "has a key"),
        ([torch.empty(3, device="meta")], r"extra\[0\].*meta"),
        ([lambda: 0], "function"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_keys_path(tmp_path: Path, value: Any, path: str) -> None:
    with Writer(tmp_path / "c", header={}) as writer, pytest.raises(CheckpointValueError, match=path):
        writer.keep(value)


def endless(around: Callable[[Any], Any]) -> Any:
    """A list that holds itself, within something else."""
    found: list[Any] = []
    found.append(around(found))
    return found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (endless(lambda inner: inner), r"extra\[0\] is one of the lists and dicts that it lies in"),
        (endless(lambda inner: {"me": (inner,)}), r"extra\[0\]\['me'\]\[0\] is one of the lists"),
        (endless(lambda inner: OrderedDict({5: inner})), r"extra\[0\]\[5\] is one of the lists"),
        (functools.reduce(lambda inner, _: [inner], range(80), 0), r"^extra(\[0\])+.{0,2}…: nested more than 64 deep$"),
    ],
)
def test_what_contains_itself_or_is_too_deep_is_refused_at_its_place(tmp_path: Path, value: Any, message: str) -> None:
    with Writer(tmp_path / "c", header={}) as writer, pytest.raises(CheckpointValueError, match=message) as caught:
        writer.keep(value)
    assert len(str(caught.value)) < 200


def test_what_occurs_twice_is_stored_twice(tmp_path: Path) -> None:
    shared = [1, 2]
    with Writer(tmp_path / "c", header={}) as writer:
        writer.keep({"a": shared, "b": [shared, shared]})
        writer.commit()
    with Reader(tmp_path / "c") as reader:
        assert reader.extra() == {"a": [1, 2], "b": [[1, 2], [1, 2]]}


@pytest.mark.parametrize(
    "tree",
    [
        {"$eval": "1"},
        {"$tuple": 3},
        {"$tuple": [], "more": 1},
        {"$int": "x"},
        {"$float": "1e5"},
        {"$bytes": "!"},
        {"$bytes": "A" * 4000},
        {"$size": ["a"]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$tensor": 0},
        {"$small_tensor": {"dtype": "float32", "shape": [1 << 60], "strides": [1], "base64": ""}},
        {"$small_tensor": {"dtype": "float32", "shape": [1], "strides": [-1], "base64": "AAAAAA=="}},
        {"$small_tensor": {"dtype": "float32", "shape": [2], "strides": [9], "base64": "AAAAAAAAAAA="}},
        {"$small_tensor": {"dtype": "float32", "shape": [1.0], "strides": [1], "base64": "AAAAAA=="}},
        {"$small_array": {"dtype": "O", "shape": [1], "base64": "AAAAAAAAAAA="}},
        {"$array": {"dtype": "float32", "shape": [1], "tensor": 7}},
    ],
)
def test_a_hostile_tree_is_refused(tree: Any) -> None:
    def nothing(number: int) -> Tensor:
        raise DamagedCheckpointError(f"no tensor {number}")

    with pytest.raises(DamagedCheckpointError):
        decode({"a": [tree]}, nothing)


# --- files of torch's


def trained(path: Path, wrap: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10).to(torch.bfloat16).to(torch.float32))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    torch.save(wrap(model.state_dict(), optimizer.state_dict()), path)
    return model, optimizer


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, optimizer: optimizer,
        lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 3},
        lambda model, optimizer: {"state_dict": model, "optimizer_states": [optimizer], "epoch": 3},
    ],
)
def test_a_file_of_torchs_is_read_as_a_checkpoint(tmp_path: Path, wrap: Any) -> None:
    model, optimizer = trained(tmp_path / "t.pt", wrap)
    with open_checkpoint(tmp_path / "t.pt") as reader:
        names = [name for name, _ in model.named_parameters()]
        assert [entry.name for entry in reader.entries("params").values()] == names
        for number, parameter in enumerate(model.parameters()):
            entry = reader.entries("params")[number]
            assert entry.shape == parameter.shape and entry.step == 1.0
            for field in ("exp_avg", "exp_avg_sq"):
                into = torch.empty(entry.numel - 2)
                reader.read("params", number, field, 1, into)
                assert into.equal(optimizer.state[parameter][field].flatten()[1:-1])
        group = reader.header["param_groups"][0]
        assert group["options"]["lr"] == 1e-2 and group["params"] == [0, 1, 2, 3] and reader.header["is_named"]
        if reader.header["model"] is not None:
            assert list(reader.header["model"]["keys"]) == list(model.state_dict())
            assert reader.extra() == {"epoch": 3}


def test_a_file_with_code_or_none_of_torchs_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {}, "param_groups": [], "code": print}, tmp_path / "code.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "short.pt").write_bytes((tmp_path / "none.pt").read_bytes()[:200])
    reasons = {
        "code": r"it holds a (builtins\.)?print, and only tensors and plain values are read",  # named in torch 2.6
        "list": "holds a list",
        "none": "neither an optimizer's state dict nor a model's",
        "text": "it is no file that torch.save wrote",
        "short": "it is no file that torch.save wrote .* or it is cut off",
    }
    for name, reason in reasons.items():
        with pytest.raises(DamagedCheckpointError, match=rf"{name}\.pt.*{reason}") as caught:
            TorchFile(tmp_path / f"{name}.pt")
        told = str(caught.value)  # nothing of torch's advice to load it in another way
        assert "weights_only" not in told and "mmap" not in told and "option" not in told and "\n" not in told
