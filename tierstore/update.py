"""What one step does to a chunk: which of its spans take part, and the pieces that the rule updates.

Holds the step's gradients and options, and never looks at where a chunk is. A parameter whose elements are not dense is
updated through a contiguous copy, which is written back after its last span.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.compiled import SinglePass, single_pass
from tierstore.cuts import Fields
from tierstore.kernels import LOW_PRECISION, Manner, begin, update
from tierstore.layout import Chunk, ChunkClass, Span, in_storage_order_of, is_dense
from tierstore.masters import REMAINDER, TIE
from tierstore.members import local_of, sharded_like
from tierstore.records import MASTER
from tierstore.rules import Pieces, step_count
from tierstore.rules.kept import GroupOptions
from tierstore.scratch import Scratch


class Participant(NamedTuple):
    """A parameter that is updated in a step: its local part, that of its gradient, how often it occurs in its group."""

    parameter: Tensor
    gradient: Tensor
    times: int
    is_plain: bool = False  # and so is its gradient, of the same dtype, device, shape and strides

    @classmethod
    def of(cls, parameter: Tensor, times: int) -> Participant:
        """Take the parameter's gradient; all ranks do it in one order. Raises RuntimeError if it cannot be used."""
        assert parameter.grad is not None
        gradient = local_of(sharded_like(parameter, _resolved(parameter.grad)))
        local = local_of(parameter)
        if local.shape != gradient.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(gradient.shape)} belongs to a sharded parameter, of which "
                f"{tuple(local.shape)} is here: make it a DTensor"
            )
        return cls(local, gradient, times)


def participants_of(
    binding: Binding, taking_part: Mapping[int, Tensor], again: Mapping[int, int]
) -> dict[int, Participant]:
    """Take the gradients of parameters, given by id; `again` says which occur more than once, and how often more.

    Nearly all are plain, and their gradients alike: such a one is found to be as it was bound, and left as it is.
    """
    participants: dict[int, Participant] = {}
    positions, members = binding.position, binding.members
    for key, parameter in taking_part.items():
        position, gradient = positions[key], parameter.grad
        member, times = members[position], 1 + again.get(key, 0) if again else 1
        if (
            member.is_plain
            and type(gradient) is Tensor
            and gradient.layout is torch.strided
            and (gradient.dtype, gradient.device, gradient.shape, gradient.stride()) == member.outline
            and not gradient.is_neg()
        ):
            participants[position] = Participant(parameter, gradient, times, True)
        else:
            participants[position] = Participant.of(parameter, times)
    return participants


def all_of(binding: Binding, gradients: Sequence[Tensor]) -> dict[int, Participant]:
    """All parameters with these gradients, by position, each of them plain and there once."""
    make = partial(tuple.__new__, Participant)  # as its own constructor, but for being Python
    return dict(enumerate(map(make, zip(binding.unchanged.parameters, gradients, repeat(1), repeat(True)))))


