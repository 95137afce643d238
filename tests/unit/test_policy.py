"""The policy's schema: what loads, as what, and what every kind of wrong setting is told."""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import re
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import fuzzing
from tierstore.errors import PolicyError
from tierstore.policy import (
    TIER_NAMES,
    CpuTier,
    GpuTier,
    IoSettings,
    NvmeTier,
    Percent,
    PlacementRule,
    StateSettings,
    TierPolicy,
    Tiers,
    Watermarks,
)

CONFIGS = Path(__file__).parents[2] / "configs"
ALL_TIERS: dict[str, Any] = {"gpu": {}, "cpu": {}, "nvme": {}}


def with_setting(path: str, value: object) -> dict[str, Any]:
    """A policy with all tiers and one setting, given by its dotted path."""
    settings: dict[str, Any] = {"tiers": copy.deepcopy(ALL_TIERS)}
    *sections, key = path.split(".")
    section = settings
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return settings


def load_setting(path: str, value: object) -> Any:
    found: Any = TierPolicy.load(with_setting(path, value))
    for name in path.split("."):
        found = getattr(found, name)
    return found


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# What loads


def test_nothing_is_every_tier_with_its_defaults():
    policy = TierPolicy.load()
    assert policy == TierPolicy(tiers=Tiers(gpu=GpuTier(), cpu=CpuTier(), nvme=NvmeTier()))
    assert policy.tiers.names == TIER_NAMES == ("gpu", "cpu", "nvme")


def test_defaults_are_those_of_the_architecture():
    policy = TierPolicy.load()
    assert (policy.version, policy.chunk_size, policy.compute, policy.order) == (1, "auto", "auto", "auto")
    assert policy.check_parameters is True and policy.placement == ()
    assert policy.tiers.gpu == GpuTier(
        device="auto", capacity="auto", required=False, watermarks=Watermarks(high=0.90, low=0.80)
    )
    assert policy.tiers.cpu == CpuTier(capacity="auto", pin_memory="auto", watermarks=Watermarks(high=0.85, low=0.75))
    io = IoSettings(
        engine="auto",
        threads="auto",
        queue_depth="auto",
        request_size="auto",
        direct="auto",
        checksum=False,
        timeout=60.0,
    )
    assert policy.tiers.nvme == NvmeTier(capacity="auto", paths="auto", io=io)
    assert policy.state == StateSettings(master="auto", moments="float32")


@pytest.mark.parametrize("empty", [None, {}])
def test_empty_sections_have_their_defaults(empty):
    settings = {"tiers": {"gpu": empty, "cpu": empty, "nvme": {"io": empty}}, "state": empty, "placement": None}
    assert TierPolicy.load(settings) == TierPolicy.load()
    assert TierPolicy.load({"tiers": {"nvme": empty}}) == TierPolicy.load(tiers=["nvme"])


def test_tier_that_is_not_named_is_absent():
    policy = TierPolicy.load({"tiers": {"nvme": {}, "cpu": {}}})
    assert policy.tiers.names == ("cpu", "nvme")
    assert policy.tiers.gpu is None
    assert Tiers(gpu=None, cpu=CpuTier()).names == ("cpu",)


def test_any_mapping_and_nested_sections_load():
    expected = TierPolicy.load({"tiers": {"cpu": {"capacity": 4096}}})
    assert (
        TierPolicy.load(MappingProxyType({"tiers": OrderedDict(cpu=MappingProxyType({"capacity": 4096}))})) == expected
    )
    assert TierPolicy.load({"tiers": Tiers(cpu=CpuTier(capacity=4096))}) == expected
    assert TierPolicy.load({"tiers": {"cpu": CpuTier(capacity=4096)}}) == expected


def test_policy_loads_as_itself():
    policy = TierPolicy.load({"tiers": {"cpu": {}}})
    assert TierPolicy.load(policy) is policy


def test_caller_s_mapping_is_left_as_it_was():
    settings = {"tiers": {"cpu": None, "nvme": {"io": None}}, "placement": None}
    before = copy.deepcopy(settings)
    TierPolicy.load(settings, tiers=["nvme"])
    assert settings == before


def test_file_loads_by_text_and_by_path(tmp_path):
    path = write(tmp_path, "tiers:\n  cpu: {capacity: 8MiB}\n  nvme:\n    paths: [/mnt/a]\n")
    expected = TierPolicy.load({"tiers": {"cpu": {"capacity": 8 << 20}, "nvme": {"paths": ["/mnt/a"]}}})
    assert TierPolicy.load(path) == TierPolicy.load(str(path)) == expected


def test_yaml_merge_keys_may_be_overridden(tmp_path):
    path = write(
        tmp_path, "tiers:\n  gpu: {watermarks: &w {high: 0.9, low: 0.5}}\n  cpu: {watermarks: {<<: *w, low: 0.6}}\n"
    )
    tier = TierPolicy.load(path).tiers.cpu
    assert tier is not None and tier.watermarks == Watermarks(high=0.9, low=0.6)


