"""Makers for the tests of the optimizer: parameters, groups, gradients, policies, and the reference they are held to.

`Reference` is invariant 1 of the architecture written down once more, without a line of tierstore: torch's fused kernel
called once on each whole parameter, with parameter, gradient and state in one dense layout; low precision through a
float32 master. `Case` draws everything that may be chosen about a training run from one seed; `draw_policy` everything
that may be chosen about where its state lies, which must not change a bit.
"""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tierstore.errors import CapacityError, EngineUnavailableError, FailedStepError
from tierstore.io import open_engine
from tierstore.optimizer import TieredAdamW
from tierstore.tiered import TieredOptimizer

KIB = 1 << 10
MIB = 1 << 20
LOW = (torch.bfloat16, torch.float16)

# -- layouts ----------------------------------------------------------------------------------------------------


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Copy values into a tensor whose strides are of some kind; a kind that the shape does not allow is row-major."""
    if layout == "reversed" and values.dim() > 1:
        order = tuple(reversed(range(values.dim())))
        return values.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if layout == "channels_last" and values.dim() == 4:
        return values.clone(memory_format=torch.channels_last)
    if layout == "strided" and values.dim() > 0:  # every second element: not dense
        base = torch.zeros(*values.shape[:-1], 2 * values.shape[-1], dtype=values.dtype)
        base[..., ::2] = values
        return base[..., ::2]
    if layout == "offset" and values.dim() > 0:  # dense, but not at the beginning of its storage
        base = torch.zeros(values.numel() + 3, dtype=values.dtype)
        base[3:] = values.reshape(-1)
        return base[3:].view(values.shape)
    if layout == "expanded" and values.numel() > 0:  # one value many times, as the gradient of a sum is
        return values.reshape(-1)[0].clone().expand(values.shape)
    return values.clone(memory_format=torch.contiguous_format)


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_gap_free(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of storage, each once; worked out here by looking at every address."""
    addresses = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = addresses.unsqueeze(-1) + torch.arange(size) * stride
    is_used = torch.zeros(tensor.numel(), dtype=torch.bool)
    is_used[addresses[addresses < tensor.numel()]] = True
    return bool(is_used.all())


# -- the reference ----------------------------------------------------------------------------------------------


class Reference:
    """AdamW on its own copies of the parameters, as invariant 1 says. `groups` are dicts as torch's."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.groups = groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._dense: dict[Tensor, bool] = {}

    @property
    def parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(parameter for group in self.groups for parameter in group["params"]))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            for parameter in dict.fromkeys(group["params"]):
                if parameter.grad is not None:
                    self._update(parameter, group, times=sum(other is parameter for other in group["params"]))

    def _update(self, parameter: Tensor, group: dict[str, Any], times: int) -> None:
        values = real(parameter)
        if parameter not in self._dense:
            self._dense[parameter] = is_gap_free(values)
        strides = values.stride() if self._dense[parameter] else torch.empty(values.shape).stride()

        def dense(source: Tensor) -> Tensor:
            made = torch.empty_strided(values.shape, strides, dtype=torch.float32 if values.dtype in LOW else None)
            made = made if values.dtype in LOW else made.to(values.dtype)
            return made.copy_(source)

        state = self.state.setdefault(parameter, {})
        if not state:
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
            state |= {name: dense(torch.zeros(())) for name in names}
            state["step"] = torch.tensor(0.0)
            if values.dtype in LOW:
                state["master"] = dense(values)
        if values.dtype in LOW:  # the parameter is the truth: adopt what somebody else has put there
            master = state["master"]
            changed = master.to(values.dtype).view(torch.int16) != values.contiguous().view(torch.int16)
            master.copy_(torch.where(changed, values.float(), master))
        working = state.get("master", dense(values))
        assert parameter.grad is not None
        gradient = dense(real(parameter.grad.resolve_conj()))
        state["step"] += times
        beta1, beta2 = group["betas"]
        for _ in range(times):
            torch._fused_adamw_(
                [working],
                [gradient],
                [state["exp_avg"]],
                [state["exp_avg_sq"]],
                [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
                [state["step"]],
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
        values.copy_(working)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, in row-major order: NaN equals itself, and 0 is not -0."""
    flat = real(tensor.detach()).contiguous().reshape(-1)
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def assert_same_parameters(found: Sequence[Tensor], wanted: Sequence[Tensor], when: object = "") -> None:
    for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not same_bits(one, other):
            different = (bits(one) != bits(other)).nonzero().reshape(-1)
            raise AssertionError(
                f"{when}: parameter {position} {tuple(one.shape)} {one.dtype} {one.stride()} differs in "
                f"{len(different)} elements, first {different[:5].tolist()}"
            )


