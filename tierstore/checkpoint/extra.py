"""Whatever else a caller keeps beside its tensors, as JSON and arrays, without pickle: nothing that is loaded is code.

None, bool, int, float, str, lists and dicts with str keys are JSON's own. What JSON does not have is an object with one
key that begins with `$`. Values come back with the types they had: tuples as tuples, numpy's scalars as numpy's.
Everything else is refused where it is saved.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tierstore.checkpoint.entries import Json, is_dense
from tierstore.checkpoint.kinds import dtype_named
from tierstore.errors import CheckpointValueError, DamagedCheckpointError
from tierstore.forms import take_apart

MOST_INLINE_BYTES = 256
"""Of a tensor, array or bytes object that is written into the JSON; larger ones become arrays."""
MOST_DEPTH = 64
_EXACT_INTEGER = 1 << 53
"""Beyond this, readers that know only floating-point numbers go wrong."""
_NUMPY_TYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
}

Keep = Callable[[str, Tensor], int]
"""Stores a tensor, under the path of its key; returns its number."""
Fetch = Callable[[int], Tensor]
"""Reads the tensor of that number."""


def encode(value: object, keep: Keep, where: str = "extra", within: tuple[object, ...] = ()) -> Json:
    """Turn a value, which lies `within` others, into JSON; what is large goes to `keep`.

    Raises CheckpointValueError, with the key's path.
    """
    if any(value is outer for outer in within):
        raise CheckpointValueError(f"{where[:200]} is one of the lists and dicts that it lies in: that is not stored")
    if len(within) > MOST_DEPTH:
        raise CheckpointValueError(f"{where[:100]}…: nested more than {MOST_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        assert isinstance(value, int)
        return value if abs(value) <= _EXACT_INTEGER else {"$int": hex(value)}
    if kind is float:
        assert isinstance(value, float)
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is bytes:
        return _encode_bytes(value, keep, where)
    if isinstance(value, Tensor):
        return _encode_tensor(value, keep, where)
    if isinstance(value, np.ndarray | np.generic):
        return _encode_numpy(value, keep, where)
    if kind in (list, tuple, torch.Size):
        assert isinstance(value, list | tuple)
        items = [encode(item, keep, f"{where}[{place}]", (*within, value)) for place, item in enumerate(value)]
        return items if kind is list else {"$tuple" if kind is tuple else "$size": items}
    if kind in (dict, OrderedDict):
        assert isinstance(value, dict)
        return _encode_dict(value, keep, where, (*within, value))
    raise CheckpointValueError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which is not stored: a checkpoint holds None, bool, int, "
        f"float, str, bytes, lists, tuples, dicts, tensors and numpy arrays of numbers"
    )


def decode(tree: Json, fetch: Fetch, where: str = "extra", depth: int = 0) -> Any:
    """Turn JSON back into the value. Raises DamagedCheckpointError for what `encode` does not write."""
    if depth > 2 * MOST_DEPTH + 2:
        raise DamagedCheckpointError(f"{where[:200]}: nested too deeply")
    if isinstance(tree, list):
        return [decode(item, fetch, f"{where}[{place}]", depth + 1) for place, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: decode(item, fetch, f"{where}[{key!r}]", depth + 1) for key, item in tree.items()}
    if len(tree) != 1 or tag not in _DECODERS:
        raise DamagedCheckpointError(f"{where} has a tag {tag[:40]!r} that is not known, or more beside it")
    try:
        return _DECODERS[tag](tree[tag], fetch, where, depth)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        if isinstance(error, DamagedCheckpointError):
            raise
        raise DamagedCheckpointError(f"{where}: {tag} holds what it cannot ({str(error)[:200]})") from error


def _encode_dict(value: dict[Any, Any], keep: Keep, where: str, within: tuple[object, ...]) -> Json:
    is_plain = type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value)
    if is_plain:
        return {key: encode(item, keep, f"{where}[{key!r}]", within) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if not isinstance(key, str | int | float | bool | bytes | tuple | None):
            raise CheckpointValueError(f"{where} has a key {key!r}; keys are stored if they are plain values")
        name = f"{where}[{key!r}]"
        pairs.append([encode(key, keep, name, within), encode(item, keep, name, within)])
    return {"$dict" if type(value) is dict else "$ordered": pairs}


def _encode_bytes(value: Any, keep: Keep, where: str) -> Json:
    if len(value) <= MOST_INLINE_BYTES:
        return {"$bytes": base64.b64encode(value).decode()}
    return {"$stored_bytes": keep(where, torch.frombuffer(bytearray(value), dtype=torch.uint8))}


def _encode_tensor(value: Tensor, keep: Keep, where: str) -> Json:
    if value.device.type not in ("cpu", "meta"):
        value = value.detach().cpu()
    try:
        form, content = take_apart(value)
    except TypeError as error:
        raise CheckpointValueError(f"{where}: {error}") from error
    if form.nbytes > MOST_INLINE_BYTES:
        return {"$tensor": keep(where, value)}
    described = {
        "dtype": str(form.dtype).removeprefix("torch."),
        "shape": list(form.shape),
        "strides": list(form.stride),
    }
    return {"$small_tensor": {**described, "base64": base64.b64encode(content.numpy().tobytes()).decode()}}


def _encode_numpy(value: Any, keep: Keep, where: str) -> Json:
    name = value.dtype.name
    if name not in _NUMPY_TYPES or type(value) not in (np.ndarray, value.dtype.type):
        raise CheckpointValueError(
            f"{where} is a {type(value).__name__} of {value.dtype}; stored are arrays of numbers"
        )
    little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
    described = {"dtype": name, "shape": list(np.shape(value))}
    if isinstance(value, np.generic):
        return {"$scalar": {"dtype": name, "base64": base64.b64encode(little.tobytes()).decode()}}
    if value.nbytes <= MOST_INLINE_BYTES:
        return {"$small_array": {**described, "base64": base64.b64encode(little.tobytes()).decode()}}
    stored = torch.frombuffer(bytearray(little.tobytes()), dtype=getattr(torch, name))
    return {"$array": {**described, "tensor": keep(where, stored)}}


def _decode_dict(pairs: Any, fetch: Fetch, where: str, depth: int) -> dict[Any, Any]:
    found = {}
    for place, (key, item) in enumerate(pairs):
        key = decode(key, fetch, f"{where}.keys[{place}]", depth + 1)
        found[key] = decode(item, fetch, f"{where}[{key!r}]", depth + 1)
    return found


def _decode_list(items: Any, fetch: Fetch, where: str, depth: int) -> list[Any]:
    if not isinstance(items, list):
        raise TypeError(f"a {type(items).__name__}, not a list")
    return [decode(item, fetch, f"{where}[{place}]", depth + 1) for place, item in enumerate(items)]


def _decode_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{str(text)[:40]!r} is not nan, inf or -inf")
    return float(text)


def _inline(text: Any) -> bytes:
    try:
        content = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if len(content) > MOST_INLINE_BYTES:
        raise ValueError(f"{len(content)} bytes, more than are written inline")
    return content


def _decode_small_tensor(described: Any) -> Tensor:
    dtype, shape, stride = dtype_named(described["dtype"]), described["shape"], described["strides"]
    content = bytearray(_inline(described["base64"]))
    if math.prod(shape) * dtype.itemsize != len(content) or min((*shape, *stride), default=0) < 0:
        raise ValueError(f"{len(content)} bytes for shape {shape} of {dtype}")
    if len(shape) != len(stride) or not is_dense(shape, stride):
        raise ValueError(f"strides {stride} do not fill shape {shape}")
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.as_strided(shape, stride)


def _decode_numpy(described: Any, content: bytes) -> np.ndarray[Any, Any]:
    if described["dtype"] not in _NUMPY_TYPES:
        raise ValueError(f"dtype {str(described['dtype'])[:40]!r}")
    flat = np.frombuffer(bytearray(content), np.dtype(described["dtype"]).newbyteorder("<"))
    return flat.astype(described["dtype"], copy=False).reshape(described["shape"])


def _decode_array(described: Any, fetch: Fetch) -> np.ndarray[Any, Any]:
    return _decode_numpy(described, fetch(described["tensor"]).view(torch.uint8).numpy().tobytes())


_DECODERS: dict[str, Callable[[Any, Fetch, str, int], Any]] = {
    "$int": lambda text, fetch, where, depth: int(text, 16),
    "$float": lambda text, fetch, where, depth: _decode_float(text),
    "$bytes": lambda text, fetch, where, depth: _inline(text),
    "$stored_bytes": lambda number, fetch, where, depth: fetch(number).numpy().tobytes(),
    "$tuple": lambda items, fetch, where, depth: tuple(_decode_list(items, fetch, where, depth)),
    "$size": lambda items, fetch, where, depth: torch.Size(_decode_list(items, fetch, where, depth)),
    "$dict": _decode_dict,
    "$ordered": lambda pairs, fetch, where, depth: OrderedDict(_decode_dict(pairs, fetch, where, depth)),
    "$small_tensor": lambda described, fetch, where, depth: _decode_small_tensor(described),
    "$tensor": lambda number, fetch, where, depth: fetch(number),
    "$scalar": lambda described, fetch, where, depth: _decode_numpy(
        {**described, "shape": []}, _inline(described["base64"])
    )[()],
    "$small_array": lambda described, fetch, where, depth: _decode_numpy(described, _inline(described["base64"])),
    "$array": lambda described, fetch, where, depth: _decode_array(described, fetch),
}