@pytest.mark.parametrize(
    ("text", "capacity"),
    [
        ("auto", "auto"),
        (1, 1),
        (65536, 65536),
        ("65536", 65536),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("64MB", 64_000_000),
        ("2GiB", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("1TiB", 1 << 40),
        (2**63 - 1, 2**63 - 1),
        ("30%", Percent(0.3)),
        ("12.5 %", Percent(0.125)),
        ("100%", Percent(1.0)),
        (Percent(0.5), Percent(0.5)),
    ],
)
@pytest.mark.parametrize("tier", TIER_NAMES)
def test_capacity_is_read(tier, text, capacity):
    found = load_setting(f"tiers.{tier}.capacity", text)
    assert found == capacity and type(found) is type(capacity)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("chunk_size", "16KiB", 16384),
        ("chunk_size", 16385, 16385),
        ("compute", "device", "device"),
        ("order", "fixed", "fixed"),
        ("check_parameters", False, False),
        ("tiers.gpu.device", "cuda:1", "cuda:1"),
        ("tiers.gpu.required", True, True),
        ("tiers.gpu.watermarks", {"high": 1, "low": 1}, Watermarks(high=1.0, low=1.0)),
        ("tiers.cpu.pin_memory", False, False),
        ("tiers.nvme.io.engine", "libaio", "libaio"),
        ("tiers.nvme.io.threads", 8, 8),
        ("tiers.nvme.io.queue_depth", 65536, 65536),
        ("tiers.nvme.io.request_size", "1MiB", 1 << 20),
        ("tiers.nvme.io.direct", True, True),
        ("tiers.nvme.io.checksum", False, False),
        ("tiers.nvme.io.checksum", True, True),
        ("tiers.nvme.io.timeout", 5, 5.0),
        ("tiers.nvme.io.timeout", 0.25, 0.25),
        ("tiers.nvme.io.timeout", "60s", 60.0),
        ("tiers.nvme.io.timeout", "500ms", 0.5),
        ("tiers.nvme.io.timeout", "1.5 min", 90.0),
        ("tiers.nvme.io.timeout", "24h", 86400.0),
        ("tiers.nvme.paths", ["/mnt/a", Path("/mnt/b")], (Path("/mnt/a"), Path("/mnt/b"))),
        ("placement", [{"params": "*", "tier": "cpu"}], (PlacementRule(params="*", tier="cpu"),)),
        ("state.master", "none", "none"),
        ("state.master", "float32", "float32"),
    ],
)
def test_setting_is_read(path, value, expected):
    found = load_setting(path, value)
    assert found == expected and type(found) is type(expected)


def test_swap_path_may_start_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_setting("tiers.nvme.paths", ["~/swap"]) == (Path("/home/somebody/swap"),)


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*embed*", "model.embed_tokens.weight", True),
        ("*embed*", "model.Embed.weight", False),
        ("layers.?.bias", "layers.3.bias", True),
        ("layers.?.bias", "layers.13.bias", False),
        ("layers.[0-3].*", "layers.2.weight", True),
        ("head", "head.weight", False),
    ],
)
def test_rule_matches_names_as_fnmatch_does(pattern, name, matches):
    assert PlacementRule(params=pattern, tier="cpu").matches(name) is matches


# Selecting tiers


@pytest.mark.parametrize(
    ("tiers", "names"),
    [(["nvme", "gpu"], ("gpu", "nvme")), (("cpu",), ("cpu",)), (["nvme", "cpu", "gpu"], ("gpu", "cpu", "nvme"))],
)
def test_tiers_alone_are_those_with_defaults_fastest_first(tiers, names):
    policy = TierPolicy.load(tiers=tiers)
    assert policy.tiers.names == names
    assert policy == TierPolicy.load({"tiers": dict.fromkeys(names)})


def test_tiers_select_from_a_policy_and_keep_its_settings():
    full = TierPolicy.load({**with_setting("tiers.nvme.capacity", "1GiB"), "order": "fixed"})
    policy = TierPolicy.load(full, tiers=["nvme"])
    assert policy.tiers == Tiers(nvme=NvmeTier(capacity=1 << 30)) and policy.order == "fixed"
    assert full.tiers.names == TIER_NAMES


def test_tiers_select_from_all_with_defaults_where_the_policy_names_none(tmp_path):
    """As in `policy={"update": "backward"}, tiers=["cpu", "nvme"]`; a misspelt section is not taken for none."""
    wanted = TierPolicy.load({"update": "backward", "tiers": {"cpu": {}, "nvme": {}}})
    for source in ({"update": "backward"}, write(tmp_path, "update: backward")):
        assert TierPolicy.load(source, tiers=["cpu", "nvme"]) == wanted
    with pytest.raises(PolicyError, match="tier: unknown key, did you mean 'tiers'"):
        TierPolicy.load({"tier": {"cpu": {}}}, tiers=["cpu"])
    with pytest.raises(PolicyError, match="tiers: found no tier"):
        TierPolicy.load({"tiers": {}}, tiers=["cpu"])


