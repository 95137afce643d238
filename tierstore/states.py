"""Whole states of parameters: checked, written, copied out, carried from one binding to the next.

A state is a mapping of field names to tensors of the parameter's shape, as torch's optimizers have it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.checkpoint.entries import MOST_STEPS
from tierstore.errors import PartialStateWarning, StateDictError, TransferError
from tierstore.guard import in_plain_torch
from tierstore.handed import Handed, shaped
from tierstore.layout import as_real
from tierstore.members import Member, sharded_like, survey
from tierstore.records import MASTER
from tierstore.results import Results
from tierstore.rules import Rule, step_count

STEP = "step"


def materialise(binding: Binding, handed: Handed, *, is_partial: bool = False) -> dict[int, dict[str, Any]]:
    """Copy all state out as plain dicts of CPU tensors, by position: memory of its own, not changed by later steps.

    `is_partial`: what cannot be read is left out, with a PartialStateWarning.
    """
    handed.absorb()
    wanted = {position: field_order(binding, position) for position in sorted(binding.steps)}
    expected = sum(
        binding.members[position].form.numel() * field.dtype.itemsize
        for position in wanted
        for field in binding.fields_of(position)
    )
    missing: dict[int, TransferError] | None = {} if is_partial else None
    read = binding.read(wanted, Results.under(binding.policy, expected), missing)
    if missing:
        why = {binding.members[position].name: str(error) for position, error in sorted(missing.items())}
        warnings.warn(PartialStateWarning(why), stacklevel=2)
    return {
        position: {
            **({STEP: binding.steps.copy_of(position)} if binding.rule.counts_steps else {}),
            **{name: shaped(binding.members[position], flat) for name, flat in fields.items()},
        }
        for position, fields in read.items()
    }


@in_plain_torch()
def write_state(binding: Binding, handed: Handed, states: Mapping[int, Mapping[str, Any]], *, is_whole: bool) -> None:
    """Write states of parameters, by position. `is_whole`: what is not given is as for a parameter that never stepped.

    Raises StateDictError, with nothing changed, for a field that the rule does not have or values of another shape.
    """
    handed.absorb()
    for position, state in states.items():
        member = binding.members[position]
        check_state(binding.rule, member.parameter, member.name, state, is_whole=is_whole)
    values: dict[int, dict[str, Tensor]] = {}
    steps: dict[int, Tensor] = {}
    for position, state in states.items():
        if is_whole and not (given(state) and binding.keeps_state(position)):
            continue  # its state is taken away
        is_new = is_whole or position not in binding.steps
        steps[position] = _step_of(state, None if is_new else binding.steps[position])
        values[position] = _fields_to_write(binding, handed, position, state, is_new)
    binding.write({position: fields for position, fields in values.items() if fields})
    for position in states:
        handed.forget_fields(position, values.get(position, (*binding.rule.moments, MASTER)))
        if position not in steps:
            binding.steps.pop(position, None)
        _note_moments(binding, position, states[position], is_whole)
    binding.steps.update(steps)


def _note_moments(binding: Binding, position: int, state: Mapping[str, Any], is_whole: bool) -> None:
    """Note whether a state that was written has the rule's moments; only of some rules one may be without."""
    if any(name in given(state) for name in binding.rule.moments):
        binding.unbegun.discard(position)
    elif is_whole and not binding.rule.needed and given(state):
        binding.unbegun.add(position)


def check_states(rule: Rule, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, Any]) -> None:
    """Refuse states that are not the rule's or not of these parameters."""
    members = {id(member.parameter): member for member in survey(groups, rule)}
    for parameter, state in states.items():
        member = members.get(id(parameter))
        if member is None:
            what = tuple(parameter.shape) if isinstance(parameter, Tensor) else parameter
            raise StateDictError(f"there is state for {what!r}, which is in none of the param_groups")
        check_state(rule, parameter, member.name, state, is_whole=True)


