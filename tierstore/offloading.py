"""What every tiered optimizer can do with the memory of its tiers: give it back between steps, and take it again."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tierstore.errors import PolicyError, StoreClosedError
from tierstore.held import Held
from tierstore.members import local_of
from tierstore.policy import TIER_NAMES
from tierstore.stats import Relocation
from tierstore.tensors import TieredStore


class Offloading:
    """Stands before torch's optimizer in the bases of `TieredOptimizer`, whose other half it is."""

    param_groups: list[dict[str, Any]]
    _held: Held

    if TYPE_CHECKING:

        @property
        def store(self) -> TieredStore: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    def offload(self, to: str | None = None, tiers: Sequence[str] = ("gpu",)) -> Relocation:
        """Empty memory tiers, and give their memory back to the device and the system; state goes `to` a slower tier.

        Without `to` that is the fastest one with room for it. State can still be read and saved; the next `step()`
        takes the memory again, or `reload()` does. A tier that this machine does without has nothing to give.

        Raises CapacityError, with nothing moved, without room for it; PolicyError for tiers that cannot be meant.
        """
        names, present = [tiers] if isinstance(tiers, str) else tiers, self._held.policy.tiers.names
        if not isinstance(names, Sequence) or not names or any(name not in present for name in names):
            raise PolicyError(f"found the tiers {tiers!r}; allowed: one or more of {', '.join(present)}")
        with self._held.alone():
            self._held.refuse_if_closed()
            store = self.store
            there = [name for name in TIER_NAMES if name in names and name in store.setup.tiers]
            if not there:
                return Relocation(0, 0, 0.0)
            done = store.offload(there, to)
            if "cpu" in there and self._held.binding is not None:
                self._held.binding.shed()
            return done

    def reload(self) -> Relocation:
        """Take the memory of offloaded tiers again, and begin to fetch what was in them; does nothing if there is none.

        Raises CapacityError without the memory; state is then where it was, and `reload` or `step` may be called again.
        """
        with self._held.alone():
            self._held.refuse_if_closed()
            binding = self._held.binding
            return Relocation(0, 0, 0.0) if binding is None else binding.store.reload()

    @contextlib.contextmanager
    def offloaded(self, *tiers: str, to: str | None = None) -> Iterator[Relocation]:
        """Within the block the tiers, `gpu` if none is named, are empty and their memory is somebody else's to use.

        Within another such block all of them stay empty until the outer one is over.
        """
        binding = self._held.binding
        is_within = binding is not None and binding.store.is_offloaded
        done = self.offload(to, tiers or ("gpu",))
        try:
            yield done
        finally:
            if not is_within:
                with contextlib.suppress(StoreClosedError):
                    self.reload()


class GradientsOf:
    """The gradients of an optimizer's parameters, for who knows its store alone; does not keep it alive."""

    def __init__(self, optimizer: Offloading) -> None:
        self._optimizer = weakref.ref(optimizer)

    def are_there(self) -> bool:
        """Whether any parameter has one that is more than `zero_grad(set_to_none=False)` leaves."""
        gradients = (parameter.grad for parameter in self._parameters())
        return any(one is not None and (one.is_sparse or bool(local_of(one).any())) for one in gradients)

    def holders(self) -> Collection[Tensor]:
        """The parameters that have one, if only of zeros: a step updates them, and leaves alone those without."""
        return {parameter for parameter in self._parameters() if parameter.grad is not None}

    def forget(self, but_zero: Collection[Tensor]) -> None:
        """Make those of some parameters zero, and drop all others, as `zero_grad` does.

        Raises FailedStepError where a backward has updated parameters already.
        """
        optimizer = self._optimizer()
        if optimizer is not None:
            try:
                optimizer.zero_grad(set_to_none=not but_zero)
            finally:
                for parameter in self._parameters():
                    if parameter not in but_zero:
                        parameter.grad = None

    def _parameters(self) -> Iterator[Tensor]:
        optimizer = self._optimizer()
        for group in [] if optimizer is None else optimizer.param_groups:
            yield from group["params"]