@pytest.mark.parametrize(
    ("tiers", "fragment"),
    [
        ("cpu", "tiers: found the text 'cpu'; allowed: a list, as tiers=['cpu']"),
        ("cpu,nvme", "a list, as tiers=['cpu', 'nvme']"),
        ([], "tiers: found []; allowed: a list of one or more of cpu, nvme"),
        ((), "tiers: found ()"),
        ({"cpu"}, "tiers: found {'cpu'}; allowed: a list"),
        (3, "tiers: found 3; allowed: a list"),
        (["gpu"], "tiers: found 'gpu', which this policy lacks; allowed: cpu, nvme"),
        (["disk"], "tiers: found 'disk', which is no tier; allowed: cpu, nvme"),
        ([["cpu"]], "tiers: found ['cpu'], which is no tier"),
        (["cpu", "nvme", "cpu"], "tiers: found 'cpu' 2 times; allowed: once"),
    ],
)
def test_wrong_selection_is_refused(tiers, fragment, tmp_path):
    with pytest.raises(PolicyError, match=re.escape(f"policy: {fragment}" if fragment[0] == "t" else fragment)):
        TierPolicy.load({"tiers": {"cpu": {}, "nvme": {}}}, tiers=tiers)
    path = write(tmp_path, "tiers: {cpu: , nvme: }")
    with pytest.raises(PolicyError, match=re.escape(fragment)) as caught:
        TierPolicy.load(path, tiers=tiers)
    assert str(caught.value).startswith(f"{path}: ")


def test_selection_that_leaves_a_rule_without_its_tier_is_refused(tmp_path):
    path = write(
        tmp_path, "tiers: {gpu: , cpu: , nvme: }\nplacement:\n- {params: a, tier: nvme}\n- {params: b, tier: cpu}\n"
    )
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(path, tiers=["gpu", "nvme"])
    assert str(caught.value) == f"{path}: placement.1.tier: found 'cpu'; allowed: a tier of this policy (gpu, nvme)"


# Wrong settings: the path and the words


SIZES = [
    -1,
    0,
    "0",
    "0%",
    "-5%",
    "100.1%",
    "64 parsecs",
    "64MiB, or so",
    "64Mbit",
    "MiB",
    "",
    "1e9",
    "nan",
    "NaN%",
    "1" * 400,
]
SIZES += [
    "9" * 19 + "EiB",
    2**63,
    10**5000,
    1.5,
    math.nan,
    math.inf,
    True,
    False,
    None,
    [],
    {},
    ["1MiB"],
    b"1MiB",
    "AUTO",
    "٣GiB",
]
WORDS = ["", "AUTO", "yes", None, 1, 1.0, 0, [], {}, ["auto"], b"auto", math.nan]
COUNTS = [0, -1, True, 1.0, 10**9, 10**5000, "4", "", None, [], math.nan]
SHARES = [0, -0.1, 1.0001, 90, True, "0.9", "90%", None, math.nan, math.inf, -math.inf, 10**5000, []]
TIMES = [
    0,
    -1,
    "0s",
    "60",
    "60 parsecs",
    "-1s",
    "1m",
    "25h",
    86401,
    True,
    None,
    math.nan,
    math.inf,
    "nan",
    "infs",
    10**400,
    {},
]
TIMES += ["9" * 500 + "s", "0." + "0" * 500 + "1s"]
PATHS = [
    "/mnt/a",
    "",
    [],
    [""],
    ["/a", 3],
    [None],
    [b"/a"],
    ["a\0b"],
    {"a": 1},
    {"/a"},
    None,
    3,
    True,
    ["~no_such_user_here/x"],
]
LISTS = ["*", {"params": "*", "tier": "cpu"}, 3, True, {"a"}, "auto"]
SECTIONS = [3, "64MiB", True, [], ["capacity"], 1.5]

