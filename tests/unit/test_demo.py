"""The main job: what it shows, what it writes, how it stops. The models are tiny; one long test makes the real run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.commands import exit_status
from tests.fakes import PATIENCE_SECONDS
from tierstore.demo.meter import WINDOW, Meter, Progress
from tierstore.demo.model import Size, make_model
from tierstore.demo.options import DemoError
from tierstore.demo.policy import small_policy
from tierstore.demo.text import read_text
from tierstore.demo.training import StepResult, heldout_losses
from tierstore.demo.view import LiveView, frame
from tierstore.demo.words import BARS, curve, size
from tierstore.policy import TierPolicy
from tierstore.stats import IoStats, RouteStats, Stats, StepStats, TierStats

TINY = ["--steps", "4", "--width", "64", "--layers", "2", "--context", "16", "--batch", "2"]


pytestmark = pytest.mark.usefixtures("one_thread")


def stats_after(step: int) -> Stats:
    """A store that in each step moved 2,000 bytes in 2 moves up, and waited for 1 s."""
    tier = TierStats(capacity_bytes=8 << 20, used_bytes=4 << 20, peak_bytes=4 << 20, chunks=8)
    route = RouteStats(moves=2 * step, bytes=2000 * step, seconds=1.0, p50_ms=0.5, p95_ms=1.0, p99_ms=2.0)
    return Stats(
        tiers={"gpu": tier, "cpu": tier, "nvme": tier},
        routes=dict.fromkeys(("cpu->gpu", "cpu->nvme", "gpu->cpu", "nvme->cpu"), route),
        step=StepStats(count=step, read_wait_seconds=float(step)),
        last_step=StepStats(count=1, read_wait_seconds=1.0),
        io=IoStats("threads", direct=True, paths=("/swap",)),
    )


def progress_after(steps: int) -> Progress:
    meter = Meter(steps=steps, tokens=100)
    for step in range(1, steps + 1):
        progress = meter.record(StepResult(5.0 / step, 1.0, 2.0, 5.0), stats_after(step))
    return progress


# --- the whole


def test_verified_run_is_equal_to_the_bit_and_uses_all_tiers_and_routes(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    assert exit_status("demo", *TINY, "--verify", "--swap", str(tmp_path), "--json", str(target)) == 0
    result = json.loads(target.read_text())
    assert result["bit_equal"] is True
    assert result["verify"]["weights"] == result["params"] > 0
    assert result["steps"] == 4 and not result["interrupted"]
    assert 0 < result["loss_last"] < result["loss_first"] < 6
    assert 0 < result["heldout_loss"] < 6 and 3 < result["unigram_entropy"] < 3.5
    assert result["seconds"] > 0 and result["text"]
    stats = result["stats"]
    assert {name for name, route in stats["routes"].items() if route["bytes"]} == {
        "nvme->cpu", "cpu->gpu", "gpu->cpu", "cpu->nvme",
    }  # fmt: skip
    chunks = {name: tier["chunks"] for name, tier in stats["tiers"].items()}
    assert chunks["nvme"] > chunks["gpu"] + chunks["cpu"] > chunks["gpu"] > 0
    assert stats["step"]["count"] == 4 and stats["io"]["paths"] == [str(tmp_path)]
    assert TierPolicy.load(result["policy"]).tiers.names == ("gpu", "cpu", "nvme")
    assert os.listdir(tmp_path) == [target.name]


def test_json_without_a_file_is_all_there_is_on_stdout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_status("demo", "--json", *TINY, "--swap", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bit_equal"] is None
    assert "step 4/4" in err and "nvme -> cpu" in err


def test_output_that_is_piped_has_no_colour_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert exit_status("demo", *TINY, "--swap", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if str(tmp_path) not in line]
    assert "\x1b" not in out and not err
    assert max(map(len, lines)) <= 80
    assert all(word in out for word in ("model", "state", "to beat", "held out", "nothing is left behind"))


def test_same_seed_gives_the_same_losses_in_any_tiers(tmp_path: Path) -> None:
    results = []
    for tiers in ("gpu,cpu,nvme", "cpu,nvme", "cpu"):
        target = tmp_path / "result.json"
        swap = ["--swap", str(tmp_path)] if "nvme" in tiers else []
        assert exit_status("demo", *TINY, "--tiers", tiers, *swap, "--json", str(target)) == 0
        results.append(json.loads(target.read_text()))
        assert set(results[-1]["stats"]["tiers"]) == set(tiers.split(","))
    assert len({(result["loss_last"], result["heldout_loss"]) for result in results}) == 1


def test_difference_is_told_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)  # another formula
    assert exit_status("demo", *TINY, "--verify", "--swap", str(tmp_path), "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["bit_equal"] is False and json.loads(out)["verify"]["first_step"] == 2
    assert "NOT EQUAL" in err and "from step 2 on" in err


def test_policy_of_the_users_own_is_followed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "small.yaml"
    policy.write_text("tiers: {cpu: {capacity: 128KiB}, nvme: {}}\nchunk_size: 16KiB\n")
    assert exit_status("demo", *TINY, "--policy", str(policy), "--swap", str(tmp_path), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["stats"]["tiers"]["cpu"]["capacity_bytes"] == 128 << 10
    assert result["stats"]["tiers"]["nvme"]["chunks"] > 0


@pytest.mark.long
def test_default_run_learns_more_than_byte_frequencies(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    assert exit_status("demo", "--verify", "--swap", str(tmp_path), "--json", str(target)) == 0
    result = json.loads(target.read_text())
    assert result["bit_equal"] is True
    assert result["heldout_loss"] < result["unigram_entropy"] - 0.5
    assert result["stats"]["tiers"]["nvme"]["chunks"] > 40


# --- how it stops


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at open files through /proc")
def test_interrupt_sums_up_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in a run that would take days: the step is finished, the summary printed, the folder empty."""
    swap, target = tmp_path / "swap", tmp_path / "result.json"
    swap.mkdir()
    arguments = ["demo", *TINY, "--steps", "100000000", "--swap", str(swap), "--json", str(target)]
    # A runner in the background may have left SIGINT ignored, which children inherit.
    code = (
        "import signal; from tierstore.cli import main\n"
        f"signal.signal(signal.SIGINT, signal.default_int_handler); main({arguments!r})"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stderr is not None
        assert any(line.startswith("step") for line in child.stdout), child.stderr.read()
        held = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir() if link.is_symlink()]
        assert any(name.startswith(str(swap)) for name in held)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE_SECONDS)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert "Interrupted" in out and "cpu -> nvme" in out and not err
    result = json.loads(target.read_text())
    assert result["interrupted"] and result["steps"] >= 1 and result["heldout_loss"] is None
    assert os.listdir(swap) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "{}/none.txt"], "none.txt cannot be read (No such file or directory)"),
        (["--text", "{}"], "cannot be read (Is a directory)"),
        (["--text", "{}/empty.txt"], "empty.txt is empty"),
        (["--text", "{}/short.txt"], "short.txt has 9 bytes, too few"),
        (["--policy", "{}/none.yaml"], "none.yaml: cannot be read"),
        (["--policy", "{}/short.txt"], "short.txt: "),
        (["--tiers", "ssd"], "found 'ssd'"),
        (["--tiers", "cpu", "--swap", "{}"], "nothing is swapped"),
        (["--swap", "{}/none"], "none does not exist"),
        (["--swap", "{}/empty.txt"], "is not a folder"),
        (["--json", "{}"], "is a folder"),
        (["--json", "{}/none/result.json"], "cannot be written"),
        (["--device", "quantum"], "torch knows no such device"),
        (["--width", "33"], "a multiple of 32"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_exits_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    given = [argument.format(tmp_path) for argument in arguments]
    assert exit_status("demo", *TINY, *given) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and words in err and len(err.splitlines()) == 1
    assert "Traceback" not in out + err and "step" not in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_swap_folder_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert exit_status("demo", *TINY, "--swap", str(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from tierstore.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--verify" in done.stdout and done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("words", [(), ("checkpoint",)])
def test_no_command_at_all_shows_those_there_are(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The first thing that is typed once ended in a traceback."""
    assert exit_status(*words) == 2
    printed = capsys.readouterr()
    assert "Usage" in printed.out + printed.err and "Commands" in printed.out + printed.err


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tierstore", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"


# --- its parts


def test_text_is_cut_once_and_its_entropy_is_of_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(b"ab" * 500)
    text = read_text(path, context=9)
    assert text.training + text.heldout == b"ab" * 500 and len(text.heldout) == 100
    assert text.unigram_entropy == pytest.approx(0.6931, abs=1e-4)  # ln 2
    with pytest.raises(DemoError, match="at least 1,010 bytes"):
        read_text(path, context=100)


def test_model_of_a_seed_is_the_same_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    one, two = (make_model(Size(64, 2, 16), seed=7, device=torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(one.parameters(), two.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_heldout_loss_of_a_uniform_model_is_that_of_256_equal_bytes() -> None:
    model = make_model(Size(32, 1, 8), seed=0, device=torch.device("cpu"))
    torch.nn.init.zeros_(model.head.weight)
    *_, loss = heldout_losses(model, torch.arange(200, dtype=torch.uint8), batch=3, context=8)
    assert loss == pytest.approx(5.5452, abs=1e-4)  # ln 256


@pytest.mark.parametrize(
    ("tiers", "automatic"),
    [(None, "nvme"), (("gpu", "cpu", "nvme"), "nvme"), (("cpu",), "cpu"), (("gpu", "cpu"), "cpu"), (("gpu",), "gpu")],
)
def test_slowest_tier_gets_what_it_needs(tiers: tuple[str, ...] | None, automatic: str) -> None:
    settings = small_policy(40 << 20, tiers, device="cpu")
    assert settings["chunk_size"] == 512 << 10
    assert settings["tiers"][automatic]["capacity"] == "auto"
    faster = {"nvme": ["gpu", "cpu"], "cpu": ["gpu"], "gpu": []}[automatic]
    assert all(settings["tiers"][name]["capacity"] < 8 << 20 for name in faster)


@pytest.mark.parametrize("state_bytes", [8, 100_000, 1 << 20, 40 << 20, 80 << 30])
def test_policy_made_for_any_model_is_valid(state_bytes: int) -> None:
    policy = TierPolicy.load(small_policy(state_bytes, device="cpu"))
    assert isinstance(policy.chunk_size, int) and 16 << 10 <= policy.chunk_size <= 64 << 20


def test_meter_looks_at_the_recent_past_and_sums_up_the_whole() -> None:
    progress = progress_after(3 * WINDOW)
    assert progress.tokens_per_second == pytest.approx(100 / 8)
    assert progress.split.parts() == {"forward": 1.0, "backward": 2.0, "update": 4.0, "wait": 1.0}
    assert progress.seconds_left == 0
    route = progress.routes[0]
    assert (route.name, route.moves, route.bytes, route.bytes_per_second) == ("cpu->gpu", 2, 2000, 400.0)


def test_frame_fits_a_terminal_of_24_lines_and_80_columns() -> None:
    console = Console(file=io.StringIO(), width=74, color_system=None, markup=False)
    console.print(frame(progress_after(3)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 21 and max(map(len, lines)) <= 74
    names = [line.split("  ")[0] for line in lines if "->" in line]
    assert names == ["nvme -> cpu", "cpu -> gpu", "gpu -> cpu", "cpu -> nvme"]


def test_live_view_gives_the_terminal_back() -> None:
    screen = io.StringIO()
    with LiveView(Console(file=screen, force_terminal=True, width=80)) as view:
        view.begin("training")
        view.show(progress_after(3), "a note")
    shown = screen.getvalue()
    assert "a note" in shown and shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # cursor hidden, shown again


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([1.0], BARS[0]), ([2.0, 1.0], BARS[-1] + BARS[0]), ([3.0, float("nan"), 1.0], BARS[-1] + BARS[0])],
)
def test_curve_draws_what_is_finite(values: list[float], drawn: str) -> None:
    assert curve(values, 10) == drawn


def test_curve_is_never_wider_than_asked_and_sizes_have_units() -> None:
    values: list[Any] = list(range(1000))
    assert len(curve(values, 40)) == 40
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 MiB", "3.0 TiB"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--plain"], ["--json"]])
def test_a_standard_output_that_takes_nothing_is_one_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback."""
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it fails, too
    monkeypatch.setattr("sys.stdout", full)
    assert exit_status("demo", *TINY, *arguments) == 2
    with contextlib.suppress(OSError):
        full.close()
    assert "error: standard output cannot be written" in capsys.readouterr().err
