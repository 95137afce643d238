"""Bytes that tell where they belong: moved bytes are compared with what they must be, all of them.

A block of memory is filled from its number: random words that all blocks share, and in each page of 4 KiB a stamp made
of number and page. A block, or a page of it, that ended in another place, came back old, or not at all, is found.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_PAGE_WORDS = 512  # int64 words in 4 KiB
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


class VerificationError(AssertionError):
    """Bytes are not what was moved: whatever was measured is worth nothing."""


def fill(block: Tensor, number: int) -> None:
    """Fill a uint8 tensor of whole words with the pattern of block `number`, on whatever device it is."""
    words = block.view(torch.int64)
    words.copy_(_noise(words.numel()))
    words[::_PAGE_WORDS] = _stamps(words.numel(), number).to(words.device)


def verify(block: Tensor, number: int, what: str) -> int:
    """Answer the bytes of a block that was verified. Raises VerificationError, which says `what` was moved.

    For speed the stamps are taken out of the block and put back: nobody else may use it meanwhile.
    """
    words = block.view(torch.int64)
    if words.device.type != "cpu":
        words = words.cpu()
    noise, stamps = _noise(words.numel()), words[::_PAGE_WORDS].clone()
    words[::_PAGE_WORDS] = noise[::_PAGE_WORDS]
    is_right = torch.equal(stamps, _stamps(words.numel(), number)) and torch.equal(words, noise)
    words[::_PAGE_WORDS] = stamps
    if not is_right:
        expected = noise.clone()
        expected[::_PAGE_WORDS] = _stamps(words.numel(), number)
        wrong = int((words != expected).nonzero()[0]) * 8
        raise VerificationError(f"{what}: block {number} differs from byte {wrong} of {block.numel()} on")
    return block.numel()


@functools.lru_cache(maxsize=2)
def _noise(words: int) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    page = torch.randint(-(2**62), 2**62, (min(words, 1 << 14),), generator=generator)
    return page.repeat(-(-words // page.numel()))[:words]


def _stamps(words: int, number: int) -> Tensor:
    pages = -(-words // _PAGE_WORDS)
    return (torch.arange(pages) + number * (1 << 24) + 1) * _MULTIPLIER
