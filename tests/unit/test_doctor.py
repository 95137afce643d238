"""What the doctor looks at, what it makes of it, and how a script hears of it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import exit_status, json_on_stdout
from tierstore import calibrate
from tierstore.doctor.examination import bandwidth_finding
from tierstore.doctor.finding import Finding, Level
from tierstore.doctor.machine import (
    aio_finding,
    cores_finding,
    device_finding,
    huge_pages_finding,
    machine_findings,
    memlock_finding,
    memory_finding,
    numba_finding,
    slurm_finding,
    stall_finding,
    waiting_finding,
)
from tierstore.doctor.swap import swap_findings
from tierstore.errors import TransferError
from tierstore.folders import FolderKind
from tierstore.policy import NvmeTier, TierPolicy
from tierstore.pressure import DiskSpace, HostMemory
from tierstore.rates import PathRates, SizeRates

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; time enough on whatever else this machine does, and few bytes."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(calibrate, "MOST_SECONDS", 60.0)
    monkeypatch.setattr(calibrate, "MOST_BYTES", 32 * MIB)
    monkeypatch.setattr(calibrate, "BUFFER_BYTES", 8 * MIB)
    return home


def run(*arguments: str | Path) -> int:
    return exit_status("doctor", *arguments)


def lay_down(root: Path, files: Mapping[str, str | int]) -> Path:
    """Files as the kernel of some machine shows them."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))
    return root


def examined(root: Path, files: Mapping[str, str | int]) -> dict[str, Finding]:
    """What is found, by name, on a machine that shows these files."""
    return {finding.name: finding for finding in machine_findings(TierPolicy.load(None), lay_down(root, files))}


def levels(answer: dict[str, Any], name: str | Path) -> list[str]:
    return [finding["level"] for finding in answer["findings"] if finding["name"] == str(name)]


# -- the command ------------------------------------------------------------------------------------------------


def test_sound_machine_is_well_in_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert run("--path", tmp_path, "--json") == 0
    answer = json_on_stdout(capsys)
    assert answer["ok"] is True
    names = {finding["name"] for finding in answer["findings"]}
    assert names >= {"torch", "accelerator", "memory", "huge pages", "memlock", "cores", "OMP_WAIT_POLICY", "engine"}
    assert names >= {"numba", "calibration", str(tmp_path)}
    assert len(levels(answer, tmp_path)) == 4 and "fail" not in levels(answer, tmp_path)
    assert all(finding["advice"] for finding in answer["findings"] if finding["level"] != "ok")
    assert answer["calibration"]["paths"] == {} and os.listdir(tmp_path) == os.listdir(home) == []


def test_what_is_printed_fits_80_columns_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--path", tmp_path / "missing") == 1
    out, err = capsys.readouterr()
    assert not err and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    assert "fail" in out and "-> " in out and "1 fail" in out.splitlines()[-1]


def test_calibration_is_shown_kept_and_dated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--path", tmp_path, "--calibrate", "--json") == 0
    out, err = capsys.readouterr()
    measured = json.loads(out)["calibration"]
    assert len(measured["paths"]) == 1 and measured["machine"]["elements_per_second"] > 0
    choices = measured["choices"]
    assert set(choices) >= {f"tiers.nvme.io.{key}" for key in ("request_size", "queue_depth", "threads")}
    assert all(choice["why"] and choice["value"] > 0 for choice in choices.values())
    for word in ("request", "reads", "writes", "both at once", "where a policy says auto", "chunk_size", "million"):
        assert word in err
    assert run("--path", tmp_path, "--json") == 0
    again = json_on_stdout(capsys)
    assert again["calibration"] == measured
    (kept,) = [finding for finding in again["findings"] if finding["name"] == "calibration"]
    assert measured["measured_at"] in kept["text"]
    texts = [finding["text"] for finding in again["findings"] if finding["name"] == "bandwidth"]
    assert [text.partition(":")[0] for text in texts] == [*measured["paths"], "memory"]
    assert "reads" in texts[0] and "writes" in texts[0] and "copied at" in texts[1]
    assert os.listdir(tmp_path) == []


def test_json_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "report.json"
    assert run("--path", tmp_path, "--json", target) == 0
    assert json.loads(target.read_text())["ok"] is True
    assert "ok" in capsys.readouterr().out


def test_policys_folders_and_values_are_those_examined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"tiers: {{nvme: {{paths: [{tmp_path}], io: {{queue_depth: 7}}}}}}")
    assert run("--policy", policy, "--calibrate", "--json") == 0
    answer = json_on_stdout(capsys)
    assert levels(answer, tmp_path)
    choice = answer["calibration"]["choices"]["tiers.nvme.io.queue_depth"]
    assert choice == {"value": 7, "why": "as the policy says"}


