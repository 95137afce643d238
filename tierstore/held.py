"""What a tiered optimizer has besides torch's attributes: its policy, its binding, and state waiting for one.

Makes the binding when it is needed, and again when the parameters are not those bound; state is carried over, and stays
pending until all of it is written, so that what fails half-way is made again by the next call. Knows the groups only as
they are given: torch replaces them on every load.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from tierstore.binding import Binding
from tierstore.blueprint import draw
from tierstore.build import Parts
from tierstore.device import may_still_move_to_accelerator
from tierstore.errors import (
    BusyStoreError,
    CapacityError,
    FailedStepError,
    LeaseError,
    StoreClosedError,
    WrongThreadError,
)
from tierstore.guard import alone
from tierstore.handed import Handed
from tierstore.members import (
    NONE,
    Needs,
    WithState,
    local_of,
    may_still_be_sharded,
    needs_state,
    needs_state_now,
    nothing_needs,
    survey,
)
from tierstore.monitor import monitor_of
from tierstore.policy import TierPolicy
from tierstore.rules import Rule
from tierstore.saving import IfBusy, Save
from tierstore.scratch import Scratch
from tierstore.state_view import Views
from tierstore.states import carried, check_states, materialise, write_state
from tierstore.tensors import TieredStore

Groups = Sequence[Mapping[str, Any]]


class Held:
    """One object for the life of an optimizer, never replaced.

    Lightning's wrappers are of the optimizer's class without its constructor and look up attributes in the optimizer
    they wrap, so that what is assigned to a wrapper is not seen there.
    """

    def __init__(self, rule: Rule, policy: TierPolicy, parts: Parts) -> None:
        self.rule = rule
        self.policy = policy
        self.binding: Binding | None = None
        self.pending: dict[Tensor, Mapping[str, Any]] | None = None
        self.refusal: str | None = None
        """Why there is no state, and no step, until another load of all: one broke off before its state had a place."""
        self.scratch = Scratch()
        self.is_reversed = False
        self.parts = parts
        self.views: Views = weakref.WeakValueDictionary()
        self.aside: dict[Tensor, dict[str, Any]] = {}
        """States of tensors that have left the groups: kept, as torch keeps them, until they are deleted or return."""
        self.runner: threading.Thread | None = None
        """The control thread of a run beside backward, until `step()`: nobody else may come near the state."""
        self.save: Save | None = None
        """The checkpoint that was begun last."""
        self._handed: Handed | None = None
        self._lock = threading.RLock()
        self._monitor = monitor_of(policy)
        self._has_told = False  # what of the policy does not come to bear: once is enough
        self._is_closed = False

    def alone(self) -> AbstractContextManager[None]:
        """Be the only thread inside, with signals deferred: nothing here is ever left half done by one."""
        self.refuse_beside_backward()
        return alone(self._lock, "the optimizer")

    def refuse_beside_backward(self) -> None:
        """Raise BusyStoreError between a backward that updates parameters and the step that ends it."""
        if self.runner is not None and threading.current_thread() is not self.runner:
            raise BusyStoreError(
                "backward has begun to update parameters and state (update: backward): call step() first, or "
                "zero_grad() or load_state_dict() to give this step up"
            )

    def is_settled(self, groups: Groups) -> bool:
        """Whether a run can use the binding as it is: nothing has changed, and nothing waits to be written first."""
        if self.binding is None or self._handed is None or self._is_closed or self.pending is not None:
            return False
        is_clear = self._handed.is_empty and not any(self.knows(groups, parameter) for parameter in self.aside)
        return is_clear and self.binding.is_current(groups)

    def gradients_as_bound(self, groups: Groups) -> tuple[Binding, list[Tensor]] | None:
        """The binding and the gradients of all its parameters, by position, if a step needs to look at nothing else.

        So it is once all have state, as long as nobody has looked at state or changed what the groups hold.
        """
        binding, handed = self.binding, self._handed
        if binding is None or handed is None or self.pending is not None or self.aside or not handed.is_empty:
            return None
        if binding.policy.free_gradients:
            return None  # a list of them all would keep them
        gradients = binding.unchanged.gradients(groups)
        return None if gradients is None else (binding, gradients)

    def check_fits(self, groups: Groups, with_state: WithState = NONE) -> None:
        """Find out before training whether all state will find room; later, for parameters that may still change.

        What was thawed without room, and has no state, needs none before it has a gradient.
        Raises CapacityError or PolicyError; before anything is bound, SwapError or DiskFullError too.
        """
        if any(is_lazy(parameter) for group in groups for parameter in group["params"]):
            return  # of no shape yet
        if any(_may_still_change(parameter) for group in groups for parameter in group["params"]):
            return
        if self.binding is None:
            self._check_fits_now(groups, with_state)
        else:
            self._to_cover(self.binding, groups, with_state, nothing_needs)

    def _check_fits_now(self, groups: Groups, with_state: WithState, needs: Needs = needs_state) -> None:
        members = survey(groups, self.rule, with_state, needs=needs)
        try:
            draw(members, groups, self._policy_now(), self.parts).check_fits(is_first=self.binding is None)
        except CapacityError as error:
            if self.binding is None or not (thawed := self.binding.thawed(groups)):
                raise
            raise CapacityError(
                f"{error}; optimizer.store.resize() does it for this one. Or freeze {self.binding.names_of(thawed)} "
                f"again, without gradients: no room was made for what was frozen. All other state can be read and saved"
            ) from error

    def take(self, states: dict[Tensor, Mapping[str, Any]]) -> None:
        """Have these states, in place of all others, from the next binding on."""
        self.aside, self.pending, self.refusal = {}, states, None

    def bound(self, groups: Groups, with_state: WithState = NONE) -> tuple[Binding, Handed]:
        """The binding of the parameters in `groups` as they are now, with all state in it, and what it handed out."""
        with self.alone():
            return self.bound_inside(groups, with_state)

    def store(self, groups: Groups) -> TieredStore:
        """The store of the binding; while another thread is inside, that of the one there is."""
        try:
            return self.bound(groups)[0].store
        except WrongThreadError:
            binding = self.binding  # which that thread may be about to make anew
            if binding is None:
                raise
            return binding.store

    def bound_inside(
        self, groups: Groups, with_state: WithState = NONE, *, needs: Needs = nothing_needs
    ) -> tuple[Binding, Handed]:
        """As `bound`, for who is alone already. `needs`: which of the parameters without state must have room."""
        self.refuse_if_closed()
        if self.refusal is not None:
            raise FailedStepError(self.refusal)
        self._let_leave(groups)
        returned = {p: state for p, state in self.aside.items() if self.knows(groups, p)}
        covered = {**with_state, **(self.pending or {}), **returned}
        if self.binding is None or self._handed is None or not self._is_current(self.binding, groups, covered, needs):
            to_cover = self._unbind(groups, covered, needs)
            covered = {**with_state, **(self.pending or {}), **returned}
            self.binding = Binding(groups, self.rule, self.policy, self.parts, with_state=covered, needs=to_cover)
            self._handed = Handed(self.binding)
            self._tell_once(self.binding)
        if self.pending is not None:
            self._load(groups, self.binding, self._handed, self.pending)
            self.pending = None  # not before all is written: a load that fails is made again by the next call
        if returned:
            self._take_back(self.binding, self._handed, returned)
        return self.binding, self._handed

    def _is_current(self, binding: Binding, groups: Groups, covered: WithState, needs: Needs) -> bool:
        """Whether a binding has room for all that `needs` it; for a step, also for what a later one may, if it fits."""
        if needs is not needs_state_now:
            return binding.is_current(groups, covered, needs=needs)
        if binding.is_current(groups, covered):
            return True
        if not binding.is_current(groups, covered, needs=needs):
            return False
        try:
            self._check_fits_now(groups, {**binding.with_state(), **covered})
        except CapacityError:
            return True
        return False

    def bound_for(self, groups: Groups, parameter: object, *, is_written: bool) -> tuple[Binding, Handed, int]:
        """The binding and the parameter's position; looks at the other parameters only if this one has changed.

        Raises KeyError for what is no parameter. `is_written`: it must have room for state, even if it is frozen.
        """
        binding, handed = self.binding, self._handed
        if binding is not None and handed is not None and self.pending is None and not (self._is_closed or self.runner):
            position = binding.position.get(id(parameter))
            if position is not None and binding.is_current_at(position, groups, () if is_written else None):
                return binding, handed, position
        binding, handed = self.bound(groups, {parameter: ()} if is_written else NONE)
        position = binding.position.get(id(parameter))
        if position is None:
            raise KeyError(parameter)
        return binding, handed, position

    def knows(self, groups: Groups, parameter: object) -> bool:
        """Whether it is one of the parameters; makes no binding."""
        is_bound = self.binding is not None and id(parameter) in self.binding.position
        return is_bound or any(parameter is other for group in groups for other in group["params"])

    def has_state(self) -> bool:
        """Whether there may be any state; False spares making a binding to find none."""
        if self.pending is not None:
            return bool(self.pending)
        return bool(self.aside) or (self.binding is not None and bool(self.binding.steps))

    @contextmanager
    def without_state(self) -> Iterator[None]:
        """Have none, as far as anybody sees who is inside, and make no binding to say so."""
        kept, self.pending, self.refusal = (self.pending, self.refusal), {}, None
        try:
            yield
        finally:
            self.pending, self.refusal = kept

    def refuse_if_closed(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self._is_closed:
            raise StoreClosedError("this optimizer is closed and its state is gone; save state_dict() before close()")

    def refuse_if_lost(self) -> None:
        """Raise FailedStepError where a load has taken all state away and brought none: that is not to have none."""
        if self.refusal is not None:
            raise FailedStepError(self.refusal)
        binding = self.binding if self.pending is None else None
        lost = [] if binding is None else sorted(at for at in binding.half_loaded if isinstance(at, int))
        if binding is not None and lost and not binding.steps:
            raise FailedStepError(
                f"a load broke off half-way, and there is no state of {binding.names_of(lost)}: load "
                f"a checkpoint or a state dict"
            )

    def raise_save_error(self) -> None:
        """Raise what went wrong with the last checkpoint since it was begun, once."""
        if self.save is not None and (error := self.save.take_error()) is not None:
            raise error

    def refuse_to_save(self) -> None:
        """Raise FailedStepError after a step or a load that broke off: what there is now is of no one step."""
        is_broken = self.pending is None and self.binding is not None and self.binding.store.broken_off is not None
        if is_broken or self.refusal is not None:
            raise FailedStepError(
                "a step or a load broke off half-way, so that parameters and state belong to no one step: they are not "
                "saved over a checkpoint; load one first"
            )

    def end_save(self, if_busy: IfBusy) -> None:
        """See to it that no checkpoint is under way: wait for it and raise its error, or raise BusyStoreError."""
        if if_busy not in ("wait", "error"):
            raise ValueError(f"if_busy is {if_busy!r}: give 'wait' or 'error'")
        save, self.save = self.save, None
        if save is None:
            return
        if if_busy == "error" and not save.is_over:
            self.save = save
            raise BusyStoreError(
                f"the checkpoint {save.path} is still being written: wait for it, or save with if_busy='wait'"
            )
        save.finish()
        if (error := save.take_error()) is not None:
            raise error

    def finish_capture(self) -> None:
        """Copy what an unfinished checkpoint still wants of the state, so that it may change from now on."""
        if self.save is not None:
            self.save.finish_capture()

    def end_step(self) -> None:
        """Let the files of the policy's `monitor` and `record` be written, now that a step is over."""
        if self._monitor is not None and self.binding is not None:
            with self.alone():
                self._monitor.step_ended(self.binding.store)

    def close(self) -> None:
        """Give back memory, files and threads; the state is gone. Idempotent.

        An unfinished checkpoint is finished first; its error is raised once all is given back. One that other ranks
        write too is given up where an error is on its way: they may never come here.
        """
        with self.alone(), ExitStack() as closing:
            self._is_closed = True
            closing.callback(self._let_go)
            if self._monitor is not None and self.binding is not None and not self.binding.store.is_closed:
                closing.callback(self._monitor.end, self.binding.store)
            if self.save is not None and sys.exception() is not None:
                self.save.finish_alone()
            self.end_save("wait")

    def _let_go(self) -> None:
        self._handed = self.pending = None
        self.aside = {}
        if self.binding is not None:
            self.binding.close()

    def _tell_once(self, binding: Binding) -> None:
        if not self._has_told:
            self._has_told = True
            binding.tell_what_is_missing()

    def _unbind(self, groups: Groups, covered: WithState, needs: Needs) -> Needs:
        """Take all state out of a binding that is no longer current, for the next one to load; nothing is lost.

        Returns which parameters that one has room for besides those with state.
        """
        if self.binding is None or self._handed is None:
            return needs_state
        if self.pending is None and self.binding.store.broken_off is not None:
            raise FailedStepError("an earlier step broke off; load parameters and state before changing parameters")
        if names := self.binding.store.names():
            raise LeaseError(
                f"the parameters changed, so the store must be made anew, but {len(names)} tensors were put there by "
                f"name ({', '.join(names[:3])}): get() and delete() them first, or keep them in a TieredStore apart"
            )
        self.policy = self._policy_now()
        states = self.pending
        left: dict[Tensor, dict[str, Any]] = {}
        if states is None and self.binding.steps:
            states, left = carried(self.binding, materialise(self.binding, self._handed), groups)
        to_cover = self._to_cover(self.binding, groups, {**covered, **(states or {})}, needs)
        self._put_aside(left)
        self.binding.close()
        self.binding, self._handed, self.pending = None, None, states
        return to_cover

    def _to_cover(self, bound: Binding, groups: Groups, with_state: WithState, needs: Needs) -> Needs:
        """All that a step may update; where there is too little room, those that were thawed only if one `needs` it."""
        try:
            self._check_fits_now(groups, with_state)
        except CapacityError:
            spared = {id(p) for p in (bound.members[at].parameter for at in bound.thawed(groups)) if not needs(p)}
            if not spared:
                raise

            def is_not_spared(parameter: Tensor) -> bool:
                return needs_state(parameter) and id(parameter) not in spared

            self._check_fits_now(groups, with_state, is_not_spared)
            return is_not_spared
        return needs_state

    def _policy_now(self) -> TierPolicy:
        """The policy of another binding: with the sizes that tiers were last asked to have, all that is queued done."""
        if self.binding is not None:
            with suppress(StoreClosedError):
                return self.policy.with_capacities(self.binding.store.capacities_asked())
        return self.policy

    def _put_aside(self, left: Mapping[Tensor, dict[str, Any]]) -> None:
        if left:
            shapes = ", ".join(str(tuple(parameter.shape)) for parameter in list(left)[:8])
            warnings.warn(
                f"tierstore: {len(left)} parameters with state have left param_groups (shapes {shapes}): their state "
                f"stays in optimizer.state, but not in tiers and state dicts, until it is deleted or they return",
                UserWarning,
                stacklevel=2,
            )
            self.aside |= left

    def _let_leave(self, groups: Groups) -> None:
        """Put aside the pending states of parameters that have left the groups since they were given."""
        if self.pending:
            present = {id(parameter) for group in groups for parameter in group["params"]}
            left = {p: dict(state) for p, state in self.pending.items() if id(p) not in present}
            self.pending = {p: state for p, state in self.pending.items() if id(p) in present}
            self._put_aside({p: state for p, state in left.items() if state})

    def _take_back(self, binding: Binding, handed: Handed, returned: Mapping[Tensor, dict[str, Any]]) -> None:
        """Give parameters that have returned the state that was kept for them, unless a load has replaced all state."""
        back = {binding.position[id(p)]: state for p, state in returned.items() if p in self.aside}
        write_state(binding, handed, back, is_whole=True)
        for parameter in returned:
            self.aside.pop(parameter, None)

    def _load(
        self, groups: Groups, binding: Binding, handed: Handed, states: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        """Replace all state, without a look at the old: its files may be why this is done."""
        check_states(self.rule, groups, states)
        handed.forget()
        binding.discard()
        by_position = {binding.position[id(parameter)]: state for parameter, state in states.items() if state}
        write_state(binding, handed, by_position, is_whole=True)


def _may_still_change(parameter: Tensor) -> bool:
    """Whether a framework may yet move the parameter or cut it, so that it is too early to count its bytes."""
    return may_still_move_to_accelerator(local_of(parameter).device) or may_still_be_sharded(parameter)
