"""What torch's AdamW refuses is refused with its error, and state that does not fit is, with everything unchanged.

One table of bad input drives both classes. A state dict is refused where torch would fail later, restart moments in
silence or write beyond its memory; it is accepted exactly where torch accepts it and the run goes on as with torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.beside import assert_same_state_dicts, cloned, nothing_changes, tiered, torchs
from tests.optimizer.cases import assert_same_parameters, seeded, set_gradients, train
from tierstore.errors import CapacityError, StateDictError
from tierstore.optimizer import TieredAdamW
from tierstore.pressure import HostMemory

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

SHAPES: list[tuple[int, ...]] = [(60, 250), (4, 5)]


def error_of(attempt: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which, the caller compares
        attempt()
    return caught.value


def assert_refused_alike(attempt: Callable[[type[torch.optim.AdamW]], Any]) -> None:
    """Compare the errors that an attempt with torch's class and with ours ends in: type and text."""
    wanted, found = error_of(lambda: attempt(torch.optim.AdamW)), error_of(lambda: attempt(TieredAdamW))
    assert type(found) is type(wanted)
    owner = torch.optim.AdamW.step.__qualname__.partition(".")[0]  # the class that defines `step`: Adam since torch 2.7
    ours = str(found).replace("TieredAdamW", "AdamW").replace("TieredOptimizer.zero_grad", "Optimizer.zero_grad")
    ours = ours.replace("TieredOptimizer", owner)
    assert ours == str(wanted)


# -- construction -----------------------------------------------------------------------------------------------

BEYOND_FLOAT32 = torch.tensor(1e300, dtype=torch.float64)
NAN = math.nan
WRONG_OPTIONS: list[dict[str, Any]] = [
    *[{"lr": lr} for lr in (-1.0, -1, NAN, torch.tensor(-1.0), torch.tensor(NAN), torch.zeros(2), torch.zeros(0))],
    *[{"lr": lr} for lr in ("0.1", None, [0.1], 1j)],
    *[{"betas": betas} for betas in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (0.9, -0.1), (NAN, 0.9), (0.9, NAN))],
    *[{"betas": betas} for betas in ((0.9,), (), 0.9, None, "ab", (0, 0), ("a", "b"))],
    *[{"betas": betas} for betas in ((0.9, torch.tensor(0.9)), (torch.tensor(0.9), 0.9), (torch.zeros(2),) * 2)],
    *[{"betas": (torch.zeros(1), torch.zeros(0))}, {"betas": (torch.tensor(2.0), torch.tensor(0.9))}],
    *[{"eps": eps} for eps in (-1.0, NAN, None, "a", torch.tensor(-1.0))],
    *[{"weight_decay": decay} for decay in (-1.0, NAN, None, "a", torch.tensor(-1.0))],
    {"fused": True, "foreach": True},
    {"fused": True, "differentiable": True},
    {"foreach": True, "lr": torch.tensor(0.1)},
    {"foreach": True, "betas": (torch.tensor(0.9), torch.tensor(0.9))},
    {"momentum": 0.9},
    {"decoupled_weight_decay": False},
    {"learning_rate": 0.1},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_wrong_options_are_refused_as_torch_refuses_them(options: dict[str, Any]) -> None:
    assert_refused_alike(lambda make: make(seeded((10,)), **options))


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(10))


SHARED = parameter()
WRONG_PARAMETERS: dict[str, Any] = {
    "a tensor": SHARED,
    "nothing": [],
    "None": None,
    "a number": 3,
    "a word": "weights",
    "a module": nn.Linear(2, 2),
    "numbers": [3],
    "an array": torch.zeros(3).numpy(),
    "None in a list": [None],
    "a list in a list": [[SHARED]],
    "one group, not a list": {"params": [SHARED]},
    "not a leaf": [SHARED * 2],
    "some named": [("a", SHARED), parameter()],
    "some named, later": [SHARED, ("a", parameter())],
    "a named number": [("a", 3)],
    "one group named": [{"params": [("a", SHARED)]}, {"params": [parameter()]}],
    "a group and a tensor": [{"params": [SHARED]}, parameter()],
    "a tensor and a group": [SHARED, {"params": [parameter()]}],
    "a group of a set": [{"params": {SHARED}}],
    "a group without params": [{"lr": 0.1}],
    "a group of None": [{"params": None}],
    "a group of numbers": [{"params": [3]}],
    "one parameter in two groups": [{"params": [SHARED]}, {"params": [SHARED]}],
}


