"""Binding: nothing is reserved before it is needed, parameters may change at any time, and everything is given back."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import FaultyEngine
from tests.optimizer.cases import (
    KIB,
    MIB,
    FourTiers,
    Reference,
    assert_same_parameters,
    assert_same_state,
    laid_out,
    raise_capacities,
    same_bits,
    seeded,
    set_gradients,
    small_policy,
    train,
)
from tests.optimizer.test_parity import losses_of, make_model
from tests.processes import run_script
from tierstore.build import Parts, plan_plant
from tierstore.device import HostDevice
from tierstore.errors import (
    CapacityError,
    DiskFullError,
    ForkedStoreError,
    PolicyError,
    StateDictError,
    StoreClosedError,
    SwapError,
    WrongThreadError,
)
from tierstore.folders import disk_margin
from tierstore.io import open_engine
from tierstore.optimizer import TieredAdamW
from tierstore.policy import TierPolicy
from tierstore.pressure import DiskSpace

pytestmark = pytest.mark.filterwarnings("ignore:the swap folder:UserWarning")

EVERY_TIERS = pytest.mark.parametrize("tiers", FourTiers.names)


def open_files() -> list[str]:
    """What the descriptors of this process lead to, swap files by the word deleted."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "tierstore" in thread.name)


@pytest.fixture
def untouched(tmp_path: Path) -> Callable[[], bool]:
    """Says whether there are no more descriptors and threads than at the beginning, and nothing in the swap folder."""
    gc.collect()
    files, running = Counter(open_files()), Counter(threads())

    def is_untouched() -> bool:
        return Counter(open_files()) <= files and Counter(threads()) <= running and not list(tmp_path.iterdir())

    return is_untouched


# -- construction -----------------------------------------------------------------------------------------------


@EVERY_TIERS
def test_the_constructor_reserves_nothing(tiers: str, tmp_path: Path, untouched: Callable[[], bool]) -> None:
    optimizer = TieredAdamW(seeded((300_000,)), policy=small_policy(tmp_path, tiers.split()))
    optimizer.zero_grad()
    assert not optimizer.state and optimizer.state_dict()["state"] == {} and repr(optimizer)
    assert optimizer.step() is None
    assert untouched()
    optimizer.close()


def test_the_constructor_of_an_optimizer_for_much_state_takes_no_memory(tmp_path: Path) -> None:
    """CASES 28: peers made all state in memory first, and were killed."""
    printed = run_script(
        """
        import torch
        from tierstore.optimizer import TieredAdamW

        def kib(name):
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

        TieredAdamW([torch.nn.Parameter(torch.zeros(10))])
        parameter = torch.nn.Parameter(torch.empty(1 << 28))  # never touched; 2 GiB of state
        before = kib("RssAnon"), kib("VmSize")
        policy = {"tiers": {"cpu": {"capacity": "64MiB"}, "nvme": {"paths": [folder]}}}
        optimizer = TieredAdamW([parameter], policy=policy)
        print(kib("RssAnon") - before[0], kib("VmSize") - before[1])
        """,
        tmp_path,
    )
    anonymous, virtual = map(int, printed.split())
    assert anonymous < 4 * KIB and virtual < 64 * KIB


@pytest.mark.parametrize("names", ["cpu", "gpu", "cpu nvme", "gpu cpu nvme", "gpu nvme", "nvme", "gpu cpu"])
@pytest.mark.parametrize("order", ["alternating", pytest.param("fixed", marks=pytest.mark.long)])
def test_too_little_room_is_refused_at_construction_and_the_number_named_is_enough(
    names: str, order: str, tmp_path: Path, untouched: Callable[[], bool]
) -> None:
    """CASES 8: from no extent upwards; what the error says is enough must be, and must be needed."""
    chunk = 16 * KIB
    tiers = names.split()
    refused = 0
    for extents in range(4):
        policy = small_policy(tmp_path, tiers, chunk=chunk, order=order)
        for name in tiers:
            policy["tiers"][name]["capacity"] = max(1, extents * chunk)
        parameters = seeded((20_000,))
        try:
            TieredAdamW(parameters, policy=policy)
        except CapacityError as error:
            refused += f"{chunk:,} bytes" in str(error)
            raise_capacities(policy, str(error))
        assert untouched()
        with TieredAdamW(parameters, policy=policy) as optimizer:
            train(optimizer, parameters, range(2))
    assert refused >= 3


@pytest.mark.parametrize("smallest", [0, 1, 4095, 8 * KIB])
def test_a_chunk_too_small_for_any_state_is_refused_with_the_size_that_is_enough(smallest: int, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"chunk_size"):
        TieredAdamW(seeded((10,), dtype=torch.bfloat16), policy={**small_policy(tmp_path), "chunk_size": smallest})


def test_three_extents_in_each_tier_are_enough_for_any_step(tmp_path: Path) -> None:
    """Invariant 5, beside a tier below that has room for all."""
    for names in ("cpu nvme", "gpu cpu nvme", "gpu nvme"):
        parameters = seeded((60_000,), (300,), (5000,))
        optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path, names.split(), extents=3))
        train(optimizer, parameters, range(3))
        assert all(
            tier.capacity_bytes == 3 * 16 * KIB
            for name, tier in optimizer.store.stats().tiers.items()
            if name in names.split()[:-1]
        )


@pytest.mark.parametrize("make", [dict, TierPolicy.load, "path", "str path"])
def test_a_policy_may_be_a_mapping_a_path_or_an_object(make: Any, tmp_path: Path) -> None:
    policy: Any = small_policy(tmp_path)
    if isinstance(make, str):
        path = tmp_path / "policy.yaml"
        path.write_text(TierPolicy.load(policy).to_yaml())
        policy = str(path) if make == "str path" else path
    else:
        policy = make(policy)
    parameters = seeded((30_000,))
    with TieredAdamW(parameters, policy=policy) as optimizer:
        train(optimizer, parameters, range(2))
        assert set(optimizer.store.stats().tiers) == {"cpu", "nvme"}


