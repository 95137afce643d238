"""The benchmarks run, at kilobyte sizes, verify what they move, and say what they found in the one form of results."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer import BadParameter

from benchmarks import all as all_
from benchmarks import (
    arithmetic,
    checkpoint,
    import_cost,
    in_backward,
    memory,
    page,
    predicted_vs_measured,
    pressure,
    retention,
    scaling,
    step_time,
    swap_latency,
)
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
    device_of,
    fill,
    fio_entries,
    open_console,
    verify,
)
from benchmarks.harness.command import drawable
from benchmarks.harness.plots import bars
from benchmarks.harness.rawdevice import RawDevice
from benchmarks.harness.report import RESULTS
from benchmarks.harness.routes import Stage
from benchmarks.harness.show import print_report
from benchmarks.harness.training import Work
from benchmarks.retention_model import alternating, belady_hits, hits, play_ours
from tierstore import calibrate
from tierstore.build import Parts
from tierstore.forecast import speeds
from tierstore.transfer import Ticket, TransferEngine

CHUNK = 16 << 10
FIO = """#!/bin/sh
echo '{"jobs": [{"error": 0, "read": {"io_bytes": 3000000, "runtime": 1}, "write": {"io_bytes": 0, "runtime": 0}}]}'
"""

pytestmark = pytest.mark.usefixtures("one_thread")


def run(main: Callable[..., None], folder: Path, *options: str) -> Report:
    """Run a benchmark's command line in this process and read what it wrote."""
    command(main, ["--quick", f"--json={folder / 'found.json'}", *options])
    return Report.from_dict(json.loads((folder / "found.json").read_text()))


def row(report: Report, table: int, **wanted: Any) -> Any:
    """The one row of a table that has these values."""
    (found,) = [row for row in report.tables[table].rows if all(row[key] == wanted[key] for key in wanted)]
    return found


def kinds(report: Report) -> list[str]:
    """What the raw device was measured at, and fio beside it."""
    return [entry["kind"] for entry in report.raw]