@pytest.mark.parametrize("case", WRONG_PARAMETERS)
def test_wrong_parameters_are_refused_as_torch_refuses_them(case: str) -> None:
    def groups(given: Any) -> Any:
        """Anew each time, for torch writes into the groups it is given."""
        return [dict(one) if isinstance(one, dict) else one for one in given] if isinstance(given, list) else given

    assert_refused_alike(lambda make: make(groups(WRONG_PARAMETERS[case])))


def test_one_parameter_twice_in_a_group_warns_as_with_torch(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="parameter group with duplicate parameters"):
        tiered([SHARED, SHARED], tmp_path)


WRONG_GROUPS: dict[str, Any] = {
    "a list": [parameter()],
    "a tensor": parameter(),
    "None": None,
    "no params": {},
    "a parameter that is there": {"params": [SHARED]},
    "a set": {"params": {parameter()}},
    "not a leaf": {"params": [SHARED * 2]},
    "named": {"params": [("a", parameter())]},
    "a number": {"params": [3]},
    "a word": {"params": "weights"},
}


@pytest.mark.parametrize("case", WRONG_GROUPS)
def test_a_wrong_group_is_refused_as_torch_refuses_it_and_not_added(case: str) -> None:
    def attempt(make: type[torch.optim.AdamW]) -> None:
        optimizer = make([SHARED])
        given = WRONG_GROUPS[case]
        try:
            optimizer.add_param_group(dict(given) if isinstance(given, dict) else given)
        finally:
            assert len(optimizer.param_groups) == 1

    assert_refused_alike(attempt)


# -- steps ------------------------------------------------------------------------------------------------------

WRONG_CALLS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a closure that is none": lambda optimizer: optimizer.step(3),
    "a closure that fails": lambda optimizer: optimizer.step(lambda: 1 / 0),
    "two arguments": lambda optimizer: optimizer.step(None, None),
    "an unknown keyword": lambda optimizer: optimizer.step(loss=1),
    "an unknown keyword of zero_grad": lambda optimizer: optimizer.zero_grad(to_none=True),
    "no lr": lambda optimizer: (optimizer.param_groups[0].pop("lr"), optimizer.step()),
    "no betas": lambda optimizer: (optimizer.param_groups[0].pop("betas"), optimizer.step()),
    "no amsgrad": lambda optimizer: (optimizer.param_groups[0].pop("amsgrad"), optimizer.step()),
    "three betas": lambda optimizer: (optimizer.param_groups[0].update(betas=(0.9,) * 3), optimizer.step()),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls_are_refused_as_torch_refuses_them_and_change_nothing(case: str) -> None:
    def attempt(make: type[torch.optim.AdamW]) -> None:
        one = parameter()
        optimizer = make([one])
        one.grad = torch.ones(10)
        try:
            WRONG_CALLS[case](optimizer)
        finally:
            assert torch.equal(one, torch.ones(10))

    assert_refused_alike(attempt)


@pytest.mark.parametrize("option", ["lr", "weight_decay", "eps"])
@pytest.mark.parametrize("value", [math.inf, NAN, -0.1])
def test_numbers_that_torch_computes_with_are_computed_with(value: float, option: str, tmp_path: Path) -> None:
    """Put into a group when it is too late to refuse them; also what is found out about the kernel stays true."""
    mine, theirs = seeded(*SHAPES), seeded(*SHAPES)
    optimizer, reference = tiered(mine, tmp_path), torchs(theirs)
    for each, parameters in ((optimizer, mine), (reference, theirs)):
        each.param_groups[0][option] = value
        train(each, parameters, range(2))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("formula", [{}, {"foreach": True}, {"fused": False}], ids=str)
@pytest.mark.parametrize("lr", [None, "fast", [0.1], torch.zeros(2)], ids=str)
def test_a_rate_that_is_no_number_fails_the_step_and_changes_nothing(lr: Any, formula: Any, tmp_path: Path) -> None:
    """torch says one thing or another, by formula; so may we, if it is an error of the value's type."""
    parameters = seeded(*SHAPES)
    optimizer = tiered(parameters, tmp_path, **formula)
    train(optimizer, parameters, range(2))
    set_gradients(parameters, 3)
    optimizer.param_groups[0]["lr"] = lr
    with nothing_changes(optimizer), pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_parameters_of_a_dtype_that_cannot_be_updated_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    """At the step, as by torch: a buffer without a gradient may be there."""
    optimizers = [make([torch.zeros(10).to(dtype)]) for make in (torchs, lambda p: tiered(p, tmp_path))]
    for optimizer in optimizers:
        optimizer.step()
        for one in optimizer.param_groups[0]["params"]:
            one.grad = torch.zeros(10).to(dtype)
    wanted, found = (error_of(optimizer.step) for optimizer in optimizers)
    assert isinstance(found, type(wanted))
    assert str(dtype) in str(found)
    assert not optimizers[1].state


