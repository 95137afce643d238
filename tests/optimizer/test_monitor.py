"""The files of `monitor` and `record`: what they say is what the store says, and they never touch a training."""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.fakes import CurveProbe
from tierstore import TieredAdamW, TierPolicy
from tierstore.build import Parts
from tierstore.history import MOST_ROWS, MOST_SAMPLES, PICTURE_FORMAT, RECORD_FORMAT, Interval
from tierstore.monitor import Monitor, OutFile
from tierstore.report.page import page
from tierstore.seen import read_picture, read_record
from tierstore.stats import Pressure
from tierstore.top.view import draw

CHUNK = 16 << 10


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def policy(folder: Path, **keys: Any) -> dict[str, Any]:
    tiers = {"cpu": {"capacity": 4 * CHUNK}, "nvme": {"capacity": "1MiB", "paths": [str(folder)]}}
    return {"chunk_size": CHUNK, "tiers": tiers, **keys}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 150), nn.Tanh(), nn.Linear(150, 64))


def train(optimizer: torch.optim.Optimizer, net: nn.Module, steps: int) -> None:
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        net(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(settings: dict[str, Any], steps: int = 4) -> list[torch.Tensor]:
    net = model()
    with TieredAdamW(net.named_parameters(), policy=settings) as optimizer:
        train(optimizer, net, steps)
    return [parameter.detach() for parameter in net.parameters()]


def test_files_say_what_the_store_says(tmp_path: Path) -> None:
    net, live, run = model(), tmp_path / "live.json", tmp_path / "run.json"
    optimizer = TieredAdamW(net.named_parameters(), policy=policy(tmp_path, monitor=str(live), record=str(run)))
    train(optimizer, net, 5)
    assert not read_picture(live).ended and read_picture(live).step == 1  # a second is not over
    stats = optimizer.store.stats()
    optimizer.close()
    picture, record = read_picture(live), read_record(run)
    assert picture.ended and record.ended
    assert picture.step == record.samples[-1].step == stats.step.count == 5
    assert picture.job.pid == os.getpid()
    assert dict(picture.stats.tiers) == dict(stats.tiers) and dict(picture.stats.routes) == dict(stats.routes)
    moved = {name: sum(s.interval.route_bytes.get(name, 0) for s in record.samples) for name in stats.routes}
    assert moved == {name: route.bytes for name, route in stats.routes.items()}
    assert sum(sum(row.values()) for row in record.samples[-1].rows) == record.chunks == 10
    assert any("2.weight" in row for row in record.rows)
    assert [one.kind for one in record.decisions][:3] == ["order", "size", "homes"]
    told = json.loads(live.read_text())
    assert told["stats"]["last_step"]["bound"] == stats.last_step.bound and "bound" in told["interval"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.json", "run.json"]


def test_training_is_the_same_with_and_without_files(tmp_path: Path) -> None:
    plain = weights_of(policy(tmp_path))
    watched = weights_of(policy(tmp_path, monitor=str(tmp_path / "live.json"), record=str(tmp_path / "run.json")))
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def occupied(folder: Path) -> Path:
    (folder / "taken").mkdir()
    return folder / "taken"


def piped(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    "make",
    [lambda folder: folder / "missing" / "live.json", occupied, piped, lambda folder: Path("/dev/null")],
    ids=["no folder", "a folder", "a pipe", "a device"],
)
def test_file_that_cannot_be_written_is_one_warning_and_training_untouched(tmp_path: Path, make: Any) -> None:
    plain, target = weights_of(policy(tmp_path)), make(tmp_path)
    with pytest.warns(UserWarning, match="cannot be written") as found:
        watched = weights_of(policy(tmp_path, monitor=str(target)))
    assert len(found) == 1 and str(target) in str(found[0].message) and "monitor" in str(found[0].message)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert target.exists() == (target.parent != tmp_path / "missing") and not target.is_file()


def test_file_is_replaced_as_a_whole_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "live.json")
    out = OutFile("monitor", tmp_path / "link.json", PICTURE_FORMAT)
    out.replace("one")
    with open(tmp_path / "live.json") as reading:
        out.replace("two")
        assert reading.read() == "one"
    assert (tmp_path / "link.json").is_symlink() and (tmp_path / "live.json").read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("content", "is_kept"),
    [
        ("years of work", True),
        (f'{{"format":"{RECORD_FORMAT}"}}', True),  # what `record: FILE` wrote is no picture of now
        (f'{{\n  "format": "{PICTURE_FORMAT}"\n}}', False),
        ('{"format":"tierstore monitor 77","from":"another version"}', False),
        ("", False),
    ],
    ids=["a thesis", "a record", "a picture, reformatted", "a later picture", "nothing"],
)
def test_only_what_a_job_wrote_for_the_same_key_is_replaced(tmp_path: Path, content: str, is_kept: bool) -> None:
    plain, target = weights_of(policy(tmp_path)), tmp_path / "live.json"
    target.write_text(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watched = weights_of(policy(tmp_path, monitor=str(target)))
    texts = [str(one.message) for one in told]
    assert [f"{target} cannot be written" in text and "name another file" in text for text in texts] == [True] * is_kept
    assert (target.read_text() == content) is is_kept
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))