WRONG: list[tuple[str, list[Any], str]] = [
    (
        "chunk_size",
        [*SIZES, 16383, "4KiB", "30%"],
        "allowed: auto, or a size such as 65536, 64MiB or 1.5GiB, from 16KiB",
    ),
    ("tiers.gpu.capacity", SIZES, "allowed: auto, or a size such as 65536, 64MiB or 1.5GiB, from 1 byte, or a share"),
    ("tiers.cpu.capacity", SIZES, "at most 100%, as 30%"),
    ("tiers.nvme.capacity", SIZES, "at most 100%, as 30%"),
    ("tiers.nvme.io.request_size", [*SIZES, 4095, 5000, "30%"], "a multiple of 4096 bytes"),
    ("version", [0, 2, "1", 1.0, True, None, [1]], "allowed: 1"),
    ("compute", [*WORDS, "gpu", "cuda"], "allowed: auto, cpu, device"),
    ("order", [*WORDS, "random"], "allowed: auto, alternating, fixed"),
    ("check_parameters", WORDS, "allowed: true, false"),
    (
        "tiers.gpu.device",
        ["", "CUDA", "cuda:", "cuda:x", "cuda 0", 0, None, True, [], {}],
        "allowed: auto, cpu, or a torch",
    ),
    ("tiers.gpu.required", WORDS, "allowed: true, false"),
    ("tiers.gpu.watermarks.high", SHARES, "allowed: a number above 0 and at most 1"),
    ("tiers.cpu.watermarks.low", SHARES, "allowed: a number above 0 and at most 1"),
    ("tiers.cpu.pin_memory", WORDS, "allowed: auto, true, false"),
    ("tiers.nvme.io.engine", [*WORDS, "io_uring", True], "allowed: auto, threads, libaio, aiofiles"),
    ("tiers.nvme.io.threads", [*COUNTS, 1025], "allowed: auto, or a whole number from 1 to 1024"),
    ("tiers.nvme.io.queue_depth", [*COUNTS, 65537], "allowed: auto, or a whole number from 1 to 65536"),
    ("tiers.nvme.io.direct", WORDS, "allowed: auto, true, false"),
    ("tiers.nvme.io.checksum", WORDS, "allowed: true, false"),
    ("tiers.nvme.io.timeout", TIMES, "allowed: seconds as 60, 60s, 500ms or 2min, above 0 and at most 24h"),
    ("tiers.nvme.paths", PATHS, "allowed: auto, or a list of folders, as [/mnt/nvme0, /mnt/nvme1]"),
    ("placement", LISTS, "allowed: a list of rules, as [{params: '*embed*', tier: cpu}]"),
    ("state.master", [*WORDS, "bfloat16", True], "allowed: auto, none, float32"),
    ("state.moments", [*WORDS, "auto", "bfloat16"], "allowed: float32"),
    ("tiers", [*SECTIONS, ["cpu"]], "allowed: a mapping with the keys gpu, cpu, nvme"),
    ("tiers.gpu", SECTIONS, "allowed: a mapping with the keys device, capacity, required, watermarks"),
    ("tiers.cpu", SECTIONS, "allowed: a mapping with the keys capacity, pin_memory, watermarks"),
    ("tiers.cpu.watermarks", [*SECTIONS, None], "allowed: a mapping with the keys high, low"),
    ("tiers.nvme", SECTIONS, "allowed: a mapping with the keys capacity, paths, allow_shared_folder, io"),
    ("tiers.nvme.io", SECTIONS, "allowed: a mapping with the keys engine, threads, queue_depth"),
    ("state", SECTIONS, "allowed: a mapping with the keys master, moments"),
]


