"""The bar of a long save or load: on a terminal, and only once it has taken a while."""

from __future__ import annotations

import io
import sys

import pytest

from tests.fakes import FewThreads
from tierstore import progress
from tierstore.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "quiet_seconds", "is_shown"),
    [(Terminal(), -1.0, True), (Terminal(), 60.0, False), (io.StringIO(), -1.0, False)],
)
def test_a_bar_is_shown_on_a_terminal_alone_and_not_for_what_is_over_soon(
    stream: io.StringIO, quiet_seconds: float, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "QUIET_SECONDS", quiet_seconds)
    monkeypatch.setenv("TERM", "xterm")
    with Bar("saving it", 2000) as bar:
        bar.add(500)
        bar.add(1500)
    assert ("saving it" in stream.getvalue()) == is_shown and bool(stream.getvalue()) == is_shown


def test_without_a_thread_to_draw_it_nothing_is_shown_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    with FewThreads() as few, Bar("saving it", 2000) as bar:
        bar.add(500)
        bar.add(1500)
    assert len(few.refused) == 1
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")  # the cursor is there again
    assert sys.stderr is stream
