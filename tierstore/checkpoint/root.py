"""What the topmost group of a checkpoint says: that it is one, of which version, by whom, and that it is complete.

Its document is the last file that is written, so a folder without one was never finished.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import tierstore
from tierstore.checkpoint.documents import METADATA, group_attributes, load
from tierstore.checkpoint.entries import Json
from tierstore.errors import CheckpointFileError, DamagedCheckpointError

FORMAT = "tierstore checkpoint"
VERSION = 1
MOST_RANKS = 1 << 16
MOST_METADATA_BYTES = 512 << 20
"""Of one document; the topmost holds all others, about 700 bytes for each array."""


@dataclass(frozen=True, slots=True)
class Root:
    """The attributes of the topmost group. `saved_at`: seconds since 1970. `counts`: groups in each section.

    `ranks`: how many have written a part each; 0 if sections lie at the top.
    """

    saved_at: float
    torch_version: str
    tierstore_version: str
    cpu_capability: str
    counts: Mapping[str, int]
    header: Mapping[str, Json]
    extra: Json
    ranks: int = 0

    def to_attributes(self) -> dict[str, Json]:
        """The attributes to be stored."""
        attributes = {
            "format": FORMAT,
            "version": VERSION,
            "saved_at": self.saved_at,
            "torch": self.torch_version,
            "tierstore": self.tierstore_version,
            "cpu_capability": self.cpu_capability,
            "complete": dict(self.counts),
            "header": self.header,
            "extra": self.extra,
        }
        return attributes | ({"ranks": self.ranks} if self.ranks else {})


def root_now(counts: Mapping[str, int], header: Mapping[str, Json], extra: Json, ranks: int) -> Root:
    """Say who saves, and when."""
    capability = torch.backends.cpu.get_cpu_capability()
    return Root(time.time(), torch.__version__, tierstore.__version__, capability, counts, header, extra, ranks)


def parse_root(where: str, document: Mapping[str, Json]) -> Root:
    """Read them. Raises DamagedCheckpointError for what is no checkpoint, or one of a later version."""
    attributes = group_attributes(where, document)
    if attributes.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{where} is a Zarr group, but no checkpoint of tierstore's")
    if attributes.get("version") != VERSION:
        raise DamagedCheckpointError(
            f"{where} is of version {str(attributes.get('version'))[:40]} of the format, this tierstore reads version "
            f"{VERSION}: load it with the tierstore that saved it, {str(attributes.get('tierstore'))[:40]}"
        )
    counts, header, saved_at = attributes.get("complete"), attributes.get("header"), attributes.get("saved_at")
    is_sound = (
        isinstance(counts, dict)
        and all(type(count) is int and count >= 0 for count in counts.values())
        and isinstance(header, dict)
        and isinstance(saved_at, int | float)
        and math.isfinite(saved_at)
    )
    if not is_sound:
        raise DamagedCheckpointError(f"{where}: the attributes complete, header or saved_at are missing or wrong")
    ranks = attributes.get("ranks", 0)
    if type(ranks) is not int or not 0 <= ranks <= MOST_RANKS:
        raise DamagedCheckpointError(f"{where} is of {str(ranks)[:40]} ranks")
    words = {name: attributes.get(name) for name in ("torch", "tierstore", "cpu_capability")}
    if not all(isinstance(word, str) for word in words.values()):
        raise DamagedCheckpointError(f"{where}: the attributes torch, tierstore or cpu_capability are missing or wrong")
    return Root(
        saved_at=float(saved_at or 0),
        torch_version=str(words["torch"]),
        tierstore_version=str(words["tierstore"]),
        cpu_capability=str(words["cpu_capability"]),
        counts=counts or {},
        header=header or {},
        extra=attributes.get("extra"),
        ranks=ranks,
    )


def find_root(folder: str) -> Root | None:
    """Read the root of a folder if it is a complete checkpoint; None for everything else."""
    path = os.path.join(folder, METADATA)
    try:
        if os.path.islink(path) or os.path.getsize(path) > MOST_METADATA_BYTES:
            return None
        with open(path, "rb") as file:
            return parse_root(path, load(path, file.read()))
    except (OSError, CheckpointFileError, DamagedCheckpointError):
        return None