@pytest.mark.parametrize(
    ("path", "value", "allowed"),
    [
        pytest.param(path, value, allowed, id=f"{path}-{number}")
        for path, values, allowed in WRONG
        for number, value in enumerate(values)
    ],
)
def test_wrong_value_names_path_found_and_allowed(path, value, allowed):
    settings = with_setting(path, value)
    if path.endswith((".high", ".low")):
        section = settings["tiers"][path.split(".")[1]]["watermarks"]
        section |= {"high": 0.9, "low": 0.1} | dict(section)
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(settings)
    line = str(caught.value)
    assert line.startswith(f"policy: {path}: found ") and allowed in line
    assert "\n" not in line and len(line) < 400
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (with_setting("tiers.cpu.capcity", 1), "tiers.cpu.capcity: unknown key, did you mean 'capacity'?"),
        (
            with_setting("tiers.nvme.io.que_depth", 1),
            "tiers.nvme.io.que_depth: unknown key, did you mean 'queue_depth'?",
        ),
        (with_setting("chunksize", 1), "chunksize: unknown key, did you mean 'chunk_size'?"),
        (with_setting("io", {"threads": 3}), "io: unknown key, did you mean tiers.nvme.io?"),
        (with_setting("cpu", {}), "cpu: unknown key, did you mean tiers.cpu?"),
        (with_setting("tier", {}), "tier: unknown key, did you mean 'tiers'?"),
        (with_setting("tiers.update", "step"), "tiers.update: unknown key, did you mean update at the top?"),
        (with_setting("tiers.cpu.direct", True), "tiers.cpu.direct: unknown key, did you mean tiers.nvme.io.direct?"),
        (
            with_setting("watermarks", {}),
            "watermarks: unknown key, did you mean tiers.gpu.watermarks or tiers.cpu.watermarks?",
        ),
        (with_setting("tiers.ssd", {}), "tiers.ssd: unknown key; allowed: a mapping with the keys gpu, cpu, nvme"),
        (with_setting("tiers.cpu", {1: 2}), "tiers.cpu.1: unknown key; allowed: a mapping with the keys capacity"),
        (with_setting("tiers.cpu", {"a\nb": 2}), r"tiers.cpu.'a\nb': unknown key"),
        (with_setting("tiers.cpu", {"x" * 500: 2}), "tiers.cpu.'xxx"),
        ({}, "tiers: missing; allowed: a mapping with the keys gpu, cpu, nvme"),
        ({"tiers": {}}, "tiers: found no tier; allowed: at least one of gpu, cpu, nvme"),
        ({"tiers": None}, "tiers: found no tier"),
        (
            with_setting("tiers.cpu.watermarks", {"high": 0.9}),
            "tiers.cpu.watermarks.low: missing; allowed: a mapping with the keys high, low",
        ),
        (
            with_setting("tiers.gpu.watermarks", {"high": 0.5, "low": 0.6}),
            "tiers.gpu.watermarks: found low 0.6 above high 0.5; allowed: low at most high",
        ),
        (
            with_setting("placement", [{"params": "*"}]),
            "placement.0.tier: missing; allowed: a mapping with the keys params, tier",
        ),
        (
            with_setting("placement", [{"params": "*", "tier": "disk"}]),
            "placement.0.tier: found 'disk'; allowed: gpu, cpu, nvme",
        ),
        (
            with_setting("placement", [{"params": "", "tier": "cpu"}]),
            "placement.0.params: found ''; allowed: a pattern",
        ),
        (with_setting("placement", [{"params": 3, "tier": "cpu"}]), "placement.0.params: found 3; allowed: a pattern"),
        (with_setting("placement", ["cpu"]), "placement.0: found 'cpu'; allowed: a mapping with the keys params, tier"),
        (
            {"tiers": {"nvme": {}}, "placement": [{"params": "*", "tier": "cpu"}]},
            "placement.0.tier: found 'cpu'; allowed: a tier of this policy (nvme)",
        ),
        (with_setting("state.master", "half"), "state.master: found 'half'; allowed: auto, none, float32, split"),
        (with_setting("state.moments", "bfloat16"), "state.moments: found 'bfloat16'; allowed: float32, parameter"),
        (
            with_setting("tiers.nvme.paths", ["/mnt/a", "/mnt/b", "/mnt/b/../a"]),
            "tiers.nvme.paths: found '/mnt/a' and '/mnt/b/../a', one folder; allowed: each folder once",
        ),
    ],
)
def test_wrong_structure_is_told(settings, line):
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(settings)
    assert str(caught.value).startswith(f"policy: {line}")
    assert "\n" not in str(caught.value)


def test_one_folder_by_two_names_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PolicyError, match="one folder; allowed: each folder once"):
        load_setting("tiers.nvme.paths", [str(tmp_path), tmp_path / "link"])


def test_misspelt_key_that_is_needed_is_both_missing_and_unknown():
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(with_setting("placement", [{"parms": "*", "tier": "cpu"}]))
    missing, unknown = str(caught.value).splitlines()
    assert missing.startswith("policy: placement.0.params: missing; allowed: a mapping with the keys params, tier")
    assert unknown.startswith("policy: placement.0.parms: unknown key, did you mean 'params'?")


def keys_below(section, path=()):
    """Every key of the schema, with the section it is in."""
    for name, setting in section.items():
        yield path, name
        if isinstance(setting, dict):
            yield from keys_below(setting, (*path, name))


WHOLE = TierPolicy.load(
    {"tiers": {name: {} for name in TIER_NAMES}, "monitor": "a", "record": "b", "state": {}}
).model_dump(mode="json")


@pytest.mark.parametrize(("path", "key"), [found for found in keys_below(WHOLE) if found[0]])
def test_a_key_of_a_section_that_is_given_at_the_top_is_told_where_it_belongs(path, key):
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load({**with_setting("order", "auto"), key: 1})
    assert re.search(rf"did you mean .*\b{re.escape('.'.join((*path, key)))}\b.*\?", str(caught.value))


@pytest.mark.parametrize("other", ["run.json", "./sub/../run.json", "link.json"])
def test_one_file_for_monitor_and_record_is_refused(tmp_path, other):
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to("run.json")
    settings = {"tiers": {"cpu": {}}, "monitor": tmp_path / "run.json", "record": tmp_path / other}
    with pytest.raises(PolicyError, match=r"record: found .*; allowed: another file than that of monitor"):
        TierPolicy.load(settings)
    assert TierPolicy.load({**settings, "record": tmp_path / "other.json"})


def test_a_policys_path_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "policy.yaml").write_text("tiers: {cpu: {}}\nrecord: ~/run.json\n")
    assert TierPolicy.load("~/policy.yaml").record == tmp_path / "run.json"
    with pytest.raises(PolicyError, match=rf"{tmp_path}/none.yaml: cannot be read"):
        TierPolicy.load("~/none.yaml")


