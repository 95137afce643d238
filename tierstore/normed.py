"""A step of a rule that needs norms over whole parameters, which may be cut into chunks.

Chunks are visited in the step's order, and those that hold earlier parts of a parameter once more, all within one run
of the store, so that such a step is as whole, or as broken off, as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.cuts import Fields
from tierstore.kernels import begin, update
from tierstore.layout import Chunk, Span, as_real
from tierstore.members import local_of
from tierstore.rules import NormedRule, Pieces
from tierstore.rules.base import blocks_of
from tierstore.update import Participant, StepWork


@dataclass
class NormedWork(StepWork):
    """A step of a rule that measures whole parameters before it changes them.

    A chunk is measured at its first visit. A parameter all of whose spans are measured is changed where it is at once;
    its spans in chunks visited before are changed at a second visit, in the opposite order, so that those still in
    faster memory come first.
    """

    _sums: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by parameter and start of the span
    _scales: dict[int, Tensor] = field(default_factory=dict)
    _visited: set[int] = field(default_factory=set)
    _changed: set[Span] = field(default_factory=set)

    def __post_init__(self) -> None:
        for position, participant in self.participants.items():
            _refuse_what_has_no_norm(self.binding, position, participant)

    def order(self, chunks: Iterable[int]) -> list[int]:
        """The chunks that take part, then again those that hold earlier spans of parameters that are cut."""
        first = super().order(chunks)
        spans = {number: self._spans(self.binding.layout.chunks[number]) for number in first}
        last = {span.parameter: number for number in first for span in spans[number]}
        return first + [
            number for number in reversed(first) if any(last[span.parameter] != number for span in spans[number])
        ]

    def _spans(self, chunk: Chunk) -> list[Span]:
        return [span for span in chunk.spans if span.parameter in self.participants]

    def _update(self, held: Sequence[tuple[Chunk, Fields]]) -> None:
        for chunk, fields in held:
            self._visit(chunk, fields)

    def _visit(self, chunk: Chunk, fields: Fields) -> None:
        is_second_visit = chunk.number in self._visited
        self._visited.add(chunk.number)
        for alike, numbers in self.batches_of(chunk).items():
            if not is_second_visit:
                pieces = self.pieces_of(chunk, fields, numbers)
                if alike.is_new:
                    begin(pieces)
                self._measure(pieces, alike.group, [chunk.spans[number] for number in numbers])
            ready = [number for number in numbers if self._is_ready(chunk.spans[number])]
            if ready:
                self._change(
                    self.pieces_of(chunk, fields, ready), alike.group, [chunk.spans[number] for number in ready]
                )

    def _is_ready(self, span: Span) -> bool:
        return span.parameter in self._scales and span not in self._changed

    def _measure(self, pieces: Pieces, group: int, spans: Sequence[Span]) -> None:
        """Measure some spans; where one is a parameter's last, make its scale."""
        rule, options = self._rule, self.options[group].numbers
        found: list[Tensor] = []
        update(pieces, lambda tile: found.extend(rule.measure(tile, options)), self.manner(as_whole=False))
        blocks = torch.cat(found).split_with_sizes([blocks_of(span.length) for span in spans])
        for span, sums in zip(spans, blocks, strict=True):
            of_parameter = self._sums.setdefault(span.parameter, {})
            of_parameter[span.start] = sums
            if len(of_parameter) == len(self.binding.layout.spans_of[span.parameter]):
                whole = torch.cat([of_parameter[start] for start in sorted(of_parameter)])
                self._scales[span.parameter] = rule.scale(whole, options)
                del self._sums[span.parameter]

    def _change(self, pieces: Pieces, group: int, spans: Sequence[Span]) -> None:
        """Change some spans of parameters that are measured whole."""
        rule, options = self._rule, self.options[group].numbers
        pieces = pieces._replace(scales=[self._scales[span.parameter] for span in spans])
        update(pieces, lambda tile: rule.apply(tile, options), self.manner(as_whole=False))
        for span in spans:
            self._changed.add(span)
            self.end_span(span)

    @property
    def _rule(self) -> NormedRule:
        rule = self.binding.rule
        assert isinstance(rule, NormedRule)
        return rule


def _refuse_what_has_no_norm(binding: Binding, position: int, participant: Participant) -> None:
    """Raise RuntimeError for a parameter that is updated twice, or of which only a part is here."""
    member = binding.members[position]
    if participant.times > 1:
        raise RuntimeError(
            f"parameter {member.name} occurs twice in its group, which {binding.rule.name} cannot update"
        )
    if local_of(member.parameter).numel() != as_real(member.parameter.detach()).numel():
        raise RuntimeError(
            f"parameter {member.name} is sharded over ranks, and {binding.rule.name} needs the norm of all of it: use "
            f"TieredAdamW, or replicate the parameter"
        )
