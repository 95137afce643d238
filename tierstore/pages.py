"""What pages memory really lies on, as the kernel says. Only looks."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tierstore.layout import HUGE_PAGE

MOSTLY = 0.5
"""Memory counts as lying on huge pages if this share of what is in use does."""


def lies_on_small_pages(ranges: list[tuple[int, int]], smaps: Path = Path("/proc/self/smaps")) -> bool:
    """Whether most of the memory in these ranges (address, bytes) that is in use is on small pages.

    Ranges shorter than a huge page are left out: nothing could help them. False where the kernel does not say.
    """
    wanted = [(begin, begin + nbytes) for begin, nbytes in ranges if nbytes >= HUGE_PAGE]
    if not wanted:
        return False
    in_use = on_huge = 0
    is_wanted = False
    with contextlib.suppress(OSError), smaps.open() as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                begin, end = (int(address, 16) for address in name.split("-"))
                is_wanted = any(begin < last and first < end for first, last in wanted)
            elif is_wanted and name == "Rss:":
                in_use += int(rest.split()[0])
            elif is_wanted and name == "AnonHugePages:":
                on_huge += int(rest.split()[0])
    return in_use > 0 and on_huge < MOSTLY * in_use
