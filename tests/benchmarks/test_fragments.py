"""Free memory in pieces: every other page is held while it is asked for, and how much is whole is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.fragments import PAGE, in_fragments, whole_share
from benchmarks.peers.runner import resident_bytes

SIZE = 64 << 20


def test_every_other_page_is_held_while_the_block_runs() -> None:
    before = resident_bytes()
    with in_fragments(SIZE):
        held = resident_bytes() - before
    assert SIZE // 2 <= held < SIZE * 3 // 4
    assert resident_bytes() - before < SIZE // 4


def test_what_is_free_is_whole_in_blocks_of_a_huge_page_or_more(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    small, huge = [3] + [0] * 10, [0] * 9 + [1, 0]
    zones = [f"Node 0, zone {name} {' '.join(map(str, counts))}" for name, counts in (("DMA", small), ("Normal", huge))]
    (tmp_path / "proc/buddyinfo").write_text("\n".join(zones) + "\n")
    if PAGE != 4096:
        pytest.skip("the block sizes are those of 4 KiB pages")
    assert whole_share(tmp_path) == 512 / 515


@pytest.mark.parametrize("text", [None, "", "Node 0, zone DMA many"])
def test_where_that_cannot_be_read_it_is_not_told(text: str | None, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/buddyinfo").write_text(text)
    assert whole_share(tmp_path) is None
