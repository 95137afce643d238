"""A plant: what a policy's shares and capacities come to on this machine."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.build import Parts, Plant, plan_plant
from tierstore.errors import DiskFullError
from tierstore.folders import check_space, disk_margin
from tierstore.growth import slab_extents_of_memory
from tierstore.io import Engine
from tierstore.io import open_engine as real_engine
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.pressure import DiskSpace, HostMemory, disk_space
from tierstore.rates import PathRates, Rates, SizeRates
from tierstore.store import ChunkInfo
from tierstore.tiers import FileTier, MemoryTier

TIB, MIB = 1 << 40, 1 << 20


def plant_of(tiers: Mapping[str, Any]) -> Plant:
    return plan_plant(TierPolicy.load({"tiers": tiers}), [])


@pytest.fixture
def two_folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def two_disks(two_folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two folders made to look as if they were on disks of 1 TiB, with room for 100 and 300 MiB."""
    spaces = dict(zip(two_folders, [DiskSpace(TIB, disk_margin(TIB) + (n << 20)) for n in (100, 300)], strict=True))
    monkeypatch.setattr("tierstore.folders._look_at", two_folders.index)
    monkeypatch.setattr("tierstore.folders.disk_space", spaces.__getitem__)
    monkeypatch.setattr("tierstore.build.disk_space", spaces.__getitem__)
    return two_folders


# -- shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_share_of_what_ranks_have_in_common_is_divided_among_them(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks that each take 30% of the memory take the machine down; `auto` was divided, shares were not."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("tierstore.build.host_memory", lambda: HostMemory(TIB, TIB, TIB // 2, "a test", TIB))
    plant = plant_of({"cpu": {"capacity": "50%"}, "nvme": {"capacity": "50%", "paths": [str(tmp_path)]}})
    assert plant.given_bytes("cpu") == TIB // 4 // ranks
    assert plant.given_bytes("nvme") == int(disk_space(tmp_path).total_bytes * 0.5) // ranks


def test_a_size_is_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert plant_of({"cpu": {"capacity": "1GiB"}}).given_bytes("cpu") == 1 << 30


def test_a_share_of_a_gpu_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a device of its own."""
    plant = plant_of({"gpu": {"capacity": "50%", "device": "cpu"}})
    assert plant.gpu is not None
    total = plant.gpu.memory_bytes()[1]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert plant.given_bytes("gpu") == total // 2


def test_two_folders_on_one_filesystem_count_its_size_once(two_folders: list[Path]) -> None:
    plant = plant_of({"nvme": {"capacity": "50%", "paths": list(map(str, two_folders))}})
    assert plant.given_bytes("nvme") == int(disk_space(two_folders[0]).total_bytes * 0.5)


def test_folders_on_two_filesystems_count_both(two_disks: list[Path]) -> None:
    plant = plant_of({"nvme": {"capacity": "50%", "paths": list(map(str, two_disks))}})
    assert plant.given_bytes("nvme") == TIB


# -- disks ------------------------------------------------------------------------------------------------------


def test_folders_on_one_filesystem_share_its_free_space(
    two_folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each half fits by itself, both together do not."""
    free = disk_margin(TIB) + 1000 * 4096
    monkeypatch.setattr("tierstore.folders.disk_space", lambda place: DiskSpace(TIB, free))
    check_space(dict.fromkeys(two_folders, 500 * 4096))
    with pytest.raises(DiskFullError) as caught:
        check_space(dict.fromkeys(two_folders, 501 * 4096))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(two_folders[0]))
    for number in (1002 * 4096, free, 1000 * 4096):
        assert f" {number} bytes" in " " + str(caught.value)


def test_each_disk_must_have_its_part(two_disks: list[Path]) -> None:
    check_space(dict.fromkeys(two_disks, 100 << 20))
    with pytest.raises(DiskFullError, match=rf"are needed in {two_disks[0]}, .* at most about {200 << 20} bytes"):
        check_space(dict.fromkeys(two_disks, 101 << 20))


def test_a_disk_is_looked_at_only_if_something_is_to_lie_on_it(tmp_path: Path) -> None:
    plant = plant_of({"cpu": {}, "nvme": {"paths": [str(tmp_path / "missing")]}})
    plant.check_disk({"cpu": Room(4), "nvme": Room(0)}, 4096)
    plant.check_disk({"cpu": Room(4)}, 4096)


@pytest.mark.parametrize(
    ("extents", "extent_mib", "slab"),
    [(16, 1.5, 8), (24, 1.5, 11), (1, 1.5, 1), (2, 1.5, 1), (3, 1.5, 2), (64, 4, 4), (640, 4, 40), (16, 20, 1)],
)
def test_memory_comes_in_slabs_that_huge_pages_fit_into(extents: int, extent_mib: float, slab: int) -> None:
    """A tier of 24 MiB had sixteen slabs of 1.5 MiB, none of which lay on a huge page."""
    extent = int(extent_mib * MIB)
    setup = plant_of({"cpu": {"capacity": extents * extent}}).build({"cpu": Room(extents)}, extent)
    tier = setup.tiers["cpu"]
    assert isinstance(tier, MemoryTier)
    assert tier.arena.capacity == extents and max(tier.arena.slabs) == slab
    setup.transfer.close()
    tier.close()


