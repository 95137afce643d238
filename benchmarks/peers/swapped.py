"""State swapped by hand, parameter by parameter: `torch.save` and `torch.load`, and tensors mapped from files.

Both go through the page cache, which is host memory that no budget counts. Unless `page_cache` is given they therefore
write every parameter's pages out and drop them before they go on, as somebody must whose memory is really full; with
it, the machine may keep all of them, which is the fair figure for who has memory to spare (and need not swap).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.systems import Job, System, made_parameters
from benchmarks.peers.work import fresh_fields, fused_adamw


class Swapped(System):
    """What both have in common: state of one parameter at a time in memory, taken from a file of its own."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._keeps_pages: bool = job.options.get("page_cache", False)
        self.parameters = made_parameters(job.work, self.gradients)
        self._files = [job.folder / f"{layer}.state" for layer in range(job.work.layers)]
        self._steps = 0
        for parameter, file in zip(self.parameters, self._files, strict=True):
            self._create(file, fresh_fields(parameter, job.work.has_master))

    def step(self) -> None:
        """Take, update and put back the state of one parameter after the other."""
        self._steps += 1
        for parameter, file in zip(self.parameters, self._files, strict=True):
            assert parameter.grad is not None
            self._update(file, parameter, parameter.grad)

    def settle(self) -> None:
        """Write what the page cache still holds."""
        for file in self._files if self._keeps_pages else ():
            _write_out(file)

    def described(self) -> dict[str, Any]:
        """Tell whether pages are kept; one parameter's state and its float32 gradient are held at a time."""
        work = self.work
        held = (work.state_bytes + 4 * work.numel) // work.layers
        return {"page_cache": self._keeps_pages, "optimizer_bytes": held}

    def close(self) -> None:
        """Remove the files, as a careful script would."""
        for file in self._files:
            file.unlink()

    def _create(self, file: Path, fields: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _update(self, file: Path, parameter: Tensor, gradient: Tensor) -> None:
        raise NotImplementedError

    def _drop_pages(self, file: Path) -> None:
        if not self._keeps_pages:
            _write_out(file, drop=True)


class Saved(Swapped):
    """`torch.load`, update, `torch.save`."""

    def _create(self, file: Path, fields: dict[str, Tensor]) -> None:
        torch.save(fields, file)
        self._drop_pages(file)

    def _update(self, file: Path, parameter: Tensor, gradient: Tensor) -> None:
        fields = torch.load(file, map_location=parameter.device)
        fused_adamw(parameter, gradient, fields, self._steps)
        self._create(file, fields)


class Mapped(Swapped):
    """Tensors of `torch.from_file`: one shared mapping per parameter, all fields one after the other."""

    def __init__(self, job: Job) -> None:
        self._maps: dict[Path, Tensor] = {}
        super().__init__(job)

    def close(self) -> None:
        """Unmap, then remove the files."""
        self._maps.clear()
        super().close()

    def _create(self, file: Path, fields: dict[str, Tensor]) -> None:
        numel = sum(field.numel() for field in fields.values())
        whole = self._maps[file] = torch.from_file(str(file), shared=True, size=numel, dtype=torch.float32)
        torch.cat([field.flatten().cpu() for field in fields.values()], out=whole)
        self._drop_mapped(file)

    def _update(self, file: Path, parameter: Tensor, gradient: Tensor) -> None:
        names = ["master"] * self.work.has_master + ["exp_avg", "exp_avg_sq"]
        mapped = dict(zip(names, self._maps[file].view(len(names), -1), strict=True))
        fields = {name: field.view_as(parameter).to(parameter.device) for name, field in mapped.items()}
        fused_adamw(parameter, gradient, fields, self._steps)
        if parameter.device.type != "cpu":
            for name, field in mapped.items():
                field.copy_(fields[name].flatten())
        self._drop_mapped(file)

    def _drop_mapped(self, file: Path) -> None:
        """Write the pages out, unmap them, drop them: a page that is still mapped stays in the cache."""
        if self._keeps_pages:
            return
        whole = self._maps[file]
        page = mmap.PAGESIZE
        begin = whole.data_ptr() // page * page
        length = whole.data_ptr() + whole.nbytes - begin
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        self._drop_pages(file)


def _write_out(file: Path, *, drop: bool = False) -> None:
    """Write a file's dirty pages; `drop` takes them out of the page cache too."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
