"""The files of `monitor` and `record`: what they say is what the store says, and they never touch a training."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tierstore import TieredAdamW, TierPolicy
from tierstore.history import MOST_ROWS, MOST_SAMPLES, PICTURE_FORMAT, RECORD_FORMAT
from tierstore.monitor import Monitor, OutFile
from tierstore.seen import read_picture, read_record

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
    assert sum(sample.interval.steps for sample in record.samples) == stats.step.count == 6
    moved = sum(sum(sample.interval.route_bytes.values()) for sample in record.samples)
    assert moved == sum(route.bytes for route in stats.routes.values())
    assert record.samples[-1].seconds == pytest.approx(499.0, abs=1.0)


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
