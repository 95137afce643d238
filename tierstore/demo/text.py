"""The text that is trained on, as bytes: the help topics every Python carries, or a file.

The last tenth is held out: it is never trained on. Knows nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierstore.demo.options import DemoError

HELD_OUT = 10
"""One byte of so many is held out."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text cut in two. `unigram_entropy` is of the whole, in nats per byte: the loss of knowing frequencies alone."""

    name: str
    training: bytes
    heldout: bytes
    unigram_entropy: float


def read_text(path: Path | None, *, context: int) -> Text:
    """Read a file, or Python's help topics, for windows of `context` bytes. Raises DemoError."""
    name, content = _topics() if path is None else (str(path), _file(path))
    least = HELD_OUT * (context + 1)
    if len(content) < least:
        what = "is empty" if not content else f"has {len(content):,} bytes, too few"
        raise DemoError(
            f"{name} {what}: windows of {context} bytes need at least {least:,} bytes of text; give a longer one with "
            f"--text, or shorten the windows with --context"
        )
    cut = len(content) - len(content) // HELD_OUT
    return Text(name, content[:cut], content[cut:], _unigram_entropy(content))


def _topics() -> tuple[str, bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DemoError("this Python has no help topics (pydoc_data): name a text with --text FILE") from error
    return "Python's help topics", "\n".join(topics[key] for key in sorted(topics)).encode()


def _file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DemoError(f"the text {path} cannot be read ({error.strerror}): name another with --text") from error


def _unigram_entropy(content: bytes) -> float:
    counts = np.bincount(np.frombuffer(content, dtype=np.uint8), minlength=256)
    shares = counts[counts > 0] / len(content)
    return float(-(shares * np.log(shares)).sum())
