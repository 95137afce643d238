"""Binds the parameters in `param_groups` to chunks: layout, tiers and store for one set of parameters.

A binding is made from the parameters as they are now and holds their step counts; when identity, shape, strides, dtype
or device of one of them change, `is_current` says so and the optimizer makes another, carrying state over by position.
It reads and writes state by chunk, never by copying more than one record at a time outside the tiers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tierstore.build import Parts, Plant, plan_plant
from tierstore.device import map_host_memory
from tierstore.errors import PolicyError, TransferError
from tierstore.kernels import self_test
from tierstore.layout import (
    Chunk,
    ChunkClass,
    Field,
    Layout,
    ParameterSpec,
    Span,
    in_storage_order_of,
    make_layout,
)
from tierstore.members import NONE, Member, WithState, identity_of, local_of, needs_state, refuse_shared_memory, survey
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.results import Results
from tierstore.rules import Rule
from tierstore.store import ChunkInfo, Use
from tierstore.tensors import TieredStore

LOW_PRECISION = (torch.bfloat16, torch.float16)


class Binding:
    """Layout, store and step counts of the parameters in `groups`."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        rule: Rule,
        policy: TierPolicy,
        parts: Parts,
        *,
        with_state: WithState = NONE,
    ) -> None:
        self.members = survey(groups, rule, with_state)
        self.position = {id(member.parameter): number for number, member in enumerate(self.members)}
        self.steps: dict[int, Tensor] = {}  # by position; a parameter has state exactly when it is here
        self.unbegun: set[int] = set()  # of those, the ones whose state was without moments: the next step begins them
        blueprint = draw(self.members, groups, policy, parts)
        self.rule = rule
        self.policy = policy
        self._fields = tuple(state_fields(member, policy) for member in self.members)
        self.stateless = frozenset(  # what a step must update besides the chunks
            position
            for position, member in enumerate(self.members)
            if not self._fields[position] and member.form.numel()
        )
        self.plant = blueprint.plant
        self.layout = blueprint.layout
        self._infos = blueprint.infos
        setup = self.plant.build(blueprint.rooms(), blueprint.chunk_bytes)
        layout, members = self.layout, self.members
        self.store = TieredStore.over(setup, describe=lambda chunk: _describe(layout.chunks[chunk], members))
        try:
            self.store.add_chunks(blueprint.infos)
            names: Counter[str] = Counter()
            for member, spans in zip(members, layout.spans_of, strict=True):
                shares = [(chunk.number, span.length * chunk.cls.element_bytes) for chunk, span in spans]
                names[member.name] += 1  # two parameters may have one name
                again = f" ({names[member.name]})" if names[member.name] > 1 else ""
                self.store.register(member.name + again, shares)
            self._record = map_host_memory(blueprint.chunk_bytes)
            self._in_record: int | None = None  # the chunk whose bytes, as they are now, the buffer holds
            for dtype in {chunk.cls.fields[0].dtype for chunk in layout.chunks if chunk.cls.compute == "cpu"}:
                for options in {replace(rule.options(group), lr=1e-3) for group in groups}:  # of any rate
                    self_test(rule, options, dtype)
        except BaseException:
            self.store.close()
            raise

    def tell_what_is_missing(self) -> None:
        """Warn of a gpu tier without an accelerator, and of placement rules that match no parameter."""
        self.plant.tell_what_is_missing()
        for number, rule in enumerate(self.policy.placement):
            if not any(rule.matches(member.name) for member in self.members):
                warnings.warn(
                    f"tierstore: placement.{number}.params: {rule.params!r} matches no parameter; there are "
                    f"{self.names_of(range(len(self.members)))} (named_parameters() gives them their own names)",
                    UserWarning,
                    stacklevel=2,
                )

    def is_current(self, groups: Sequence[Mapping[str, Any]], with_state: WithState = NONE) -> bool:
        """Whether the parameters in `groups` are still those bound, and all that need it have room for state."""
        present: dict[int, int] = {}  # the number of each one's group, which its chunks are updated by
        for number, group in enumerate(groups):
            for parameter in group["params"]:
                present.setdefault(id(parameter), number)
        if list(present.items()) != [(id(member.parameter), member.group) for member in self.members]:
            return False
        held = {self.position.get(id(parameter)): names for parameter, names in with_state.items()}
        return all(self.is_current_at(position, groups, held.get(position)) for position in range(len(self.members)))

    def is_current_at(
        self, position: int, groups: Sequence[Mapping[str, Any]], written: Collection[str] | None = None
    ) -> bool:
        """Whether one parameter is still as it was bound. `written`: it must have room for these, even if frozen."""
        member = self.members[position]
        if member.group >= len(groups):
            return False
        group = groups[member.group]
        return (
            member.identity == identity_of(member.parameter, group.get("tier"))
            and all(name in member.moments for name in self.rule.moments_of(group))
            and (member.is_covered or (written is None and not needs_state(member.parameter)))
            and (not written or all(name in member.moments for name in self.rule.moments if name in written))
        )

    def keeps_state(self, position: int) -> bool:
        """Whether a parameter that has stepped has anything to show for it."""
        return self.rule.counts_steps or bool(self.fields_of(position))

    def with_state(self) -> dict[Tensor, tuple[str, ...]]:
        """The parameters that have state, and the fields of the rule that they have."""
        return {self.members[position].parameter: self.members[position].moments for position in sorted(self.steps)}

    def fields_of(self, position: int) -> tuple[Field, ...]:
        """The fields that a parameter's state has in the tiers."""
        return self._fields[position]

    # -- state --------------------------------------------------------------------------------------------------

    def read(self, wanted: Mapping[int, Sequence[str]], results: Results) -> dict[int, dict[str, Tensor]]:
        """Copy fields of parameters, by position, into 1-D CPU tensors in storage order; move no chunk."""
        flat = {
            (position, name): results.allocate(self.members[position].form.numel(), self._dtype(position, name))
            for position, names in wanted.items()
            for name in names
        }
        for chunk in self._chunks_of(wanted):
            record = self._read(chunk)
            for span in chunk.spans:
                for name in wanted.get(span.parameter, ()):
                    part = flat[span.parameter, name].narrow(0, span.start, span.length)
                    if record is None:
                        part.zero_()
                    else:
                        part.copy_(chunk.field(record, name).narrow(0, span.offset, span.length))
        return {position: {name: flat[position, name] for name in names} for position, names in wanted.items()}

    def _read(self, chunk: Chunk) -> Tensor | None:
        """The chunk's record, valid until the next read or run; None while the chunk is fresh."""
        if self._in_record != chunk.number:
            self._in_record = None
            try:
                is_made = self.store.read_record(chunk.number, self._record[: chunk.record_bytes])
            except BaseException:  # a request that timed out may write to the buffer yet: leave it to that
                self._record = map_host_memory(len(self._record))
                raise
            if not is_made:
                return None
            self._in_record = chunk.number
        return self._record[: chunk.record_bytes]

    def write(self, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set fields of parameters, by position, from tensors of the parameter's shape or one number, on any device.

        A field not given keeps its value. Chunks go through the tier that computes, as in a step.
        """
        chunks = {chunk.number: chunk for chunk in self._chunks_of(values)}
        scatter = _Scatter(values, self.members)

        def use(number: int, record: Tensor, is_fresh: bool) -> None:
            chunk = chunks[number]
            self.plant.launch(chunk.cls.compute, lambda: scatter.into(chunk, record))

        if chunks:
            self.run(list(chunks), (), use, is_step=False)

    def run(
        self,
        order: Sequence[int],
        upcoming: Sequence[int],
        use: Use,
        *,
        is_step: bool,
        ready: Callable[[int], None] | None = None,
    ) -> None:
        """Run chunks through the store; all launched work is done, or visible to what follows, at the end."""
        self._in_record = None
        self.store.run(order, upcoming, use, finish=self.plant.finish, is_step=is_step, ready=ready)

    def discard(self) -> None:
        """Make all state fresh, reading none of it; what went wrong with it no longer matters. May be repeated."""
        self.steps.clear()
        self.unbegun.clear()
        self._in_record = None
        for number in self._infos:
            if self.store.holds(number):
                self.store.remove_chunk(number)
        with contextlib.suppress(TransferError):  # of moves of chunks that are gone
            self.store.wait()
        self.store.forgive()
        self.store.add_chunks({number: info for number, info in self._infos.items() if not self.store.holds(number)})

    def _dtype(self, position: int, name: str) -> torch.dtype:
        return next(field.dtype for field in self.fields_of(position) if field.name == name)

    def _chunks_of(self, positions: Iterable[int]) -> list[Chunk]:
        """The chunks that hold any of the parameters, each once, in order."""
        chunks = {chunk.number: chunk for position in positions for chunk, _ in self.layout.spans_of[position]}
        return [chunks[number] for number in sorted(chunks)]

    def names_of(self, positions: Iterable[int]) -> str:
        """The names of parameters, for a message."""
        names = [self.members[position].name for position in positions]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"

    def close(self) -> None:
        """Give back memory, files and threads."""
        self.store.close()


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What binding will make, before anything is reserved."""

    plant: Plant
    layout: Layout
    infos: dict[int, ChunkInfo]
    chunk_bytes: int

    def rooms(self) -> dict[str, Room]:
        """Extents of each tier. Raises CapacityError if not all chunks find a home."""
        return self.plant.rooms(list(self.infos.values()), self.chunk_bytes)

    def check_fits(self, *, is_first: bool) -> None:
        """Check that all chunks find a home, and that the disks have the bytes for it. Reserves nothing.

        A binding that is not the first takes over the space of the files before it, so disks are not looked at.
        Raises CapacityError, SwapError or DiskFullError.
        """
        rooms = self.rooms()
        if is_first:
            self.plant.check_disk(rooms, self.chunk_bytes)


def draw(members: Sequence[Member], groups: Sequence[Mapping[str, Any]], policy: TierPolicy, parts: Parts) -> Blueprint:
    """Cut the parameters into chunks under the policy. Raises PolicyError for rules that cannot be followed."""
    refuse_shared_memory([member for member in members if member.is_covered])
    plant = plan_plant(policy, [local_of(member.parameter).device for member in members if member.is_covered], parts)
    specs = []
    for member in members:
        local = local_of(member.parameter)
        fields = state_fields(member, policy) if member.is_covered else ()
        compute = plant.compute_tier(local.device)
        named = _named_tier(member, groups[member.group], policy, plant.names, compute) if fields else None
        cls = ChunkClass(local.dtype, str(local.device), fields, compute, named)
        specs.append(ParameterSpec(member.name, member.group, local.numel() if fields else 0, cls))
    state_bytes = sum(spec.elements * spec.cls.element_bytes for spec in specs)
    chunk_bytes = plant.chunk_bytes(state_bytes, max((spec.cls.element_bytes for spec in specs), default=0))
    try:
        layout = make_layout(specs, chunk_bytes)
    except ValueError as error:
        raise PolicyError(f"chunk_size: {error}") from error
    infos = {chunk.number: ChunkInfo(chunk.record_bytes, chunk.cls.compute, chunk.cls.named) for chunk in layout.chunks}
    return Blueprint(plant, layout, infos, chunk_bytes)


def state_fields(member: Member, policy: TierPolicy) -> tuple[Field, ...]:
    """The fields of a parameter's state: moments in its real dtype, or float32 and a master if that is too low."""
    dtype = member.form.dtype
    is_low = dtype in LOW_PRECISION
    moments = torch.float32 if is_low else dtype
    has_master = is_low and policy.state.master != "none"
    master = (Field("master", torch.float32),) if has_master else ()
    return (*master, *(Field(name, moments) for name in member.moments))


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


class _Scatter:
    """Values of whole parameters on their way into records. Reorders one parameter's at a time, if they need it."""

    def __init__(self, values: Mapping[int, Mapping[str, Tensor]], members: Sequence[Member]) -> None:
        self._values = values
        self._members = members
        self._flat: dict[int, dict[str, Tensor]] = {}
        self._elements_left = {position: members[position].form.numel() for position in values}

    def into(self, chunk: Chunk, record: Tensor) -> None:
        """Write the parts that belong to a chunk into its record."""
        for span in chunk.spans:
            if span.parameter not in self._values:
                continue
            for name, flat in self._flat_of(span.parameter).items():
                part = flat.narrow(0, span.start, span.length) if flat.dim() else flat
                chunk.field(record, name).narrow(0, span.offset, span.length).copy_(part)
            self._elements_left[span.parameter] -= span.length
            if not self._elements_left[span.parameter]:
                del self._flat[span.parameter]

    def _flat_of(self, position: int) -> dict[str, Tensor]:
        if position not in self._flat:
            self._flat[position] = {
                name: self._in_order(position, value) for name, value in self._values[position].items()
            }
        return self._flat[position]

    def _in_order(self, position: int, value: Tensor) -> Tensor:
        local = local_of(value)
        return local if local.dim() == 0 else in_storage_order_of(self._members[position].form, local)


def _describe(chunk: Chunk, members: Sequence[Member]) -> str:
    """Words for a chunk in errors: its number and the parameters in it."""
    counts = Counter(span.parameter for span in chunk.spans)
    parts = [_describe_span(span, members) for span in chunk.spans[:4]]
    more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
    return f"chunk {chunk.number} ({', '.join(parts)}{more})"


def _describe_span(span: Span, members: Sequence[Member]) -> str:
    return f"{members[span.parameter].name}[{span.start}:{span.start + span.length}]"
