"""Named tensors on a disk that fails: nothing is lost, errors are typed, and the books are right after every call."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.fakes import FaultyEngine
from tests.unit.test_tensors import CHUNK, KIB, TIERS, Trial, one_operation
from tierstore.build import Parts
from tierstore.errors import TransferError
from tierstore.io.base import Kind
from tierstore.tensors import TieredStore

CODES = (errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN, errno.ENOMEM)


class FaultyTrial(Trial):
    """Every operation may be refused because a request failed, and then changes nothing but where things are."""

    def __init__(self, tiers: dict[str, Any]) -> None:
        self.engine = FaultyEngine(threads=2, request_size=8 * KIB)
        self.failed = 0
        self.errors: list[TransferError] = []
        super().__init__(tiers, Parts(open_engine=lambda *_, **__: self.engine))

    @contextlib.contextmanager
    def refusable(self) -> Iterator[None]:
        with super().refusable():
            try:
                yield
            except TransferError as error:
                self.failed += 1
                self.errors.append(error)

    def prefetch(self, names: list[str]) -> None:
        with self.refusable():
            super().prefetch(names)

    def fail(self, code: int, kind: Kind | None, nth: int, times: int | None) -> None:
        self.engine.fail(code, kind=kind, nth=nth, times=times)

    def finish(self) -> None:
        """Heal the disk: whatever was put is there."""
        self.engine.heal()
        while True:
            failed = self.failed
            with self.refusable():
                self.store.wait()
            if failed == self.failed:
                break
        failed, refused = self.failed, self.refused
        super().finish()
        assert (failed, refused) == (self.failed, self.refused)
        assert all(error.errno and error.filename and error.strerror for error in self.errors)


class FaultyMachine(RuleBasedStateMachine):
    """Any operations and faults in any order. What is drawn must not depend on what has come of it: threads race."""

    tiers: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.trial = FaultyTrial(self.tiers)

    @rule(seed=st.integers(0, 9999))
    def operate(self, seed: int) -> None:
        one_operation(self.trial, random.Random(seed))

    @invariant()
    def agrees(self) -> None:
        self.trial.check()

    def teardown(self) -> None:
        self.trial.finish()

    @rule(
        code=st.sampled_from(CODES),
        kind=st.sampled_from([Kind.READ, Kind.WRITE, None]),
        nth=st.integers(1, 6),
        times=st.sampled_from([1, 2, 3, 10, None]),
    )
    def fail(self, code: int, kind: Kind | None, nth: int, times: int | None) -> None:
        self.trial.fail(code, kind, nth, times)

    @rule(most_bytes=st.sampled_from([0, 4096, 5000]))
    def shorten(self, most_bytes: int) -> None:
        self.trial.engine.shorten(most_bytes)

    @rule()
    def heal(self) -> None:
        self.trial.engine.heal()


@pytest.mark.parametrize(
    ("name", "examples"),
    [
        ("cpu and nvme", 15),
        ("gpu, cpu and nvme", 10),
        pytest.param("cpu and nvme", 600, marks=pytest.mark.long),
        pytest.param("gpu, cpu and nvme", 600, marks=pytest.mark.long),
        pytest.param("all growing", 300, marks=pytest.mark.long),
        pytest.param("gpu and nvme", 300, marks=pytest.mark.long),
    ],
)
def test_any_operations_and_faults_lose_nothing(name: str, examples: int) -> None:
    machine = type("Machine", (FaultyMachine,), {"tiers": TIERS[name]}).TestCase
    machine.settings = settings(
        max_examples=examples, stateful_step_count=60, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine().runTest()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_a_thousand_random_operations_on_a_failing_disk_lose_nothing(seed: int) -> None:
    chance = random.Random(seed)
    trial = FaultyTrial(TIERS[chance.choice(sorted(TIERS.keys() - {"cpu"}))])
    for _ in range(1000):
        if chance.random() < 0.05:
            trial.fail(chance.choice(CODES), chance.choice([*Kind, None]), chance.randint(1, 9), chance.randint(1, 6))
        one_operation(trial, chance)
        trial.check()
    trial.finish()
    assert trial.failed or seed > 1


def test_a_path_that_could_not_be_read_for_a_while_is_used_again_once_it_can() -> None:
    """After some reads nothing more is written there either, so that what leaves memory has nowhere to go."""
    trial, chance = FaultyTrial(TIERS["cpu and nvme"]), random.Random(3)
    for number in range(20):
        trial.store.put(f"{number}", torch.full((CHUNK // 4,), float(number)))
        trial.expected[f"{number}"] = torch.full((CHUNK // 4,), float(number))
    trial.store.wait()
    trial.fail(errno.EIO, Kind.READ, 1, None)
    for number in range(8):
        trial.get(f"{number}")
    assert trial.failed >= 3
    assert any(path.is_shunned for path in trial.store.stats().paths.values())
    trial.engine.heal()
    failed, refused = trial.failed, trial.refused
    for _ in range(3):
        for name in chance.sample(list(trial.expected), len(trial.expected)):
            trial.get(name)
            trial.check()
    assert trial.refused == refused and trial.failed <= failed + 1  # one more call may hear of it
    trial.finish()


def test_changes_that_could_not_be_scattered_in_time_are_told_of_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    """The lease ends in the middle of a run, so that the error is raised to nobody."""
    engine = FaultyEngine()
    tiers = TIERS["cpu and nvme"]
    with TieredStore({"chunk_size": CHUNK, "tiers": tiers}, parts=Parts(open_engine=lambda *_, **__: engine)) as store:
        store.put("large", torch.zeros(10 * CHUNK // 4))
        store.put("small", torch.zeros(10))
        with contextlib.ExitStack() as leases:
            leases.enter_context(store.lease("large")).fill_(1)
            (piece,) = store._values["small"].pieces
            store.run([piece.chunk], (), lambda *_: leases.close())
        engine.fail(errno.EBADF, kind=Kind.READ, times=None)
        with contextlib.suppress(TransferError):
            store.get("small")
        assert "what was put off while the store was busy has failed" in caplog.text
        assert "the changes of 'large' are kept in memory" in caplog.text
        engine.heal()
        assert torch.equal(store.get("large"), torch.ones(10 * CHUNK // 4))
        store.evict("large")
        store.check()
