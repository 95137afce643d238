"""Memory of a tier for somebody else, for a while: asked for in advance (`yielding`), or once there was too little
(`retry_on_oom`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from tierstore.device import is_out_of_memory, release_unused_memory
from tierstore.errors import CapacityError, PolicyError, StoreClosedError, TierstoreError
from tierstore.housing import Setup
from tierstore.placement import ENOUGH_EXTENTS
from tierstore.policy import CpuTier
from tierstore.randomness import Randomness
from tierstore.rebalance import Holdings, plan_giving, plan_size
from tierstore.relief import STEPS_BEFORE_TRYING_AGAIN, Relief
from tierstore.tiers import MemoryTier

_log = logging.getLogger("tierstore.relief")

T = TypeVar("T")


class Gradients(Protocol):
    """What `retry_on_oom` must know of whoever computes: whether there are gradients, and how to be rid of them."""

    def are_there(self) -> bool:
        """Whether a backward has left any."""

    def holders(self) -> Collection[Tensor]:
        """The parameters that have one, if only of zeros."""

    def forget(self, but_zero: Collection[Tensor]) -> None:
        """Make those of some parameters zero, and drop all others. Raises FailedStepError where they have changed
        parameters already.
        """


@dataclass(eq=False, frozen=True, slots=True)
class _Yield:
    """A block that has room: the extents it leaves the tier; those the tier had before the first of such blocks, and
    those it had been given then.
    """

    left: int
    before: int
    most: int | None


class Lending(Relief):
    """Tiers whose memory others may have for a while."""

    gradients: Gradients | None = None

    def __init__(self, setup: Setup, *, describe: Callable[[int], str]) -> None:
        super().__init__(setup, describe=describe)
        self._yields: dict[str, list[_Yield]] = {}  # those under way, by tier

    @contextlib.contextmanager
    def yielding(self, tier: str, nbytes: int | str) -> Iterator[None]:
        """Have `nbytes` (or 4GiB) of the tier's memory free for the body; afterwards the tier has its size again, if it
        can, once the last of several such blocks is over.

        A block that ends between a backward that updates parameters and `step()` gives the tier its size again when the
        run after that one begins: no plan is changed under way, and memory is scarcest then.

        What is free already counts, of a device at the peak of the last steps. The store can be used in the body, and
        a size given there stays. A tier that this machine does without has nothing to yield.

        Raises CapacityError, with nothing moved, if the tier cannot give so much; PolicyError for no memory tier.
        """
        wanted = _as_bytes(nbytes)
        if self._is_absent(tier):
            yield
            return
        own: _Yield | None = None
        try:
            with self._entered():
                self._make_usable(tier)
                self._raise_errors()
                own = self._yield(self._memory_tier(tier), wanted)
            yield
        finally:
            if own is not None:
                with contextlib.suppress(StoreClosedError):
                    self._do_soon(partial(self._end, tier, own))

    def _is_absent(self, tier: object) -> bool:
        """Whether it is a tier of the policy that this machine does without."""
        return isinstance(tier, str) and tier in self.setup.absent

    def _make_usable(self, tier: str) -> None:
        """See to it that a tier can give, whatever was done to others."""

    def _usual_size(self, tier: MemoryTier) -> int:
        """Extents that a tier has, or will have when it is filled again."""
        return tier.arena.lasting

    def _yield(self, tier: MemoryTier, nbytes: int) -> _Yield:
        """Make room."""
        name, before = tier.name, self._usual_size(tier)
        tier.device.release_unused()
        missing = nbytes - self._free_bytes(name)
        if missing > 0:
            extents = -(-missing // self._extent_bytes)
            reason = f"{nbytes:,} bytes are asked for, and {max(0, nbytes - missing):,} are free"
            try:
                plan = plan_giving(self._holdings_with(tier), name, extents, reason)
            except CapacityError as error:
                raise CapacityError(
                    f"{nbytes:,} bytes of {name} cannot be made free: {missing:,} would have to come from its "
                    f"{before:,} extents: {error}; offload() empties a tier altogether"
                ) from error
            self._carry_out(plan)
        left = tier.arena.lasting or max(ENOUGH_EXTENTS, -missing // self._extent_bytes)  # one that is empty may return
        under_way = self._yields.setdefault(name, [])
        own = replace(under_way[0], left=left) if under_way else _Yield(left, before, self._most.get(name))
        under_way.append(own)
        self._ceilings[name] = min(one.left for one in under_way)
        return own

    def _end(self, tier: str, own: _Yield) -> int:
        """Let the tier have its size again, if nobody else has room that it made and nobody gave it another size."""
        under_way = self._yields[tier]
        under_way.remove(own)
        if under_way:
            self._ceilings[tier] = min(one.left for one in under_way)
        else:
            del self._yields[tier], self._ceilings[tier]
            if self._most.get(tier) == own.most:
                self._take_again(tier, own.before)
        return self.setup.tiers[tier].arena.lasting * self._extent_bytes

    def _take_again(self, tier: str, before: int) -> None:
        """Let a tier be as large as before, if it can."""
        missing = before - self.setup.tiers[tier].arena.lasting
        if missing <= 0:
            return
        try:
            if tier == "cpu":
                self._check_host_memory(missing)
            self._carry_out(plan_size(self._holdings(), tier, before, "what it yielded to is over"))
        except (TierstoreError, OSError) as error:
            _log.warning("%s stays smaller than it was before it yielded: %s", tier, error)
            self._traffic.recorder.decide("hold", f"{tier} stays smaller than before it yielded", str(error))

    def _holdings_with(self, tier: MemoryTier) -> Holdings:
        """The holdings, with limits of a tier that may heed no pressure."""
        holdings = self._holdings()
        return replace(holdings, limits={tier.name: self._limits_of(tier, 1.0, 1.0), **holdings.limits})

    def retry_on_oom(self, fn: Callable[[], T], tier: str = "gpu") -> T:
        """Call `fn`, a whole forward and backward; if it runs out of memory, make room, and call it once more.

        In between gradients are dropped (those that were zero are so again), the tier gives all that a step does not
        need, and torch's, numpy's and Python's random numbers are as before; whatever else `fn` has changed it must not
        mind, as running statistics.
        A tier that this machine does without has nothing to give. The tier grows again as pressure allows; under
        `adapt: false` it stays small.

        Raises what `fn` raises, the second time too. Out of memory is raised at once with gradients of an earlier
        backward about, which cannot be had again; FailedStepError where a backward has updated parameters already.
        """
        if not self._is_absent(tier):
            self._memory_tier(tier)
        had_gradients = self.gradients is not None and self.gradients.are_there()
        zero = () if self.gradients is None else self.gradients.holders()
        randomness = Randomness.now()
        try:
            return fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if had_gradients:
                error.add_note(
                    "not tried once more, as there were gradients of an earlier backward: give retry_on_oom all of them"
                )
                raise
            told = str(error).splitlines()[0] if str(error) else type(error).__name__
        # not within the handler, where the error's frames would keep what fn had made
        if self.gradients is not None:
            self.gradients.forget(zero)
        if not self._is_absent(tier):
            with self._entered():
                self._give_what_it_can(self._memory_tier(tier), told)
        release_unused_memory()
        randomness.restore()
        return fn()

    def _give_what_it_can(self, tier: MemoryTier, told: str) -> None:
        try:
            self._make_usable(tier.name)
            self._raise_errors()
            self._measure()
            plan = plan_giving(self._holdings_with(tier), tier.name, tier.arena.lasting, told, at_least=1)
            for change in plan.changes:
                if change.after == change.before:
                    self._tell_change(change)
            if plan.sizes:
                self._carry_out(plan)
        except (TierstoreError, OSError) as error:  # memory that is freed otherwise may be enough
            _log.warning("%s could not give memory: %s", tier.name, error)
            self._traffic.recorder.decide("hold", f"{tier.name} could not give memory: {error}", told)
        self._try_after[tier.name] = self._traffic.recorder.steps + STEPS_BEFORE_TRYING_AGAIN
        tier.device.release_unused()


def _as_bytes(nbytes: Any) -> int:
    """A number of bytes, or a size as 4GiB. Raises PolicyError for anything else."""
    found = nbytes if isinstance(nbytes, int) and not isinstance(nbytes, bool) else -1
    if isinstance(nbytes, str):
        with contextlib.suppress(PolicyError):
            size: Any = nbytes
            given = CpuTier(capacity=size).capacity
            found = given if isinstance(given, int) else -1
    if found < 0:
        raise PolicyError(f"found {nbytes!r}; allowed: bytes, or a size as 4GiB")
    return found