@dataclass
class StepWork:
    """One step's gradients and options, and how a chunk is updated with them."""

    binding: Binding
    participants: dict[int, Participant]
    options: list[GroupOptions]
    scratch: Scratch
    grad_scale: Tensor | None
    steps: dict[int, Tensor]  # what the step counts will be
    new: frozenset[int]  # those that have no state yet
    odd: set[int] = field(default_factory=set)  # those that cannot be updated as they are, in one go with all others
    begun: set[int] = field(default_factory=set)  # of those without state
    kept: frozenset[int] = frozenset()  # those whose gradients stay until somebody lets go of them
    finished: set[int] = field(default_factory=set)
    _flat: dict[int, _Flat] = field(default_factory=dict)
    _gathered: dict[str, list[tuple[Chunk, Tensor]]] = field(default_factory=dict)  # by the tier that computes

    @classmethod
    def of(
        cls,
        binding: Binding,
        participants: dict[int, Participant],
        groups: Sequence[Mapping[str, Any]],
        scratch: Scratch,
        grad_scale: Tensor | None,
        *,
        are_plain: bool = False,
    ) -> Self:
        """Prepare a step; changes nothing. `are_plain`: all participants are, and occur once."""
        options, before = binding.options.of(groups), binding.steps.numbers()
        new = frozenset(participants.keys() - before.keys())
        odd = set() if are_plain else {key for key, one in participants.items() if not one.is_plain or one.times > 1}
        odd |= new | binding.unbegun
        steps = _advanced(before, participants) if odd else _all_advanced(before, participants)
        return cls(binding, participants, options, scratch, grad_scale, steps, new, odd)

    def admit(self, position: int, participant: Participant) -> None:
        """Let one more parameter take part, before any chunk of its is used."""
        count = self.binding.steps.number(position)
        self.participants[position] = participant
        self.odd.add(position)
        self.steps[position] = step_count(participant.times + (count or 0.0))
        if count is None:
            self.new |= {position}

    def order(self, chunks: Iterable[int]) -> list[int]:
        """Of chunks, in the order of this step, those to be run, a chunk as often as it is needed."""
        if len(self.participants) == len(self.binding.members):
            return list(chunks)
        return [number for number in chunks if self._takes_part(self.binding.layout.chunks[number])]

    def use(self, number: int, record: Tensor, is_fresh: bool) -> None:
        """Launch the update of one chunk on the device of the tier that computes it."""
        self.gather(number, record, is_fresh)
        self.flush()

    def gather(self, number: int, record: Tensor, is_fresh: bool) -> None:
        """Let one more chunk be updated when `flush` is called."""
        chunk = self.binding.layout.chunks[number]
        self._gathered.setdefault(chunk.cls.compute, []).append((chunk, record))

    def flush(self) -> None:
        """Launch the update of what was gathered, each chunk on the device of the tier that computes it."""
        gathered, self._gathered = self._gathered, {}
        for tier, chunks in gathered.items():
            self.binding.plant.launch(tier, partial(self._use, chunks))

    def _use(self, chunks: Sequence[tuple[Chunk, Tensor]]) -> None:
        held = [(chunk, self.binding.cuts.of(chunk, record)) for chunk, record in chunks]
        if torch.is_grad_enabled():  # it was launched on a thread of its own
            with torch.no_grad():
                self._update(held)
        else:
            self._update(held)

    def touched(self, chunks: Iterable[int]) -> set[int]:
        """The participants in chunks that were used, and those without state that were updated."""
        spans = (span for number in chunks for span in self.binding.layout.chunks[number].spans)
        return self.begun | self.finished | (self.participants.keys() & {span.parameter for span in spans})

    def update_stateless(self) -> None:
        """Update the parameters that have no state, and so no chunk, where they are."""
        for chunk in self.binding.stateless:
            self.begun |= self.participants.keys() & {span.parameter for span in chunk.spans}
            self._update([(chunk, {})])
        if self.binding.policy.free_gradients:
            for position, participant in self.participants.items():
                if not participant.parameter.numel():  # in no chunk, and nothing to update
                    self._finish(position)

    def count(self) -> None:
        """Count the step, which is done, in every participant that has something to show for it."""
        binding, begun = self.binding, []
        for position in self.new:
            begins = self._begins(position)
            if binding.rule.counts_steps or begins or MASTER in (kind.name for kind in binding.fields_of(position)):
                begun.append(position)
                if not begins:
                    binding.unbegun.add(position)
        if binding.unbegun:
            binding.unbegun -= {position for position in binding.unbegun & self.steps.keys() if self._begins(position)}
        if self.new:
            kept = self.steps.keys() - self.new | set(begun)
            binding.steps.advance({position: self.steps[position] for position in kept})
        else:
            binding.steps.advance(self.steps)

    def _begins(self, position: int) -> bool:
        """Whether the step leaves a parameter with moments."""
        member = self.binding.members[position]
        return bool(member.moments) and self.binding.rule.begins_moments(self.options[member.group].numbers)

    def _takes_part(self, chunk: Chunk) -> bool:
        """Whether any parameter in the chunk has a gradient."""
        return not self.participants.keys().isdisjoint(chunk.parameters)

    def _update(self, held: Sequence[tuple[Chunk, Fields]]) -> None:
        """Update the spans of chunks whose records have been cut into fields, those that are alike in one go."""
        batches: dict[tuple[ChunkClass, _Alike], list[Pieces]] = {}
        others: list[Chunk] = []
        for chunk, fields in held:
            if chunk.group is not None and self._is_simple(chunk, chunk.group):
                pieces, options = self._all_pieces_of(chunk, fields), self.options[chunk.group].numbers
                self.binding.rule.update(pieces, options, is_first=False, grad_scale=self.grad_scale)
                self.finished.update(chunk.parameters)
                continue
            others.append(chunk)
            for alike, numbers in self.batches_of(chunk).items():
                pieces = self.pieces_of(chunk, fields, numbers, as_is=self.options[alike.group].takes_any_shape)
                if alike.is_new and alike.turn == 0:
                    begin(pieces)
                batches.setdefault((chunk.cls, alike), []).append(self._in_turn(pieces, chunk, alike, numbers))
        for (_, alike), alikes in batches.items():
            self._apply(Pieces.joined(alikes), alike.group, is_first=alike.is_first)
        for chunk in others:
            self._end_chunk(chunk)

    def _end_chunk(self, chunk: Chunk) -> None:
        """Count the spans of a chunk that has been updated as done."""
        if not self._flat and not self.binding.policy.free_gradients:  # all were updated as they are, whole
            self.finished.update(self.participants.keys() & chunk.parameters)
            return
        for span in chunk.spans:
            if span.parameter in self.participants:
                self.end_span(span)

    def _is_simple(self, chunk: Chunk, group: int) -> bool:
        """Whether all parameters in a chunk, which are of one group, are updated whole, as they are, in one go.

        So it is with nearly all chunks of small parameters, in nearly all steps.
        """
        return (
            chunk.number in self.binding.uncut
            and chunk.is_plain
            and chunk.cls.dtype not in LOW_PRECISION  # which a formula is given in tiles
            and self.options[group].takes_any_shape
            and self.odd.isdisjoint(chunk.parameters)
            and all(map(self.participants.__contains__, chunk.parameters))
            and not self.binding.policy.free_gradients
        )

    def _all_pieces_of(self, chunk: Chunk, fields: Fields) -> Pieces:
        """All spans of a simple chunk."""
        taking_part = map(self.participants.__getitem__, chunk.parameters)
        parameters, gradients, _, _ = map(list, zip(*taking_part, strict=True))
        return Pieces(parameters, gradients, dict(fields), [], list(map(self.steps.__getitem__, chunk.parameters)))

    def _in_turn(self, pieces: Pieces, chunk: Chunk, alike: _Alike, numbers: Sequence[int]) -> Pieces:
        """Count the steps of parameters that occur more than once turn by turn, if the formula does."""
        if not self.binding.rule.counts_turns(self.options[alike.group].numbers):
            return pieces
        left = [self.participants[chunk.spans[number].parameter].times - 1 - alike.turn for number in numbers]
        return pieces._replace(steps=[step - more for step, more in zip(pieces.steps, left, strict=True)])

    def _apply(self, pieces: Pieces, group: int, *, is_first: bool) -> None:
        """Give pieces of one group to the rule."""
        rule, options = self.binding.rule, self.options[group].numbers
        formula = partial(rule.update, options=options, is_first=is_first, grad_scale=self.grad_scale)
        single = single_pass(options, pieces) if self.grad_scale is None else None
        update(pieces, formula, self.manner(as_whole=rule.is_one_pass(options), single=single, in_any_order=True))

    def manner(self, *, as_whole: bool, single: SinglePass | None = None, in_any_order: bool = False) -> Manner:
        """How all pieces of this step are updated."""
        return Manner(self.scratch, self.binding.policy.check_parameters, as_whole, single, in_any_order)

    def pieces_of(self, chunk: Chunk, fields: Fields, numbers: Sequence[int], *, as_is: bool = False) -> Pieces:
        """The spans of a chunk with these numbers. `as_is`: plain ones that are whole may be of any shape."""
        as_is = as_is and chunk.is_plain
        spans: Sequence[Span] = chunk.spans
        moments = dict(fields)
        if len(numbers) != len(spans):
            spans = [spans[number] for number in numbers]
            moments = {name: [parts[number] for number in numbers] for name, parts in fields.items()}
        masters, remainders, ties = (moments.pop(name, []) for name in (MASTER, REMAINDER.name, TIE.name))
        steps = [self.steps[span.parameter] for span in spans]
        parameters: list[Tensor] = []
        gradients: list[Tensor] = []
        for span in spans:
            participant = self.participants[span.parameter]
            if as_is and participant.is_plain and span.length == participant.parameter.numel():
                parameters.append(participant.parameter)
                gradients.append(participant.gradient)
            else:
                values, gradient = self._run_of(span)
                parameters.append(values)
                gradients.append(gradient)
        return Pieces(parameters, gradients, moments, masters, steps, remainders=remainders, ties=ties)

    def batches_of(self, chunk: Chunk) -> dict[_Alike, list[int]]:
        """The numbers of the spans that can be updated together; a span is in as many as its parameter occurs."""
        participants, new, unbegun = self.participants, self.new, self.binding.unbegun
        batches: dict[tuple[Any, ...], list[int]] = {}
        plain: tuple[torch.dtype, torch.device] | None = None  # of plain gradients; those of a chunk are alike
        for number, span in enumerate(chunk.spans):
            position = span.parameter
            participant = participants.get(position)
            if participant is None:
                continue
            if plain is None or not participant.is_plain:
                gradient = participant.gradient
                kind = (gradient.dtype, gradient.device)
                plain = kind if participant.is_plain else plain
            else:
                kind = plain
            is_new = position in new
            is_first = is_new or position in unbegun
            for turn in range(participant.times):
                key = (turn, is_new, is_first, span.group, *kind)
                batch = batches.get(key)
                if batch is None:
                    batches[key] = [number]
                else:
                    batch.append(number)
        return {_Alike(*key): numbers for key, numbers in batches.items()}

    def _run_of(self, span: Span) -> tuple[Tensor, Tensor]:
        """The values and the gradient of a span."""
        flat = self._flat.get(span.parameter)
        if flat is None:
            flat = self._flat[span.parameter] = _Flat.of(self.participants[span.parameter])
        if span.length == flat.parameter.numel():
            return flat.parameter, flat.gradient
        return flat.parameter.narrow(0, span.start, span.length), flat.gradient.narrow(0, span.start, span.length)

    def end_span(self, span: Span) -> None:
        """Count a span as done; after a parameter's last one, see to it that the parameter has its new values."""
        flat = self._flat.get(span.parameter)
        if flat is not None:  # else it was updated as it is
            flat.elements_left -= span.length
            if flat.elements_left:
                return
            flat.put_back()
            del self._flat[span.parameter]
        self._finish(span.parameter)

    def _finish(self, position: int) -> None:
        self.finished.add(position)
        if self.binding.policy.free_gradients and position not in self.kept:
            self.let_go(position)

    def let_go(self, position: int) -> None:
        """Drop a parameter's gradient, here and where it came from; its dtype and device may still be asked for."""
        participant = self.participants[position]
        self.participants[position] = participant._replace(gradient=participant.gradient.new_empty(0))
        self.binding.members[position].parameter.grad = None