@pytest.mark.parametrize("key", ["monitor", "record"])
def test_a_policy_never_names_its_own_file_as_one_to_be_replaced(tmp_path, key):
    path = tmp_path / "policy.yaml"
    path.write_text(f"tiers: {{cpu: {{}}}}\n{key}: {path}\n")
    with pytest.raises(PolicyError, match=rf"policy.yaml: {key}: found .*, this policy's own file; allowed: another"):
        TierPolicy.load(path)


def test_every_problem_has_its_own_line():
    settings = {
        "ordr": "fixed",
        "compute": "gpu",
        "tiers": {"cpu": {"capacity": -1}, "nvme": {"io": {"engine": "magic", "timeout": "soon"}}},
        "placement": [{"params": "a\nb", "tier": "x\ny"}],
    }
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(settings)
    paths = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert paths == [
        "compute",
        "tiers.cpu.capacity",
        "tiers.nvme.io.engine",
        "tiers.nvme.io.timeout",
        "placement.0.tier",
        "ordr",
    ]


def test_sections_made_by_hand_raise_policy_errors_too():
    with pytest.raises(PolicyError, match=r"^policy: capcity: unknown key, did you mean 'capacity'\?"):
        CpuTier(capcity=3)  # type: ignore[call-arg]
    with pytest.raises(PolicyError, match=r"^policy: io\.engine: found 'x'; allowed: auto, threads"):
        NvmeTier(io={"engine": "x"})  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"^policy: found low 0.2 above high 0.1"):
        Watermarks(high=0.1, low=0.2)
    with pytest.raises(PolicyError, match=r"^policy: placement\.0\.tier: found 'gpu'"):
        TierPolicy(tiers=Tiers(cpu=CpuTier()), placement=(PlacementRule(params="*", tier="gpu"),))
    for fraction in (0.0, -1.0, 1.1, math.nan):
        with pytest.raises(PolicyError, match="allowed: above 0 and at most 1"):
            Percent(fraction)


def test_value_whose_repr_fails_is_still_told():
    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(PolicyError, match=r"tiers\.cpu\.capacity: found <Rude instance at .*>; allowed"):
        load_setting("tiers.cpu.capacity", Rude())


@pytest.mark.parametrize("source", [3, 1.5, True, [], ["cpu"], b"policy.yaml", object, {"cpu"}])
def test_wrong_source_is_told(source):
    with pytest.raises(PolicyError, match=r"^policy: found .*; allowed: a TierPolicy, a mapping, or the path"):
        TierPolicy.load(source)


# Wrong files


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "found nothing, the file is empty; allowed: a mapping with the keys version, chunk_size"),
        ("# only a comment\n", "found nothing, the file is empty"),
        ("- cpu\n- nvme\n", "found ['cpu', 'nvme']; allowed: a mapping"),
        ("cpu", "found 'cpu'; allowed: a mapping"),
        ("3", "found 3; allowed: a mapping"),
        ("tiers: {cpu: {}\n", "cannot be read as a YAML policy:"),
        ("tiers:\n\tcpu: {}\n", "cannot be read as a YAML policy:"),
        ("tiers: {cpu: }\n---\ntiers: {nvme: }\n", "expected a single document"),
        ("tiers: {cpu: }\ntiers: {nvme: }\n", "found the key 'tiers' twice"),
        ("tiers:\n  nvme: {io: {threads: 1, engine: auto, threads: 2}}\n", "found the key 'threads' twice"),
        ("{? [a] : 1, ? [a] : 2}", "cannot be read as a YAML policy:"),
        ("tiers: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("version: 2001-99-99", "month must be in 1..12"),
        ("version: !!bool maybe", "cannot be read as a YAML policy:"),
        ("version: !!int ''", "cannot be read as a YAML policy:"),
        ("[" * 1500, "cannot be read as a YAML policy:"),
        (b"tiers: \xff\xfe", "cannot be read as a YAML policy:"),
        ("tiers: \0", "cannot be read as a YAML policy:"),
        ("&a {tiers: {cpu: *a}}", "tiers.cpu.tiers: unknown key"),
        ("tiers: {cpu: {capcity: 1}}", "tiers.cpu.capcity: unknown key, did you mean 'capacity'?"),
        ("tiers: {cpu: {on: 1}}", "tiers.cpu.1: unknown key"),
    ],
)
def test_wrong_file_is_told_by_name(tmp_path, text, fragment):
    path = write(tmp_path, text)
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


