"""Looks at what is not a swap path: torch, the accelerator, memory and its pages, cores, engines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tierstore.compiled import why_not_used
from tierstore.cores import available
from tierstore.demo.words import size
from tierstore.device import open_device, present_accelerator
from tierstore.doctor.finding import Finding, fail, ok, warn
from tierstore.errors import EngineUnavailableError, InvariantError
from tierstore.io import open_engine
from tierstore.kernels import self_test
from tierstore.policy import TierPolicy
from tierstore.pressure import (
    HostMemory,
    host_memory,
    huge_pages,
    local_ranks,
    memory_stall_percent,
    slurm_memory,
)
from tierstore.rules.adam import AdamWRule

TORCH = (2, 6), (2, 15)
"""From the first, below the second: what tierstore supports."""
LOW_SHARE = 0.1
"""Of memory, what should be available at least."""
SLURM_SLACK = 1.25
"""Control groups that Slurm makes may allow this much more than the job was given."""
STALLED_PERCENT = 10.0
FEW_REQUESTS = 1024

_ROOT = Path("/")


def machine_findings(policy: TierPolicy, root: Path = _ROOT) -> Iterator[Finding]:
    """Look at all of it, for a policy. `root`: where the kernel's files are."""
    yield _torch()
    yield _accelerator(policy)
    memory = host_memory(root)
    yield memory_finding(memory)
    if "SLURM_JOB_ID" in os.environ:
        yield slurm_finding(slurm_memory(), memory)
    stall = memory_stall_percent(root)
    if stall is not None:
        yield stall_finding(stall)
    yield huge_pages_finding(huge_pages(root))
    yield memlock_finding(_memlock(), is_pinned=present_accelerator() is not None, memory=memory)
    yield cores_finding(available(), os.cpu_count() or 1, torch.get_num_threads())
    yield numba_finding(why_not_used())
    if policy.tiers.nvme is not None:
        yield waiting_finding(os.environ)
        yield from _engines(policy.tiers.nvme.io.engine, root)


def _torch() -> Finding:
    """Version, and that an update of a tensor that is cut has the bits of one on the whole."""
    try:
        rule = AdamWRule()
        options = rule.options({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01} | _SWITCHES)
        self_test(rule, options, torch.float32)
    except InvariantError as error:
        return fail("torch", str(error), "install another torch: with this one every optimizer is refused")
    least, below = TORCH
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    text = f"{torch.__version__}, cut tensors are updated to the same bits as whole ones"
    if least <= version < below:
        return ok("torch", text)
    supported = f"from {'.'.join(map(str, least))} to below {'.'.join(map(str, below))}"
    return warn("torch", text, f"tierstore was made for torch {supported}: install one of those")


_SWITCHES = {"amsgrad": False, "maximize": False, "foreach": None, "fused": True}


def _accelerator(policy: TierPolicy) -> Finding:
    device, gpu = present_accelerator(), policy.tiers.gpu
    opened = None if device is None else open_device("auto", device)
    if opened is not None:
        return device_finding(str(device), *opened.memory_bytes())
    if device is not None:
        return warn("accelerator", f"{device}, without streams", "state will be updated on the CPU, from host memory")
    if gpu is not None and gpu.device != "cpu" and gpu.required:
        return fail("accelerator", "none, but tiers.gpu is required", "set tiers.gpu.required: false, or run elsewhere")
    return ok("accelerator", "none that torch can use: updates are computed on the CPU")


def device_finding(name: str, free: int, total: int) -> Finding:
    """Judge an accelerator's memory."""
    text = f"{name}: {size(free)} of {size(total)} are free"
    if free < LOW_SHARE * total:
        return warn("accelerator", text, "end what else takes its memory (nvidia-smi shows what), or use another one")
    return ok("accelerator", text)


def memory_finding(memory: HostMemory) -> Finding:
    """Judge memory by what the machine and the container allow."""
    limit = "no limit below that" if memory.limit_bytes is None else f"{size(memory.limit_bytes)} allowed"
    ranks = local_ranks()
    text = (
        f"{size(memory.total_bytes)}, {limit}; {size(memory.available_bytes)} available ({memory.source}), of which "
        f"tiers.cpu.capacity: auto takes at most {size(memory.available_bytes // 2 // ranks)}"
        + (f" for each of {ranks} ranks" if ranks > 1 else "")
    )
    if memory.available_bytes < LOW_SHARE * memory.bound_bytes:
        return warn("memory", text, "give tiers.cpu.capacity a size, or end what else takes memory here")
    return ok("memory", text)


