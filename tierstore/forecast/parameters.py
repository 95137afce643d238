"""What a forecast is asked about: a model, its parameters, or no more than how many there are.

Parameters are only looked at; those that are made here lie on the meta device and have no values. A count becomes the
shapes of a decoder of that size, as how chunks are filled depends on them little.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.errors import TierstoreError
from tierstore.members import UPDATED_DTYPES
from tierstore.units import shown

ModelLike = nn.Module | Iterable[Any] | int | str
"""A model, what an optimizer takes as `params`, a number of parameters, or that as text (`7B`)."""

MOST_PARAMETERS = 10**15
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_LAYER_SHARE = 128
"""Width of a layer over the number of layers, as in models that are published."""
_COUNTS = "a whole number of parameters such as 125M, 7B or 1.5T, from 1 to 1000T"


class ForecastError(TierstoreError, ValueError):
    """What was asked cannot be answered: a count, a dtype, a model or a rate is not one."""


def parse_count(value: int | str) -> int:
    """Read a number of parameters. Raises ForecastError."""
    count: int | Decimal | None = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([KMGBT]?)", value.strip(), re.IGNORECASE)
        count = Decimal(match[1]) * _SCALES[match[2].upper()] if match is not None else None
    if count is None or not 1 <= count <= MOST_PARAMETERS or count != int(count):
        raise ForecastError(f"params: found {shown(value)}; allowed: {_COUNTS}")
    return int(count)


def dtype_named(name: str) -> torch.dtype:
    """A dtype that can be updated, by its name. Raises ForecastError."""
    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(name, name)
    dtype = getattr(torch, short.removeprefix("torch."), None)
    if dtype not in UPDATED_DTYPES:
        names = (str(one).removeprefix("torch.") for one in UPDATED_DTYPES)
        raise ForecastError(f"dtype: found {shown(name)}; allowed: {', '.join(names)}, bf16, fp16, fp32, fp64")
    assert isinstance(dtype, torch.dtype)
    return dtype


def parameters_of(model: ModelLike, dtype: torch.dtype) -> Iterable[Any]:
    """What an optimizer would be given. `dtype` is of parameters that are made here. Raises ForecastError."""
    if isinstance(model, nn.Module):
        given = list(model.named_parameters())
        if not given:
            raise ForecastError(f"{type(model).__name__} has no parameters, so that there is nothing to plan")
        return given
    if isinstance(model, int | str):
        return transformer(parse_count(model), dtype)
    if isinstance(model, Tensor) or not isinstance(model, Iterable):
        raise ForecastError(
            f"found {shown(type(model).__name__)}; allowed: a model, parameters or groups as an optimizer takes them, "
            f"or {_COUNTS}"
        )
    return model


def transformer(count: int, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a decoder with exactly `count` of them, on the meta device: embedding, layers, and a rest."""
    layers = max(1, round((count / (12 * _LAYER_SHARE**2)) ** (1 / 3)))
    width = math.isqrt(count * 9 // 10 // (12 * layers)) // 64 * 64
    shapes: dict[str, tuple[int, ...]] = {}
    per_layer = {
        **{f"attention.{name}": (width, width) for name in ("query", "key", "value", "output")},
        "feed_forward.up": (4 * width, width),
        "feed_forward.down": (width, 4 * width),
        "attention.norm": (width,),
        "feed_forward.norm": (width,),
    }
    if width:
        count -= layers * sum(map(math.prod, per_layer.values()))
        rows, count = divmod(count, width)
        shapes["embedding"] = (rows, width)
        shapes |= {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in per_layer.items()}
    if count:
        shapes["rest"] = (count,)
    return [(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))) for name, shape in shapes.items()]


def call(target: str) -> nn.Module:
    """Import `module:function` and call it on the meta device. Raises ForecastError, the cause chained."""
    module_name, _, path = target.partition(":")
    if not re.fullmatch(r"[\w.]+", module_name) or not re.fullmatch(r"[\w.]+", path):
        raise ForecastError(f"model: found {shown(target)}; allowed: module:function, as mymodel:make")
    function = _find(target, module_name, path)
    try:
        with torch.device("meta"):
            model = function()
    except Exception as error:
        raise ForecastError(
            f"model: {target}() raised {type(error).__name__} on the meta device, where tensors have no values: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ForecastError(f"model: {target}() returned {shown(type(model).__name__)}; allowed: a torch.nn.Module")
    return model


def _find(target: str, module_name: str, path: str) -> Callable[[], object]:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the working folder, as `python -m` finds them
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ForecastError(
            f"model: {module_name} cannot be imported ({type(error).__name__}: {error}): name a module that python "
            f"finds from here, or set PYTHONPATH"
        ) from error
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ForecastError(f"model: {target} is nothing that can be called: name a function that returns the model")
    return found  # type: ignore[no-any-return]
