"""Renders the results under benchmarks/results as one page: the newest of each benchmark in full, the others in a list.

`python -m benchmarks.page` writes benchmarks/results/README.md from the JSON files beside it, and from nothing else.
"""

from __future__ import annotations

import json as json_
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness import Report, command
from benchmarks.harness.report import RESULTS
from benchmarks.harness.show import all_tables, markdown, surroundings

FIRST = (
    "swap_latency",
    "step_time",
    "peers",
    "arithmetic",
    "scaling",
    "memory",
    "checkpoint",
    "retention",
    "predicted_vs_measured",
    "pressure",
    "import_cost",
)


def main(
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the JSON files are, and the page.")] = RESULTS,
) -> None:
    """Render the results as one page."""
    page = results / "README.md"
    page.write_text("\n".join(render(read(results))))
    typer.echo(f"written: {page}")


def read(results: Path) -> list[Report]:
    """All reports in a folder, newest first. Raises ValueError for a file of another schema, which it names."""
    found = []
    for path in results.glob("*.json"):
        try:
            found.append(Report.from_dict(json_.loads(path.read_text())))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as results: {error}") from error
    return sorted(found, key=lambda report: report.when, reverse=True)


def render(reports: Sequence[Report]) -> Iterator[str]:
    """The lines of the page."""
    yield "# Results"
    yield ""
    yield "Rendered by `python -m benchmarks.page` from the JSON files beside this page. What each benchmark measures,"
    yield "and how to read it, is in [benchmarks/README.md](../README.md). A ratio within one run is a result; an"
    yield "absolute time is an anecdote."
    newest: dict[str, Report] = {}
    for report in reports:
        newest.setdefault(report.benchmark, report)
    names = sorted(newest, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    for name in names:
        yield from _section(newest[name])
    older = [report for report in reports if newest[report.benchmark] is not report]
    if older:
        yield ""
        yield "## Older results"
        yield ""
        yield from (f"- `{report.dated_path(Path()).name}`" for report in older)
    yield ""


def _section(report: Report) -> Iterator[str]:
    yield ""
    yield f"## {report.benchmark}"
    yield ""
    yield f"{report.question[:1].upper()}{report.question[1:]}"
    yield ""
    yield from (f"- {line}" for line in surroundings(report))
    yield f"- options: {', '.join(f'{key} {value}' for key, value in report.options.items())}"
    if "policy" in report.environment:
        yield f"- policy: `{json_.dumps(report.environment['policy'])}`"
    yield f"- verified: {report.verified}"
    for table in all_tables(report):
        yield ""
        yield f"**{table.title[:1].upper()}{table.title[1:]}**"
        yield ""
        yield markdown(table)
        if table.note:
            yield ""
            yield table.note
    if report.notes:
        yield ""
        yield from (f"- {note}" for note in report.notes)


if __name__ == "__main__":
    command(main)
