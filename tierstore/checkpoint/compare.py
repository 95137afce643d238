"""In what two values differ that are stored as JSON, in words of the values and not of how they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tierstore.checkpoint.entries import Json
from tierstore.checkpoint.extra import decode
from tierstore.errors import DamagedCheckpointError

_STORED_APART = {"$tensor": "a tensor", "$array": "an array", "$stored_bytes": "bytes"}
_LONGEST = 60


def differing(place: str, one: Json, other: Json) -> Iterator[tuple[str, str]]:
    """Each place in which they differ, and what stands there."""
    mine, theirs = _inside(one), _inside(other)
    if _tag(one) == _tag(other) and isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in {**mine, **theirs}:
            if key in mine and key in theirs:
                yield from differing(f"{place}.{key}", mine[key], theirs[key])
            else:
                yield f"{place}.{key}", f"only in the {'first' if key in mine else 'second'}"
    elif _tag(one) == _tag(other) and isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            yield from differing(f"{place}[{number}]", left, right)
    elif type(one) is not type(other) or one != other:
        words = in_words(one), in_words(other)
        yield place, f"{words[0]} and {words[1]}" if words[0] != words[1] else f"{words[0]} and another"


def in_words(value: Json) -> str:
    """A stored value as Python shows it, on at most 60 characters."""
    if (words := _STORED_APART.get(_tag(value))) is not None:
        return words
    try:
        found = decode(value, lambda number: _ATensor())  # type: ignore[arg-type, return-value]
    except DamagedCheckpointError:
        found = value  # JSON of somebody else's
    return " ".join(str(found).split())[:_LONGEST]


class _ATensor:
    def __repr__(self) -> str:
        return "a tensor"


def _tag(value: Json) -> str:
    """How a value is stored that JSON has no form for; nothing for others."""
    tag = next(iter(value), "") if isinstance(value, dict) and len(value) == 1 else ""
    return tag if tag.startswith("$") else ""


def _inside(value: Json) -> Any:
    """The parts of a value that has some: by key, or in a list."""
    tag = _tag(value)
    content = value[tag] if tag else value
    if tag in ("$dict", "$ordered") and isinstance(content, list):
        pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
        return {in_words(key): item for key, item in pairs}
    return content if tag in ("", "$tuple", "$size") else None
