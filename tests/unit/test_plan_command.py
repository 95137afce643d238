"""`tierstore plan`: what it is asked, what it answers, how it refuses; and the arithmetic behind it, on values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierstore
from tests.commands import exit_status, json_on_stdout
from tierstore.errors import CapacityError, PolicyError, TierstoreError
from tierstore.forecast.pace import MOVE_SECONDS, USE_SECONDS, Link, step_forecast
from tierstore.forecast.parameters import ForecastError, parse_count, transformer
from tierstore.forecast.remedies import least_that_fits
from tierstore.forecast.speeds import UpdateRates
from tierstore.forecast.steady import Chunks, in_alternating_pool, play, steady_step
from tierstore.optimizer import TieredLAMB
from tierstore.ratecache import RateCache

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, without any rates."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def run(*arguments: str | Path) -> int:
    return exit_status("plan", *arguments)


# -- what is asked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7B", 7 * 10**9),
        ("125M", 125 * 10**6),
        ("1.5T", 15 * 10**11),
        ("512k", 512_000),
        ("1", 1),
        (" 70b ", 7 * 10**10),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "bad", ["0", "-7B", "1e30B", "NaN", "inf", "7X", "", "1.5", "1001T", "9" * 30, "7 B B", True, 0, -1]
)
def test_what_is_no_count_is_refused_with_what_is_allowed(bad: str | int) -> None:
    with pytest.raises(ForecastError, match="allowed: a whole number of parameters such as 125M, 7B"):
        parse_count(bad)


@pytest.mark.parametrize("count", [1, 100, 10**5, 124_000_001, 7 * 10**9, 405 * 10**9, 10**12])
def test_a_count_becomes_exactly_so_many_parameters_of_a_transformer_on_meta(count: int) -> None:
    parameters = transformer(count, torch.bfloat16)
    assert sum(parameter.numel() for _, parameter in parameters) == count
    assert all(parameter.is_meta for _, parameter in parameters) and len(parameters) < 2000
    largest = max(parameter.numel() for _, parameter in parameters)
    assert count < 10**6 or largest < count / 5


def test_the_json_has_what_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--params", "7B", "--cpu", "64GiB", "--nvme", "1TB", "--path", "/nowhere", "--json") == 0
    answer = json_on_stdout(capsys)
    assert answer["params"] == 7 * GB and answer["fits"] is True
    assert answer["state_bytes"] == sum(answer["state"].values()) == 70_875_000_000  # a split master: 10.125 each
    assert answer["tiers"]["cpu"]["bytes"] == 64 * GIB and 0.99e12 < answer["tiers"]["nvme"]["bytes"] <= 1e12
    assert answer["step_seconds"] == answer["step"]["seconds"] > 0
    travelling = answer["chunks"] - answer["tiers"]["cpu"]["extents"]
    assert 0 < answer["bytes_written_per_step"] <= travelling * answer["chunk_bytes"]


@pytest.mark.parametrize("count", ["70B", pytest.param("405B", marks=pytest.mark.long)])
def test_models_larger_than_any_machine_are_planned(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--params", count, "--cpu", "512GiB", "--nvme", "20TB", "--path", "/nowhere") == 0
    shown = capsys.readouterr().out
    assert f"{parse_count(count):,} bfloat16 parameters" in shown and "It fits." in shown and "█" in shown


def test_what_does_not_fit_is_status_1_with_the_smallest_change_that_makes_it_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--params", "7B", "--cpu", "16GiB", "--path", "/nowhere"]
    assert run(*asked, "--nvme", "40GB", "--json") == 1
    answer = json_on_stdout(capsys)
    assert answer["why_not"] and answer["step_seconds"] is None
    [least, *_] = answer["remedies"]
    enough = least["settings"]["tiers.nvme.capacity"]
    assert run(*asked, "--nvme", str(enough)) == 0
    assert run(*asked, "--nvme", str(enough - answer["chunk_bytes"])) == 1
    assert least["step_seconds"] > 0 and not least["rounds"]


@pytest.mark.parametrize("guess", [8, 800, 1000, 1008, 4000, 100_000])
@pytest.mark.parametrize("enough", [8, 16, 1000])
def test_the_least_that_fits_is_found_from_any_guess(guess: int, enough: int) -> None:
    assert least_that_fits(lambda size: size >= enough, guess, 8) == enough


def test_of_what_never_fits_there_is_no_least() -> None:
    assert least_that_fits(lambda size: False, 1000, 8) is None


def test_remedies_that_round_say_so_and_come_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("state: {master: float32}\ntiers: {cpu: {capacity: 75GiB}}\n")
    assert run("--params", "7B", "--policy", file, "--json") == 1
    remedies = json_on_stdout(capsys)["remedies"]
    assert remedies[0]["settings"] == {"state.master": "split"} and not remedies[0]["rounds"]
    assert remedies[-1]["rounds"] and [one["rounds"] for one in remedies] == sorted(one["rounds"] for one in remedies)


def test_chunks_too_large_for_a_tier_are_mended_by_smaller_ones(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("chunk_size: 64MiB\ntiers: {cpu: {capacity: 160MiB}, nvme: {capacity: 20GB, paths: [/nowhere]}}\n")
    assert run("--params", "1B", "--policy", file, "--json") == 1
    assert json_on_stdout(capsys)["remedies"][0]["settings"] == {"chunk_size": 10 * MIB}


def test_a_tier_is_added_before_one_is_made_many_times_as_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--params", "7B", "--gpu", "16GiB", "--json") == 1
    kinds = [list(one["settings"]) for one in json_on_stdout(capsys)["remedies"]]
    assert kinds.index(["tiers.nvme.capacity"]) < kinds.index(["tiers.gpu.capacity"])


def test_capacities_of_the_command_line_come_before_those_of_the_policy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(f"chunk_size: 2MiB\ntiers: {{cpu: {{capacity: 8GiB}}, nvme: {{paths: [{tmp_path}]}}}}\n")
    assert run("--params", "125M", "--policy", file, "--cpu", "256MiB", "--json") == 0
    answer = json_on_stdout(capsys)
    assert (answer["chunk_bytes"], answer["tiers"]["cpu"]["bytes"]) == (2 * MIB, 256 * MIB)


def test_a_drive_s_days_follow_from_bytes_steps_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "7B", "--cpu", "16GiB", "--nvme", "1TB", "--path", "/nowhere", "--nvme-bandwidth", "6GB/s"]
    assert run(*asked, "--tbw", "600TB", "--compute-seconds", "20", "--ranks", "2", "--json") == 0
    answer = json_on_stdout(capsys)
    iteration = 20 + answer["step_seconds"]
    per_day = 2 * answer["bytes_written_per_step"] * 86_400 / iteration
    assert math.isclose(answer["endurance"]["days"], 600e12 / per_day, rel_tol=1e-9)
    assert answer["step"]["links"]["cpu-nvme"]["source"] == "given"


def test_without_calibration_speeds_are_assumed_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("--params", "7B", "--gpu", "8GiB", "--cpu", "16GiB", "--nvme", "1TB", "--path", "/nowhere", "--json") == 0
    )
    step = json_on_stdout(capsys)["step"]
    assert {link["source"] for link in step["links"].values()} == {"assumed"} and step["update_source"] == "assumed"


def make_linear() -> nn.Module:
    return nn.Linear(1000, 1000)


def make_nothing() -> nn.Module:
    return nn.ReLU()


def make_number() -> int:
    return 7


def make_trouble() -> nn.Module:
    raise ZeroDivisionError("of no use")


HERE = __name__


def test_a_model_is_made_on_meta_by_the_function_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", f"{HERE}:make_linear", "--cpu", "64MiB", "--json") == 0
    answer = json_on_stdout(capsys)
    assert answer["params"] == 1_001_000 and answer["state_bytes"] == 8 * 1_001_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "0"], "found '0'"),
        (["--params", "1e30B"], "found '1e30B'"),
        (["--params", "7B", "--dtype", "int8"], "dtype: found 'int8'; allowed: float32"),
        (["--params", "7B", "--dtype", "Tensor"], "dtype: found 'Tensor'"),
        (["--params", "7B", "--cpu", "0"], "tiers.cpu.capacity: found '0'"),
        (["--params", "7B", "--cpu", "-1GiB"], "tiers.cpu.capacity: found '-1GiB'"),
        (["--params", "7B", "--nvme", "NaN"], "tiers.nvme.capacity: found 'NaN'"),
        (["--params", "7B", "--gpu", "30%"], "give a size, as 24GiB"),
        (
            ["--params", "7B", "--cpu", "1MiB", "--nvme", "1TB", "--path", "/nowhere"],
            "chunks of 65,536 bytes, more than",
        ),
        (["--params", "7B", "--nvme-bandwidth", "fast"], "--nvme-bandwidth: found 'fast'"),
        (["--params", "7B", "--update-rate", "nan"], "update speed: found nan"),
        (["--params", "7B", "--tbw", "0"], "--tbw: found '0'"),
        (["--params", "7B", "--ranks", "0"], "ranks: found 0; allowed: from 1 to 1024"),
        (["--params", "7B", "--compute-seconds", "-1"], "compute seconds: found -1.0"),
        (["--params", "7B", "--cpu", "1GiB", "--path", "/nowhere"], "the plan has no nvme tier"),
        (["--params", "7B", "--policy", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--params", "7B", "--json", "/nowhere/plan.json"], "/nowhere/plan.json: cannot be written"),
        ([], "give either --params N, as 7B, or --model module:function"),
        (["--params", "7B", "--model", "a:b"], "give either --params N"),
        (["--model", "make_linear"], "allowed: module:function"),
        (["--model", "no.such.module:make"], "no.such.module cannot be imported (ModuleNotFoundError"),
        (["--model", f"{HERE}:no_such"], "is nothing that can be called"),
        (["--model", f"{HERE}:make_trouble"], "make_trouble() raised ZeroDivisionError on the meta device"),
        (["--model", f"{HERE}:make_number"], "make_number() returned 'int'"),
        (["--model", f"{HERE}:make_nothing"], "ReLU has no parameters"),
    ],
)
def test_what_cannot_be_carried_out_is_status_2_and_one_message(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert words in told.err and not told.out and "Traceback" not in told.err


@pytest.mark.parametrize("bad", [None, 3.5, torch.zeros(3), object()])
def test_what_is_no_model_is_refused(bad: Any) -> None:
    with pytest.raises(ForecastError, match="allowed: a model, parameters or groups"):
        tierstore.plan(bad)


def test_what_a_plan_cannot_say_is_refused_rather_than_guessed() -> None:
    with pytest.raises(ForecastError, match="LAMB visits the chunks of a parameter that is cut twice"):
        tierstore.plan("7B", optimizer=TieredLAMB)
    with pytest.raises(ForecastError, match="no parameter requires a gradient"):
        tierstore.plan(nn.Linear(3, 3).requires_grad_(False))
    with pytest.raises(ForecastError, match="without a shape yet"):
        tierstore.plan(nn.LazyLinear(3))
    with pytest.raises(PolicyError, match="parameter group has tier 'disk'"):
        tierstore.plan([{"params": [nn.Parameter(torch.zeros(3))], "tier": "disk"}])


def test_the_function_and_the_planner_s_module_do_not_hide_each_other() -> None:
    import tierstore.planning as planning

    assert callable(tierstore.plan) and callable(planning.plan_step)
    assert issubclass(ForecastError, TierstoreError)


# -- what a steady step moves -----------------------------------------------------------------------------------

LINE = ("cpu", "nvme")


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_what_is_said_of_an_alternating_pool_is_what_the_planner_does(count: int) -> None:
    records = [4096 * (1 + number % 5) for number in range(count)]
    chunks = Chunks(records, ["cpu"] * count, ["nvme"] * count)
    for extents in range(1, count + 3):
        said = in_alternating_pool(records, extents, LINE)
        played = play(chunks, {"cpu": extents, "nvme": count}, LINE, alternates=True)
        assert said.bytes == {route: n for route, n in played.bytes.items() if n}
        assert said.chunks == {route: n for route, n in played.chunks.items() if n}
        assert Counter(said.resting) == Counter(played.resting)


def test_very_many_chunks_are_said_and_few_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.forecast import steady

    chunks = Chunks([4096] * 30, ["cpu"] * 30, ["nvme"] * 30)
    played = steady_step(chunks, {"cpu": 9, "nvme": 30}, LINE, alternates=True)
    monkeypatch.setattr(steady, "MANY_CHUNKS", 20)
    monkeypatch.setattr(steady, "play", None)
    said = steady_step(chunks, {"cpu": 9, "nvme": 30}, LINE, alternates=True)
    assert said.bytes == played.bytes and 2 * said.bytes["cpu", "nvme"] == 2 * 21 * 4096


@pytest.mark.parametrize(
    ("homes", "room"),
    [
        (["gpu", "nvme", "nvme"] * 20, {"gpu": 26, "cpu": 12, "nvme": 60}),
        (["nvme"] * 60, {"gpu": 4, "cpu": 30, "nvme": 60}),
        (["cpu"] * 60, {"gpu": 9, "cpu": 60}),
    ],
)
@pytest.mark.parametrize("alternates", [True, False])
def test_the_first_steady_steps_of_very_many_chunks_are_near_what_all_come_to(
    homes: list[str], room: dict[str, int], alternates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierstore.forecast import steady

    chunks = Chunks([4096] * 60, ["gpu"] * 60, homes)
    settled = play(chunks, room, list(room), alternates=alternates)
    monkeypatch.setattr(steady, "MANY_CHUNKS", 10)
    early = play(chunks, room, list(room), alternates=alternates)
    assert all(abs(early.chunks.get(route, 0) - n) <= 6 for route, n in settled.chunks.items())


def test_a_step_that_no_plan_can_make_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError):
        play(Chunks([4096] * 3, ["cpu"] * 3, ["nvme"] * 3), {"cpu": 0, "nvme": 3}, LINE, alternates=True)


# -- how long it takes ------------------------------------------------------------------------------------------


def link(seconds: float) -> dict[str, Link]:
    return {"cpu-nvme": Link("cpu-nvme", 8 * MIB, 8 * MIB, seconds, "given")}


@pytest.mark.parametrize(
    ("moving", "every", "sparing", "bound"),
    [(10.0, 1.0, 2.0, "cpu-nvme"), (1.0, 8.0, 16.0, "arithmetic"), (0.0, 3.0, 5.0, "arithmetic")],
)
def test_a_step_takes_no_less_than_its_slower_part_and_says_which_binds(
    moving: float, every: float, sparing: float, bound: str
) -> None:
    step = step_forecast(
        link(moving), every_core_seconds=every, sparing_seconds=sparing, chunks=0, moves=0, update_source="given"
    )
    assert max(moving, every) <= step.seconds <= moving + sparing
    assert step.bound == bound and math.isclose(step.exposed_wait_seconds, step.seconds - step.arithmetic_seconds)


def test_each_chunk_and_each_move_costs_some_python() -> None:
    def seconds(chunks: int, moves: float) -> float:
        return step_forecast(
            link(1.0), every_core_seconds=9.0, sparing_seconds=9.0, chunks=chunks, moves=moves, update_source="given"
        ).seconds

    more = seconds(1000, 500) - seconds(0, 0)
    assert math.isclose(more, 1000 * USE_SECONDS + 500 * MOVE_SECONDS)


def test_measured_updates_are_kept_for_later_plans(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.forecast import speeds

    asked: list[Any] = []

    def measured(kind: Callable[..., Any], dtype: torch.dtype, policy: Any) -> UpdateRates:
        asked.append((dtype, policy["state"]))
        return UpdateRates(2e6, 1e6)

    monkeypatch.setattr(speeds, "measure_updates", measured)
    policy = {"tiers": {"cpu": {"capacity": "64MiB"}}}
    first = tierstore.plan("2M", policy, calibrate=True)
    assert asked == [(torch.bfloat16, {"master": "float32", "moments": "float32"})]
    later = tierstore.plan("2M", policy)
    assert first.step is not None and later.step is not None and len(asked) == 1
    assert first.step.seconds == later.step.seconds > 1.0 and later.step.update_source.startswith("measured 20")
    assert RateCache(home / "tierstore").folder is not None


@pytest.mark.usefixtures("one_thread")
def test_updates_are_measured_by_making_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from tierstore.forecast import speeds

    monkeypatch.setattr(speeds, "_MEASURED_ELEMENTS", 1 << 14)
    rates = speeds.measure_updates(tierstore.TieredAdamW, torch.float32, {"tiers": {"cpu": {}}})
    assert rates.elements_per_second > 0
