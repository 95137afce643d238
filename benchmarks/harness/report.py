"""The one form that results have: a report is options, environment, raw device, tables, checks and notes.

Plain values only, so that a report is its JSON: `Report.from_dict(report.to_dict())` is equal to the report. Nothing in
it names a folder or a host: reports are made to be passed on.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its key in the rows, what stands above it, and how its values are written (`show.written`)."""

    key: str
    heading: str
    form: str = ""  # "" as it is, "bytes", "seconds", "percent", or a format such as ".2f"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that belong together. A row that lacks a key shows nothing there."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that was to be reached, and what was seen; `holds` None where it could not be tried."""

    claim: str
    target: str
    seen: str
    holds: bool | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of one benchmark found. `verified` says which bytes were compared with what, and how many."""

    benchmark: str
    question: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    tables: tuple[Table, ...]
    verified: str
    raw: tuple[Mapping[str, Any], ...] = ()  # the raw device, one entry per shape of request
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)  # what plots need and tables do not show
    when: str = field(default_factory=lambda: f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}")

    def to_dict(self) -> dict[str, Any]:
        """Answer what the JSON file holds."""
        plain: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **asdict(self)}, allow_nan=False))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Read what `to_dict` wrote. Raises ValueError for another schema."""
        if values.get("schema") != SCHEMA:
            raise ValueError(f"found schema {values.get('schema')!r} of results; this reads {SCHEMA}")
        rest = {key: value for key, value in values.items() if key != "schema"}
        tables = tuple(
            Table(table["title"], tuple(Column(**c) for c in table["columns"]), tuple(table["rows"]), table["note"])
            for table in rest.pop("tables")
        )
        checks = tuple(Check(**check) for check in rest.pop("checks"))
        raw, notes = tuple(rest.pop("raw")), tuple(rest.pop("notes"))
        return cls(**rest, tables=tables, checks=checks, raw=raw, notes=notes)

    def dated_path(self, folder: Path = RESULTS) -> Path:
        """Where results are kept: one file per benchmark and moment."""
        return folder / f"{self.when[:10]}-{self.when[11:16].replace(':', '')}-{self.benchmark}.json"
