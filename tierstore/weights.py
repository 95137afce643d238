"""The tensors of a model in a checkpoint: what there is, each once however often the model names it, and back in place.

Streams tensor by tensor, part by part, so that no copy of a model is made. What a model's `state_dict` has besides
tensors must be plain JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.behind import Sink, WriteBehind
from tierstore.checkpoint.entries import VALUES, Entry, Whole
from tierstore.checkpoint.parts import Part
from tierstore.contents import Header, decode_others, is_sharded, whole_of
from tierstore.errors import CheckpointValueError, StateDictError
from tierstore.forms import take_apart
from tierstore.io.checksum import checksum_of_parts
from tierstore.layout import in_storage_order_of, storage_order, stored_strides
from tierstore.matching import listed
from tierstore.sources import WINDOW_BYTES, Source, Window

SECTION = "model"

PART_BYTES = WINDOW_BYTES
"""Asked for, or added up, at once."""
MOST_PARTS = 8
"""Asked for before the first one is there."""

Json = Any


@dataclass(frozen=True)
class Weights:
    """What of a model is saved: tensors and their entries, which of them each key means, and what is no tensor.

    Of a tensor that is sharded over ranks, the part that this one holds.
    """

    tensors: list[Tensor]
    entries: list[Entry]
    keys: dict[str, int]
    others: dict[str, Json]
    learned: set[int]  # those that are parameters: buffers may differ between ranks that are replicas of each other

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Look at a model; copies nothing. Raises CheckpointValueError for what cannot be stored."""
        found = cls([], [], {}, {}, set())
        parameters = dict(model.named_parameters(remove_duplicate=False))
        objects = {key: id(tensor) for key, tensor in (*parameters.items(), *model.named_buffers())}
        numbers: dict[tuple[Any, ...], int] = {}
        for key, value in model.state_dict().items():
            if not isinstance(value, Tensor):
                found.others[key] = value
                continue
            _refuse_what_has_no_values(key, value, CheckpointValueError)
            tensor = local_part(value).detach().resolve_conj().resolve_neg()
            alike = ("of", objects.get(key, key)) if is_sharded(value) else identity(tensor)  # the same for all ranks
            if alike not in numbers:
                numbers[alike] = len(found.tensors)
                found.tensors.append(tensor)
                found.entries.append(entry_of(key, tensor, whole_of(value)))
            found.keys[key] = numbers[alike]
            if key in parameters:
                found.learned.add(numbers[alike])
        return found

    def put(self, numbers: Iterable[int], behind: WriteBehind, buffer_bytes: int) -> None:
        """Copy the tensors of these numbers into buffers of `buffer_bytes`, to be written."""
        for number in numbers:
            tensor = self.tensors[number]
            flat, size = in_storage_order_of(tensor, tensor), tensor.dtype.itemsize
            for start in range(0, len(flat), buffer_bytes // size):
                part = flat[start : start + buffer_bytes // size]
                nbytes = len(part) * size
                buffer, _ = behind.wait_for_buffer()
                values = buffer[:nbytes].view(tensor.dtype).copy_(part)
                behind.put(buffer, partial(_write, number, start, values), nbytes)


def entry_of(name: str, tensor: Tensor, whole: Whole | None) -> Entry:
    """The entry of a tensor that is stored as it is, or of a part of `whole`."""
    fields = {VALUES: tensor.dtype}
    return Entry(name, tuple(tensor.shape), stored_strides(tensor), tensor.dtype, fields, whole=whole)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, if it is not sharded. Shares its memory."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.wait() if hasattr(local, "wait") else local  # a collective may still be under way


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for views of the same elements of the same memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return (object(),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def checksum_of(tensor: Tensor) -> int:
    """A checksum (xxh3, 64 bits) of a tensor's bytes in storage order; 0 for one that has no plain bytes."""
    try:
        raw = take_apart(tensor)[1]
    except TypeError:
        return 0
    parts = (raw[start : start + PART_BYTES] for start in range(0, len(raw), PART_BYTES))
    return checksum_of_parts(part.cpu().numpy().data for part in parts)


class Restoration:
    """The tensors of a checkpoint on their way into a model that has them all, of the same shapes."""

    def __init__(self, model: nn.Module, header: Header, source: Source, select: Callable[[str], bool]) -> None:
        """Find what is stored for each key that `select` takes.

        Raises StateDictError, with nothing changed, for the weights of another model, as a strict `load_state_dict`.
        """
        self._model = model
        self._source = source
        self._state = {key: value for key, value in model.state_dict().items() if select(key)}
        path, stored = source.reader.path, header.model
        if stored is None:
            raise StateDictError(f"{path} has no model: it was saved without one")
        self._keys = {key: number for key, number in stored["keys"].items() if select(key)}
        self._others = {key: v for key, v in decode_others(path, stored["others"]).items() if select(key)}
        self._entries = source.reader.entries(SECTION)
        self._straight: deque[tuple[int, Part, int, Tensor]] = deque()  # number, what of it, from where on, 1-D place
        self._under_way: deque[tuple[list[Window], range]] = deque()  # and the addresses of the bytes in them
        self._rest: dict[str, Any] = dict(self._others)
        self._refuse_another()

    @property
    def keys(self) -> frozenset[str]:
        """Those of the tensors to be loaded."""
        return frozenset(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(self._entries[number].nbytes for number in self._keys.values())

    @property
    def parts(self) -> int:
        """How many `ask` asks for."""
        return len(self._straight)

    @torch.no_grad()
    def begin(self, tell: Callable[[int], None]) -> None:
        """Find the place of each tensor, and load those whose values cannot be read straight into it.

        `tell` hears, here and below, how many bytes more are read.
        """
        loaded: set[tuple[Any, ...]] = set()
        own = {_memory(local_part(tensor)) for tensor in (*self._model.parameters(), *self._model.buffers())}
        for key, number in self._keys.items():
            target = self._state[key]
            if _memory(local_part(target)) not in own:  # made by a hook: only its module knows where the values belong
                device = target.device if is_sharded(target) else "cpu"
                target = self._rest[key] = torch.empty_like(target, device=device)
            local = local_part(target)
            if (alike := (number, *identity(local))) not in loaded:
                loaded.add(alike)
                self._place(number, local, entry_of("", local, whole_of(target)).part, tell)

    @torch.no_grad()
    def ask(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Ask for what is read straight to its place, part by part, on one thread; wait for none of the last few.

        Where two share memory, as tied weights that were saved as two, the second is not under way beside the first.
        """
        while self._straight:
            number, wanted, start, part = self._straight.popleft()
            torch.autograd.graph.increment_version(part)  # who reads parts together does not; a kept graph must hear
            memory = range(part.data_ptr(), part.data_ptr() + part.nbytes)
            while any(memory.start < other.stop and other.start < memory.stop for _, other in self._under_way):
                self._wait(len(self._under_way) - 1, tell)
            windows = self._source.want(SECTION, number, VALUES, wanted, start, len(part), part)
            self._under_way.append((windows, memory))
            self._wait(MOST_PARTS, tell)
            yield

    @torch.no_grad()
    def finish(self, tell: Callable[[int], None]) -> None:
        """Ask for all that is left, wait until all is there, and give the model what is not in its own tensors."""
        for _ in self.ask(tell):
            pass
        self._wait(0, tell)
        rest, self._rest = self._rest, {}
        if rest:
            self._model.load_state_dict(rest, strict=False)

    def _place(self, number: int, target: Tensor, wanted: Part, tell: Callable[[int], None]) -> None:
        """Note where a tensor's values go, or read and copy them now."""
        dtype, flat = self._entries[number].fields[VALUES], storage_order(target)
        size = PART_BYTES // dtype.itemsize
        if flat is not None and flat.dtype == dtype and flat.device.type == "cpu":
            parts = ((number, wanted, start, flat[start : start + size]) for start in range(0, len(flat), size))
            self._straight.extend(parts)
            return
        dense = torch.empty_strided(target.shape, wanted.stride, dtype=target.dtype) if flat is None else target
        flat = storage_order(dense)
        assert flat is not None
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            values = torch.empty(len(part), dtype=dtype, device="cpu")
            self._source.read(SECTION, number, VALUES, wanted, start, values)
            part.copy_(values)
            tell(values.nbytes)
        if dense is not target:
            target.copy_(dense)

    def _wait(self, most: int, tell: Callable[[int], None]) -> None:
        """Wait until no more parts than that are under way."""
        while len(self._under_way) > most:
            windows, memory = self._under_way.popleft()
            for window in windows:
                window.begin()
                window.wait()
            tell(len(memory))

    def _refuse_another(self) -> None:
        stored = {**self._keys, **self._others}
        missing = [key for key in self._state if key not in stored]
        unexpected = [key for key in stored if key not in self._state]
        if missing or unexpected:
            raise StateDictError(
                f"{self._source.reader.path} is of another model: missing there: {listed(missing)}; unexpected: "
                f"{listed(unexpected)}"
            )
        for key, value in self._state.items():
            if isinstance(value, Tensor) != (key in self._keys):
                raise StateDictError(f"model.{key} is a tensor here or in {self._source.reader.path}, not in both")
            if not isinstance(value, Tensor):
                continue
            entry = self._entries.get(self._keys[key])
            if entry is None or VALUES not in entry.fields:
                raise StateDictError(f"{self._source.reader.path} names no values for model.{key}")
            if tuple(value.shape) != entry.shape:
                raise StateDictError(
                    f"model.{key} has shape {tuple(value.shape)}, and {entry.shape} in {self._source.reader.path}"
                )
            _refuse_what_has_no_values(key, value, StateDictError)
            _refuse_what_cannot_be_written(key, local_part(value))


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _write(number: int, start: int, values: Tensor, sink: Sink) -> None:
    sink.write(SECTION, number, VALUES, start, values)


def _refuse_what_has_no_values(key: str, value: Tensor, error: type[Exception]) -> None:
    """Raise an error for a tensor without plain values."""
    if value.is_meta:
        what = "on the meta device and has no values"
    elif value.layout is not torch.strided or value.is_quantized:
        what = "sparse or quantized"
    elif type(local := local_part(value)).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        what = f"a {type(local).__name__}, a wrapper of other tensors"
    else:
        return
    raise error(f"model.{key} is {what}: it can be neither saved nor loaded")


def _refuse_what_cannot_be_written(key: str, tensor: Tensor) -> None:
    """Raise StateDictError for a tensor that torch lets nobody write to."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        what = "expanded, so that its elements share memory"
    elif tensor.is_inference() and not torch.is_inference_mode_enabled():
        what = "made in inference mode"
    else:
        return
    raise StateDictError(f"model.{key} is {what}: nothing can be loaded into it; clone() it first")
