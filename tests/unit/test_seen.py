"""What a file of anybody's says is believed or refused, never a crash; what earlier versions wrote is still shown."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.unit.runs import picture_of, record_of
from tierstore.history import Job
from tierstore.report.page import page
from tierstore.seen import SeenError, read_picture, read_record
from tierstore.top.view import draw

JOB = Job("node", 4711, 0, 1.7e9)
ABSURD = ["-1", "1e308", "1e999", "9" * 400, '"1e999"', "null", "{}", '"\\ud800"']


def live() -> Any:
    return picture_of(JOB).to_dict()


def recorded() -> Any:
    return json.loads(json.dumps(asdict(record_of(samples=2))))


def show_live(path: Path) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(draw(read_picture(path), "running", is_well=True, width=80))
    return console.file.getvalue()  # type: ignore[attr-defined]


def show_recorded(path: Path) -> str:
    return page(read_record(path))


BOTH = pytest.mark.parametrize(
    ("make", "show"), [(live, show_live), (recorded, show_recorded)], ids=["monitor", "record"]
)


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Where in plain values there is a number, a text or nothing, of lists in the first: what it is in, and the key."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content[:1]):
        if isinstance(value, dict | list):
            yield from places(value)
        else:
            yield content, key


@BOTH
@pytest.mark.parametrize("absurd", ABSURD, ids=lambda text: text[:10])
def test_absurd_value_anywhere_is_refused_or_shown(
    tmp_path: Path, make: Callable[[], Any], show: Callable[[Path], str], absurd: str
) -> None:
    path, content, shown = tmp_path / "file.json", make(), 0
    for holder, key in places(content):
        before, holder[key] = holder[key], "HERE"
        path.write_text(json.dumps(content).replace('"HERE"', absurd))
        holder[key] = before
        with contextlib.suppress(SeenError):
            show(path).encode()
            shown += 1
    assert shown < len(list(places(content)))


@BOTH
def test_file_from_before_pressure_was_told_is_shown(
    tmp_path: Path, make: Callable[[], Any], show: Callable[[Path], str]
) -> None:
    content = make()
    samples = content.get("samples", [])
    since = [content["interval"]] if "interval" in content else [sample["interval"] for sample in samples]
    later = {"pressure", "most_pressure", "spilled", "promoted", "bytes_written", "began"}
    for holder in (content, content["stats"], *samples, *since):
        for key in later & holder.keys():
            del holder[key]
    (tmp_path / "file.json").write_text(json.dumps(content))
    assert "chunks spilled" not in (shown := show(tmp_path / "file.json")) and "pressure on" not in shown
    assert "None was measured" in shown or make is live
