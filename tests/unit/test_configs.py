"""The example policies: each loads, each line is explained, and together they show every key of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from tierstore.policy import TIER_NAMES, TierPolicy

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ["gpu-cpu-nvme.yaml", "cpu-nvme.yaml", "tiny.yaml"]


def schema_keys(section: type[BaseModel] = TierPolicy, prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type(BaseModel)):
                yield from schema_keys(part, f"{prefix}{name}.")


def written_keys(settings: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(settings, list):
        for item in settings:
            yield from written_keys(item, prefix)
    elif isinstance(settings, dict):
        for name, value in settings.items():
            yield prefix + name
            yield from written_keys(value, f"{prefix}{name}.")


def test_folder_holds_these_examples():
    assert {path.name for path in CONFIGS.glob("*.y*ml")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_example_loads_with_the_tiers_it_is_named_after(name):
    tiers = TIER_NAMES if name == "tiny.yaml" else tuple(name.removesuffix(".yaml").split("-"))
    assert TierPolicy.load(CONFIGS / name).tiers.names == tiers


def test_examples_together_show_every_key():
    shown = {key for name in NAMES for key in written_keys(yaml.safe_load((CONFIGS / name).read_text()))}
    assert shown == set(schema_keys())


@pytest.mark.parametrize("name", NAMES)
def test_every_key_has_a_comment_beside_or_above_it(name):
    lines = (CONFIGS / name).read_text().splitlines()
    explained = [("#" in line) or above.startswith("#") for above, line in zip(["", *lines], lines, strict=False)]
    assert [line for line, is_explained in zip(lines, explained, strict=True) if line and not is_explained] == []


def test_full_example_promises_nothing_for_later():
    """Every key that may be set does something."""
    assert "in this release" not in (CONFIGS / "gpu-cpu-nvme.yaml").read_text()


def test_full_example_shows_the_defaults():
    policy = TierPolicy.load(CONFIGS / "gpu-cpu-nvme.yaml")
    assert policy.model_copy(update={"placement": ()}) == TierPolicy.load()


def test_tiny_example_has_few_chunks_in_memory_and_no_accelerator():
    policy = TierPolicy.load(CONFIGS / "tiny.yaml")
    assert policy.tiers.gpu is not None and policy.tiers.gpu.device == "cpu"
    assert policy.tiers.cpu is not None
    assert isinstance(policy.chunk_size, int) and 16 << 10 <= policy.chunk_size <= 64 << 10
    for capacity in (policy.tiers.gpu.capacity, policy.tiers.cpu.capacity):
        assert isinstance(capacity, int) and 3 <= capacity // policy.chunk_size <= 8
