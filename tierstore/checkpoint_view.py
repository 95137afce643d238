"""Carries out the commands of checkpoints and shows what they find, as a tree and lines or as JSON."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from tierstore.checkpoint.convert import to_arrays, to_checkpoint, to_torch
from tierstore.checkpoint.entries import SECTIONS, Entry, node_name
from tierstore.checkpoint.examine import Source, Values, differences, problems, total_bytes, values_of
from tierstore.checkpoint.opening import open_checkpoint
from tierstore.checkpoint.reader import Reader
from tierstore.checkpoint.torchfile import is_torch_file
from tierstore.demo.words import size
from tierstore.errors import DamagedCheckpointError
from tierstore.output import STDOUT, write_json, write_stdout
from tierstore.progress import Bar

MOST_HEADER = 2000
"""Characters of the header that are shown; JSON has all of it."""


def show_contents(path: Path, *, norms: bool, json: str | None) -> None:
    """Show the tree of a checkpoint. Raises CheckpointError or OutputError."""
    with open_checkpoint(path) as source:
        with Bar("reading", total_bytes(source) if norms else 0) as bar:
            found = {
                section: {
                    number: (entry, values_of(source, section, number, norms=norms, tell=bar.add))
                    for number, entry in source.entries(section).items()
                }
                for section in SECTIONS
            }
        about = _about(source)
        header = dict(source.header)
        nbytes = total_bytes(source)
    if json != STDOUT:
        tree = _tree(path, about, header, nbytes, found)
        write_stdout(lambda: _console().print(tree))
    contents = {
        section: [_as_json(number, entry, values) for number, (entry, values) in entries.items()]
        for section, entries in found.items()
    }
    write_json(json, {"path": str(path), "bytes": nbytes, **about, "header": header, **contents})


def show_problems(path: Path, *, json: str | None) -> bool:
    """Verify a checkpoint and show what is wrong with it; return whether nothing is."""
    try:
        with open_checkpoint(path) as source:
            nbytes = total_bytes(source)
        with Bar("verifying", nbytes) as bar:
            found = list(problems(path, bar.add))
    except DamagedCheckpointError as error:
        found, nbytes = [str(error)], 0
    lines = found or [f"{path} is complete and sound: {size(nbytes)} of values"]
    if json != STDOUT:
        write_stdout(lambda: _print_lines(lines))
    write_json(json, {"path": str(path), "ok": not found, "problems": found, "bytes": nbytes})
    return not found


def show_differences(one: Path, other: Path, *, json: str | None) -> bool:
    """Compare two checkpoints; return whether they hold the same."""
    with (
        open_checkpoint(one) as left,
        open_checkpoint(other) as right,
        Bar("comparing", total_bytes(left)) as bar,
    ):
        found = list(differences(left, right, bar.add))
    lines = [f"{difference.place}: {difference.text}" for difference in found] or ["no difference"]
    if json != STDOUT:
        write_stdout(lambda: _print_lines(lines))
    shown = [{**asdict(difference), "max_abs": _number(difference.max_abs)} for difference in found]
    write_json(json, {"same": not found, "differences": shown})
    return not found


def show_conversion(source: Path, target: Path, *, nd: bool, compression: Literal["none", "zstd"]) -> None:
    """Convert, and say what was written."""
    with open_checkpoint(source) as opened, Bar("converting", total_bytes(opened)) as bar:
        if nd:
            to_arrays(opened, target, tell=bar.add)
        elif is_torch_file(source):
            to_checkpoint(opened, target, compression=compression, tell=bar.add)
        else:
            to_torch(opened, target, tell=bar.add)
        nbytes = total_bytes(opened)
    write_stdout(lambda: _print_lines([f"{target}: {size(nbytes)} of values written"]))


def _console() -> Console:
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        print(line)


def _about(source: Source) -> dict[str, Any]:
    """Who saved it, and when; of a file of torch's that is not known."""
    if not isinstance(source, Reader):
        return {"format": "torch.save"}
    root = source.root
    return {
        "format": "tierstore checkpoint",
        "saved_at": root.saved_at,
        "tierstore": root.tierstore_version,
        "torch": root.torch_version,
        "cpu_capability": root.cpu_capability,
        **({"ranks": root.ranks} if root.ranks else {}),
    }


def _tree(
    path: Path,
    about: dict[str, Any],
    header: dict[str, Any],
    nbytes: int,
    found: dict[str, dict[int, tuple[Entry, dict[str, Values]]]],
) -> Tree:
    tree = Tree(Text(f"{path}  {size(nbytes)}"))
    for name, value in about.items():
        tree.add(Text(f"{name}: {value}", style="dim"))
    text = json_format.dumps(header, default=str)
    tree.add(Text(f"header: {text[:MOST_HEADER]}{'…' if len(text) > MOST_HEADER else ''}", style="dim"))
    for section, entries in found.items():
        if not entries:
            continue
        section_bytes = sum(entry.nbytes for entry, _ in entries.values())
        branch = tree.add(Text(f"{section}  {len(entries):,} of {size(section_bytes)}"))
        for number, (entry, fields) in entries.items():
            step = "" if entry.step is None else f"  step {entry.step:g}"
            dtype = str(entry.dtype).removeprefix("torch.")
            node = branch.add(Text(f"{node_name(number)} {entry.name}  {list(entry.shape)} {dtype}{step}"))
            for name, values in fields.items():
                node.add(Text(f"{name}  {values.dtype}  {size(values.nbytes)}{_norm(values)}"))
    return tree


def _norm(values: Values) -> str:
    if values.norm is None:
        return ""
    strange = f"  {values.not_finite:,} not finite" if values.not_finite else ""
    return f"  norm {values.norm:.6g}{strange}"


def _as_json(number: int, entry: Entry, fields: dict[str, Values]) -> dict[str, Any]:
    return {
        "number": number,
        "name": entry.name,
        "shape": list(entry.shape),
        "strides": list(entry.stride),
        "dtype": str(entry.dtype).removeprefix("torch."),
        "step": entry.step,
        "attributes": dict(entry.attributes),
        "fields": {name: asdict(values) for name, values in fields.items()},
    }


def _number(value: float | None) -> float | str | None:
    """A number as JSON can hold it."""
    return value if value is None or abs(value) != float("inf") else str(value)
