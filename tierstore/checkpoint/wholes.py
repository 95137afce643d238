"""The entries of whole tensors, out of those that several ranks have written of their parts. Believes none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstore.checkpoint.entries import Entry, node_name
from tierstore.checkpoint.parts import are_cells
from tierstore.errors import DamagedCheckpointError, IncompleteCheckpointError

RANKS = "ranks"

Parts = list[tuple[int, Entry]]
"""Ranks, and what each has of one tensor."""


def folder_of(rank: int) -> str:
    """The folder of what one rank has written."""
    return f"{RANKS}/{node_name(rank)}"


def unite(where: str, section: str, by_rank: Sequence[Mapping[int, Entry]]) -> dict[int, tuple[Entry, Parts]]:
    """The entries of a section by number: each of the whole, and of the parts that cover it, each element once.

    Raises DamagedCheckpointError where ranks contradict each other, IncompleteCheckpointError where parts are missing.
    """
    found: dict[int, Parts] = {}
    for rank, entries in enumerate(by_rank):
        for number, entry in entries.items():
            found.setdefault(number, []).append((rank, entry))
    united = {}
    for number, parts in sorted(found.items()):
        name = f"{where}: {section}/{node_name(number)}"
        (first, one), *others = parts
        whole = one.of_whole()
        for rank, entry in others:
            if entry.of_whole() != whole:
                raise DamagedCheckpointError(
                    f"{name} is {str(whole)[:300]} to rank {first}, and {str(entry.of_whole())[:300]} to rank {rank}"
                )
        if not are_cells(whole.shape, [(entry.part.offsets, entry.shape) for _, entry in parts]):
            shown = ", ".join(f"{list(entry.shape)} at {list(entry.part.offsets)}" for _, entry in parts[:8])
            raise IncompleteCheckpointError(
                f"{name} ({whole.name!r}) of shape {list(whole.shape)} has {len(parts)} parts ({shown}), which do not "
                f"cover it, each element once: the checkpoint is not complete"
            )
        united[number] = whole, parts
    return united
