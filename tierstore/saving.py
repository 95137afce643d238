"""Saves an optimizer's state, and a model's weights, as one checkpoint: at once, or while training goes on.

What is to be written is copied as it is at the call: step counts and options with the header, weights into buffers,
state chunk by chunk before it is changed (see `capture`). A save that training goes on beside is one `Save`; its errors
are raised by the next call and by `wait`, and never touch the training.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn

from tierstore.behind import WriteBehind
from tierstore.binding import Binding
from tierstore.capture import SECTION, Capture, Wanted
from tierstore.checkpoint.entries import Entry
from tierstore.checkpoint.replacement import check_keep_last
from tierstore.checkpoint.writer import Writer
from tierstore.contents import Groups, encode_others, entry_of, names_of, write_header
from tierstore.cores import leaving_one_free
from tierstore.errors import ForkedStoreError
from tierstore.layout import Field
from tierstore.members import Member, survey
from tierstore.policy import IoSettings
from tierstore.progress import Bar
from tierstore.rules import Rule
from tierstore.states import field_order
from tierstore.weights import SECTION as WEIGHTS
from tierstore.weights import Weights, local_part

PART_BYTES = 2 << 20
"""Of a model's tensors, copied at once."""
LEAST_BYTES = 4096
"""Of a buffer."""

Compression = Literal["none", "zstd"]
IfBusy = Literal["wait", "error"]
OpenWriter = Callable[..., Writer]
Path_ = str | os.PathLike[str]
Kind = TypeVar("Kind", bound="Save")

_log = logging.getLogger("tierstore.saving")
_unfinished: set[Any] = set()
"""Those that training goes on beside: kept until they are over, and finished when the interpreter ends."""


