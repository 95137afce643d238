"""`optimizer.state` as torch, DCP and the frameworks expect it, read through to the store and written through.

A `StateView` maps parameters to `ParameterState`s, which map field names to CPU tensors of the parameter's shape.
Reading copies out of the tiers and moves nothing. A tensor that was handed out is the same object until the next step;
what was changed in it in place is noticed by its version and written back before the state is used again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

from tierstore.binding import Binding, local_of, sharded_like
from tierstore.errors import StateDictError
from tierstore.layout import as_real, empty_like_stored
from tierstore.results import Results

STEP = "step"
KNOWN_FIELDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
REQUIRED_FIELDS = (STEP, "exp_avg", "exp_avg_sq")


class Handed:
    """Tensors handed out since the last step, and how to notice that they were changed."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._tensors: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._results: Results | None = None

    def get(self, position: int, name: str) -> Tensor:
        """Read one field of a parameter, or hand out again what was handed out before."""
        if (position, name) not in self._tensors:
            if self._results is None:
                self._results = Results.under(self._binding.policy)
            flat = self._binding.read({position: (name,)}, self._results)[position][name]
            tensor = shaped(self._binding.members[position].parameter, flat)
            self._tensors[position, name] = (tensor, _version(tensor))
        return self._tensors[position, name][0]

    def is_unchanged(self, position: int, name: str, value: object) -> bool:
        """Whether `value` is what was handed out, and still as it was."""
        tensor, version = self._tensors.get((position, name), (None, 0))
        return tensor is not None and value is tensor and _version(tensor) == version

    def absorb(self) -> None:
        """Write back what was changed in place."""
        changed: dict[int, dict[str, Tensor]] = {}
        for (position, name), (tensor, version) in self._tensors.items():
            if _version(tensor) != version:
                changed.setdefault(position, {})[name] = tensor
        if changed:
            self._binding.write(changed)
            for position, fields in changed.items():
                for name, tensor in fields.items():
                    self._tensors[position, name] = (tensor, _version(tensor))

    def forget(self, position: int | None = None) -> None:
        """Let go of what was handed out, of one parameter or of all."""
        keys = [key for key in self._tensors if position in (None, key[0])]
        for key in keys:
            del self._tensors[key]
        if not self._tensors:
            self._results = None


class Owner(Protocol):
    """What a view needs of the optimizer."""

    def bound(self) -> tuple[Binding, Handed]:
        """The binding of the parameters as they are now, made if need be, and what was handed out from it."""

    def has_state(self) -> bool:
        """Whether there may be any state; False spares making a binding to find none."""

    def position_of(self, parameter: object) -> int:
        """The position of a parameter among the distinct ones. Raises KeyError for anything else."""


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
        binding, handed = self._owner.bound()
        position = self._owner.position_of(self._parameter)
        return binding.steps[position] if name == STEP else handed.get(position, name)

    def __setitem__(self, name: str, value: Any) -> None:
        write_state(self._owner, {self._owner.position_of(self._parameter): {name: value}}, is_whole=False)

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name!r} cannot be deleted alone: AdamW needs all fields; delete the parameter's whole state")

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
        binding, _ = self._owner.bound()
        position = self._owner.position_of(self._parameter)
        return (STEP, *field_order(binding, position)) if position in binding.steps else ()


class StateView(MutableMapping[Tensor, Any]):
    """Parameters to their states; only those that have stepped (or were loaded) are in it."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def __getitem__(self, parameter: Tensor) -> Any:
        self._owner.position_of(parameter)
        return ParameterState.of(self._owner, parameter)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As a dict's: unlike `state[parameter]`, nothing is made for a parameter that never stepped."""
        is_there = parameter in self
        return self[parameter] if is_there else default

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        write_state(self._owner, {self._owner.position_of(parameter): state}, is_whole=True)

    def __delitem__(self, parameter: Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        write_state(self._owner, {self._owner.position_of(parameter): {}}, is_whole=True)

    def __iter__(self) -> Iterator[Tensor]:
        if not self._owner.has_state():
            return iter(())
        binding, _ = self._owner.bound()
        return iter([binding.members[position].parameter for position in sorted(binding.steps)])

    def __len__(self) -> int:
        return len(self._owner.bound()[0].steps) if self._owner.has_state() else 0

    def __contains__(self, parameter: object) -> bool:
        if not self._owner.has_state():
            return False
        try:
            return self._owner.position_of(parameter) in self._owner.bound()[0].steps
        except KeyError:
            return False

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
        local_of(binding.members[position].parameter).numel() * field.dtype.itemsize
        for position in wanted
        for field in binding.fields_of(position)
    )
    read = binding.read(wanted, Results.under(binding.policy, expected))
    return {
        position: {
            STEP: binding.steps[position].clone(),
            **{name: shaped(binding.members[position].parameter, flat) for name, flat in fields.items()},
        }
        for position, fields in read.items()
    }


