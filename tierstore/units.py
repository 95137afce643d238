"""The values that one setting can take: sizes, shares, times, counts, folders and choices.

Owns how each is read from what YAML or Python gives, the words for what is allowed, and how it is written back. Knows
no key and no section: `policy` puts these types under names. Invariant: a type takes what it gives back, so that a
value once read can be validated again unchanged.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ByteSize, GetCoreSchemaHandler, PlainSerializer, PlainValidator, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from tierstore.errors import PolicyError

Auto = Literal["auto"]

MIN_CHUNK_BYTES = 16 << 10
_DIRECT_BYTES = 4096  # O_DIRECT takes lengths in multiples of this
_MOST_BYTES = 2**63 - 1  # the largest file offset
_MOST_SECONDS = 24 * 3600.0
_MOST_THREADS = 1024
_MOST_QUEUED = 65536  # Linux's default for all asynchronous requests of a machine, fs.aio-max-nr


@dataclass(frozen=True, slots=True)
class Percent:
    """A share of what the machine has, as `30%`; `fraction` is above 0 and at most 1."""

    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise PolicyError(f"policy: found a fraction of {self.fraction}; allowed: above 0 and at most 1")

    def __str__(self) -> str:
        return f"{(Decimal(repr(self.fraction)) * 100).normalize():f}%"


# Parsers: each answers the parsed value, or None for a value that it does not take.


def _parse_bytes(value: object, *, least: int, multiple: int = 1) -> int | None:
    count = _parse_size(value) if isinstance(value, str) else value
    if not isinstance(count, int) or isinstance(count, bool):
        return None
    return int(count) if least <= count <= _MOST_BYTES and count % multiple == 0 else None


def parse_bytes(value: object) -> int | None:
    """Read a size such as 65536, 64MiB or 1.5GB, from 1 byte; None for what is none."""
    return _parse_bytes(value, least=1)


def _parse_size(text: str) -> int | None:
    # ByteSize reads a prefix ("64MiB, or so"), and bits ("64Mbit"); so the whole text is matched first.
    is_size = re.fullmatch(r"[0-9]{1,19}|[0-9]{1,19}(\.[0-9]{1,19})?\s*([kmgtpe]i?)?b", text.strip(), re.IGNORECASE)
    return int(TypeAdapter(ByteSize).validate_python(text)) if is_size else None


def _parse_capacity(value: object) -> int | Percent | None:
    if isinstance(value, Percent):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*%", value.strip()) if isinstance(value, str) else None
    if match is None:
        return _parse_bytes(value, least=1)
    fraction = _parse_number(float(Decimal(match[1]) / 100), most=1.0)
    return None if fraction is None else Percent(fraction)


def _parse_whole(value: object, *, most: int) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most else None


def _parse_number(value: object, *, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= most else None  # false for NaN


def _parse_seconds(value: object) -> float | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h)", value.strip()) if isinstance(value, str) else None
    if match is None:
        return _parse_number(value, most=_MOST_SECONDS)
    scale = {"ms": Decimal("0.001"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}[match[2]]
    return _parse_number(float(Decimal(match[1]) * scale), most=_MOST_SECONDS)


def _parse_text(value: object, *, pattern: str) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) else None


def _parse_folders(value: object) -> tuple[Path, ...] | None:
    folders = [_parse_folder(item) for item in value] if isinstance(value, list | tuple) else []
    found = tuple(folder for folder in folders if folder is not None)
    if not found or len(found) < len(folders):
        return None
    seen: dict[str, Path] = {}
    for folder in found:
        earlier = seen.setdefault(os.path.realpath(folder), folder)
        if earlier is not folder:
            raise ValueError(f"found {shown(earlier)} and {shown(folder)}, one folder; allowed: each folder once")
    return found


def _parse_folder(value: object) -> Path | None:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        return None
    try:
        return Path(text).expanduser()
    except RuntimeError:  # "~somebody" without a home folder
        return None


def _parse_file(value: object) -> Path | None:
    found = _parse_folder(value)
    return None if found is None or not found.name else found


def parse_list(value: object) -> Sequence[object] | None:
    """Answer a list or a tuple as it is."""
    return value if isinstance(value, list | tuple) else None


# Types: a parser, and the words for what it takes.


def reader(parse: Callable[[object], object | None], allowed: str) -> Callable[[object], object]:
    """Make a validator of a parser; its error says what was found and what is `allowed`."""

    def read(value: object) -> object:
        parsed = parse(value)
        if parsed is None:
            raise ValueError(f"found {shown(value)}; allowed: {allowed}")
        return parsed

    return read


def _takes(parse: Callable[[object], object | None], allowed: str) -> PlainValidator:
    return PlainValidator(reader(parse, allowed))


def _takes_auto(parse: Callable[[object], object | None], allowed: str) -> PlainValidator:
    def parse_auto(value: object) -> object | None:
        return "auto" if isinstance(value, str) and value == "auto" else parse(value)

    return _takes(parse_auto, f"auto, or {allowed}")


class Choice:
    """Take the values of the annotated Literal or bool."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make pydantic's schema from the annotation, so that the options are written once."""
        options = _options(source)
        allowed = ", ".join(shown(option).strip("'") for option in options)

        def parse(value: object) -> object | None:
            # Types are compared because True == 1 == 1.0.
            return next((option for option in options if type(option) is type(value) and option == value), None)

        return core_schema.no_info_plain_validator_function(reader(parse, allowed))


