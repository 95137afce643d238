"""What a policy comes to for given parameters: where state will live, whether it fits, what a step will cost.

It is drawn by the very code that binds (`blueprint`, `build`, `placement`), and its moves are those of the planner that
a step uses, so that a binding of the same parameters reserves and moves the same bytes. Nothing is reserved; parameters
may lie on the meta device, and be more than any machine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tierstore.beside import by_arrival
from tierstore.blueprint import Blueprint, draw
from tierstore.build import TUNED_ABOVE_BYTES, Plant, plan_plant
from tierstore.errors import CapacityError, SwapError
from tierstore.folders import swap_folders
from tierstore.forecast.answer import Endurance, Forecast, TierForecast
from tierstore.forecast.host import host_forecast
from tierstore.forecast.machine import beyond_this_machine, check_this_disk, planned_parts, with_folders
from tierstore.forecast.pace import Link, StepForecast, step_forecast
from tierstore.forecast.parameters import ForecastError
from tierstore.forecast.question import Question
from tierstore.forecast.speeds import DiskSpeed, Speed, UpdateSpeeds, disk_speed, link_speed, rates_of
from tierstore.forecast.steady import Chunks, Moved, steady_step
from tierstore.layout import ChunkClass
from tierstore.members import Member, local_of
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.rates import Rates
from tierstore.records import state_fields

MOST_CHUNKS = 1 << 20
"""Beyond which a plan would take minutes."""
DAY_SECONDS = 86_400


def forecast(question: Question, source: TierPolicy) -> Forecast:
    """Answer for one policy, without looking for remedies. Raises PolicyError, SwapError or ForecastError."""
    policy, warnings = with_folders(source)
    blueprint, rooms, why = _drawn(question, policy)
    plant, infos = blueprint.plant, list(blueprint.infos.values())
    warnings += beyond_this_machine(plant, rooms, blueprint.chunk_bytes)
    warnings += _rules_without_parameters(policy, question.members)
    homes: list[str] = []
    moved: Moved | None = None
    if why is None:
        homes = plant.homes(infos, rooms, blueprint.chunk_bytes)
        try:
            moved = _steady(blueprint, rooms, homes)
        except CapacityError as error:
            why = str(error)
    rates = rates_of(plant)
    warnings += rates.notes if question.calibrate else _may_be_tuned(blueprint, homes, rates)
    step = None if moved is None else _step(question, blueprint, moved, rates)
    answer = Forecast(
        params=sum(member.parameter.numel() for member in question.members),
        dtypes=_dtypes(question.members),
        parameter_bytes=_bytes_of(question.members),
        gradient_bytes=_bytes_of([member for member in question.members if member.parameter.requires_grad]),
        state=_state(blueprint),
        record_bytes=sum(info.record_bytes for info in infos),
        chunk_bytes=blueprint.chunk_bytes,
        chunks=len(infos),
        order=plant.order,
        update=policy.update,
        ranks=plant.parts.ranks(),
        tiers=_tiers(blueprint, rooms, Counter(homes), {} if moved is None else moved.resting),
        host=host_forecast(question, blueprint, rooms),
        fits=why is None,
        why_not=why,
        remedies=(),
        moved={} if moved is None else {f"{source}->{to}": n for (source, to), n in moved.bytes.items()},
        step=step,
        endurance=None,
        warnings=tuple(warnings),
    )
    return replace(answer, endurance=_endurance(question, answer, plant))


def why_not(question: Question, source: TierPolicy, *, is_tuned: bool = True) -> str | None:
    """Why state does not fit a policy; None if it does, as far as room goes. `is_tuned`: with chunks as rates ask."""
    return _drawn(question, with_folders(source)[0], is_tuned=is_tuned)[2]


def _drawn(
    question: Question, policy: TierPolicy, *, is_tuned: bool = True
) -> tuple[Blueprint, dict[str, Room], str | None]:
    """What binding would draw, its rooms, and why there is too little of them, if there is."""
    devices = [local_of(member.parameter).device for member in question.covered]
    parts = planned_parts(policy, devices, question.ranks, measure=question.calibrate)
    _refuse_too_many(question, plan_plant(policy, devices, parts))
    blueprint = draw(question.members, question.groups, policy, parts)
    try:
        blueprint = blueprint.tuned() if is_tuned else blueprint
        rooms = blueprint.rooms()
        check_this_disk(blueprint.plant, rooms, blueprint.chunk_bytes)
    except (CapacityError, SwapError) as error:
        rooms = blueprint.plant.sizes(list(blueprint.infos.values()), blueprint.chunk_bytes)
        return blueprint, rooms, str(getattr(error, "strerror", None) or error)
    return blueprint, rooms, None


def _refuse_too_many(question: Question, plant: Plant) -> None:
    """Raise ForecastError where there would be so many chunks that nobody would wait for the plan."""
    per_element = [sum(f.dtype.itemsize for f in state_fields(m, plant.policy.state)) for m in question.covered]
    state = sum(m.form.numel() * nbytes for m, nbytes in zip(question.covered, per_element, strict=True))
    chunk_bytes = plant.chunk_bytes(state, max(per_element, default=0), classes=1)
    if state // chunk_bytes > MOST_CHUNKS:
        raise ForecastError(
            f"{state:,} bytes of state are {state // chunk_bytes:,} chunks of {chunk_bytes:,} bytes, more than the "
            f"{MOST_CHUNKS:,} that can be planned: raise chunk_size, and the capacity of the tier that computes to 16 "
            f"times as much, or plan for fewer parameters"
        )


def _steady(blueprint: Blueprint, rooms: Mapping[str, Room], homes: Sequence[str]) -> Moved:
    """What a steady step moves. Raises CapacityError if the planner finds no way."""
    layout, plant = blueprint.layout, blueprint.plant
    order: Iterable[int] = range(len(layout.chunks))
    if plant.policy.update == "backward":  # gradients arrive from the last parameter to the first
        order = by_arrival(layout, {position: -position for position in range(len(blueprint.specs))})
    infos = blueprint.infos
    numbered = [(infos[number], homes[number]) for number in order]
    chunks = Chunks(
        [info.record_bytes for info, _ in numbered],
        [info.compute for info, _ in numbered],
        [home for _, home in numbered],
    )
    line = [name for name, room in rooms.items() if name != "nvme" or room.extents]
    room = {name: rooms[name].extents for name in line}
    return steady_step(chunks, room, line, alternates=plant.order == "alternating")


def _may_be_tuned(blueprint: Blueprint, homes: Sequence[str], rates: Rates) -> list[str]:
    """A warning where the first step would measure this machine, and choose by what it finds."""
    plant, nvme = blueprint.plant, blueprint.plant.policy.tiers.nvme
    is_here = nvme is not None and all(folder.is_dir() for folder in swap_folders(nvme.paths))
    nbytes = sum(
        info.record_bytes for info, home in zip(blueprint.infos.values(), homes, strict=False) if home == "nvme"
    )
    if not is_here or rates.paths or plant.policy.chunk_size != "auto" or nbytes <= TUNED_ABOVE_BYTES:
        return []
    return [
        "the swap folders were never measured: the first step will, and may choose another chunk_size (--calibrate)"
    ]


def _step(question: Question, blueprint: Blueprint, moved: Moved, rates: Rates) -> StepForecast:
    plant = blueprint.plant
    speeds = UpdateSpeeds(question.kind, plant, question.given, rates, measure=question.calibrate)
    elements: Counter[ChunkClass] = Counter()
    for chunk in blueprint.layout.chunks:
        elements[chunk.cls] += sum(span.length for span in chunk.spans)
    by_class = [(count, *speeds.of(cls)) for cls, count in elements.items()]
    return step_forecast(
        _links(plant, moved, disk_speed(question.given, plant, rates), link_speed(question.given, plant, rates)),
        every_core_seconds=sum(count / every.per_second for count, every, _ in by_class),
        sparing_seconds=sum(count / spared.per_second for count, _, spared in by_class),
        chunks=len(blueprint.infos),
        moves=sum(moved.chunks.values()),
        update_source=", ".join(dict.fromkeys(every.source for _, every, _ in by_class)),
    )


def _links(plant: Plant, moved: Moved, disk: DiskSpeed | None, host: Speed | None) -> dict[str, Link]:
    """Each pair of neighbouring tiers that something passes between."""
    links: dict[str, Link] = {}
    names = [name for name in ("gpu", "cpu", "nvme") if any(name in route for route in moved.bytes)]
    for faster, slower in pairwise(names):
        down, up = moved.bytes.get((faster, slower), 0), moved.bytes.get((slower, faster), 0)
        name = f"{faster}-{slower}"
        if slower == "nvme":
            assert disk is not None  # or no chunk would have its home there
            links[name] = Link(name, down, up, disk.seconds(up, down), disk.source)
        else:
            assert host is not None
            is_one_memory = plant.gpu is not None and plant.gpu.name == "stand-in"
            nbytes = down + up if is_one_memory else max(down, up)
            links[name] = Link(name, down, up, nbytes / host.per_second, host.source)
    return links


def _tiers(
    blueprint: Blueprint, rooms: Mapping[str, Room], homes: Mapping[str, int], resting: Mapping[str, int]
) -> dict[str, TierForecast]:
    return {
        name: TierForecast(
            room.extents * blueprint.chunk_bytes, room.extents, homes.get(name, 0), resting.get(name, 0), not room.homes
        )
        for name, room in rooms.items()
    }


def _endurance(question: Question, answer: Forecast, plant: Plant) -> Endurance | None:
    nvme = plant.policy.tiers.nvme
    if question.tbw is None or answer.step is None or nvme is None:
        return None
    seconds, compute = answer.step.seconds, question.compute_seconds
    iteration = max(seconds, compute) if answer.update == "backward" else seconds + compute
    per_day = (answer.bytes_written_per_step or 0) * answer.ranks * DAY_SECONDS / iteration
    days = question.tbw * len(swap_folders(nvme.paths)) / per_day if per_day else None
    return Endurance(question.tbw, iteration, per_day, days)


def _state(blueprint: Blueprint) -> dict[str, int]:
    """Bytes of each field of the records, without what pads them."""
    bits: Counter[str] = Counter()
    for spec in blueprint.specs:
        for field in spec.cls.fields:
            bits[field.name] += spec.elements * field.element_bits
    return {name: -(-count // 8) for name, count in bits.items()}


def _dtypes(members: Sequence[Member]) -> dict[str, int]:
    """How many parameters there are of each dtype."""
    counts: Counter[str] = Counter()
    for member in members:
        counts[str(member.dtype).removeprefix("torch.")] += member.parameter.numel()
    return dict(counts)


def _bytes_of(members: Sequence[Member]) -> int:
    return sum(member.form.numel() * member.form.dtype.itemsize for member in members)


def _rules_without_parameters(policy: TierPolicy, members: Sequence[Member]) -> list[str]:
    return [
        f"placement.{number}.params: {rule.params!r} matches no parameter"
        for number, rule in enumerate(policy.placement)
        if not any(rule.matches(member.name) for member in members)
    ]
