"""The schema of a policy: every section and key, with its type and default.

Turns a mapping, a YAML file or nothing into one frozen `TierPolicy`, or raises `PolicyError` with one line per problem.
Never looks at the machine: `auto` stays `auto` until `build` resolves it, and the only files touched are the policy's
own and the links of swap paths, to find one folder named twice. Invariant: a `TierPolicy` that exists is valid,
hashable and never changes, and `to_yaml()` writes a text that loads as an equal policy.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from tierstore.errors import PolicyError
from tierstore.problems import keys_text, policy_error, problem
from tierstore.units import (
    Auto,
    AutoSwitch,
    Capacity,
    Choice,
    ChunkSize,
    Device,
    Folders,
    Fraction,
    OutputFile,
    Pattern,
    Percent,
    QueueDepth,
    RequestSize,
    Seconds,
    Switch,
    ThreadCount,
    one_line,
    parse_list,
    reader,
    shown,
)

__all__ = [
    "TIER_NAMES",
    "Auto",
    "Capacity",
    "CpuTier",
    "GpuTier",
    "IoSettings",
    "NvmeTier",
    "Percent",
    "PlacementRule",
    "StateSettings",
    "TierName",
    "TierPolicy",
    "Tiers",
    "Watermarks",
]

TierName = Literal["gpu", "cpu", "nvme"]
TIER_NAMES: tuple[TierName, ...] = get_args(TierName)
"""Every tier there can be, fastest first."""


class _Section(BaseModel):
    """A frozen part of the policy; its constructor, too, raises `PolicyError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise policy_error(error, type(self), "policy") from error

    # pydantic's mark of its own constructor: nested sections skip this one, and their errors keep the whole path.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Watermarks(_Section):
    """How full a memory may be: above `high` chunks spill, below `low` they come back. Give both or neither."""

    high: Fraction
    low: Fraction

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"found low {self.low} above high {self.high}; allowed: low at most high")
        return self


class GpuTier(_Section):
    """Memory of an accelerator, or host memory in its stead."""

    device: Device = "auto"
    capacity: Capacity = "auto"
    required: Switch = False
    watermarks: Watermarks = Watermarks(high=0.90, low=0.80)


class CpuTier(_Section):
    """Host memory, page-locked where that pays."""

    capacity: Capacity = "auto"
    pin_memory: AutoSwitch = "auto"
    watermarks: Watermarks = Watermarks(high=0.85, low=0.75)


class IoSettings(_Section):
    """How swap files are read and written. `request_size` is in bytes, `timeout` in seconds; two are for each path."""

    engine: Annotated[Literal["auto", "threads", "libaio", "aiofiles"], Choice()] = "auto"
    threads: ThreadCount = "auto"
    queue_depth: QueueDepth = "auto"
    request_size: RequestSize = "auto"
    direct: AutoSwitch = "auto"
    checksum: Switch = False
    timeout: Seconds = 60.0


class NvmeTier(_Section):
    """Reserved swap files; chunks are spread over the folders of `paths` by how fast each is."""

    capacity: Capacity = "auto"
    paths: Folders = "auto"
    allow_shared_folder: Switch = False
    io: IoSettings = IoSettings()


class Tiers(_Section):
    """The tiers there are; None stands for a tier left out."""

    gpu: GpuTier | None = None
    cpu: CpuTier | None = None
    nvme: NvmeTier | None = None

    @property
    def names(self) -> tuple[TierName, ...]:
        """Name the tiers that are present, fastest first."""
        return tuple(name for name in TIER_NAMES if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if not self.names:
            raise ValueError(f"found no tier; allowed: at least one of {', '.join(TIER_NAMES)}")
        return self


class PlacementRule(_Section):
    """Parameters whose names match `params` have their home in `tier`."""

    params: Pattern
    tier: Annotated[TierName, Choice()]

    def matches(self, name: str) -> bool:
        """Say whether a parameter's name matches; upper and lower case differ on every platform."""
        return fnmatch.fnmatchcase(name, self.params)


class StateSettings(_Section):
    """How each field is stored."""

    master: Annotated[Literal["auto", "none", "float32", "split"], Choice()] = "auto"
    moments: Annotated[Literal["float32", "parameter"], Choice()] = "float32"


_ReadRules = BeforeValidator(reader(parse_list, "a list of rules, as [{params: '*embed*', tier: cpu}]"))


class TierPolicy(_Section):
    """Everything a user may decide; the files in configs/ explain each key. `chunk_size` is in bytes."""

    version: Annotated[Literal[1], Choice()] = 1
    chunk_size: ChunkSize = "auto"
    compute: Annotated[Literal["auto", "cpu", "device"], Choice()] = "auto"
    order: Annotated[Literal["auto", "alternating", "fixed"], Choice()] = "auto"
    update: Annotated[Literal["step", "backward"], Choice()] = "step"
    free_gradients: Switch = False
    check_parameters: Switch = True
    adapt: Switch = True
    tiers: Tiers
    placement: Annotated[tuple[PlacementRule, ...], _ReadRules] = ()
    state: StateSettings = StateSettings()
    monitor: OutputFile = None
    record: OutputFile = None

    @classmethod
    def load(
        cls,
        source: TierPolicy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        tiers: Sequence[str] | None = None,
    ) -> TierPolicy:
        """Read a policy from a mapping or a YAML file; `tiers` selects from its tiers, or from all where it names none.

        None is every tier with its defaults.

        Raises PolicyError with one line per problem: file (or `policy`), dotted key, what was found, what is allowed.
        """
        name = _source_name(source)
        policy = source if isinstance(source, TierPolicy) else cls._validate(_settings(source, name, tiers), name)
        if isinstance(source, str | os.PathLike):
            _check_own_file(policy, name)
        return policy if tiers is None else policy._select(tiers, name)

    def with_capacities(self, capacities: Mapping[str, int]) -> TierPolicy:
        """The same with other capacities, in bytes, for those of the tiers that it has."""
        tiers: dict[str, Any] = {
            name: getattr(self.tiers, name).model_copy(update={"capacity": nbytes})
            for name, nbytes in capacities.items()
            if name in self.tiers.names
        }
        return self.model_copy(update={"tiers": self.tiers.model_copy(update=tiers)})

    def to_yaml(self) -> str:
        """Write every setting, defaults too, as YAML that loads as an equal policy."""
        return str(yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False))

    @classmethod
    def _validate(cls, settings: object, name: str) -> Self:
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise policy_error(error, cls, name) from error

    def _select(self, tiers: object, name: str) -> Self:
        selection = Tiers(**{tier: getattr(self.tiers, tier) for tier in _selected(tiers, self.tiers.names, name)})
        return self._validate({**dict(self), "tiers": selection}, name)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.update == "backward" and self.order == "alternating":
            allowed = "auto or fixed with update: backward, whose order is that in which gradients arrive"
            raise ValidationError.from_exception_data("TierPolicy", [problem(("order",), self.order, allowed)])
        return self

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        if self.monitor is not None and self.record is not None and _is_same_file(self.monitor, self.record):
            allowed = "another file than that of monitor, as each is replaced as a whole"
            raise ValidationError.from_exception_data("TierPolicy", [problem(("record",), self.record, allowed)])
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        present = self.tiers.names
        homeless = [(index, rule.tier) for index, rule in enumerate(self.placement) if rule.tier not in present]
        if homeless:
            allowed = f"a tier of this policy ({', '.join(present)})"
            problems = [problem(("placement", index, "tier"), tier, allowed) for index, tier in homeless]
            raise ValidationError.from_exception_data("TierPolicy", problems)
        return self


# Reading: from what a caller may pass to plain settings.


def _source_name(source: object) -> str:
    return os.path.expanduser(os.fsdecode(source)) if isinstance(source, str | os.PathLike) else "policy"


def _settings(source: object, name: str, selected: object) -> object:
    all_tiers: dict[str, Any] = {"tiers": {tier: {} for tier in TIER_NAMES}}
    if source is None:
        return all_tiers
    if isinstance(source, str | os.PathLike):
        source = _read_yaml(name)
    if isinstance(source, Mapping):
        return _with_sections(source if selected is None else {**all_tiers, **source})
    raise PolicyError(f"{name}: found {shown(source)}; allowed: a TierPolicy, a mapping, or the path of a YAML file")


_MOST_CHARACTERS = 1 << 20
"""Of a policy's file: what is longer is something else, and might have no end."""


def _read_yaml(path: str) -> Mapping[Any, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters")
        settings = yaml.load(text, _UniqueKeyLoader)
    except Exception as error:  # PyYAML also lets ValueError, LookupError and RecursionError through
        raise PolicyError(f"{path}: cannot be read as a YAML policy: {one_line(str(error))}") from error
    if not isinstance(settings, Mapping):
        found = "nothing, the file is empty" if settings is None else shown(settings)
        raise PolicyError(f"{path}: found {found}; allowed: {keys_text(TierPolicy)}")
    return settings


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, where YAML silently keeps the last, and a list or mapping as a key.

    With aliases in it, such a key written out could have more characters than memory.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:  # before merge keys (<<) are resolved: those may be overridden
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="found a key that is no single value", problem_mark=key.start_mark)
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"found the key {key.value!r} twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_SECTIONS: dict[str, Any] = {"tiers": {"gpu": {}, "cpu": {}, "nvme": {"io": {}}}, "placement": (), "state": {}}


def _check_own_file(policy: TierPolicy, name: str) -> None:
    """Refuse a policy that would be replaced by what a job says of itself."""
    for key in ("monitor", "record"):
        file = getattr(policy, key)
        if file is not None and _is_same_file(file, name):
            raise PolicyError(f"{name}: {key}: found {shown(file)}, this policy's own file; allowed: another one")


def _is_same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _with_sections(settings: object, sections: Any = _SECTIONS) -> object:
    """Read a section without content, which YAML gives as null, as one where every key has its default."""
    if settings is None:
        return type(sections)()
    if not isinstance(settings, Mapping):
        return settings
    return {key: _with_sections(value, sections[key]) if key in sections else value for key, value in settings.items()}


def _selected(tiers: object, present: tuple[TierName, ...], name: str) -> tuple[TierName, ...]:
    if isinstance(tiers, str):
        hint = tiers.replace(",", " ").split()
        raise PolicyError(f"{name}: tiers: found the text {shown(tiers)}; allowed: a list, as tiers={shown(hint)}")
    if not isinstance(tiers, Sequence) or not tiers:
        raise PolicyError(
            f"{name}: tiers: found {shown(tiers)}; allowed: a list of one or more of {', '.join(present)}"
        )
    for tier in tiers:
        if tier not in present:
            known = "which this policy lacks" if tier in TIER_NAMES else "which is no tier"
            raise PolicyError(f"{name}: tiers: found {shown(tier)}, {known}; allowed: {', '.join(present)}")
        if list(tiers).count(tier) > 1:
            raise PolicyError(f"{name}: tiers: found {shown(tier)} {list(tiers).count(tier)} times; allowed: once")
    return tuple(tier for tier in present if tier in tiers)
