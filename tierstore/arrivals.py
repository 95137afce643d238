"""Hooks on parameters, and what they heard: which gradients backward has finished, and what these were then.

A hook is called on autograd's thread, once for each parameter and backward, when its gradient is whole. What is noted
here decides nothing and touches no state.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tierstore.device import Device, Event

Handles = dict[int, tuple[weakref.ref[Tensor], RemovableHandle]]


@dataclass(slots=True)
class Arrival:
    """A gradient that was whole when it was noted, and the point in its stream from which on it is.

    It is held, not by a weak reference: torch gives memory back under tensors that only weak references led to.
    """

    parameter: Tensor
    gradient: Tensor | None
    version: int
    event: Event | None

    @classmethod
    def of(cls, parameter: Tensor, device: Device | None) -> Arrival:
        """Note a parameter's gradient, on the thread and stream that made it."""
        assert parameter.grad is not None
        event = None if device is None else device.record()
        return cls(parameter, parameter.grad, _version_of(parameter.grad), event)

    def let_go(self) -> None:
        """Hold the gradient no longer: it was dropped on purpose."""
        self.gradient = None

    def is_there(self) -> bool:
        """Whether the parameter still has this gradient, with whatever values."""
        return self.parameter.grad is not None and self.gradient is self.parameter.grad

    def is_unchanged(self) -> bool:
        """Whether the parameter still has this gradient, and nobody has changed it in place."""
        gradient = self.parameter.grad
        return gradient is not None and self.is_there() and _version_of(gradient) == self.version


class Hooks:
    """Hooks on parameters that call one method, as long as its object lives; they go when this does.

    torch copies and pickles none of them with a parameter.
    """

    def __init__(self, heard: Callable[[Tensor], None]) -> None:
        method = weakref.WeakMethod(heard)

        def hook(parameter: Tensor) -> None:
            hear = method()
            if hear is not None:
                hear(parameter)

        self.pauses = 0
        """How many callers want nothing to be heard now."""
        self._hook = hook
        self._handles: Handles = {}
        self._beside = weakref.WeakSet[Hooks]()  # those that are, or were, on one of the same parameters
        self._end = weakref.finalize(self, _take_off, self._handles)
        self._end.atexit = False

    def put_on(self, parameters: Iterable[Tensor]) -> None:
        """Be on exactly these parameters, as far as they can have gradients now."""
        wanted = {id(p): p for p in parameters if p.requires_grad and p.is_leaf}
        for key, (parameter, handle) in list(self._handles.items()):
            if key not in wanted or parameter() is not wanted[key]:
                handle.remove()
                del self._handles[key]
        for key, wants in wanted.items():
            if key not in self._handles:
                handle = wants.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]
                self._handles[key] = (weakref.ref(wants), handle)
        for other in _all_hooks:
            if other is not self and not self._handles.keys().isdisjoint(other._handles):
                self._beside.add(other)
                other._beside.add(self)
        _all_hooks.add(self)

    def is_heard_elsewhere(self, parameter: Tensor) -> bool:
        """Whether other hooks on this parameter are heard, too; not those of what is garbage by now."""
        if self._others_on(parameter):
            gc.collect()  # a scheduler makes an optimizer part of a cycle, which outlives its last name
        return self._others_on(parameter)

    def _others_on(self, parameter: Tensor) -> bool:
        there = [other._handles.get(id(parameter)) for other in list(self._beside) if not other.pauses]
        return any(handle is not None and handle[0]() is parameter for handle in there)

    def take_off(self) -> None:
        """Be on no parameter any more."""
        _take_off(self._handles)


_all_hooks = weakref.WeakSet[Hooks]()


def current_backward() -> int:
    """A number for the call of backward that this thread works for, another one for each; -1 outside."""
    return torch._C._current_graph_task_id()


def _version_of(gradient: Tensor) -> int:
    """How often a gradient was changed in place; a DTensor counts in its local part."""
    return int(getattr(gradient, "_local_tensor", gradient)._version)


def _take_off(handles: Handles) -> None:
    while handles:
        _, (_, handle) = handles.popitem()
        handle.remove()
