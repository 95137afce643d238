"""A checkpoint whose documents somebody made to do harm is loaded, or refused with a typed error that changes nothing.

What the reader alone refuses is in `tests/unit/test_checkpoint_hostile.py`.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests import fuzzing
from tests.optimizer.beside import nothing_changes
from tests.optimizer.settings import go_on, network
from tests.optimizer.test_checkpoint import made
from tierstore.errors import CheckpointError, StateDictError

WORDS: list[Any] = [
    *[None, True, False, -1, 0, 1, 1.5, 1e308, float("nan"), float("inf"), 10**19, 10**40],
    *["", "0", "x", "float32", [], {}, [0], [[]], {"a": 1}],
]


def trained(folder: Path, seed: int) -> tuple[nn.Module, Any]:
    model = network(seed)
    optimizer = made(model.named_parameters(), folder, "cpu")
    go_on(model, optimizer, range(1))
    return model, optimizer


def places(document: Any, before: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where there is a value in a document."""
    yield before
    found = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in found:
        yield from places(value, (*before, key))


def spoiled(document: dict[str, Any], place: tuple[str | int, ...], word: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    target: Any = document
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = word
    return document


def fuzz(folder: Path, seed: int, tries: Iterable[int]) -> Counter[str]:
    """Put other values into what a checkpoint says of its optimizer and model, one after the other, and load it."""
    chance, outcomes = random.Random(seed), Counter[str]()
    model, optimizer = trained(folder, 1)
    optimizer.save_checkpoint(folder / "saved", model, extra={"place": [1, 2], "name": ("a", b"b")})
    file = folder / "saved" / "zarr.json"
    document = json.loads(file.read_text())
    attributes = [("attributes", *place) for place in places(document["attributes"]) if place]
    twin, another = trained(folder, 2)
    for number in tries:
        file.write_text(json.dumps(spoiled(document, chance.choice(attributes), chance.choice(WORDS))))
        try:
            another.load_checkpoint(folder / "saved", twin, params=chance.choice([None, "0.*"]))
            outcomes["loaded"] += 1
        except (CheckpointError, StateDictError):
            outcomes["refused"] += 1
        assert another.store.broken_off is None, number
    return outcomes


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (("model",), []),
        (("model", "keys"), None),
        (("model", "keys", "0.bias"), [1]),
        (("model", "keys", "0.bias"), "1"),
        (("model", "keys", "0.bias"), 10**19),
        (("model", "others"), 7),
        (("param_groups",), {"a": 1}),
        (("param_groups", 0), None),
        (("param_groups", 0, "params", 0), "0"),
        (("param_groups", 0, "options"), []),
        (("param_groups", 0, "params"), [0, 1, 2, 3, 4, 99]),
        (("param_groups", 0, "params"), [0, 1, 2, 3, 4, -1]),
    ],
)
def test_a_hostile_header_is_refused_and_changes_nothing(
    place: tuple[str | int, ...], word: Any, tmp_path: Path
) -> None:
    model, optimizer = trained(tmp_path, 1)
    optimizer.save_checkpoint(tmp_path / "saved", model)
    file = tmp_path / "saved" / "zarr.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps(spoiled(document, ("attributes", "header", *place), word)))
    with nothing_changes(optimizer), pytest.raises((CheckpointError, StateDictError), match=str(tmp_path)):
        optimizer.load_checkpoint(tmp_path / "saved", model)


def test_other_values_in_a_header_are_refused_or_loaded(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 4, range(150))
    assert outcomes["refused"] > 40 and outcomes["loaded"] > 10


@pytest.mark.fuzz
def test_other_values_in_a_header_are_refused_or_loaded_for_a_fixed_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = fuzz(tmp_path, fuzzing.SEED, fuzzing.timed())
    fuzzing.tell(capsys, "headers of checkpoints", outcomes)
    assert outcomes["refused"] > 50 and outcomes["loaded"] > 10
