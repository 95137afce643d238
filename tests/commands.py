"""The command line, run in the tests' own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierstore.cli import main


def exit_status(*arguments: str | Path) -> int:
    """Run a command and return its exit status."""
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, arguments)])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def json_on_stdout(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON on stdout, which is all there is."""
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer
