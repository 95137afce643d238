"""How large memory tiers are to be under the pressure that was measured. Pure: from values to a plan, printable.

Pressure is how full the machine, the container or the device is, whoever fills it; never how full a tier is. Over a
tier's high watermark it gives back what leads down to the low one, under the low one it takes what leads up to that,
and between the two nothing happens: whatever swings less than their distance moves nothing. At once no more than a
part of all chunks moves. A tier gives whole slabs, and keeps what a step needs; what it was home to goes further down,
to files that grow for it where they may.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tierstore.errors import CapacityError
from tierstore.growth import with_enough_nvme
from tierstore.placement import ENOUGH_EXTENTS, LINE, PIPELINE_EXTENTS, Need, Room, enough_rooms, place_homes
from tierstore.stats import Pressure

STALL_PERCENT = 10.0
"""Of the last ten seconds: where tasks wait for memory so long, it is too full above the low watermark already."""

PART_AT_ONCE, LEAST_AT_ONCE = 8, 8
"""At once an eighth of all chunks may have to move, or so many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What binds a memory tier: watermarks, as shares; the extents it may have; its slabs, the newest first.

    `grows_by`: extents of a new slab. `untouched_bytes` of it are reserved but not yet taken from the machine.
    """

    high: float
    low: float
    most: int
    slabs: tuple[int, ...]
    grows_by: int
    untouched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """One tier's size in extents, before and after, and why. The same twice: it should be smaller, but cannot be."""

    tier: str
    before: int
    after: int
    reason: str

    def __str__(self) -> str:
        if self.after == self.before:
            return f"{self.tier} stays: {self.before:,} extents; {self.reason}"
        verb = "shrinks" if self.after < self.before else "grows"
        return f"{self.tier} {verb}: {self.before:,} -> {self.after:,} extents; {self.reason}"


@dataclass(frozen=True, slots=True)
class Rebalance:
    """What is to be changed: sizes of tiers, and every chunk's home in these. Nothing where there are no changes."""

    changes: tuple[Change, ...]
    homes: Mapping[int, str]

    @property
    def sizes(self) -> dict[str, int]:
        """The tiers that change, and the extents they get."""
        return {change.tier: change.after for change in self.changes if change.after != change.before}

    def __str__(self) -> str:
        return "\n".join(map(str, self.changes)) or "nothing changes"


