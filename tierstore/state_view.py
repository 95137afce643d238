"""`optimizer.state` as torch, DCP and the frameworks expect it, read through to the store and written through.

A `StateView` maps parameters to `ParameterState`s, which map field names to CPU tensors of the parameter's shape.
Reading copies out of the tiers and moves nothing. A tensor that was handed out is the same object until the next step;
what was changed in it in place is noticed by its version and written back before the state is used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore.binding import Binding
from tierstore.errors import StateDictError
from tierstore.guard import in_plain_torch
from tierstore.layout import as_real, empty_like_stored
from tierstore.members import Member, sharded_like, survey
from tierstore.results import Results
from tierstore.rules import Rule, step_count

STEP = "step"
MASTER = "master"


class Handed:
    """Tensors handed out since the last step, and how to notice that they were changed."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._tensors: dict[int, dict[str, tuple[Tensor, object]]] = {}  # by position and field, with its version
        self._results: Results | None = None

    @in_plain_torch()
    def get(self, position: int, name: str) -> Tensor:
        """Read one field of a parameter, or hand out again what was handed out before."""
        fields = self._tensors.setdefault(position, {})
        if name not in fields:
            if self._results is None:
                self._results = Results.under(self._binding.policy)
            flat = self._binding.read({position: (name,)}, self._results)[position][name]
            tensor = shaped(self._binding.members[position], flat)
            fields[name] = (tensor, _version(tensor))
        return fields[name][0]

    def is_unchanged(self, position: int, name: str, value: object) -> bool:
        """Whether `value` is what was handed out, and still as it was."""
        tensor, version = self._tensors.get(position, {}).get(name, (None, None))
        return tensor is not None and value is tensor and _version(tensor) == version

    def absorb(self) -> None:
        """Write back what was changed in place."""
        changed = {
            position: {name: tensor for name, (tensor, version) in fields.items() if _version(tensor) != version}
            for position, fields in self._tensors.items()
        }
        changed = {position: fields for position, fields in changed.items() if fields}
        if changed:
            self._binding.write(changed)
            for position, tensors in changed.items():
                self._tensors[position] |= {name: (tensor, _version(tensor)) for name, tensor in tensors.items()}

    def forget(self) -> None:
        """Let go of all that was handed out."""
        self._tensors.clear()
        self._results = None

    def forget_fields(self, position: int, names: Iterable[str]) -> None:
        """Let go of some fields of one parameter, which have other values now."""
        for name in names:
            self._tensors.get(position, {}).pop(name, None)


class Owner(Protocol):
    """What a view needs of the optimizer."""

    def bound(self) -> tuple[Binding, Handed]:
        """The binding of the parameters as they are now, made if need be, and what was handed out from it."""

    def bound_for(self, parameter: object, *, is_written: bool = False) -> tuple[Binding, Handed, int]:
        """The same, and the parameter's position. Looks at the others only if this one is not bound as it is now.

        `is_written`: see to room for its state, even if it is frozen. Raises KeyError for what is no parameter here.
        """

    def has_state(self) -> bool:
        """Whether there may be any state; False spares making a binding to find none."""

    def knows(self, parameter: object) -> bool:
        """Whether it is one of the parameters; makes no binding."""


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter: empty until its first step. `ParameterState(mapping)` is a plain dict."""

    _owner: Owner
    _parameter: Tensor

    def __new__(cls, values: Mapping[str, Any] | None = None) -> Any:
        return dict(values or {})

    @classmethod
    def of(cls, owner: Owner, parameter: Tensor) -> ParameterState:
        """Bind a view to a parameter."""
        view: ParameterState = object.__new__(cls)
        view._owner, view._parameter = owner, parameter
        return view

    def __getitem__(self, name: str) -> Any:
        if name not in self._names():
            raise KeyError(name)
        binding, handed, position = self._owner.bound_for(self._parameter)
        return binding.steps[position] if name == STEP else handed.get(position, name)

    def __setitem__(self, name: str, value: Any) -> None:
        binding, handed, position = self._owner.bound_for(self._parameter, is_written=True)
        write_state(binding, handed, {position: {name: value}}, is_whole=False)

    def __delitem__(self, name: str) -> None:
        raise TypeError(
            f"{name!r} cannot be deleted alone: a step needs all fields; delete the parameter's whole state"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._names())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def _names(self) -> tuple[str, ...]:
        if not self._owner.has_state():
            return ()
        binding, _, position = self._owner.bound_for(self._parameter)
        return names_of(binding, position) if position in binding.steps else ()


class StateView(MutableMapping[Tensor, Any]):
    """Parameters to their states; only those that have stepped (or were loaded) are in it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __getitem__(self, parameter: Tensor) -> Any:
        if not self._owner.knows(parameter):
            raise KeyError(parameter)
        return ParameterState.of(self._owner, parameter)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As a dict's: unlike `state[parameter]`, nothing is made for a parameter that never stepped."""
        is_there = parameter in self
        return self[parameter] if is_there else default

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        binding, handed, position = self._owner.bound_for(parameter, is_written=True)
        write_state(binding, handed, {position: state}, is_whole=True)

    def __delitem__(self, parameter: Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        binding, handed, position = self._owner.bound_for(parameter)
        write_state(binding, handed, {position: {}}, is_whole=True)

    def __iter__(self) -> Iterator[Tensor]:
        if not self._owner.has_state():
            return iter(())
        return iter(self._owner.bound()[0].with_state())

    def __len__(self) -> int:
        return len(self._owner.bound()[0].steps) if self._owner.has_state() else 0

    def __contains__(self, parameter: object) -> bool:
        if not self._owner.has_state():
            return False
        try:
            binding, _, position = self._owner.bound_for(parameter)
        except KeyError:
            return False
        return position in binding.steps

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} parameters)"

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, ({parameter: dict(state) for parameter, state in self.items()},))


