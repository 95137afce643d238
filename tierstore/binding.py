"""Binds the parameters in `param_groups` to chunks: layout, tiers and store for one set of parameters.

A binding is made from the parameters as they are now and holds their step counts; when identity, shape, strides, dtype
or device of one of them change, `is_current` says so and the optimizer makes another, carrying state over by position.
It reads and writes state by chunk, never by copying more than one record at a time outside the tiers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tierstore.behind import WriteBehind
from tierstore.blueprint import beyond_memory, draw
from tierstore.build import Parts
from tierstore.capture import Capture, Wanted
from tierstore.counts import StepCounts
from tierstore.cuts import Cuts
from tierstore.errors import TransferError
from tierstore.kernels import self_test
from tierstore.layout import Chunk, ChunkClass, Field, Span
from tierstore.mapping import map_host_memory
from tierstore.members import (
    NONE,
    Member,
    Needs,
    Unchanged,
    WithState,
    local_of,
    needs_state,
    nothing_needs,
    outline_of,
    survey,
)
from tierstore.policy import TierPolicy
from tierstore.records import (
    MASTER,
    Scatter,
    has_high_half,
    high_half,
    is_split,
    precision_of,
    read_field,
    state_fields,
)
from tierstore.results import Results
from tierstore.rules import Rule
from tierstore.rules.kept import KeptOptions
from tierstore.scratch import Scratch
from tierstore.store import Use
from tierstore.tensors import TieredStore

STATELESS_ELEMENTS = 1 << 20
"""Elements of small parameters without state that are updated together."""


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
        needs: Needs = needs_state,
    ) -> None:
        self.members = survey(groups, rule, with_state, needs=needs)
        self.unchanged = Unchanged(self.members, groups, rule)
        self.position = {id(member.parameter): number for number, member in enumerate(self.members)}
        self.steps = StepCounts()
        self.unbegun: set[int] = set()  # of those, the ones whose state was without moments: the next step begins them
        self.half_loaded = frozenset[int | str]()  # what a load broke off at: those parameters, and keys of a model
        blueprint = draw(self.members, groups, policy, parts).tuned()
        self.rule = rule
        self.policy = policy
        self._fields = tuple(state_fields(member, policy.state) for member in self.members)
        self.cuts = Cuts()
        self.options = KeptOptions(rule)
        self.stateless = tuple(_without_records(self.members, self._fields))
        self.plant = blueprint.plant
        self.layout = blueprint.layout
        self.uncut = frozenset(chunk.number for chunk in self.layout.chunks if self._is_uncut(chunk))
        self._infos = blueprint.infos
        self._chunk_bytes = blueprint.chunk_bytes
        setup = self.plant.build(blueprint.rooms(), blueprint.chunk_bytes)
        layout, members = self.layout, self.members
        self.store = TieredStore.over(setup, describe=lambda chunk: _describe(layout.chunks[chunk], members))
        try:
            self.store.add_chunks(blueprint.infos)
            names: Counter[str] = Counter()
            for member, spans in zip(members, layout.spans_of, strict=True):
                shares = [(chunk.number, chunk.cls.bytes_of(span.length)) for chunk, span in spans]
                names[member.name] += 1  # two parameters may have one name
                again = f" ({names[member.name]})" if names[member.name] > 1 else ""
                self.store.register(member.name + again, shares)
            self._record: Tensor | None = map_host_memory(blueprint.chunk_bytes)
            self._in_record: int | None = None  # the chunk whose bytes, as they are now, the buffer holds
            self._scratch = Scratch()
            self._capture: Capture | None = None
            for dtype in {precision_of(chunk.cls) for chunk in layout.chunks if chunk.cls.compute == "cpu"}:
                for options in {replace(rule.options(group), lr=1e-3) for group in groups}:  # of any rate
                    self_test(rule, options, dtype)
                    rule.takes_any_shape(options)  # which is tried once
        except BaseException:
            self.store.close()
            raise

    def tell_what_is_missing(self) -> None:
        """Warn of a gpu tier without an accelerator, of too little memory, and of rules that match no parameter."""
        self.plant.tell_what_is_missing()
        if (beyond := beyond_memory(self.plant)) is not None:
            asked, there_is = beyond
            warnings.warn(
                f"tierstore: tiers.cpu.capacity of {asked:,} bytes is more than the {there_is:,} bytes of memory here "
                f"that are this process's: lower it, and leave some for the rest of the machine",
                UserWarning,
                stacklevel=2,
            )
        for number, rule in enumerate(self.policy.placement):
            if not any(rule.matches(member.name) for member in self.members):
                warnings.warn(
                    f"tierstore: placement.{number}.params: {rule.params!r} matches no parameter; there are "
                    f"{self.names_of(range(len(self.members)))} (named_parameters() gives them their own names)",
                    UserWarning,
                    stacklevel=2,
                )

    def is_current(
        self, groups: Sequence[Mapping[str, Any]], with_state: WithState = NONE, *, needs: Needs = needs_state
    ) -> bool:
        """Whether the parameters in `groups` are still those bound, and all that need it have room for state."""
        held = {self.position.get(id(parameter)): names for parameter, names in with_state.items()}
        position, members = 0, self.members
        for number, group in enumerate(groups):
            asked, tier = self.rule.moments_of(group), group.get("tier")
            for parameter in group["params"]:
                if position < len(members) and parameter is (member := members[position]).parameter:
                    written = held.get(position) if held else None
                    if member.group != number or not self._is_as_bound(member, asked, tier, written, needs):
                        return False
                    position += 1
                elif self.position.get(id(parameter), position) >= position:  # not one that occurs again
                    return False
        return position == len(members)

    def is_current_at(
        self, position: int, groups: Sequence[Mapping[str, Any]], written: Collection[str] | None = None
    ) -> bool:
        """Whether one parameter is as it was bound, to be read, or `written`: then it must have room for these."""
        member = self.members[position]
        if member.group >= len(groups):
            return False
        group = groups[member.group]
        return self._is_as_bound(member, self.rule.moments_of(group), group.get("tier"), written, nothing_needs)

    def _is_as_bound(
        self, member: Member, asked: Collection[str], tier: str | None, written: Collection[str] | None, needs: Needs
    ) -> bool:
        return (
            member.outline == outline_of(member.parameter)
            and member.tier == tier
            and (asked == member.moments or set(asked) <= set(member.moments))
            and (member.is_covered or (written is None and not needs(member.parameter)))
            and (not written or all(name in member.moments for name in self.rule.moments if name in written))
        )

    def thawed(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """The parameters in `groups` that were frozen when room was made, and may be updated now; by position."""
        found = (self.position.get(id(p)) for group in groups for p in group["params"] if needs_state(p))
        return [position for position in found if position is not None and not self.members[position].is_covered]

    def _is_uncut(self, chunk: Chunk) -> bool:
        """Whether all parameters in a chunk are there as a whole."""
        return all(len(self.layout.spans_of[position]) == 1 for position in chunk.parameters)

    def keeps_state(self, position: int) -> bool:
        """Whether a parameter that has stepped has anything to show for it."""
        return self.rule.counts_steps or bool(self.fields_of(position))

    def with_state(self) -> dict[Tensor, tuple[str, ...]]:
        """The parameters that have state, and the fields of the rule that they have."""
        return {self.members[position].parameter: self.members[position].moments for position in sorted(self.steps)}

    def has_lost_master(self, position: int) -> bool:
        """Whether the parameter was the high half of its master and no longer has the values for it."""
        return self._has_split_master(position) and not has_high_half(self.members[position])

    def fields_of(self, position: int) -> tuple[Field, ...]:
        """The fields of a parameter's state as others see them."""
        return self._fields[position]

    # -- state --------------------------------------------------------------------------------------------------

    def read(
        self, wanted: Mapping[int, Sequence[str]], results: Results, missing: dict[int, TransferError] | None = None
    ) -> dict[int, dict[str, Tensor]]:
        """Copy fields of parameters, by position, into 1-D CPU tensors in storage order; move no chunk.

        Parameters that cannot be read are noted in `missing`, if that is given, and left out.
        """
        flat = {
            (position, name): results.allocate(self.members[position].form.numel(), self._dtype(position, name))
            for position, names in wanted.items()
            for name in names
        }
        halves = {
            position: high_half(self.members[position])
            for position, names in wanted.items()
            if MASTER in names and self._has_split_master(position)
        }
        for chunk in self.chunks_of(wanted):
            try:
                record = self._read(chunk)
            except TransferError as error:
                if missing is None:
                    raise
                missing |= {span.parameter: error for span in chunk.spans if span.parameter in wanted}
                continue
            for span in chunk.spans:
                for name in wanted.get(span.parameter, ()):
                    part = flat[span.parameter, name].narrow(0, span.start, span.length)
                    if record is None:
                        part.zero_()
                    else:
                        high = halves.get(span.parameter) if name == MASTER else None
                        read_field(chunk, span, name, record, high, part, self._scratch)
        return {
            position: {name: flat[position, name] for name in names}
            for position, names in wanted.items()
            if not missing or position not in missing
        }

    def _has_split_master(self, position: int) -> bool:
        spans = self.layout.spans_of[position]
        return bool(spans) and is_split(spans[0][0].cls)

    def _read(self, chunk: Chunk) -> Tensor | None:
        """The chunk's record, valid until the next read or run; None while the chunk is fresh."""
        if self._record is None:
            self._record, self._in_record = map_host_memory(self._chunk_bytes), None
        record = self._record[: chunk.record_bytes]
        if self._in_record != chunk.number:
            self._in_record = None
            try:
                is_made = self.store.read_record(chunk.number, record)
            except BaseException:  # a request that timed out may write to the buffer yet: leave it to that
                self._record = None
                raise
            if not is_made:
                return None
            self._in_record = chunk.number
        return record

    def shed(self) -> None:
        """Give back memory that is made again when it is needed."""
        self._record = self._in_record = None

    def write(self, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set fields of parameters, by position, from tensors of the parameter's shape or one number, on any device.

        A field not given keeps its value. Chunks go through the tier that computes, as in a step.
        """
        self.rewrite(values, Scatter(values, self.members, self._scratch).into)

    def rewrite(
        self, positions: Iterable[int], into: Callable[[Chunk, Tensor], None], *, is_whole: bool = False
    ) -> None:
        """Give each chunk that holds any of the parameters to `into`, with its record, to be changed as in a step.

        `is_whole`: every byte of every record is written, and what was in it is of no use.
        """
        chunks = {chunk.number: chunk for chunk in self.chunks_of(positions)}

        def use(number: int, record: Tensor, is_fresh: bool) -> None:
            chunk = chunks[number]
            self.plant.launch(chunk.cls.compute, lambda: into(chunk, record))

        if chunks:
            self.run(list(chunks), (), use, is_step=False, zeroes=not is_whole)

    def run(
        self,
        order: Sequence[int],
        upcoming: Sequence[int],
        use: Use,
        *,
        flush: Callable[[], None] | None = None,
        is_step: bool,
        ready: Callable[[int], None] | None = None,
        zeroes: bool = True,
    ) -> None:
        """Run chunks through the store; all launched work is done, or visible to what follows, at the end."""
        self._in_record = None
        if self._capture is not None:
            use = self._capture.before(use)
        finish = self.plant.finish
        self.store.run(order, upcoming, use, flush=flush, finish=finish, is_step=is_step, ready=ready, zeroes=zeroes)

    def capture_of(self, wanted: Wanted) -> Capture:
        """Prepare to copy out state as it is when `begin_capture` is called."""
        return Capture(wanted, self.layout, self.members, self.store, self.plant)

    def begin_capture(self, capture: Capture, behind: WriteBehind) -> None:
        """Copy state out: each chunk before it is changed, the rest when `finish_capture` says. One at a time."""
        self.finish_capture()
        self._capture = capture
        capture.begin(behind)

    def finish_capture(self) -> None:
        """Copy out what is left of a capture, if there is one. What goes wrong is the capture's, and raises nothing."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.rest()

    def discard(self) -> None:
        """Make all state fresh, reading none of it; what went wrong with it no longer matters. May be repeated."""
        self.finish_capture()
        self.steps.clear()
        self.unbegun.clear()
        self.half_loaded = frozenset()
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

    def chunks_of(self, positions: Iterable[int]) -> list[Chunk]:
        """The chunks that hold any of the parameters, each once, in order."""
        chunks = {chunk.number: chunk for position in positions for chunk, _ in self.layout.spans_of[position]}
        return [chunks[number] for number in sorted(chunks)]

    def names_of(self, positions: Iterable[int]) -> str:
        """The names of parameters, for a message."""
        names = [self.members[position].name for position in positions]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"

    def close(self) -> None:
        """Give back memory, files and threads, once what a checkpoint still wants is copied out."""
        if not self.store.is_closed:
            self.finish_capture()
        self.store.close()


def _without_records(members: Sequence[Member], fields: Sequence[Sequence[Field]]) -> Iterator[Chunk]:
    """What a step must update besides chunks: parameters without state, together as those in a chunk would be."""
    alike: dict[tuple[ChunkClass, int], list[Span]] = {}
    for position, member in enumerate(members):
        elements = member.form.numel()
        if fields[position] or not elements:
            continue
        device = local_of(member.parameter).device
        cls = ChunkClass(member.form.dtype, str(device), (), "cpu" if device.type == "cpu" else "gpu")
        spans = alike.setdefault((cls, member.group), [])
        end = spans[-1].offset + spans[-1].length if spans else 0
        if end + elements > STATELESS_ELEMENTS and spans:
            yield Chunk(-1, cls, end, tuple(spans))
            spans.clear()
            end = 0
        spans.append(Span(position, member.group, 0, elements, end))
    for (cls, _), spans in alike.items():
        yield Chunk(-1, cls, spans[-1].offset + spans[-1].length, tuple(spans))


def _describe(chunk: Chunk, members: Sequence[Member]) -> str:
    """Words for a chunk in errors: its number and the parameters in it."""
    counts = Counter(span.parameter for span in chunk.spans)
    parts = [_describe_span(span, members) for span in chunk.spans[:4]]
    more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
    return f"chunk {chunk.number} ({', '.join(parts)}{more})"


def _describe_span(span: Span, members: Sequence[Member]) -> str:
    return f"{members[span.parameter].name}[{span.start}:{span.start + span.length}]"
