"""The run of a step beside backward: chunks are used as their gradients arrive, on a control thread of its own.

It is the very run of the store that a step makes, except that before each chunk it waits for gradients, on a condition
and no clock, until `wait_for_end` says that no more will come. The thread ends with the run: none is left over.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.arrivals import Arrival
from tierstore.binding import Binding
from tierstore.device import Device, Event
from tierstore.errors import FailedStepError, ForkedStoreError
from tierstore.failures import tell_failure
from tierstore.held import Groups, Held
from tierstore.layout import Chunk, Layout
from tierstore.members import is_sharded_like, refuse_what_no_rule_updates
from tierstore.rules.kept import GroupOptions
from tierstore.signals import standing_in
from tierstore.update import Participant, StepWork


class _GivenUpError(Exception):
    """Ends a run that nobody wants any more."""


class Run:
    """The run of one step, on a thread of its own, which ends with it."""

    def __init__(
        self,
        held: Held,
        binding: Binding,
        groups: Groups,
        options: Sequence[Any],
        expected: Iterable[int],
        arrivals: Mapping[int, Arrival],
        changed: threading.Condition,
        device: Device,
    ) -> None:
        self.binding = binding
        read = [GroupOptions.of(binding.rule, one) for one in options]
        self.work = StepWork(binding, {}, read, held.scratch, None, {}, frozenset())
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, name="tierstore backward", daemon=True)
        self._held = held
        self._groups = groups
        self._expected = expected
        self._arrivals = arrivals
        self._changed = changed
        self._device = device
        self._missing: set[int] = set()  # ids of the parameters that are waited for
        self._left: set[int] = set()  # positions of those left to the step after all
        self._events: list[Event] = []  # of gradients that no launched work has waited for yet
        self._done: Event | None = None
        self._is_over = self._is_given_up = False
        self._pid = os.getpid()

    # -- the other threads --------------------------------------------------------------------------------------

    def hear(self, key: int) -> None:
        """Hear that a parameter's gradient has arrived; whoever calls holds the condition."""
        self._missing.discard(key)
        if not self._missing:
            self._changed.notify_all()

    def wait_for_end(self) -> None:
        """Say that backward is over, wait for the run, and raise what stopped it."""
        if self._pid != os.getpid():
            raise ForkedStoreError(f"backward began in process {self._pid}, and this is a fork of it: make another")
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        with standing_in(self.thread):
            self.thread.join()
        if self.error is not None:
            raise self.error
        if self._done is not None:
            self._device.wait(self._done)

    def give_up_and_wait(self) -> None:
        """End the run before its next chunk, and wait until it has ended; in a fork there is none."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        if threading.current_thread() is not self.thread:  # where the collector may have run
            self.thread.join()

    @property
    def has_used(self) -> bool:
        """Whether anything was updated."""
        return bool(self.work.participants) and (self.binding.store.broken_off is not None or bool(self.work.finished))

    @property
    def let_go(self) -> frozenset[int]:
        """Ids of the parameters whose gradients the run has dropped."""
        members = self.binding.members
        return frozenset(id(members[position].parameter) for position in self._let_go(self.work.finished))

    def _let_go(self, positions: Iterable[int]) -> list[int]:
        """Those of some parameters whose gradients were dropped."""
        if not self.binding.policy.free_gradients:
            return []
        return [position for position in positions if position in self.work.finished and position not in self.work.kept]

    def count(self) -> None:
        """Count the step in what the run updated, and let go of the gradients it had kept."""
        self.work.count()
        for position in self.work.kept & self.work.finished:
            self.work.let_go(position)

    def is_told(self, error: BaseException) -> bool:
        """Whether the step's own part has told already what an error has broken off."""
        return error is not self.error and self.binding.store.broken_off is not None

    def tell(self, error: BaseException) -> FailedStepError | None:
        """If anything was updated before the error, refuse steps until state is loaded, and return what says so."""
        story = tell_failure(self.binding, [self.work], error) if self.has_used else None
        return None if story is None else FailedStepError(story)

    # -- the control thread -------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with torch.no_grad(), self._held.alone():
                if self._held.is_settled(self._groups):
                    self._run()
        except BaseException as error:
            self.error = error

    def _run(self) -> None:
        binding = self.binding
        times = Counter(id(parameter) for group in self._groups for parameter in group["params"])
        ranks = ranks_of(binding, (key for key in self._expected if times[key] == 1))
        if binding.policy.free_gradients:
            self.work.kept = _smallest_of_each_group(binding, ranks)
        order = by_arrival(binding.layout, ranks)
        self._wanted = {number: _parameters_in(binding.layout.chunks[number], ranks) for number in order}
        if order:
            binding.run(order, order, self._use, is_step=True, ready=self._wait_for_gradients)
            self._done = self._device.record()

    def _wait_for_gradients(self, number: int) -> None:
        """Wait until all that the chunk's expected parameters will get is there, and let those take part."""
        keys = {id(self.binding.members[position].parameter): position for position in self._wanted[number]}
        with self._changed:
            self._missing = {key for key in keys if key not in self._arrivals}
            self._changed.wait_for(lambda: self._is_given_up or self._is_over or not self._missing)
            if self._is_given_up:
                raise _GivenUpError("given up")
        for key, position in keys.items():
            if key in self._arrivals and position not in self.work.participants and position not in self._left:
                self._admit(position, self._arrivals[key])

    def _admit(self, position: int, arrival: Arrival) -> None:
        """Let a parameter take part, unless that is better left to the step, which all ranks take in one order."""
        parameter, gradient = arrival.parameter, arrival.parameter.grad
        if gradient is None or gradient.is_sparse or not is_sharded_like(parameter, gradient):
            self._left.add(position)
            return
        refuse_what_no_rule_updates(parameter, gradient)
        participant = Participant.of(parameter, 1)
        if participant.gradient.device == self._device.torch_device:
            self._device.keep(participant.gradient)
        self.work.admit(position, participant)
        if arrival.event is not None:
            self._events.append(arrival.event)

    def _use(self, number: int, record: Tensor, is_fresh: bool) -> None:
        if any(position in self.work.participants for position in self._wanted[number]):
            while self._events:
                self._device.wait(self._events.pop())
            self.work.use(number, record, is_fresh)
            for position in self._let_go(self._wanted[number]):
                self._arrivals[id(self.binding.members[position].parameter)].let_go()