def test_tiers_alone_take_defaults_and_select_from_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_SWAP", str(tmp_path))
    parameters = seeded((30_000,))
    with TieredAdamW(parameters, tiers=["cpu"]) as optimizer:
        train(optimizer, parameters, [0])
        assert set(optimizer.store.stats().tiers) == {"cpu"}
    with TieredAdamW(
        parameters, policy=small_policy(tmp_path, ["gpu", "cpu", "nvme"]), tiers=["cpu", "nvme"]
    ) as optimizer:
        train(optimizer, parameters, [0])
        assert set(optimizer.store.stats().tiers) == {"cpu", "nvme"}
    with pytest.raises(PolicyError, match="ram"):
        TieredAdamW(parameters, tiers=["ram"])


def test_unknown_engines_folders_and_keys_are_refused(tmp_path: Path, untouched: Callable[[], bool]) -> None:
    policy = small_policy(tmp_path)
    policy["tiers"]["nvme"]["io"] = {"engine": "uring"}
    with pytest.raises(PolicyError, match=r"tiers\.nvme\.io\.engine"):
        TieredAdamW(seeded((10,)), policy=policy)
    with pytest.raises(PolicyError, match="did you mean 'chunk_size'"):
        TieredAdamW(seeded((10,)), policy={"chunksize": "1MiB", "tiers": {"cpu": {}}})
    parameters = seeded((30_000,))
    set_gradients(parameters, 0)
    before = parameters[0].detach().clone()
    (tmp_path / "missing").mkdir()
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path / "missing"))
    (tmp_path / "missing").rmdir()
    for _ in range(2):
        with pytest.raises(SwapError, match="does not exist"):
            optimizer.step()
        assert same_bits(parameters[0], before) and not optimizer.state
    (tmp_path / "missing").mkdir()
    optimizer.step()  # the first that can
    assert optimizer.state[parameters[0]]["step"] == 1
    optimizer.close()
    (tmp_path / "missing").rmdir()
    assert untouched()


def test_swap_folders_that_cannot_be_used_are_refused_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], bool]
) -> None:
    """A typing mistake in a folder's name must not be told hours later, at the first step."""
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir(mode=0o500)
    may_access = os.access
    monkeypatch.setattr(os, "access", lambda path, *_, **__: Path(path).name != "locked" and may_access(path, os.W_OK))
    monkeypatch.setattr(os, "supports_effective_ids", {os.access})
    for name, code, text in [
        ("missing", errno.ENOENT, "does not exist: create it"),
        ("file", errno.ENOTDIR, "is not a folder: name a folder"),
        ("locked", errno.EACCES, "cannot be written by this user: change its permissions"),
    ]:
        for capacity in ("auto", "10%"):
            policy = small_policy(tmp_path)
            policy["tiers"]["nvme"] = {"paths": [str(tmp_path), str(tmp_path / name)], "capacity": capacity}
            with pytest.raises(SwapError, match=f"{name} {text}, or set tiers") as caught:
                TieredAdamW(seeded((30_000,)), policy=policy)
            assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / name))
    missing = {"tiers": {"cpu": {"capacity": "1MiB"}, "nvme": {"paths": [str(tmp_path / "missing")]}}}
    TieredAdamW(seeded((300,)), policy=missing)  # all of it fits in memory: the folder is not needed
    (tmp_path / "file").unlink()
    (tmp_path / "locked").rmdir()
    assert untouched()


def test_a_capacity_beyond_the_disk_is_refused_at_construction(tmp_path: Path, untouched: Callable[[], bool]) -> None:
    policy = small_policy(tmp_path)
    policy["tiers"]["nvme"]["capacity"] = "900TiB"
    with pytest.raises(
        DiskFullError, match=r"are needed .* are free.*lower tiers\.nvme\.capacity to at most"
    ) as caught:
        TieredAdamW(seeded((30_000,)), policy=policy)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert str(900 << 40) in str(caught.value)
    assert untouched()


def test_state_beyond_the_disk_is_refused_at_construction_and_before_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.folders.disk_space", lambda place: DiskSpace(1 << 40, disk_margin(1 << 40) + MIB))
    with pytest.raises(DiskFullError, match=r"to at most 1048576 bytes"):
        TieredAdamW(seeded((200_000,)), policy=small_policy(tmp_path))
    (parameter,) = seeded((200_000,))
    parameter.requires_grad_(False)
    optimizer = TieredAdamW([parameter], policy=small_policy(tmp_path))  # frozen: no need for room
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(200_000), "exp_avg_sq": torch.zeros(200_000)}
    with pytest.raises(DiskFullError):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: state}})
    assert not optimizer.state


def test_rebinding_takes_over_the_disk_space_of_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free beside the old files need not have room for the state a second time."""
    model = nn.Linear(300, 200)
    optimizer = TieredAdamW(model.parameters(), policy=small_policy(tmp_path))
    train(optimizer, list(model.parameters()), [0])
    before = optimizer.store
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.folders.disk_space", lambda place: DiskSpace(1 << 40, 0))
        optimizer.check_fits(optimizer.param_groups)
        optimizer.add_param_group({"params": seeded((10,))})
    train(optimizer, list(model.parameters()), [1])
    assert optimizer.store is not before


def test_memory_for_staging_is_seen_in_stats_where_and_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A policy of nvme alone takes host memory all the same: not to be hidden, nor warned of as if it were wrong."""
    parameters = seeded((30_000,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path, ["nvme"]))
    with warnings.catch_warnings(), caplog.at_level("INFO", logger="tierstore.build"):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the swap folder")
        train(optimizer, parameters, range(2))
    optimizer.store.wait()
    stats = optimizer.store.stats().tiers["cpu"]
    assert stats.capacity_bytes == 8 * 16 * KIB and stats.peak_bytes > 0
    assert optimizer.store.where("param.0").get("cpu", 0) > 0
    assert [
        record.getMessage()
        for record in caplog.records
        if "cpu: 8 extents" in record.message and "staging" in record.message
    ]


