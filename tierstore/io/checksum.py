"""The checksum of bytes in memory: xxh3, 64 bits, from the package `xxhash`, which releases the interpreter's lock."""

from __future__ import annotations

from collections.abc import Iterable


def checksum(view: memoryview) -> int:
    """Add up bytes. One flipped bit, or other bytes altogether, go unnoticed once in 2^64 times."""
    import xxhash

    return xxhash.xxh3_64_intdigest(view)


def checksum_of_parts(views: Iterable[memoryview]) -> int:
    """Add up bytes that come in parts; the same as `checksum` of all of them."""
    import xxhash

    found = xxhash.xxh3_64()
    for view in views:
        found.update(view)
    return found.intdigest()