# -- state dicts of other optimizers ----------------------------------------------------------------------------

TAKEN_OVER = {"Adam", "AdamW", "RAdam"}
"""Their state is AdamW's by name and meaning. With Adam's groups, weight decay stays decoupled, as with torch."""
OTHERS = [
    name
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


def saved_by(name: str, **options: Any) -> dict[str, Any]:
    """The state dict of one of torch's optimizers after two steps on SHAPES."""
    parameters = seeded(*SHAPES)
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-2, **options)
    for step in range(2):
        set_gradients(parameters, step)
        if name == "SparseAdam":
            for one in parameters:
                one.grad = one.grad.to_sparse()
        optimizer.step(lambda: torch.tensor(1.0))
    saved: dict[str, Any] = optimizer.state_dict()
    return saved


def begun(folder: Path, steps: int) -> tuple[list[Any], TieredAdamW]:
    parameters = seeded(*SHAPES)
    optimizer = tiered(parameters, folder, "gpu cpu nvme")
    train(optimizer, parameters, range(steps))
    return parameters, optimizer


@pytest.mark.parametrize("name", [name for name in OTHERS if name not in TAKEN_OVER] + ["SGD with momentum"])
def test_state_of_another_optimizer_is_refused(name: str, tmp_path: Path) -> None:
    saved = saved_by("SGD", momentum=0.9) if name == "SGD with momentum" else saved_by(name)
    parameters, optimizer = begun(tmp_path, 2)
    with nothing_changes(optimizer), pytest.raises(StateDictError, match=r"another optimizer's|not AdamW's"):
        optimizer.load_state_dict(saved)
    train(optimizer, parameters, [3])


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", sorted(TAKEN_OVER))
def test_state_of_a_sibling_is_taken_over_as_torch_takes_it_over(name: str, amsgrad: bool, tmp_path: Path) -> None:
    saved = saved_by(name, weight_decay=0.1, **({"amsgrad": amsgrad} if name != "RAdam" else {}))
    mine, optimizer = begun(tmp_path, 1)
    theirs = seeded(*SHAPES)
    reference = torchs(theirs)
    train(reference, theirs, [0])
    for each, parameters in ((optimizer, mine), (reference, theirs)):
        each.load_state_dict(cloned(saved))
        for group in each.param_groups:
            group["fused"], group["foreach"] = True, None
        train(each, parameters, range(2, 5))
    key = "decoupled_weight_decay"  # which torch's AdamW has, and sets right, since 2.7
    assert optimizer.param_groups[0].get(key) is reference.param_groups[0].get(key)
    assert_same_parameters(mine, theirs)
    assert_same_state_dicts(optimizer, reference)


