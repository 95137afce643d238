"""`optimizer.state` as torch, DCP and the frameworks expect it, read through to the store and written through.

A `StateView` maps parameters to `ParameterState`s, which map field names to CPU tensors of the parameter's shape.
Reading copies out of the tiers and moves nothing (see `handed`). Views are made anew at each access; one that is held
while what it shows is deleted or replaced keeps the values it had.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torch import Tensor

from tierstore.binding import Binding
from tierstore.errors import StateDictError, TierstoreError
from tierstore.handed import Handed
from tierstore.states import STEP, names_of, write_state


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

    @property
    def views(self) -> Views:
        """The views that somebody still has, by id."""

    @property
    def aside(self) -> dict[Tensor, dict[str, Any]]:
        """The states of tensors that have left the groups."""


class View(Protocol):
    """A view of state that can outlive it."""

    def shows(self, parameter: Tensor) -> bool:
        """Whether it shows one parameter's state, and this one's."""

    def let_go(self) -> None:
        """Become what it shows, apart from the store."""


Views = weakref.WeakValueDictionary[int, View]


class ParameterState(MutableMapping[str, Any]):
    """The state of one parameter: empty until its first step. `ParameterState(mapping)` is a plain dict.

    One that is held while the parameter's state is deleted or replaced keeps the values it had, as a dict would.
    """

    _owner: Owner
    _parameter: Tensor
    _plain: dict[str, Any] | None

    def __new__(cls, values: Mapping[str, Any] | None = None) -> Any:
        return dict(values or {})

    @classmethod
    def of(cls, owner: Owner, parameter: Tensor) -> ParameterState:
        """Bind a view to a parameter."""
        view: ParameterState = object.__new__(cls)
        view._owner, view._parameter, view._plain = owner, parameter, None
        owner.views[id(view)] = view
        return view

    def shows(self, parameter: Tensor) -> bool:
        """Whether it shows this parameter's state."""
        return self._parameter is parameter

    def let_go(self) -> None:
        """Become what it shows, apart from the store."""
        if self._plain is None:
            self._plain = {name: value.clone() if name == STEP else value for name, value in self.items()}

    def __getitem__(self, name: str) -> Any:
        if self._plain is not None:
            return self._plain[name]
        if name not in self._names():
            raise KeyError(name)
        binding, handed, position = self._owner.bound_for(self._parameter)
        return binding.steps[position] if name == STEP else handed.get(position, name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self._plain is not None:
            self._plain[name] = value
            return
        binding, handed, position = self._owner.bound_for(self._parameter, is_written=True)
        if value is None and name in self and name in binding.rule.moments:
            del self[name]
        else:
            write_state(binding, handed, {position: {name: value}}, is_whole=False)

    def __delitem__(self, name: str) -> None:
        if self._plain is not None:
            del self._plain[name]
            return
        if name not in self._names():
            raise KeyError(name)
        binding, handed, position = self._owner.bound_for(self._parameter)
        if name not in binding.rule.moments or binding.rule.needed:
            raise TypeError(
                f"{name!r} cannot be taken away alone: a step needs all fields; delete the parameter's whole state"
            )
        handed.forget_fields(position, binding.rule.moments)
        binding.unbegun.add(position)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._names())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))

    def _names(self) -> tuple[str, ...]:
        if self._plain is not None:
            return tuple(self._plain)
        if not self._owner.has_state():
            return ()
        binding, _, position = self._owner.bound_for(self._parameter)
        return names_of(binding, position) if position in binding.steps else ()


class StateView(MutableMapping[Tensor, Any]):
    """Parameters to their states; only those that have stepped (or were loaded) are in it.

    Besides, as torch has it, tensors that had state and have left the groups. One that is held while all state is
    replaced keeps what it had.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._plain: dict[Tensor, Any] | None = None
        owner.views[id(self)] = self

    def shows(self, parameter: Tensor) -> bool:
        """Not a single parameter's state."""
        return False

    def let_go(self) -> None:
        """Become what it shows, apart from the store."""
        if self._plain is None:
            self._plain = {parameter: dict(state) for parameter, state in self.items()}

    def __getitem__(self, parameter: Tensor) -> Any:
        if self._plain is not None:
            return self._plain[parameter]
        if not self._owner.knows(parameter):
            return self._owner.aside[parameter]
        return ParameterState.of(self._owner, parameter)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """As a dict's: unlike `state[parameter]`, nothing is made for a parameter that never stepped."""
        is_there = parameter in self
        return self[parameter] if is_there else default

    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        if self._plain is not None:
            self._plain[parameter] = state
            return
        if not self._owner.knows(parameter):
            raise StateDictError(
                f"a tensor of shape {tuple(parameter.shape)} is in none of the param_groups: put it there, then give "
                f"it state"
            )
        let_go(self._owner.views, parameter)
        binding, handed, position = self._owner.bound_for(parameter, is_written=True)
        write_state(binding, handed, {position: unwrap_view(state)}, is_whole=True)

    def __delitem__(self, parameter: Tensor) -> None:
        if self._plain is not None:
            del self._plain[parameter]
            return
        if parameter not in self:
            raise KeyError(parameter)
        if not self._owner.knows(parameter):
            del self._owner.aside[parameter]
            return
        let_go(self._owner.views, parameter)
        binding, handed, position = self._owner.bound_for(parameter)
        write_state(binding, handed, {position: {}}, is_whole=True)

    def clear(self) -> None:
        """Make all parameters fresh, reading nothing but what somebody still looks at."""
        for parameter in list(self):
            del self[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        if self._plain is not None:
            return iter(self._plain)
        bound = self._owner.bound()[0].with_state() if self._owner.has_state() else {}  # first: one may return by it
        return iter((*bound, *self._owner.aside))

    def __len__(self) -> int:
        if self._plain is not None:
            return len(self._plain)
        bound = len(self._owner.bound()[0].steps) if self._owner.has_state() else 0  # first: one may return by it
        return bound + len(self._owner.aside)

    def __contains__(self, parameter: object) -> bool:
        if self._plain is not None:
            return parameter in self._plain
        if not self._owner.knows(parameter):
            return parameter in self._owner.aside
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


def let_go(views: Views, parameter: Tensor | None = None) -> None:
    """Let views that somebody still has keep what they show: of one parameter, or all.

    What can no longer be read cannot be kept, and must not stand in the way of what replaces it.
    """
    for view in list(views.values()):
        if parameter is None or view.shows(parameter):
            with contextlib.suppress(TierstoreError):
                view.let_go()


def unwrap_view(state: Any) -> Any:
    """What a view of a parameter's state shows, as a dict; anything else as it is."""
    return dict(state) if isinstance(state, ParameterState) else state
