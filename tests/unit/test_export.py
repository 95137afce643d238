"""What others are given is what the statistics say."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.unit.runs import HOSTILE, pressure_at, stats_of
from tierstore.export import StepLog, add_scalars, line, scalars
from tierstore.stats import StepStats


class Curves:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.points: dict[str, tuple[float, int | None]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.points[tag] = scalar_value, global_step


def test_scalars_go_to_any_writer_at_the_step_told_or_the_stores_own():
    stats, curves = stats_of(), Curves()
    add_scalars(curves, stats)
    assert curves.points == {f"tierstore/{name}": (value, 40) for name, value in scalars(stats).items()}
    assert curves.points["tierstore/tier/nvme/used_bytes"] == (7 << 30, 40)
    assert curves.points["tierstore/route/cpu-nvme/bytes"] == (10**10, 40)
    assert curves.points["tierstore/pressure/cpu/share"][0] == pytest.approx(0.9)
    assert curves.points["tierstore/pressure/cpu/stall_percent"] == (12.5, 40)
    assert "tierstore/pressure/gpu/stall_percent" not in curves.points  # nobody knows it
    in_all = {"spilled": 1500, "promoted": 12, "bytes_written": 10**12}
    assert {name: curves.points[f"tierstore/in_all/{name}"][0] for name in in_all} == in_all
    add_scalars(curves, stats, 7, prefix="")
    assert curves.points["step/update_seconds"] == (0.0, 7)


def test_line_says_what_the_last_step_took_and_what_tiers_hold():
    text = line(replace(stats_of(), last_step=StepStats(1, 1.0, 0.5, 0.25)))
    for words in ("step 40:", "update 1.000 s", "read wait 0.500 s", "bound by read", "gpu 7,168/8,192 MiB"):
        assert words in text


def test_line_says_pressure_only_where_it_was_measured():
    quiet = line(stats_of(is_measured=False))
    words = line(replace(stats_of(), pressure=pressure_at(0.876))).removeprefix(quiet)
    assert words == "; pressure gpu 79 %, cpu 88 %, nvme 39 %, 1,500 chunks spilled, 12 promoted"


def test_log_has_a_line_every_so_many_steps(caplog: pytest.LogCaptureFixture):
    log = StepLog(every=3)
    with caplog.at_level(logging.INFO, "tierstore.steps"):
        for count in (1, 2, 3, 4, 5, 6, 1, 4):  # the store is made anew, and counts from 1
            log(replace(stats_of(), step=StepStats(count)))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 3", "step 6", "step 4"]
    with pytest.raises(ValueError, match="allowed: 1 or more"):
        StepLog(every=0)


def test_prometheus_is_told_what_the_statistics_say():
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install -e '.[prometheus]'")
    from tierstore.export.prometheus import StatsCollector

    registry, collector = client.CollectorRegistry(), StatsCollector()
    registry.register(collector)
    assert client.generate_latest(registry) == b""
    collector.update(stats_of(folder=f'/mnt/"{HOSTILE}\n'))
    text = client.generate_latest(registry).decode()
    found = registry.get_sample_value
    assert found("tierstore_steps_total") == 40
    assert found("tierstore_step_seconds_total", {"part": "read_wait"}) == 10.0
    assert found("tierstore_tier_used_bytes", {"tier": "cpu"}) == 7 << 30
    assert found("tierstore_route_bytes_total", {"source": "cpu", "destination": "nvme"}) == 10**10
    assert found("tierstore_path_bytes_total", {"path": "/mnt/nvme1", "direction": "read"}) == 0
    assert found("tierstore_written_bytes_total") == 10**12
    assert found("tierstore_pressure_ratio", {"tier": "cpu"}) == pytest.approx(0.9)
    assert (found("tierstore_spilled_chunks_total"), found("tierstore_promoted_chunks_total")) == (1500, 12)
    assert all(line.startswith(("tierstore_", "# ")) for line in text.splitlines())