def assert_state_is_lost(optimizer: TieredOptimizer, story: str) -> None:
    """Whoever wants to see state, or to save it, hears why there is none, and not that there is none."""
    parameter = optimizer.param_groups[0]["params"][0]
    looks: list[Callable[[], object]] = [
        optimizer.state_dict,
        lambda: optimizer.state_dict(partial=True),
        lambda: pickle.dumps(optimizer),
        lambda: copy.deepcopy(optimizer),
        lambda: dict(optimizer.state),
        lambda: len(optimizer.state),
        lambda: parameter in optimizer.state,
        lambda: dict(optimizer.state[parameter]),
    ]
    for look in looks:
        with pytest.raises(FailedStepError, match=story):
            look()


def assert_same_state(optimizer: TieredOptimizer, reference: Reference, when: object = "") -> None:
    """Compare the whole state_dict with the reference's state, to the bit."""
    saved = optimizer.state_dict()["state"]
    ids: dict[Tensor, int] = {}  # of a parameter that occurs twice, torch takes the last number
    for number, parameter in enumerate(p for group in reference.groups for p in group["params"]):
        ids[parameter] = number
    with_state = {ids[parameter] for parameter in reference.state}
    assert set(saved) == with_state, f"{when}: state for {set(saved)}, wanted for {with_state}"
    for parameter, wanted in reference.state.items():
        found = saved[ids[parameter]]
        assert set(found) == set(wanted), f"{when}: fields {set(found)}, wanted {set(wanted)}"
        for name, value in wanted.items():
            value = torch.view_as_complex(value) if parameter.is_complex() and name != "step" else value
            assert same_bits(found[name], value), f"{when}: {name} of {ids[parameter]} differs"


# -- cases ------------------------------------------------------------------------------------------------------

