"""Carries out plans: issues moves, waits for chunks, holds each while it is used, and knows what the time went into.

Every move of a plan is issued when the plan comes to it, and is waited for only where its chunk is used. A use that
fails, or a move that does, ends the run where it is; what that means for the chunks is the store's to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from tierstore.cores import leaving_one_free
from tierstore.device import Event
from tierstore.pages import lies_on_small_pages
from tierstore.planning import Move, Plan
from tierstore.residency import Resident
from tierstore.signals import break_point
from tierstore.sparing import Sparing
from tierstore.stats import StepStats
from tierstore.tiers import MemoryTier
from tierstore.trace import CONTROL
from tierstore.traffic import FailedWriteError, Traffic

Use = Callable[[int, Tensor, bool], None]
"""Called with a chunk's number, its record (uint8, on the device of the tier that computes), whether it is fresh."""

TOGETHER = 16
"""Chunks held at once where uses are gathered: what is done per chunk in Python is then found in the core's own cache,
out of which an update drives it.
"""
FEW = 4
"""The same where moves that follow uses have to wait for the others."""
BUSY = 4
"""Moves under way that keep links busy meanwhile; with fewer, none waits."""


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """What the store must know of a chunk: bytes that move, the tier it is used in, the one it was told to be in."""

    record_bytes: int
    compute: str
    named: str | None = None


@dataclass(slots=True)
class _Tally:
    """What a run has moved so far, and how long it has waited for what its uses need."""

    bytes_read: int = 0
    bytes_written: int = 0
    not_ready_seconds: float = 0.0


