"""A fault at every I/O call of a step: the step survives it with the right bits, or reports it with all that is left.

The default run samples the calls; `-m long` makes each of them fail, and prints what became of the faults, by kind.
"""

from __future__ import annotations

import errno
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import SHORT
from tests.optimizer.cases import assert_same_parameters, same_bits
from tests.optimizer.test_faults import Run, assert_telling, attempt
from tierstore.errors import FailedStepError, PartialStateWarning, TierstoreError
from tierstore.io.base import Kind

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

FAULTS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "short": SHORT}


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("tiers", "stride"),
    [
        ("cpu nvme", 11),
        pytest.param("cpu nvme", 1, marks=pytest.mark.long),
        pytest.param("gpu cpu nvme", 1, marks=pytest.mark.long),
    ],
)
def test_a_fault_at_any_call_of_a_step_is_survived_or_reported(
    tiers: str, stride: int, fault: str, kind: Kind, lasts: bool, tmp_path: Path
) -> None:
    outcomes = Counter(_outcomes(tmp_path, tiers, stride, fault, kind, lasts))
    assert outcomes.total() > 10 // stride
    if not lasts or kind is Kind.WRITE or fault == "short":
        assert set(outcomes) == {"survived"}
    print(f"injected: {tiers}, {kind.value}, {fault}, {'for good' if lasts else 'once'}: {dict(outcomes)}")


def _outcomes(folder: Path, tiers: str, stride: int, fault: str, kind: Kind, lasts: bool) -> Iterator[str]:
    nth = 1
    while (outcome := _inject(folder, tiers, FAULTS[fault], nth, kind, lasts)) is not None:
        yield outcome
        nth += stride


def _inject(folder: Path, tiers: str, code: int, nth: int, kind: Kind, lasts: bool) -> str | None:
    """Let the nth request of a step fail; say what became of it, None if there were not so many."""
    run = Run(folder, tiers)
    try:
        saved = run.save()
        (run.engine.spoil if lasts else run.engine.fail)(code, nth=nth, kind=kind)
        error = attempt(run)
        if error is None:
            run.optimizer.store.wait()
            assert_same_parameters(run.parameters, run.theirs, f"request {nth}")
            if not run.engine.has_struck:
                return None
            run.step()  # and all is well with what was written elsewhere
            run.assert_right()
            return "survived"
        _assert_reported(run, error, folder, code)
        run.resume(saved)
        run.step()
        run.step()
        run.assert_right()
        return "reported"
    finally:
        run.optimizer.close()


def _assert_reported(run: Run, error: TierstoreError, folder: Path, code: int) -> None:
    """The error names everything, steps are refused, and all state but that of the chunk can be saved."""
    assert not isinstance(error, FailedStepError)
    assert_telling(error, folder, code)
    assert "cannot be read now" in str(error) and "offset" in str(error)
    run.optimizer.store.check()
    again = attempt(run)
    assert again is not None, "a step was not refused"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = run.optimizer.state_dict(partial=True)["state"]
    missing = next(one.message for one in caught if isinstance(one.message, PartialStateWarning)).missing
    assert len(missing) > 0 and all(name in str(error) for name in missing)
    assert len(state) + len(missing) == len(run.parameters)
    if run.optimizer.store.broken_off is None:  # nothing was used: what can be read is what was there
        whole = run.reference.state_dict()["state"]
        assert all(same_bits(state[key][name], whole[key][name]) for key in state for name in ("exp_avg", "exp_avg_sq"))