SHAPES: list[tuple[int, ...]] = [
    *[(), (0,), (1,), (3,), (22,), (55,), (64,), (128,), (500,), (1023,), (1024,), (1025,)],  # CASES 4 and 5
    *[(3, 4), (3, 0, 2), (1, 1), (5, 1), (77, 33), (300, 50), (130, 257), (16, 1024)],
    *[(8, 3, 5, 5), (4, 16, 3, 3), (7, 5, 3), (2, 3, 4, 5, 6)],
]
LARGE_SHAPES: list[tuple[int, ...]] = [(512, 1000), (1000,), (262144,), (262145,), (300, 500), (128, 32, 3, 3)]
LAYOUTS = ["row-major"] * 4 + ["reversed", "channels_last", "strided", "offset"]
GRADIENT_LAYOUTS = ["like it"] * 4 + ["row-major", "reversed", "channels_last", "strided", "expanded", "conj"]
DTYPES = [torch.float32] * 4 + [torch.float64, torch.complex64, torch.bfloat16, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Drawn:
    """One parameter of a case."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    gradient_layout: str
    times: int = 1


@dataclass(frozen=True)
class Case:
    """A training run: parameters, groups and gradients, the same every time they are made."""

    seed: int
    groups: tuple[tuple[dict[str, Any], tuple[Drawn, ...]], ...]
    threads: int
    steps: int = 3
    skipping: float = 0.2

    @classmethod
    def draw(cls, seed: int) -> Case:
        choose = random.Random(seed)
        pool = SHAPES + (LARGE_SHAPES if seed % 4 == 0 else [])
        groups = []
        for _ in range(choose.choice([1, 1, 2, 3, 6])):
            members = tuple(
                Drawn(
                    choose.choice(pool),
                    choose.choice(DTYPES),
                    choose.choice(LAYOUTS),
                    choose.choice(GRADIENT_LAYOUTS),
                    times=2 if choose.random() < 0.05 else 1,
                )
                for _ in range(choose.choice([1, 2, 4, 7]))
            )
            groups.append((_draw_options(choose), members))
        return cls(seed, tuple(groups), threads=2 if seed % 4 == 1 else 1)

    def make_groups(self) -> list[dict[str, Any]]:
        """Make parameters and groups, anew and equal each time."""
        generator = torch.Generator().manual_seed(self.seed)
        groups = []
        for options, members in self.groups:
            parameters: list[Tensor] = []
            for drawn in members:
                values = torch.randn(drawn.shape, generator=generator, dtype=_wide(drawn.dtype)).to(drawn.dtype)
                parameters += [Parameter(laid_out(values, drawn.layout))] * drawn.times
            lr = options["lr"]
            groups.append({**options, "lr": lr.clone() if isinstance(lr, Tensor) else lr, "params": parameters})
        return groups

    def drawn(self) -> list[Drawn]:
        return [drawn for _, members in self.groups for drawn in members]

    def begin_step(self, groups: Sequence[dict[str, Any]], step: int) -> None:
        """Set the gradients and learning rates of a step, missing ones included."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        choose = random.Random(1000 * self.seed + step)
        parameters = dict.fromkeys(parameter for group in groups for parameter in group["params"])
        for parameter, drawn in zip(parameters, self.drawn(), strict=True):
            values = torch.randn(drawn.shape, generator=generator, dtype=_wide(drawn.dtype)).to(drawn.dtype)
            parameter.grad = None if choose.random() < self.skipping else _as_gradient(values, parameter, drawn)
        for group in groups:
            if choose.random() < 0.3:
                factor = choose.choice([0.5, 0.1, 3.0, 0.0])
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(factor)
                else:
                    group["lr"] *= factor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW else dtype


def _as_gradient(values: Tensor, parameter: Tensor, drawn: Drawn) -> Tensor:
    if drawn.gradient_layout == "like it":
        return laid_out(values, drawn.layout)
    if drawn.gradient_layout == "conj":
        return values.conj()  # lazy, where it is complex
    return laid_out(values, drawn.gradient_layout)


def _draw_options(choose: random.Random) -> dict[str, Any]:
    lr = choose.choice([1e-3, 0.1, 3e-4])
    return {
        "lr": torch.tensor(lr) if choose.random() < 0.15 else lr,
        "betas": choose.choice([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)]),
        "eps": choose.choice([1e-8, 1e-6, 1e-3]),
        "weight_decay": choose.choice([0.0, 0.01, 0.1]),
        "amsgrad": choose.random() < 0.3,
        "maximize": choose.random() < 0.2,
    }


# -- policies ---------------------------------------------------------------------------------------------------

TIER_SETS = [("gpu", "cpu", "nvme"), ("cpu", "nvme"), ("cpu",), ("nvme",), ("gpu", "nvme"), ("gpu", "cpu")]
ENGINES = ["threads", "libaio", "aiofiles"]


@cache
def able(engine: str) -> str:
    """The engine, or `threads` in its stead where it cannot run (libaio is optional)."""
    try:
        open_engine(engine, threads=None, queue_depth=None, request_size=None).close()
    except EngineUnavailableError:
        return "threads"
    return engine


