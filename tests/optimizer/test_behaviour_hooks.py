"""What torch checks of all its optimizers, checked of ours: hooks of all kinds, and copies, which have none.

In both settings; torch's own AdamW is the judge.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optimizer.cases import seeded, set_gradients
from tests.optimizer.settings import (
    EVERY_SETTING,
    Make,
    assert_same_optimizers,
    backward,
    fused,
    go_on,
    network,
    parameters_of,
    trained,
)

pytestmark = pytest.mark.usefixtures("swap_folder")

# -- hooks ------------------------------------------------------------------------------------------------------


def listen(optimizer: Any, hook: Callable[..., Any]) -> list[Any]:
    """Register one hook of every kind an optimizer has."""
    return [
        optimizer.register_step_pre_hook(hook),
        optimizer.register_step_post_hook(hook),
        optimizer.register_state_dict_pre_hook(hook),
        optimizer.register_state_dict_post_hook(hook),
        optimizer.register_load_state_dict_pre_hook(hook),
        optimizer.register_load_state_dict_post_hook(hook),
    ]


def overheard(make: Make) -> list[Any]:
    """What hooks of all kinds hear, in order: who, with how many arguments, and the numbers they see."""
    model = network()
    optimizer = make(model.parameters(), lr=1e-2)
    heard: list[Any] = []

    def hook(name: str) -> Callable[..., None]:
        def hear(given: Any, *rest: Any) -> None:
            assert given is optimizer
            kinds = [sorted(one) if isinstance(one, dict) else len(one) for one in rest]
            first = next(model.parameters())
            heard.append((name, kinds, float(first.detach().sum()), sorted(optimizer.state[first])))

        return hear

    step_hooks = {
        "global pre": register_optimizer_step_pre_hook,
        "global post": register_optimizer_step_post_hook,
        "pre": optimizer.register_step_pre_hook,
        "post": optimizer.register_step_post_hook,
    }
    other_hooks = {
        "saving": optimizer.register_state_dict_pre_hook,
        "saved": optimizer.register_state_dict_post_hook,
        "loading": optimizer.register_load_state_dict_pre_hook,
        "loaded": optimizer.register_load_state_dict_post_hook,
    }
    handles = [register(hook(f"{name} {number}")) for number in (1, 2) for name, register in step_hooks.items()]
    for number in (1, 2, 3):
        handles += [register(hook(f"{n} {number}"), prepend=number == 2) for n, register in other_hooks.items()]

    def use() -> None:
        optimizer.zero_grad()
        backward(model, 0)
        optimizer.step()
        optimizer.step(closure=lambda: heard.append("closure"))
        optimizer.load_state_dict(optimizer.state_dict())
        heard.append("done")

    try:
        use()
        for handle in handles[::2]:
            handle.remove()
        use()
    finally:  # global hooks outlive a failure
        for handle in handles:
            handle.remove()
    use()
    return heard


@EVERY_SETTING
def test_hooks_of_all_kinds_hear_what_they_hear_from_torch(setting: Make) -> None:
    """In the same order, prepended or not, with the same arguments, and no more once their handles are removed."""
    heard = overheard(setting)
    assert heard == overheard(fused)
    assert [one[0] for one in heard if isinstance(one, tuple)][:4] == ["global pre 1", "global pre 2", "pre 1", "pre 2"]
    assert heard[-2:] == ["closure", "done"]


@EVERY_SETTING
def test_hooks_may_change_what_is_saved_and_loaded(setting: Make) -> None:
    def run(make: Make) -> tuple[dict[str, Any], Any]:
        model, optimizer = trained(make)
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, saved: {
                "state": {key: {**f, "exp_avg": f["exp_avg"] * 2} for key, f in saved["state"].items()},
                "param_groups": [{**group, "lr": 0.5} for group in saved["param_groups"]],
            }
        )
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        go_on(model, optimizer, range(2, 4))
        return saved, optimizer

    (saved, mine), (wanted, theirs) = run(setting), run(fused)
    assert saved["extra"] == wanted["extra"] == 1
    assert mine.param_groups[0]["lr"] == 0.5
    assert_same_optimizers(mine, theirs)


@EVERY_SETTING
def test_a_step_hook_may_change_gradients_and_options(setting: Make) -> None:
    """As clippers and schedulers written as hooks do."""

    def run(make: Make) -> Any:
        parameters = seeded((5000,), (7,))
        optimizer = make(parameters, lr=1e-2)

        def halve(given: Any, args: Any, kwargs: Any) -> None:
            for parameter in parameters_of(given):
                assert isinstance(parameter.grad, Tensor)
                parameter.grad = parameter.grad.clamp(-0.5, 0.5)
            given.param_groups[0]["lr"] *= 0.5

        optimizer.register_step_pre_hook(halve)
        for step in range(3):
            set_gradients(parameters, step)
            optimizer.step()
        return optimizer

    assert_same_optimizers(run(setting), run(fused))


# -- copies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@EVERY_SETTING
def test_copies_go_on_alike_without_the_hooks(setting: Make, how: str) -> None:
    model, optimizer = trained(setting, amsgrad=True, foreach=True)
    if how == "deepcopy":  # a function of a test cannot be pickled, and torch leaves hooks out of both in the same way
        listen(optimizer, lambda *_: pytest.fail("a copy has no hooks"))
        twin, again = copy.deepcopy((model, optimizer))
    else:
        twin, again = pickle.loads(pickle.dumps((model, optimizer)))
    assert type(again) is setting and again.defaults == optimizer.defaults
    assert parameters_of(again)[0] is next(twin.parameters())
    go_on(twin, again, range(2, 4))
    again.load_state_dict(again.state_dict())
    fresh = copy.deepcopy(again)
    go_on(model, trained_on(optimizer), range(2, 4))
    assert_same_optimizers(again, optimizer)
    assert_same_optimizers(fresh, optimizer)


def trained_on(optimizer: Any) -> Any:
    """The same optimizer, its hooks taken away."""
    for name in vars(optimizer):
        if name.endswith("_hooks"):
            getattr(optimizer, name).clear()
    return optimizer


@EVERY_SETTING
def test_no_attribute_ever_hides_the_state(setting: Make) -> None:
    """torch assigns `state` in its constructor, in loads and in `__setstate__`; what is left in `__dict__` stays."""
    model, optimizer = trained(setting)
    twin, copied = copy.deepcopy((model, optimizer))
    loaded = setting(network().parameters())
    loaded.load_state_dict(optimizer.state_dict())
    emptied = pickle.loads(pickle.dumps(optimizer))
    emptied.state = {}
    for one in (optimizer, copied, loaded, emptied):
        assert "state" not in vars(one)
    go_on(twin, copied, range(2, 3))
    assert [len(one.state) for one in (optimizer, copied, loaded, emptied)] == [5, 5, 5, 0]
    assert copied.state[next(twin.parameters())]["step"] == 3
