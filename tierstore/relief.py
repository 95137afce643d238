"""Memory that a store gives back, and takes again: under pressure by itself, and when somebody asks for it.

At the beginning of a step the pressure is measured, `rebalance` decides, and tiers are resized; what cannot be done is
told once, and never stops the step. Who needs memory for a while has room made for it (`yielding`), or has what ran
out of memory run once more with all that the tier can spare (`retry_on_oom`). Other threads may only queue a new size,
which the next run takes up.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tierstore.device import is_out_of_memory
from tierstore.errors import CapacityError, PolicyError, StoreClosedError, TierstoreError
from tierstore.folders import disk_margin
from tierstore.growth import SLABS_PER_TIER
from tierstore.placement import Need
from tierstore.randomness import Randomness
from tierstore.rebalance import (
    Change,
    Holdings,
    Limits,
    Rebalance,
    is_called_for,
    plan_giving,
    plan_rebalance,
    plan_size,
)
from tierstore.sizing import Sizing
from tierstore.stats import Pressure
from tierstore.tiers import MemoryTier

STEPS_BEFORE_GROWTH = 2
"""The first steps show what else needs memory."""

STEPS_BEFORE_TRYING_AGAIN = 32
"""After a tier could not be made as large as there seemed to be room for."""

_log = logging.getLogger("tierstore.relief")

T = TypeVar("T")


class Gradients(Protocol):
    """What `retry_on_oom` must know of whoever computes: whether there are gradients, and how to drop them."""

    def are_there(self) -> bool:
        """Whether a backward has left any."""

    def forget(self) -> None:
        """Drop them. Raises FailedStepError where they have changed parameters already."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A size that another thread wants a tier to have."""

    tier: str
    extents: int
    answer: Future[int]