def draw_policy(choose: random.Random, folders: Sequence[Path], least_chunk: int, state_bytes: int) -> dict[str, Any]:
    """Choose tiers, capacities from three extents, chunk size, order, engine and paths."""
    names = choose.choice(TIER_SETS)
    sizes = [size for size in (16, 20, 24, 32, 48, 64, 100, 256, 1024) if size * KIB >= least_chunk]
    chunk = choose.choice([size for size in sizes if size * KIB >= state_bytes // 200] or sizes[-1:]) * KIB
    extents = [3, 3, 4, 5, 8, 17, 40]
    tiers: dict[str, Any] = {}
    if "gpu" in names:
        tiers["gpu"] = {"device": "cpu", "capacity": choose.choice([choose.choice(extents) * chunk, "auto"])}
    if "cpu" in names:
        tiers["cpu"] = {"capacity": choose.choice([choose.choice(extents) * chunk] * 3 + ["auto"])}
    if "nvme" in names:
        tiers["nvme"] = {
            "paths": [str(folder) for folder in folders[: choose.choice([1, 2])]],
            "io": {
                "engine": able(choose.choice(ENGINES)),
                "threads": choose.choice([1, 2, "auto"]),
                "queue_depth": choose.choice([1, 2, "auto"]),
                "request_size": choose.choice([chunk // 2 // 4096 * 4096, chunk // 4 // 4096 * 4096 or 4096, "auto"]),
            },
        }
    policy: dict[str, Any] = {
        "chunk_size": choose.choice([chunk, chunk, chunk, "auto"]),
        "order": choose.choice(["auto", "alternating", "fixed"]),
        "tiers": tiers,
    }
    if choose.random() < 0.3:
        policy["placement"] = [{"params": "param.*[02468]", "tier": choose.choice(names)}]
    return policy


def state_bytes(groups: Sequence[dict[str, Any]]) -> int:
    """About what the state of all parameters takes."""
    return sum(12 * real(parameter.detach()).numel() for group in groups for parameter in group["params"])


def least_chunk_bytes(groups: Sequence[dict[str, Any]]) -> int:
    """The smallest chunk that may be asked for: 1,024 elements of the widest state."""
    widest = 0
    for group in groups:
        for parameter in group["params"]:
            values = real(parameter.detach())
            moment = 4 if values.dtype in LOW else values.element_size()
            widest = max(widest, moment * (2 + bool(group.get("amsgrad")) + (values.dtype in LOW)))
    return -(-1024 * widest // 4096) * 4096


def fitted(
    groups: Sequence[dict[str, Any]], policy: dict[str, Any], make: Callable[..., TieredOptimizer] = TieredAdamW
) -> TieredOptimizer:
    """Construct; where capacities are too small raise them to what the error says is enough, which then must be."""
    for _ in range(12):
        try:
            return make(groups, policy=policy)
        except CapacityError as error:
            story = str(error)
        raise_capacities(policy, story)
        if policy["chunk_size"] != "auto":  # else it grows with the capacities
            break
    return make(groups, policy=policy)


def raise_capacities(policy: dict[str, Any], story: str) -> None:
    """Give the tiers of a policy the capacities that a CapacityError asks for."""
    found = re.findall(r"tiers\.(\w+)\.capacity to at least ([\d,]+) bytes", story.split(": raise ")[-1])
    assert found, f"no number to raise in: {story}"
    for tier, enough in found:
        policy["tiers"].setdefault(tier, {})["capacity"] = int(enough.replace(",", ""))


@dataclass
class FourTiers:
    """The policies that most tests run under, each small enough that chunks travel."""

    folder: Path
    chunk: int = 16 * KIB
    extents: int = 3
    names: tuple[str, ...] = field(default=("gpu cpu nvme", "cpu nvme", "cpu", "nvme", "gpu nvme"))

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((name, self[name]) for name in self.names)

    def __getitem__(self, name: str) -> dict[str, Any]:
        return small_policy(self.folder, name.split(), chunk=self.chunk, extents=self.extents)


def small_policy(
    folder: Path, tiers: Sequence[str] = ("cpu", "nvme"), *, chunk: int = 16 * KIB, extents: int = 3, **more: Any
) -> dict[str, Any]:
    """A policy whose memory tiers have a few extents when there is nvme for the rest."""
    capacity: Any = extents * chunk if "nvme" in tiers else "auto"
    settings: dict[str, Any] = {
        "gpu": {"device": "cpu", "capacity": capacity},
        "cpu": {"capacity": capacity},
        "nvme": {"paths": [str(folder)]},
    }
    return {"chunk_size": chunk, "tiers": {name: settings[name] for name in tiers}, **more}


def seeded(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    """Make parameters of normal values."""
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(parameters: Sequence[Tensor], step: int, *, scale: float = 1.0) -> None:
    """Give each parameter the gradient of a step."""
    generator = torch.Generator().manual_seed(7000 + step)
    for parameter in parameters:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def set_gradient_of_any_dtype(parameter: Tensor, gradient: Tensor) -> None:
    """Set `.grad`, whose dtype may be another than the tensor's where `grad_dtype` says so, which older torch lacks.

    There, only one that was set while the values had its dtype can be another.
    """
    parameter.grad = None
    if hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient
        return
    values = parameter.data
    parameter.data = torch.empty_like(values, dtype=gradient.dtype)
    parameter.grad = gradient
    parameter.data = values


def train(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], steps: Sequence[int] | range) -> None:
    """Take steps with the gradients of `set_gradients`."""
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()
