"""What binding will make of parameters, before anything is reserved: their classes, their chunks, and room for these.

Cuts parameters as the policy says and this machine can carry it out. It holds no state and opens nothing, so that a
constructor can find out whether all will fit; what is drawn is built by `binding`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.build import Parts, Plant, plan_plant
from tierstore.errors import CapacityError, PolicyError
from tierstore.layout import ChunkClass, Layout, ParameterSpec, make_layout
from tierstore.members import Member, local_of, refuse_shared_memory
from tierstore.placement import Room, tiers_that_hold
from tierstore.policy import TierPolicy
from tierstore.pressure import host_memory
from tierstore.records import may_be_split, record_fields, state_fields
from tierstore.store import ChunkInfo


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What binding will make, before anything is reserved."""

    plant: Plant
    specs: Sequence[ParameterSpec]
    layout: Layout
    infos: dict[int, ChunkInfo]
    chunk_bytes: int

    def tuned(self) -> Blueprint:
        """The same for what is `auto` set by the machine's rates, which may be measured now; itself if little moves."""
        plant = self.plant.tuned(list(self.infos.values()), self.chunk_bytes)
        return self if plant is self.plant else _cut(plant, self.specs)

    def rooms(self) -> dict[str, Room]:
        """Extents of each tier. Raises CapacityError if not all chunks find a home."""
        return self.plant.rooms(list(self.infos.values()), self.chunk_bytes)

    def classes_that_move(self) -> set[ChunkClass]:
        """Those that have chunks which cannot all stay, between steps, in the tier that they are computed in.

        All of them if there is too little room even so.
        """
        classes = {chunk.cls for chunk in self.layout.chunks}
        try:
            rooms = self.rooms()
        except CapacityError:
            return classes
        staying = tiers_that_hold([info.compute for info in self.infos.values()], rooms)
        return {cls for cls in classes if cls.compute not in (cls.named, *staying)}

    def check_fits(self, *, is_first: bool) -> None:
        """Check that all chunks find a home, and that the disks have the bytes for it. Reserves nothing.

        A binding that is not the first takes over the space of the files before it, so disks are not looked at.
        Raises CapacityError, SwapError or DiskFullError.
        """
        rooms = self.rooms()
        if is_first:
            self.plant.check_disk(rooms, self.chunk_bytes)


def draw(members: Sequence[Member], groups: Sequence[Mapping[str, Any]], policy: TierPolicy, parts: Parts) -> Blueprint:
    """Cut the parameters into chunks under the policy. Raises PolicyError for rules that cannot be followed.

    `state.master: auto` splits the masters whose chunks would, were they whole, move from step to step.
    """
    refuse_shared_memory([member for member in members if member.is_covered])
    plant = plan_plant(policy, [local_of(member.parameter).device for member in members if member.is_covered], parts)
    candidates = {position for position, member in enumerate(members) if member.is_covered and may_be_split(member)}
    if not candidates or policy.state.master not in ("auto", "split"):
        return _draw(members, groups, plant)
    if policy.state.master == "auto":
        whole = _draw(members, groups, plant)
        moving = whole.classes_that_move()
        candidates = {at for at in candidates if any(chunk.cls in moving for chunk, _ in whole.layout.spans_of[at])}
        if not candidates:
            return whole
    return _draw(members, groups, plant, candidates)


def beyond_memory(plant: Plant) -> tuple[int, int] | None:
    """The capacity given to the cpu tier and the memory there is for it, if that is less; in bytes, of this process."""
    cpu, memory = plant.policy.tiers.cpu, host_memory()
    there_is = min(memory.total_bytes, memory.limit_bytes or memory.total_bytes) // plant.parts.ranks()
    if cpu is None or not isinstance(cpu.capacity, int) or cpu.capacity <= there_is:
        return None
    return cpu.capacity, there_is


def _draw(
    members: Sequence[Member], groups: Sequence[Mapping[str, Any]], plant: Plant, split: Collection[int] = ()
) -> Blueprint:
    """Find each parameter's class, and cut; those at the positions in `split` have split masters."""
    policy, specs = plant.policy, []
    for position, member in enumerate(members):
        local = local_of(member.parameter)
        fields = state_fields(member, policy.state) if member.is_covered else ()
        fields = record_fields(fields, is_split=position in split)
        compute = plant.compute_tier(local.device)
        named = _named_tier(member, groups[member.group], policy, plant.names, compute) if fields else None
        cls = ChunkClass(local.dtype, str(local.device), fields, compute, named)
        specs.append(ParameterSpec(member.name, member.group, local.numel() if fields else 0, cls))
    return _cut(plant, specs)


def _cut(plant: Plant, specs: Sequence[ParameterSpec]) -> Blueprint:
    """Cut parameters into chunks of the size that suits the plant."""
    state_bytes = sum(spec.cls.bytes_of(spec.elements) for spec in specs)
    largest_element = max((spec.cls.bytes_of(1) for spec in specs), default=0)
    classes = {spec.cls for spec in specs}
    may_stay = all(cls.named in (None, cls.compute) for cls in classes)
    chunk_bytes = plant.chunk_bytes(state_bytes, largest_element, classes=len(classes) if may_stay else None)
    try:
        layout = make_layout(specs, chunk_bytes)
    except ValueError as error:
        raise PolicyError(f"chunk_size: {error}") from error
    infos = {chunk.number: ChunkInfo(chunk.record_bytes, chunk.cls.compute, chunk.cls.named) for chunk in layout.chunks}
    return Blueprint(plant, specs, layout, infos, chunk_bytes)


def _named_tier(
    member: Member, group: Mapping[str, Any], policy: TierPolicy, names: Sequence[str], compute: str
) -> str | None:
    """The tier a parameter was told to live in: its group's `tier` key, else the first rule that matches its name."""
    tier: str | None = group.get("tier")
    if tier is None:
        tier = next((rule.tier for rule in policy.placement if rule.matches(member.name)), None)
    if tier is None or (tier == "gpu" and "gpu" not in names and "gpu" in policy.tiers.names):
        return None  # the gpu tier was left out, with a warning
    if tier not in names:
        raise PolicyError(f"parameter {member.name}: tier {tier!r} is not among the tiers in use ({', '.join(names)})")
    if tier == "gpu" and compute == "cpu":
        raise PolicyError(
            f"parameter {member.name}: its update is computed on the cpu, so its state cannot live in the gpu tier: "
            f"take the `tier` key or the placement rule away, or set compute: device"
        )
    return tier
