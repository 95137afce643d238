"""The peers that need nothing but torch do the same work at kilobyte sizes; who is absent or wrong is told so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import Report, VerificationError, command
from benchmarks.harness.rawdevice import Sample
from benchmarks.peers.__main__ import main
from benchmarks.peers.contenders import BESIDE_THE_TIER, contenders_for, with_memory
from benchmarks.peers.process import Contender
from benchmarks.peers.report import Figures, checks_of, report_of
from benchmarks.peers.runner import Runner
from benchmarks.peers.work import Work, compare, reference_weights
from benchmarks.peers.zero3 import BUFFERS, configured, sub_group_size

HERE = {
    "tierstore": ("tierstore", {}),
    "fused": ("torch", {"implementation": "fused"}),
    "foreach": ("torch", {"implementation": "foreach"}),
    "saved": ("saved", {"page_cache": False}),
    "mapped": ("mapped", {"page_cache": False}),
    "mapped, page cache": ("mapped", {"page_cache": True}),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def runner(work: Work, system: str, options: dict[str, Any], folder: Path) -> Runner:
    job = {"system": system, "work": work.to_dict(), "budget_bytes": 128 << 10, "folder": str(folder)}
    return Runner({**job, "options": options})


def through(work: Work, name: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Take a system through its whole life in this process: what it answered to begin, two steps, and finish."""
    made = runner(work, *HERE[name], folder)
    begun = made.obey({"do": "begin"})
    taken = made.obey({"do": "steps", "count": 2})
    torch.save(reference_weights(work, {taken["taken"]})[taken["taken"]], folder / "reference")
    return begun, taken, made.obey({"do": "finish", "reference": str(folder / "reference")})


def figures(work: Work, folder: Path, found: dict[str, Any], absent: dict[str, str] | None = None) -> Figures:
    troubles = dict.fromkeys(found, "") | (absent or {})
    return Figures(
        work=work,
        folder=folder,
        steps=2,
        peers={
            n: (Contender(n, n, 0, {}, "fused", 2.0 if n == "tierstore" else None), {}, t) for n, t in troubles.items()
        },
        rounds={n: [found[n][1]] if n in found else [None] for n in troubles},
        raw=[Sample(1 << 20, 0.001, 0.0)],
        ends={n: {**found[n][2], "files_left": 0, "bytes_left": 0} if n in found else None for n in troubles},
    )


class TestSystems:
    @pytest.mark.parametrize("name", HERE)
    def test_a_system_ends_with_the_references_weights_and_leaves_no_file(self, name: str, tmp_path: Path) -> None:
        begun, taken, end = through(Work(3, 96), name, tmp_path)
        assert begun["begin_seconds"] > 0 and len(taken["seconds"]) == 2
        assert end["compared"] == {"differing": 0.0, "drift": 0.0} or name == "foreach"
        assert end["compared"]["drift"] < 1e-2
        assert [file.name for file in tmp_path.iterdir()] == ["reference"]

    @pytest.mark.parametrize("name", ["tierstore", "mapped"])
    def test_float32_parameters_need_no_master(self, name: str, tmp_path: Path) -> None:
        work = Work(2, 64, "float32")
        assert work.state_bytes == 8 * work.numel
        assert through(work, name, tmp_path)[2]["compared"]["differing"] == 0

    @pytest.mark.parametrize(("name", "taken"), [("tierstore", 6), ("saved", 4)])
    def test_who_writes_on_takes_a_step_more_so_that_its_last_writes_are_within_the_time(
        self, name: str, taken: int, tmp_path: Path
    ) -> None:
        assert through(Work(1, 64), name, tmp_path)[1]["taken"] == taken

    def test_what_needs_cuda_says_so(self, tmp_path: Path) -> None:
        answer = runner(Work(1, 32), "torchao", {}, tmp_path).obey({"do": "begin"})
        assert answer == {"absent": "works on CUDA parameters only: --device cuda"}

    def test_an_error_of_a_system_is_an_answer(self, tmp_path: Path) -> None:
        answer = runner(Work(1, 32), "saved", {}, tmp_path / "missing").obey({"do": "begin"})
        assert "missing" in answer["failed"]


