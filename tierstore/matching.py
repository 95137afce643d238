"""Which entries of a checkpoint are the state of which parameters, by name or else by place; and whether they fit.

Looks at names, shapes and dtypes, reads no values and changes nothing. What does not fit is a StateDictError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tierstore.checkpoint.entries import Entry
from tierstore.contents import Groups, Header, entry_of, part_of
from tierstore.errors import DamagedCheckpointError, StateDictError
from tierstore.members import Member
from tierstore.records import MASTER
from tierstore.rules import Rule

Select = Callable[[str], bool]


class Match:
    """Entries by the position of the parameter that they are the state of, for one checkpoint at `path`."""

    def __init__(
        self,
        path: str,
        header: Header,
        entries: Mapping[int, Entry],
        members: Sequence[Member],
        names: Sequence[str] | None,
        select: Select | None,
    ) -> None:
        """`names` of the parameters, if they have any. `select`: load only those whose names it takes."""
        self.path = path
        self.header = header
        self.numbers: dict[int, int] = {}
        if select is not None and names is None:
            raise StateDictError(
                "params selects parameters by name, and they have none: make the optimizer from named_parameters(), or "
                "give the model too"
            )
        self.members = members
        self._entries = entries
        if header.is_named and names is not None:
            self._match_by_name(names, select)
        else:
            self._match_by_place(names, select)

    @property
    def entries(self) -> dict[int, Entry]:
        """What is stored, by position; of a parameter without state there may be nothing."""
        return {p: self._entries[number] for p, number in self.numbers.items() if number in self._entries}

    @property
    def nbytes(self) -> int:
        """Bytes to be read here."""
        sizes = {p: sum(dtype.itemsize for dtype in entry.fields.values()) for p, entry in self.entries.items()}
        return sum(part_of(self.members[position]).numel * size for position, size in sizes.items())

    def check(self, rule: Rule) -> None:
        """Refuse state that is not the rule's, or of parameters of another shape."""
        for position, entry in self.entries.items():
            self._check(rule, self.members[position], entry)

    def _match_by_name(self, names: Sequence[str], select: Select | None) -> None:
        named = [(self._name_of(number), number) for number in self.header.numbers]
        stored = {name: number for name, number in named if select is None or select(name)}
        wanted = {name: position for position, name in enumerate(names) if select is None or select(name)}
        missing = [name for name in wanted if name not in stored]
        unexpected = [name for name in stored if name not in wanted]
        if missing or unexpected:
            raise StateDictError(
                f"{self.path} is not of these parameters: missing there: {listed(missing)}; unexpected: "
                f"{listed(unexpected)}. `params` loads those that a pattern selects"
            )
        self.numbers = {position: stored[name] for name, position in wanted.items()}

    def _name_of(self, number: int) -> str:
        if number in self._entries:
            return self._entries[number].name
        for options, numbers in self.header.groups:
            if number in numbers:
                return self._name_in(options.get("param_names"), numbers.index(number))
        raise AssertionError(number)

    def _name_in(self, names: object, place: int) -> str:
        if not isinstance(names, list | tuple) or place >= len(names):
            raise DamagedCheckpointError(f"{self.path}: a group of its header has more parameters than names of them")
        return str(names[place])

    def _match_by_place(self, names: Sequence[str] | None, select: Select | None) -> None:
        stored, count = self.header.numbers, len(self.members)
        if len(stored) != count:
            raise StateDictError(
                f"{self.path} has {len(stored)} parameters, the optimizer {count}, and without names on both sides "
                f"they must be the same, in the same order"
            )
        pairs = zip(range(count), stored, strict=True)
        self.numbers = {p: number for p, number in pairs if select is None or names is None or select(names[p])}

    def _check(self, rule: Rule, member: Member, entry: Entry) -> None:
        shape = entry_of(member, member.name, (), None).of_whole().shape
        if entry.shape != shape or entry.dtype.is_complex != member.dtype.is_complex:
            raise StateDictError(
                f"{entry.name} in {self.path} has shape {entry.shape} and is {entry.dtype}; {member.name} has shape "
                f"{shape} and is {member.dtype}: this is another model's"
            )
        if not has_state(entry):
            return
        steps = ("step",) if rule.counts_steps else ()
        there = {*entry.fields, *(("step",) if entry.step is not None else ())}
        unknown = sorted(there - {*steps, *rule.moments, MASTER})
        missing = [name for name in (*steps, *rule.needed) if name not in there]
        if unknown or missing:
            raise StateDictError(
                f"the state of {entry.name} in {self.path} is not {rule.name}'s: unknown: {unknown}, missing: {missing}"
            )
        for name, dtype in entry.fields.items():
            if not (dtype.is_floating_point or dtype.is_complex) or dtype.is_complex != entry.dtype.is_complex:
                raise StateDictError(
                    f"{name} of {entry.name} in {self.path} is {dtype}, of a parameter of {entry.dtype}"
                )

    def options(self, groups: Groups, position: Mapping[int, int]) -> list[dict[str, Any]]:
        """The options that each group is loaded with: those of the stored group that its parameters are from.

        `position`: of parameters by id. Raises StateDictError where one group has parameters of several, if their
        options differ; an empty one gets those of the stored group in its place, if that is empty too, else its own.
        """
        from_group = {number: place for place, (_, numbers) in enumerate(self.header.groups) for number in numbers}
        found = []
        for place, group in enumerate(groups):
            own = {name: value for name, value in group.items() if name != "params"}
            sources = {from_group.get(self.numbers[position[id(parameter)]]) for parameter in group["params"]}
            if None in sources:
                raise StateDictError(f"{self.path} names parameters that are in none of its groups")
            if not sources and place < len(self.header.groups) and not self.header.groups[place][1]:
                sources = {place}
            candidates = [_without_names(self.header.groups[source][0]) for source in sources if source is not None]
            if any(options != candidates[0] for options in candidates[1:]):
                raise StateDictError(
                    f"param_groups.{place} has parameters of groups {sorted(s for s in sources if s is not None)} of "
                    f"{self.path}, whose options differ: divide the parameters into groups as they were"
                )
            found.append({**(candidates[0] if candidates else own), **_names_in(group)})
        return found


def has_state(entry: Entry) -> bool:
    """Whether there is any state in an entry."""
    return bool(entry.fields) or entry.step is not None


def listed(names: Sequence[str]) -> str:
    """Some names, for a message."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "none"


def _without_names(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "param_names"}


def _names_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {"param_names": group["param_names"]} if "param_names" in group else {}