def ranks_of(binding: Binding, keys: Iterable[int]) -> dict[int, int]:
    """Positions of the parameters with these ids that may get gradients, numbered in order."""
    positions = (binding.position[key] for key in keys if key in binding.position)
    return {p: rank for rank, p in enumerate(positions) if binding.members[p].parameter.requires_grad}


def by_arrival(layout: Layout, ranks: Mapping[int, int]) -> list[int]:
    """The chunks that hold any of the ranked parameters, in the order in which the last one of each arrives."""
    last: dict[int, int] = {}
    for chunk in layout.chunks:
        if present := _parameters_in(chunk, ranks):
            last[chunk.number] = max(ranks[position] for position in present)
    return sorted(last, key=lambda number: (last[number], -number))


def _parameters_in(chunk: Chunk, ranks: Mapping[int, int]) -> list[int]:
    return [span.parameter for span in chunk.spans if span.parameter in ranks]


def _smallest_of_each_group(binding: Binding, ranks: Mapping[int, int]) -> frozenset[int]:
    """One parameter of each group, whose gradient stays until `step()`: it shows whether gradients were clipped."""
    smallest: dict[int, int] = {}
    for position in sorted(ranks, key=lambda p: binding.members[p].form.numel(), reverse=True):
        if binding.members[position].form.numel():
            smallest[binding.members[position].group] = position
    return frozenset(smallest.values())
