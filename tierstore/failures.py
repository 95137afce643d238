"""What is told of a step that broke off: which parameters it updated, in whole and in part, and how to go on."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.binding import Binding
from tierstore.errors import FailedStepError, text_of
from tierstore.update import StepWork


def tell_failure(binding: Binding, works: Sequence[StepWork], error: BaseException) -> str | None:
    """If anything was updated before the error, say which parameters, and refuse steps until state is loaded.

    Returns what further steps will say. `works` are of this binding.
    """
    used = binding.store.broken_off or ()
    touched = set[int]().union(*(work.touched(used) for work in works))
    if isinstance(error, FailedStepError) or (binding.store.broken_off is None and not touched):
        return None
    finished = set[int]().union(*(work.finished for work in works))
    gone = " (whose gradients are gone: free_gradients)" if binding.policy.free_gradients and finished else ""
    story = (
        f"parameters and state no longer belong to one step. Updated: {binding.names_of(sorted(touched & finished))}"
        f"{gone}; in part: {binding.names_of(sorted(touched - finished))}; all others not. Load parameters and "
        f"optimizer state from a checkpoint: load_state_dict() allows steps again"
    )
    failure = f"an earlier step broke off ({text_of(error)}), so {story}"
    binding.store.fail(failure)
    error.add_note(f"this step broke off, so {story}")
    return failure
