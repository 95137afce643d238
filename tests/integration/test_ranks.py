"""The tests' own way to run ranks: errors of one rank are shown, and do not hang or spoil the next call."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from tests.integration.ranks import Ranks

pytestmark = pytest.mark.long  # each starts its ranks twice


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def _die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_error_of_a_rank_is_shown_and_the_next_call_works(two_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="rank one is unwell"):
        two_ranks.run(_fail_on_rank_one)
    assert two_ranks.run(_sum_of_ranks) == [1.0, 1.0]


def test_end_of_a_rank_is_told(two_ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="exit code 7"):
        two_ranks.run(_die_on_rank_one)
