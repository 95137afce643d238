"""Updates chunks while backward still runs: each as soon as the gradients of all its parameters are there.

The first gradient of a backward starts a control thread, which runs the chunks through the store just as a step does,
except that before each chunk it waits for gradients (on a condition, no clock). `step()` declares backward over, waits
for that run, and does what is left: parameters whose gradients the run did not expect. A run expects those that arrived
in the last backward, in the order in which they did; so the first backward is only watched, and all of it left to
`step()`. Until `step()` nobody else may come near the state. Hooks only note what arrived and wake the thread.

What `update: step` would make of a gradient, or of an option, that changes after it was noted cannot be had any more:
such a step is refused, before anything is updated if it is the first one, else as broken off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.arrivals import Arrival, Hooks, current_backward
from tierstore.beside import Run, by_arrival, ranks_of
from tierstore.binding import Binding
from tierstore.crew import start
from tierstore.device import Device
from tierstore.errors import FailedStepError, ForkedStoreError, NoThreadError
from tierstore.held import Groups, Held
from tierstore.rules import Rule
from tierstore.signals import deferred
from tierstore.update import StepWork

_log = logging.getLogger("tierstore.backward")


class InBackward:
    """What an optimizer has besides `Held` when its updates follow backward. `groups` must not keep the optimizer."""

    def __init__(self, held: Held, groups: Callable[[], Groups]) -> None:
        self._held = held
        self._groups = groups
        self._changed = threading.Condition()  # guards what has arrived
        self._arrivals: dict[int, Arrival] = {}  # since the last step, by id of the parameter, in order
        self._backward = -1  # the one they are from
        self._options: list[Any] | None = None  # of each group when the first one arrived
        self._expected: tuple[int, ...] = ()  # ids of the parameters that arrived before the last step, in order
        self._open: list[Run] = []  # at most one, shared with who ends it when this goes
        self._device: tuple[Binding, Device] | None = None
        self._hooks = Hooks(self._hear)
        weakref.finalize(self, _give_up_and_wait, self._open)

    def watch(self, groups: Groups) -> None:
        """Have hooks on the parameters of these groups, and on no others."""
        self._hooks.put_on(parameter for group in groups for parameter in group["params"])

    def order_of(self, binding: Binding) -> list[int]:
        """All chunks: in the order in which gradients arrived in the last backward, then from the last to the first."""
        keys = self._arrivals or self._expected
        first = by_arrival(binding.layout, ranks_of(binding, keys))
        seen = set(first)
        return first + [chunk.number for chunk in reversed(binding.layout.chunks) if chunk.number not in seen]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backwards inside add to gradients, and update nothing."""
        self._refuse_what_was_not_stepped("accumulating() after a backward outside it")
        self._hooks.pauses += 1
        try:
            yield
        finally:
            self._hooks.pauses -= 1

    @contextlib.contextmanager
    def wait_for_run(self, optimizer: object) -> Iterator[StepWork | None]:
        """Wait for the run beside backward, and give what it did, counted; inside, the step does what is left.

        An error on the way or inside breaks the step off, if anything was updated.
        """
        run = self._open[0] if self._open else None
        with deferred():
            try:
                if run is not None:
                    run.wait_for_end()
                self._held.runner = None
                if (run is not None and run.has_used) or any(one.is_there() for one in self._arrivals.values()):
                    self._refuse_what_changed(optimizer, run)
                if run is not None:
                    run.count()
                yield run.work if run is not None and run.work.participants else None
                self._expected = tuple(self._arrivals)
            except BaseException as error:
                is_told = isinstance(error, ForkedStoreError) or (run is not None and run.is_told(error))
                if run is not None and not is_told:
                    run.tell(error)
                raise
            finally:
                self._forget()

    def give_up_and_wait(self) -> FailedStepError | None:
        """Let go of an iteration that will not be stepped; returns an error if it has updated anything already."""
        _give_up_and_wait(self._open)
        what = RuntimeError(
            "backward updated, but step() was not called: if another optimizer is used now, close() this one"
        )
        error = self._open[0].tell(what) if self._open else None
        self._forget()
        return error

    def close(self) -> None:
        """Let go of everything."""
        self.give_up_and_wait()
        self._hooks.take_off()

    # -- while backward runs ------------------------------------------------------------------------------------

    def _hear(self, parameter: Tensor) -> None:
        """Note that a parameter's gradient is whole; on autograd's thread."""
        if self._hooks.pauses or parameter.grad is None:
            return
        backward, key = current_backward(), id(parameter)
        if self._arrivals and (backward != self._backward or key in self._arrivals):
            self._refuse_what_was_not_stepped("a second backward")
        _refuse_what_is_reduced_later(parameter)
        if not self._arrivals and self._hooks.is_heard_elsewhere(parameter):
            raise RuntimeError(
                f"two optimizers with update: backward have a parameter of shape {tuple(parameter.shape)}, and this "
                f"backward would update it by both: call close() of the one that is not used any more, or use "
                f"update: step"
            )
        # the update tells autograd nothing; a graph that has kept the weight for later must not find another one
        torch.autograd.graph.increment_version(parameter)
        arrival = Arrival.of(parameter, self._device_of_gradients())
        with deferred(), self._changed:  # an interrupt leaves no run behind that nobody knows of
            if not self._arrivals:
                self._backward = backward
                self._begin()
            self._arrivals[key] = arrival
            for run in self._open:
                run.hear(key)

    def _refuse_what_was_not_stepped(self, what: str) -> None:
        """Raise RuntimeError if gradients of an earlier backward wait for `step()`; if they were dropped, forget them.

        FailedStepError if those that were dropped had updated anything.
        """
        is_dropped = not any(arrival.is_there() for arrival in self._arrivals.values())
        error = self.give_up_and_wait()
        if error is not None and is_dropped:
            raise error
        if not is_dropped:
            raise RuntimeError(
                f"{what}, before step(): with update: backward the gradients of one backward update parameters at "
                f"once. Put every backward before the last one of a step into `with optimizer.accumulating():`; use "
                f"checkpoint(use_reentrant=False), as a reentrant checkpoint is a backward of its own"
            ) from error

    def _begin(self) -> None:
        """Note the options as they are, and start the run, if there is anything to expect, and a thread for it."""
        groups, binding = self._groups(), self._held.binding
        self._options = _options_of(self._held.rule, groups)
        if binding is None or not self._expected or self._options is None:
            return
        device = self._device_of_gradients()
        assert device is not None
        run = Run(self._held, binding, groups, self._options, self._expected, self._arrivals, self._changed, device)
        self._held.runner = run.thread
        try:
            start(run.thread)
        except NoThreadError as error:
            self._held.runner = None
            _log.warning("nothing is updated beside this backward, but all in step(): %s", error)
        else:
            self._open.append(run)

    def _device_of_gradients(self) -> Device | None:
        binding = self._held.binding
        if binding is None:
            return None
        if self._device is None or self._device[0] is not binding:
            self._device = binding, binding.plant.device_of_gradients()
        return self._device[1]

    # -- at its end ---------------------------------------------------------------------------------------------

    def _refuse_what_changed(self, optimizer: object, run: Run | None) -> None:
        """Raise RuntimeError if a step now would differ from one with what was noted."""
        if not self._arrivals:
            return
        instead = "with update: backward they update parameters while backward runs; use update: step"
        is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
        if is_scaled or _is_called_by_scaler():
            raise RuntimeError(f"a GradScaler unscales gradients after backward, but {instead} with a scaler")
        if not _are_same(self._options, _options_of(self._held.rule, self._groups())):
            raise RuntimeError(
                "an option of a parameter group (lr, say) changed between backward and step(), but with update: "
                "backward those that count are the ones backward began with: change them, or call "
                "scheduler.step(), after step()"
            )
        gone = frozenset[int]() if run is None else run.let_go
        changed = [key for key, one in self._arrivals.items() if key not in gone and not one.is_unchanged()]
        if changed:
            raise RuntimeError(
                f"{len(changed)} gradients were changed or dropped between backward and step() (by clipping, say), but "
                f"{instead} where gradients are changed after backward"
            )

    def _forget(self) -> None:
        self._arrivals.clear()
        self._options = None
        self._held.runner = None
        self._open.clear()


