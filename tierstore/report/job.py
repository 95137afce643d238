"""Reads a record, writes a page."""

from __future__ import annotations

from pathlib import Path

from tierstore.errors import TierstoreError
from tierstore.report.page import page
from tierstore.seen import read_record


class ReportError(TierstoreError, ValueError):
    """The page cannot be written."""


def run(file: Path, output: Path | None) -> Path:
    """Write the page of a record; return where it is. Raises SeenError or ReportError."""
    text = page(read_record(file))
    target = file.with_suffix(".html") if output is None else output
    if target.exists() and target.samefile(file):
        raise ReportError(f"{target}: is the record itself: name another file with -o")
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{target}: cannot be written ({error.strerror}): name another file with -o") from error
    return target
