"""Which chunks should stay in memory from step to step? Policies on counters, tierstore's own plans among them.

Nothing is moved and nothing is timed: hits per step are counted, and a step is played against a link that carries one
chunk at a time. All policies have the same extents: K for what stays and some for chunks on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.harness import (
    Check,
    Column,
    Json,
    Plot,
    Quick,
    Report,
    Table,
    VerificationError,
    command,
    environment,
    publish,
)
from benchmarks.harness.plots import COLOURS, figure
from benchmarks.retention_model import (
    Action,
    alternating,
    belady,
    belady_hits,
    fifo,
    first,
    fixed,
    hits,
    lru,
    mru,
    pass_time,
    pins,
    play,
    play_ours,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0, 25, 50, 75, 100)
STEPS = 12
OURS = {"alternating": "tierstore", "fixed": "tierstore, fixed"}


@dataclass(frozen=True, slots=True)
class Pool:
    """`chunks` of which `kept` may stay, in so many extents more for those on their way."""

    chunks: int
    kept: int
    passing: int

    @property
    def extents(self) -> int:
        """All of them."""
        return min(self.chunks, self.kept + self.passing)


Policy = Callable[[Pool], list[list[Action]]]

POLICIES: dict[str, Policy] = {
    "LRU": lambda p: play(fixed(p.chunks), p.extents, p.passing, lru, STEPS),
    "FIFO": lambda p: play(fixed(p.chunks), p.extents, p.passing, fifo, STEPS),
    "MRU": lambda p: play(fixed(p.chunks), p.extents, p.passing, mru, STEPS),
    "pins, the first K": lambda p: play(fixed(p.chunks), p.extents, p.passing, pins(first(p.chunks, p.kept)), STEPS),
    "pins, spread": lambda p: play(fixed(p.chunks), p.extents, p.passing, pins(spread(p.chunks, p.kept)), STEPS),
    "Belady, fixed": lambda p: play(fixed(p.chunks), p.extents, p.passing, belady, STEPS),
    OURS["fixed"]: lambda p: play_ours("fixed", p.chunks, p.extents, STEPS),
    "LRU, alternating": lambda p: play(alternating(p.chunks), p.extents, p.passing, lru, STEPS),
    "Belady, alternating": lambda p: play(alternating(p.chunks), p.extents, p.passing, belady, STEPS),
    OURS["alternating"]: lambda p: play_ours("alternating", p.chunks, p.extents, STEPS),
}


def measure(chunks: int, passing: int, move: float) -> Report:
    """Compare all policies for every share of the chunks that may stay. `move` is in updates of one chunk."""
    pools = {share: Pool(chunks, chunks * share // 100, passing) for share in SHARES}
    rows = tuple(_row(name, policy, pools, move) for name, policy in POLICIES.items())
    columns = (
        Column("policy", "policy"),
        *(Column(f"hits{share}", f"hits {share}%", ".1f") for share in SHARES),
        *(Column(f"over{share}", f"over {share}%", "percent") for share in SHARES),
    )
    best = {
        share: max(list(belady_hits(alternating(chunks), chunks, p.extents, STEPS))[2:]) for share, p in pools.items()
    }
    return Report(
        benchmark="retention",
        question="which chunks should stay in memory from step to step?",
        options={"chunks": chunks, "passing": passing, "move": move, "steps": STEPS},
        environment=environment(),
        tables=(Table(f"{chunks} chunks: hits per step, and time over the bound, by K/M", columns, rows),),
        checks=tuple(_checks(rows, best, pools, move)),
        verified=f"in each of {STEPS} steps every chunk was used once, and was where it was used",
        notes=(
            f"extents: K and {passing} more for chunks on their way, all of which an alternating order can keep, too",
            f"checks of a fixed order count K as the extents less {passing}, of an alternating one as all extents; "
            "over, in the table, is beside all of them in both",
            f"all but tierstore read {passing} chunks ahead of their use; its plans read as soon as an extent is free",
            f"over: beside max(updates, 2 (M - extents) moves), with moves that take {move:g} of a chunk's update",
        ),
    )


def main(
    chunks: Annotated[int, typer.Option(min=8, help="How many chunks there are.")] = 82,
    passing: Annotated[int, typer.Option(min=3, help="Extents for chunks on their way.")] = 8,
    move: Annotated[float, typer.Option(min=0.01, help="What a chunk's move takes, in updates of one chunk.")] = 1.0,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Which chunks should stay in memory from step to step?"""
    publish(measure(40 if quick else chunks, passing, move), json=json, is_quick=quick, plot=plot, draw=draw)


