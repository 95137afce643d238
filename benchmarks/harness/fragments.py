"""Free memory in pieces, as it is on a machine that has been busy for long; and how much of it is whole.

Memory on huge pages is whole wherever it lies. Memory on small ones is as scattered as the pages that were free when it
was first touched, and is handed to a disk piece by piece.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from tierstore.layout import HUGE_PAGE
from tierstore.pressure import host_memory

LEFT_BYTES = 1 << 30
"""Of what is available, not taken."""
PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def in_fragments(nbytes: int | None = None) -> Iterator[None]:
    """Hold every other small page of `nbytes` (None: of all that is available, but a little) while the block runs."""
    if nbytes is None:
        nbytes = max(0, host_memory().available_bytes - LEFT_BYTES)
    nbytes = max(2 * PAGE, nbytes // PAGE * PAGE)
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        area.madvise(mmap.MADV_NOHUGEPAGE)
        _touch(area)
        for start in range(0, nbytes, 2 * PAGE):
            area.madvise(mmap.MADV_DONTNEED, start, PAGE)
        yield


def whole_share(root: Path = Path("/")) -> float | None:
    """Share of the machine's free memory that is in blocks of a huge page or more; None where that cannot be read."""
    try:
        zones = [list(map(int, line.split()[4:])) for line in (root / "proc/buddyinfo").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    free = [count << order for zone in zones for order, count in enumerate(zone)]
    whole = [count << order for zone in zones for order, count in enumerate(zone) if PAGE << order >= HUGE_PAGE]
    return sum(whole) / sum(free) if sum(free) else None


def _touch(area: mmap.mmap) -> None:
    """Write to every page; the view ends here, as no mapping can be closed under one."""
    torch.frombuffer(area, dtype=torch.uint8)[::PAGE].fill_(1)