def test_a_tier_without_room_for_huge_pages_has_small_slabs() -> None:
    assert [slab_extents_of_memory(extents, 16 << 10) for extents in (0, 4, 16, 255)] == [1, 1, 1, 15]


@pytest.mark.parametrize(("capacity", "extents"), [("auto", 102), (100 * 4096, 100)])
def test_two_folders_share_the_capacity_and_what_is_added_to_choose_from(
    two_folders: list[Path], capacity: str | int, extents: int
) -> None:
    nvme = {"capacity": capacity, "paths": list(map(str, two_folders))}
    plant = plant_of({"cpu": {"capacity": 16 * 4096}, "nvme": nvme})
    rooms = plant.rooms([ChunkInfo(4096, "cpu", "nvme")] * (100 if capacity != "auto" else 92), 4096)
    setup = plant.build(rooms, 4096)
    nvme_tier = setup.tiers["nvme"]
    assert isinstance(nvme_tier, FileTier)
    slab = max(nvme_tier.arena.slabs)
    assert nvme_tier.arena.capacity == extents
    assert abs(nvme_tier.files[0].size_bytes - nvme_tier.files[1].size_bytes) <= slab * 4096
    assert len(nvme_tier.arena.slabs_on(0)) >= 16  # room moves in small pieces
    setup.transfer.close()
    nvme_tier.close()