def test_aliases_that_stand_for_a_billion_elements_are_told_shortly(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    path = write(tmp_path, "\n".join([*lines, "tiers: {cpu: {capacity: *a9}}"]))
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(path)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize("endless", ["/dev/zero", None])
def test_a_file_without_end_is_refused_before_it_fills_memory(tmp_path, endless):
    path = endless or write(tmp_path, "# " + "x" * (1 << 20))
    with pytest.raises(PolicyError, match=r"more than 1,048,576 characters"):
        TierPolicy.load(path)


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b", ""])
def test_file_that_cannot_be_opened_is_told(tmp_path, name):
    source = os.path.join(tmp_path, name) if name else name
    with pytest.raises(PolicyError, match="cannot be read as a YAML policy: ") as caught:
        TierPolicy.load(source)
    assert isinstance(caught.value.__cause__, OSError | ValueError)


# Values


def test_policy_is_frozen_hashable_and_survives_copies():
    settings = with_setting("tiers.nvme.paths", ["/mnt/a", "/mnt/b"])
    settings["tiers"]["cpu"] = {"capacity": "30%"}
    settings["placement"] = [{"params": "*", "tier": "cpu"}]
    policy = TierPolicy.load(settings)
    for copied in (
        copy.deepcopy(policy),
        copy.copy(policy),
        pickle.loads(pickle.dumps(policy)),
        TierPolicy.load(settings),
    ):
        assert copied == policy and hash(copied) == hash(policy)
    assert policy != TierPolicy.load()
    with pytest.raises(ValueError, match="frozen"):
        policy.order = "fixed"  # type: ignore[misc]


sizes = st.integers(16384, 2**63 - 1) | st.integers(16, 2**33).map(lambda kib: f"{kib}KiB")
shares = st.floats(0, 100, exclude_min=True).map(lambda share: f"{share:f}%").filter(lambda text: float(text[:-1]) > 0)
capacities = st.just("auto") | sizes | shares | st.floats(1e-9, 1.0).map(Percent)
watermarks = st.lists(st.floats(0, 1, exclude_min=True), min_size=2, max_size=2).map(
    lambda pair: {"high": max(pair), "low": min(pair)}
)
switches = st.sampled_from(["auto", True, False])
io_settings = st.fixed_dictionaries(
    {},
    optional={
        "engine": st.sampled_from(["auto", "threads", "libaio", "aiofiles"]),
        "threads": st.just("auto") | st.integers(1, 1024),
        "request_size": st.just("auto") | st.integers(1, 2**20).map(lambda blocks: blocks * 4096),
        "direct": switches,
        "checksum": st.booleans(),
        "timeout": st.floats(0, 86400, exclude_min=True) | st.integers(1, 10**6).map(lambda ms: f"{ms}ms"),
    },
)
tier_settings = {
    "gpu": st.fixed_dictionaries({}, optional={"capacity": capacities, "watermarks": watermarks}),
    "cpu": st.fixed_dictionaries({}, optional={"capacity": capacities, "pin_memory": switches}),
    "nvme": st.fixed_dictionaries(
        {},
        optional={
            "capacity": capacities,
            "io": io_settings,
            "paths": st.lists(st.text("abé ", min_size=1).map(lambda text: f"/no/{text}"), min_size=1, unique=True),
        },
    ),
}
valid_policies = st.fixed_dictionaries(
    {"tiers": st.fixed_dictionaries(tier_settings)},
    optional={
        "chunk_size": sizes,
        "order": st.sampled_from(["auto", "alternating", "fixed"]),
        "placement": st.lists(
            st.fixed_dictionaries({"params": st.text(min_size=1), "tier": st.sampled_from(TIER_NAMES)})
        ),
        "state": st.fixed_dictionaries({}, optional={"master": st.sampled_from(["auto", "none", "float32"])}),
    },
)


@settings(deadline=None)
@given(valid_policies, st.sets(st.sampled_from(TIER_NAMES), min_size=1).map(sorted))
def test_written_policy_loads_as_an_equal_one(mapping, tiers):
    policy = TierPolicy.load(mapping)
    assert TierPolicy.load(yaml.safe_load(policy.to_yaml())) == policy
    if all(rule.tier in tiers for rule in policy.placement):
        selected = TierPolicy.load(policy, tiers=tiers)
        assert TierPolicy.load(yaml.safe_load(selected.to_yaml())) == selected
        assert set(selected.tiers.names) == set(tiers)


def test_written_policy_is_readable(tmp_path):
    settings = with_setting("tiers.nvme", {"capacity": "1.5GiB", "paths": ["/mnt/a"], "io": {"timeout": "500ms"}})
    settings["tiers"]["cpu"] = {"capacity": "30%"}
    settings["tiers"]["gpu"] = {"capacity": 65537}
    text = TierPolicy.load({**settings, "chunk_size": 65536}).to_yaml()
    for line in ("chunk_size: 64KiB", "capacity: 1536MiB", "capacity: 30%", "capacity: 65537", "timeout: 0.5"):
        assert line in text
    assert TierPolicy.load(write(tmp_path, text)).to_yaml() == text


KEYS = sorted(
    {"version", "gpu", "cpu", "nvme", "high", "low", "params", "tier"}
    | set(TierPolicy.model_fields)
    | set(GpuTier.model_fields)
    | set(CpuTier.model_fields)
    | set(NvmeTier.model_fields)
    | set(IoSettings.model_fields)
    | set(StateSettings.model_fields)
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["auto", "64MiB", "30%", "60s", "cpu", "nvme", "none", "float32", "split", "/mnt/a", "~x", "\ud800"]
    )
    | st.from_regex(r"\A[0-9]{0,25}(\.[0-9]{0,3})? ?(%|[kKMGTPE]?i?[bB]|ms|s|h)?\Z")
)
json_like = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | scalars.filter(hash), inner, max_size=4)
    ),
    max_leaves=12,
)
sections = st.dictionaries(st.sampled_from(KEYS), json_like, max_size=4)
json_mappings = st.dictionaries(
    st.sampled_from(KEYS) | st.text(max_size=5), json_like, max_size=5
) | st.fixed_dictionaries(
    {"tiers": st.dictionaries(st.sampled_from(TIER_NAMES), sections | json_like)}, optional={"state": sections}
)