def test_each_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    names = [OutFile("record", tmp_path / "run.json", RECORD_FORMAT, rank).path.name for rank in range(3)]
    assert names == ["run.json", "run.1.json", "run.2.json"]


def test_looks_are_a_second_apart(tmp_path: Path) -> None:
    net, live, clock = model(), tmp_path / "live.json", Clock()
    monitor = Monitor(TierPolicy.load(policy(tmp_path, monitor=str(live))), clock=clock)
    with TieredAdamW(net.named_parameters(), policy=policy(tmp_path)) as optimizer:
        seen = []
        for seconds in (0.0, 0.5, 0.5, 0.25, 0.75):
            clock.now += seconds
            train(optimizer, net, 1)
            monitor.step_ended(optimizer.store)
            seen.append(read_picture(live).step)
    assert seen == [1, 1, 3, 3, 5]
    since = read_picture(live).interval
    assert (since.steps, since.seconds) == (2, 1.0)


def test_record_of_a_long_run_is_bounded_and_loses_no_sum(tmp_path: Path) -> None:
    """Looks at one store, five hundred times, as if a second lay between each two."""
    net, run, clock = model(), tmp_path / "run.json", Clock()
    monitor = Monitor(TierPolicy.load(policy(tmp_path, record=str(run))), clock=clock)
    with TieredAdamW(net.named_parameters(), policy=policy(tmp_path)) as optimizer:
        train(optimizer, net, 1)
        sizes = []
        for number in range(500):
            clock.now += 1.0
            if number % 100 == 0:
                train(optimizer, net, 1)
            monitor.step_ended(optimizer.store)
            sizes.append(run.stat().st_size)
        stats, record = optimizer.store.stats(), read_record(run)
    assert len(record.samples) <= MOST_SAMPLES and len(record.rows) <= MOST_ROWS
    assert max(sizes) < 300_000
    assert min(sample.interval.seconds for sample in record.samples) >= 1.0  # the first step is with those that follow
    assert sum(sample.interval.steps for sample in record.samples) == stats.step.count == 6
    moved = sum(sum(sample.interval.route_bytes.values()) for sample in record.samples)
    assert moved == sum(route.bytes for route in stats.routes.values())
    assert record.samples[-1].seconds == pytest.approx(499.0, abs=1.0)


def test_record_of_a_long_run_has_pressure_over_time_with_its_peaks(tmp_path: Path) -> None:
    """Merged by halves several times; one look in 500 found the memory nearly full."""
    net, run, live, clock = model(), tmp_path / "run.json", tmp_path / "live.json", Clock()
    settings = policy(tmp_path, record=str(run), monitor=str(live))
    monitor = Monitor(TierPolicy.load(settings), clock=clock)
    with TieredAdamW(net.named_parameters(), policy=policy(tmp_path)) as optimizer:
        train(optimizer, net, 1)
        recorder = optimizer.store._traffic.recorder
        for number in range(500):
            clock.now += 1.0
            full = 950 if number == 122 else number
            recorder.pressure = {"cpu": Pressure(full, 1000, "a machine's memory")}
            recorder.spilled += number == 122
            monitor.step_ended(optimizer.store)
        record, picture = read_record(run), read_picture(live)
    assert len(record.samples) <= MOST_SAMPLES and run.stat().st_size < 300_000
    assert [sample.pressure["cpu"] for sample in record.samples] == [
        int(sample.seconds) / 1000 for sample in record.samples
    ]
    peaks = [sample for sample in record.samples if sample.most_pressure["cpu"] == 0.95]
    assert len(peaks) == 1 and peaks[0].interval.spilled == 1
    assert sum(sample.interval.spilled for sample in record.samples) == picture.stats.spilled == 1
    assert picture.stats.pressure == {"cpu": Pressure(499, 1000, "a machine's memory")}


