"""Jobs side by side: each on a thread and a core of its own, and nothing of it left on the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.fakes import FewThreads
from tierstore import cores
from tierstore.kernels import SHARED_ELEMENTS, Manner, update
from tierstore.rules import Pieces
from tierstore.rules.adam import AdamOptions, AdamWRule
from tierstore.scratch import Scratch

OPTIONS = AdamOptions("fused", True, 1e-2, 0.9, 0.999, 1e-8, 0.1, amsgrad=False, maximize=False)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(cores, "available", lambda: 2)
    yield
    torch.set_num_threads(before)


def test_each_job_has_a_thread_with_one_core_and_no_gradients() -> None:
    meeting, seen = threading.Barrier(2, timeout=60), []

    def run() -> None:
        meeting.wait()  # nobody passes before both are here
        seen.append((threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    with torch.no_grad():
        cores.side_by_side([run, run])
    assert len({thread for thread, *_ in seen}) == 2
    assert [rest for _, *rest in seen] == [[1, False]] * 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_a_job_is_raised_when_no_job_runs_any_more(failing: int) -> None:
    meeting, is_done = threading.Barrier(2, timeout=60), []

    def fail() -> None:
        meeting.wait()
        raise ValueError("of a job")

    def run() -> None:
        meeting.wait()
        torch.ones(1 << 20).sum()
        is_done.append(True)

    with pytest.raises(ValueError, match="of a job"):
        cores.side_by_side([fail, run] if failing == 0 else [run, fail])
    assert is_done and torch.get_num_threads() == 2


def test_without_a_thread_all_jobs_are_done_here_and_that_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cores._helpers.cache_clear()
    cores._tell_alone.cache_clear()
    seen: list[tuple[int, threading.Thread]] = []

    def run(number: int) -> None:
        seen.append((number, threading.current_thread()))

    with FewThreads():
        for _ in range(2):
            cores.side_by_side([partial(run, number) for number in range(3)])
    assert seen == [(number, threading.current_thread()) for number in range(3)] * 2
    assert caplog.text.count("updates go on with one thread: the thread 'tierstore-update-0' could not be") == 1
    assert torch.get_num_threads() == 2
    cores.side_by_side([partial(run, 3), partial(run, 4)])
    assert {thread for _, thread in seen[-2:]} > {threading.current_thread()}


@pytest.mark.parametrize(
    ("threads", "machine", "jobs", "shared"), [(2, 2, 9, 2), (1, 8, 9, 1), (4, 2, 9, 2), (4, 8, 1, 1)]
)
def test_jobs_are_shared_by_no_more_threads_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, machine: int, jobs: int, shared: int
) -> None:
    monkeypatch.setattr(cores, "available", lambda: machine)
    torch.set_num_threads(threads)
    assert cores.shared_by(jobs) == shared


def pieces(masters: str) -> Pieces:
    """A long parameter, and some short ones, of bfloat16; some of them overwritten since the last step."""
    generator = torch.Generator().manual_seed(3)
    lengths = [3 * SHARED_ELEMENTS + 1024 + 5, 700, 24, SHARED_ELEMENTS - 8]

    def random(dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(length, generator=generator).to(dtype) for length in lengths]

    whole = random()
    parameters = [master.bfloat16() for master in whole]
    for parameter in parameters:
        parameter[3::1000] = 2.5
    moments = {"exp_avg": random(), "exp_avg_sq": [value.abs() for value in random()]}
    steps = [torch.tensor(3.0)] * len(lengths)
    found = Pieces(parameters, random(torch.bfloat16), moments, [], steps)
    if masters == "float32":
        return found._replace(masters=whole)
    ties = [torch.zeros(-(-length // 8), dtype=torch.uint8) for length in lengths]
    return found._replace(remainders=[master.view(torch.int32).to(torch.int16) for master in whole], ties=ties)


def tensors(of: Pieces) -> list[Tensor]:
    lists = [of.parameters, of.masters, of.remainders, of.ties, of.gradients, *of.moments.values()]
    return [tensor for each in lists for tensor in each]


@pytest.mark.parametrize("masters", ["float32", "split"])
def test_tiles_updated_side_by_side_have_the_bits_of_one_after_another(masters: str) -> None:
    rule, meeting, threads = AdamWRule(), threading.Barrier(2, timeout=60), set()

    def formula(tile: Pieces, *, before: Callable[[], object]) -> None:
        before()
        rule.update(tile, OPTIONS, is_first=False, grad_scale=None)

    def meet_once() -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait()

    together, alone = pieces(masters), pieces(masters)
    manner = Manner(Scratch(), check_parameters=True, as_whole=True, in_any_order=True)
    with torch.no_grad():
        update(together, partial(formula, before=meet_once), manner)
        update(alone, partial(formula, before=int), Manner(Scratch(), check_parameters=True, as_whole=True))
    assert len(threads) == 2
    for one, other in zip(tensors(together), tensors(alone), strict=True):
        kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
        assert torch.equal(one.view(kind), other.view(kind))
