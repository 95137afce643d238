"""What is chosen from measured rates, by tables."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.placement import auto_chunk_bytes
from tierstore.policy import IoSettings, TierPolicy
from tierstore.rates import MachineRates, PathRates, Rates, SizeRates
from tierstore.tuning import Tuning, per_second, tune

KIB, MIB, GB = 1 << 10, 1 << 20, 1e9
TIB = 1 << 40
SIZES = (512 * KIB, 2 * MIB, 4 * MIB, 8 * MIB)


def path(best: float, *, small: float = 1.0, alone: float = 1e-3, sizes: tuple[int, ...] = SIZES) -> PathRates:
    """A path of `best` bytes per second; its smallest request reads at a share of that."""
    rates = [SizeRates(size, alone, best * (small if size == sizes[0] else 1.0)) for size in sizes]
    return PathRates(1e-4, best, best, tuple(rates))


def tuned(*paths: PathRates, capacity: int | None = None, machine: MachineRates | None = None, **policy: Any) -> Tuning:
    io = policy.pop("io", {})
    policy = {"tiers": {"cpu": {}, "nvme": {"io": io}}, **policy}
    rates = Rates({str(number): path for number, path in enumerate(paths)}, machine, "2026-01-01")
    result = tune(rates, TierPolicy.load(policy), state_bytes=TIB, capacity_bytes=capacity)
    assert result is not None
    return result


def test_without_a_measured_path_nothing_is_chosen() -> None:
    machine = MachineRates(GB, 2, GB, None)
    assert tune(Rates({}, machine, None), TierPolicy.load(None), state_bytes=TIB, capacity_bytes=None) is None


@pytest.mark.parametrize(
    ("rate", "alone", "size", "depth"),
    [
        (2 * GB, 3e-3, 4 * MIB, 4),  # 2e9 x 8 ms / 4 MiB = 3.8
        (4 * GB, 3e-3, 8 * MIB, 4),
        (4 * GB, 3e-3, 4 * MIB, 8),
        (20 * GB, 2e-3, 8 * MIB, 17),
        (20 * GB, 30e-3, 8 * MIB, 32),  # 83, and nobody gains by so many
        (1e8, 10e-3, 8 * MIB, 4),  # 0.2, and a read and a write should be on their way while two begin
    ],
)
def test_depth_is_bandwidth_times_latency(rate: float, alone: float, size: int, depth: int) -> None:
    result = tuned(path(rate, alone=alone), io={"request_size": size})
    assert result.queue_depth.value == depth
    assert per_second(rate) in result.queue_depth.why and f"{alone * 1e3:.2f} ms" in result.queue_depth.why


def test_as_many_threads_as_requests_and_none_for_libaio() -> None:
    assert tuned(path(20 * GB, alone=2e-3)).threads.value == tuned(path(20 * GB, alone=2e-3)).queue_depth.value > 8
    assert tuned(path(20 * GB), io={"engine": "libaio"}).threads.value == 1
    assert tuned(path(GB), io={"queue_depth": 40}).threads.value == 40


@pytest.mark.parametrize(
    ("rate", "small", "size"),
    [
        (2e8, 1.0, 512 * KIB),  # all reach the best rate, and a request takes 2.6 ms beside 30 us of Python
        (2e8, 0.96, 512 * KIB),
        (2e8, 0.9, 2 * MIB),
        (2 * GB, 1.0, 4 * MIB),  # 30 us are 2 % of 1.5 ms, in which 3 MiB go over
        (4 * GB, 1.0, 8 * MIB),
        (40 * GB, 1.0, 8 * MIB),  # none is large enough: the largest that is fast
    ],
)
def test_request_is_the_smallest_that_is_fast_and_cheap(rate: float, small: float, size: int) -> None:
    assert tuned(path(rate, small=small)).request_size.value == size


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ([[2.40, 2.35, 2.20, 2.04]], 2 * MIB),
        ([[2.40, 2.10, 2.04, 2.04]], 512 * KIB),
        ([[3.00, 4.09, 2.86, 2.80], [3.00, 4.08, 2.85, 2.80]], 2 * MIB),
        ([[9.00, 9.00, 9.10, 8.70]], 8 * MIB),
    ],
)
def test_a_slower_request_is_not_taken_for_its_python(rates: list[list[float]], size: int) -> None:
    """Where no size was both fast and cheap, the largest was taken: 8 MiB at 2.04 GB/s beside 512 KiB at 2.40."""
    paths = [
        PathRates(1e-4, GB, GB, tuple(SizeRates(one, 1e-3, rate * GB) for one, rate in zip(SIZES, own, strict=True)))
        for own in rates
    ]
    chosen = tuned(*paths).request_size
    assert chosen.value == size
    assert chosen.why.startswith("the largest that reads within 5 % of the best rate, for the least Python")


def test_only_sizes_that_all_paths_know_are_compared() -> None:
    slow, fast = path(5e7, sizes=SIZES[:1]), path(9 * GB)
    assert tuned(slow, fast).request_size.value == SIZES[0]
    assert tuned(path(5e7, sizes=SIZES[:1]), path(9 * GB, sizes=SIZES[1:])).request_size.value == SIZES[1]


@pytest.mark.parametrize(
    ("rate", "capacity", "chunk"),
    [
        (5e7, None, 512 * KIB),  # 0.5 ms of Python and latency are 5 % of 10 ms
        (5e8, None, 8 * MIB),
        (2 * GB, None, 32 * MIB),
        (40 * GB, None, 64 * MIB),
        (2 * GB, 128 * MIB, 8 * MIB),  # 16 must fit the tier that computes
        (2 * GB, 8 * MIB, 512 * KIB),
        (5e7, 8 * MIB, 512 * KIB),
    ],
)
def test_chunk_is_large_beside_its_python_and_small_beside_its_tier(
    rate: float, capacity: int | None, chunk: int
) -> None:
    result = tuned(path(rate), capacity=capacity)
    assert result.chunk_size.value == chunk
    assert ("16 fit" in result.chunk_size.why) == (capacity is not None and rate > 1e8)


def test_requests_no_larger_than_a_chunk_count_for_the_depth() -> None:
    """A tier of 16 MiB has chunks of 1 MiB, and a request is never more: it takes more of them to fill the line."""
    small, large = tuned(path(2 * GB), capacity=16 * MIB), tuned(path(2 * GB))
    assert small.request_size.value == large.request_size.value == 4 * MIB
    assert (small.queue_depth.value, large.queue_depth.value) == (12, 4)


@pytest.mark.parametrize(
    ("key", "value", "policy"),
    [
        ("request_size", 12288, {"io": {"request_size": 12288}}),
        ("queue_depth", 3, {"io": {"queue_depth": 3}}),
        ("threads", 11, {"io": {"threads": 11}}),
        ("chunk_size", 20480, {"chunk_size": 20480}),
    ],
)
def test_what_the_policy_says_wins(key: str, value: int, policy: dict[str, Any]) -> None:
    choice = getattr(tuned(path(9 * GB), **policy), key)
    assert (choice.value, choice.why) == (value, "as the policy says")


def test_pipeline_holds_what_is_on_its_way_and_never_more_memory_than_without_rates() -> None:
    assert tuned(path(2 * GB)).prefetch.value == 8
    deep = tuned(path(20 * GB, alone=5e-3), chunk_size=8 * MIB)
    assert deep.prefetch.value == 16 and "from 8 to 16" in deep.prefetch.why
    assert tuned(path(20 * GB, alone=5e-3), chunk_size=64 * MIB).prefetch.value == 8
    assert tuned(*[path(GB, alone=1e-3) for _ in range(5)], chunk_size=16 * MIB).prefetch.value == 13


@pytest.mark.parametrize(
    ("elements", "spared", "words"),
    [
        (2e9, 1e9, "the disks bind: .* 125 million .* 2,000 million .* 4 threads, 1,000 million with a core left free"),
        (1e8, None, "arithmetic binds: .* 100 million .* 4 threads$"),
        (1e8, 2e8, "the disks bind"),
    ],
)
def test_what_binds_is_said_with_its_numbers(elements: float, spared: float | None, words: str) -> None:
    bound = tuned(path(2 * GB), machine=MachineRates(GB, 4, elements, spared)).bound
    assert re.search(words, bound), bound


rates = st.floats(1e-3, 1e15)
sizes = st.lists(st.sampled_from(SIZES), min_size=1, unique=True).map(sorted)
paths = st.builds(
    lambda latency, write, mixed, sizes, alone, read: PathRates(
        latency, write, mixed, tuple(SizeRates(size, alone, read) for size in sizes)
    ),
    *(st.floats(1e-9, 1e6), rates, rates, sizes, st.floats(1e-9, 1e6), rates),
)


@settings(max_examples=60)
@given(
    paths=st.lists(paths, min_size=1, max_size=5), capacity=st.none() | st.integers(1, TIB), state=st.integers(1, TIB)
)
def test_whatever_was_measured_is_a_policy_that_can_be_carried_out(
    paths: list[PathRates], capacity: int | None, state: int
) -> None:
    found = Rates({str(number): path for number, path in enumerate(paths)}, None, "2026-01-01")
    result = tune(found, TierPolicy.load({"tiers": {"nvme": {}}}), state_bytes=state, capacity_bytes=capacity)
    assert result is not None
    IoSettings(
        queue_depth=result.queue_depth.value, threads=result.threads.value, request_size=result.request_size.value
    )
    assert result.chunk_size.value <= auto_chunk_bytes(state, capacity)
    assert 8 <= result.prefetch.value <= 16
    assert all(choice.why for choice in result)