# -- state dicts that do not fit --------------------------------------------------------------------------------


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value, the last of the path, where the path leads."""

    def spoil(saved: Any) -> None:
        *way, key, value = path
        for step in way:
            saved = saved[step]
        saved[key] = value

    return spoil


def _pop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(saved: Any) -> None:
        *way, key = path
        for step in way:
            saved = saved[step]
        saved.pop(key)

    return spoil


def _together(*spoils: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def spoil(saved: dict[str, Any]) -> None:
        for each in spoils:
            each(saved)

    return spoil


GROUP = ("param_groups", 0)
FIRST = ("state", 0)
WRONG_STATE_DICTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another shape": (
        _set(*FIRST, "exp_avg", torch.zeros(60, 249)),
        r"exp_avg of parameter 0 .*\(60, 249\).*\(60, 250\)",
    ),
    "other axes": (_set(*FIRST, "exp_avg", torch.zeros(250, 60)), r"exp_avg of parameter 0 .*\(250, 60\)"),
    "complex": (_set(*FIRST, "exp_avg", torch.zeros(60, 250) * 1j), "exp_avg of parameter 0"),
    "fewer parameters": (_pop(*GROUP, "params", 1), "doesn't match the size of optimizer's group.* 1 .* 2"),
    "more parameters": (_set(*GROUP, "params", [0, 1, 2]), "doesn't match the size of optimizer's group.* 3 .* 2"),
    "no groups": (_set("param_groups", []), "different number of parameter groups.* 0.* 1"),
    "two groups": (
        lambda saved: saved["param_groups"].append({**saved["param_groups"][0], "params": []}),
        "different number of parameter groups.* 2.* 1",
    ),
    "a field missing": (_pop("state", 1, "exp_avg_sq"), r"parameter 1 .*missing: \['exp_avg_sq'\]"),
    "no step": (_pop("state", 1, "step"), r"parameter 1 .*missing: \['step'\]"),
    "step None": (_set("state", 1, "step", None), r"parameter 1 .*missing: \['step'\]"),
    "a field None": (_set("state", 1, "exp_avg", None), r"parameter 1 .*missing: \['exp_avg'\]"),
    "an unknown field": (_set("state", 1, "velocity", torch.zeros(4, 5)), r"parameter 1 .*unknown: \['velocity'\]"),
    "state of nobody": (_set("state", 17, {}), "state for 17"),
    "state of a name": (_set("state", "head", {}), "state for 'head'"),
    "no lr": (_pop(*GROUP, "lr"), "param_groups.0 has no lr"),
    "no betas and eps": (_together(_pop(*GROUP, "betas"), _pop(*GROUP, "eps")), "param_groups.0 has no betas, eps"),
    "state a list": (_set("state", []), "state.* list"),
    "state None": (_set("state", None), "state.* NoneType"),
    "groups None": (_set("param_groups", None), "param_groups.* NoneType"),
    "groups a word": (_set("param_groups", "x"), "param_groups.* str"),
    "groups a mapping": (_set("param_groups", {0: {}}), "param_groups.* dict"),
    "a group None": (_set("param_groups", 0, None), "param_groups.0.* NoneType"),
    "a group a list": (_set("param_groups", 0, []), "param_groups.0.* list"),
    "params None": (_set(*GROUP, "params", None), r"param_groups.0.params.* NoneType"),
    "params a number": (_set(*GROUP, "params", 2), r"param_groups.0.params.* int"),
    "no params": (_pop(*GROUP, "params"), "param_groups.0 has no params"),
    "a parameter's state a list": (_set(*FIRST, []), "parameter 0 is a list"),
    "a parameter's state None": (_set(*FIRST, None), "parameter 0 is a NoneType"),
    "a parameter's state a tensor": (_set(*FIRST, torch.zeros(3)), "parameter 0 is a Tensor"),
    "a field a list": (_set(*FIRST, "exp_avg", [0.0]), "exp_avg of parameter 0 is a list"),
    "a field a word": (_set(*FIRST, "exp_avg", "x"), "exp_avg of parameter 0 is a str"),
    "a field sparse": (_set(*FIRST, "exp_avg", torch.zeros(60, 250).to_sparse()), "exp_avg of parameter 0.*sparse"),
    "a field without values": (_set(*FIRST, "exp_avg", torch.zeros(60, 250, device="meta")), "meta device"),
    "lr beyond all floats": (_set(*GROUP, "lr", 10**400), r"param_groups\.0\.lr is 10*, not a number"),
    **{
        f"step {step!r}": (_set(*FIRST, "step", step), "step of parameter 0")
        for step in (
            "one",
            [1.0],
            torch.zeros(2),
            torch.tensor(1j),
            NAN,
            torch.tensor(NAN),
            -1,
            1e300,
            10**400,
            BEYOND_FLOAT32,
        )
    },
    **{
        f"{option} {value!r}": (_set(*GROUP, option, value), rf"param_groups.0.*{option}")
        for option in ("lr", "eps", "weight_decay")
        for value in (NAN, torch.tensor(NAN), None, "0.1", [0.1], torch.zeros(2), 1j)
    },
    **{
        f"betas {value!r}": (_set(*GROUP, "betas", value), r"param_groups.0.*betas")
        for value in (None, 0.9, (0.9,), (0.9,) * 3, (NAN, 0.9), (0.9, "x"), "ab", torch.zeros(2, 2))
    },
}


def spoilt(case: str) -> tuple[dict[str, Any], str]:
    """A state dict that has become a case, and what the error must say."""
    spoil, story = WRONG_STATE_DICTS[case]
    saved = saved_by("AdamW", fused=True)
    spoil(saved)
    return saved, story


@pytest.mark.parametrize("case", WRONG_STATE_DICTS)
def test_a_state_dict_that_does_not_fit_is_refused_naming_what_differs(case: str, tmp_path: Path) -> None:
    saved, story = spoilt(case)
    parameters, optimizer = begun(tmp_path, 2)
    with nothing_changes(optimizer), pytest.raises(StateDictError, match=story):
        optimizer.load_state_dict(saved)
    train(optimizer, parameters, [3])


def test_a_fresh_optimizer_refuses_the_same_and_reserves_nothing(tmp_path: Path) -> None:
    _, optimizer = begun(tmp_path, 0)
    for case in WRONG_STATE_DICTS:
        saved, story = spoilt(case)
        with nothing_changes(optimizer), pytest.raises(StateDictError, match=story):
            optimizer.load_state_dict(saved)
    assert optimizer._held.binding is None and not any(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_a_state_dict_without_one_of_its_keys_is_a_key_error_that_names_it(key: str, tmp_path: Path) -> None:
    """As with torch; a whole checkpoint given for the optimizer's part of it is the usual way."""
    _, optimizer = begun(tmp_path, 2)
    saved = optimizer.state_dict()
    del saved[key]
    with nothing_changes(optimizer), pytest.raises(KeyError, match=key):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize(
    "given", [None, "checkpoint.pt", 3, [], torch.zeros(3)], ids=["None", "path", "3", "list", "tensor"]
)
def test_what_is_no_state_dict_at_all_is_refused_by_its_type(given: Any, tmp_path: Path) -> None:
    _, optimizer = begun(tmp_path, 2)
    with nothing_changes(optimizer), pytest.raises(StateDictError, match=type(given).__name__):
        optimizer.load_state_dict(given)


