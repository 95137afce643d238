"""BAD"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.beside import (
    tiered,
)
from tests.optimizer.cases import (
    seeded,
)
from tierstore.optimizer import TieredAdamW

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"betas": (0.9, torch.tensor(0.9))}, "betas must be either both floats or both Tensors"),
        ({"lr": torch.tensor([1.0, 2.0])}, "Tensor lr must be 1-element"),
    ],
)
def test_wrong_options_are_refused_in_torchs_words(options: Any, error: str, tmp_path: Path) -> None:
    for make in (torch.optim.AdamW, TieredAdamW):
        with pytest.raises(ValueError, match=error):
            make(seeded((10,)), **options)


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        (torch.zeros(3), TypeError),
        ([{"params": {nn.Parameter(torch.zeros(3))}}], TypeError),
        ([], ValueError),
        ([nn.Parameter(torch.zeros(3)) * 2], ValueError),
        ([3], TypeError),
        ([("a", nn.Parameter(torch.zeros(3))), nn.Parameter(torch.zeros(3))], ValueError),
    ],
)
def test_wrong_parameters_are_refused_as_torch_refuses_them(parameters: Any, kind: type[Exception]) -> None:
    stories = []
    for make in (torch.optim.AdamW, TieredAdamW):
        with pytest.raises(kind) as caught:
            make(parameters)
        stories.append(str(caught.value))
    assert stories[0] == stories[1]


def test_a_parameter_in_two_groups_is_refused_and_one_twice_in_a_group_warns(tmp_path: Path) -> None:
    (parameter,) = seeded((10,))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        tiered([{"params": [parameter]}, {"params": [parameter]}], tmp_path)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        tiered([parameter, parameter], tmp_path)