def test_a_placement_rule_that_matches_nothing_warns_once_naming_the_pattern(tmp_path: Path) -> None:
    rules = [{"params": "*weight", "tier": "cpu"}, {"params": "*embed*", "tier": "cpu"}]
    model = nn.Linear(50, 40)
    policy = small_policy(tmp_path, extents=30, placement=rules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = TieredAdamW(model.named_parameters(), policy=policy)
        assert not caught
        train(optimizer, list(model.parameters()), range(2))
        model.to(torch.bfloat16)
        train(optimizer, list(model.parameters()), range(2))
    assert [warning.category for warning in caught] == [UserWarning]
    assert "'*embed*'" in str(caught[0].message) and "'*weight'" not in str(caught[0].message)


def test_a_rule_for_parameters_without_names_says_how_to_name_them(tmp_path: Path) -> None:
    optimizer = TieredAdamW(
        seeded((10,)), policy=small_policy(tmp_path, placement=[{"params": "*embed*", "tier": "cpu"}])
    )
    with pytest.warns(UserWarning, match=r"named_parameters\(\)"):
        optimizer.store.check()


def test_a_groups_tier_comes_before_the_rules_and_is_checked(tmp_path: Path) -> None:
    policy = small_policy(tmp_path, extents=30, placement=[{"params": "*", "tier": "nvme"}])
    groups = [{"params": seeded((3000,)), "tier": "cpu"}, {"params": seeded((3000,))}]
    optimizer = TieredAdamW(groups, policy=policy)
    binding, _ = optimizer.bound()
    homes = [{binding.store.home_of(chunk.number) for chunk, _ in spans} for spans in binding.layout.spans_of]
    assert homes == [{"cpu"}, {"nvme"}]
    with pytest.raises(PolicyError, match=r"tier 'ram'; allowed: gpu, cpu, nvme"):
        TieredAdamW([{"params": seeded((10,)), "tier": "ram"}], policy=policy)
    with pytest.raises(PolicyError, match="tier 'gpu' is not among the tiers in use"):
        TieredAdamW([{"params": seeded((10,)), "tier": "gpu"}], policy=policy)
    count = len(optimizer.param_groups)
    with pytest.raises(PolicyError, match="tier 'ram'"):
        optimizer.add_param_group({"params": seeded((10,)), "tier": "ram"})
    assert len(optimizer.param_groups) == count


def test_a_gpu_home_for_what_is_computed_on_the_cpu_is_refused(tmp_path: Path) -> None:
    policy = {**small_policy(tmp_path, ["gpu", "cpu", "nvme"]), "compute": "cpu"}
    with pytest.raises(PolicyError, match=r"param\.0.*computed on the cpu"):
        TieredAdamW([{"params": seeded((10,)), "tier": "gpu"}], policy=policy)


def test_a_gpu_tier_without_an_accelerator_is_left_out_with_one_warning(tmp_path: Path) -> None:
    policy = small_policy(tmp_path, ["gpu", "cpu", "nvme"])
    del policy["tiers"]["gpu"]["device"]
    parameters = seeded((3000,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = TieredAdamW(parameters, policy=policy)
        train(optimizer, parameters, range(2))
    assert len(caught) == 1 and "the gpu tier is left out" in str(caught[0].message)
    policy["tiers"]["gpu"]["required"] = True
    with pytest.raises(PolicyError, match=r"tiers\.gpu"):
        TieredAdamW(parameters, policy=policy)


def test_parameters_on_two_accelerators_are_refused() -> None:
    policy = TierPolicy.load({"tiers": {"cpu": {}}})
    with pytest.raises(PolicyError, match="2 accelerators"):
        plan_plant(policy, [torch.device("cuda:0"), torch.device("cpu"), torch.device("cuda:1")])


def test_meta_parameters_may_be_bound_once_they_have_values(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(30, 60), nn.Linear(60, 3))
    optimizer = TieredAdamW(model.parameters(), policy=small_policy(tmp_path))
    model.to_empty(device="cpu")
    parameters = [nn.Parameter(value) for value in seeded(*[tuple(p.shape) for p in model.parameters()])]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(value)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(optimizer, list(model.parameters()), range(2))
    train(torch.optim.AdamW(parameters, fused=True), parameters, range(2))
    assert_same_parameters(list(model.parameters()), parameters)


# -- parameters that change -------------------------------------------------------------------------------------


def _to_channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def _to_double(model: nn.Module) -> None:
    model.double()


def _to_bfloat16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("change", [_to_channels_last, _to_double, _to_bfloat16])
@EVERY_TIERS
def test_a_model_may_be_converted_after_construction_and_after_steps(
    tiers: str, change: Callable[[nn.Module], None], steps_before: int, tmp_path: Path
) -> None:
    """The state goes on from where it was, in the new layout and precision."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(5, 24, 3), nn.Conv2d(24, 30, 3))

    model, twin = make(), make()
    optimizer = TieredAdamW(model.parameters(), lr=1e-2, policy=small_policy(tmp_path, tiers.split(), chunk=32 * KIB))
    options = {
        "lr": 1e-2,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
    }
    reference = Reference([{**options, "params": list(twin.parameters())}])
    for _ in range(steps_before):
        set_gradients(list(model.parameters()), 0)
        set_gradients(list(twin.parameters()), 0)
        optimizer.step()
        reference.step()
    change(model)
    change(twin)
    _convert(reference)
    for step in range(3, 6):
        set_gradients(list(model.parameters()), step)
        set_gradients(list(twin.parameters()), step)
        optimizer.step()
        reference.step()
        optimizer.store.check()
        assert_same_parameters(list(model.parameters()), list(twin.parameters()), step)
    assert_same_state(optimizer, reference)
    if steps_before:
        assert all(state["step"] == steps_before + 3 for state in optimizer.state.values())


def _convert(reference: Reference) -> None:
    """Bring the reference's state into the layout and precision its parameters have now."""
    reference._dense.clear()
    for parameter, state in reference.state.items():
        low = parameter.dtype in (torch.bfloat16, torch.float16)
        for name in ("exp_avg", "exp_avg_sq"):
            dtype = torch.float32 if low else parameter.dtype
            made = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype)
            state[name] = made.copy_(state[name])
        if low:
            state["master"] = torch.empty_strided(parameter.shape, parameter.stride()).copy_(parameter.detach())


@EVERY_TIERS
def test_parameters_replaced_in_place_keep_the_state_of_their_position(tiers: str, tmp_path: Path) -> None:
    """As FSDP2 does to every parameter after construction."""
    shapes = [(3000,), (40, 50), (40, 50), (7,)]
    parameters, theirs = seeded(*shapes), seeded(*shapes)
    optimizer = TieredAdamW(parameters, lr=1e-2, policy=small_policy(tmp_path, tiers.split()))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(optimizer, parameters, range(2))
    train(reference, theirs, range(2))
    replaced = [nn.Parameter(laid_out(parameter.detach(), "reversed")) for parameter in parameters]
    optimizer.param_groups[0]["params"][:] = replaced
    train(optimizer, replaced, range(2, 4))
    train(reference, theirs, range(2, 4))
    optimizer.store.check()
    for number, (mine, other) in enumerate(zip(replaced, theirs, strict=True)):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)  # another storage order, so not to the bit
        assert optimizer.state[mine]["step"] == 4 and parameters[number] not in optimizer.state


def test_state_goes_with_its_parameter_when_groups_are_rearranged(tmp_path: Path) -> None:
    """By position alone, a parameter appended to the first group would hand its neighbours' moments on by one."""
    shapes = [(500,)] * 4

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        parameters = seeded(*shapes)
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:3], "lr": 0.1}])
        train(optimizer, parameters[:3], range(2))
        optimizer.param_groups[0]["params"].append(parameters[3])
        train(optimizer, parameters, range(2, 4))
        optimizer.param_groups.reverse()
        train(optimizer, parameters, range(4, 6))
        return [*parameters, *(optimizer.state[p]["exp_avg"] for p in parameters)]

    wanted = run(lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True))
    found = run(lambda groups: TieredAdamW(groups, lr=1e-2, policy=small_policy(tmp_path)))
    assert_same_parameters(found, wanted)


