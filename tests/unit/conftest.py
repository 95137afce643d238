"""Filesystems that are small enough to fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20


def mounted(folder: Path, *options: str) -> Path:
    """Mount a filesystem on a new folder, or skip."""
    folder.mkdir()
    done = subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    return folder


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A real filesystem of about 110 MiB."""
    if request.param == "tmpfs":
        folder = mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=110m", "tmpfs")
    else:
        image = tmp_path / "image"
        image.touch()
        os.truncate(image, 110 * MIB)
        try:
            subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no ext4 can be made here: {error}")
        folder = mounted(tmp_path / "small", "-o", "loop", str(image))
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
