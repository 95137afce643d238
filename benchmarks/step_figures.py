"""From turns and raw samples to the tables and checks of `step_time`: arithmetic on values, no measuring.

A ratio is taken round by round, between figures of one round, and the median of the rounds is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Check, Column, Sample, Table, median, ratio
from benchmarks.harness.rounds import percentile
from benchmarks.harness.training import Turn, Work

TORCH = "torch fused"
NVME_LINK = "cpu-nvme"


@dataclass(frozen=True, slots=True)
class Bound:
    """What a setting's step cannot be better than: chunks in all, bytes by link, as read and written."""

    chunks: int
    state_bytes: int
    links: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """Turns by contender, and a raw sample per round."""

    work: Work
    turns: Mapping[str, Sequence[Turn]]
    samples: Sequence[Sample]
    bounds: Mapping[str, Bound]
    ideal: str  # the contender with all state in the fastest tier
    alike: str  # the one with all state there in the form in which the others move it

    @property
    def raw_rate(self) -> float:
        """Bytes per second of the raw device, read and written at once."""
        return median([sample.rate for sample in self.samples])

    def raw(self) -> Iterator[Mapping[str, Any]]:
        """What the report says of the raw device."""
        latencies = [seconds for sample in self.samples for seconds in sample.latencies]
        yield {
            "kind": "mixed",
            "request": self.samples[0].bytes // len(self.samples[0].latencies),
            "in_flight": 8,
            "gb_per_s": self.raw_rate / 1e9,
            "p50": percentile(latencies, 50),
            "p99": percentile(latencies, 99),
            "cpu_s_per_gb": median([sample.cpu_seconds / sample.bytes for sample in self.samples]) * 1e9,
        }

    def tables(self) -> tuple[Table, ...]:
        """All of them."""
        return self._steps(), self._links(), self._iterations()

    def checks(self) -> Iterator[Check]:
        """The figures to reach."""
        links = self._links().rows
        for row in links:
            moved, bound = row["moved"], row["bound"]
            claim = f"{row['tiers']}: bytes per parameter on {row['link']}"
            yield Check(claim, f"at most {bound:.2f} B", f"{moved:.2f} B", moved <= bound * 1.0001)
        rows = [row for row in links if row["link"] == NVME_LINK]
        for row in rows[:1]:  # where all state passes
            of = row["of_device"]
            yield Check(f"{row['tiers']}: of the raw device", "at least 75%", f"{of:.0%}", of >= 0.75)
        for row in rows:
            over = row["over"]
            is_stood_in_for = "gpu" in row["tiers"] and self.work.device.type == "cpu"  # its copies take cores' time
            holds = None if is_stood_in_for else over < 0.10
            yield Check(f"{row['tiers']}: over max(I/O, arithmetic)", "below 10%", f"{over:.0%}", holds)

    def notes(self) -> Iterator[str]:
        """How to read it."""
        yield (
            "K%: that share of the chunks stays in the faster tier from step to step, which has 8 extents more for "
            "chunks on their way (fewer where there are few chunks)"
        )
        if self.work.device.type == "cpu":
            yield (
                "gpu is host memory here, which stands in for an accelerator: its copies take the time of cores that "
                "update, which is not in the bound, so that what its rows take over it is shown and not tried"
            )
        yield "gpu+cpu+nvme: a quarter of the chunks stays in each of the two faster tiers"
        yield (
            f"of ideal: beside all state in memory, {self.ideal}; over: time beyond max(bytes / raw rate, step of "
            f"{self.alike}, which has all state in memory in the form that moves)"
        )

    # -- the tables -------------------------------------------------------------------------------------------------

    def _steps(self) -> Table:
        columns = (
            Column("tiers", "tiers"),
            Column("step", "step", "seconds"),
            Column("update", "update", "seconds"),
            Column("read_wait", "wait: read", "seconds"),
            Column("write_wait", "write", "seconds"),
            Column("says", "bound by"),
            Column("rate", "M param/s", ".0f"),
            Column("of_torch", "of torch", "percent"),
            Column("of_ideal", "of ideal", "percent"),
        )
        return Table("steps back to back, medians", columns, tuple(self._step_row(name) for name in self.turns))

    def _step_row(self, name: str) -> dict[str, Any]:
        seconds = self._each(name, lambda turn: turn.step)
        return {
            "tiers": name,
            "step": median(seconds),
            "update": self._median(name, lambda turn: turn.update),
            "read_wait": self._median(name, lambda turn: turn.read_wait),
            "write_wait": self._median(name, lambda turn: turn.write_wait),
            "says": self.turns[name][-1].bound or None,
            "rate": self.work.parameters / median(seconds) / 1e6,
            "of_torch": ratio(self._each(TORCH, lambda turn: turn.step), seconds),
            "of_ideal": ratio(self._each(self.ideal, lambda turn: turn.step), seconds),
        }

    def _links(self) -> Table:
        columns = (
            Column("tiers", "tiers"),
            Column("chunks", "chunks"),
            Column("link", "link"),
            Column("moved", "B/param", ".2f"),
            Column("bound", "bound", ".2f"),
            Column("written", "written", "bytes"),
            Column("rate", "GB/s", ".2f"),
            Column("of_device", "of device", "percent"),
            Column("over", "over", "percent"),
        )
        rows = [self._link_row(name, link) for name in self.bounds for link in self.bounds[name].links]
        return Table("bytes on each link per step, back to back", columns, tuple(rows))

    def _link_row(self, name: str, link: str) -> dict[str, Any]:
        faster, slower = link.split("-")
        bound = self.bounds[name]
        down = self._median(name, lambda turn: turn.moved.get(f"{faster}->{slower}", 0.0))
        both = [
            turn.moved.get(f"{faster}->{slower}", 0.0) + turn.moved.get(f"{slower}->{faster}", 0.0)
            for turn in self.turns[name]
        ]
        seconds = self._each(name, lambda turn: turn.step)
        row: dict[str, Any] = {
            "tiers": name,
            "chunks": bound.chunks,
            "link": link,
            "moved": median(both) / self.work.parameters,
            "bound": bound.links[link] / self.work.parameters,
            "written": down,
            "rate": median([nbytes / second for nbytes, second in zip(both, seconds, strict=True)]) / 1e9,
        }
        if link == NVME_LINK:
            physical = [nbytes / sample.rate for nbytes, sample in zip(both, self.samples, strict=True)]
            ideal = [max(io, turn.step) for io, turn in zip(physical, self.turns[self.alike], strict=True)]
            row |= {"of_device": ratio(physical, seconds), "over": ratio(seconds, ideal) - 1}
        return row

    def _iterations(self) -> Table:
        columns = (
            Column("tiers", "tiers"),
            Column("forward", "forward", "seconds"),
            Column("backward", "backward", "seconds"),
            Column("step", "step", "seconds"),
            Column("whole", "whole", "seconds"),
            Column("of_torch", "of torch", "percent"),
            Column("cpu", "CPU of a step", "seconds"),
        )
        rows = []
        for name in self.turns:
            whole = self._each(name, _whole)
            rows.append(
                {
                    "tiers": name,
                    "forward": self._median(name, lambda turn: turn.forward),
                    "backward": self._median(name, lambda turn: turn.backward),
                    "step": self._median(name, lambda turn: turn.in_iteration),
                    "whole": median(whole),
                    "of_torch": ratio(self._each(TORCH, _whole), whole),
                    "cpu": self._median(name, lambda turn: turn.cpu_seconds),
                }
            )
        return Table("whole iterations, medians; processor time of a step back to back", columns, tuple(rows))

    def _each(self, name: str, figure: Callable[[Turn], float]) -> list[float]:
        return [figure(turn) for turn in self.turns[name]]

    def _median(self, name: str, figure: Callable[[Turn], float]) -> float:
        return median(self._each(name, figure))


def _whole(turn: Turn) -> float:
    return turn.forward + turn.backward + turn.in_iteration