class TestComparison:
    def test_one_unit_in_the_last_place_is_no_drift_and_a_missed_step_is(self) -> None:
        work = Work(1, 64)
        one, two = reference_weights(work, {1, 2}).values()
        bits = two[0].view(torch.int16)
        assert compare([(bits + 1).view(torch.bfloat16)], two, work)["differing"] == 1.0
        assert compare([(bits + 1).view(torch.bfloat16)], two, work)["drift"] <= 0.0
        assert compare(one, two, work)["drift"] > 0.2


class TestReport:
    def test_ratios_are_those_of_the_rows_own_neighbour_and_who_is_absent_is_a_row(self, tmp_path: Path) -> None:
        work = Work(2, 64)
        found = {}
        for name in ("tierstore", "fused"):
            (tmp_path / name).mkdir()
            found[name] = through(work, name, tmp_path / name)
        found["tierstore"][1]["seconds"], found["fused"][1]["seconds"] = [1.0, 1.0], [3.0, 3.0]
        found["tierstore"][1]["iteration_seconds"], found["fused"][1]["iteration_seconds"] = 2.0, 5.0
        for begun, _, _ in found.values():
            begun |= {"load_seconds": 0.0, "seen_bytes": 0}
        made = figures(work, tmp_path, found, {"torchao": "absent: no CUDA"})
        made = Figures(**{f: getattr(made, f) for f in made.__slots__} | {"peers": _begun(made, found)})
        report = report_of(made)
        ours, _, absent = report.tables[0].rows
        assert ours["beside"] == 3.0 and ours["iterations"] == 2.5 and ours["rate"] == work.numel
        assert absent == {"name": "torchao", "trouble": "absent: no CUDA"}
        assert list(report.environment["policy"]) == ["tierstore"]
        assert report.checks[0].seen == "3.00" and report.checks[0].holds is None
        assert Report.from_dict(report.to_dict()) == report

    def test_memory_is_that_of_the_smallest_alike_that_takes_no_less(self, tmp_path: Path) -> None:
        work, kind = Work(1, 64), {"device": "nvme"}
        rows = {"ours": 600, "small": 500, "middle": 700, "large": 900, "of another kind": 650}
        contenders = {n: Contender(n, "deepspeed", 0, kind if n != "of another kind" else {}, "small") for n in rows}
        made = Figures(
            work=work,
            folder=tmp_path,
            steps=1,
            peers={
                n: (replace(c, system="tierstore") if n == "ours" else c, _seen(rows[n]), "")
                for n, c in contenders.items()
            },
            rounds={n: [{"taken": 1}] for n in rows},
            raw=[],
            ends={n: {} for n in rows},
        )
        assert made.least_that_takes_no_less("ours") == "middle"
        made.peers["ours"][1]["seen_bytes"] = 901
        assert made.least_that_takes_no_less("ours") is None

    @pytest.mark.parametrize(("ours", "seen"), [(600, "2.00"), (601, "-")])
    def test_a_row_with_the_memory_of_another_is_judged_if_it_took_no_more(
        self, ours: int, seen: str, tmp_path: Path
    ) -> None:
        work = Work(1, 64)
        (row, theirs) = (
            Contender("ours", "tierstore", 0, {}, "theirs", 2.0, memory_of="theirs"),
            Contender("theirs", "deepspeed", 0, {}, "theirs"),
        )
        taken = {"ours": (ours, 1.0), "theirs": (600, 2.0)}
        made = Figures(
            work=work,
            folder=tmp_path,
            steps=1,
            peers={n: (contender, _seen(taken[n][0]), "") for n, contender in (("ours", row), ("theirs", theirs))},
            rounds={n: [{"seconds": [seconds]}] for n, (_, seconds) in taken.items()},
            raw=[],
            ends={"ours": {}, "theirs": {}},
        )
        (check,) = checks_of(made, "ours")
        assert check.seen == seen

    def test_other_bits_than_promised_are_no_result(self, tmp_path: Path) -> None:
        begun, taken, end = through(Work(1, 32), "mapped", tmp_path)
        wrong = {**end, "compared": {"differing": 0.1, "drift": 0.0}}
        with pytest.raises(VerificationError, match=r"mapped: 10\.00%"):
            report_of(figures(Work(1, 32), tmp_path, {"mapped": (begun, taken, wrong)}))


