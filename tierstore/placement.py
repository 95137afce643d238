"""Chooses homes and sizes tiers. Pure: from counts and capacities to tier names and extents, or to a CapacityError.

A home is room reserved between steps; the extents of a tier that are nobody's home are the pool through which the
other chunks pass, and which keeps as many of them as it can. Naming a tier (a group's `tier` key, a placement rule)
always wins. Without a name, device chunks have their home on the device as far as it has room, the others on nvme as
far as it has room when the order alternates (the cpu tier is then one pool), or in cpu, spread, when it is fixed. A
home is never faster than the tier its chunk is used in. A chunk that has one keeps it unless room must be made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError
from tierstore.units import MIN_CHUNK_BYTES

ENOUGH_EXTENTS = 3
"""Extents, over and above homes, with which any step can be made in a tier that chunks pass through."""
PIPELINE_EXTENTS = 8
"""Extents beyond which a deeper pipeline was measured to gain nothing."""
LINE = ("gpu", "cpu", "nvme")
"""All tiers, fastest first."""
MIB = 1 << 20
LARGEST_CHUNK = 64 * MIB
"""Bytes above which a larger chunk gains nothing."""
UNHURRIED_CHUNK = 16 * MIB
"""Bytes of a chunk beside whose update the time to begin it is small."""


@dataclass(frozen=True, slots=True)
class Need:
    """One chunk looking for a home: the tier it is used in, the one it was told to live in, the home it has (if any).

    The caller guarantees that neither is faster than the tier it is used in.
    """

    compute: str
    named: str | None = None
    home: str | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What a tier has: its extents, and whether chunks may have their home there (not in a mere staging area)."""

    extents: int
    homes: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """What the policy asks of a tier: its extents (None: as many as are needed, up to `limit`).

    `pipeline`: of those needed, how many are for chunks that pass through.
    """

    extents: int | None
    limit: int | None = None
    homes: bool = True
    pipeline: int = PIPELINE_EXTENTS


def size_tiers(needs: Sequence[Need], asked: Mapping[str, Asked], *, order: str) -> dict[str, Room]:
    """Turn `auto` into extents.

    gpu starts with what chunks stream through when another tier can hold them; cpu gets all it is needed for, up to its
    limit; nvme gets what has no room above it.
    """
    rooms = {tier: Room(len(needs) if ask.extents is None else ask.extents, ask.homes) for tier, ask in asked.items()}
    for tier, size in (("gpu", _gpu_extents), ("cpu", _cpu_extents), ("nvme", _nvme_extents)):
        if tier in asked and asked[tier].extents is None:
            rooms[tier] = Room(size(needs, rooms, asked[tier], order), asked[tier].homes)
    return rooms


