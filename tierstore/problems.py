"""What is wrong with a policy, in words: one line per problem, with the key's path, what was found and what is allowed.

From pydantic's details, for sections that are pydantic models. A key that is not known there is told where it belongs.
Messages are bounded, whatever was found.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from itertools import islice
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from tierstore.errors import PolicyError
from tierstore.units import shown

_MOST_PROBLEMS = 30
"""That one error tells of."""


def policy_error(error: ValidationError, section: type[BaseModel], name: str) -> PolicyError:
    """Make the error that tells of all that pydantic found wrong with a section, one problem a line."""
    lines = [f"{name}: {line}" for line in islice(_lines(error, section), _MOST_PROBLEMS)]
    if error.error_count() > _MOST_PROBLEMS:
        lines.append(f"{name}: and {error.error_count() - _MOST_PROBLEMS} more")
    return PolicyError("\n".join(lines))


def problem(path: tuple[str | int, ...], value: object, allowed: str) -> InitErrorDetails:
    """Make a detail for pydantic of a value that a validator of a whole section finds wrong."""
    kind = PydanticCustomError(
        "policy", "found {found}; allowed: {allowed}", {"found": shown(value), "allowed": allowed}
    )
    return InitErrorDetails(type=kind, loc=path, input=value)


def keys_text(section: type[BaseModel], path: tuple[str | int, ...] = ()) -> str:
    """Words for what may stand where a path leads to."""
    return f"a mapping with the keys {', '.join(_section_at(section, path).model_fields)}"


def _lines(error: ValidationError, section: type[BaseModel]) -> Iterator[str]:
    for detail in error.errors(include_url=False):
        path = ".".join(_key_text(key) for key in detail["loc"])
        yield f"{path}: {_text(detail, section)}" if path else _text(detail, section)


def _text(detail: ErrorDetails, section: type[BaseModel]) -> str:
    path, parent = detail["loc"], detail["loc"][:-1]
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            return f"unknown key{_hint(section, parent, str(path[-1]))} allowed: {keys_text(section, parent)}"
        case "missing":
            return f"missing; allowed: {keys_text(section, path)}"
        case "model_type":
            return f"found {shown(detail['input'])}; allowed: {keys_text(section, path)}"
        case "value_error":
            return str(detail["ctx"]["error"])
        case _:
            return detail["msg"]


def _hint(section: type[BaseModel], parent: tuple[str | int, ...], key: str) -> str:
    """Ask whether the nearest key of a section was meant; of one that belongs elsewhere, only if it is very near."""
    elsewhere = [place if "." in place else f"{place} at the top" for place in _places_of(section, key)]
    here = _section_at(section, parent).model_fields
    nearest = difflib.get_close_matches(key, here, n=1, cutoff=0.8 if elsewhere else 0.6)
    meant = [repr(name) for name in nearest] or elsewhere
    return f", did you mean {' or '.join(meant)}?" if meant else ";"


def _places_of(section: type[BaseModel], key: str, path: str = "") -> Iterator[str]:
    """Name all places of a key, in a section and those within."""
    for name, field in section.model_fields.items():
        if name == key:
            yield f"{path}{name}"
        inner = _section_at(section, (name,))
        if inner is not section:
            many = ".N" if get_origin(field.annotation) is tuple else ""
            yield from _places_of(inner, key, f"{path}{name}{many}.")


def _section_at(section: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel]:
    """Find the section that a path leads to, or for a single setting the section it is in."""
    for key in path:
        if isinstance(key, str):
            annotation = section.model_fields[key].annotation
            parts = (annotation, *get_args(annotation))
            section = next((part for part in parts if isinstance(part, type(BaseModel))), section)
    return section


def _key_text(key: str | int) -> str:
    return str(key) if re.fullmatch(r"[\w*-]{1,60}", str(key)) else shown(key)