def carried(
    old: Binding, states: Mapping[int, dict[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[Tensor, Mapping[str, Any]], dict[Tensor, dict[str, Any]]]:
    """Give the states of an old binding to its parameters, or to those of the same shape that took their places.

    Returns the states by parameter, and those of parameters that are gone without such a successor. Raises
    StateDictError for a parameter whose own shape has changed.
    """
    members = survey(groups, old.rule)
    present = {id(member.parameter): member for member in members}
    taken_over: dict[Tensor, Mapping[str, Any]] = {}
    left: dict[Tensor, dict[str, Any]] = {}
    for position, state in states.items():
        was = old.members[position]
        now = present.get(id(was.parameter)) or (members[position] if position < len(members) else None)
        if now is None or (now.parameter is not was.parameter and not _succeeds(now, was, old)):
            left[was.parameter] = state
            continue
        if now.dtype != was.dtype:
            state.pop(MASTER, None)  # the parameter in its new dtype is the truth
        check_state(old.rule, now.parameter, now.name, state, is_whole=True)
        taken_over[now.parameter] = state
    return taken_over, left


def _succeeds(now: Member, was: Member, old: Binding) -> bool:
    """Whether a new parameter is what a framework has made of an old one: it is in its place, and has its shape.

    A complex one is none of a real one of as many numbers: state of the one has no meaning for the other.
    """
    is_alike = now.parameter.shape == was.parameter.shape or now.form.shape == was.form.shape
    is_as_real = now.dtype.is_complex == was.dtype.is_complex
    return id(now.parameter) not in old.position and is_alike and is_as_real


def given(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a state has a value: torch saves None for a buffer not made yet, DCP {} for a field that was missing."""
    return {
        name: value
        for name, value in state.items()
        if value is not None and not (isinstance(value, Mapping) and not value)
    }


def check_state(rule: Rule, parameter: Tensor, name: str, state: Mapping[str, Any], *, is_whole: bool) -> None:
    """Refuse state that is not the rule's, or not this parameter's."""
    if not isinstance(state, Mapping):
        raise StateDictError(f"the state of {name} is a {type(state).__name__}, not a mapping of fields to tensors")
    steps, values = (STEP,) if rule.counts_steps else (), given(state)
    unknown = [field for field in state if field not in (*steps, *rule.moments, MASTER)]
    missing = [field for field in (*steps, *rule.needed) if field not in values] if is_whole and values else []
    if unknown or missing:
        raise StateDictError(
            f"the state of {name} is not {rule.name}'s: it has {sorted(map(str, state))}; unknown: {unknown}, "
            f"missing: {missing}"
        )
    for field in (*rule.moments, MASTER):
        if field in values:
            _check_value(parameter, f"{field} of {name}", values[field])
        elif field in state and not is_whole and field != MASTER:
            raise StateDictError(f"{field} of {name} cannot be {state[field]!r}: delete the parameter's whole state")
    step = state.get(STEP, 0.0)
    is_number = (
        step.numel() == 1 and not step.is_complex() if isinstance(step, Tensor) else isinstance(step, int | float)
    )
    if not is_number or not 0 <= (step.item() if isinstance(step, Tensor) else step) <= MOST_STEPS:
        raise StateDictError(f"step of {name} is {step!r}, not one number from zero to {MOST_STEPS:.4g}")


def _check_value(parameter: Tensor, what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise StateDictError(f"{what} is a {type(value).__name__}, not a tensor")
    if value.is_meta:
        raise StateDictError(f"{what} is on the meta device and has no values")
    if value.layout is not torch.strided or value.is_quantized:
        raise StateDictError(
            f"{what} is {value.layout}{', quantized' if value.is_quantized else ''}, not a dense tensor"
        )
    wanted, found = parameter, value
    if hasattr(parameter, "_spec") != hasattr(value, "_spec"):
        wanted, found = getattr(parameter, "_local_tensor", parameter), getattr(value, "_local_tensor", value)
    if as_real(found).shape != as_real(wanted).shape:
        shown = tuple(wanted.shape)
        raise StateDictError(f"{what} has shape {tuple(found.shape)}, the parameter {shown}: this is another model's")


def field_order(binding: Binding, position: int) -> tuple[str, ...]:
    """The names of a parameter's fields in the rule's order, then `master`; of those that there are to read."""
    names = {field.name for field in binding.fields_of(position)}
    if MASTER in names and binding.has_lost_master(position):
        names.remove(MASTER)
    moments = () if position in binding.unbegun else binding.rule.moments
    return tuple(name for name in (*moments, MASTER) if name in names)


def names_of(binding: Binding, position: int) -> tuple[str, ...]:
    """What a state dict shows of a parameter that has state."""
    return (*((STEP,) if binding.rule.counts_steps else ()), *field_order(binding, position))


def _step_of(state: Mapping[str, Any], current: Tensor | None) -> Tensor:
    if STEP not in state:
        return step_count() if current is None else current
    step = state[STEP]
    if isinstance(step, Tensor):
        return step.detach().to(device="cpu", dtype=torch.float32, copy=True).reshape(())
    return step_count(float(step))


def _fields_to_write(
    binding: Binding, handed: Handed, position: int, state: Mapping[str, Any], is_new: bool
) -> dict[str, Tensor]:
    """The values to write: those given, and for a new state zeros and the parameter itself for those not given."""
    parameter = binding.members[position].parameter
    values: dict[str, Tensor] = {}
    for name in (field.name for field in binding.fields_of(position)):
        value = state.get(name)
        if handed.is_unchanged(position, name, value):
            continue
        if isinstance(value, Tensor):
            values[name] = sharded_like(parameter, value)
        elif is_new:
            values[name] = parameter if name == MASTER else torch.zeros((), device="cpu")
    return values
