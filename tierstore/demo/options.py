"""What a user may choose for one run of the demo, with the defaults: a run of a minute or two on two cores.

Imports neither torch nor rich; checks nothing that the command line has checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import TierstoreError

DONE, DIFFERENT = 0, 1
"""Exit statuses: all is well; `verify` found a bit that differs. Others are those of every command."""
HEAD_WIDTH = 32
"""Of one attention head: the model's width is a multiple of it."""


class DemoError(TierstoreError, ValueError):
    """Something chosen for the demo cannot be had: names the option to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """One run. `policy` None: one made for the model's size; `swap` empty: as the policy says; `json` None: none."""

    steps: int = 150
    text: Path | None = None
    seed: int = 0
    verify: bool = False
    policy: Path | None = None
    tiers: tuple[str, ...] | None = None
    swap: tuple[Path, ...] = ()
    plain: bool = False
    json: str | None = None  # a file, or output.STDOUT
    width: int = 256
    layers: int = 6
    context: int = 128  # bytes the model sees at once
    batch: int = 4
    learning_rate: float = 1e-3
    device: str = "auto"