@dataclass(frozen=True, slots=True)
class Holdings:
    """A store as planning sees it: its chunks, the room of its tiers, and how many extents slower ones may grow by for
    what has to leave faster ones: files by `spare`, the cpu tier by `spare_memory`.
    """

    needs: Mapping[int, Need]
    rooms: Mapping[str, Room]
    limits: Mapping[str, Limits]
    order: str
    extent_bytes: int
    spare: int = 0
    spare_memory: int = 0

    def extents(self, tier: str) -> int:
        """How large a tier is, 0 if it has not joined."""
        return self.rooms[tier].extents if tier in self.rooms else 0

    @property
    def most_at_once(self) -> int:
        """Chunks that may have to move at once."""
        return max(LEAST_AT_ONCE, len(self.needs) // PART_AT_ONCE)

    def homes_in(self, rooms: Mapping[str, Room], *, anew: Sequence[str] = ()) -> dict[int, str]:
        """Each chunk's home in other rooms; it keeps the one it has where it can, except in the tiers `anew`."""
        needs = [replace(need, home=None) if need.home in anew else need for need in self.needs.values()]
        homes = place_homes(needs, rooms, order=self.order, extent_bytes=self.extent_bytes)
        return dict(zip(self.needs, homes, strict=True))


def is_over(pressure: Pressure, limits: Limits) -> bool:
    """Whether a tier must give: over its high watermark, or over the low one where tasks wait for memory."""
    return pressure.share > (limits.low if _stalls(pressure) else limits.high)


def is_under(pressure: Pressure, limits: Limits) -> bool:
    """Whether a tier may take."""
    return pressure.share < limits.low and not _stalls(pressure)


def is_called_for(
    pressure: Mapping[str, Pressure], limits: Mapping[str, Limits], sizes: Mapping[str, int], *, may_grow: bool
) -> bool:
    """Whether anything may have to change; cheap, as it is asked at every step."""
    return any(
        (is_over(pressure[tier], limits[tier]) and sizes[tier] > ENOUGH_EXTENTS)
        or (may_grow and sizes[tier] < limits[tier].most and is_under(pressure[tier], limits[tier]))
        for tier in limits.keys() & pressure.keys()
    )


def plan_rebalance(
    holdings: Holdings, pressure: Mapping[str, Pressure], *, processes: int = 1, may_grow: bool = True
) -> Rebalance:
    """Plan what the pressure asks of each tier, the fastest first. `processes` on this machine all see it and do so."""
    changes: list[Change] = []
    homes = {chunk: need.home for chunk, need in holdings.needs.items() if need.home is not None}
    for tier in ("gpu", "cpu"):
        if tier not in holdings.limits or tier not in pressure:
            continue
        now, limits = pressure[tier], holdings.limits[tier]
        sharing = processes if tier == "cpu" else 1  # a device is one process's own
        distance = int(now.used_bytes - limits.low * now.total_bytes)
        if is_over(now, limits):
            wanted = -(-distance // sharing // holdings.extent_bytes)
            extents = sum(_newest(limits.slabs, wanted, holdings.most_at_once))
            done = plan_giving(holdings, tier, extents, _over(now, limits), at_least=1)
        elif is_under(now, limits) and may_grow:
            spare = -distance // sharing - limits.untouched_bytes
            done = _plan_taking(holdings, tier, spare // holdings.extent_bytes, _under(now, limits))
        else:
            continue
        changes += done.changes
        homes |= done.homes
        holdings = _after(holdings, done)
    return Rebalance(tuple(changes), homes)


def plan_giving(holdings: Holdings, tier: str, extents: int, reason: str, *, at_least: int | None = None) -> Rebalance:
    """Plan to make a tier smaller by so many extents, or by the next whole slabs.

    With `at_least`, by fewer where not all can be spared, and by none where not so many can. Without it, raises
    CapacityError if they cannot all be given.
    """
    room, slabs = holdings.rooms[tier], _newest(holdings.limits[tier].slabs, extents)
    if at_least is None and sum(slabs) < extents:
        raise CapacityError(
            f"tier {tier} has {room.extents:,} extents of {holdings.extent_bytes:,} bytes, and {extents:,} are "
            f"asked for"
        )
    while slabs:
        target = room.extents - sum(slabs)
        try:
            return _in_rooms(holdings, {**holdings.rooms, tier: replace(room, extents=target)}, tier, reason)
        except CapacityError:
            if at_least is None:
                raise
            slabs.pop()
            if sum(slabs) < at_least:
                break
    return Rebalance((Change(tier, room.extents, room.extents, f"{reason}, but what is left is needed"),), {})


def plan_size(holdings: Holdings, tier: str, extents: int, reason: str) -> Rebalance:
    """Plan to give a tier a size. Raises CapacityError if homes and pipelines would not fit."""
    room = holdings.rooms[tier]
    rooms = {**holdings.rooms, tier: replace(room, extents=extents)}
    if extents <= room.extents:
        return _in_rooms(holdings, rooms, tier, reason)
    return Rebalance(_changes(holdings, rooms, tier, reason), holdings.homes_in(rooms, anew=_slower(rooms, tier)))


def _slower(rooms: Mapping[str, Room], tier: str) -> list[str]:
    return [name for name in LINE[LINE.index(tier) + 1 :] if name in rooms]


def _in_rooms(holdings: Holdings, rooms: Mapping[str, Room], tier: str, reason: str) -> Rebalance:
    """Find homes with a tier made smaller: in what room there is, else in slower tiers that grow as far as they may."""
    try:
        return Rebalance(_changes(holdings, rooms, tier, reason), holdings.homes_in(rooms))
    except CapacityError as error:
        for asked in _larger(holdings, rooms, tier):
            with contextlib.suppress(CapacityError):
                grown = with_enough_nvme(list(holdings.needs.values()), asked, 1, holdings.order, holdings.extent_bytes)
                if grown["nvme"].extents - holdings.extents("nvme") <= holdings.spare:
                    return Rebalance(
                        _changes(holdings, {**grown, tier: rooms[tier]}, tier, reason), holdings.homes_in(grown)
                    )
        if tier == "nvme" or holdings.spare + holdings.spare_memory <= 0:
            raise
        raise CapacityError(
            f"{error} (files may grow by {holdings.spare:,} extents for what leaves {tier}, and the cpu tier by "
            f"{holdings.spare_memory:,})"
        ) from error


def _larger(holdings: Holdings, rooms: Mapping[str, Room], tier: str) -> Iterator[dict[str, Room]]:
    """Rooms to try with as many files as it takes: memory as large as it takes, or enough of it to pass through.

    First with the pipeline in the tier that is measured to gain most.
    """
    if tier == "nvme":
        return
    tried = {"nvme": Room(0), **rooms}
    if tier == "gpu" and "cpu" in rooms and holdings.spare_memory > 0:
        enough = enough_rooms(list(holdings.needs.values()), tried, holdings.order)
        if 0 < enough["cpu"].extents - rooms["cpu"].extents <= holdings.spare_memory:
            yield {**tried, "cpu": replace(rooms["cpu"], extents=enough["cpu"].extents)}
        passed = max(rooms["cpu"].extents, min(PIPELINE_EXTENTS, rooms["cpu"].extents + holdings.spare_memory))
        tried["cpu"] = replace(rooms["cpu"], extents=passed)
    smaller = rooms[tier].extents - (PIPELINE_EXTENTS - ENOUGH_EXTENTS)
    if smaller >= ENOUGH_EXTENTS:
        yield {**tried, tier: replace(rooms[tier], extents=smaller)}
    yield tried


def _plan_taking(holdings: Holdings, tier: str, extents: int, reason: str) -> Rebalance:
    room, limits = holdings.rooms[tier], holdings.limits[tier]
    missing = limits.most - room.extents
    extents = min(extents, missing, max(holdings.most_at_once, limits.grows_by))
    if extents < missing:
        extents = extents // limits.grows_by * limits.grows_by
    if extents <= 0:
        return Rebalance((), {})
    return plan_size(holdings, tier, room.extents + extents, reason)


def _changes(holdings: Holdings, rooms: Mapping[str, Room], tier: str, reason: str) -> tuple[Change, ...]:
    """The change of a tier, and those of slower ones that grow for it."""
    others = [name for name in rooms if name != tier and rooms[name].extents != holdings.extents(name)]
    because = f"for chunks that leave {tier}"
    return (
        Change(tier, holdings.extents(tier), rooms[tier].extents, reason),
        *(Change(name, holdings.extents(name), rooms[name].extents, because) for name in others),
    )


def _after(holdings: Holdings, done: Rebalance) -> Holdings:
    """The holdings once a plan has been carried out."""
    rooms = dict(holdings.rooms)
    for tier, extents in done.sizes.items():
        rooms[tier] = replace(rooms.get(tier, Room(0)), extents=extents)
    needs = {chunk: replace(need, home=done.homes.get(chunk, need.home)) for chunk, need in holdings.needs.items()}
    after = replace(holdings, rooms=rooms, needs=needs)
    files, memory = (after.extents(name) - holdings.extents(name) for name in ("nvme", "cpu"))
    return replace(after, spare=holdings.spare - files, spare_memory=max(0, holdings.spare_memory - memory))


def _newest(slabs: Sequence[int], extents: int, most: float = math.inf) -> list[int]:
    """The newest slabs that have so many extents together, or all; those beyond `most` left out, but not the first."""
    chosen: list[int] = []
    for slab in slabs:
        given = sum(chosen)
        if given >= extents or (given and given + slab > most):
            break
        chosen.append(slab)
    return chosen


def _stalls(pressure: Pressure) -> bool:
    return pressure.stall_percent is not None and pressure.stall_percent >= STALL_PERCENT


def _over(pressure: Pressure, limits: Limits) -> str:
    if not _stalls(pressure):
        return f"{_told(pressure)}, over the high watermark of {limits.high:.0%}"
    waits = f"tasks wait for memory {pressure.stall_percent:.0f} % of the time"
    return f"{_told(pressure)}, over the low watermark of {limits.low:.0%}, and {waits}"


def _under(pressure: Pressure, limits: Limits) -> str:
    return f"{_told(pressure)}, under the low watermark of {limits.low:.0%}"


def _told(pressure: Pressure) -> str:
    return (
        f"{pressure.used_bytes:,} of {pressure.total_bytes:,} bytes are used ({pressure.share:.0%}; {pressure.source})"
    )
