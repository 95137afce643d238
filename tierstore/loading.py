"""Loads a checkpoint into an optimizer and a model: any policy, any tiers, by name or place, whole or in part.

All is checked before anything changes. Values are read chunk by chunk into the records that are on their way through
the tier that computes, as in a step, and weights part by part into the model's own tensors. What breaks off half-way
leaves the store refusing steps until a load succeeds.
"""

from __future__ import annotations

import contextlib
import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.ahead import Fill, ReadAhead
from tierstore.binding import Binding
from tierstore.capture import SECTION
from tierstore.contents import Groups, Header, names_of, part_of
from tierstore.cores import leaving_one_free
from tierstore.errors import FailedStepError, StateDictError, TransferError, text_of
from tierstore.handed import Handed
from tierstore.held import Held
from tierstore.layout import Chunk, Span, as_real, slices_of
from tierstore.matching import Match, Select, has_state
from tierstore.members import WithState, survey
from tierstore.progress import Bar
from tierstore.records import MASTER, high_half, is_split, write_field, write_part
from tierstore.rules import Rule, step_count
from tierstore.scratch import Scratch
from tierstore.sources import Source, Window
from tierstore.state_dicts import check_and_wrap
from tierstore.weights import Restoration

SLICE_BYTES = 8 << 20
"""Of a chunk, that are read into a buffer at once: a chunk of state in memory may be much larger than one on a disk."""

_Slices = Sequence[tuple[int, Chunk]]


