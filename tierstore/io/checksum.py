"""The checksum of swapped bytes: xxh3, 64 bits, from the package `xxhash`, which releases the interpreter's lock."""

from __future__ import annotations


def checksum(view: memoryview) -> int:
    """Add up bytes. One flipped bit, or other bytes altogether, go unnoticed once in 2^64 times."""
    import xxhash

    return xxhash.xxh3_64_intdigest(view)
