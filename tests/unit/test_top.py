"""`tierstore top`: says how a job is, obeys nothing that a file says, ends when the job or its reader does."""

from __future__ import annotations

import io
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.unit.runs import picture_of, record_of, write
from tierstore.cli import main
from tierstore.history import Job
from tierstore.seen import SeenError, read_picture, read_record
from tierstore.top.job import State, exists, fitting, state_of
from tierstore.top.view import draw

HERE = Job(socket.gethostname(), os.getpid(), 0, psutil.Process().create_time())


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["top", *arguments])
    return int(exit_.value.code or 0)


def text_of(words: str = "", *, width: int = 100, steps: int = 2, is_measured: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, force_terminal=False)
    picture = picture_of(HERE, words=words, steps=steps, is_measured=is_measured)
    console.print(draw(picture, "running", is_well=True, width=width))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ended", "is_there", "age", "words", "is_well", "is_over"),
    [
        (False, True, 1.0, "running", True, False),
        (False, None, 1.0, "running", True, False),
        (False, True, 60.0, "stale: nothing new for 60 s", False, False),
        (False, None, 60.0, "stale", False, False),
        (False, False, 1.0, "gone", False, True),
        (True, False, 1e6, "ended", True, True),
    ],
)
def test_state_of_a_job(ended, is_there, age, words, is_well, is_over):
    picture = picture_of(HERE, ended=ended)
    state = state_of(picture, now=picture.time + age, exists=lambda job: is_there)
    assert state.text.startswith(words) and (state.is_well, state.is_over) == (is_well, is_over)


def test_job_is_its_process_and_no_later_one_of_its_number():
    assert exists(HERE) is True
    assert exists(Job(HERE.host, HERE.pid, 0, HERE.started - 100.0)) is False
    assert exists(Job("elsewhere", HERE.pid, 0, HERE.started)) is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert exists(Job(HERE.host, gone.pid, 0, time.time())) is False
    assert exists(Job(HERE.host, -5, 0, time.time())) is False


def test_picture_shows_tiers_routes_waits_and_decisions():
    text = text_of()
    shown = ["step 40", "2.00 steps/s", "gpu", "7.0 GiB", "cpu->nvme", "0.50", "wait for read", "0.200", "bound by"]
    for words in (*shown, "/mnt/nvme1", "room moves", "it was full"):
        assert words in text


def test_picture_before_the_second_step_has_no_rates():
    assert "no step timed yet" in text_of(steps=0)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_picture_fits_the_terminal(width):
    assert max(map(len, text_of(width=width).splitlines())) <= min(width, 100)


@pytest.mark.parametrize("width", range(30, 100, 7))
def test_narrow_picture_leaves_out_whole_columns_and_cuts_no_number(width):
    """Half a number is another one: whatever has a digit in a table is as it is in the widest picture."""

    def numbers(width: int) -> set[str]:
        lines = text_of(width=width).splitlines()[1:]
        tables = lines[: next(number for number, line in enumerate(lines) if "spilled" in line)]
        return {word for line in tables for word in line.split() if any(map(str.isdigit, word))}

    assert numbers(width) <= numbers(100)


@pytest.mark.parametrize("width", [40, 100])
def test_picture_shows_pressure_where_it_was_measured(width):
    text = text_of(width=width)
    (line,) = [line for line in text.splitlines() if "90 %" in line]
    assert "cpu" in line and "━━━━━━━" in line
    words = " ".join(text.replace("│", " ").split())
    for shown in ("1,500 chunks spilled, 12 promoted", "the container's limit (cgroup v2)", "cpu shrinks:"):
        assert shown in words
    assert "pressure" not in text_of(width=width, is_measured=False)


def test_low_terminal_has_what_is_wanted_most():
    """As many lines as there are, with what was decided and pressure; nothing is cut at the end."""
    picture = picture_of(HERE)
    found = {}
    for lines in (20, 25, 28, 60):
        console = Console(file=io.StringIO(), width=80, height=lines, markup=False)
        console.print(fitting(picture, State("running"), console))
        found[lines] = console.file.getvalue()  # type: ignore[attr-defined]
        assert len(found[lines].splitlines()) < lines
    assert "/mnt/nvme1" in found[60] and "/mnt/nvme1" not in found[25]
    assert "cpu->nvme" in found[25] and "at 93 %" in found[25]
    assert "pressure on" in found[20] and "wait for read" in found[20]


def test_what_a_terminal_would_obey_is_not_shown():
    text = text_of("\x1b[2J\x1b]0;title\x07\u202e[bold]x")
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]x" in text.replace("\n", "")


def test_once_prints_one_picture_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "live.json", picture_of(HERE, time=time.time()))
    assert call(str(path), "--once") == 0
    text = capsys.readouterr().out
    assert "running" in text and "\x1b" not in text


def test_lines_end_with_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert call(str(write(tmp_path / "live.json", picture_of(HERE, ended=True)))) == 0
    assert capsys.readouterr().out.count("step 40") == 1
    gone = picture_of(Job(HERE.host, HERE.pid, 0, HERE.started - 100.0))
    assert call(str(write(tmp_path / "live.json", gone))) == 1
    assert "gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read (No such file"),
        (b"", "is not JSON"),
        (b'{"format": "tierstore monitor 1", "pid"', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"format": "tierstore monitor 1", "time": NaN}', "NaN is no number of a job's"),
        (b"[1]", "found format 'None'"),
        (b'{"format": "tierstore monitor 99"}', "found format 'tierstore monitor 99'"),
        (b'{"format": "tierstore record 1"}', "`tierstore report` shows it"),
        (b'{"format": "tierstore monitor 1"}', "written by another version"),
    ],
)
def test_file_that_no_job_wrote_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], content, words):
    path = tmp_path / "live.json"
    if content is not None:
        path.write_bytes(content)
    assert call(str(path), "--once") == 2
    error = capsys.readouterr().err
    assert words in error and str(path) in error and error.count("\n") == 1


def test_what_was_written_is_what_is_read(tmp_path: Path):
    picture, record = picture_of(HERE), record_of()
    assert read_picture(write(tmp_path / "live.json", picture)) == picture
    assert read_record(write(tmp_path / "run.json", record)) == record
    with pytest.raises(SeenError, match="tierstore top"):
        read_record(tmp_path / "live.json")


def test_ctrl_c_ends_a_live_view_cleanly(tmp_path: Path):
    """On a real terminal, once the first picture has been drawn."""
    path = write(tmp_path / "live.json", picture_of(HERE, time=time.time()))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tierstore", "top", str(path)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    ) as job:
        os.close(theirs)
        shown = b""
        while b"it was full" not in shown:
            shown += os.read(ours, 4096)
        job.send_signal(signal.SIGINT)
        try:
            while more := os.read(ours, 4096):
                shown += more
        except OSError:  # the other end is closed
            pass
        assert job.wait() == 0, shown
    os.close(ours)
    assert b"Traceback" not in shown and shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1  # the cursor