def _row(name: str, policy: Policy, pools: Mapping[int, Pool], move: float) -> dict[str, Any]:
    row: dict[str, Any] = {"policy": name}
    for share, pool in pools.items():
        steps = policy(pool)
        _verify(steps, pool)
        settled = steps[STEPS // 2 :]
        row[f"hits{share}"] = sum(hits(actions, pool.chunks) for actions in settled) / len(settled)
        times = pass_time(steps, pool.extents, 1.0, move)[STEPS // 2 :]
        row[f"over{share}"] = sum(times) / len(times) / _bound(pool, pool.extents, move) - 1
    return row


def _bound(pool: Pool, stay: int, move: float) -> float:
    """What a step takes at least, in updates of a chunk, if so many chunks stay."""
    return max(pool.chunks, 2 * (pool.chunks - stay) * move)


def _verify(steps: Sequence[Sequence[Action]], pool: Pool) -> None:
    """Play the actions on a set: every chunk is used once a step, while it is there, and the set is never too large."""
    inside: set[int] = set()
    for actions in steps:
        used = []
        for kind, chunk in actions:
            if kind == "write":
                inside.remove(chunk)
            elif kind == "use":
                if chunk not in inside:
                    raise VerificationError(f"chunk {chunk} was used where it was not")
                used.append(chunk)
            else:
                inside.add(chunk)
                if len(inside) > pool.extents:
                    raise VerificationError(f"{len(inside)} chunks were in {pool.extents} extents")
        if sorted(used) != list(range(pool.chunks)):
            raise VerificationError("a step did not use every chunk once")


def _checks(
    rows: Sequence[Mapping[str, Any]], best: Mapping[int, int], pools: Mapping[int, Pool], move: float
) -> list[Check]:
    by = {row["policy"]: row for row in rows}
    found = []
    for share in pools:
        own = by[OURS["alternating"]][f"hits{share}"]
        claim = f"alternating, K/M {share}%: hits as Belady's"
        found.append(Check(claim, f"{best[share]}", f"{own:g}", own == best[share]))
    for share, pool in pools.items():
        own = by[OURS["fixed"]][f"hits{share}"]
        claim = f"fixed, K/M {share}%: hits of K pins"
        found.append(Check(claim, f"at least {pool.kept}", f"{own:g}", own >= pool.kept))
    for order, most in (("alternating", 0.05), ("fixed", 0.10)):
        for share, pool in pools.items():
            stay = pool.extents if order == "alternating" else pool.kept
            time = (1 + by[OURS[order]][f"over{share}"]) * _bound(pool, pool.extents, move)
            over = time / _bound(pool, stay, move) - 1
            claim = f"{order}, K/M {share}%: time over max(updates, 2 (M - {stay}) moves)"
            found.append(Check(claim, f"at most {most:.0%}", f"{over:.0%}", over <= most))
    return found


def draw(report: Report) -> Figure:
    """Hits and time over the bound, by the share that may stay."""
    drawn, axes = figure(f"Retention of {report.options['chunks']} chunks", columns=2, width=12, height=4.8)
    colours = iter(COLOURS)
    for row in report.tables[0].rows:
        name, is_ours = row["policy"], row["policy"].startswith("tierstore")
        style: dict[str, Any] = {"linewidth": 1.2, "color": next(colours, "#999933"), "marker": "."}
        if is_ours:
            style = {"linewidth": 2.5, "color": "black" if name == OURS["alternating"] else "#777777"}
        style["linestyle"] = ":" if "alternating" in name else "-" if is_ours else "--"
        axes[0].plot(SHARES, [row[f"hits{share}"] for share in SHARES], label=name, **style)
        axes[1].plot(SHARES, [row[f"over{share}"] * 100 for share in SHARES], label=name, **style)
    axes[0].set(title="hits per step", xlabel="K/M, percent", ylabel="chunks that need no read", xticks=SHARES)
    axes[1].set(title="time over the bound", xlabel="K/M, percent", ylabel="percent", xticks=SHARES)
    axes[0].legend(fontsize=7)
    return drawn


if __name__ == "__main__":
    command(main)