def _seen(nbytes: int) -> dict[str, int]:
    return {"seen_bytes": nbytes}


def _begun(made: Figures, found: dict[str, Any]) -> dict[str, Any]:
    return {n: (c, found[n][0] if n in found else {}, trouble) for n, (c, _, trouble) in made.peers.items()}


class TestMemory:
    def test_a_watched_step_shows_what_a_system_holds(self, tmp_path: Path) -> None:
        work = Work(4, 1024)
        made = runner(work, *HERE["fused"], tmp_path)
        made.obey({"do": "begin"})
        watched = made.obey({"do": "memory", "count": 2})
        assert (
            watched["taken"] == 2 and watched["seen_bytes"] + work.given_bytes > work.state_bytes // 4
        )  # some of it was free before

    def test_a_row_may_have_the_memory_that_another_was_seen_to_take(self) -> None:
        rows = list(contenders_for(Work(1, 64), {"least": 1 << 20}))
        (row,) = [row for row in rows if row.memory_of]
        assert with_memory(row, {row.memory_of: 1 << 30}).budget_bytes == (1 << 30) - BESIDE_THE_TIER
        assert [with_memory(other, {row.memory_of: 1 << 30}) for other in rows if other is not row] == [
            other for other in rows if other is not row
        ]

    def test_where_that_is_not_here_the_row_says_so(self, tmp_path: Path) -> None:
        (row,) = [row for row in contenders_for(Work(1, 64), {"least": 1 << 20}) if row.memory_of]
        job = {"system": row.system, "work": Work(1, 64).to_dict(), "folder": str(tmp_path), "options": {}}
        made = Runner({**job, "budget_bytes": with_memory(row, {}).budget_bytes})
        assert "another row" in made.obey({"do": "begin"})["absent"]


class TestDeepSpeedsConfiguration:
    @pytest.mark.parametrize(("budget_mib", "layers"), [(1, 1), (128, 1), (254, 2), (586, 5)])
    def test_its_buffers_come_nearest_to_the_budget_in_whole_layers(self, budget_mib: int, layers: int) -> None:
        work = Work.of(100_000_000, 1664, "bfloat16", "cpu")
        assert sub_group_size(work, budget_mib << 20) == layers * 1664**2

    def test_both_pipelines_are_on_and_clipping_is_off(self, tmp_path: Path) -> None:
        job = runner(Work(1, 32), "deepspeed", {"device": "nvme"}, tmp_path)._job
        config = configured(job, 1024)
        offload = config["zero_optimization"]["offload_optimizer"]
        assert offload["pipeline_read"] and offload["pipeline_write"] and offload["buffer_count"] == BUFFERS >= 12
        assert config["gradient_clipping"] == 0.0  # its default is 1.0


def test_the_command_runs_a_peer_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command(main, ["--quick", f"--json={found}", f"--folder={tmp_path}", "--only=memory-mapped, page"])
    report = Report.from_dict(json.loads(found.read_text()))
    (row,) = report.tables[0].rows
    assert row["name"] == "memory-mapped, page cache" and row["rate"] > 0
    assert report.tables[1].rows[0]["weights"] == "same bits"
    assert report.options["only"] == ["memory-mapped, page"] and "--quick" in report.notes[0]
    assert str(tmp_path) not in found.read_text()