HARMLESS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a parameter without state": _pop("state", 1),
    "a parameter with empty state": _set("state", 1, {}),
    "an unknown key of a group": _set(*GROUP, "mine", "yes"),
    "an unknown key of the whole": _set("epoch", 3),
    "step a number": _set(*FIRST, "step", 2),
    "step of another dtype": _set(*FIRST, "step", torch.tensor(2)),
    "betas a list": _set(*GROUP, "betas", [0.8, 0.9]),
    "lr a whole number": _set(*GROUP, "lr", 1),
    "lr a tensor": _set(*GROUP, "lr", torch.tensor(0.5)),
    "lr infinite": _set(*GROUP, "lr", math.inf),
    "lr negative": _set(*GROUP, "lr", -2.2e-20),  # LinearLR from 0.3 down to 0 ends there
    "moments of another precision": _set(*FIRST, "exp_avg", torch.ones(60, 250, dtype=torch.float64)),
    "moments of whole numbers": _set(*FIRST, "exp_avg", torch.ones(60, 250, dtype=torch.int64)),
    "a largest moment without amsgrad": _set(*FIRST, "max_exp_avg_sq", torch.ones(60, 250)),
    "names for keys": lambda saved: saved.update(
        state={"ab"[key]: fields for key, fields in saved["state"].items()},
        param_groups=[{**saved["param_groups"][0], "params": ["a", "b"]}],
    ),
    "no key that torch added later": _together(*[_pop(*GROUP, key) for key in ("maximize", "foreach", "capturable")]),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_torch_accepts_and_is_harmless_is_accepted_with_the_same_effect(case: str, tmp_path: Path) -> None:
    source = seeded(*SHAPES)
    saver = torchs(source)
    train(saver, source, range(2))
    saved = cloned(saver.state_dict())
    HARMLESS[case](saved)
    mine, optimizer = begun(tmp_path, 1)
    theirs = seeded(*SHAPES)
    reference = torchs(theirs)
    train(reference, theirs, [0])
    for each, parameters in ((optimizer, mine), (reference, theirs)):
        each.load_state_dict(cloned(saved))
        train(each, parameters, range(2, 4))
    assert_same_parameters(mine, theirs)
    if case not in ("a largest moment without amsgrad", "step of another dtype"):  # which we do not keep
        assert_same_state_dicts(optimizer, reference)


@pytest.mark.parametrize("wrong", [{"foreach": True}, {"capturable": True}, {"differentiable": True}, {"fused": False}])
def test_how_another_run_computed_is_not_loaded(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Nor may a state dict bring what this class refuses, `capturable` say."""
    _, optimizer = begun(tmp_path, 1)
    saved = cloned(optimizer.state_dict())
    saved["param_groups"][0] |= wrong
    before = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["param_groups"] == before


def test_a_capacity_beyond_the_machines_memory_is_warned_of_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.blueprint.host_memory", lambda: HostMemory(1 << 20, 1 << 19, None, "here", 1 << 20))
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = TieredAdamW([parameter], policy={"tiers": {"cpu": {"capacity": "2MiB"}}})
    parameter.grad = torch.ones(100)
    with pytest.warns(UserWarning, match=r"tiers\.cpu\.capacity of 2,097,152 bytes is more than the 1,048,576 bytes"):
        optimizer.step()
    optimizer.close()


def test_a_capacity_that_no_machine_has_is_an_error_of_the_first_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = TieredAdamW([parameter], policy={"tiers": {"cpu": {"capacity": "900PiB"}}})
    parameter.grad = torch.ones(100)
    with pytest.raises(CapacityError, match=r"cannot be mapped .*: lower tiers\.cpu\.capacity"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(100))
    optimizer.close()