def problem_of(*source: Any, **selection: Any) -> str:
    """The error's text, or nothing when the policy loads; any other exception fails the test."""
    try:
        policy = TierPolicy.load(*source, **selection)
    except PolicyError as error:
        return str(error)
    assert policy.tiers.names and isinstance(hash(policy), int)
    return ""


@settings(deadline=None)
@given(
    json_mappings | valid_policies, st.none() | st.lists(st.sampled_from([*TIER_NAMES, "disk"]), max_size=3) | json_like
)
@example({"tiers": {"cpu": {"capacity": "1" * 5000}}}, None)
def test_any_mapping_loads_or_raises_a_policy_error(mapping, tiers):
    problem = problem_of(mapping, tiers=tiers)
    assert all(line.startswith("policy: ") for line in problem.split("\n") if problem)


any_file = st.text() | json_like.map(yaml.safe_dump) | json_mappings.map(yaml.safe_dump) | st.binary()


@settings(deadline=None)
@given(any_file)
def test_any_file_loads_or_raises_a_policy_error(tmp_path_factory, text):
    path = write(tmp_path_factory.mktemp("fuzz"), text.encode(errors="replace") if isinstance(text, str) else text)
    problem = problem_of(path)
    assert not problem or problem.startswith(f"{path}: ")


def fuzz(folder, seed, tries):
    """Load the shipped policies, with bytes of them changed, cut out, repeated and put elsewhere."""
    randomness, outcomes = random.Random(seed), {"refused": 0, "loaded": 0}
    sources = [file.read_bytes() for file in sorted(CONFIGS.glob("*.yaml"))]
    for _ in tries:
        text = bytearray(randomness.choice(sources))
        for _ in range(randomness.randint(1, 8)):
            damage(text, randomness)
        path = write(folder, bytes(text))
        problem = problem_of(path)
        assert not problem or problem.startswith(f"{path}: ")
        outcomes["refused" if problem else "loaded"] += 1
    return outcomes


def test_damaged_files_load_or_raise_policy_errors(tmp_path):
    outcomes = fuzz(tmp_path, 5, range(30))
    assert min(outcomes.values()) > 2


@pytest.mark.fuzz
def test_damaged_files_load_or_raise_policy_errors_for_a_fixed_time(tmp_path, capsys):
    outcomes = fuzz(tmp_path, fuzzing.SEED, fuzzing.timed())
    fuzzing.tell(capsys, "policies", outcomes)
    assert sum(outcomes.values()) > 100


def damage(text, randomness):
    """Change some bytes of a file."""
    begin = randomness.randrange(len(text) + 1)
    piece = text[begin : begin + randomness.randint(0, 40)]
    match randomness.randrange(5):
        case 0:
            text[begin : begin + len(piece)] = b""
        case 1:
            text[begin:begin] = piece * randomness.randint(1, 50)
        case 2:
            text[begin:begin] = randomness.randbytes(randomness.randint(1, 4))
        case 3:
            text[begin:begin] = randomness.choice(
                [b"&a ", b"*a", b"!!python/object:os.system ", b"{", b"[", b": ", b"<<: "]
            )
        case 4:
            other = randomness.randrange(len(text) + 1)
            text[other:other] = piece


BOMBS = {
    "a key of aliases": "a0: &a0 [x]\n"
    + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    + "? *a11\n: 1\n",
    "merges of merges": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    "a mapping of itself": "tiers: &a\n  cpu: *a\n",
    "many lines": "".join(f"key{n}: 1\n" for n in range(2000)),
    "depth": "[" * 100_000,
    "a number without end": f"chunk_size: {'9' * 100_000}\ntiers: {{cpu: {{}}}}\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_stands_for_a_huge_one_is_told_shortly(tmp_path, name):
    """Aliases in a key took all memory; thousands of unknown keys made a message of megabytes."""
    (tmp_path / "policy.yaml").write_text(BOMBS[name])
    with pytest.raises(PolicyError) as caught:
        TierPolicy.load(tmp_path / "policy.yaml")
    assert len(str(caught.value)) < 20_000
