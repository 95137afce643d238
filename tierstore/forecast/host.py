"""What a binding and its work take of host memory, to the byte where it is reserved."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from tierstore.blueprint import Blueprint
from tierstore.cores import shared_by
from tierstore.forecast.answer import HostForecast
from tierstore.forecast.question import Question
from tierstore.kernels import LOW_PRECISION, Manner, update
from tierstore.layout import ChunkClass
from tierstore.masters import HALF_WAY, REMAINDER, TIE
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.records import MASTER, state_fields
from tierstore.results import Results
from tierstore.rules import Pieces, Rule, step_count
from tierstore.scratch import Scratch


def host_forecast(question: Question, blueprint: Blueprint, rooms: Mapping[str, Room]) -> HostForecast:
    policy, extent = blueprint.plant.policy, blueprint.chunk_bytes
    is_stand_in = policy.tiers.gpu is not None and policy.tiers.gpu.device == "cpu"
    result = sum(
        member.form.numel() * sum(field.dtype.itemsize for field in state_fields(member, policy.state))
        for member in question.covered
    )
    options = question.rule.options(question.groups[0])
    classes = {spec.cls for spec in blueprint.specs if spec.cls.fields and (spec.cls.compute == "cpu" or is_stand_in)}
    return HostForecast(
        cpu_tier=rooms["cpu"].extents * extent if "cpu" in rooms else 0,
        gpu_stand_in=rooms["gpu"].extents * extent if "gpu" in rooms and is_stand_in else 0,
        record_buffer=extent,
        scratch=max((scratch_bytes(cls, question.rule, options, policy) for cls in classes), default=0),
        state_dict=result,
        state_dict_is_mapped=Results.under(policy, result).are_mapped(result),
    )


def scratch_bytes(cls: ChunkClass, rule: Rule, options: Any, policy: TierPolicy) -> int:
    """The most that buffers for tiles of a class take, which are computed on the CPU.

    Found by updating a few elements: a buffer has one size, however many elements of a tile are in it.
    """

    def pieces(kind: torch.dtype, value: float = 0.0, elements: int = 64) -> list[torch.Tensor]:
        return [torch.full((elements,), value, dtype=kind, device="cpu") for _ in range(2)]

    kinds = {field.name: field.dtype for field in cls.fields}
    is_split = REMAINDER in cls.fields
    moments = {name: pieces(kind) for name, kind in kinds.items() if name not in (MASTER, REMAINDER.name, TIE.name)}
    masters = pieces(torch.float32) if MASTER in kinds else []
    remainders = pieces(REMAINDER.dtype, HALF_WAY) if is_split else []
    ties = pieces(TIE.dtype, elements=8) if is_split else []
    steps = [step_count(1.0) for _ in range(2)]
    work = Pieces(pieces(cls.dtype), pieces(cls.dtype), moments, masters, steps, remainders=remainders, ties=ties)
    scratch = Scratch()
    formula = partial(rule.update, options=options, is_first=True, grad_scale=None)
    with torch.no_grad():
        update(work, formula, Manner(scratch, policy.check_parameters, rule.is_one_pass(options), None, True))
    threads = shared_by(1 << 10) if cls.dtype in LOW_PRECISION else 1
    return scratch.nbytes * threads
