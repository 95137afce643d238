"""Which rows there are: every system, with the host memory it may use for the optimizer.

Who swaps appears once per budget. tierstore gets no more than DeepSpeed's swap buffers take at the same budget, which
come in whole layers; what both really take is measured beside it, and in one more row tierstore is given as much as
DeepSpeed was seen to take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.peers.process import Contender
from benchmarks.peers.work import Work
from benchmarks.peers.zero3 import BUFFERS, sub_group_size

ZERO_CPU, FUSED = "DeepSpeed ZeRO-3 cpu", "torch fused"
BESIDE_THE_TIER = 96 << 20
"""Host memory that tierstore was seen to take beside its cpu tier, at most."""
TARGETS = (2.0, 3.5)
"""What tierstore's parameters/s over DeepSpeed's are to reach at the first budget and at the others."""


def contenders_for(work: Work, budgets: Mapping[str, int]) -> Iterator[Contender]:
    """Yield all rows; `budgets` names amounts of host memory in bytes, and begins with the least."""
    for number, (name, budget) in enumerate(budgets.items()):
        zero = f"DeepSpeed ZeRO-3 nvme, {name}"
        ours = min(budget, 4 * BUFFERS * sub_group_size(work, budget))
        yield Contender(f"tierstore cpu+nvme, {name}", "tierstore", ours, {}, zero, TARGETS[min(number, 1)])
        yield Contender(zero, "deepspeed", budget, {"device": "nvme"}, zero)
    least, first = next(iter(budgets.values())), f"DeepSpeed ZeRO-3 nvme, {next(iter(budgets))}"
    yield Contender("tierstore cpu+nvme, DeepSpeed's memory", "tierstore", 0, {}, first, TARGETS[0], memory_of=first)
    yield Contender(ZERO_CPU, "deepspeed", least, {"device": "cpu"}, first)
    for implementation in ("fused", "foreach"):
        yield Contender(f"torch {implementation}", "torch", least, {"implementation": implementation}, first)
    for keeps, where in ((False, "disk"), (True, "page cache")):
        yield Contender(f"torch.save/load, {where}", "saved", least, {"page_cache": keeps}, first)
        yield Contender(f"memory-mapped, {where}", "mapped", least, {"page_cache": keeps}, first)
    yield Contender("torchao CPUOffloadOptimizer", "torchao", least, {}, first)
    yield Contender("bitsandbytes PagedAdamW", "bitsandbytes", least, {}, first)


def with_memory(contender: Contender, seen: Mapping[str, int]) -> Contender:
    """The row with the memory that another was `seen` to take, where it is to have that; none if that is not here."""
    if not contender.memory_of:
        return contender
    return replace(contender, budget_bytes=max(0, seen.get(contender.memory_of, 0) - BESIDE_THE_TIER))