class Relief(Sizing):
    """The sizes of a store's tiers, as the machine allows them."""

    gradients: Gradients | None = None

    def _begin_relief(self) -> None:
        self._most: dict[str, int] = dict(self.setup.given)
        self._ceilings: dict[str, int] = {}  # of tiers that yield for now
        self._try_after: dict[str, int] = {}  # the step before which a tier that could not grow is left alone
        self._look_after = STEPS_BEFORE_TRYING_AGAIN
        self._held: set[str] = set()  # tiers of which it has been told that they cannot shrink
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()

    def resize_tier(self, name: str, extents: int) -> None:
        """Make a tier `extents` large, and no larger by itself later; it shrinks by whole slabs only.

        Files without a given size grow for what has to leave. Raises CapacityError if homes and pipelines would not
        fit, or what stopped a chunk that should move to a new home; size and homes are then as they were.
        """
        with self._entered():
            self._come_to_rest(is_remedy=True)
            before = self.setup.tiers[name].arena.lasting
            plan = plan_size(self._holdings(), name, extents, f"{extents:,} were asked for")
            self._join_for(plan)
            self._resize({**plan.sizes, name: extents}, plan.homes, is_remedy=True)
            self._most[name] = extents
            what = f"{name} has {self.setup.tiers[name].arena.capacity:,} extents of {self._extent_bytes:,} bytes"
            self._traffic.recorder.decide("resize", f"{what}, before {before:,}", f"{extents:,} were asked for")

    # -- pressure -------------------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """Measure how full memory is, and adapt to it, as every step does at its beginning."""
        with self._entered():
            self._raise_errors()
            self._serve()
            if self.setup.probe is not None:
                self._heed(self.setup.probe.measure_now(), may_grow=True)

    def _adapt(self) -> None:
        """At the beginning of a step: the same, unless that was a moment ago or nothing could come of it."""
        if self.setup.probe is not None and self.setup.marks:
            pressure = self.setup.probe.measure()
            if pressure is not None:
                self._heed(pressure, may_grow=self._traffic.recorder.steps >= STEPS_BEFORE_GROWTH)

    def _heed(self, pressure: Mapping[str, Pressure], *, may_grow: bool) -> None:
        self._traffic.recorder.pressure = dict(pressure)
        step, limits = self._traffic.recorder.steps, self._limits()
        sizes = {name: tier.arena.lasting for name, tier in self.setup.tiers.items()}
        if not is_called_for(pressure, limits, sizes, may_grow=may_grow):
            self._held.clear()
            self._look_again(limits, sizes)
            return
        plan = plan_rebalance(self._holdings(), pressure, processes=self.setup.processes, may_grow=may_grow)
        for change in plan.changes:
            if change.after == change.before and change.tier not in self._held:
                self._held.add(change.tier)
                self._tell_change(change)
        if plan.sizes:
            try:
                self._carry_out(plan)
            except (TierstoreError, OSError) as error:  # memory or disk that somebody else has taken meanwhile
                for tier in plan.sizes:
                    self._try_after[tier] = step + STEPS_BEFORE_TRYING_AGAIN
                _log.warning("tiers stay as they are, though %s: %s", plan.changes[0].reason, error)
                self._traffic.recorder.decide("hold", f"{plan.changes[0].tier} stays as it is: {error}", str(plan))

    def _look_again(self, limits: Mapping[str, Limits], sizes: Mapping[str, int]) -> None:
        """Now and then let a device's allocator give back what it keeps, where that keeps a tier from growing.

        It keeps what some step once needed, and nobody can tell whether steps still need it until it has let go.
        """
        step, gpu = self._traffic.recorder.steps, self.setup.tiers.get("gpu")
        if gpu is not None and "gpu" in limits and sizes["gpu"] < limits["gpu"].most and step >= self._look_after:
            self._look_after = step + STEPS_BEFORE_TRYING_AGAIN
            self._memory_tier("gpu").device.release_unused()

    def _carry_out(self, plan: Rebalance) -> None:
        """Resize tiers, and say so; a tier that was not needed before joins."""
        self._join_for(plan)
        shrinking = {change.tier for change in plan.changes if change.after < change.before}
        before = sum(place.tier in shrinking for place in self._ledger.valid_places())
        self._resize(plan.sizes, plan.homes)
        recorder = self._traffic.recorder
        recorder.spilled += max(0, before - sum(place.tier in shrinking for place in self._ledger.valid_places()))
        recorder.promoted += sum(
            change.after - change.before
            for change in plan.changes
            if change.after > change.before and change.tier != "nvme"
        )
        for change in plan.changes:
            if change.after != change.before:
                self._tell_change(replace(change, after=self.setup.tiers[change.tier].arena.lasting))

    def _join_for(self, plan: Rebalance) -> None:
        for name in plan.sizes.keys() - self.setup.tiers.keys():
            self._join(name)

    def _tell_change(self, change: Change) -> None:
        kind = "spill" if change.after < change.before else "room" if change.tier == "nvme" else "promote"
        kind = "hold" if change.after == change.before else kind
        log = _log.warning if kind == "hold" else _log.info
        log("%s", change)
        self._traffic.recorder.decide(kind, *str(change).split("; ", 1))

    def _holdings(self) -> Holdings:
        needs = {chunk: Need(info.compute, info.named, self._ledger.home(chunk)) for chunk, info in self._infos.items()}
        return Holdings(
            needs, self._rooms(), self._limits(), self.setup.order, self._extent_bytes, self._spare_on_disks()
        )

    def _limits(self) -> dict[str, Limits]:
        """What binds each memory tier that heeds pressure."""
        limits = {}
        for name, (high, low) in self.setup.marks.items():
            tier = self.setup.tiers.get(name)
            if not isinstance(tier, MemoryTier):
                continue
            arena, most = tier.arena, self._most_of(name)
            limits[name] = Limits(
                high,
                low,
                most,
                tuple(map(arena.lasting_in, arena.lasting_slabs())),
                max(1, most // SLABS_PER_TIER),
                arena.untouched * self._extent_bytes if tier.device.torch_device.type == "cpu" else 0,
            )
        return limits

    def _most_of(self, name: str) -> int:
        """Extents that a tier may have: what it was given, or as many as there are chunks that could be in them."""
        lasting = self.setup.tiers[name].arena.lasting
        if name in self._ceilings or self._traffic.recorder.steps < self._try_after.get(name, 0):
            return min(lasting, self._ceilings.get(name, lasting))
        if name in self._most:
            return self._most[name]
        if name not in self.setup.homes:
            return lasting
        rank = self._line.index(name)
        passing = sum(
            self._line.index(info.compute) <= rank <= self._line.index(self._ledger.home(chunk))
            for chunk, info in self._infos.items()
        )
        return max(lasting, passing)

    def _spare_on_disks(self) -> int:
        """Extents by which files may grow."""
        if "nvme" not in self._line and "nvme" not in self.setup.later:
            return 0
        if "nvme" in self._most:
            has = self.setup.tiers["nvme"].arena.lasting if "nvme" in self.setup.tiers else 0
            return max(0, self._most["nvme"] - has)
        if self.setup.probe is None:
            return 0
        disks = (self._traffic.recorder.pressure or self.setup.probe.measure_now()).get("nvme")
        if disks is None:
            return 0
        free = disks.total_bytes - disks.used_bytes - disk_margin(disks.total_bytes)
        return max(0, free // self._extent_bytes)

    # -- for a while ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def yielding(self, tier: str, nbytes: int) -> Iterator[None]:
        """Have `nbytes` of the tier's memory free for the body; the tier has its size again afterwards, if it can.

        What is free already counts, of a device at the peak of the last steps. The store can be used in the body.
        Raises CapacityError, with nothing moved, if the tier cannot give so much; PolicyError for no memory tier.
        """
        with self._entered():
            self._raise_errors()
            before = self._yield(self._memory_tier(tier), nbytes)
        try:
            yield
        finally:
            with contextlib.suppress(StoreClosedError), self._entered(wait=True):
                self._take_again(tier, before)

    def _memory_tier(self, tier: str) -> MemoryTier:
        found = self.setup.tiers.get(tier)
        if not isinstance(found, MemoryTier):
            memory = [name for name, one in self.setup.tiers.items() if isinstance(one, MemoryTier)]
            raise PolicyError(f"found tier {tier!r}; allowed: a memory tier of this store ({', '.join(memory)})")
        return found

    def _yield(self, tier: MemoryTier, nbytes: int) -> int:
        before, missing = tier.arena.lasting, nbytes - self._free_bytes(tier.name)
        if missing > 0:
            extents = -(-missing // self._extent_bytes)
            reason = f"{nbytes:,} bytes are asked for, and {max(0, nbytes - missing):,} are free"
            try:
                plan = plan_giving(self._holdings_with(tier.name), tier.name, extents, reason)
            except CapacityError as error:
                raise CapacityError(
                    f"{nbytes:,} bytes of {tier.name} cannot be made free: {missing:,} would have to come from its "
                    f"{before:,} extents: {error}; offload() empties a tier altogether"
                ) from error
            self._carry_out(plan)
        self._ceilings[tier.name] = min(tier.arena.lasting, self._ceilings.get(tier.name, tier.arena.lasting))
        return before

    def _take_again(self, tier: str, before: int) -> None:
        self._ceilings.pop(tier, None)
        if self.setup.tiers[tier].arena.lasting >= before:
            return
        try:
            self._carry_out(plan_size(self._holdings(), tier, before, "what it yielded to is over"))
        except (TierstoreError, OSError) as error:
            _log.warning("%s stays smaller than it was before it yielded: %s", tier, error)
            self._traffic.recorder.decide("hold", f"{tier} stays smaller than before it yielded", str(error))

    def _free_bytes(self, tier: str) -> int:
        if self.setup.probe is None:
            return 0
        pressure = self.setup.probe.measure_now()
        self._traffic.recorder.pressure = dict(pressure)
        return max(0, pressure[tier].total_bytes - pressure[tier].used_bytes) if tier in pressure else 0

    def _holdings_with(self, tier: str) -> Holdings:
        """The holdings, with limits of a tier that may heed no pressure."""
        holdings, arena = self._holdings(), self.setup.tiers[tier].arena
        slabs = tuple(map(arena.lasting_in, arena.lasting_slabs()))
        return replace(holdings, limits={tier: Limits(1.0, 1.0, arena.lasting, slabs, 1), **holdings.limits})

    def retry_on_oom(self, fn: Callable[[], T], tier: str = "gpu") -> T:
        """Call `fn`, a whole forward and backward; if it runs out of memory, make room, and call it once more.

        In between gradients are dropped, the tier gives all that a step does not need, and torch's, numpy's and
        Python's random numbers are as before; whatever else `fn` has changed it must not mind, as running statistics.
        Raises what `fn` raises, the second time too; out of memory with gradients of an earlier backward about, which
        cannot be had again, is raised at once.
        """
        memory = self._memory_tier(tier)
        had_gradients = self.gradients is not None and self.gradients.are_there()
        randomness = Randomness.now(memory.device.torch_device)
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
            self.gradients.forget()
        with self._entered():
            self._give_what_it_can(memory, told)
        randomness.restore()
        return fn()

    def _give_what_it_can(self, tier: MemoryTier, told: str) -> None:
        self._raise_errors()
        plan = plan_giving(self._holdings_with(tier.name), tier.name, tier.arena.lasting, told, at_least=1)
        for change in plan.changes:
            if change.after == change.before:
                self._tell_change(change)
        if plan.sizes:
            self._carry_out(plan)
        self._try_after[tier.name] = self._traffic.recorder.steps + STEPS_BEFORE_TRYING_AGAIN
        tier.device.release_unused()

    # -- from other threads ---------------------------------------------------------------------------------------

    def _request(self, tier: str, extents: int) -> Future[int]:
        """Queue a new size; the answer is the bytes that the tier has then."""
        answer: Future[int] = Future()
        self._requests.put(_Request(tier, extents, answer))
        if self.is_closed:
            self._refuse_requests()
        return answer

    def _serve(self) -> None:
        """Take up the sizes that other threads have asked for."""
        while not self._requests.empty():
            request = self._requests.get()
            if not request.answer.set_running_or_notify_cancel():
                continue
            try:
                self.resize_tier(request.tier, request.extents)
                request.answer.set_result(self.setup.tiers[request.tier].arena.lasting * self._extent_bytes)
            except BaseException as error:
                request.answer.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _refuse_requests(self) -> None:
        while not self._requests.empty():
            request = self._requests.get()
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(StoreClosedError("the store was closed before the tier could be resized"))

    def close(self) -> None:
        """Wait for what is under way and give back memory, files and threads. Idempotent."""
        super().close()
        self._refuse_requests()