def test_policy_without_files_has_no_folders_to_examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tiers: {cpu: {}}")
    assert run("--policy", policy, "--json") == 0
    assert not {"engine", "OMP_WAIT_POLICY", "calibration"} & {f["name"] for f in json_on_stdout(capsys)["findings"]}


@pytest.mark.parametrize(
    ("policy", "arguments", "words"),
    [
        ("tiers: {cpu: {}}", ["--path", "."], "nothing is swapped"),
        ("tiers: {disk: {}}", [], "unknown key"),
        (None, ["--json", "{}"], "is a folder"),
        (None, ["--json", "{}/none/report.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_carried_out_is_one_message(
    policy: str | None, arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(tmp_path) for argument in arguments]
    if policy is not None:
        (tmp_path / "policy.yaml").write_text(policy)
        given += ["--policy", str(tmp_path / "policy.yaml")]
    assert run(*given) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_standard_output_that_takes_nothing_is_one_message(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, and status 1, as if something were wrong with the machine."""
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it fails, too
    monkeypatch.setattr("sys.stdout", full)
    assert run("--path", tmp_path, *arguments) == 2
    with contextlib.suppress(OSError):
        full.close()
    assert "error: standard output cannot be written" in capsys.readouterr().err


def test_json_goes_to_a_file_where_there_is_no_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert run("--path", tmp_path, "--json", tmp_path / "report.json") == 0
    assert json.loads((tmp_path / "report.json").read_text())["ok"]
    assert run("--path", tmp_path, "--json") == 2


@pytest.mark.parametrize(
    ("tiers", "name"),
    [
        ("{gpu: {required: true, device: 'xpu:7'}, cpu: {}}", "accelerator"),
        ("{nvme: {paths: [/nowhere/at/all]}}", "/nowhere/at/all"),
    ],
)
def test_what_the_policy_asks_for_in_vain_fails(
    tiers: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.doctor.machine.present_accelerator", lambda: None)
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"tiers: {tiers}")
    assert run("--policy", policy, "--json") == 1
    answer = json_on_stdout(capsys)
    assert answer["ok"] is False and levels(answer, name) == ["fail"]


@pytest.mark.parametrize(("capacity", "level"), [("1MiB", "ok"), ("4096TiB", "fail")])
def test_capacity_is_judged_by_what_the_disks_have_free(
    capacity: str, level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All was well, and then the optimizer's constructor found the disk too full."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"tiers: {{nvme: {{capacity: {capacity}, paths: [{', '.join(map(str, folders))}]}}}}")
    assert run("--policy", policy, "--json") == (level == "fail")
    assert levels(json_on_stdout(capsys), "capacity") == [level]


def test_machine_without_a_disk_for_swap_files_fails_only_who_asks_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is memory on many machines with nothing special."""
    monkeypatch.delenv("TIERSTORE_SWAP", raising=False)
    monkeypatch.setattr("tierstore.folders.describe_folder", lambda folder: FolderKind.MEMORY)
    assert run("--calibrate", "--json") == 0
    assert levels(json_on_stdout(capsys), "swap") == ["warn"]
    policy = tmp_path / "policy.yaml"
    policy.write_text("tiers: {nvme: {}}")
    assert run("--policy", policy, "--json") == 1
    assert levels(json_on_stdout(capsys), "swap") == ["fail"]


# -- folders ----------------------------------------------------------------------------------------------------


def folder_levels(folder: Path, **io: Any) -> list[Level]:
    return [finding.level for finding in swap_findings(folder, NvmeTier(io=io))]


@pytest.mark.parametrize(
    ("mounted", "level", "words"),
    [
        ("ext4 /dev/nvme0n1", Level.OK, "ext4 on /dev/nvme0n1"),
        ("overlay overlay", Level.OK, "overlay on overlay"),  # a container's own root: its disk's speed, as a rule
        ("fuse.fuse-overlayfs fuse-overlayfs", Level.OK, "fuse-overlayfs"),
        ("tmpfs tmpfs", Level.WARN, "is memory"),
        ("rootfs none", Level.WARN, "is memory"),
        ("nfs4 server:/home", Level.WARN, "is a network"),
        ("lustre 10.0.0.1@tcp:/scratch", Level.WARN, "is a network"),
        ("fuse.sshfs me@host:", Level.WARN, "is a network"),
        (None, Level.OK, "an unknown filesystem on an unknown device"),
    ],
)
def test_folder_that_is_no_disk_is_warned_of(mounted: str | None, level: Level, words: str, tmp_path: Path) -> None:
    table = f"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:50 / {tmp_path} rw - {mounted} rw\n" if mounted else ""
    root = lay_down(tmp_path / "recorded", {"proc/self/mountinfo": table})
    finding = swap_findings(tmp_path, NvmeTier(), root)[0]
    assert finding.level is level and words in finding.text
    assert bool(finding.advice) == (level is Level.WARN)


@pytest.mark.parametrize(
    ("free", "level", "words"),
    [
        (500 * GIB, Level.OK, "480.0 GiB of them for state"),
        (20 * GIB + 512 * MIB, Level.WARN, "512.0 MiB of them"),
        (19 * GIB, Level.FAIL, "0 B of them"),
    ],
)
def test_free_space_is_what_is_free_above_the_margin(
    free: int, level: Level, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierstore.doctor.swap.disk_space", lambda folder: DiskSpace(1000 * GIB, free))
    finding = swap_findings(tmp_path, NvmeTier())[1]
    assert finding.level is level and words in finding.text


def test_folder_without_unnamed_files_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    found = swap_findings(tmp_path, NvmeTier())[3]
    assert found.level is Level.WARN and "O_TMPFILE does not work" in found.text


def test_folder_without_direct_io_is_warned_of_and_fails_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("tierstore.swapfile._probe", refuse)
    assert folder_levels(tmp_path)[2] is Level.WARN
    assert folder_levels(tmp_path, direct=True)[2] is Level.FAIL


def test_folder_that_hangs_does_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(seconds: float, work: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("tierstore.doctor.swap.wait_within", give_up)
    (finding,) = swap_findings(tmp_path, NvmeTier())
    assert finding.level is Level.FAIL and "did not answer" in finding.text


def test_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TransferError(5, "Input/output error", str(tmp_path))

    monkeypatch.setattr("tierstore.doctor.swap.disk_space", fail)
    (finding,) = swap_findings(tmp_path, NvmeTier())
    assert finding.level is Level.FAIL and "Input/output error" in finding.text


# -- the machine, by tables -------------------------------------------------------------------------------------


def memory(available: int, limit: int | None = None) -> HostMemory:
    return HostMemory(64 * GIB, available, limit, "machine", limit or 64 * GIB)


def path_rates(rate: float) -> PathRates:
    return PathRates(1e-4, rate, rate, (SizeRates(MIB, 1e-3, rate),))


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (memory_finding(memory(32 * GIB)), Level.OK),
        (memory_finding(memory(6 * GIB)), Level.WARN),
        (memory_finding(memory(6 * GIB, limit=8 * GIB)), Level.OK),
        (device_finding("cuda:0", 70 * GIB, 80 * GIB), Level.OK),
        (device_finding("cuda:0", 2 * GIB, 80 * GIB), Level.WARN),  # somebody else computes on it
        (slurm_finding(None, memory(32 * GIB)), Level.OK),
        (slurm_finding(8 * GIB, memory(6 * GIB, limit=8 * GIB)), Level.OK),
        (slurm_finding(8 * GIB, memory(6 * GIB, limit=9 * GIB)), Level.OK),  # AllowedRAMSpace above 100
        (slurm_finding(8 * GIB, memory(32 * GIB)), Level.WARN),
        (slurm_finding(8 * GIB, memory(32 * GIB, limit=40 * GIB)), Level.WARN),
        (slurm_finding(64 * GIB, memory(32 * GIB)), Level.OK),  # the whole node
        (memlock_finding(None, is_pinned=True, memory=memory(32 * GIB)), Level.OK),
        (memlock_finding(8 * MIB, is_pinned=False, memory=memory(32 * GIB)), Level.OK),
        (memlock_finding(16 * GIB, is_pinned=True, memory=memory(32 * GIB)), Level.OK),
        (memlock_finding(8 * MIB, is_pinned=True, memory=memory(32 * GIB)), Level.WARN),
        (bandwidth_finding("ext4 on /dev/nvme0n1", path_rates(2e9)), Level.OK),
        (bandwidth_finding("ext4 on /dev/sda", path_rates(120e6)), Level.WARN),
        (stall_finding(0.5), Level.OK),
        (stall_finding(30.0), Level.WARN),
        (huge_pages_finding("always"), Level.OK),
        (huge_pages_finding("madvise"), Level.OK),
        (huge_pages_finding("never"), Level.WARN),
        (huge_pages_finding("unknown"), Level.WARN),
        (cores_finding(8, 16, 8), Level.OK),
        (cores_finding(2, 16, 16), Level.WARN),
        (cores_finding(1, 1, 1), Level.WARN),
        (numba_finding(""), Level.OK),
        (numba_finding("numba is not installed"), Level.OK),
        (waiting_finding({}), Level.WARN),
        (waiting_finding({"OMP_WAIT_POLICY": "active"}), Level.WARN),
        (waiting_finding({"OMP_WAIT_POLICY": "passive"}), Level.OK),
        (aio_finding(0, 65536), Level.OK),
        (aio_finding(65000, 65536), Level.WARN),
    ],
)
def test_levels(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.advice) == (level is not Level.OK)


def test_machine_that_tells_nothing_of_itself_is_examined_too(tmp_path: Path) -> None:
    """No /proc, no /sys: as on another system, or in a sandbox."""
    findings = examined(tmp_path, {})
    assert findings["huge pages"].text.startswith("unknown") and findings["memory"].level is not Level.FAIL
    assert not {"pressure", "aio-max-nr"} & findings.keys()


MACHINE = {"proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1000 kB\nMemAvailable: 50331648 kB\n"}
STALL = "some avg10={} avg60=0.10 avg300=0.00 total=7\nfull avg10=0.00\n"


def container(version: int, *, used: int, limit: int) -> dict[str, str | int]:
    """The files of a container on a machine of 64 GiB, 48 of them available."""
    if version == 1:
        group, names = "sys/fs/cgroup/memory/docker/c", ("usage_in_bytes", "limit_in_bytes")
        files: dict[str, str | int] = {"proc/self/cgroup": "4:memory:/docker/c\n"}
    else:
        group, names = "sys/fs/cgroup/docker/c", ("current", "max")
        files = {"proc/self/cgroup": "0::/docker/c\n"}
    return {**MACHINE, **files, **{f"{group}/memory.{name}": n for name, n in zip(names, (used, limit), strict=True)}}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("used", "level"), [(2 * GIB, Level.OK), (8 * GIB - 512 * MIB, Level.WARN)])
def test_memory_is_judged_by_the_limit_of_the_container(version: int, used: int, level: Level, tmp_path: Path) -> None:
    finding = examined(tmp_path, container(version, used=used, limit=8 * GIB))["memory"]
    assert finding.level is level
    for words in ("64.0 GiB, 8.0 GiB allowed", f"cgroup v{version}", "docker/c"):
        assert words in finding.text


def test_machine_without_a_limit_is_judged_as_a_whole(tmp_path: Path) -> None:
    text = examined(tmp_path, MACHINE)["memory"].text
    assert "64.0 GiB, no limit below that; 48.0 GiB available (machine)" in text and "at most 24.0 GiB" in text


@pytest.mark.parametrize("percent", [0.5, 12.5])
def test_pressure_of_a_container_is_read(percent: float, tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/c\n", "sys/fs/cgroup/c/memory.pressure": STALL.format(percent)}
    finding = examined(tmp_path, {"proc/pressure/memory": STALL.format(99.0), **files})["pressure"]
    assert finding.level is (Level.WARN if percent > 10 else Level.OK) and f"{percent} %" in finding.text


@pytest.mark.parametrize(("setting", "level"), [("always [madvise] never", Level.OK), ("always [never]", Level.WARN)])
def test_setting_of_huge_pages_is_read(setting: str, level: Level, tmp_path: Path) -> None:
    assert examined(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": setting})["huge pages"].level is level


@pytest.mark.parametrize(("taken", "level"), [(0, Level.OK), (65000, Level.WARN)])
def test_requests_that_the_kernel_still_takes_are_counted(taken: int, level: Level, tmp_path: Path) -> None:
    pytest.importorskip("libaio")
    files = {"proc/sys/fs/aio-nr": taken, "proc/sys/fs/aio-max-nr": 65536}
    assert examined(tmp_path, files)["aio-max-nr"].level is level


@pytest.mark.parametrize(
    ("given", "limit", "level", "words"),
    [
        ({"SLURM_MEM_PER_NODE": "8192"}, 8 * GIB, Level.OK, "8.0 GiB are allowed"),
        ({"SLURM_MEM_PER_NODE": "8192"}, None, Level.WARN, "no control group holds it to that"),
        ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, None, Level.WARN, "the job has 8.0 GiB"),
        ({"SLURM_MEM_PER_NODE": "0"}, None, Level.OK, "all memory of this node"),
    ],
)
def test_memory_that_slurm_gave_is_compared_with_what_is_allowed(
    given: dict[str, str],
    limit: int | None,
    level: Level,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without ConstrainRAMSpace a job sees the whole node's memory as its own, until Slurm ends it."""
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**given, "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    files = MACHINE if limit is None else container(2, used=GIB, limit=limit)
    finding = examined(tmp_path, files)["slurm"]
    assert finding.level is level and words in finding.text


def test_nothing_is_said_of_slurm_outside_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "slurm" not in examined(tmp_path, MACHINE)