def test_a_parameter_with_state_that_has_another_shape_is_a_clear_error_and_its_state_is_not_lost(
    tmp_path: Path,
) -> None:
    parameters = seeded((500,), (300,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path))
    train(optimizer, parameters, range(2))
    wanted = optimizer.state_dict()["state"][1]["exp_avg"]
    parameters[1].data = torch.zeros(301)
    set_gradients(parameters, 2)
    for _ in range(2):
        with pytest.raises(StateDictError, match=r"param\.1"):
            optimizer.step()
    parameters[1].data = torch.zeros(300)
    parameters[1].grad = None
    assert same_bits(optimizer.state[parameters[1]]["exp_avg"], wanted)
    optimizer.step()


@pytest.mark.parametrize("tiers", FourTiers.names[:2])
@pytest.mark.parametrize("change", ["taken out", "replaced by another shape", "its group taken out"])
def test_a_parameter_that_left_the_groups_keeps_its_state_as_with_torch(
    change: str, tiers: str, tmp_path: Path
) -> None:
    """The others train on; the state stays in `optimizer.state`, and is there again when the parameter returns."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[Tensor], dict[str, Tensor]]:
        parameters = seeded((3000,), (300,), (70,))
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:2]}, {"params": parameters[2:]}])
        train(optimizer, parameters, range(2))
        left, groups = parameters[1], list(optimizer.param_groups)
        if change == "its group taken out":
            del optimizer.param_groups[1]
        elif change == "taken out":
            groups[1]["params"].clear()
        else:
            groups[1]["params"][0] = nn.Parameter(torch.ones(20))
        others = [p for group in optimizer.param_groups for p in group["params"]]
        train(optimizer, others, range(2, 4))
        assert left in optimizer.state and len(optimizer.state) == len(others) + 1
        kept = {name: value.clone() for name, value in optimizer.state[left].items()}
        groups[1]["params"][:] = [left]
        optimizer.param_groups[:] = groups
        train(optimizer, parameters, range(4, 6))
        return [*parameters, *others], kept

    def make(groups: Any) -> TieredAdamW:
        optimizer = TieredAdamW(groups, policy=small_policy(tmp_path, tiers.split()))
        made.append(optimizer)
        return optimizer

    made: list[TieredAdamW] = []
    with pytest.warns(UserWarning, match="have left param_groups") as warned:
        mine, kept = run(make)
    assert "(300,)" in str(warned[0].message)
    theirs, wanted = run(lambda groups: torch.optim.AdamW(groups, fused=True))
    assert_same_parameters(mine, theirs)
    assert kept.keys() == wanted.keys() and all(same_bits(kept[name], value) for name, value in wanted.items())
    made[0].close()


def test_state_of_a_parameter_that_left_may_be_deleted_and_is_in_no_state_dict(tmp_path: Path) -> None:
    parameters = seeded((500,), (300,))
    with TieredAdamW(parameters, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(2))
        del optimizer.param_groups[0]["params"][1]
        with pytest.warns(UserWarning, match="have left"):
            optimizer.step()
        assert optimizer.state_dict()["state"].keys() == {0}
        assert optimizer.state.pop(parameters[1])["step"] == 2
        assert parameters[1] not in optimizer.state
        optimizer.param_groups[0]["params"].append(parameters[1])
        assert parameters[1] not in optimizer.state


def test_state_of_a_parameter_that_has_just_returned_may_be_taken_out_and_put_back(tmp_path: Path) -> None:
    """It had not been given back to the tiers yet, and the view that was taken out showed nothing."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        parameters = seeded((500,), (300,))
        optimizer = make(parameters)
        train(optimizer, parameters, range(2))
        left = optimizer.param_groups[0]["params"].pop()
        train(optimizer, parameters[:1], range(2, 3))
        optimizer.param_groups[0]["params"].append(left)
        assert left in optimizer.state
        optimizer.state[left] = optimizer.state.pop(left)
        train(optimizer, parameters, range(3, 5))
        return list(parameters)

    with pytest.warns(UserWarning, match="have left"):
        mine = run(lambda parameters: TieredAdamW(parameters, policy=small_policy(tmp_path)))
    assert_same_parameters(mine, run(lambda parameters: torch.optim.AdamW(parameters, fused=True)))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_a_parameter_that_leaves_a_copy_before_its_first_step_keeps_its_state(how: Any, tmp_path: Path) -> None:
    """A copy's state waits for its first use, and was held to be another model's when that came."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        parameters = seeded((500,), (300,))
        optimizer = make([{"params": parameters[:1]}, {"params": parameters[1:]}])
        train(optimizer, parameters, range(2))
        optimizer, parameters = how((optimizer, parameters))
        left = optimizer.param_groups.pop()
        train(optimizer, parameters[:1], range(2, 3))
        assert set(optimizer.state) == set(parameters)
        optimizer.param_groups.append(left)
        train(optimizer, parameters, range(3, 5))
        return list(parameters)

    with pytest.warns(UserWarning, match="have left"):
        mine = run(lambda groups: TieredAdamW(groups, policy=small_policy(tmp_path)))
    assert_same_parameters(mine, run(lambda groups: torch.optim.AdamW(groups, fused=True)))


@pytest.mark.filterwarnings("ignore:tierstore. 1 parameters with state have left:UserWarning")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.complex64), (torch.complex64, torch.float32)])
@pytest.mark.parametrize("shapes", [((40,), (40,)), ((20, 2), (20,)), ((20,), (20, 2))])
def test_a_complex_parameter_does_not_take_over_the_state_of_a_real_one(
    dtypes: Any, shapes: Any, tmp_path: Path
) -> None:
    """Nor the other way round; such a change of parameters was refused where the shapes were equal."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        old, new = (nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True))
        optimizer = make([old])
        train(optimizer, [old], range(2))
        optimizer.param_groups[0]["params"][:] = [new]
        train(optimizer, [new], range(2, 4))
        assert set(optimizer.state) == {old, new}
        return [old, new]

    mine = run(lambda parameters: TieredAdamW(parameters, fused=False, policy=small_policy(tmp_path)))
    theirs = run(lambda parameters: torch.optim.AdamW(parameters, fused=False, foreach=False))
    assert_same_parameters(
        [parameter for parameter in mine if not parameter.is_complex()],
        [parameter for parameter in theirs if not parameter.is_complex()],
    )