class Load:
    """One checkpoint that was found to fit. `match` says which parameters get what."""

    def __init__(
        self,
        source: Source,
        groups: Groups,
        rule: Rule,
        model: nn.Module | None,
        pattern: str | None,
    ) -> None:
        """Check all of it, changing nothing. Raises StateDictError for another model's or algorithm's."""
        reader = source.reader
        self.source = source
        self.path = reader.path
        self.is_whole = pattern is None
        select: Select | None = None if pattern is None else lambda name: fnmatch.fnmatchcase(name, pattern)
        header = Header.of(reader.path, reader.header)
        members, names = survey(groups, rule), names_of(groups, model)
        ordered = None if names is None else [names[id(member.parameter)] for member in members]
        self.match = Match(reader.path, header, reader.entries(SECTION), members, ordered, select)
        self.match.check(rule)
        selected = select or (lambda key: True)
        self.weights = None if model is None else Restoration(model, header, source.again(), selected)
        if select is not None and not self.match.numbers and not (self.weights and self.weights.nbytes):
            raise StateDictError(f"params: {pattern!r} selects none of the parameters in {reader.path}")

    @property
    def with_state(self) -> dict[Tensor, tuple[str, ...]]:
        """The parameters that get state, and its fields."""
        members = self.match.members
        return {
            members[position].parameter: tuple(entry.fields)
            for position, entry in self.match.entries.items()
            if has_state(entry)
        }

    def packed_groups(self, groups: Groups) -> list[dict[str, Any]]:
        """The groups as a state dict has them, with the options that were saved."""
        position = {id(member.parameter): place for place, member in enumerate(self.match.members)}
        options, packed, first = self.match.options(groups, position), [], 0
        for group, its_options in zip(groups, options, strict=True):
            packed.append({**its_options, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        return packed

    def into(self, optimizer: Any, held: Held) -> None:
        """Load all of it, for who is alone. Raises StateDictError or CapacityError before anything has changed."""
        with_state = self.with_state
        if held.binding is not None:
            with contextlib.suppress(TransferError):  # what cannot be read is perhaps what all this is for
                held.binding.store.reload()
        if self.is_whole:
            packed = {"state": {}, "param_groups": self.packed_groups(optimizer.param_groups)}
            checked = check_and_wrap(optimizer, packed)["param_groups"]
            pairs = zip(checked, optimizer.param_groups, strict=True)
            optimizer.check_fits([{**new, "params": group["params"]} for new, group in pairs], with_state)
            optimizer.load_without_binding(packed)
        elif held.refusal is not None:
            raise FailedStepError(held.refusal)
        else:
            optimizer.check_fits(optimizer.param_groups, {**_held_by(held), **with_state})
        bound: tuple[Binding, Handed] | tuple[None, None] = None, None
        if with_state or held.has_state() or held.binding is not None:
            try:
                bound = held.bound_inside(optimizer.param_groups, with_state)
            except BaseException as error:
                if self.is_whole:  # all other state has made room for it, and may not be begun anew unnoticed
                    held.refusal = (
                        f"loading {self.path} broke off ({text_of(error)}), and the state that was there before is "
                        f"gone: load a checkpoint or a state dict; that allows steps again"
                    )
                raise
        held.finish_capture()  # of split masters it wants what the parameters still hold
        self._run(held, *bound)

    def _run(self, held: Held, binding: Binding | None, handed: Handed | None) -> None:
        """Write weights and state. What breaks off half-way leaves steps refused until a load succeeds."""
        self._refuse_after_failure(binding)
        try:
            self._write(binding, handed)
        except BaseException as error:
            reason = (
                f"loading {self.path} broke off ({text_of(error)}), so parameters and state no longer belong to one "
                f"step: load a checkpoint; that allows steps again"
            )
            if binding is None:
                held.refusal = reason
            else:
                binding.half_loaded |= self._targets
                binding.store.fail(reason)
            raise

    def _refuse_after_failure(self, binding: Binding | None) -> None:
        """Raise FailedStepError if more is wrong than what this load puts right."""
        if binding is None or binding.store.broken_off is None:
            return
        if not binding.half_loaded or not binding.half_loaded <= self._targets:
            raise FailedStepError(
                "a step or a load broke off half-way: load all of a checkpoint, or at least all that load was to load"
            )
        binding.half_loaded = frozenset()
        binding.store.forgive()

    @property
    def _targets(self) -> frozenset[int | str]:
        """What is loaded: parameters by position, the tensors of a model by key."""
        return frozenset(self.match.numbers) | (self.weights.keys if self.weights else frozenset())

    def _write(self, binding: Binding | None, handed: Handed | None) -> None:
        weights, filling = self.weights, None
        nbytes = self.match.nbytes + (weights.nbytes if weights else 0)
        with Bar(f"loading {Path(self.path).name}", nbytes) as bar, leaving_one_free():
            if binding is not None and handed is not None:
                for position in self.match.entries:
                    handed.forget_fields(position, (*binding.rule.moments, MASTER))
                filling = Filling(binding, self, bar.add)
            if weights is not None:
                weights.begin(bar.add)
                if filling is None or filling.needs_weights:
                    weights.finish(bar.add)
            if filling is not None:
                filling.run(weights)
            if weights is not None:
                weights.finish(bar.add)


def _held_by(held: Held) -> WithState:
    return {} if held.binding is None else held.binding.with_state()


class Filling:
    """State on its way from a checkpoint into the records of one binding."""

    def __init__(self, binding: Binding, load: Load, tell: Callable[[int], None]) -> None:
        self._binding = binding
        self._source = load.source
        self._numbers = load.match.numbers
        self._entries = {
            position: entry
            for position, entry in load.match.entries.items()
            if has_state(entry) and binding.keeps_state(position)
        }
        self._parts = {position: part_of(binding.members[position]) for position in self._entries}
        self._own = _Own()
        self._tell = tell
        self._bytes = {
            position: sum(d.itemsize for d in entry.fields.values()) for position, entry in self._entries.items()
        }

    @property
    def needs_weights(self) -> bool:
        """Whether anything is made of the parameters: masters that are not stored."""
        return any(
            field.name == MASTER and MASTER not in entry.fields
            for position, entry in self._entries.items()
            for field in self._binding.fields_of(position)
        )

    def run(self, weights: Restoration | None) -> None:
        """Write all of it, then the step counts; parameters of which no state is stored have none then.

        What is left to be asked for of the model's weights is asked for meanwhile.
        """
        binding = self._binding
        chunks = binding.chunks_of(self._entries)
        slices_by_chunk = {chunk.number: list(slices_of(chunk, SLICE_BYTES)) for chunk in chunks}
        slices = [one for its_slices in slices_by_chunk.values() for _, one in its_slices]
        with ReadAhead(self._fills(slices, weights), max((one.record_bytes for one in slices), default=0)) as ahead:
            is_whole = all(map(self._is_whole, chunks))
            binding.rewrite(self._entries, partial(self._put, ahead, slices_by_chunk), is_whole=is_whole)
        for position in self._numbers:
            binding.unbegun.discard(position)
            binding.steps.pop(position, None)
        for position, entry in self._entries.items():
            binding.steps[position] = step_count(entry.step or 0.0)
            if not binding.rule.needed and not any(name in entry.fields for name in binding.rule.moments):
                binding.unbegun.add(position)

    def _fills(self, slices: Sequence[Chunk], weights: Restoration | None) -> Iterator[Fill]:
        """What fills each buffer; between them weights are asked for, in proportion, so that both end together."""
        parts = 0 if weights is None else weights.parts
        asks = iter(()) if weights is None else weights.ask(self._tell)
        for number, one in enumerate(slices):
            yield partial(self._fill, one)
            due = (number + 1) * parts // len(slices) - number * parts // len(slices)
            for _ in islice(asks, due):
                pass

    def _is_whole(self, chunk: Chunk) -> bool:
        """Whether all that is in a chunk is loaded."""
        return self._entries.keys() >= set(chunk.parameters)

    def _put(self, ahead: ReadAhead, slices: Mapping[int, _Slices], chunk: Chunk, record: Tensor) -> None:
        """Copy what was read for a chunk, slice by slice, into its record; leave what is not loaded as it is."""
        for begin, one in slices[chunk.number]:
            read = ahead.wait_for_next()
            loaded = [span for span in one.spans if span.parameter in self._entries]
            runs = [(0, one.elements)] if self._is_whole(one) else [(span.offset, span.length) for span in loaded]
            for field in chunk.cls.fields:
                into, values = chunk.field(record, field.name), one.field(read, field.name)
                for first, length in runs:
                    count = field.items(length)
                    place = into.narrow(0, field.items(begin + first), count)
                    place.copy_(values.narrow(0, field.items(first), count))
            self._tell(sum(span.length * self._bytes[span.parameter] for span in loaded))

    def _fill(self, chunk: Chunk, record: Tensor) -> list[Window]:
        """Ask for all of a slice in a buffer, as a record; on the thread that reads ahead."""
        windows: list[Window] = []
        for span in chunk.spans:
            if span.parameter in self._entries:
                for field in self._binding.fields_of(span.parameter):
                    windows += self._fill_field(chunk, span, field.name, record)
        return windows

    def _fill_field(self, chunk: Chunk, span: Span, name: str, record: Tensor) -> list[Window]:
        """As for a new state: what is not stored is zero, but the master, which is the parameter itself."""
        if name in self._entries[span.parameter].fields:
            return self._want(chunk, span, name, record)
        values = torch.zeros((), device="cpu")
        if name == MASTER:
            values = high_half(self._binding.members[span.parameter]).narrow(0, span.start, span.length)
        write_field(chunk, span, name, record, values, self._own.scratch)
        return []

    def _want(self, chunk: Chunk, span: Span, name: str, record: Tensor) -> list[Window]:
        dtype = self._entries[span.parameter].fields[name]
        width = 2 if dtype.is_complex else 1
        where = SECTION, self._numbers[span.parameter], name, self._parts[span.parameter]
        run = span.start // width, span.length // width
        if name != MASTER or not is_split(chunk.cls):
            place = chunk.part(record, name, span)
            if place.dtype == dtype:
                return self._source.want(*where, *run, place)

        def put(start: int, values: Tensor) -> None:
            real = as_real(values).view(-1)
            write_part(chunk, span, name, record, start * width, real, self._own.scratch)

        return self._source.want(*where, *run, put)


class _Own(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.scratch = Scratch()
