"""Writes the files of `monitor` and `record`: how a job is, and how it went, for `tierstore top` and `report`.

Looked at when a step ends, at most once a second: no thread, no timer. A file is replaced as a whole, so that a reader
sees the one before or this one. What cannot be written is one warning; nothing here ever stops a step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import stat
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tierstore
from tierstore.history import (
    MOST_SAMPLES,
    PICTURE_FORMAT,
    RECORD_FORMAT,
    Interval,
    Job,
    Picture,
    Sample,
    halved,
    interval,
    kept,
    pressure_of,
    row_bounds,
    rows_of,
)
from tierstore.policy import TierPolicy
from tierstore.stats import Decision, Stats
from tierstore.store import ChunkStore

LEAST_SECONDS = 1.0
"""Between two looks."""
DECISIONS_SHOWN = 20
"""In a picture of now."""
LONGEST_ROW_NAME = 160

Clock = Callable[[], float]


class Monitor:
    """The files of one optimizer, over all the stores it makes. `clock`: seconds, as of `time.monotonic`."""

    def __init__(self, policy: TierPolicy, *, clock: Clock = time.monotonic) -> None:
        rank = _rank()
        self._picture = None if policy.monitor is None else OutFile("monitor", policy.monitor, PICTURE_FORMAT, rank)
        self._record = (
            None if policy.record is None else _Recording(OutFile("record", policy.record, RECORD_FORMAT, rank))
        )
        self._job = Job(socket.gethostname(), os.getpid(), rank, time.time())
        self._clock = clock
        self._began: float | None = None
        self._looked = 0.0
        self._store: weakref.ref[ChunkStore] | None = None
        self._before: Stats | None = None
        self._steps_before = 0  # of stores that are gone

    def step_ended(self, store: ChunkStore) -> None:
        """Look, and write, if that was not done a moment ago."""
        now = self._clock()
        if self._began is None:
            step = store.stats().last_step
            self._began = self._looked = now - step.update_seconds - step.wait_seconds
        elif now - self._looked < LEAST_SECONDS:
            return
        self._look(store, now, ended=False)

    def end(self, store: ChunkStore) -> None:
        """Say that the job is over, if it ever began."""
        if self._began is not None:
            self._look(store, self._clock(), ended=True)

    def _look(self, store: ChunkStore, now: float, *, ended: bool) -> None:
        is_new = self._store is None or self._store() is not store
        if is_new:
            self._steps_before += self._before.step.count if self._before is not None else 0
            self._store, self._before = weakref.ref(store), None
        stats = store.stats()
        assert self._began is not None
        step, since = self._steps_before + stats.step.count, interval(self._before, stats, now - self._looked)
        if self._picture is not None:
            seen = replace(stats, decisions=stats.decisions[-DECISIONS_SHOWN:])
            picture = Picture(PICTURE_FORMAT, tierstore.__version__, self._job, time.time(), step, ended, since, seen)
            self._picture.replace(_json(picture.to_dict()))
        if self._record is not None:
            if is_new:
                self._record.change_store()
            self._record.add(store, stats, now - self._began, step, since)
            self._record.write(self._job, stats, began=time.time() - (now - self._began), ended=ended)
        self._before, self._looked = stats, now


class _Recording:
    """The samples of a run so far; one that is being made longer than the record may be is merged into the next.

    So are the first step and the last ones, which are looked at sooner: what they moved in no time would be a peak.
    """

    def __init__(self, file: OutFile) -> None:
        self._file = file
        self._samples: list[Sample] = []
        self._texts: list[str] = []  # of the samples, as they are in the file
        self._is_whole = True  # the last sample, that is: the next look begins another
        self._every = 1  # so many looks make one sample
        self._looks = 0
        self._chunks: list[int] = []
        self._bounds: list[range] = []
        self._names: tuple[str, ...] = ()
        self._decided = 0
        self._seen = 0  # the number of the last decision of this store
        self._first: list[Decision] = []
        self._last: list[Decision] = []

    def change_store(self) -> None:
        """Know that what comes next is of another store, whose chunks are others and whose decisions count from 1."""
        self._chunks, self._seen = [], 0

    def add(self, store: ChunkStore, stats: Stats, seconds: float, step: int, since: Interval) -> None:
        """Add a look; it is in the record at once, and merged with the next ones until they make a sample."""
        self._note_decisions(stats)
        tiers = store.residency()
        chunks = sorted(chunk for chunk in tiers if chunk >= 0)
        if chunks != self._chunks:
            self._chunks, self._bounds = chunks, row_bounds(len(chunks))
            self._names = tuple(_name(store, [chunks[position] for position in row]) for row in self._bounds)
        used = {name: tier.used_bytes for name, tier in stats.tiers.items()}
        rows, pressure = rows_of([tiers[chunk] for chunk in chunks], self._bounds), pressure_of(stats)
        sample = Sample(seconds, step, since, used, rows, pressure, pressure)
        if self._samples and not (self._is_whole and since.seconds >= LEAST_SECONDS):
            self._texts.pop()
            sample = self._samples.pop() + sample
        self._append(sample)
        self._looks += 1
        self._is_whole = self._looks % self._every == 0 and sample.interval.seconds >= LEAST_SECONDS
        if len(self._samples) >= MOST_SAMPLES and self._is_whole:
            samples, self._samples, self._texts = self._samples, [], []
            for sample in halved(samples):
                self._append(sample)
            self._every, self._looks = 2 * self._every, 0

    def write(self, job: Job, stats: Stats, *, began: float, ended: bool) -> None:
        """Replace the file."""
        head = {
            "format": RECORD_FORMAT,
            "version": tierstore.__version__,
            "job": asdict(job),
            "began": began,
            "ended": ended,
            "chunks": len(self._chunks),
            "rows": self._names,
            "decided": self._decided,
            "decisions": [asdict(decision) for decision in (*self._first, *self._last)],
            "stats": replace(stats, decisions=()).to_dict(),
        }
        samples = ",\n".join(self._texts)
        self._file.replace(f'{_json(head)[:-1]},"samples":[\n{samples}\n]}}\n')

    def _append(self, sample: Sample) -> None:
        self._samples.append(sample)
        self._texts.append(_json(asdict(sample)))

    def _note_decisions(self, stats: Stats) -> None:
        new = [decision for decision in stats.decisions if decision.number > self._seen]
        if new:
            self._decided += new[-1].number - self._seen
            self._seen = new[-1].number
            self._first, self._last = kept(self._first, self._last, new)


class OutFile:
    """A file that is replaced as a whole, again and again, unless there is something else in it than `form` says.

    `key` is the policy's; rank n > 0 puts `.n` in the name.
    """

    def __init__(self, key: str, path: Path, form: str, rank: int = 0) -> None:
        named = path if rank == 0 else path.with_name(f"{path.stem}.{rank}{path.suffix}")
        self.path = Path(os.path.realpath(named))  # a link stays one
        self._key = key
        self._form = form
        self._is_ours = False
        self._has_warned = False

    def replace(self, text: str) -> None:
        """Put a text in the place of what is there. Warns, once, if that cannot be."""
        try:
            self._replace(text)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"tierstore: {self._key}: {self.path} cannot be written ({error.strerror or error}); training goes "
                    f"on without it: name another file, in a folder that exists and is yours",
                    UserWarning,
                    stacklevel=2,
                )

    def _replace(self, text: str) -> None:
        if self.path.exists() and not stat.S_ISREG(self.path.stat().st_mode):
            raise OSError("it is there, and no ordinary file")
        self._is_ours = self._is_ours or _may_be_replaced(self.path, self._form)
        if not self._is_ours:
            raise OSError(f"what is in it was not written for `{self._key}:` by any job, and is kept")
        made = self.path.with_name(f".{self.path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(made, "x", encoding="utf-8", errors="replace") as file:
                file.write(text)
            os.replace(made, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            raise


def monitor_of(policy: TierPolicy) -> Monitor | None:
    """The monitor that a policy asks for."""
    return Monitor(policy) if policy.monitor is not None or policy.record is not None else None


def _may_be_replaced(path: Path, form: str) -> bool:
    """Whether nothing is lost with a file: there is none, it is empty, or a job wrote it in some version of `form`."""
    try:
        with path.open("rb") as file:
            head = file.read(200)
    except FileNotFoundError:
        return True
    kind = form.rpartition(" ")[0].encode()
    return not head or re.match(rb'\s*\{\s*"format"\s*:\s*"' + kind + rb' \d+"', head) is not None


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _rank() -> int:
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _name(store: ChunkStore, chunks: list[int]) -> str:
    """Words for the chunks of a row."""
    first = store.describe(chunks[0])[:LONGEST_ROW_NAME]
    return first if len(chunks) == 1 else f"{first} to {store.describe(chunks[-1])[:LONGEST_ROW_NAME]}"