MOVES: dict[str, Callable[[list[dict[str, Any]]], None]] = {
    "to the group before": lambda groups: groups[0]["params"].append(groups[1]["params"].pop(0)),
    "to a new group": lambda groups: groups.append({**groups[1], "params": [groups[1]["params"].pop()], "lr": 0.3}),
    "all by one": lambda groups: groups.insert(0, {**groups[0], "params": [], "lr": 0.3}),
    "merged": lambda groups: groups[0]["params"].extend([groups[1]["params"].pop(0), groups[1]["params"].pop(0)]),
    "made anew": lambda groups: (
        groups.__setitem__(
            slice(None), [{**groups[0], "params": groups[0]["params"] + groups[1]["params"][:1]}, dict(groups[1])]
        )
        or groups[1].__setitem__("params", groups[1]["params"][1:])
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_parameters_moved_between_groups_have_the_options_of_the_group_they_are_in(move: str, tmp_path: Path) -> None:
    """The flat order of parameters stayed the same, and they kept the options of the old group without a word."""

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        parameters = seeded((3000,), (300,), (70,))
        optimizer = make([{"params": parameters[:1], "lr": 1e-1}, {"params": parameters[1:], "lr": 1e-4}])
        train(optimizer, parameters, range(2))
        MOVES[move](optimizer.param_groups)
        train(optimizer, parameters, range(2, 4))
        return list(parameters)

    mine = run(lambda groups: TieredAdamW(groups, policy=small_policy(tmp_path)))
    assert_same_parameters(mine, run(lambda groups: torch.optim.AdamW(groups, fused=True)))


def test_a_parameter_put_into_a_second_group_by_hand_is_refused_as_by_torchs_constructor(tmp_path: Path) -> None:
    parameters = seeded((500,), (300,))
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    with TieredAdamW(groups, policy=small_policy(tmp_path)) as optimizer:
        train(optimizer, parameters, range(1))
        optimizer.param_groups[1]["params"].append(parameters[0])
        set_gradients(parameters, 1)
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            optimizer.step()


def test_growth_beyond_the_room_there_is_loses_nothing(tmp_path: Path) -> None:
    """A rebinding that cannot be made must leave the state where it can still be read and trained on."""
    parameters = seeded((20_000,))
    policy = small_policy(tmp_path)
    policy["tiers"]["nvme"]["capacity"] = 15 * 16 * KIB
    optimizer = TieredAdamW(parameters, policy=policy)
    train(optimizer, parameters, range(2))
    saved = optimizer.state_dict()["state"]
    with pytest.raises(CapacityError, match=r"raise tiers\.\w+\.capacity"):
        optimizer.add_param_group({"params": seeded((20_000,))})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["amsgrad"] = True
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"raise tiers\.\w+\.capacity"):
            train(optimizer, parameters, [2])
    optimizer.param_groups[0]["amsgrad"] = False
    assert same_bits(optimizer.state_dict()["state"][0]["exp_avg"], saved[0]["exp_avg"])
    train(optimizer, parameters, [2])


def test_a_rebinding_that_fails_on_the_disk_is_made_again_by_the_next_call(tmp_path: Path) -> None:
    parameters = seeded((20_000,), (300,))
    theirs = seeded((20_000,), (300,))

    failing: list[bool] = []

    def open_or_fail(*arguments: Any, **options: Any) -> Any:
        if failing:
            raise SwapError(5, "no engine today")
        return open_engine(*arguments, **options)

    class Failing(TieredAdamW):
        parts: ClassVar[Parts] = Parts(open_engine=open_or_fail)

    optimizer = Failing(parameters, policy=small_policy(tmp_path))
    reference = torch.optim.AdamW(theirs, fused=True, amsgrad=False)
    train(optimizer, parameters, range(2))
    train(reference, theirs, range(2))
    added, other = seeded((700,), seed=5), seeded((700,), seed=5)
    optimizer.add_param_group({"params": added})
    reference.add_param_group({"params": other})
    failing.append(True)
    for _ in range(2):
        with pytest.raises(SwapError, match="no engine today"):
            train(optimizer, [*parameters, *added], [2])
    failing.clear()
    train(optimizer, [*parameters, *added], [2])
    train(reference, [*theirs, *other], [2])
    assert_same_parameters([*parameters, *added], [*theirs, *other])


# -- frozen and empty -------------------------------------------------------------------------------------------


def test_frozen_parameters_take_no_room_until_they_are_unfrozen(tmp_path: Path) -> None:
    parameters, theirs = seeded((3000,), (30_000,)), seeded((3000,), (30_000,))
    for frozen in (parameters[1], theirs[1]):
        frozen.requires_grad_(False)
    optimizer = TieredAdamW(parameters, lr=1e-2, policy=small_policy(tmp_path))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    for step in range(6):
        if step == 2:
            chunks = sum(tier.chunks for tier in optimizer.store.stats().tiers.values())
            assert chunks * 16 * KIB <= 3000 * 8 + 16 * KIB
            parameters[1].requires_grad_()
            theirs[1].requires_grad_()
        if step == 4:
            parameters[0].requires_grad_(False)
            theirs[0].requires_grad_(False)
        for group in (parameters, theirs):
            set_gradients(group, step)
            for parameter in group:
                parameter.grad = parameter.grad if parameter.requires_grad else None
        optimizer.step()
        reference.step()
    assert_same_parameters(parameters, theirs)
    assert optimizer.state[parameters[0]]["step"] == 4 and optimizer.state[parameters[1]]["step"] == 4


def thawed_without_room(folder: Path, by: str) -> tuple[list[nn.Parameter], TieredAdamW]:
    """Two parameters, of which the second was frozen for two steps; there is room for the state of one."""
    parameters = seeded((20_000,), (20_000,))
    parameters[1].requires_grad_(False)
    policy = small_policy(folder)
    policy["tiers"]["nvme"]["capacity"] = 15 * 16 * KIB
    optimizer = TieredAdamW(parameters, lr=1e-2, policy=policy)
    train(optimizer, parameters[:1], range(2))
    parameters[1].requires_grad_(by == "requires_grad")
    return parameters, optimizer


def step_without_room(optimizer: TieredAdamW, parameters: list[nn.Parameter]) -> None:
    for _ in range(2):
        set_gradients(parameters, 2)
        with pytest.raises(CapacityError, match=r"raise tiers.cpu.capacity .*resize\(\) .* freeze param\.1 again"):
            optimizer.step()


@pytest.mark.parametrize("by", ["requires_grad", "gradient"])
def test_all_there_is_can_be_read_saved_and_loaded_though_a_parameter_was_thawed_without_room(
    by: str, tmp_path: Path
) -> None:
    """Every call was a CapacityError, also those that asked for nothing of it."""
    parameters, optimizer = thawed_without_room(tmp_path, by)
    wanted = optimizer.state_dict()["state"]
    step_without_room(optimizer, parameters)
    optimizer.save_checkpoint(tmp_path / "saved")
    optimizer.load_checkpoint(tmp_path / "saved")
    for found in (optimizer.state_dict()["state"], copy.deepcopy(optimizer.__getstate__()["state"])):
        (state,) = found.values()
        assert all(same_bits(state[name], value) for name, value in wanted[0].items())
    assert list(optimizer.state) == parameters[:1] and not optimizer.state[parameters[1]]
    assert optimizer.store.stats().tiers["nvme"].chunks > 0
    optimizer.close()
    resumed = seeded((20_000,), (20_000,))
    resumed[1].requires_grad_(False)
    again = TieredAdamW(resumed, lr=1e-2, policy=small_policy(tmp_path))
    again.load_checkpoint(tmp_path / "saved")
    assert same_bits(again.state[resumed[0]]["exp_avg"], wanted[0]["exp_avg"])


WAYS_OUT: dict[str, Callable[[TieredAdamW, list[nn.Parameter]], object]] = {
    "no gradient": lambda optimizer, parameters: setattr(parameters[1], "grad", None),
    "zero_grad": lambda optimizer, parameters: (optimizer.zero_grad(), set_gradients(parameters[:1], 2)),
    "frozen again": lambda optimizer, parameters: setattr(parameters[1].requires_grad_(False), "grad", None),
    "removed": lambda optimizer, parameters: optimizer.param_groups[0].update(params=parameters[:1]),
    "resized": lambda optimizer, parameters: optimizer.store.resize("cpu", 8 * 16 * KIB),
}


@pytest.mark.parametrize("way_out", WAYS_OUT)
@pytest.mark.parametrize("by", ["requires_grad", "gradient"])
def test_training_goes_on_when_a_parameter_thawed_without_room_is_left_out_or_has_room(
    by: str, way_out: str, tmp_path: Path
) -> None:
    parameters, optimizer = thawed_without_room(tmp_path, by)
    theirs = seeded((20_000,), (20_000,))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(reference, theirs[:1], range(2))
    step_without_room(optimizer, parameters)
    assert_same_parameters(parameters, theirs)
    WAYS_OUT[way_out](optimizer, parameters)
    optimizer.step()
    train(reference, theirs if way_out == "resized" else theirs[:1], [2])
    assert_same_parameters(parameters, theirs)
    optimizer.close()


@pytest.mark.parametrize("by", ["requires_grad", "gradient"])
def test_a_group_that_is_added_when_a_parameter_was_thawed_without_room_changes_nothing(
    by: str, tmp_path: Path
) -> None:
    """State was to be bound anew, for all or not at all: none could be read, and no tier made larger."""
    parameters, optimizer = thawed_without_room(tmp_path, by)
    theirs = seeded((20_000,), (20_000,), (50,))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(reference, theirs[:1], range(2))
    parameters += [nn.Parameter(theirs[2].detach().clone())]
    optimizer.add_param_group({"params": parameters[2:]})
    step_without_room(optimizer, parameters)
    assert optimizer.state_dict()["state"].keys() == {0}
    optimizer.save_checkpoint(tmp_path / "saved")
    parameters[1].grad = None
    optimizer.step()
    set_gradients(theirs, 2)
    theirs[1].grad = None
    reference.step()
    assert_same_parameters(parameters, theirs)
    assert list(optimizer.state) == [parameters[0], parameters[2]]
    optimizer.store.resize("cpu", 8 * 16 * KIB)
    train(optimizer, parameters, [3])
    train(reference, theirs, [3])
    assert_same_parameters(parameters, theirs)
    optimizer.close()


@EVERY_TIERS
@pytest.mark.parametrize("by", ["load", "item", "copy"])
def test_state_of_a_parameter_frozen_in_the_middle_survives_a_checkpoint(by: str, tiers: str, tmp_path: Path) -> None:
    """CASES 27: loaded into an optimizer whose parameter is frozen, it is there, and there when it is unfrozen."""
    parameters = seeded((3000,), (5000,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path, tiers.split()))
    train(optimizer, parameters, range(3))
    saved = optimizer.state_dict()
    resumed = seeded((3000,), (5000,))
    for one, other in zip(resumed, parameters, strict=True):
        one.data.copy_(other)
    resumed[1].requires_grad_(False)
    again = TieredAdamW(resumed, policy=small_policy(tmp_path, tiers.split()))
    if by == "load":
        again.load_state_dict(saved)
    elif by == "item":
        for number, parameter in enumerate(resumed):
            again.state[parameter] = saved["state"][number]
    else:
        again.load_state_dict(saved)
        import copy

        resumed, again = copy.deepcopy((resumed, again))
    assert again.state_dict()["state"].keys() == {0, 1}
    for name, value in saved["state"][1].items():
        assert same_bits(again.state[resumed[1]][name], value)
    train(again, resumed[:1], [3])
    resumed[1].requires_grad_()
    train(again, resumed, [4])
    train(optimizer, parameters[:1], [3])
    parameters[1].grad = None
    train(optimizer, parameters, [4])
    assert_same_parameters([resumed[0]], [parameters[0]])
    assert again.state[resumed[1]]["step"] == 4


def test_empty_groups_and_empty_parameters_are_carried_along(tmp_path: Path) -> None:
    """CASES 15 and 27: nothing to swap must not hang, and an empty tensor has state like any other."""
    empty = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0))]
    for names in FourTiers.names:
        policy = small_policy(tmp_path, names.split())
        with TieredAdamW([{"params": []}, {"params": empty}], policy=policy) as optimizer:
            train(optimizer, empty, range(3))
            optimizer.store.check()
            saved = optimizer.state_dict()
            assert saved["state"][1]["exp_avg"].shape == (3, 0) and saved["state"][0]["step"] == 3
            optimizer.load_state_dict(saved)
            train(optimizer, empty, [3])
            assert optimizer.state[empty[0]]["step"] == 4
            (tiny,) = seeded((5,))
            optimizer.add_param_group({"params": tiny})
            train(optimizer, [*empty, tiny], [4])


