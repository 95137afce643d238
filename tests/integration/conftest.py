"""Ranks that live as long as the tests that need them, and what every framework's tests have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.integration.ranks import Ranks
from tests.integration.tiny import assert_same_models, largest_difference

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1")  # read on import

AssertResumed = Callable[[nn.Module, nn.Module], None]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in a gloo group."""
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A second thread of torch's spins when the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def assert_resumed(record_property: Callable[[str, object], None]) -> AssertResumed:
    """Compare a resumed model with the uninterrupted one, and note their largest difference in the JUnit report."""

    def check(resumed: nn.Module, uninterrupted: nn.Module) -> None:
        record_property("largest difference of resumed and uninterrupted", largest_difference(resumed, uninterrupted))
        assert_same_models(resumed, uninterrupted)

    return check
