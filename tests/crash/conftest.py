"""A disk of our own, where one can be mounted: what is taken of it is nobody else's doing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import MIB, mounted

BOOKKEEPING_BYTES = 64 << 10
"""What a filesystem may take for the files themselves, or be late to give back."""


class Disk:
    """A folder, and what of its filesystem no file with a name accounts for."""

    def __init__(self, folder: Path, *, is_own: bool) -> None:
        self.folder = folder
        self._is_own = is_own
        self._before = self._unnamed_bytes()

    def assert_nothing_is_hidden(self) -> None:
        """Fail if files without a name take space, as the swap files of a run do that is still there."""
        if self._is_own:
            assert self._unnamed_bytes() - self._before < BOOKKEEPING_BYTES

    def _unnamed_bytes(self) -> int:
        if not self._is_own:
            return 0
        subprocess.run(["sync", "-f", str(self.folder)], check=True)
        space = os.statvfs(self.folder)
        named = sum(path.lstat().st_blocks * 512 for path in self.folder.rglob("*"))
        return (space.f_blocks - space.f_bfree) * space.f_frsize - named


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    image, folder = tmp_path / "image", tmp_path / "disk"
    image.touch()
    os.truncate(image, 96 * MIB)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        mounted(folder, "-o", "loop", str(image))
    except (OSError, subprocess.CalledProcessError, pytest.skip.Exception):
        folder.mkdir(exist_ok=True)
        yield Disk(folder, is_own=False)
        return
    try:
        yield Disk(folder, is_own=True)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