def test_an_optimizer_whose_groups_are_all_empty_steps(tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer makes such ones on ranks that got nothing."""
    with TieredAdamW([{"params": []}], policy=small_policy(tmp_path)) as optimizer:
        assert optimizer.step(lambda: 3.0) == 3.0
        assert optimizer.store.stats().step.count == 0
        optimizer.load_state_dict(optimizer.state_dict())


def test_names_that_are_missing_or_double_are_no_obstacle(tmp_path: Path) -> None:
    """A user may append to a group's `params` without a name; two models may use one name."""
    one, two = nn.Linear(30, 4), nn.Linear(30, 4)
    groups = [{"params": list(one.named_parameters())}, {"params": list(two.named_parameters())}]
    optimizer = TieredAdamW(groups, policy=small_policy(tmp_path))
    parameters = [*one.parameters(), *two.parameters()]
    train(optimizer, parameters, [0])
    (unnamed,) = seeded((40,))
    optimizer.param_groups[0]["params"].append(unnamed)
    train(optimizer, [*parameters, unnamed], [1])
    assert [float(optimizer.state[p]["step"]) for p in [*parameters, unnamed]] == [2, 2, 2, 2, 1]


# -- the end ----------------------------------------------------------------------------------------------------


@EVERY_TIERS
def test_close_gives_everything_back_and_can_be_repeated(
    tiers: str, tmp_path: Path, untouched: Callable[[], bool]
) -> None:
    """CASES 12 and 30, in small."""
    parameters = seeded((30_000,))
    for _ in range(3):
        with TieredAdamW(parameters, policy=small_policy(tmp_path, tiers.split())) as optimizer:
            train(optimizer, parameters, range(2))
        optimizer.close()
        assert untouched()
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.store, lambda: len(optimizer.state)):
        with pytest.raises(StoreClosedError, match="closed"):
            use()
    calls: list[int] = []
    with pytest.raises(StoreClosedError):
        optimizer.step(lambda: calls.append(1))
    parameters[0].grad = None
    with pytest.raises(StoreClosedError):
        optimizer.step()
    assert not calls