def _give_up_and_wait(runs: Sequence[Run]) -> None:
    for run in runs:
        run.give_up_and_wait()


def _options_of(rule: Rule, groups: Groups) -> list[Any] | None:
    """The options of each group, apart from it; None if they are wrong, which the step will say."""
    try:
        return [_copied(rule.options(group)) for group in groups]
    except (TypeError, ValueError, RuntimeError):
        return None


def _copied(options: Any) -> Any:
    tensors = {name: value.clone() for name, value in _fields_of(options).items() if isinstance(value, Tensor)}
    return dataclasses.replace(options, **tensors) if tensors else options


def _fields_of(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _are_same(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(_as_numbers(a) == _as_numbers(b) for a, b in zip(one, other, strict=True))


def _as_numbers(options: Any) -> list[Any]:
    return [float(value) if isinstance(value, Tensor) else value for value in _fields_of(options).values()]


def _refuse_what_is_reduced_later(parameter: Tensor) -> None:
    """Raise RuntimeError for a parameter whose gradient other ranks have a part in yet, as in DistributedDataParallel.

    It is whole for autograd before it is reduced. A DTensor's (FSDP2, tensor parallel) is reduced by then.
    """
    if hasattr(parameter, "_local_tensor") or not torch.distributed.is_available():
        return
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError(
            f"update: backward, but there are {torch.distributed.get_world_size()} ranks and a parameter of shape "
            f"{tuple(parameter.shape)} is no DTensor: DistributedDataParallel and its like reduce its gradient only "
            f"after autograd has handed it over. Use fully_shard (FSDP2), or update: step"
        )


def _is_called_by_scaler() -> bool:
    """Whether a GradScaler that is enabled calls step(): it may have unscaled gradients in a way no version counts."""
    step = torch.amp.GradScaler._maybe_opt_step.__code__
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is step:
            return True
    return False