def test_record_begins_with_its_first_step_on_the_clock_of_its_decisions(tmp_path: Path) -> None:
    net, run = model(), tmp_path / "run.json"
    with TieredAdamW(net.named_parameters(), policy=policy(tmp_path, record=str(run))) as optimizer:
        before = time.time()
        train(optimizer, net, 1)
        recorder = optimizer.store._traffic.recorder
        recorder.decide("spill", "one chunk goes home to nvme", "a test")
        after = time.time()
    record = read_record(run)
    assert record.began is not None and before <= record.began <= after
    (spill,) = [one for one in record.decisions if one.kind == "spill"]
    assert 0.0 <= spill.time - record.began <= record.samples[-1].seconds


def test_steps_go_on_counting_when_parameters_change(tmp_path: Path) -> None:
    net, live = model(), tmp_path / "live.json"
    optimizer = TieredAdamW(
        net.named_parameters(), policy=policy(tmp_path, monitor=str(live), record=str(tmp_path / "r"))
    )
    train(optimizer, net, 2)
    optimizer._held._monitor._looked -= 2.0  # type: ignore[union-attr]
    train(optimizer, net, 1)
    assert read_picture(live).step == 3
    more = nn.Linear(64, 64)
    optimizer.add_param_group({"params": [(f"more.{name}", value) for name, value in more.named_parameters()]})
    train(optimizer, nn.Sequential(net, more), 2)
    optimizer.close()
    record = read_record(tmp_path / "r")
    assert read_picture(live).step == 5
    assert sum(sample.interval.steps for sample in record.samples) == 5
    assert any("more.weight" in row for row in record.rows) and record.decided >= 6


def test_no_file_is_written_before_a_step(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TieredAdamW(model().parameters(), policy=policy(tmp_path, monitor=str(tmp_path / "live.json"))).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["order", "resize", "homes"])
def test_decisions_have_reasons(tmp_path: Path, kind: str) -> None:
    net = model()
    with TieredAdamW(net.named_parameters(), policy=policy(tmp_path)) as optimizer:
        train(optimizer, net, 1)
        optimizer.store.resize("cpu", 8 * CHUNK)
        found = [one for one in optimizer.store.stats().decisions if one.kind == kind]
    wanted = {"order": "alternating", "resize": "cpu has 8 extents", "homes": "new chunks"}
    assert any(wanted[kind] in one.what and one.reason for one in found)


def test_run_under_pressure_is_told_by_top_and_report(tmp_path: Path) -> None:
    """Others take half of a machine's memory and give it back, while a real run spills and promotes."""
    probe = CurveProbe(20 * CHUNK, [0, 0, 0, 13 * CHUNK, 13 * CHUNK, 13 * CHUNK, 0])

    class Optimizer(TieredAdamW):
        parts = Parts(open_probe=lambda **_: probe)

    net, live, run = model(), tmp_path / "live.json", tmp_path / "run.json"
    settings = policy(tmp_path, monitor=str(live), record=str(run))
    settings["tiers"]["cpu"] = {"capacity": 10 * CHUNK, "watermarks": {"high": 0.8, "low": 0.6}}
    with Optimizer(net.named_parameters(), policy=settings) as optimizer:
        probe.store = optimizer.store
        train(optimizer, net, 20)
        stats = optimizer.store.stats()
    picture, record = read_picture(live), read_record(run)
    assert stats.spilled > 0 and stats.promoted > 0
    total = sum((sample.interval for sample in record.samples), Interval(0.0, 0, 0.0, 0.0, 0.0, {}))
    assert (total.spilled, total.promoted) == (stats.spilled, stats.promoted)
    assert (
        picture.stats.pressure == stats.pressure and record.samples[-1].pressure["cpu"] == stats.pressure["cpu"].share
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(picture, "ended", is_well=True))
    assert f"{stats.spilled} chunks spilled, {stats.promoted} promoted" in console.file.getvalue()  # type: ignore[attr-defined]
    shown = page(record)
    assert f"{stats.spilled} chunks were spilled, {stats.promoted} promoted" in shown
    (cpu,) = [part for part in shown.split("<svg")[1:] if "Pressure on cpu" in part]
    assert cpu.count('class="mark spill"') == cpu.count('class="mark promote"') == 1