def slurm_finding(given: int | None, memory: HostMemory) -> Finding:
    """Judge whether the memory that Slurm has given the job is what the job's control groups hold it to."""
    if given is None:
        return ok("slurm", "the job may use all memory of this node, as far as Slurm says")
    allowed = memory.limit_bytes or memory.total_bytes
    text = f"the job has {size(given)} of this node's memory"
    if allowed <= SLURM_SLACK * given:
        return ok("slurm", f"{text}, and {size(allowed)} are allowed")
    return warn(
        "slurm",
        f"{text}, but no control group holds it to that: tiers.cpu.capacity: auto may take more, and Slurm end the job",
        f"give tiers.cpu.capacity a size, at most what the job leaves of {size(given // local_ranks())}",
    )


def stall_finding(percent: float) -> Finding:
    """Judge how long tasks waited for memory in the last ten seconds."""
    text = f"tasks waited for memory for {percent:.1f} % of the last 10 s"
    if percent > STALLED_PERCENT:
        return warn("pressure", text, "memory is short: lower tiers.cpu.capacity, or end what else takes memory here")
    return ok("pressure", text)


def huge_pages_finding(setting: str) -> Finding:
    """Judge the kernel's setting of transparent huge pages."""
    if setting in ("always", "madvise"):
        return ok("huge pages", f"{setting}: arenas lie on pages of 2 MiB")
    return warn(
        "huge pages",
        f"{setting}: direct I/O to pages of 4 KiB has a quarter of the speed",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def _memlock() -> int | None:
    """How many bytes this process may lock; None where there is no limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def memlock_finding(limit: int | None, *, is_pinned: bool, memory: HostMemory) -> Finding:
    """Judge how much memory may be page-locked, which is wanted where there is an accelerator."""
    if limit is None:
        return ok("memlock", "no limit")
    if not is_pinned:
        return ok("memlock", f"{size(limit)}; memory is page-locked only for an accelerator")
    if limit >= memory.available_bytes // 2:
        return ok("memlock", size(limit))
    return warn(
        "memlock",
        f"{size(limit)} may be locked, less than the cpu tier may become",
        "where page-locking is refused: ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )


def cores_finding(usable: int, present: int, threads: int) -> Finding:
    """Judge whether there is a core for the threads that read and write."""
    text = f"{usable} of {present} may be used; torch computes with {threads} threads"
    if threads > usable:
        return warn("cores", text, f"OMP_NUM_THREADS={usable}: more threads than cores wait for each other")
    if usable == 1:
        return warn("cores", text, "the update and the threads that read and write take turns on one core")
    return ok("cores", text)


def numba_finding(problem: str) -> Finding:
    """Say whether bfloat16 parameters are updated in one pass; `problem`: why not."""
    if not problem:
        return ok("numba", "bfloat16 parameters on the CPU are updated in one pass over memory")
    return ok("numba", f"{problem}: bfloat16 parameters on the CPU take 1.7 times as long without the extra `numba`")


def waiting_finding(environment: Mapping[str, str]) -> Finding:
    """Judge how OpenMP's threads wait."""
    policy = environment.get("OMP_WAIT_POLICY")
    if policy is not None and policy.upper() == "PASSIVE":
        return ok("OMP_WAIT_POLICY", "PASSIVE: threads that wait leave their core to those that read and write")
    return warn(
        "OMP_WAIT_POLICY",
        f"{policy or 'not set'}: torch's threads spin while they wait, on the cores of those that read and write",
        "with state on NVMe try OMP_WAIT_POLICY=PASSIVE, set before Python starts",
    )


def _engines(wanted: str, root: Path) -> Iterator[Finding]:
    is_possible = True
    for name in ("threads", "libaio"):
        try:
            open_engine(name, threads=1, queue_depth=1, request_size=4096).close()
        except EngineUnavailableError as error:
            is_possible = name != "libaio" and is_possible
            if name == wanted:
                yield fail("engine", f"{name}, which the policy asks for: {error}", "set tiers.nvme.io.engine: auto")
            else:
                yield ok("engine", f"{name} is not available, and not needed: {error}")
        else:
            yield ok("engine", f"{name} works")
    numbers = [_number(root / "proc/sys/fs" / name) for name in ("aio-nr", "aio-max-nr")]
    if is_possible and None not in numbers:
        yield aio_finding(*(number or 0 for number in numbers))


def aio_finding(used: int, limit: int) -> Finding:
    """Judge how many asynchronous requests the kernel still takes, which libaio needs."""
    text = f"{used:,} of {limit:,} asynchronous requests are taken on this machine"
    if limit - used < FEW_REQUESTS:
        return warn("aio-max-nr", text, "for libaio, as root: sysctl fs.aio-max-nr=1048576")
    return ok("aio-max-nr", text)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