@pytest.fixture
def fio(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for fio, where it would be installed: it moves nothing, and says 3 GB/s."""
    script = tmp_path_factory.mktemp("bin") / "fio"
    script.write_text(FIO)
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return script


@pytest.mark.usefixtures("fio")
class TestSmoke:
    def test_swap_latency_measures_every_route_and_engine_beside_the_raw_device(self, tmp_path: Path) -> None:
        report = run(swap_latency.main, tmp_path, f"--folder={tmp_path}", "--rounds=1")
        routes = {row["route"] for table in report.tables[:-1] for row in table.rows}
        assert routes == {"nvme->cpu", "cpu->nvme", "nvme->cpu->gpu", "gpu->cpu->nvme", "cpu->gpu", "gpu->cpu"}
        threads = row(report, 2, route="nvme->cpu", engine="threads")
        assert threads["moves"] == 8 and threads["of_raw"] > 0 and threads["p50"] <= threads["p99"] <= threads["max"]
        assert set(kinds(report)) == {"read", "write", "fio read", "fio write", "fio mixed"}
        assert report.raw[-1]["gb_per_s"] == 3.0 and report.raw[-1]["request"] == 32 << 10
        assert [row["leases"] for row in report.tables[-1].rows] == [8, 8]

    def test_step_time_ends_with_the_same_bits_in_every_tier_set_and_moves_no_more_than_the_bound(
        self, tmp_path: Path
    ) -> None:
        trace = tmp_path / "trace.json"
        report = run(step_time.main, tmp_path, f"--folder={tmp_path}", "--rounds=1", f"--trace={trace}")
        links = report.tables[1].rows
        files = [row for row in links if row["link"] == "cpu-nvme"]
        assert len(links) == len(files) + 1 == 7
        assert all(0 < row["moved"] <= row["bound"] for row in links if row["tiers"] != "cpu+nvme 100%")
        assert row(report, 1, tiers="cpu+nvme 100%")["moved"] == 0
        claims = [check.claim for check in report.checks]  # misses of all are told
        assert claims[: len(links)] == [f"{row['tiers']}: bytes per parameter on {row['link']}" for row in links]
        assert claims[-len(files) :] == [f"{row['tiers']}: over max(I/O, arithmetic)" for row in files]
        assert kinds(report) == ["mixed", "fio mixed"]
        events = json.loads(trace.read_text())["traceEvents"]
        tracks = {str(event["args"].get("name")) for event in events}
        assert "control thread" in tracks and any(track.startswith("tierstore-io") for track in tracks)

    def test_updates_in_backward_end_with_the_bits_of_updates_in_the_step(self, tmp_path: Path) -> None:
        report = run(in_backward.main, tmp_path, f"--folder={tmp_path}", "--rounds=1", "--iterations=1")
        step, backward = (row(report, 0, tiers=f"cpu+nvme 50%, {update}") for update in ("step", "backward"))
        assert step["io"] > 0 and backward["io"] > 0 and step["of_step"] == 1.0
        assert report.verified.startswith("0.4 MB")  # four contenders beside the one in memory
        assert kinds(report) == ["mixed", "fio mixed"]
        assert [entry["request"] for entry in report.raw] == [16 << 10] * 2  # 8 MiB do not fit

    def test_updates_in_backward_pass_a_gpu_tier(self, tmp_path: Path) -> None:
        work = Work(3, 128, 2, torch.bfloat16, torch.device("cpu"))
        options = {"iterations": 1, "rows": None, "volume": 64 << 10, "gpu": {"device": "cpu"}}
        report = in_backward.measure(work, CHUNK, [tmp_path], 1, **options)
        assert list(report.environment["policy"]["tiers"]) == ["gpu", "cpu", "nvme"]
        assert row(report, 0, tiers="cpu+nvme 50%, backward")["io"] > 0
        assert report.verified.startswith("0.4 MB")

    def test_arithmetic_compares_every_way_with_torch(self, tmp_path: Path) -> None:
        report = run(arithmetic.main, tmp_path, "--device=cpu")
        assert row(report, 0, case="20 x 100", way=arithmetic.FUSED)["of_fused"] == 1.0
        assert row(report, 0, case="20 x 100", way="tierstore, bf16")["rate"] > 0
        ours = arithmetic.ways(torch.device("meta"))  # an accelerator's
        compared = {name: way.bits_of for name, way in ours.items() if way.bits_of is not None}
        assert compared == {arithmetic.SPLIT: arithmetic.WHOLE}

    def test_scaling_has_a_step_without_arithmetic_beside_each_step(self, tmp_path: Path) -> None:
        report = run(scaling.main, tmp_path, f"--folder={tmp_path}")
        assert all(row["python"] > 0 and row["chunks"] > 1 for table in report.tables for row in table.rows)
        assert kinds(report) == ["mixed", "fio mixed"] and report.raw[0]["request"] == CHUNK
        tiers = ["cpu", "cpu+nvme", "cpu+nvme, 16KiB"]
        claims = [f"{one}: cost of an element, 4 x state, alone or beside torch's" for one in tiers]
        claims += [f"{one}: Python's share of a step of 0.0655 M elements, the most here" for one in tiers[:2]]
        assert [check.claim for check in report.checks] == claims
        assert all("decides" in check.seen for check in report.checks[:3])
        assert all("; 0.0164 M have" in check.seen for check in report.checks[3:])

    def test_plans_are_true_to_the_byte_and_stand_beside_what_steps_take(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speeds, "_MEASURED_ELEMENTS", 1 << 14)
        monkeypatch.setattr(calibrate, "MOST_SECONDS", 0.05)  # mostly too little: rates are assumed then
        report = run(predicted_vs_measured.main, tmp_path, f"--folder={tmp_path}")
        rows = report.tables[0].rows
        assert len(rows) == 10 and all(row["predicted"] > 0 and row["measured"] > 0 for row in rows)
        assert report.verified.startswith("what plans said of 8.7 MB")
        assert list(report.environment["policy"]) == [row["policy"] for row in rows]

    def test_memory_counts_what_is_reserved_of_each_tier(self, tmp_path: Path) -> None:
        found = memory.measure_here("cpu+nvme", str(64 << 10), 1 << 15, 4, 16 << 10, [str(tmp_path)])
        assert found["state"] == 8 << 15
        assert found["granted"] == 64 << 10
        assert found["reserved"] == (64 << 10) + (8 << 15)  # room for all chunks below the 4 extents they pass through

    def test_checkpoint_ends_with_the_bits_of_torchs_and_counts_memory(self, tmp_path: Path) -> None:
        report = run(checkpoint.main, tmp_path, f"--folder={tmp_path}")
        of_torch, same = checkpoint.OF_TORCH, checkpoint.SAME
        assert row(report, 0, what=of_torch["save"])["of_torch"] == 1.0 and row(report, 0, what="load")["rate"] > 0
        assert row(report, 0, what=same["save"])["seconds"] > 0 and row(report, 0, what=same["load"])["seconds"] > 0
        moved = {one["what"]: one.get("moved") for one in report.tables[0].rows}
        assert moved["load, state in memory"] == moved[of_torch["load"]] == 12 << 17
        assert moved["load"] - (12 << 17) == (8 << 17) * 19 // 20
        assert row(report, 1, what="saving beside")["call"] > 0
        assert [one.holds for one in report.checks[-3:]] == [True] * 3  # memory
        assert report.verified.startswith("4.7 MB")
        assert kinds(report) == ["write", "read", "fio write", "fio read"]
        assert len({entry["request"] for entry in report.raw}) == 1
        assert set(report.environment["policy"]) == {"chunk_size", "tiers"}

    def test_pressure_moves_no_more_than_its_bound_and_leaves_every_bit_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(speeds, "_MEASURED_ELEMENTS", 1 << 14)
        report = run(pressure.main, tmp_path, f"--folder={tmp_path}")
        before, rising, high, falling, after = report.tables[0].rows
        assert before["spilled"] == 0 and rising["spilled"] > 0 and falling["promoted"] + after["promoted"] > 0
        assert high["extents"] < before["extents"] == after["extents"]
        within, across, _ = report.tables[1].rows
        assert within["changes"] == 0 and across["changes"] > 1
        assert [check.holds for check in report.checks] == [
            True,
            True,
            None,
        ]  # kilobytes say nothing of memory returned
        assert [row["tiers"] for row in report.tables[2].rows] == list(pressure.EMPTIED)
        assert all(row["written"] > 0 and row["read"] > 0 for row in report.tables[3].rows)
        assert kinds(report) == ["write", "read", "first write", "fio write", "fio read"]
        assert len({entry["request"] for entry in report.raw}) == 1

    def test_a_device_that_is_not_there_is_told(self) -> None:
        assert device_of("cpu") == torch.device("cpu")
        with pytest.raises(BadParameter, match="found 'tpu'; here there is cpu"):
            device_of("tpu")

    def test_one_run_has_all_gpu_figures(self) -> None:
        """Updates in backward and arithmetic were left out."""
        named = {run.name for run in all_.RUNS if run.on_gpu is not None}
        assert named == {"swap_latency", "step_time", "in_backward", "peers", "arithmetic"}
        for run in all_.RUNS:
            if run.on_gpu:
                assert run.on_gpu == ("--device=cuda",)


class TestPlots:
    @pytest.mark.parametrize("name", [run.name for run in all_.RUNS])
    def test_every_benchmark_takes_the_same_options(self, name: str, tmp_path: Path) -> None:
        module = importlib.import_module(f"benchmarks.{name}" + (".__main__" if name == "peers" else ""))
        with pytest.raises(BadParameter, match=r"ends in \.png"):
            command(module.main, ["--quick", "--json=-", f"--plot={tmp_path / 'plot.xyz'}"])

    @pytest.mark.parametrize("module", [checkpoint, in_backward, memory, predicted_vs_measured])
    def test_bars_are_those_of_the_rows_that_have_the_figure(self, module: Any) -> None:
        pytest.importorskip("matplotlib")
        found = max(RESULTS.glob(f"*-{module.__name__.rpartition('.')[2]}.json"))
        report = Report.from_dict(json.loads(found.read_text()))
        drawn = bars(report, module.DRAWN)
        for axis, panel in zip(drawn.axes, module.DRAWN, strict=True):
            wanted = [row[panel.key] / panel.unit for row in report.tables[panel.table].rows if panel.key in row]
            assert wanted and [bar.get_width() for bar in axis.patches] == wanted

    @pytest.mark.parametrize(
        "main",
        [
            *(arithmetic.main, checkpoint.main, import_cost.main, in_backward.main, memory.main),
            *(predicted_vs_measured.main, pressure.main, retention.main, scaling.main, step_time.main),
            swap_latency.main,
        ],
    )
    @pytest.mark.long
    def test_what_was_measured_is_drawn(self, main: Callable[..., None], tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        options = [f"--plot={tmp_path / 'figures.png'}"]
        if main not in (arithmetic.main, import_cost.main, retention.main):
            options += [f"--folder={tmp_path}"]
        if main is step_time.main:
            options += [f"--timeline={tmp_path / 'timeline.png'}"]
        run(main, tmp_path, *options)
        drawn = sorted(tmp_path.glob("*.png"))
        assert len(drawn) == (2 if main is step_time.main else 1)
        assert all(file.read_bytes().startswith(b"\x89PNG") for file in drawn)


class TestRetention:
    @pytest.mark.parametrize(("chunks", "extents"), [(20, 8), (41, 20), (82, 24)])
    def test_our_plans_have_as_many_hits_as_belady(self, chunks: int, extents: int) -> None:
        ours = [hits(actions, chunks) for actions in play_ours("alternating", chunks, extents, 6)]
        assert ours[1:] == list(belady_hits(alternating(chunks), chunks, extents, 6))[1:]

    def test_no_policy_has_more_hits_than_ours_with_as_many_extents_and_steps_take_no_longer_than_they_may(
        self, tmp_path: Path
    ) -> None:
        report = run(retention.main, tmp_path)
        assert len(report.checks) == 20 and all(check.holds for check in report.checks)
        rows = {row["policy"]: row for row in report.tables[0].rows}
        for share in retention.SHARES:
            assert rows["tierstore"][f"hits{share}"] == max(row[f"hits{share}"] for row in rows.values())


class TestVerification:
    def test_a_page_that_is_old_or_elsewhere_is_found(self) -> None:
        block = torch.empty(64 << 10, dtype=torch.uint8)
        fill(block, 3)
        assert verify(block, 3, "test") == 64 << 10
        block[8192:12288] = block[4096:8192].clone()
        with pytest.raises(VerificationError, match="block 3 differs from byte 8192 of"):
            verify(block, 3, "test")

    def test_a_raw_device_that_writes_nothing_is_found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with RawDevice([tmp_path], 64 << 10) as raw:
            raw.measure("mixed", 16 << 10, 2)
            assert raw.verified_bytes == 64 << 10
            monkeypatch.setattr("benchmarks.harness.rawdevice._move", lambda *_: None)
            with pytest.raises(VerificationError, match="raw read"):
                raw.measure("read", 16 << 10, 2)

    def test_fio_that_fails_is_told_and_loses_nothing(
        self, fio: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fio.write_text("#!/bin/sh\necho engine libaio not loadable >&2; exit 1\n")
        (entry,) = fio_entries(tmp_path, ("read",), 8 << 20, 8, 1 << 20)
        assert entry == {"kind": "fio read, failed", "request": 256 << 10, "in_flight": 8}
        assert "engine libaio not loadable" in capsys.readouterr().err

    def test_a_move_that_moves_too_little_is_found(self, tmp_path: Path) -> None:
        parts = Parts(open_transfer=ShortTransfer)
        stage = Stage(
            ("cpu", "nvme"), chunk_bytes=CHUNK, chunks=4, folders=[tmp_path], io={"engine": "threads"}, parts=parts
        )
        with pytest.raises(VerificationError, match="cpu->nvme with threads: block 4 differs from byte 4096 of"):
            stage.move(("cpu", "nvme"), 2)
        stage.close()


class ShortTransfer(TransferEngine):
    """Moves the first page of what it is told to move."""

    def submit(self, source: Any, destination: Any, nbytes: int, **about: Any) -> Ticket:
        return super().submit(source, destination, 4096, **about)


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "heard"),
        [
            ([], None),
            (["--json"], "dated"),
            (["--json", "--quick"], "dated"),
            (["--json", "-"], "-"),
            (["--json", "file"], "file"),
        ],
    )
    def test_options_and_the_file_of_json_may_be_left_out(self, arguments: list[str], heard: str | None) -> None:
        found: list[str | None] = []

        def main(json: Json = None, quick: Quick = False) -> None:
            found.append(json)

        command(main, arguments)
        assert found == [heard]

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            ("--json={}", "is a folder"),
            ("--json={}/none/found.json", "cannot be written"),
            ("--plot={}/none/plot.png", "cannot be written"),
            ("--plot={}/plot.xyz", "ends in .png"),
        ],
    )
    def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
        self, option: str, words: str, tmp_path: Path
    ) -> None:
        """Minutes were measured first, and lost."""

        def main(json: Json = None, plot: Plot = None) -> None:
            raise AssertionError("something was measured")

        with pytest.raises(BadParameter, match=words):
            command(main, [option.format(tmp_path)])

    def test_a_plot_without_matplotlib_is_told_before_anything_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(BadParameter, match="plots need matplotlib"):
            drawable(tmp_path / "plot.png")


class TestResults:
    def test_a_report_is_its_json_and_the_page_shows_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = run(retention.main, tmp_path)
        assert Report.from_dict(report.to_dict()) == report
        command(page.main, [f"--results={tmp_path}"])
        text = (tmp_path / "README.md").read_text()
        assert "## retention" in text and "| Belady, fixed |" in text

    @pytest.mark.parametrize("width", [140, 100, 80, 60])
    def test_no_figure_is_cut_in_a_narrow_terminal(self, width: int) -> None:
        """Of 797 ms there was 79 to be read, and of the figures to reach neither what was seen nor whether it was."""
        keys = ["parameters/s", "the step alone", "and backward", "of raw", "CPU s"]
        rows = tuple(
            {"system": f"tierstore cpu+nvme, {share}% of state", **dict.fromkeys(keys, 1e5)} for share in (0, 50)
        )
        columns = (Column("system", "system"), *(Column(key, key, ",.1f") for key in keys))
        check = Check(
            f"{rows[1]['system']}: parameters/s over DeepSpeed's with as large buffers", ">= 3.5", "3.69", True
        )
        report = Report("peers", "how fast?", {}, {}, (Table("medians", columns, rows),), "bits", checks=(check,))
        printed = io.StringIO()
        print_report(Console(file=printed, width=width), report)
        text = printed.getvalue()
        assert text.count("100,000.0") == len(rows) * len(keys)
        assert all(word in text for word in (">= 3.5", "3.69", "reached")) and "…" not in text

    def test_brackets_are_printed_as_they_are(self) -> None:
        """An absent peer's remedy was `pip install 'tierstore'`: rich took the extra, in brackets, for a style."""
        text = "pip install 'tierstore[peers]'"
        table = Table(text, (Column("system", text),), ({"system": text},), note=text)
        check = Check(text, text, text, False)
        report = Report("peers", text, {}, {}, (table,), text, checks=(check,), notes=(text,))
        printed = io.StringIO()
        print_report(open_console(printed), report)
        assert printed.getvalue().count("tierstore[peers]") == 10

    def test_results_name_no_folder(self, tmp_path: Path) -> None:
        run(scaling.main, tmp_path, f"--folder={tmp_path}")
        assert str(tmp_path) not in (tmp_path / "found.json").read_text()