def test_close_before_the_first_step_and_after_a_failure_is_quiet(
    tmp_path: Path, untouched: Callable[[], bool]
) -> None:
    optimizer = TieredAdamW(seeded((10,)), policy=small_policy(tmp_path))
    optimizer.close()
    optimizer.close()
    assert untouched()


@EVERY_TIERS
def test_a_forgotten_optimizer_gives_everything_back(tiers: str, tmp_path: Path, untouched: Callable[[], bool]) -> None:
    parameters = seeded((30_000,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path, tiers.split()))
    train(optimizer, parameters, range(2))
    views = optimizer.state[parameters[0]]["exp_avg"]
    del optimizer
    gc.collect()
    assert untouched()
    assert views.isfinite().all()  # what was handed out lives on


@pytest.mark.parametrize(
    "ending", ["", pytest.param("raise SystemExit(0)", marks=pytest.mark.long), "os.kill(os.getpid(), 9)"]
)
def test_a_process_that_forgets_its_optimizer_ends_and_leaves_nothing(ending: str, tmp_path: Path) -> None:
    """CASES 12."""
    script = f"""
        import os, torch
        from tierstore.optimizer import TieredAdamW
        parameter = torch.nn.Parameter(torch.zeros(100_000))
        parameter.grad = torch.ones_like(parameter)
        policy = {{"chunk_size": "16KiB", "tiers": {{"cpu": {{"capacity": "48KiB"}}, "nvme": {{"paths": [folder]}}}}}}
        optimizer = TieredAdamW([parameter], policy=policy)
        optimizer.step()
        {ending}
        """
    if "kill" in ending:
        with pytest.raises(AssertionError):
            run_script(script, tmp_path, to_its_end=True)
    else:
        run_script(script, tmp_path, to_its_end=True)
    assert list(tmp_path.iterdir()) == []


