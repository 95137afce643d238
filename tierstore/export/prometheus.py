"""A store's statistics as Prometheus metrics; needs the extra `prometheus`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.stats import Stats


class StatsCollector(Collector):  # type: ignore[misc, unused-ignore]
    """Register it: `REGISTRY.register(StatsCollector())`, and give it the statistics after a step with `update`.

    Prometheus asks from a thread of its own, and a store may only be called from the one that trains: so what is
    answered is what was given last, nothing before the first time.
    """

    def __init__(self) -> None:
        self._stats: Stats | None = None

    def update(self, stats: Stats) -> None:
        """Answer these from now on."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Answer the metrics; called by prometheus_client."""
        stats = self._stats
        return iter(()) if stats is None else _metrics(stats)


def _metrics(stats: Stats) -> Iterator[Metric]:
    yield CounterMetricFamily("tierstore_steps", "Optimizer steps.", value=stats.step.count)
    seconds = CounterMetricFamily("tierstore_step_seconds", "Seconds of optimizer steps.", labels=["part"])
    step = stats.step
    for part, value in (
        ("update", step.update_seconds),
        ("read_wait", step.read_wait_seconds),
        ("write_wait", step.write_wait_seconds),
    ):
        seconds.add_metric([part], value)
    yield seconds
    for name, text in (("capacity", "Bytes reserved."), ("used", "Bytes in use.")):
        gauge = GaugeMetricFamily(f"tierstore_tier_{name}_bytes", text, labels=["tier"])
        for tier, values in stats.tiers.items():
            gauge.add_metric([tier], getattr(values, f"{name}_bytes"))
        yield gauge
    moved = CounterMetricFamily("tierstore_route_bytes", "Bytes moved.", labels=["source", "destination"])
    for route, along in stats.routes.items():
        moved.add_metric(route.split("->"), along.bytes)
    yield moved
    files = CounterMetricFamily("tierstore_path_bytes", "Bytes from and to swap files.", labels=["path", "direction"])
    for folder, path in stats.paths.items():
        files.add_metric([folder, "read"], path.bytes_read)
        files.add_metric([folder, "written"], path.bytes_written)
    yield files
    yield CounterMetricFamily("tierstore_written_bytes", "Bytes written to swap files.", value=stats.bytes_written)
    full = GaugeMetricFamily("tierstore_pressure_ratio", "Share in use of the memory a tier lies in.", labels=["tier"])
    for tier, pressure in stats.pressure.items():
        full.add_metric([tier], pressure.share)
    yield full
    yield CounterMetricFamily("tierstore_spilled_chunks", "Chunks that had to leave a tier.", value=stats.spilled)
    yield CounterMetricFamily("tierstore_promoted_chunks", "Chunks that a tier took room for.", value=stats.promoted)