def _options(annotation: Any) -> tuple[object, ...]:
    if annotation is bool:
        return (True, False)
    parts = get_args(annotation)
    return tuple(option for part in parts for option in (_options(part) if part is bool or get_args(part) else (part,)))


def bytes_text(count: object) -> object:
    """Write a byte count in the largest unit that is exact, `auto` and shares as text."""
    if not isinstance(count, int):
        return str(count)
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((f"{count // size}{unit}" for unit, size in units if count % size == 0), count)


def _paths_text(paths: Auto | tuple[Path, ...]) -> Auto | list[str]:
    return "auto" if paths == "auto" else [str(path) for path in paths]


_SIZE = "a size such as 65536, 64MiB or 1.5GiB"
_CAPACITY = f"{_SIZE}, from 1 byte, or a share above 0% and at most 100%, as 30%"
_CHUNK_SIZE = f"{_SIZE}, from 16KiB ({MIN_CHUNK_BYTES} bytes)"
_REQUEST_SIZE = f"{_SIZE}, a multiple of {_DIRECT_BYTES} bytes"
_WRITE_BYTES = PlainSerializer(bytes_text, when_used="json")
_WRITE_PATHS = PlainSerializer(_paths_text, when_used="json")


def _parse_chunk_bytes(value: object) -> int | None:
    return _parse_bytes(value, least=MIN_CHUNK_BYTES)


def _parse_request_bytes(value: object) -> int | None:
    return _parse_bytes(value, least=_DIRECT_BYTES, multiple=_DIRECT_BYTES)


def _takes_whole(most: int) -> PlainValidator:
    return _takes_auto(lambda value: _parse_whole(value, most=most), f"a whole number from 1 to {most}")


def _takes_text(pattern: str, allowed: str) -> PlainValidator:
    return _takes(lambda value: _parse_text(value, pattern=pattern), allowed)


_read_file = reader(_parse_file, "the path of a file that is written, as run.json, or null for none")

Capacity = Annotated[Auto | int | Percent, _takes_auto(_parse_capacity, _CAPACITY), _WRITE_BYTES]
ChunkSize = Annotated[Auto | int, _takes_auto(_parse_chunk_bytes, _CHUNK_SIZE), _WRITE_BYTES]
RequestSize = Annotated[Auto | int, _takes_auto(_parse_request_bytes, _REQUEST_SIZE), _WRITE_BYTES]
Folders = Annotated[
    Auto | tuple[Path, ...], _takes_auto(_parse_folders, "a list of folders, as [/mnt/nvme0, /mnt/nvme1]"), _WRITE_PATHS
]
OutputFile = Annotated[
    Path | None,
    PlainValidator(lambda value: None if value is None else _read_file(value)),
    PlainSerializer(str, when_used="json-unless-none"),
]
Fraction = Annotated[float, _takes(lambda value: _parse_number(value, most=1.0), "a number above 0 and at most 1")]
Seconds = Annotated[float, _takes(_parse_seconds, "seconds as 60, 60s, 500ms or 2min, above 0 and at most 24h")]
ThreadCount = Annotated[Auto | int, _takes_whole(_MOST_THREADS)]
QueueDepth = Annotated[Auto | int, _takes_whole(_MOST_QUEUED)]
Device = Annotated[str, _takes_text(r"[a-z]+(:[0-9]+)?", "auto, cpu, or a torch device such as cuda:0")]
Pattern = Annotated[str, _takes_text(r".+", "a pattern of parameter names, as '*embed*'")]
Switch = Annotated[bool, Choice()]
AutoSwitch = Annotated[Auto | bool, Choice()]


# Words: a found value on one short line.

_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 2, 80, 80  # bounded, as YAML aliases can stand for 10^9 elements


def shown(value: object) -> str:
    """Write a found value on one short line, as YAML does where Python differs."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    try:
        return one_line(_brief.repr(os.fspath(value) if isinstance(value, os.PathLike) else value))
    except Exception:  # an integer of more than 4,300 digits, or a repr of the caller's that fails
        return f"a value of type {type(value).__name__}"


def one_line(text: str) -> str:
    """Join the lines of a text."""
    return " ".join(text.split())
