"""What one step does to one chunk: which of its spans take part, and the pieces that `kernels` updates.

Holds the step's gradients and options, and never looks at where a chunk is. A parameter whose elements are not dense is
updated through a contiguous copy, which is written back after its last span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.kernels import Hyper, Piece, Scratch, update
from tierstore.layout import Chunk, Span, in_storage_order_of, is_dense
from tierstore.members import local_of, sharded_like


@dataclass(frozen=True, slots=True)
class Participant:
    """A parameter that is updated in a step: its gradient, sharded as it is, and how often it occurs in its group."""

    parameter: Tensor
    gradient: Tensor
    times: int

    @classmethod
    def of(cls, parameter: Tensor, times: int) -> Participant:
        """Take the parameter's gradient; all ranks do it in one order. Raises RuntimeError if it cannot be used."""
        assert parameter.grad is not None
        gradient = sharded_like(parameter, _resolved(parameter.grad))
        wanted, found = local_of(parameter).shape, local_of(gradient).shape
        if wanted != found:
            raise RuntimeError(
                f"a gradient of shape {tuple(found)} belongs to a sharded parameter, of which {tuple(wanted)} is here: "
                f"make it a DTensor"
            )
        return cls(parameter, gradient, times)


@dataclass
class StepWork:
    """One step's gradients and options, and how a chunk is updated with them."""

    binding: Binding
    participants: Mapping[int, Participant]
    hypers: list[Hyper]
    scratch: Scratch
    grad_scale: Tensor | None
    steps: dict[int, Tensor]  # what the step counts will be
    new: frozenset[int]  # those that have no state yet
    finished: set[int] = field(default_factory=set)
    _flat: dict[int, _Flat] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        binding: Binding,
        participants: Mapping[int, Participant],
        groups: Sequence[Mapping[str, Any]],
        scratch: Scratch,
        grad_scale: Tensor | None,
    ) -> StepWork:
        """Prepare a step; changes nothing."""
        hypers = [_hyper_of(group) for group in groups]
        new = frozenset(participants.keys() - binding.steps.keys())
        return cls(binding, participants, hypers, scratch, grad_scale, _advanced(binding, participants), new)

    def count(self) -> None:
        """Count the step, which is done, in every participant."""
        for position in self.new:
            self.binding.steps[position] = torch.tensor(0.0)
        torch._foreach_copy_([self.binding.steps[position] for position in self.steps], list(self.steps.values()))

    def takes_part(self, chunk: Chunk) -> bool:
        """Whether any parameter in the chunk has a gradient."""
        return any(span.parameter in self.participants for span in chunk.spans)

    def use(self, number: int, record: Tensor, is_fresh: bool) -> None:
        """Launch the update of one chunk on the device of the tier that computes it."""
        chunk = self.binding.layout.chunks[number]
        self.binding.plant.launch(chunk.cls.compute, lambda: self._update(chunk, record))

    def _update(self, chunk: Chunk, record: Tensor) -> None:
        fields = {name.name: chunk.field(record, name.name) for name in chunk.cls.fields}
        pieces: dict[int, list[Piece]] = {}
        spans = [span for span in chunk.spans if span.parameter in self.participants]
        for span in spans:
            group = self.binding.members[span.parameter].group
            pieces.setdefault(group, []).extend(self._pieces(span, fields))
        for group, members in pieces.items():
            update(
                members,
                self.hypers[group],
                self.scratch,
                check_parameters=self.binding.policy.check_parameters,
                grad_scale=self.grad_scale,
            )
        for span in spans:
            self._end_span(span)

    def _pieces(self, span: Span, fields: Mapping[str, Tensor]) -> list[Piece]:
        """The piece that a span stands for, as often as its parameter occurs in its group."""
        flat = self._flat_of(span.parameter)

        def part(name: str) -> Tensor:
            return fields[name].narrow(0, span.offset, span.length)

        piece = Piece(
            flat.parameter.narrow(0, span.start, span.length),
            flat.gradient.narrow(0, span.start, span.length),
            part("exp_avg"),
            part("exp_avg_sq"),
            part("max_exp_avg_sq") if "max_exp_avg_sq" in fields else None,
            part("master") if "master" in fields else None,
            self.steps[span.parameter],
            span.parameter in self.new,
        )
        return [piece] * self.participants[span.parameter].times

    def _flat_of(self, position: int) -> _Flat:
        if position not in self._flat:
            self._flat[position] = _Flat.of(self.participants[position])
        return self._flat[position]

    def _end_span(self, span: Span) -> None:
        flat = self._flat[span.parameter]
        flat.elements_left -= span.length
        if flat.elements_left == 0:
            flat.put_back()
            del self._flat[span.parameter]
            self.finished.add(span.parameter)


@dataclass
class _Flat:
    """A parameter and its gradient as 1-D tensors in one storage order: views where that is possible, else copies."""

    parameter: Tensor
    gradient: Tensor
    elements_left: int
    original: Tensor | None  # what the copy must be written to

    @classmethod
    def of(cls, participant: Participant) -> _Flat:
        local, gradient = local_of(participant.parameter), local_of(participant.gradient)
        flat = in_storage_order_of(local, local)
        return cls(flat, in_storage_order_of(local, gradient), flat.numel(), None if is_dense(local) else local)

    def put_back(self) -> None:
        """Write the copy of a parameter that is not dense to where it came from."""
        if self.original is not None:
            self.original.copy_(self.parameter.view(self.original.shape))


def _resolved(gradient: Tensor) -> Tensor:
    """Make a lazily conjugated gradient, which autograd may leave on a complex parameter, an ordinary one."""
    return gradient.resolve_conj() if gradient.is_complex() else gradient


def _advanced(binding: Binding, participants: Mapping[int, Participant]) -> dict[int, Tensor]:
    """Step counts one step on, once for each time a parameter occurs in its group, as torch does; a copy."""
    fresh = torch.tensor(0.0)
    counts = torch.stack([binding.steps.get(position, fresh) for position in participants])
    counts += torch.tensor([float(participant.times) for participant in participants.values()])
    return dict(zip(participants, counts.unbind(), strict=True))


def _hyper_of(group: Mapping[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(
        float(group["lr"]),
        float(beta1),
        float(beta2),
        float(group["eps"]),
        float(group["weight_decay"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=bool(group["maximize"]),
    )
