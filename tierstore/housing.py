"""Where a store's chunks live: homes are chosen, changed, and found anew when a failed write has cost room.

A chunk whose write failed for good is still in memory, its extent is lost, and every plan made before is void. `_mend`
makes that good: it reserves as much elsewhere, on another path first; where no disk has the room, homes move to memory.
What it cannot make good is an error, raised again by each call that needs chunks until it can: then paths that were
shunned are tried once more.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tierstore.errors import CapacityError, TierstoreError, TransferError, TransferTimeoutError
from tierstore.execution import ChunkInfo, Execution
from tierstore.guard import Guarded
from tierstore.mapping import map_host_memory
from tierstore.placement import Need, Room, place_homes
from tierstore.planning import ChunkView, Plan, Update, plan_eviction, plan_homes, plan_step
from tierstore.probes import Probe
from tierstore.residency import Resident
from tierstore.stats import IoStats
from tierstore.tiers import Tier
from tierstore.traffic import FailedWriteError, Traffic
from tierstore.transfer import Ticket, TransferEngine

_log = logging.getLogger("tierstore.store")


@dataclass(frozen=True, slots=True)
class Setup:
    """What a store is built from: tiers on a line, fastest first; which may be homes; and the doers.

    `later`: tiers of the policy that nothing needs yet, each with what opens it; they come last on the line. `marks`:
    high and low watermark of the tiers that heed pressure. `given`: extents of the tiers with a given capacity.
    """

    tiers: dict[str, Tier]
    homes: frozenset[str]
    order: str
    slab_extents: Mapping[str, int]
    transfer: TransferEngine
    io: IoStats
    timeout_seconds: float | None = None
    decided: tuple[tuple[str, str, str], ...] = ()  # on the way here: each decision's kind, what, and why
    later: Mapping[str, Callable[[], tuple[Tier, IoStats]]] = field(default_factory=dict)
    probe: Probe | None = None
    low_of_cpu: float = 0.75  # the cpu tier's low watermark, though it may have nowhere to send chunks to
    marks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    adapts: bool = True  # by itself
    given: Mapping[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()  # tiers of the policy that this machine does without
    processes: int = 1  # that share this machine


class Housing(Guarded):
    """The homes of chunks in tiers. `describe` turns a chunk number into words for errors."""

    def __init__(self, setup: Setup, *, describe: Callable[[int], str]) -> None:
        super().__init__(list(setup.tiers.values()), setup.transfer)
        self.setup = setup
        self._io = setup.io
        self._line = tuple(setup.tiers)
        self._extent_bytes = setup.tiers[self._line[0]].arena.extent_bytes
        self._infos: dict[int, ChunkInfo] = {}
        self._traffic = Traffic(setup.tiers, setup.transfer, describe=describe, timeout_seconds=setup.timeout_seconds)
        self._ledger = self._traffic.ledger
        self._execution = Execution(self._traffic, self._infos)
        self._describe = describe
        self._short: TransferError | None = None  # the failed write that could not be made good

    # -- failed writes ------------------------------------------------------------------------------------------

    def _raise_errors(self) -> None:
        """Make failed writes good, and raise the errors of other moves that failed."""
        if self._short is not None or (not self._traffic.failed_writes and self._lacks_room()):
            self._listen()
            self._try_again()
        while self._short is not None or self._traffic.failed_writes or self._lacks_room():
            self._mend()
        self._traffic.raise_errors()

    def _mend(self) -> None:
        """Find room for what failed writes should have written. Raises TransferError, with the numbers, without any.

        Outside of runs, chunks that were on their way home set out again.
        """
        self._traffic.wait_until_all_over()
        self._traffic.unmake()
        failed, self._traffic.failed_writes = self._traffic.failed_writes, {}
        self._short = first = next(iter(failed.values()), self._short)
        if first is None:  # nobody has tried to write: reads have failed so often that nobody will
            self._short = first = next(error for each in self._traffic.striping.values() if (error := each.why_shunned))
        made = [words for striping in self._traffic.striping.values() if (words := striping.make_up())]
        try:
            homes = self._homes_for(self._infos, self._rooms())
            moved = sum(home != self._ledger.home(chunk) for chunk, home in homes.items())
            self._rehome(homes)
        except FailedWriteError:
            return  # there is one more to make good
        except CapacityError as error:
            text = f"{first.strerror}; and there is no room for it elsewhere: {error}"
            kind = TransferTimeoutError if isinstance(first.__cause__, TransferTimeoutError) else TransferError
            raise kind(first.errno, text, first.filename) from first
        self._short = None
        self._tell_mended(failed, made, moved)
        if not self._is_running:
            self._send_again(failed)

    def _lacks_room(self) -> bool:
        """Whether so much was lost with paths that fail that homes do not fit what is left."""
        for name, striping in self._traffic.striping.items():
            if striping.owed > 0 and striping.why_shunned is not None:
                homes = sum(self._ledger.home(chunk) == name for chunk in self._infos)
                if homes > self.setup.tiers[name].arena.lasting:
                    return True
        return False

    def _tell_mended(self, failed: Mapping[int, TransferError], made: Sequence[str], moved: int) -> None:
        for error in list(failed.values())[:1]:
            more = [self._describe(chunk) for chunk in list(failed)[1:9]]
            done = [*made, *([f"{moved} chunks have their home in faster memory now"] if moved else [])]
            self._traffic.recorder.decide("room", "; ".join(done) or "extents that were free are used", str(error))
            _log.warning(
                "%s%s. What cannot be written is not used again; in its place: %s",
                error,
                f" (and {', '.join(more)})" if more else "",
                "; ".join(done) or "extents that were free",
            )

    def _send_again(self, chunks: Mapping[int, object]) -> None:
        """Send home those of some chunks that still can leave for it."""
        going = [
            chunk
            for chunk in chunks
            if chunk in self._ledger and not self._ledger.is_leased(chunk)
            if isinstance(self._ledger.where(chunk), Resident)
        ]
        room = self._traffic.wait_for_room()
        self._execution.issue_all(plan_eviction(going, self._views(), room, self._line))

    def _listen(self) -> None:
        """Find out whether paths of which something was given up answer again, by a read that is given up too if not.

        Whoever asked a disk for room that does not answer would wait for ever.
        """
        places = self._ledger.valid_places()
        for name, striping in self._traffic.striping.items():
            for any_one, extents in striping.silent().values():
                found = ((extent, places.get(Resident(name, extent))) for extent in sorted(extents))
                extent, chunk = next(((extent, chunk) for extent, chunk in found if chunk is not None), (any_one, None))
                into = self._buffer_for(chunk) if chunk is not None else map_host_memory(extent.length)
                with contextlib.suppress(TransferError):
                    self._read_out((chunk, Resident(name, extent), into))
                    striping.succeed(extent, is_write=False)

    def _read_out(self, *reads: tuple[int | None, Resident, Tensor]) -> None:
        """Copy chunks out of their places, all at once; raises the first error when none is under way any more."""
        begun: list[tuple[int | None, Ticket]] = []
        failed: TierstoreError | None = None
        for chunk, place, into in reads:
            where = self.setup.tiers[place.tier], place.extent
            ready = None if chunk is None else self._traffic.last_use.get(chunk)
            begun.append((chunk, self.setup.transfer.read_out(where, into, ready=ready)))
        for chunk, ticket in begun:
            try:
                self.setup.transfer.wait_for(ticket, self.setup.timeout_seconds)
            except TierstoreError as error:
                explained = error if chunk is None else self._traffic.explain(chunk, ticket.route, error)
                failed = failed or explained
        if failed is not None:
            raise failed

    def _buffer_for(self, chunk: int) -> Tensor:
        return map_host_memory(self._infos[chunk].record_bytes)

    def _refuse_unreadable(self, chunks: Sequence[int]) -> None:
        """Raise what stands in the way of a run, before it begins: chunks that could not, and still cannot, be read."""
        for chunk in self._traffic.unreadable.keys() & chunks:
            self._traffic.wait_until_over(chunk)  # somebody may have asked for it again
            self._raise_errors()
            place = self._ledger.where(chunk)
            if chunk in self._traffic.unreadable and isinstance(place, Resident):
                self._read_out((chunk, place, self._buffer_for(chunk)))
                self._traffic.unreadable.pop(chunk)

    def _make_up(self) -> None:
        """Reserve again what has been lost, as far as there is disk for it."""
        for striping in self._traffic.striping.values():
            if striping.owed > 0:
                striping.make_up()

    def _try_again(self) -> bool:
        """Let paths that failed be written to again; whether there were any."""
        shunned = [striping for striping in self._traffic.striping.values() if striping.try_again()]
        return bool(shunned)

    # -- homes --------------------------------------------------------------------------------------------------

    def _rooms(self) -> dict[str, Room]:
        return {name: Room(tier.arena.lasting, name in self.setup.homes) for name, tier in self.setup.tiers.items()}

    def _homes_for(
        self, infos: Mapping[int, ChunkInfo], rooms: Mapping[str, Room], *, anew: Sequence[str] = ()
    ) -> dict[int, str]:
        """Choose homes; chunks keep those they have, as far as they can, except in the tiers `anew`."""
        kept = {chunk: home for chunk in self._infos if (home := self._ledger.home(chunk)) not in anew}
        needs = [Need(info.compute, info.named, kept.get(chunk)) for chunk, info in infos.items()]
        homes = place_homes(needs, rooms, order=self.setup.order, extent_bytes=self._extent_bytes)
        return dict(zip(infos, homes, strict=True))

    def _homes_with(self, infos: Mapping[int, ChunkInfo]) -> dict[int, str]:
        """Choose homes for all chunks and new ones, in what room there is once failures have been made up for."""
        self._listen()
        self._make_up()
        together = {**self._infos, **infos}
        try:
            return self._homes_for(together, self._rooms())
        except CapacityError:
            if not self._try_again():
                raise
            return self._homes_for(together, self._rooms())

    def _rehome(self, homes: Mapping[int, str]) -> None:
        """Change homes once the chunks that move up to theirs have landed. On an error all stay as they were.

        What homes need of a tier is its due from then on, though more may be there than it was given.
        """
        for name, count in Counter(homes.values()).items():
            self.setup.tiers[name].due = max(self.setup.tiers[name].due, count)
        changed = {chunk: homes[chunk] for chunk in self._infos if homes[chunk] != self._ledger.home(chunk)}
        if not changed:
            return
        free = {chunk: home for chunk, home in changed.items() if not self._ledger.is_leased(chunk)}
        self._execution.issue_all(plan_homes(free, self._views(), self._traffic.wait_for_room(), self._line))
        self._traffic.wait_for_all()
        routes = Counter(f"{self._ledger.home(chunk)} -> {home}" for chunk, home in changed.items())
        for chunk, home in changed.items():
            self._ledger.set_home(chunk, home)
        self._tell_homes(f"{len(changed):,} chunks have another home", routes)

    def _tell_homes(self, what: str, counts: Mapping[str, int]) -> None:
        rooms = ", ".join(f"{name} {room.extents:,}" for name, room in self._rooms().items() if room.homes)
        where = ", ".join(f"{count:,} {home}" for home, count in counts.items())
        self._traffic.recorder.decide("homes", f"{what}: {where or 'none'}", f"room for homes and pipelines: {rooms}")

    # -- plans --------------------------------------------------------------------------------------------------

    def _plan(self, order: Sequence[int], upcoming: Sequence[int]) -> Plan:
        """Plan a run; there is nothing to plan while all chunks of this one and the next are where they are used."""
        if self._are_in_place(order) and self._are_in_place(set(upcoming).difference(order)):
            return Plan(tuple(map(Update, order)))
        return plan_step(order, upcoming, self._views(), self._traffic.wait_for_room(), self._line)

    def _are_in_place(self, chunks: Iterable[int]) -> bool:
        bound_for, infos = self._ledger.bound_for, self._infos
        return all(bound_for(chunk) == infos[chunk].compute for chunk in chunks)

    def _views(self) -> dict[int, ChunkView]:
        """What planning sees; a leased chunk counts as at home where it is, so that it is not asked to leave."""
        views = {}
        for chunk, info in self._infos.items():
            tier = self._ledger.bound_for(chunk)
            is_held = tier is not None and self._ledger.is_leased(chunk)
            views[chunk] = ChunkView(tier, tier if is_held and tier else self._ledger.home(chunk), info.compute)
        return views
