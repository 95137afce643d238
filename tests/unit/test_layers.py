"""The layer rule of docs/ARCHITECTURE.md, as data, checked against every import; and the size of modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierstore

PACKAGE = Path(tierstore.__file__).parent

# A module imports only from groups above its own, and within a group only from names to its left.
GROUPS: dict[str, tuple[str, ...]] = {
    "nouns": ("errors", "arena", "layout", "stats", "trace", "rates", "forms", "pieces", "history"),
    "decide": (
        "units",
        "problems",
        "policy",
        "residency",
        "placement",
        "tuning",
        "growth",
        "rebalance",
        "paths",
        "planning",
        "sparing",
    ),
    "do": (
        *(
            "signals",
            "crew",
            "cores",
            "mapping",
            "device",
            "randomness",
            "pages",
            "pressure",
            "io",
            "folders",
            "probes",
            "swapfile",
        ),
        *("ratecache", "gauge", "calibrate", "tiers", "tickets", "lanes", "retries", "transfer"),
    ),
    "join": (
        *(
            "flights",
            "striping",
            "traffic",
            "guard",
            "execution",
            "housing",
            "sizing",
            "relief",
            "lending",
            "parking",
            "store",
            "swapping",
            "build",
        ),
        *("piecestore", "tensors"),
    ),
    "use": (
        *("rules", "scratch", "masters", "onepass", "compiled", "kernels", "results", "checkpoint", "members"),
        *("counts", "cuts", "records", "ahead", "behind", "capture", "blueprint", "binding", "handed", "states"),
        *("state_view", "state_dicts", "update", "failures", "normed", "monitor", "progress", "sources"),
        *("contents", "ranks", "matching", "weights", "saving", "together", "held", "loading", "arrivals"),
        *("beside", "backward", "checkpointed", "offloading", "tiered", "optimizer"),
    ),
    "front": (
        *("", "output", "export", "demo", "doctor", "seen", "top", "report", "forecast", "checkpoint_view"),
        *("checkpoint_commands", "cli", "__main__"),
    ),
}
STRANGERS = [{"decide", "do"}]  # groups that never import each other
MOST_LINES = 420

# What modules that decide must not import, and the exceptions, which docs/ARCHITECTURE.md states beside its table.
IMPURE = {"torch", "time", "threading", "mmap", "psutil", "os", "pathlib", "io", "shutil", "socket", "subprocess"}
MAY_IMPORT = {
    "units": {"os", "pathlib"},  # expands and resolves swap paths, to find one folder named twice
    "policy": {"os"},  # reads the policy's own file
}
ACCELERATORS = {"cuda", "accelerator", "get_device_module", "xpu", "mps", "mtia", "hpu"}


def modules() -> dict[str, Path]:
    """Every module by dotted name within the package; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports at run time, within functions too; not those for typing only."""
    tree = ast.parse(path.read_text())
    for_typing = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for node in ast.walk(test)
    }
    for node in ast.walk(tree):
        if id(node) in for_typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tierstore":
            yield node.module.partition(".")[2]
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("tierstore."))


def group_of(module: str) -> tuple[int, int]:
    top = module.split(".")[0]
    for number, names in enumerate(GROUPS.values()):
        if top in names:
            return number, names.index(top)
    raise AssertionError(f"{module} is in no group: give it a place in docs/ARCHITECTURE.md and here")


@pytest.mark.parametrize("module", modules())
def test_modules_import_only_what_is_above_or_to_their_left(module: str) -> None:
    number, place = group_of(module)
    names = list(GROUPS)
    for imported in imports_of(modules()[module]):
        other, its_place = group_of(imported)
        same_package = imported.split(".")[0] == module.split(".")[0]
        assert same_package or (other, its_place) < (number, place), f"{module} must not import {imported}"
        assert {names[number], names[other]} not in STRANGERS, f"{module} must not import {imported}"


def packages_of(path: Path) -> set[str]:
    """The packages that a file imports, its own apart."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("module", GROUPS["decide"])
def test_deciding_modules_know_no_torch_clock_or_files(module: str) -> None:
    assert not packages_of(modules()[module]) & IMPURE - MAY_IMPORT.get(module, set())


def names_accelerator(source: str) -> bool:
    """Whether a source names one of torch's interfaces to accelerators, in whatever form of import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names = {node.attr}
        elif isinstance(node, ast.Import):
            names = {alias.name.partition("torch.")[2].split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = {*(node.module or "").split(".")[1:2], *(alias.name for alias in node.names)}
        else:
            continue
        if names & ACCELERATORS:
            return True
    return False


def test_only_device_names_an_accelerators_api() -> None:
    assert [name for name, path in modules().items() if names_accelerator(path.read_text())] == ["device.accelerator"]


@pytest.mark.parametrize(
    ("source", "is_one"),
    [
        ("import torch\ntorch.cuda.synchronize()", True),
        ("def f():\n    return torch.accelerator.is_available()", True),
        ("torch.get_device_module(device).Stream", True),
        ("from torch import xpu", True),
        ("from torch.mps import empty_cache", True),
        ("import torch.cuda.nvtx as nvtx", True),
        ("import torch\nfrom torch import Tensor, nn\ntorch.zeros(3)  # not torch.cuda", False),
    ],
)
def test_an_accelerators_api_is_found_in_every_form(source: str, is_one: bool) -> None:
    assert names_accelerator(source) == is_one


@pytest.mark.parametrize("module", modules())
def test_modules_are_one_thing_and_fit_one_head(module: str) -> None:
    assert len(modules()[module].read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("module", modules())
def test_modules_open_by_saying_what_they_are(module: str) -> None:
    assert ast.get_docstring(ast.parse(modules()[module].read_text()))


def test_the_documented_layers_are_those_checked_here() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md").read_text()
    table = text.split("```text")[1].split("```")[0]
    for group, names in GROUPS.items():
        line = next(line for line in table.splitlines() if line[1:].split()[:1] == [group])
        documented = [word.removesuffix(".*") for word in line.split()[2:]]
        wanted = [name or "__init__" for name in names]
        assert documented[: len(wanted)] == wanted


def test_every_module_is_owned_and_those_to_be_read_are_there() -> None:
    """The table of owners has all of them; the README's list names none that is gone, each after what it builds on."""
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| (`.+?) \|", (root / "docs" / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    owned = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert {name for names in GROUPS.values() for name in names if name not in ("", "__main__")} <= owned
    text = (root / "README.md").read_text().split("## Reading the code")[1].split("The words that matter")[0]
    to_read = re.findall(r"`(\w+)`", text.split("Then what stands beside it")[0])
    assert {*to_read, *re.findall(r"`(\w+)`", text)} <= owned
    groups = [group_of(name)[0] for name in to_read]
    assert groups == sorted(groups)
