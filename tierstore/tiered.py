"""What every tiered optimizer does: torch's optimizer, with its state in a tiered store.

A step gathers what has a gradient, binds if the parameters are not those bound, and runs the chunks through the store:
each is brought to where it is updated, the rule updates its pieces, and it is written back or kept. Everything a user,
a scheduler or a framework may do to a `torch.optim.Optimizer` works here too; `state` reads and writes through (see
`state_view`). What the classes of `optimizer` add is a rule and torch's signature.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial as partial_function
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # what torch's optimizers use; torch.compiler.disable imports all of dynamo

from tierstore.backward import InBackward
from tierstore.binding import Binding
from tierstore.build import Parts
from tierstore.checkpointed import Checkpointed
from tierstore.device import is_capturing
from tierstore.errors import PolicyError, StateDictError
from tierstore.failures import tell_failure
from tierstore.handed import Handed
from tierstore.held import Held
from tierstore.members import NONE, WithState, needs_state_now, refuse_what_no_rule_updates
from tierstore.normed import NormedWork
from tierstore.offloading import GradientsOf, Offloading
from tierstore.policy import TIER_NAMES, TierPolicy
from tierstore.rules import NormedRule, Rule
from tierstore.state_dicts import check_and_wrap, materialise_entries, unwrap
from tierstore.state_view import StateView, Views, let_go
from tierstore.states import check_states, materialise
from tierstore.tensors import TieredStore
from tierstore.update import Participant, StepWork, all_of, participants_of

_KEPT = ("_step_supports_amp_scaling",)

PolicyLike = TierPolicy | Mapping[str, Any] | str | os.PathLike[str] | None
"""A policy, a mapping, or the path of a YAML file. None: all tiers, sized by themselves."""


class TieredOptimizer(Checkpointed, Offloading, torch.optim.Optimizer):
    """Stands before one of torch's optimizers in the bases of a class that names its rule."""

    rule: ClassVar[Rule]
    parts: ClassVar[Parts] = Parts()

    def __init__(
        self, params: Iterable[Any], *arguments: Any, policy: PolicyLike, tiers: Sequence[str] | None, **options: Any
    ) -> None:
        self._begin(TierPolicy.load(policy, tiers=tiers))
        super().__init__(params, *arguments, **options)
        self._refuse_what_cannot_be_honoured(self.defaults)
        _settle_arithmetic(self.defaults, *self.param_groups)
        self.check_fits(self.param_groups)
        self._watch_gradients()

    def _begin(self, policy: TierPolicy) -> None:
        """Set what must be there before torch's constructor and `__setstate__` assign to `state`."""
        self._held = Held(self.rule, policy, self.parts)
        self._backward: InBackward | None = None
        if policy.update == "backward":
            if isinstance(self.rule, NormedRule):
                raise PolicyError(
                    f"update: backward, but {self.rule.name} needs norms over whole parameters: use update: step"
                )
            this = weakref.ref(self)
            self._backward = InBackward(self._held, lambda: getattr(this(), "param_groups", ()))

    # -- stepping -----------------------------------------------------------------------------------------------

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the closure's loss, if there is a closure.

        Returns once the parameters are final; chunks may still be on their way back, and an error of theirs is raised
        by the next call, with the chunk safe where it was. Raises FailedStepError if an earlier step broke off.
        """
        self._held.refuse_if_closed()
        self._held.raise_save_error()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() reads and writes files: it cannot be captured in a CUDA graph"
            )
        with self._wait_for_backward() as early, self._held.alone():
            for group in self.param_groups:
                self._refuse_what_cannot_be_honoured(group)
            as_bound = self._held.gradients_as_bound(self.param_groups) if early is None else None
            if as_bound is None:
                self._look_and_step(early)
            elif not self._is_skipped():
                binding, gradients = as_bound
                self._update(all_of(binding, gradients), binding, None, are_plain=True)
            self._held.finish_capture()
            if early is not None:
                early.binding.store.adapt_if_due()
        self._watch_gradients()
        self._held.end_step()
        return loss

    def _wait_for_backward(self) -> AbstractContextManager[StepWork | None]:
        """End a run beside backward, and get what it did; see `InBackward.wait_for_run`."""
        return contextlib.nullcontext() if self._backward is None else self._backward.wait_for_run(self)

    def _watch_gradients(self) -> None:
        if self._backward is not None:
            self._backward.watch(self.param_groups)

    def accumulating(self) -> AbstractContextManager[None]:
        """Inside, backwards only add to gradients. For all but the last one of a step, where the policy says `update:
        backward`, with which the last one updates parameters; without it this does nothing.

        Raises RuntimeError if a backward outside came before and `step()` has not been called since.
        """
        return contextlib.nullcontext() if self._backward is None else self._backward.paused()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Before `step()` it gives up a step that was to follow a backward (`update: backward`).

        Raises FailedStepError if that backward has updated parameters already.
        """
        error = None if self._backward is None else self._backward.give_up_and_wait()
        super().zero_grad(set_to_none)
        if error is not None:
            raise error

    def _look_and_step(self, early: StepWork | None) -> None:
        """Step with whatever has gradients now, besides what was updated early."""
        taking_part, again = self._taking_part()
        if early is not None:
            for position in early.participants:
                taking_part.pop(id(early.binding.members[position].parameter), None)
        if taking_part and not self._is_skipped():
            self._step(taking_part, again, early)

    def _step(self, taking_part: Mapping[int, Tensor], again: Counter[int], early: StepWork | None) -> None:
        binding, handed = self._held.bound_inside(self.param_groups, needs=needs_state_now)
        if binding.policy.free_gradients and again:
            names = binding.names_of(binding.position[key] for key in again)
            raise PolicyError(
                f"free_gradients: true, but a group holds a parameter more than once ({names}), and its gradient would "
                f"be needed again: list it once, or leave free_gradients out"
            )
        handed.absorb()
        try:
            participants = participants_of(binding, taking_part, again)
            self._update(participants, binding, early)
        finally:
            handed.forget()  # if the step broke off, what was handed out is no longer what the store holds

    def _taking_part(self) -> tuple[dict[int, Tensor], Counter[int]]:
        """The parameters that have gradients, by id, and how often each occurs in its group once more."""
        found: dict[int, Tensor] = {}
        again: Counter[int] = Counter()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError(self.rule.sparse_advice)
                refuse_what_no_rule_updates(parameter, gradient)
                key = id(parameter)
                if key in found:
                    self._refuse_in_two_groups(parameter)
                    again[key] += 1
                found[key] = parameter
        return found, again

    def _refuse_in_two_groups(self, parameter: Tensor) -> None:
        """As torch does, and for one that was put into a second group by hand, too: which options would count?"""
        if sum(any(parameter is other for other in group["params"]) for group in self.param_groups) > 1:
            raise ValueError("some parameters appear in more than one parameter group")

    def _is_skipped(self) -> bool:
        """Whether a GradScaler found infinities: then nothing changes, step counts included."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _update(
        self,
        participants: dict[int, Participant],
        binding: Binding,
        early: StepWork | None,
        *,
        are_plain: bool = False,
    ) -> None:
        """Run the chunks of all participants through the store; `early` was updated beside backward."""
        work_type = NormedWork if isinstance(self.rule, NormedRule) else StepWork
        scratch, grad_scale = self._held.scratch, getattr(self, "grad_scale", None)
        work = work_type.of(binding, participants, self.param_groups, scratch, grad_scale, are_plain=are_plain)
        chunks = [chunk.number for chunk in binding.layout.chunks]
        if self._backward is not None:
            chunks = self._backward.order_of(binding)
        is_alternating = binding.plant.order == "alternating"
        if self._held.is_reversed and is_alternating:
            chunks.reverse()
        order = work.order(chunks)
        turns_round = is_alternating and len(order) < 1.5 * len(set(order))  # else most of it has come back already
        try:
            upcoming = chunks[::-1] if turns_round else chunks
            binding.run(order, upcoming, work.gather, flush=work.flush, is_step=early is None)
            work.update_stateless()
        except BaseException as error:
            tell_failure(binding, [work] if early is None else [early, work], error)
            raise
        work.count()
        self._held.is_reversed ^= turns_round

    # -- binding ------------------------------------------------------------------------------------------------

    def bound(self) -> tuple[Binding, Handed]:
        """The binding of the parameters as they are now, made or made again if need be, with all state in it."""
        return self._held.bound(self.param_groups)

    def bound_for(self, parameter: object, *, is_written: bool = False) -> tuple[Binding, Handed, int]:
        """The binding and the parameter's position; looks at the other parameters only if this one has changed."""
        return self._held.bound_for(self.param_groups, parameter, is_written=is_written)

    def check_fits(self, groups: Sequence[Mapping[str, Any]], with_state: WithState = NONE) -> None:
        """Find out whether all state will find room in the tiers; see `Held.check_fits`."""
        self._held.check_fits(groups, with_state)

    def knows(self, parameter: object) -> bool:
        """Whether it is one of the parameters; makes no binding."""
        return self._held.knows(self.param_groups, parameter)

    def has_state(self) -> bool:
        """Whether there may be any state; False spares a binding. Raises FailedStepError where a load has lost it."""
        self._held.refuse_if_lost()
        return self._held.has_state()

    @property
    def store(self) -> TieredStore:
        """The store that holds the state: `where()`, `stats()`, `check()`, `resize()`, `yielding()` and others.

        Another thread gets it in the middle of a step too, for `request_resize()`; its other methods refuse it then.
        """
        store = self._held.store(self.param_groups)
        if store.gradients is None:
            store.gradients = GradientsOf(self)
        return store

    # -- state --------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """Parameters to their states, read and written through to the store."""
        return StateView(self)

    @state.setter
    def state(self, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._give_up_backward_and_wait()
        pending = {parameter: unwrap(state) for parameter, state in states.items()}
        if pending:  # torch's constructor resets the state before there are groups
            check_states(self.rule, self.param_groups, pending)
        let_go(self.views)
        self._held.take(pending)

    @property
    def views(self) -> Views:
        """The views of state that somebody still has."""
        return self._held.views

    @property
    def aside(self) -> dict[Tensor, dict[str, Any]]:
        """The states of tensors that were parameters and are no longer, as plain dicts; see `Held.aside`."""
        return self._held.aside

    def state_dict(self, *, partial: bool = False) -> dict[str, Any]:
        """As torch's, all tensors on the CPU; low-precision parameters have a `master` more.

        The tensors are copies, unaffected by later steps. State larger than the policy grants in memory is returned as
        mappings of an unnamed file in the swap folder. `partial`: a parameter whose state cannot be read, which would
        be a TransferError, is absent from `state`, and a PartialStateWarning names it.
        """
        with self._held.alone():
            if self.has_state():
                self.bound()
            materialised = partial_function(materialise_entries, is_partial=partial)
            handle = self.register_state_dict_post_hook(materialised, prepend=True)
            aside, self._held.aside = self._held.aside, {}  # torch numbers what is in the groups only
            try:
                return super().state_dict()
            finally:
                handle.remove()
                self._held.aside = aside

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class, or torch's of the same algorithm, saved; state stays in its tiers and its dtype.

        Raises StateDictError, with the optimizer unchanged, for state of another optimizer or model.
        """
        if not isinstance(state_dict, Mapping):
            raise StateDictError(f"a state dict is a mapping, and this is a {type(state_dict).__name__}")
        self._give_up_backward_and_wait()
        with self._held.alone():
            self.load_without_binding(state_dict)
            if self._held.pending or self._held.binding is not None:
                self.bound()  # but do not reserve room for nothing: accelerate loads empty state, then FSDP shards

    def load_without_binding(self, state_dict: dict[str, Any]) -> None:
        """As `load_state_dict`, for who is alone and binds next."""
        handle = self.register_load_state_dict_pre_hook(check_and_wrap)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group may carry `tier`, one of gpu, cpu and nvme."""
        self._held.refuse_beside_backward()
        if isinstance(param_group, dict):  # else torch says what is wrong
            self._refuse_what_cannot_be_honoured(param_group)
            if param_group.get("foreach"):  # what a group asks for comes before the defaults, which have been settled
                param_group.setdefault("fused", None)
            elif param_group.get("fused"):
                param_group.setdefault("foreach", None)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if group.get("tier", TIER_NAMES[0]) not in TIER_NAMES:
                raise PolicyError(f"a parameter group has tier {group['tier']!r}; allowed: {', '.join(TIER_NAMES)}")
            if self._held.binding is not None:
                self.check_fits(self.param_groups, self._held.binding.with_state())
        except BaseException:
            del self.param_groups[-1]
            raise
        _settle_arithmetic(group)
        self._watch_gradients()

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: self.__dict__[name] for name in _KEPT if name in self.__dict__}
        state = {parameter: dict(fields) for parameter, fields in self._materialised().items()}
        return {**super().__getstate__(), **kept, "state": state, "tierstore_policy": self._held.policy}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As `copy` would, but what `__getstate__` took out of the store is nobody else's, and not copied again."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        state = self.__getstate__()
        memo |= {id(value): value for fields in state["state"].values() for value in fields.values()}
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        policy, values = state.pop("tierstore_policy", None), state.pop("state", None)
        if "_held" not in self.__dict__:
            self._begin(policy if policy is not None else TierPolicy.load())
        with self._held.without_state():  # torch looks for old step counts, which `_load` reads too
            super().__setstate__(state)
        _settle_arithmetic(*self.param_groups)
        if values is not None:
            self.state = values
        self._watch_gradients()

    def _materialised(self) -> dict[Tensor, dict[str, Any]]:
        if not self.has_state():
            return {}
        binding, handed = self.bound()
        return {binding.members[position].parameter: state for position, state in materialise(binding, handed).items()}

    def _refuse_what_cannot_be_honoured(self, options: Mapping[str, Any]) -> None:
        name = type(self).__name__
        if options.get("differentiable"):
            raise RuntimeError(f"{name} does not support `differentiable`: its state is outside autograd's reach")
        if options.get("capturable"):
            raise RuntimeError(
                f"{name} does not support `capturable`: a step reads and writes files, which no graph can capture"
            )
        if "fused" not in self.defaults and (options.get("foreach") or options.get("fused") is not None):
            raise RuntimeError(f"{name} has one formula: leave `foreach` and `fused` out of its groups")

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back memory, files and threads; the state is gone. Idempotent."""
        if self._backward is not None:
            self._backward.close()
        self._held.close()

    def _give_up_backward_and_wait(self) -> None:
        """Let go of what a backward has begun, as all state will be replaced."""
        if self._backward is not None:
            self._backward.give_up_and_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settle_arithmetic(*groups: dict[str, Any]) -> None:
    """Where neither torch's foreach nor its for-loop was asked for it is fused, whatever torch's default becomes.

    Then torch's optimizer, given this state dict, keeps the same arithmetic; but torch's fused formula refuses complex
    parameters.
    """
    for group in groups:
        if "fused" in group and not group.get("foreach") and group["fused"] is not False:
            is_complex = any(parameter.is_complex() for parameter in group.get("params", ()))
            group["fused"] = None if is_complex else True