def write_state(owner: Owner, states: Mapping[int, Mapping[str, Any]], *, is_whole: bool) -> None:
    """Write states of parameters, by position. `is_whole`: what is not given is as for a parameter that never stepped.

    Raises StateDictError, with nothing changed, for a field that AdamW does not have or values of another shape.
    """
    binding, handed = owner.bound()
    handed.absorb()
    for position, state in states.items():
        check_state(binding.members[position].parameter, binding.members[position].name, state, is_whole=is_whole)
    values: dict[int, dict[str, Tensor]] = {}
    steps: dict[int, Tensor] = {}
    for position, state in states.items():
        if not state and is_whole:
            continue  # its state is taken away
        is_new = is_whole or position not in binding.steps
        steps[position] = _step_of(state, None if is_new else binding.steps[position])
        values[position] = _fields_to_write(binding, handed, position, state, is_new)
    binding.write({position: fields for position, fields in values.items() if fields})
    for position, state in states.items():
        if values.get(position) or not state:
            handed.forget(position)
        if position not in steps:
            binding.steps.pop(position, None)
    binding.steps.update(steps)


def check_state(parameter: Tensor, name: str, state: Mapping[str, Any], *, is_whole: bool) -> None:
    """Refuse state that is not AdamW's, or not this parameter's."""
    if not isinstance(state, Mapping):
        raise StateDictError(f"the state of {name} is a {type(state).__name__}, not a mapping of fields to tensors")
    unknown = [field for field in state if field not in (STEP, *KNOWN_FIELDS)]
    missing = [field for field in REQUIRED_FIELDS if field not in state] if is_whole and state else []
    if unknown or missing:
        raise StateDictError(
            f"the state of {name} is not AdamW's: it has {sorted(map(str, state))}; unknown: {unknown}, "
            f"missing: {missing}"
        )
    for field in KNOWN_FIELDS:
        value = state.get(field)
        if value is not None and not (field == "master" and isinstance(value, Mapping) and not value):
            _check_value(parameter, f"{field} of {name}", value)
    step = state.get(STEP, 0.0)
    if (isinstance(step, Tensor) and step.numel() != 1) or not isinstance(step, Tensor | int | float):
        raise StateDictError(f"step of {name} is {step!r}, not one number")


def _check_value(parameter: Tensor, what: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise StateDictError(f"{what} is a {type(value).__name__}, not a tensor")
    wanted, found = parameter, value
    if hasattr(parameter, "_spec") != hasattr(value, "_spec"):
        wanted, found = getattr(parameter, "_local_tensor", parameter), getattr(value, "_local_tensor", value)
    if as_real(found).shape != as_real(wanted).shape:
        shown = tuple(wanted.shape)
        raise StateDictError(f"{what} has shape {tuple(found.shape)}, the parameter {shown}: this is another model's")


def field_order(binding: Binding, position: int) -> tuple[str, ...]:
    """The names of a parameter's fields as torch orders them, then `master`."""
    names = {field.name for field in binding.fields_of(position)}
    return tuple(name for name in KNOWN_FIELDS if name in names)


def shaped(parameter: Tensor, flat: Tensor) -> Tensor:
    """Give a 1-D real tensor in storage order the parameter's shape, strides, complexity and sharding."""
    local = local_of(parameter)
    tensor, _ = empty_like_stored(local, flat.dtype, flat)
    if getattr(parameter, "_local_tensor", parameter).is_complex():
        tensor = torch.view_as_complex(tensor)
    return _like_dtensor(parameter, tensor) if hasattr(parameter, "_local_tensor") else tensor


def _like_dtensor(parameter: Any, local: Tensor) -> Tensor:
    """Wrap a CPU tensor as a DTensor with the parameter's mesh and placements, not moving it to the mesh's device."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = parameter._spec
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    make: Any = DTensor  # its constructor is not typed
    wrapped: Tensor = make(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)
    return wrapped


def _version(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor)._version


def _step_of(state: Mapping[str, Any], current: Tensor | None) -> Tensor:
    if STEP not in state:
        return torch.tensor(0.0) if current is None else current
    step = state[STEP]
    if isinstance(step, Tensor):
        return step.detach().to(device="cpu", dtype=torch.float32, copy=True).reshape(())
    return torch.tensor(float(step))


def _fields_to_write(
    binding: Binding, handed: Handed, position: int, state: Mapping[str, Any], is_new: bool
) -> dict[str, Tensor]:
    """The values to write: those given, and for a new state zeros and the parameter itself for those not given."""
    parameter = binding.members[position].parameter
    values: dict[str, Tensor] = {}
    for name in field_order(binding, position):
        value = state.get(name)
        if handed.is_unchanged(position, name, value):
            continue
        if isinstance(value, Tensor):
            values[name] = sharded_like(parameter, value)
        elif is_new:
            values[name] = parameter if name == "master" else torch.zeros(()).expand(local_of(parameter).shape)
    return values
