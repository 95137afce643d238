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
from tierstore.top.job import exists, state_of
from tierstore.top.view import draw

HERE = Job(socket.gethostname(), os.getpid(), 0, psutil.Process().create_time())


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["top", *arguments])
    return int(exit_.value.code or 0)


def text_of(words: str = "", *, width: int = 100, steps: int = 2) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False, force_terminal=False)
    console.print(draw(picture_of(HERE, words=words, steps=steps), "running", is_well=True, width=width))
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
        (b'{"format": "tierstore monitor 1", "time": NaN}', "NaN is no number"),
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
        assert job.wait() == 0
    os.close(ours)
    assert b"Traceback" not in shown and shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1  # the cursor
