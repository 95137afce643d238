"""Memory that a store gives back, and takes again, as the pressure on it asks for.

At the beginning of a step the pressure is measured, `rebalance` decides, and tiers are resized; what cannot be done is
told once, left alone for some steps, and never stops one. Other threads may only queue a new size, which the next run
takes up.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from tierstore.errors import BusyStoreError, CapacityError, PolicyError, StoreClosedError, TierstoreError
from tierstore.folders import disk_margin
from tierstore.growth import slab_extents_of_memory
from tierstore.housing import Setup
from tierstore.placement import Need
from tierstore.rebalance import Change, Holdings, Limits, Rebalance, is_called_for, plan_rebalance, plan_size
from tierstore.sizing import Sizing
from tierstore.stats import Pressure
from tierstore.tiers import MemoryTier

STEPS_BEFORE_GROWTH = 2
"""The first steps show what else needs memory."""

STEPS_BEFORE_TRYING_AGAIN = 32
"""After a tier could not be made as large, or as small, as it should be."""

_log = logging.getLogger("tierstore.relief")


@dataclass(frozen=True, slots=True)
class _Request:
    """Something to be done by the thread that uses the store, for another one or for later; what it answers."""

    do: Callable[[], Any]
    answer: Future[Any]


class Relief(Sizing):
    """The sizes of a store's tiers, as the machine allows them."""

    def __init__(self, setup: Setup, *, describe: Callable[[int], str]) -> None:
        super().__init__(setup, describe=describe)
        self._most: dict[str, int] = dict(setup.given)  # extents that a tier was given, by the policy or by resizing it
        self._ceilings: dict[str, int] = {}  # of tiers that yield for now
        self._try_after: dict[str, int] = {}  # the step before which a tier is left alone
        self._look_after = STEPS_BEFORE_TRYING_AGAIN
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()

    def resize_tier(self, name: str, extents: int) -> None:
        """Make a tier `extents` large, and no larger by itself later; it shrinks by whole slabs only.

        Files without a given size grow for what has to leave. Raises CapacityError if homes and pipelines would not
        fit, with all as it was; or what stopped a chunk, and then some of what was to shrink may not have.
        """
        with self._entered():
            self._come_to_rest(is_remedy=True)
            if name not in self.setup.tiers:
                self._join(name)
            tier = self.setup.tiers[name]
            before = tier.arena.lasting
            tier.check_shrinks(extents)
            self._measure()
            plan = plan_size(self._holdings(), name, extents, f"{extents:,} were asked for")
            self._join_for(plan)
            self._resize({**plan.sizes, name: extents}, plan.homes, is_remedy=True)
            self._most[name] = extents
            what = f"{name} has {tier.arena.capacity:,} extents of {self._extent_bytes:,} bytes"
            self._traffic.recorder.decide("resize", f"{what}, before {before:,}", f"{extents:,} were asked for")

    def capacities_asked(self) -> dict[str, int]:
        """Bytes of tiers that were asked to have another size than the policy's, once all that is queued is done."""
        with self._entered():
            self._serve()
            given = self.setup.given
            return {name: most * self._extent_bytes for name, most in self._most.items() if most != given.get(name)}

    # -- pressure -------------------------------------------------------------------------------------------------

    def adapt(self) -> None:
        """Measure how full memory is, and adapt to it, as steps do by themselves if the policy lets them."""
        with self._entered():
            self._raise_errors()
            self._serve()
            self._measure()
            self._heed(may_grow=True)

    def adapt_if_due(self) -> None:
        """As a step does: the same, unless that was a moment ago; only measure, if the policy says so."""
        if self.setup.probe is None or (pressure := self.setup.probe.measure()) is None:
            return
        self._traffic.recorder.pressure = dict(pressure)
        if self.setup.adapts:
            self._heed(may_grow=self._traffic.recorder.steps >= STEPS_BEFORE_GROWTH)

    def _measure(self) -> Mapping[str, Pressure]:
        """How full memory and disks are now."""
        if self.setup.probe is not None:
            self._traffic.recorder.pressure = dict(self.setup.probe.measure_now())
        return self._traffic.recorder.pressure

    def _heed(self, *, may_grow: bool) -> None:
        """Adapt to the pressure that was measured."""
        pressure, step = self._traffic.recorder.pressure, self._traffic.recorder.steps
        limits = {name: one for name, one in self._limits().items() if step >= self._try_after.get(name, 0)}
        sizes = {name: tier.arena.lasting for name, tier in self.setup.tiers.items()}
        if not is_called_for(pressure, limits, sizes, may_grow=may_grow):
            self._look_again(limits, sizes)
            return
        holdings = replace(self._holdings(), limits=limits)
        plan = plan_rebalance(holdings, pressure, processes=self.setup.processes, may_grow=may_grow)
        for change in plan.changes:
            if change.after == change.before:
                self._leave_alone(change)
        if plan.sizes:
            try:
                self._carry_out(plan)
            except (TierstoreError, OSError) as error:  # memory or disk that somebody else has taken meanwhile
                for change in plan.changes:
                    if change.tier != "nvme":
                        reason = f"{change.reason}, but {error}"
                        self._leave_alone(replace(change, after=change.before, reason=reason))

    def _leave_alone(self, change: Change) -> None:
        """Say that a tier stays as it is, and see to that for some steps."""
        self._try_after[change.tier] = self._traffic.recorder.steps + STEPS_BEFORE_TRYING_AGAIN
        self._tell_change(change)

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
        for name, extents in plan.sizes.items():
            self.setup.tiers[name].check_shrinks(extents)
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

    # -- what planning sees ---------------------------------------------------------------------------------------

    def _holdings(self) -> Holdings:
        needs = {chunk: Need(info.compute, info.named, self._ledger.home(chunk)) for chunk, info in self._infos.items()}
        spare = self._spare_on_disks(), self._spare_memory()
        return Holdings(needs, self._rooms(), self._limits(), self.setup.order, self._extent_bytes, *spare)

    def _limits(self) -> dict[str, Limits]:
        """What binds each memory tier that heeds pressure."""
        return {
            name: self._limits_of(tier, *marks)
            for name, marks in self.setup.marks.items()
            if isinstance(tier := self.setup.tiers.get(name), MemoryTier)
        }

    def _limits_of(self, tier: MemoryTier, high: float, low: float) -> Limits:
        arena, most = tier.arena, self._most_of(tier.name)
        slabs = tuple(map(arena.lasting_in, arena.lasting_slabs()))
        untouched = 0 if tier.device.takes_memory_at_once else arena.untouched
        grows_by = slab_extents_of_memory(most, self._extent_bytes)
        return Limits(high, low, most, slabs, grows_by, untouched * self._extent_bytes)

    def _most_of(self, name: str) -> int:
        """Extents that a tier may have: what it was given, or as many as there are chunks that could be in them."""
        lasting = self.setup.tiers[name].arena.lasting
        if name in self._ceilings:
            return min(lasting, self._ceilings[name])
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
        """Extents by which files may grow, as far as was measured last; of what is free, each process's part."""
        if "nvme" in self._most:
            return max(0, self._most["nvme"] - self._has("nvme"))
        disks = self._traffic.recorder.pressure.get("nvme")
        if disks is None or "nvme" not in {*self._line, *self.setup.later}:
            return 0
        free = disks.total_bytes - disks.used_bytes - disk_margin(disks.total_bytes)
        return max(0, free // self.setup.processes // self._extent_bytes)

    def _spare_memory(self) -> int:
        """Extents by which the cpu tier may grow for chunks that leave a device, as far as was measured last."""
        host = self._traffic.recorder.pressure.get("cpu")
        if host is None or "cpu" in self._most or "cpu" not in self.setup.tiers:
            return 0
        free = int(self.setup.low_of_cpu * host.total_bytes) - host.used_bytes
        return max(0, free // self.setup.processes // self._extent_bytes)

    def _has(self, tier: str) -> int:
        """Extents of a tier, none while it has not joined."""
        return self.setup.tiers[tier].arena.lasting if tier in self.setup.tiers else 0

    def _memory_tier(self, tier: str) -> MemoryTier:
        found = self.setup.tiers.get(tier) if isinstance(tier, str) else None
        if not isinstance(found, MemoryTier):
            memory = [name for name, one in self.setup.tiers.items() if isinstance(one, MemoryTier)]
            raise PolicyError(f"found tier {tier!r}; allowed: a memory tier of this store ({', '.join(memory)})")
        return found

    def _free_bytes(self, tier: str) -> int:
        """What is free of a tier's memory, for this process, of a device at the peak of a step."""
        pressure = self._measure().get(tier)
        if pressure is None:
            return 0
        sharing = self.setup.processes if tier == "cpu" else 1
        return max(0, pressure.total_bytes - pressure.used_bytes) // sharing

    def _check_host_memory(self, extents: int) -> None:
        """Check that the host has memory for more extents of the cpu tier: it gives more than it has, and ends who uses
        it. Raises CapacityError.
        """
        nbytes = extents * self._extent_bytes
        if nbytes > 0 and self.setup.probe is not None and nbytes > (free := self._free_bytes("cpu")):
            raise CapacityError(
                f"{nbytes:,} bytes are needed for the cpu tier, and {free:,} bytes of host memory are free: free some, "
                f"or give tiers.cpu less with resize()"
            )

    # -- from other threads ---------------------------------------------------------------------------------------

    def _do_soon(self, do: Callable[[], Any]) -> None:
        """Do something now or, while the store is busy, when the next run begins; if that goes wrong then, tell it."""
        try:
            with self._entered():
                do()
        except BusyStoreError:  # with a run beside backward, say, which may wait for this very thread
            self._request(do).add_done_callback(_tell_failure)

    def _request(self, do: Callable[[], Any]) -> Future[Any]:
        """Queue something for the next run."""
        request = _Request(do, Future())
        self._requests.put(request)
        if self.is_closed:
            self._refuse_requests()
        return request.answer

    def _serve(self) -> None:
        """Do what was queued."""
        while not self._requests.empty():
            request = self._requests.get()
            if not request.answer.set_running_or_notify_cancel():
                continue
            try:
                request.answer.set_result(request.do())
            except BaseException as error:
                request.answer.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _refuse_requests(self) -> None:
        while not self._requests.empty():
            request = self._requests.get()
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_exception(StoreClosedError("the store was closed before it came to this"))

    def close(self) -> None:
        """Wait for what is under way and give back memory, files and threads. Idempotent."""
        super().close()
        self._refuse_requests()


def _tell_failure(answer: Future[Any]) -> None:
    """Log what nobody waits to hear."""
    error = answer.exception()
    if error is not None and not isinstance(error, StoreClosedError):
        notes = "; ".join(getattr(error, "__notes__", ()))
        _log.warning("what was put off while the store was busy has failed: %s%s", error, notes and f"; {notes}")
