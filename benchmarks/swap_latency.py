"""How long chunks take from tier to tier, and how much of the device that is.

Each point moves chunks along one route with one engine, some of them at a time, idle or beside an update, and measures
the raw device in the same round with as many bytes in flight, in requests as large as the engine's. Latencies are of
all rounds together; rates, and the share of the raw device, are medians over the rounds. Every chunk is compared.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.harness import (
    Column,
    Folders,
    Json,
    Plot,
    Quick,
    RawDevice,
    Report,
    Rounds,
    Sample,
    Table,
    command,
    environment,
    fio_entries,
    folders_of,
    interleave,
    median,
    publish,
    ratio,
)
from benchmarks.harness.load import Load
from benchmarks.harness.plots import COLOURS, figure, plain_numbers
from benchmarks.harness.rawdevice import KINDS, Kind
from benchmarks.harness.rounds import percentile
from benchmarks.harness.routes import Stage, policy_for
from benchmarks.swap_store import store_table
from tierstore.device import present_accelerator
from tierstore.errors import EngineUnavailableError
from tierstore.io import ALIGNMENT, QUEUE_DEPTH, REQUEST_SIZE, open_engine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE_ROUTES = (("nvme", "cpu"), ("cpu", "nvme"))
STAGED_ROUTES = (("nvme", "cpu", "gpu"), ("gpu", "cpu", "nvme"))
LINK_ROUTES = (("cpu", "gpu"), ("gpu", "cpu"))
CHUNK, DEPTH = 8 << 20, 8
_TITLES = {
    "chunk size": "by chunk size",
    "depth": "by chunks in flight",
    "engine": "by engine",
    "beside": "idle, and beside an update",
    "paths": "one path and several",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is varied, and how many bytes a measurement moves."""

    chunks: tuple[int, ...] = (256 << 10, 1 << 20, CHUNK, 64 << 20)
    depths: tuple[int, ...] = (1, 2, 4, DEPTH, 16)
    chunk: int = CHUNK
    volume: int = 256 << 20
    least_chunks: int = 8

    def count(self, chunk_bytes: int) -> int:
        """Chunks in a measurement."""
        return max(self.least_chunks, self.volume // chunk_bytes)


QUICK = Sizes(chunks=(16 << 10, 64 << 10), depths=(1, 4), chunk=32 << 10, volume=256 << 10, least_chunks=4)


@dataclass(frozen=True, slots=True)
class Point:
    """One thing that is measured; `paths` is how many of the folders are used; `checks`: with `io.checksum`."""

    route: tuple[str, ...]
    chunk: int
    depth: int = DEPTH
    engine: str = "auto"
    beside: str = "idle"
    paths: int = 1
    checks: bool = False

    @property
    def kind(self) -> Kind | None:
        """What the file is used for; None on a route without one."""
        if "nvme" not in self.route:
            return None
        return "read" if self.route[0] == "nvme" else "write"


def points(sizes: Sizes, paths: int) -> dict[str, list[Point]]:
    """What is measured, by the table it is shown in."""
    files = [Point(route, sizes.chunk) for route in FILE_ROUTES]
    return {
        "chunk size": [
            replace(point, chunk=chunk)
            for point in (*files, *(Point(route, sizes.chunk) for route in (*STAGED_ROUTES, *LINK_ROUTES)))
            for chunk in (sizes.chunks if len(point.route) == 2 else (sizes.chunk,))
        ],
        "depth": [replace(point, depth=depth) for point in files for depth in sizes.depths],
        "engine": [
            replace(point, engine=engine, checks=checks)
            for point in files
            for engine, checks in itertools.product(("threads", "libaio", "aiofiles"), (False, True))
        ],
        "beside": [
            replace(point, beside=beside)
            for point in (*files, *(Point(route, sizes.chunk) for route in STAGED_ROUTES))
            for beside in ("idle", "update")
        ],
        "paths": [replace(point, paths=count) for point in files for count in sorted({1, paths})],
    }


def measure(sizes: Sizes, folders: Sequence[Path], rounds: int, *, is_real: bool = True) -> Report:
    """Measure all points; with one folder, two folders within it stand for several paths."""
    with tempfile.TemporaryDirectory(dir=folders[0]) as one, tempfile.TemporaryDirectory(dir=folders[0]) as other:
        several = list(folders) if len(folders) > 1 else [Path(one), Path(other)]
        tables = points(sizes, len(several))
        with _Rig(sizes, several, is_real) as rig:
            everything = [p for group in tables.values() for p in group if rig.engine_is_here(p.engine)]
            contenders = {key: run for point in everything for key, run in rig.contenders(point).items()}
            found = interleave(contenders, rounds)
            rows = {point: rig.row(point, found) for point in everything}
            verified, load = rig.verified_bytes, rig.load_note()
        through_store, leased = store_table(sizes.chunk, sizes.count(sizes.chunk), several[:1])
    shapes = {rig.raw_key(point): point for point in everything if point.kind}
    return Report(
        benchmark="swap_latency",
        question="how long do chunks take between tiers, and how much of the raw device is that?",
        options={"rounds": rounds, "volume": sizes.volume, "paths": len(folders), "quick": not is_real},
        environment=environment(folders, policy_for(("gpu", "cpu", "nvme"), sizes.chunk, several)),
        raw=tuple({**_shape(key), **_rates(found[key])} for key in shapes)
        + fio_entries(folders[0], KINDS, sizes.chunk, DEPTH, sizes.volume),
        tables=(
            *(_table(varied, [rows.get(p, _absent(p)) for p in group]) for varied, group in tables.items()),
            through_store,
        ),
        verified=f"{(verified + leased) / 1e9:.2f} GB: every byte of all chunks, tensors and raw blocks, each time",
        notes=tuple(_notes(len(folders))) + load,
    )


def main(
    folder: Folders = None,
    rounds: Rounds = 3,
    volume: Annotated[
        int, typer.Option(min=1, help="MiB that a measurement moves; needs 22 times that of memory.")
    ] = 256,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How long do chunks take between tiers, and how much of the raw device is that?"""
    sizes = QUICK if quick else Sizes(volume=volume << 20)
    publish(
        measure(sizes, folders_of(folder), rounds, is_real=not quick), json=json, is_quick=quick, plot=plot, draw=draw
    )


class _Rig:
    """Stages and raw devices, made when first needed and kept until the end; and the update that runs beside."""

    def __init__(self, sizes: Sizes, folders: Sequence[Path], is_real: bool) -> None:
        self._sizes = sizes
        self._folders = folders
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._raw: dict[int, RawDevice] = {}
        self._load = Load(16 << 20 if is_real else 1 << 14)
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> _Rig:
        return self

    def __exit__(self, *about: object) -> None:
        self._closing.close()

    @property
    def verified_bytes(self) -> int:
        """How much was compared."""
        return sum(one.verified_bytes for one in self._stages.values()) + sum(
            raw.verified_bytes for raw in self._raw.values()
        )

    def engine_is_here(self, engine: str) -> bool:
        """Whether it can run here: its package and its C library may be missing."""
        try:
            open_engine(engine, threads=1, queue_depth=1, request_size=ALIGNMENT).close()
        except EngineUnavailableError:
            return False
        return True

    def contenders(self, point: Point) -> dict[object, Callable[[], Sample]]:
        """The point, and what its raw device is, each with the key its samples are found under."""
        return {point: partial(self._measure, point), self.raw_key(point): partial(self._measure_raw, point)}

    def raw_key(self, point: Point) -> tuple[object, ...]:
        """What a raw measurement depends on."""
        if point.kind is None:
            return ("copy", point.route, point.chunk)
        request = min(point.chunk, REQUEST_SIZE)
        in_flight = min(QUEUE_DEPTH, point.depth * point.chunk // request)
        return (point.kind, request, in_flight, point.paths)

    def row(self, point: Point, found: Mapping[object, Sequence[Sample]]) -> dict[str, Any]:
        """What the tables show of a point."""
        samples, raw = found[point], found[self.raw_key(point)]
        figures = _rates(samples) | {"of_raw": ratio([s.rate for s in samples], [s.rate for s in raw])}
        if point.beside != "idle":
            figures["cpu_s_per_gb"] = None  # the update's own is in it
        return _described(point) | figures

    def load_note(self) -> tuple[str, ...]:
        """How much of its own rate the update keeps."""
        kept = self._load.kept()
        return (f"the update beside kept {kept:.0%} of its rate (on {self._load.threads} threads)",) if kept else ()

    def _measure(self, point: Point) -> Sample:
        stage = self._stage(point)
        if point.beside == "idle":
            return stage.move(point.route, point.depth)
        return self._load.beside(lambda: stage.move(point.route, point.depth))

    def _measure_raw(self, point: Point) -> Sample:
        if point.kind is None:
            return self._stage(point).copy_raw(*point.route)
        _, request, in_flight, _ = self.raw_key(point)
        assert isinstance(request, int) and isinstance(in_flight, int)
        if point.paths not in self._raw:
            raw = RawDevice(self._folders[: point.paths], max(self._sizes.volume, 4 * request))
            self._raw[point.paths] = self._closing.enter_context(raw)
        return self._raw[point.paths].measure(point.kind, request, in_flight)

    def _stage(self, point: Point) -> Stage:
        names = tuple(name for name in ("gpu", "cpu", "nvme") if name in point.route)
        key = (names, point.chunk, point.engine, point.paths, point.checks)
        if key not in self._stages:
            count, folders = self._sizes.count(point.chunk), self._folders[: point.paths]
            io = {"engine": point.engine, "checksum": point.checks}
            stage = Stage(names, chunk_bytes=point.chunk, chunks=count, folders=folders, io=io)
            self._closing.callback(stage.close)
            self._stages[key] = stage
        return self._stages[key]


def _described(point: Point) -> dict[str, Any]:
    return {
        "route": "->".join(point.route),
        "chunk size": point.chunk,
        "depth": point.depth,
        "engine": ", ".join(_words_of(point)),
        "beside": point.beside,
        "paths": point.paths,
    }


def _absent(point: Point) -> dict[str, Any]:
    return _described(point) | {"engine": f"{point.engine}: not here"}


def _words_of(point: Point) -> Iterator[str]:
    yield point.engine
    if point.engine == "aiofiles":
        yield "buffered"
    if point.checks:
        yield "checksums"


def _rates(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians of rates over the rounds, and percentiles of the latencies of all rounds together."""
    latencies = [seconds for sample in samples for seconds in sample.latencies]
    return {
        "gb_per_s": median([sample.rate for sample in samples]) / 1e9,
        "cpu_s_per_gb": median([sample.cpu_seconds / sample.bytes for sample in samples]) * 1e9,
        "p50": percentile(latencies, 50),
        "p95": percentile(latencies, 95),
        "p99": percentile(latencies, 99),
        "max": max(latencies),
        "moves": len(latencies),
    }


def _table(varied: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        Column("route", "route"),
        Column(varied, varied, "bytes" if varied == "chunk size" else ""),
        Column("gb_per_s", "GB/s", ".2f"),
        Column("of_raw", "of raw", "percent"),
        *(Column(name, name, "seconds") for name in ("p50", "p95", "p99", "max")),
        Column("cpu_s_per_gb", "CPU s/GB", ".3f"),
        Column("moves", "moves"),
    )
    return Table(_TITLES[varied], columns, tuple(rows))


def _shape(key: tuple[object, ...]) -> dict[str, Any]:
    kind, request, in_flight, paths = key
    return {"kind": kind, "request": request, "in_flight": in_flight, "paths": paths}


def _notes(paths: int) -> Iterator[str]:
    if present_accelerator() is None:
        yield "gpu is host memory here, which stands in for an accelerator: its rates are those of a copy in memory"
    if paths == 1:
        yield "two paths are two folders on one disk: name a folder on each disk with --folder to see their sum"
    yield "aiofiles is buffered: what it reads may come from the page cache, and what it writes may still be there"
    yield "of raw: beside as many bytes in flight by preadv and pwritev alone; between memory tiers, by torch's copy_"


def draw(report: Report) -> Figure:
    """Rates by chunk size and by depth, latencies by depth, CPU time by chunk size."""
    by = {varied: table.rows for varied, table in zip(_TITLES, report.tables, strict=False)}
    drawn, axes = figure("Swap latency and rate by route", rows=2, columns=2, width=10, height=7)
    _lines(axes[0], by["chunk size"], "chunk size", "gb_per_s")
    axes[0].set(title="rate by chunk size", xlabel="chunk size, MiB", ylabel="GB/s", ylim=(0, None))
    _lines(axes[1], by["depth"], "depth", "gb_per_s")
    for kind in ("read", "write"):
        best = max(entry["gb_per_s"] for entry in report.raw if entry["kind"] == kind)
        colour = _COLOUR_OF["nvme->cpu" if kind == "read" else "cpu->nvme"]
        axes[1].axhline(best, linestyle="--", linewidth=1, color=colour, label=f"raw {kind}, best")
    axes[1].set(title="rate by chunks in flight", xlabel="chunks in flight", ylabel="GB/s", ylim=(0, None))
    _lines(axes[2], by["depth"], "depth", "p50", band=("p50", "p99"))
    axes[2].set(title="latency by chunks in flight, p50 to p99", xlabel="chunks in flight", ylabel="ms", yscale="log")
    _lines(axes[3], by["chunk size"], "chunk size", "cpu_s_per_gb")
    axes[3].set(title="CPU time by chunk size", xlabel="chunk size, MiB", ylabel="CPU seconds per GB", ylim=(0, None))
    for axis in axes:
        axis.set_xscale("log", base=2)
        plain_numbers(axis.xaxis)
        axis.legend(fontsize=8)
    plain_numbers(axes[2].yaxis)
    return drawn


_COLOUR_OF = dict(zip(("nvme->cpu", "cpu->nvme", "cpu->gpu", "gpu->cpu"), COLOURS, strict=False))


def _lines(
    axis: Axes, rows: Sequence[Mapping[str, Any]], x: str, y: str, *, band: tuple[str, str] | None = None
) -> None:
    """One line per route that has more than one point."""
    for route, colour in _COLOUR_OF.items():
        own = [row for row in rows if row["route"] == route]
        if not own:
            continue
        scale = 1e3 if y.startswith("p") else 1.0
        xs = [row[x] / 2**20 if x == "chunk size" else row[x] for row in own]
        axis.plot(xs, [row[y] * scale for row in own], marker="o", label=route, color=colour)
        if band is not None:
            low, high = ([row[name] * scale for row in own] for name in band)
            axis.fill_between(xs, low, high, alpha=0.15, color=colour)


if __name__ == "__main__":
    command(main)