# -- whole states -----------------------------------------------------------------------------------------------


def materialise(binding: Binding, handed: Handed) -> dict[int, dict[str, Any]]:
    """Copy all state out as plain dicts of CPU tensors, by position: memory of its own, not changed by later steps."""
    handed.absorb()
    wanted = {position: field_order(binding, position) for position in sorted(binding.steps)}
    expected = sum(
        binding.members[position].form.numel() * field.dtype.itemsize
        for position in wanted
        for field in binding.fields_of(position)
    )
    read = binding.read(wanted, Results.under(binding.policy, expected))
    return {
        position: {
            **({STEP: binding.steps[position].clone()} if binding.rule.counts_steps else {}),
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
) -> dict[Tensor, Mapping[str, Any]]:
    """Give the states of an old binding to its parameters, or to those that have taken their places.

    Raises StateDictError for state of another shape than the new parameter, or of one that is gone without successor.
    """
    members = survey(groups, old.rule)
    present = {id(member.parameter): member for member in members}
    taken_over: dict[Tensor, Mapping[str, Any]] = {}
    for position, state in states.items():
        was = old.members[position]
        now = present.get(id(was.parameter)) or (members[position] if position < len(members) else None)
        if now is None or (now.parameter is not was.parameter and id(now.parameter) in old.position):
            raise StateDictError(
                f"{was.name} has state, but is no longer in param_groups: put it back, and delete its state "
                f"(`del optimizer.state[parameter]`) before taking it out"
            )
        if now.dtype != was.dtype:
            state.pop(MASTER, None)  # the parameter in its new dtype is the truth
        check_state(old.rule, now.parameter, now.name, state, is_whole=True)
        taken_over[now.parameter] = state
    return taken_over


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
    if not is_number or not float(step) >= 0:
        raise StateDictError(f"step of {name} is {step!r}, not one number, zero or more")


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
    """The names of a parameter's fields in the rule's order, then `master`."""
    names = {field.name for field in binding.fields_of(position)}
    moments = () if position in binding.unbegun else binding.rule.moments
    return tuple(name for name in (*moments, MASTER) if name in names)


def names_of(binding: Binding, position: int) -> tuple[str, ...]:
    """What a state dict shows of a parameter that has state."""
    return (*((STEP,) if binding.rule.counts_steps else ()), *field_order(binding, position))


def shaped(member: Member, flat: Tensor) -> Tensor:
    """Give a 1-D real tensor in storage order the shape, strides and sharding a parameter had at binding."""
    tensor, _ = empty_like_stored(member.form, flat.dtype, flat)
    if member.dtype.is_complex:
        tensor = torch.view_as_complex(tensor)
    return _like_dtensor(member.parameter, tensor) if hasattr(member.parameter, "_local_tensor") else tensor


def _like_dtensor(parameter: Any, local: Tensor) -> Tensor:
    """Wrap a CPU tensor as a DTensor with the parameter's mesh and placements, not moving it to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = parameter._spec
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    make: Any = DTensor  # its constructor is not typed
    wrapped: Tensor = make(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
    return wrapped


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes when the tensor is written to: a DTensor counts its own operations, its shard those on the shard."""
    return tensor._version, getattr(tensor, "_local_tensor", tensor)._version


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
