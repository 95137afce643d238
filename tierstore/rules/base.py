"""What an update rule is: which fields a parameter's state has, which options a group has, and the formula.

A rule sees plain 1-D pieces and one group's options, never a chunk, a tier or an optimizer. It must compute the same
bits for a parameter as a whole and cut at multiples of `CUT_ELEMENTS` elements, because placement may cut anywhere
there; `kernels.self_test` compares. A rule that needs norms over whole parameters is a `NormedRule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tierstore.layout import CUT_ELEMENTS


class Pieces(NamedTuple):
    """Runs of parameters' elements, each 1-D: values, gradients and fields of the state, in lists in one order.

    A list has one dtype and one device. `moments` are the fields that the rule keeps, by name; `masters` is empty where
    there are none. `steps` are the parameters' 0-dim step counts, on the CPU, already advanced. `scales` are what a
    `NormedRule` made of each whole parameter, on its device; empty before, and for other rules. `remainders` and `ties`
    (packed bits) are there instead of masters that are split.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: dict[str, list[Tensor]]
    masters: list[Tensor]
    steps: list[Tensor]
    scales: list[Tensor] = []  # noqa: RUF012 - never changed
    remainders: list[Tensor] = []  # noqa: RUF012
    ties: list[Tensor] = []  # noqa: RUF012

    @classmethod
    def joined(cls, several: Sequence[Pieces]) -> Pieces:
        """All pieces of several that have the same fields, in order."""
        if len(several) == 1:
            return several[0]
        moments = {name: _chained(one.moments[name] for one in several) for name in several[0].moments}
        parameters, gradients, _, *others = zip(*several, strict=True)
        return cls(_chained(parameters), _chained(gradients), moments, *map(_chained, others))

    @property
    def precision(self) -> tuple[torch.dtype, torch.device]:
        """The dtype and device that the update is computed in."""
        if self.remainders:
            return torch.float32, self.remainders[0].device
        for tensors in (self.masters, *self.moments.values(), self.parameters):
            if tensors:
                return tensors[0].dtype, tensors[0].device
        raise AssertionError("no pieces")

    @property
    def is_plain(self) -> bool:
        """Whether parameters, gradients and state are of one dtype and device, so that a formula can work on them."""
        if self.masters or self.remainders:
            return False
        dtype, device = self.precision
        value, gradient = self.parameters[0], self.gradients[0]
        return value.dtype == gradient.dtype == dtype and value.device == gradient.device == device

    def lengths(self) -> list[int]:
        """The number of elements of each."""
        return [parameter.numel() for parameter in self.parameters]

    def take(self, start: int, stop: int) -> Pieces:
        """Those from the one numbered `start` to before `stop`."""
        if start == 0 and stop == len(self.parameters):
            return self
        return Pieces(
            self.parameters[start:stop],
            self.gradients[start:stop],
            {name: tensors[start:stop] for name, tensors in self.moments.items()},
            self.masters[start:stop],
            self.steps[start:stop],
            self.scales[start:stop],
            self.remainders[start:stop],
            self.ties[start:stop],
        )

    def cut(self, number: int, most: int) -> Iterator[Pieces]:
        """One of them in parts of `most` elements, a multiple of 8, the last one of what is left."""

        def parts(tensors: list[Tensor], size: int = most) -> Iterator[list[Tensor]]:
            return ([part] for part in torch.split(tensors[number], size)) if tensors else repeat([])

        steps, scales = self.steps[number : number + 1], self.scales[number : number + 1]
        names = list(self.moments)
        for parameter, gradient, master, remainder, tie, *moments in zip(
            parts(self.parameters),
            parts(self.gradients),
            parts(self.masters),
            parts(self.remainders),
            parts(self.ties, most // 8),
            *(parts(tensors) for tensors in self.moments.values()),
            strict=False,  # what is not there comes without end
        ):
            named = dict(zip(names, moments, strict=True))
            yield Pieces(parameter, gradient, named, master, steps, scales, remainder, tie)

    def tiles(self, most: int) -> Iterator[Pieces]:
        """Cut the long ones and gather the short ones, in order, into tiles of at most `most` elements."""
        first, gathered = 0, 0
        lengths = self.lengths()
        for number, length in enumerate(lengths):
            if gathered + length > most:
                if number > first:
                    yield self.take(first, number)
                first, gathered = number, 0
            if length > most:
                yield from self.cut(number, most)
                first = number + 1
            else:
                gathered += length
        if first < len(lengths):
            yield self.take(first, len(lengths))


def _chained(lists: Iterable[list[Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(lists))


class Rule(ABC):
    """An update rule without state of its own; one object serves all optimizers of a class."""

    name: ClassVar[str]
    """The algorithm, for messages."""
    moments: ClassVar[tuple[str, ...]]
    """All fields that the rule may keep, in the order in which a state dict shows them."""
    needed: ClassVar[tuple[str, ...]]
    """Those without which a state is not this rule's."""
    needed_options: ClassVar[tuple[str, ...]]
    """Keys that a saved group must have; those that torch added later may be missing."""
    counts_steps: ClassVar[bool] = True
    """Whether a parameter's state has a `step`."""
    sparse_advice: ClassVar[str] = ""

    def moments_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields that a parameter of this group has."""
        return self.moments

    @abstractmethod
    def options(self, group: Mapping[str, Any]) -> Any:
        """A group's options as numbers, for `update`: a frozen dataclass, `lr` among its fields."""

    def is_one_pass(self, options: Any) -> bool:
        """Whether `update` goes over memory once, so that long pieces need not be cut into tiles for the cache."""
        return False

    def takes_any_shape(self, options: Any) -> bool:
        """Whether `update` goes by memory alone on the CPU: a parameter and its gradient may have any dense shape."""
        if not self.is_one_pass(options):
            return False
        kinds = (getattr(options, field.name) for field in fields(options))
        key = self, *(kind for kind in kinds if not isinstance(kind, float | Tensor))  # numbers may be new at each step
        if key not in _GO_BY_MEMORY:
            _GO_BY_MEMORY[key] = _goes_by_memory(self, replace(options, lr=1e-3))
        return _GO_BY_MEMORY[key]

    def counts_turns(self, options: Any) -> bool:
        """Whether a parameter that occurs twice in its group is updated with two counts, not twice with the last."""
        return False

    def begins_moments(self, options: Any) -> bool:
        """Whether a step with these options begins moments that a state was without."""
        return True

    @abstractmethod
    def update(self, pieces: Pieces, options: Any, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Apply one step to plain pieces, no two of the same elements.

        `is_first`: it is their first step, and all moments are zero. Gradients keep their values, unless `grad_scale`
        is given: a 1-element tensor that they are divided by, and which is there only if `fused=True` was asked for.
        """

    def update_in_cuts(self, cuts: Sequence[Pieces], options: Any) -> None:
        """Apply one step to one parameter that is cut into pieces, in order."""
        for pieces in cuts:
            self.update(pieces, options, is_first=False, grad_scale=None)


class NormedRule(Rule):
    """A rule whose step needs norms over each whole parameter, and so two passes over one that is cut.

    `measure` takes the step's gradients into the moments and gives what the norms are summed from; once all of a
    parameter is measured, `scale` makes one factor of it, and `apply` changes the parameter.
    """

    @abstractmethod
    def measure(self, pieces: Pieces, options: Any) -> list[Tensor]:
        """Advance the moments; return for each piece its sums, float64 of shape [blocks, sums], see `block_sums`."""

    @abstractmethod
    def scale(self, sums: Tensor, options: Any) -> Tensor:
        """The factor (0-dim, on the device of `sums`) of a parameter from all its sums, [blocks, sums]."""

    @abstractmethod
    def apply(self, pieces: Pieces, options: Any) -> None:
        """Change the parameters, given their moments after `measure` and their `scales`."""

    def update(self, pieces: Pieces, options: Any, *, is_first: bool, grad_scale: Tensor | None) -> None:
        """Apply one step to whole parameters."""
        scales = [self.scale(sums, options) for sums in self.measure(pieces, options)]
        self.apply(pieces._replace(scales=scales), options)

    def update_in_cuts(self, cuts: Sequence[Pieces], options: Any) -> None:
        """Apply one step to one parameter that is cut into pieces, in order."""
        sums = torch.cat([sums for pieces in cuts for sums in self.measure(pieces, options)])
        for pieces in cuts:
            self.apply(pieces._replace(scales=[self.scale(sums, options)]), options)


_GO_BY_MEMORY: dict[tuple[Any, ...], bool] = {}


def _goes_by_memory(rule: Rule, options: Any) -> bool:
    """Try a rule on a transposed matrix with 1-D state: torch's fused kernels up to 2.13 ask for nothing but memory."""

    def flat() -> Pieces:
        values = torch.linspace(-1, 1, 12, dtype=torch.float32, device="cpu")
        moments = {name: [torch.zeros_like(values)] for name in rule.moments}
        return Pieces([values], [values.flip(0)], moments, [], [step_count(1.0)])

    def shaped(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.view(3, 4).t() for tensor in tensors]

    one, other = flat(), flat()
    rule.update(one, options, is_first=True, grad_scale=None)
    try:
        parameters, gradients = shaped(other.parameters), shaped(other.gradients)
        rule.update(other._replace(parameters=parameters, gradients=gradients), options, is_first=True, grad_scale=None)
    except RuntimeError:  # of a torch that compares shapes
        return False
    return all(
        torch.equal(tensor, another)
        for tensor, another in zip(
            [*one.parameters, *(moment for moments in one.moments.values() for moment in moments)],
            [*other.parameters, *(moment for moments in other.moments.values() for moment in moments)],
            strict=True,
        )
    )


def block_sums(values: Tensor) -> Tensor:
    """Sums of squares over each `CUT_ELEMENTS` elements of a 1-D tensor, in float64: [blocks].

    However a parameter is cut, its blocks are the same, and so is what is summed from them.
    """
    whole = values.numel() // CUT_ELEMENTS * CUT_ELEMENTS
    squares = values.double().square()
    rows = squares[:whole].view(-1, CUT_ELEMENTS).sum(1)
    return rows if whole == values.numel() else torch.cat([rows, squares[whole:].sum().view(1)])


def blocks_of(elements: int) -> int:
    """How many sums `block_sums` gives."""
    return -(-elements // CUT_ELEMENTS)


def arithmetic_of(group: Mapping[str, Any]) -> str:
    """Which of torch's formulas a group asks for, `fused`, `foreach` or `for-loop`: they round differently."""
    if group.get("fused") or not (group.get("foreach") or group.get("fused") is False):
        return "fused"
    return "foreach" if group.get("foreach") else "for-loop"


def as_number(option: float | Tensor, arithmetic: str) -> float | Tensor:
    """An option as a number; torch's for-loop rounds a Tensor as it is. Raises TypeError for what is no number."""
    number = float(option)
    return option if arithmetic == "for-loop" else number


def step_count(steps: float = 0.0) -> Tensor:
    """A step count: a float32 scalar on the CPU, whatever the process has set as its default dtype and device."""
    return torch.full((), steps, dtype=torch.float32, device="cpu")


def unscaled(gradients: list[Tensor], grad_scale: Tensor | None) -> list[Tensor]:
    """Gradients divided by a GradScaler's scale, for formulas that do not do it themselves as fused kernels do."""
    if grad_scale is None:
        return gradients
    return [gradient / grad_scale.to(gradient.device) for gradient in gradients]


def on_device(steps: list[Tensor], device: torch.device) -> list[Tensor]:
    """Step counts where a fused kernel wants them."""
    if device.type == "cpu":
        return steps
    return list(torch.stack(steps).to(device, non_blocking=True).unbind())