def with_choice(room: Room, paths: int) -> Room:
    """Add extents to a tier on several paths, so that a chunk on its way there finds some free on the path that suits.

    Each path gets a pipeline's, or a sixteenth of the tier if that is less.
    """
    if paths == 1 or not room.extents:
        return room
    return replace(room, extents=room.extents + paths * min(PIPELINE_EXTENTS, max(1, room.extents // 16)))


def place_homes(needs: Sequence[Need], rooms: Mapping[str, Room], *, order: str, extent_bytes: int) -> list[str]:
    """Choose the home of each chunk, in order. Raises CapacityError with the numbers when there is no room."""
    kept = [need.home for need in needs]
    while True:
        wishes = [
            need if home is None else replace(need, named=need.named or home)
            for need, home in zip(needs, kept, strict=True)
        ]
        homes = _choose_homes(wishes, rooms, order)
        short = _shortages(wishes, homes, rooms)
        if not short:
            return homes
        if not any(kept):
            enough = enough_rooms(wishes, rooms, order)
            raise CapacityError(_complaint(needs, short, rooms, enough, extent_bytes))
        is_any_in_short = not short.keys().isdisjoint(kept)
        kept = [home if is_any_in_short and home not in short else None for home in kept]


def spread(count: int, total: int) -> list[bool]:
    """Mark `count` of `total` places, as evenly as whole numbers allow."""
    return [(number + 1) * count // total > number * count // total for number in range(total)]


def pipeline_needs(needs: Sequence[Need], homes: Sequence[str]) -> dict[str, int]:
    """Extents each tier must have besides its homes, for the chunks that pass through it."""
    passing: Counter[str] = Counter()
    for need, home in zip(needs, homes, strict=True):
        passing.update(LINE[LINE.index(need.compute) : LINE.index(home)])
    return {tier: min(ENOUGH_EXTENTS, count) for tier, count in passing.items()}


def tiers_that_hold(computed_in: Sequence[str], rooms: Mapping[str, Room]) -> set[str]:
    """The tiers that can keep all the chunks that are used in them, and those that have no room further up."""
    holding, overflow = set(), 0
    for tier in LINE[:-1]:
        room, wanted = rooms.get(tier, Room(0, homes=False)), computed_in.count(tier) + overflow
        if room.homes and wanted <= room.extents:
            holding.add(tier)
        overflow = max(0, wanted - room.extents)
    return holding


def auto_chunk_bytes(
    state_bytes: int,
    compute_bytes: int | None,
    *,
    largest: int = LARGEST_CHUNK,
    smallest: int = 1 << 14,
    stays: bool = False,
) -> int:
    """Bytes of a chunk: at most `largest`, at least 16 extents in the tier that computes; a whole number of pages.

    Not below 16 MiB where all state `stays` in that tier: to begin a chunk takes up to 100 us, as caches have been
    swept by the one before, which is what the update of 1 MiB takes.
    """
    available = state_bytes if compute_bytes is None else min(state_bytes, compute_bytes)
    if stays:
        smallest = max(smallest, min(state_bytes * 9 // 8 + 4096, UNHURRIED_CHUNK))
    chunk_bytes = max(smallest, min(largest, available // 16))
    return whole_pages(chunk_bytes)


def even_chunk_bytes(state_bytes: int) -> int:
    """Bytes of the fewest chunks that state of one class fills evenly, with a thirty-second to spare for padding.

    For state that stays where it is used, and so needs no pipeline of extents.
    """
    with_padding = state_bytes + state_bytes // 32
    count = -(-with_padding // LARGEST_CHUNK)
    return whole_pages(-(-with_padding // count) + 2 * MIB - 1)


def whole_pages(chunk_bytes: int) -> int:
    """Round down to what an arena can align: 2 MiB pages for a chunk that large, else 4 KiB."""
    page = 2 * MIB if chunk_bytes >= 2 * MIB else 4096
    return chunk_bytes // page * page


def _gpu_extents(needs: Sequence[Need], rooms: Mapping[str, Room], ask: Asked, order: str) -> int:
    on_device = sum(need.compute == "gpu" for need in needs)
    named = sum(need.named == "gpu" for need in needs)
    if not _has_other_homes(rooms):
        return max(on_device, named, 1)
    return max(1, min(on_device, named + ENOUGH_EXTENTS + 1))


def _cpu_extents(needs: Sequence[Need], rooms: Mapping[str, Room], ask: Asked, order: str) -> int:
    homes = _place_on_device(needs, rooms)
    off_device = sum(home in (None, "cpu") for home in homes)
    passing = sum(home == "nvme" for home in homes)
    wanted = off_device + min(ask.pipeline, passing) if ask.homes else min(ask.pipeline, off_device + passing)
    return max(1, wanted if ask.limit is None else min(wanted, ask.limit))


def _nvme_extents(needs: Sequence[Need], rooms: Mapping[str, Room], ask: Asked, order: str) -> int:
    homes = _place_on_device(needs, rooms)
    off_device = sum(home in (None, "cpu") for home in homes)
    cpu = rooms.get("cpu", Room(0, homes=False))
    if cpu.homes and "nvme" not in homes and off_device <= cpu.extents:
        return 0  # everything fits above
    return _choose_homes(needs, rooms, order).count("nvme")


def _choose_homes(needs: Sequence[Need], rooms: Mapping[str, Room], order: str) -> list[str]:
    homes = _place_on_device(needs, rooms)
    rest = [number for number, home in enumerate(homes) if home is None]
    in_cpu = _cpu_homes(needs, homes, rooms, order)
    last = next((tier for tier in reversed(LINE) if tier in rooms and rooms[tier].homes), "cpu")
    for number, is_cpu in zip(rest, spread(in_cpu, len(rest)), strict=True):
        homes[number] = "cpu" if is_cpu else max(last, needs[number].compute, key=LINE.index)
    return [home for home in homes if home is not None]


def _place_on_device(needs: Sequence[Need], rooms: Mapping[str, Room]) -> list[str | None]:
    """Give device chunks their home on the device: all if they fit, else spread, leaving a pipeline."""
    homes: list[str | None] = [need.named for need in needs]
    if "gpu" not in rooms:
        return homes
    candidates = [n for n, need in enumerate(needs) if need.compute == "gpu" and need.named is None]
    slots = rooms["gpu"].extents - homes.count("gpu")
    is_passed = any(need.compute == "gpu" and need.named not in (None, "gpu") for need in needs)
    if _has_other_homes(rooms) and len(candidates) > slots - (ENOUGH_EXTENTS if is_passed else 0):
        slots -= ENOUGH_EXTENTS
    slots = max(0, min(slots, len(candidates)))
    for number, on_device in zip(candidates, spread(slots, len(candidates)), strict=True):
        homes[number] = "gpu" if on_device else None
    return homes


def _has_other_homes(rooms: Mapping[str, Room]) -> bool:
    return any(room.homes for tier, room in rooms.items() if tier != "gpu")


def _cpu_homes(needs: Sequence[Need], homes: Sequence[str | None], rooms: Mapping[str, Room], order: str) -> int:
    """How many of the chunks without a home yet get it in cpu."""
    rest = homes.count(None)
    cpu = rooms.get("cpu", Room(0, homes=False))
    if not cpu.homes:
        return 0
    if "nvme" not in rooms:
        return rest
    nvme_room = max(0, rooms["nvme"].extents - homes.count("nvme"))
    if order == "alternating":
        return max(0, rest - nvme_room)
    cpu_room = cpu.extents - homes.count("cpu")
    if rest > cpu_room or "nvme" in homes:  # some chunks pass through cpu
        cpu_room -= min(PIPELINE_EXTENTS, max(ENOUGH_EXTENTS, cpu.extents // 2))
    return max(rest - nvme_room, min(rest, max(0, cpu_room)))


def _shortages(needs: Sequence[Need], homes: Sequence[str], rooms: Mapping[str, Room]) -> dict[str, tuple[int, int]]:
    """Tiers with too little room: the homes they should have, and the extents to pass other chunks through."""
    wanted, passing = Counter(homes), pipeline_needs(needs, homes)
    short = {}
    for tier in LINE:
        room = rooms.get(tier, Room(0, homes=False))
        asked = wanted[tier], passing.get(tier, 0)
        if sum(asked) > room.extents or (wanted[tier] and not room.homes):
            short[tier] = asked
    return short


def enough_rooms(needs: Sequence[Need], rooms: Mapping[str, Room], order: str) -> dict[str, Room]:
    """Rooms as these, but where there is too little, as large as they must be."""
    enough = dict(rooms)
    while short := _shortages(needs, _choose_homes(needs, enough, order), enough):
        enough |= {tier: Room(sum(asked)) for tier, asked in short.items()}
    return enough


def _complaint(
    needs: Sequence[Need],
    short: Mapping[str, tuple[int, int]],
    rooms: Mapping[str, Room],
    enough: Mapping[str, Room],
    extent_bytes: int,
) -> str:
    stories = []
    for tier, (wanted, passing) in short.items():
        room = rooms.get(tier, Room(0, homes=False))
        staging = "" if room.homes else " and is for staging only"
        stories.append(
            f"{tier} holds {room.extents} extents of {extent_bytes:,} bytes{staging}, but {wanted} chunks need a home "
            f"there and {passing} more extents are needed to pass others through"
        )
    remedies = [
        f"tiers.{tier}.capacity to at least {room.extents * extent_bytes:,} bytes"
        for tier, room in enough.items()
        if room != rooms.get(tier)
    ]
    named = {need.named for need in needs}
    others = []
    if "nvme" not in rooms and "nvme" not in named:
        others.append("add the nvme tier")
    elif any(passing for _, passing in short.values()) and extent_bytes > MIN_CHUNK_BYTES:
        others.append("lower chunk_size")
    if "nvme" in rooms and named & (short.keys() - {"nvme"}):
        others.append("name those tiers for fewer parameters (placement, or a group's tier)")
    return ", or ".join([f"{'; '.join(stories)}: raise {' and '.join(remedies)}", *others])