@pytest.mark.parametrize(
    ("extents", "slab_extents", "files"), [(10, 3, 2), (1, 5, 3), (64, 4, 3), (7, 1, 1), (0, 1, 2)]
)
def test_extents_are_dealt_as_the_file_tier_reserves_them(extents: int, slab_extents: int, files: int) -> None:
    class File:
        folder = "/swap"

        def __init__(self) -> None:
            self.size_bytes = 0

        def grow(self, nbytes: int) -> int:
            self.size_bytes += nbytes
            return self.size_bytes - nbytes

    made = [File() for _ in range(files)]
    FileTier("nvme", made, 4096).grow(extents, slab_extents=slab_extents)  # type: ignore[arg-type]
    assert [file.size_bytes // 4096 for file in made] == FileTier.dealt(extents, slab_extents, files)


# -- tuning -----------------------------------------------------------------------------------------------------


FAST = PathRates(1e-4, 2e10, 2e10, (SizeRates(MIB, 1e-3, 2e10), SizeRates(4 * MIB, 2e-3, 2e10)))
GIB = 1 << 30


def chunks(nbytes: int) -> list[ChunkInfo]:
    """So many bytes of state, in chunks of 64 MiB."""
    return [ChunkInfo(64 * MIB, "cpu")] * (nbytes // (64 * MIB))


class Finder:
    """Hands out rates, and remembers what was asked."""

    def __init__(self, rates: Rates) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self._rates = rates

    def __call__(self, folders: list[Path], **settings: Any) -> Rates:
        self.asked.append((folders, settings))
        return self._rates


def tuned(finder: Finder, nbytes: int, folder: Path, engines: list[Any] | None = None, **policy: Any) -> Plant:
    nvme = {"paths": [str(folder)], "io": policy.pop("io", {})}
    settings = {"tiers": {"cpu": {"capacity": policy.pop("capacity", GIB)}, "nvme": nvme}, **policy}

    def open_engine(name: str, **numbers: Any) -> Engine:
        assert engines is not None
        engines.append(numbers)
        return real_engine(name, **numbers)

    parts = Parts(find_rates=finder, open_engine=open_engine)
    return plan_plant(TierPolicy.load(settings), [], parts).tuned(chunks(nbytes), 64 * MIB)


def test_nothing_is_measured_for_less_than_a_gibibyte_in_files(tmp_path: Path) -> None:
    finder = Finder(Rates({"disk": FAST}, None, "2026"))
    assert tuned(finder, GIB, tmp_path).tuning is None
    assert tuned(finder, 4 * GIB, tmp_path, placement=[{"params": "*", "tier": "cpu"}], capacity=8 * GIB) is not None
    plant = plan_plant(TierPolicy.load({"tiers": {"cpu": {"capacity": 8 * GIB}}}), [], Parts(find_rates=finder))
    assert plant.tuned(chunks(4 * GIB), 64 * MIB) is plant
    named = [ChunkInfo(64 * MIB, "cpu", "cpu")] * 32 + [ChunkInfo(64 * MIB, "cpu", "nvme")] * 16
    settings = {"tiers": {"cpu": {"capacity": 8 * GIB}, "nvme": {"paths": [str(tmp_path)]}}}
    plant = plan_plant(TierPolicy.load(settings), [], Parts(find_rates=finder))
    assert plant.tuned(named, 64 * MIB) is plant
    assert finder.asked == []
    assert plant.tuned([*named, *chunks(64 * MIB)], 64 * MIB).tuning is not None


def test_more_is_moved_as_the_rates_advise_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    finder, engines = Finder(Rates({"disk": FAST}, None, "2026", ("a note",))), list[Any]()
    plant = tuned(finder, 2 * GIB, tmp_path, engines)
    (asked,) = finder.asked
    assert asked == ([tmp_path], {"engine": "auto", "direct": None, "memory_bytes": GIB})
    assert plant.tuning is not None
    extent_bytes = plant.chunk_bytes(2 * GIB, 8, classes=1)
    assert extent_bytes == plant.tuning.chunk_size.value == 64 * MIB
    setup = plant.build({"cpu": Room(1), "nvme": Room(1)}, 4096)
    setup.transfer.close()
    for tier in setup.tiers.values():
        tier.close()
    assert engines == [{"threads": 32, "queue_depth": 32, "request_size": 4 * MIB}]
    assert all(str(choice) in caplog.text for choice in plant.tuning)
    assert "a note" in caplog.text and "calibrated disk: reads 20.00 GB/s" in caplog.text


def test_what_the_policy_says_is_not_tuned(tmp_path: Path) -> None:
    io = {"threads": 3, "queue_depth": 5, "request_size": 8192}
    engines = list[Any]()
    plant = tuned(Finder(Rates({"disk": FAST}, None, "2026")), 2 * GIB, tmp_path, engines, io=io, chunk_size="1MiB")
    assert plant.chunk_bytes(2 * GIB, 8, classes=1) == MIB
    setup = plant.build({"cpu": Room(1), "nvme": Room(1)}, 4096)
    setup.transfer.close()
    assert engines == [io]


def test_tuned_chunks_are_small_enough_for_16_in_the_tier_that_computes(tmp_path: Path) -> None:
    plant = tuned(Finder(Rates({"disk": FAST}, None, "2026")), 2 * GIB, tmp_path, capacity=256 * MIB)
    assert plant.chunk_bytes(2 * GIB, 8, classes=1) == 16 * MIB


def test_staging_is_as_deep_as_the_rates_advise(tmp_path: Path) -> None:
    slow = PathRates(1e-4, 1e9, 1e9, (SizeRates(MIB, 50e-3, 1e9),))
    policy = TierPolicy.load({"chunk_size": "4MiB", "tiers": {"nvme": {"paths": [str(tmp_path)]}}})
    plant = plan_plant(policy, [], Parts(find_rates=Finder(Rates({"disk": slow}, None, "2026"))))
    infos = [ChunkInfo(4 * MIB, "cpu")] * 300
    assert plant.rooms(infos, 4 * MIB)["cpu"].extents == 8
    assert plant.tuned(infos, 4 * MIB).rooms(infos, 4 * MIB)["cpu"].extents == 11


def test_without_rates_the_defaults_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engines = list[Any]()
    plant = tuned(Finder(Rates({}, None, None, ("another process is measuring",))), 2 * GIB, tmp_path, engines)
    assert plant.tuning is None and plant.chunk_bytes(2 * GIB, 8, classes=1) == 64 * MIB
    plant.build({"cpu": Room(1), "nvme": Room(1)}, 4096).transfer.close()
    assert engines == [{"threads": None, "queue_depth": None, "request_size": None}]
    assert "another process is measuring" in caplog.text and "the defaults stay" in caplog.text


@pytest.mark.parametrize(
    ("tiers", "classes", "chunk_bytes"),
    [
        ({"cpu": {"capacity": "36MiB"}, "nvme": {}}, 1, 16 * MIB),
        ({"cpu": {"capacity": "36MiB"}, "nvme": {}}, 2, 20 * MIB // 16 // 4096 * 4096),
        ({"cpu": {"capacity": "36MiB"}, "nvme": {}}, None, 20 * MIB // 16 // 4096 * 4096),
        ({"cpu": {}, "nvme": {}}, 1, 22 * MIB),
        ({"cpu": {}, "nvme": {}}, 2, 16 * MIB),
        ({"nvme": {}}, 1, 20 * MIB // 16 // 4096 * 4096),
        ({"gpu": {"device": "cpu"}}, 1, 22 * MIB),
        ({"gpu": {"device": "cpu"}, "cpu": {}}, 1, 20 * MIB // 16 // 4096 * 4096),
    ],
)
def test_chunks_are_large_only_where_all_state_of_all_classes_is_sure_to_stay(
    tiers: dict[str, Any], classes: int | None, chunk_bytes: int
) -> None:
    plant = plan_plant(TierPolicy.load({"tiers": tiers}), [torch.device("cpu")])
    assert plant.chunk_bytes(20 * MIB, 8, classes=classes) == chunk_bytes
