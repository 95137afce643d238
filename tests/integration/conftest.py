"""Ranks that live as long as the tests that need them, and what every framework's tests have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.ranks import Ranks
from tests.integration.tiny import assert_same_models, fused, fused_without_scaling, largest_difference, tiered
from tierstore import TieredAdamW

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1")  # read on import

DIFFERENCE = "largest absolute difference of any weight, resumed and uninterrupted"
Make = Callable[[Any], torch.optim.Optimizer]
Pair = Callable[..., tuple[Make, Make]]
NoteDifference = Callable[[float], None]
AssertResumed = Callable[[nn.Module, nn.Module], None]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in a gloo group."""
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """In every test here."""


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Tell what makes an optimizer under test, and what makes its reference; close all that was made in the end."""
    made: list[TieredAdamW] = []

    def tell(tiers: str = "cpu-nvme", **options: Any) -> tuple[Make, Make]:
        def make(parameters: Any) -> TieredAdamW:
            made.append(tiered(parameters, tmp_path, tiers, **options))
            return made[-1]

        return make, fused if options.get("fused") else fused_without_scaling

    yield tell
    for optimizer in made:
        optimizer.close()


@pytest.fixture
def note_difference(request: pytest.FixtureRequest) -> NoteDifference:
    """Note how far a resumed run's weights are from the uninterrupted one's, for the table at the end."""
    return lambda difference: request.node.user_properties.append((DIFFERENCE, difference))


@pytest.fixture
def assert_resumed(note_difference: NoteDifference) -> AssertResumed:
    """Compare the weights of a resumed run with the uninterrupted one's."""

    def check(resumed: nn.Module, uninterrupted: nn.Module) -> None:
        note_difference(largest_difference(resumed, uninterrupted))
        assert_same_models(resumed, uninterrupted)

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what was noted."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    noted = [(value, report.nodeid) for report in reports for key, value in report.user_properties if key == DIFFERENCE]
    if noted:
        terminalreporter.section(DIFFERENCE)
    for value, name in noted:
        terminalreporter.write_line(f"{value:<8g} {name.rpartition('/')[-1]}")