class RefusalError(Exception):
    """Injected."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise RefusalError


class _NoMemory(HostDevice):
    def allocate(self, nbytes: int) -> Tensor:
        raise RefusalError


@pytest.mark.parametrize(
    "parts",
    [
        Parts(open_engine=_refuse),
        Parts(host_for=_refuse),
        Parts(host_for=lambda *_, **__: _NoMemory()),
        Parts(open_transfer=_refuse),
    ],
)
def test_a_binding_that_fails_half_way_leaves_nothing(
    parts: Parts, tmp_path: Path, untouched: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = seeded((30_000,))
    before = parameters[0].detach().clone()
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path))
    monkeypatch.setattr(optimizer._held, "parts", parts)
    set_gradients(parameters, 0)
    for _ in range(2):
        with pytest.raises(RefusalError):
            optimizer.step()
        assert untouched()
        assert same_bits(parameters[0], before) and not optimizer.state
    monkeypatch.undo()
    optimizer.step()
    assert optimizer.state[parameters[0]]["step"] == 1
    optimizer.close()
    assert untouched()


def test_two_optimizers_share_a_folder(tmp_path: Path) -> None:
    """CASES 11, in one process."""
    models = [make_model(), make_model(1)]
    optimizers = [TieredAdamW(model.parameters(), lr=1e-2, policy=small_policy(tmp_path)) for model in models]
    twins = [make_model(), make_model(1)]
    references = [torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True) for twin in twins]
    for _ in range(3):
        for model, optimizer, twin, reference in zip(models, optimizers, twins, references, strict=True):
            assert losses_of(model, optimizer, 2) == losses_of(twin, reference, 2)


# -- threads, forks, exceptions ---------------------------------------------------------------------------------


def test_a_second_thread_is_refused_while_the_first_is_inside_and_changes_nothing(tmp_path: Path) -> None:
    """Not even the step count that the first one's bias correction is made of."""
    parameters, theirs = seeded((40_000,)), seeded((40_000,))
    engine: list[FaultyEngine] = []

    class Slow(TieredAdamW):
        parts: ClassVar[Parts] = Parts(open_engine=lambda *_, **__: engine.append(FaultyEngine()) or engine[0])

    optimizer = Slow(parameters, lr=1e-2, policy=small_policy(tmp_path))
    train(optimizer, parameters, range(2))
    train(torch.optim.AdamW(theirs, lr=1e-2, fused=True), theirs, range(2))
    store = optimizer.store
    store.wait()
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    reference.load_state_dict(optimizer.state_dict())
    engine[0].hold()
    first = threading.Thread(target=train, args=(optimizer, parameters, [2]))
    first.start()
    try:
        engine[0].wait_until_held()
        for use in (optimizer.step, optimizer.state_dict, store.stats):
            with pytest.raises(WrongThreadError):
                use()
    finally:
        engine[0].release()
        first.join()
    train(reference, theirs, [2])
    assert_same_parameters(parameters, theirs)
    train(optimizer, parameters, [3])  # another thread may go on when the first is out
    train(reference, theirs, [3])
    assert_same_parameters(parameters, theirs)


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    parameters, theirs = seeded((40_000,)), seeded((40_000,))
    optimizer = TieredAdamW(parameters, lr=1e-2, policy=small_policy(tmp_path))
    reference = torch.optim.AdamW(theirs, lr=1e-2, fused=True)
    train(optimizer, parameters, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks in processes with threads
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (optimizer.step, optimizer.state_dict, optimizer.store.stats):
            try:
                use()
            except ForkedStoreError:
                refused += 1
        optimizer.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    train(optimizer, parameters, range(2, 4))
    train(reference, theirs, range(4))
    assert_same_parameters(parameters, theirs)


def test_an_exception_in_the_closure_leaves_everything_as_it_was(tmp_path: Path) -> None:
    parameters = seeded((3000,), (50,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path))
    train(optimizer, parameters, range(2))
    before, saved = [p.detach().clone() for p in parameters], optimizer.state_dict()
    where = {name: tier.chunks for name, tier in optimizer.store.stats().tiers.items()}

    def closure() -> float:
        raise RefusalError

    with pytest.raises(RefusalError):
        optimizer.step(closure)
    assert_same_parameters(parameters, before)
    after = optimizer.state_dict()["state"]
    assert all(same_bits(after[k][n], v) for k, fields in saved["state"].items() for n, v in fields.items())
    assert where == {name: tier.chunks for name, tier in optimizer.store.stats().tiers.items()}
    optimizer.store.check()
    train(optimizer, parameters, [2])


def test_a_group_option_that_is_no_number_fails_before_anything_moves(tmp_path: Path) -> None:
    parameters = seeded((3000,))
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path))
    train(optimizer, parameters, range(2))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(ValueError, match="fast"):
        train(optimizer, parameters, [2])
    optimizer.param_groups[0]["lr"] = 1e-3
    assert optimizer.state[parameters[0]]["step"] == 2
    train(optimizer, parameters, [2])
    assert optimizer.state[parameters[0]]["step"] == 3


@pytest.mark.long
def test_a_thousand_steps_and_fifty_optimizers_leave_memory_files_and_threads_as_they_were(
    tmp_path: Path, untouched: Callable[[], bool]
) -> None:
    """CASES 30."""

    def resident_kib() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    parameters = seeded((100_000,), *[(10,)] * 50)
    optimizer = TieredAdamW(parameters, policy=small_policy(tmp_path, ["gpu", "cpu", "nvme"]))
    train(optimizer, parameters, range(100))
    files, running, memory = open_files(), threads(), resident_kib()
    train(optimizer, parameters, range(1000))
    assert (open_files(), threads()) == (files, running)
    assert resident_kib() - memory < 4 * MIB // KIB
    optimizer.close()
    for _ in range(50):
        with TieredAdamW(parameters, policy=small_policy(tmp_path, ["gpu", "cpu", "nvme"])) as other:
            train(other, parameters, range(2))
    assert untouched()
    assert resident_kib() - memory < 4 * MIB // KIB
