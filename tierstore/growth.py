"""How large tiers without a given capacity must become for one more chunk. Pure: from counts to counts.

A store whose chunks come one by one starts with nothing in such tiers and grows them slab by slab: memory first, up to
its limit, then files by no more than is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tierstore.errors import CapacityError
from tierstore.layout import HUGE_PAGE
from tierstore.placement import Asked, Need, Room, place_homes, size_tiers

SLABS_PER_TIER = 16
"""A tier is reserved, and later given back, in about so many pieces."""
LEAST_MEMORY_SLAB_BYTES = 16 << 20
"""All but the end of such a slab lies on huge pages. Of memory on small ones a disk reads and writes a third less."""


def slab_extents_of(extents: int, paths: int = 1) -> int:
    """Extents in a slab of a tier of so many, over so many paths."""
    return max(1, extents // (SLABS_PER_TIER * paths))


def slab_extents_of_memory(extents: int, extent_bytes: int) -> int:
    """As `slab_extents_of`, but of a small tier slabs of up to half of it, if huge pages fit in."""
    least_bytes = min(LEAST_MEMORY_SLAB_BYTES, extents * extent_bytes // 2)
    least = -(-least_bytes // extent_bytes) if least_bytes >= HUGE_PAGE else 1
    return max(least, slab_extents_of(extents))


def grow_to_fit(
    needs: Sequence[Need],
    rooms: Mapping[str, Room],
    growing: Mapping[str, Asked],
    slab_extents: Mapping[str, int],
    *,
    order: str,
    extent_bytes: int,
) -> dict[str, Room]:
    """Answer rooms in which every chunk finds a home: those there are, or larger ones for tiers that are `growing`.

    Raises CapacityError when that cannot be.
    """
    asked = {tier: growing.get(tier, Asked(room.extents, homes=room.homes)) for tier, room in rooms.items()}
    wanted = size_tiers(needs, asked, order=order)
    grown = dict(rooms)
    for tier in growing.keys() - {"nvme"}:
        grown[tier] = _at_least(rooms[tier], wanted[tier].extents, slab_extents[tier], growing[tier].limit)
    if "nvme" in growing:
        return with_enough_nvme(needs, grown, slab_extents["nvme"], order, extent_bytes)
    place_homes(needs, grown, order=order, extent_bytes=extent_bytes)
    return grown


def _at_least(room: Room, extents: int, slab: int, limit: int | None) -> Room:
    """Enlarge by whole slabs, the last of which the limit may cut."""
    missing = max(0, extents - room.extents)
    enough = room.extents + -(-missing // slab) * slab
    return replace(room, extents=max(room.extents, enough if limit is None else min(enough, limit)))


def with_enough_nvme(
    needs: Sequence[Need], rooms: Mapping[str, Room], slab: int, order: str, extent_bytes: int
) -> dict[str, Room]:
    """Enlarge nvme by as few slabs as will do. More room there never leaves less elsewhere, once chunks pass at all."""
    in_memory = sum(room.extents for tier, room in rooms.items() if tier != "nvme" and room.homes)
    least = _at_least(rooms["nvme"], len(needs) - in_memory, slab, None).extents

    def grown_by(slabs: int) -> dict[str, Room]:
        grown = {**rooms, "nvme": replace(rooms["nvme"], extents=least + slabs * slab)}
        place_homes(needs, grown, order=order, extent_bytes=extent_bytes)
        return grown

    few, enough = -1, max(0, -(-(len(needs) + 1 - least) // slab))
    grown = grown_by(enough)
    while enough - few > 1:  # `few` are too few, and `enough` are enough
        middle = (few + enough) // 2
        try:
            grown = grown_by(middle)
        except CapacityError:
            few = middle
        else:
            enough = middle
    return grown