class Execution:
    """Carries out plans for the chunks of `infos`, which belongs to the store. `used` are those of the last run."""

    def __init__(self, traffic: Traffic, infos: Mapping[int, ChunkInfo]) -> None:
        self.used: list[int] = []
        self._traffic = traffic
        self._infos = infos
        self._sparing = Sparing()
        self._small_pages: tuple[list[tuple[int, int]], bool] = ([], False)  # of which memory, and what was found

    def step(
        self,
        plan: Plan,
        use: Use,
        finish: Callable[[], None] | None = None,
        ready: Callable[[int], None] | None = None,
        replan: Callable[[], Plan] | None = None,
        flush: Callable[[], None] | None = None,
    ) -> StepStats:
        """Run a step's plan, on one core less where that is faster; return what that took and what it moved.

        Where uses wait to be `ready`, others compute meanwhile, and this run always has one core less: where there are
        more threads than cores, the parts of an operation wait for each other several times as long as they take.
        """
        if ready is not None:
            with leaving_one_free():
                return self.run(plan, use, finish, ready, replan, flush)
        with leaving_one_free() if self._sparing.is_on and self._uses_files(plan) else nullcontext():
            stats = self.run(plan, use, finish, None, replan, flush)
        self._hear(stats)
        if stats.bytes_read and stats.bound != "arithmetic":
            return replace(stats, on_small_pages=self._lies_on_small_pages())
        return stats

    def run(
        self,
        plan: Plan,
        use: Use,
        finish: Callable[[], None] | None = None,
        ready: Callable[[int], None] | None = None,
        replan: Callable[[], Plan] | None = None,
        flush: Callable[[], None] | None = None,
        *,
        zeroes: bool = True,
    ) -> StepStats:
        """Issue, wait and use in the plan's order, then `finish`; return what that took and what it moved.

        Time in `ready`, which is called before each use and waits for what the use needs, counts as none of it. When a
        write fails for good, which voids the plan, `replan` gives another, of the uses that are left. Fresh records are
        zeroed, unless (`zeroes` false) uses write every byte of theirs. With `flush`, which launches what uses gather,
        chunks that are there and follow one another are used together.
        """
        traffic, trace, began = self._traffic, self._traffic.trace, time.perf_counter()
        self.used = []
        traffic.read_wait_seconds = traffic.write_wait_seconds = 0.0
        tally = _Tally()
        while True:
            try:
                self._carry_out(plan, use, ready, flush, tally, zeroes)
                break
            except FailedWriteError:
                if replan is None:
                    raise
                plan = replan()
        if finish is not None:
            finish()
        ended = time.perf_counter()
        if trace is not None:
            moved = {"read": tally.bytes_read, "written": tally.bytes_written}
            trace.add(CONTROL, "run", began, ended, chunks=len(self.used), **moved)
        reads, writes = traffic.read_wait_seconds, traffic.write_wait_seconds
        update_seconds = ended - began - tally.not_ready_seconds - reads - writes
        return StepStats(1, update_seconds, reads, writes, tally.bytes_read, tally.bytes_written)

    def _carry_out(
        self,
        plan: Plan,
        use: Use,
        ready: Callable[[int], None] | None,
        flush: Callable[[], None] | None,
        tally: _Tally,
        zeroes: bool,
    ) -> None:
        traffic, gathered, deferred = self._traffic, list[int](), list[Move]()

        def release() -> None:
            """Use what was gathered, then issue the moves that came meanwhile."""
            if gathered:
                self._use(gathered, use, flush, zeroes)
                gathered.clear()
            for move in deferred:
                self._issue(move, tally)
            deferred.clear()

        for action in plan.actions:
            break_point()
            traffic.raise_errors()  # a move rolled back has taken the plan's ground away
            if isinstance(action, Move):
                if not gathered:
                    self._issue(action, tally)
                    continue
                deferred.append(action)
                if traffic.count_under_way() < BUSY:
                    release()
                continue
            if ready is not None:
                paused = time.perf_counter()
                ready(action.chunk)
                tally.not_ready_seconds += time.perf_counter() - paused
            number = action.chunk
            if traffic.is_under_way(number):
                traffic.settle()  # what has landed meanwhile need not be waited for
                traffic.raise_errors()
            moves = traffic.is_under_way(number) or any(move.chunk == number for move in deferred)
            if moves or number in gathered:
                release()
                traffic.raise_errors()
            gathered.append(number)
            if moves or flush is None or len(gathered) == (FEW if deferred else TOGETHER):
                release()
        release()

    def _issue(self, move: Move, tally: _Tally) -> None:
        nbytes, files = self._infos[move.chunk].record_bytes, self._traffic.striping
        tally.bytes_read += nbytes if move.source in files else 0
        tally.bytes_written += nbytes if move.destination in files else 0
        self._traffic.issue(move, nbytes)

    def _hear(self, stats: StepStats) -> None:
        """Let it be decided whether the next step leaves a core free."""
        was_on = self._sparing.is_on
        self._sparing.hear(stats)
        if self._sparing.is_on != was_on:
            total = stats.update_seconds + stats.wait_seconds
            self._traffic.recorder.decide(
                "core",
                "a core is left free for reading and writing" if not was_on else "all cores compute",
                f"the last step took {total:.3f} s, {stats.wait_seconds:.3f} s of them waiting for files",
            )

    def issue_all(self, plan: Plan) -> None:
        """Issue the moves of a plan; use nothing and wait for nothing."""
        for move in plan.moves:
            self._traffic.issue(move, self._infos[move.chunk].record_bytes)

    def _uses_files(self, plan: Plan) -> bool:
        files = self._traffic.striping
        return any(
            isinstance(action, Move) and (action.source in files or action.destination in files)
            for action in plan.actions
        )

    def _lies_on_small_pages(self) -> bool:
        """Whether the memory of host tiers does; looked up anew when there is other memory than before."""
        tiers = [tier for tier in self._traffic.tiers.values() if isinstance(tier, MemoryTier)]
        ranges = [one for tier in tiers if tier.device.torch_device.type == "cpu" for one in tier.ranges()]
        if ranges != self._small_pages[0]:
            self._small_pages = ranges, lies_on_small_pages(ranges)
        return self._small_pages[1]

    def _use(self, chunks: Sequence[int], use: Use, flush: Callable[[], None] | None, zeroes: bool) -> None:
        """Lease, use and release chunks, several of them only where `flush` launches their uses together."""
        trace = self._traffic.trace
        leased: list[tuple[int, Tensor, bool]] = []
        with ExitStack() as leases:
            for chunk in chunks:
                leased.append((chunk, *self.begin_use(chunk, zeroes=zeroes)))
                leases.callback(self.end_use, chunk)
            began = time.perf_counter() if trace is not None else 0.0
            for chunk, record, is_fresh in leased:
                self.used.append(chunk)
                use(chunk, record, is_fresh)
            if flush is not None:
                flush()
        if trace is not None:
            numbers, nbytes = ", ".join(map(str, chunks)), sum(record.numel() for _, record, _ in leased)
            trace.add(CONTROL, f"update {numbers}", began, time.perf_counter(), chunks=numbers, bytes=nbytes)

    def begin_use(self, chunk: int, *, zeroes: bool = True) -> tuple[Tensor, bool]:
        """Wait for the chunk, or make it (of zeroes, or of any bytes); hold it, and view its record."""
        is_fresh = False
        if self._traffic.is_under_way(chunk):
            try:
                is_fresh = self._traffic.make(chunk)
                if not is_fresh:
                    self._traffic.wait_for(chunk)
            except BaseException:
                self._traffic.unmake()
                raise
        place = self._traffic.ledger.lease(chunk)
        tier = self._traffic.memory(place.tier)
        record = tier.bytes_at(place.extent, self._infos[chunk].record_bytes)
        if is_fresh and zeroes:
            try:
                tier.device.launch(lambda: _zero(record))
            except BaseException:
                self._traffic.ledger.release(chunk)
                raise
        return record, is_fresh

    def end_use(self, chunk: int, last: Event | None = None) -> None:
        """Let go of the chunk; moves of it follow what was launched with its record, until now or `last`."""
        place = self._traffic.ledger.where(chunk)
        self._traffic.ledger.release(chunk)
        if isinstance(place, Resident):
            self._traffic.last_use[chunk] = last or self._traffic.memory(place.tier).device.record()


def _zero(record: Tensor) -> None:
    record.zero_()
