"""torch's own generic machinery for optimizers, on `TieredAdamW`: every input and every error input it has for AdamW.

Each test runs twice, all in memory and with tiers of three extents; numbers are compared with torch's AdamW to the bit,
for each of torch's three implementations.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.settings import SETTINGS, assert_same_optimizers, backward, fused, network

pytest.importorskip("expecttest", reason="torch.testing needs it; the extra `test` brings it")

from torch.testing._internal import common_optimizers as torchs
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, parametrize, subtest

# torch.testing takes from the whole process, and so from frameworks that other tests run, the right to set flags.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

INFOS = [
    torchs.OptimizerInfo(
        setting,
        optim_inputs_func=torchs.optim_inputs_func_adamw,
        optim_error_inputs_func=torchs.optim_error_inputs_func_adamw,
        supported_impls=("foreach", "fused"),
        supports_fused_on=("cpu", "cuda", "mps"),
        has_capturable_arg=True,
    )
    for setting in SETTINGS
]


def every_input() -> list[torchs.OptimizerInput]:
    """torch's inputs for every device (all values are on the CPU), with no implementation asked for and with each.

    Without `capturable`, which is refused.
    """
    inputs, found = [], {}
    for device in ("cpu", "cuda", "mps"):
        inputs += INFOS[0].optim_inputs_func(device=device)
        inputs += torchs._get_optim_inputs_including_global_cliquey_kwargs(device, torch.float32, INFOS[0])
    for given in inputs:
        given.kwargs.pop("capturable", None)
        told = {name: value for name, value in given.kwargs.items() if (name, value) != ("foreach", False)}
        found.setdefault(repr(told), given)
    return list(found.values())


def is_refused_by_torch(given: torchs.OptimizerInput) -> bool:
    options = [given.kwargs.get("lr"), *given.kwargs.get("betas", ())]
    return bool(given.kwargs.get("foreach")) and any(isinstance(option, Tensor) for option in options)


def named(given: torchs.OptimizerInput) -> subtest:
    """An input as a parameter of a test, named after torch's words, its betas and its flags."""
    shapes = [f"{beta.dim()}_dim" for beta in given.kwargs.get("betas", ())]
    flags = [f"{flag}_{given.kwargs[flag]}" for flag in ("foreach", "fused") if flag in given.kwargs]
    words = [*re.findall(r"\w+", given.desc.split("&")[0].replace("capturable", "")), *shapes, *flags]
    return subtest(given, name="_".join(words))


TRAINABLE = [given for given in every_input() if not is_refused_by_torch(given)]
REFUSED = [given for given in every_input() if is_refused_by_torch(given)]


def make(cls: Any, parameters: Any, given: torchs.OptimizerInput, **more: Any) -> torch.optim.Optimizer:
    """Make an optimizer from one of torch's inputs; Tensor options are its own."""
    optimizer: torch.optim.Optimizer = cls(parameters, **{**copy.deepcopy(given.kwargs), **more})
    return optimizer


def told(cls: Any, given: torchs.OptimizerInput) -> tuple[type, str]:
    """The class and text of the error or warning that constructing ends with."""
    parameters = [nn.Parameter(torch.ones(1, 1))] if given.params is None else given.params
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make(cls, parameters, given)
        except Exception as error:
            return type(error), str(error)
    return caught[-1].category, str(caught[-1].message)


def test_importing_torchs_machinery_leaves_the_flags_of_backends_settable() -> None:
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    assert not torch.backends.flags_frozen()


@pytest.mark.usefixtures("swap_folder")
class TestTieredAdamW(TestCase):
    @torchs.optims(INFOS)
    def test_every_error_input_is_refused_in_torchs_words(self, device: str, dtype: Any, optim_info: Any) -> None:
        for wrong in optim_info.optim_error_inputs_func(device, dtype):
            with self.subTest(wrong.optimizer_error_input.desc):
                kind, text = told(optim_info.optim_cls, wrong.optimizer_error_input)
                assert kind is wrong.error_type
                assert re.match(wrong.error_regex, text)
                assert (kind, text) == told(torch.optim.AdamW, wrong.optimizer_error_input)

    @torchs.optims(INFOS)
    @parametrize("given", [named(given) for given in REFUSED])
    def test_tensor_options_with_foreach_are_refused_in_torchs_words(
        self, device: str, dtype: Any, optim_info: Any, given: Any
    ) -> None:
        kind, text = told(optim_info.optim_cls, given)
        assert kind is ValueError
        assert (kind, text) == told(torch.optim.AdamW, given)

    @torchs.optims(INFOS)
    @parametrize("other", ["foreach", "differentiable"])
    def test_what_excludes_fused_is_refused_in_torchs_words(
        self, device: str, dtype: Any, optim_info: Any, other: str
    ) -> None:
        given = torchs.OptimizerInput(params=None, kwargs={"fused": True, other: True})
        kind, text = told(optim_info.optim_cls, given)
        assert kind is RuntimeError
        assert (kind, text) == told(torch.optim.AdamW, given)

    @torchs.optims(INFOS)
    @parametrize("given", [named(given) for given in TRAINABLE])
    def test_every_input_trains_to_the_bits_of_torch(
        self, device: str, dtype: Any, optim_info: Any, given: Any
    ) -> None:
        """With no gradient at one step, a layer frozen for three, one unfrozen late, and state read after each step."""
        models = [network(), network()]
        mine = make(optim_info.optim_cls, models[0].parameters(), given)
        theirs = make(fused, models[1].parameters(), given)
        for step in range(7):
            for model, optimizer in zip(models, (mine, theirs), strict=True):
                model[0].requires_grad_(step not in (3, 4, 5))
                model[2].bias.requires_grad_(step >= 4)
                optimizer.zero_grad()
                if step != 2:
                    backward(model, step)
                optimizer.step()
            assert_same_optimizers(mine, theirs, f"step {step}")
        assert_routes_were_used(mine)


def assert_routes_were_used(optimizer: Any) -> None:
    stats = optimizer.store.stats()
    assert all(tier.peak_bytes > 0 for tier in stats.tiers.values())
    if "nvme" in stats.tiers:
        assert {"gpu->cpu", "cpu->gpu", "cpu->nvme", "nvme->cpu"} <= stats.routes.keys()


instantiate_device_type_tests(TestTieredAdamW, globals(), only_for="cpu")
