"""Ranks that live as long as the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes in a gloo group."""
    ranks = Ranks(2)
    yield ranks
    ranks.end()