class _Alike(NamedTuple):
    """What spans that are updated together have in common."""

    turn: int  # of a parameter that occurs more than once
    is_new: bool  # its state has to be made
    is_first: bool  # its moments begin, in all turns, as torch has it
    group: int
    dtype: torch.dtype  # of the gradient
    device: torch.device


@dataclass(slots=True)
class _Flat:
    """A parameter and its gradient as 1-D tensors in one storage order: views where that is possible, else copies."""

    parameter: Tensor
    gradient: Tensor
    elements_left: int
    original: Tensor | None  # what the copy must be written to

    @classmethod
    def of(cls, participant: Participant) -> _Flat:
        local = participant.parameter
        flat = in_storage_order_of(local, local)
        gradient = in_storage_order_of(local, participant.gradient)
        return cls(flat, gradient, flat.numel(), None if is_dense(local) else local)

    def put_back(self) -> None:
        """Write the copy of a parameter that is not dense to where it came from."""
        if self.original is not None:
            self.original.copy_(self.parameter.view(self.original.shape))


def _resolved(gradient: Tensor) -> Tensor:
    """Make a lazily conjugated gradient, which autograd may leave on a complex parameter, an ordinary one."""
    return gradient.resolve_conj() if gradient.is_complex() else gradient


def _advanced(before: Mapping[int, float], participants: Mapping[int, Participant]) -> dict[int, Tensor]:
    """Step counts one step on, once for each time a parameter occurs in its group, as torch does.

    Those that are equal are one tensor, and none is what the binding holds.
    """
    after = {position: before.get(position, 0.0) + one.times for position, one in participants.items()}
    tensors = {count: step_count(count) for count in set(after.values())}
    return {position: tensors[count] for position, count in after.items()}


def _all_advanced(before: Mapping[int, float], participants: Mapping[int, Participant]) -> dict[int, Tensor]:
    """The same where all have state and occur once: nearly always their counts are equal, and no loop is needed."""
    counts = set(map(before.__getitem__, participants))
    return (
        dict.fromkeys(participants, step_count(counts.pop() + 1))
        if len(counts) == 1
        else _advanced(before, participants)
    )