class Save:
    """One checkpoint on its way to disk. For the thread that trains."""

    is_shared: ClassVar = False
    """Whether other ranks write it too, so that it is finished by all of them or none."""

    def __init__(
        self,
        path: Path_,
        behind: WriteBehind,
        capture: Capture | None,
        total_bytes: int,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.path = Path(path)
        self._behind = behind
        self._capture = capture
        self._total_bytes = total_bytes
        self.alone = alone
        self._is_told = False
        self._pid = os.getpid()

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is there, or has failed; what is not yet copied is so by the next step or `wait`."""
        return self._behind.is_over

    @property
    def error(self) -> BaseException | None:
        """What went wrong."""
        return self._behind.error

    def wait(self) -> None:
        """Wait until the checkpoint is there, complete and on the disk; what training has not come to is copied now.

        Raises what went wrong; what stood at the path before is there then.
        """
        if self._pid != os.getpid():
            raise ForkedStoreError(f"process {self._pid} writes {self.path}, and this is a fork of it: it waits for it")
        with self.alone():
            self.finish()
        self._is_told = True
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """As `wait`, for who is alone already; raises nothing. In a fork, where nothing is written, it does nothing."""
        if self._pid != os.getpid():
            return
        with Bar(f"saving {self.path.name}", self._total_bytes) as bar, leaving_one_free():
            self._behind.tell = bar.tell
            self.finish_capture()
            self._behind.wait_until_over()
        _unfinished.discard(self)

    def finish_capture(self) -> None:
        """Copy all that is not copied yet; raises nothing but KeyboardInterrupt, which then tells that it is lost."""
        capture, self._capture = self._capture, None
        if capture is not None:
            try:
                capture.rest()
            except BaseException:
                self._is_told = True
                raise

    def give_up(self, error: BaseException) -> None:
        """Write no more of it: what stood at the path stays."""
        self._behind.fail(error)
        self._behind.wait_until_over()
        _unfinished.discard(self)

    def finish_alone(self) -> None:
        """As `finish`, where no other process may be waited for: the program ends, or an error is on its way."""
        self.finish()

    def take_error(self) -> BaseException | None:
        """What went wrong, if that was not told yet."""
        if not self.is_over or self._is_told:
            return None
        self._is_told = True
        _unfinished.discard(self)
        return self.error


@dataclass(frozen=True)
class Content:
    """What one process has to save: a header, entries by number, and where their values are."""

    header: dict[str, Any]
    extra: object
    params: Mapping[int, Entry]
    model: Mapping[int, Entry]
    weights: Weights | None
    binding: Binding | None
    parameters: Sequence[Tensor]

    @classmethod
    def of(cls, groups: Groups, rule: Rule, binding: Binding | None, model: nn.Module | None, extra: object) -> Content:
        """Look at all of it, copying nothing; `binding` holds the state, None: there is none.

        Raises CheckpointValueError for what cannot be stored.
        """
        members = survey(groups, rule) if binding is None else binding.members
        names = names_of(groups, model)
        weights = Weights.of(model) if model is not None else None
        header = write_header(
            rule.name,
            groups,
            {id(member.parameter): position for position, member in enumerate(members)},
            is_named=names is not None,
            model=None if weights is None else {"keys": weights.keys, "others": encode_others(weights.others)},
        )
        of_model = dict(enumerate(weights.entries)) if weights is not None else {}
        entries = dict(enumerate(_entries(members, names, binding)))
        return cls(header, extra, entries, of_model, weights, binding, [member.parameter for member in members])

    @property
    def learned(self) -> dict[tuple[str, int], Tensor]:
        """The parameters themselves, or this rank's parts of them, by section and number."""
        of_model = (
            {} if self.weights is None else {(WEIGHTS, at): self.weights.tensors[at] for at in self.weights.learned}
        )
        return {(SECTION, at): local_part(parameter) for at, parameter in enumerate(self.parameters)} | of_model

    @property
    def wanted(self) -> Wanted:
        """The fields of each parameter's state."""
        return {position: tuple(entry.fields) for position, entry in self.params.items() if entry.fields}

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(entry.nbytes for entry in (*self.params.values(), *self.model.values()))


def begin(
    path: Path_,
    content: Content,
    alone: Callable[[], AbstractContextManager[None]],
    *,
    compression: Compression,
    keep_last: int | None,
    open_writer: OpenWriter = Writer,
    kind: Callable[..., Kind],
) -> Kind:
    """Begin a checkpoint of state as it is now; `kind` makes what stands for it.

    When this returns, the model is copied, and each chunk will be before it changes. Raises CheckpointError for what
    cannot be stored, or a path that cannot be written.
    """
    check_keep_last(keep_last)
    binding, nbytes = content.binding, content.nbytes
    with ExitStack() as undoing:
        writer = undoing.enter_context(open_writer(path, header=content.header, compression=compression))
        writer.keep(content.extra)
        for number, entry in content.params.items():
            writer.add(SECTION, number, entry)
        for number, entry in content.model.items():
            writer.add(WEIGHTS, number, entry)
        capture = None if binding is None else binding.capture_of(content.wanted)
        buffer_bytes = max(
            capture.buffer_bytes if capture is not None else 0, min(PART_BYTES, max(nbytes, LEAST_BYTES))
        )
        timeout = _timeout_of(binding)
        behind = WriteBehind(
            writer, path=os.fspath(path), buffer_bytes=buffer_bytes, keep_last=keep_last, timeout_seconds=timeout
        )
        undoing.pop_all()  # the writer is the thread's now
    save = kind(path, behind, capture, nbytes, alone)
    try:
        if content.weights is not None:
            with leaving_one_free():
                content.weights.put(content.model, behind, buffer_bytes)
    except BaseException as error:
        behind.fail(error)
        behind.wait_until_over()
        raise
    if binding is None or capture is None:
        behind.complete()
    else:
        binding.begin_capture(capture, behind)
    _unfinished.add(save)
    return save


def _entries(members: Sequence[Member], names: Mapping[int, str] | None, binding: Binding | None) -> list[Entry]:
    """The entries of all parameters, in order."""
    counts = binding.steps.numbers() if binding is not None and binding.rule.counts_steps else {}
    found = []
    for position, member in enumerate(members):
        fields: list[Field] = []
        if binding is not None and position in binding.steps:
            there = {field.name: field for field in binding.fields_of(position)}
            fields = [there[name] for name in field_order(binding, position)]
        name = member.name if names is None else names[id(member.parameter)]
        found.append(entry_of(member, name, fields, counts.get(position)))
    return found


def _timeout_of(binding: Binding | None) -> float:
    """Seconds of silence after which a disk hangs: as the policy says, or by default, of its swap files' disks."""
    nvme = None if binding is None else binding.policy.tiers.nvme
    return (IoSettings() if nvme is None else nvme.io).timeout


def _finish_all() -> None:
    """Finish what is under way when the interpreter ends, while threads can still be had."""
    for save in list(_unfinished):
        try:
            with save.alone():
                save.finish_alone()
            if (error := save.take_error()) is not None:
                raise error
        except Exception as error:
            _log.error("the checkpoint %s is lost: %r", save.path, error)


# threading's own hook runs before executors are shut down, atexit's after that
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unfinished.clear)
