"""One thing that was looked at: what was found, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """`WARN`: it works, but not as well as it could. `FAIL`: something that the policy asks for does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of the doctor's; `advice` says what to do, and is empty where all is well."""

    name: str
    level: Level
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Finding:
    """Make a finding that needs no advice."""
    return Finding(name, Level.OK, text)


def warn(name: str, text: str, advice: str) -> Finding:
    """Make one that could be better."""
    return Finding(name, Level.WARN, text, advice)


def fail(name: str, text: str, advice: str) -> Finding:
    """Make one that stands in the way."""
    return Finding(name, Level.FAIL, text, advice)
