"""Measures a training: from step results and snapshots of the store to what a view shows. No output, no clock.

Rates of the recent past are over the last WINDOW steps. A route's rate is bytes over the time spent in
`optimizer.step()`, because that is when chunks move and when somebody waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.demo.training import StepResult
from tierstore.stats import Stats

WINDOW = 10


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds by what they were spent on; `wait` is for chunks to arrive, within the optimizer's step."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    wait: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.forward + self.backward + self.update + self.wait

    def parts(self) -> dict[str, float]:
        """By name, in order."""
        return {"forward": self.forward, "backward": self.backward, "update": self.update, "wait": self.wait}


@dataclass(frozen=True, slots=True)
class RouteRate:
    """What went along one route in some steps; `p50_ms` is of one chunk's move, since the store was made."""

    name: str
    moves: int
    bytes: int
    bytes_per_second: float
    p50_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A training so far. Everything but `losses` and `stats` is of the recent past; `stats` None: no store."""

    steps: int  # in all
    losses: Sequence[float]
    tokens_per_second: float
    split: Split  # per step
    routes: tuple[RouteRate, ...]  # per step
    stats: Stats | None

    @property
    def seconds_left(self) -> float:
        """As long as the steps that are left take, if they take as long as the last ones."""
        return (self.steps - len(self.losses)) * self.split.total


class Meter:
    """Adds up one training of `steps` steps with `tokens` bytes each."""

    def __init__(self, *, steps: int, tokens: int) -> None:
        self.losses: list[float] = []
        self.split = Split()
        self.stats: Stats | None = None
        self._steps = steps
        self._tokens = tokens
        self._recent: deque[tuple[Split, Stats | None]] = deque(maxlen=WINDOW + 1)
        self._recent.append((Split(), None))

    def record(self, result: StepResult, stats: Stats | None) -> Progress:
        """Add a step, with the store as it was after it."""
        waited = stats.step.wait_seconds - self.split.wait if stats is not None else 0.0
        split = Split(
            result.forward_seconds, result.backward_seconds, max(0.0, result.optimizer_seconds - waited), waited
        )
        self.losses.append(result.loss)
        self.split = _sum([self.split, split])
        self.stats = stats
        self._recent.append((split, stats))
        return self._progress()

    @property
    def seconds(self) -> float:
        """All steps together."""
        return self.split.total

    @property
    def tokens_per_second(self) -> float:
        """Over all steps."""
        return _ratio(self._tokens * len(self.losses), self.seconds)

    def routes(self) -> tuple[RouteRate, ...]:
        """What went along each route in all steps."""
        return _rates(None, self.stats, self.split, 1)

    def _progress(self) -> Progress:
        (_, before), *window = self._recent
        spent, count = _sum([split for split, _ in window]), len(window)
        return Progress(
            steps=self._steps,
            losses=self.losses,
            tokens_per_second=_ratio(self._tokens * count, spent.total),
            split=Split(*(seconds / count for seconds in spent.parts().values())),
            routes=_rates(before, self.stats, spent, count),
            stats=self.stats,
        )


def _rates(before: Stats | None, now: Stats | None, spent: Split, steps: int) -> tuple[RouteRate, ...]:
    """The routes of `now` less those of `before`, per step."""
    if now is None:
        return ()
    rates = []
    for name in sorted(now.routes):
        route, earlier = now.routes[name], before.routes.get(name) if before is not None else None
        nbytes = route.bytes - (earlier.bytes if earlier is not None else 0)
        moves = route.moves - (earlier.moves if earlier is not None else 0)
        seconds = spent.update + spent.wait
        rates.append(RouteRate(name, moves // steps, nbytes // steps, _ratio(nbytes, seconds), route.p50_ms))
    return tuple(rates)


def _sum(splits: Sequence[Split]) -> Split:
    columns = zip(*(split.parts().values() for split in splits), strict=True)
    return Split(*(sum(column) for column in columns))


def _ratio(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
