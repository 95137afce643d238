"""Reads what a job wrote of itself. A file may be anybody's: it is checked against the values it stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from tierstore.errors import TierstoreError
from tierstore.history import PICTURE_FORMAT, RECORD_FORMAT, Picture, Record

MOST_BYTES = 64 << 20
"""Of a file that is read; a record has at most a megabyte."""
_MOST = 1 << 63
"""No count, size or time that a job writes is as large, and none is below zero."""

_Seen = TypeVar("_Seen")


class SeenError(TierstoreError, ValueError):
    """A file is not there, cannot be read, or is not what a job writes."""


def read_picture(path: Path) -> Picture:
    """Read what `monitor: FILE` writes. Raises SeenError."""
    return _read(path, Picture, PICTURE_FORMAT, "monitor", "tierstore top")


def read_record(path: Path) -> Record:
    """Read what `record: FILE` writes. Raises SeenError."""
    return _read(path, Record, RECORD_FORMAT, "record", "tierstore report")


def _read(path: Path, kind: type[_Seen], form: str, key: str, command: str) -> _Seen:
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        advice = f"a job with `{key}: {path}` in its policy writes it after its first step"
        raise SeenError(f"{path}: cannot be read ({error.strerror}): {advice}") from error
    content = _parse(path, raw)
    found = content.get("format") if isinstance(content, dict) else None
    if found != form:
        other = {PICTURE_FORMAT: "tierstore top", RECORD_FORMAT: "tierstore report"}.get(str(found))
        hint = f"`{other}` shows it" if other else f"give {command} the file that `{key}:` of a policy names"
        raise SeenError(f"{path}: found format {str(found)[:60]!r}, and {command} reads {form!r}: {hint}")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:120]
        raise SeenError(f"{path}: {where}: {first['msg']}: written by another version, or changed since") from error


def _parse(path: Path, raw: bytes) -> Any:
    if len(raw) > MOST_BYTES:
        raise SeenError(f"{path}: has more than {MOST_BYTES >> 20} MiB, which no job writes")

    def sane(text: str) -> str:
        if not 0 <= float(text) < _MOST:
            raise ValueError(f"{text[:40]} is no number of a job's")
        return text

    try:
        return json.loads(
            raw, parse_constant=sane, parse_int=lambda text: int(sane(text)), parse_float=lambda text: float(sane(text))
        )
    except (ValueError, RecursionError) as error:
        raise SeenError(f"{path}: is not JSON that a job wrote ({error})") from error
