"""Named tensors in tiers: the store as a user meets it.

A tensor is kept as bytes, in pieces of chunks numbered below zero; chunks from zero on are an optimizer's. `put` and
`get` copy; `lease` lends the memory itself where the tensor lies in one piece, else a gathered copy that is scattered
when the last lease of it ends. A name has its old value until the new one is whole. Nothing here decides where a chunk
goes or waits for a file: that is the chunk store's affair.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, overload

import torch
from torch import Tensor

from tierstore.build import Parts, Plant, plan_plant
from tierstore.device import present_accelerator
from tierstore.errors import CapacityError, DiskFullError, InvariantError, LeaseError, PolicyError, TierstoreError
from tierstore.forms import Form, take_apart
from tierstore.pieces import Kind, Piece
from tierstore.piecestore import PieceStore, inside
from tierstore.placement import Asked, Room
from tierstore.policy import CpuTier, TierPolicy
from tierstore.store import Setup

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk if the policy leaves it open: enough for a disk, and little for a small tensor to move with it."""
LONGEST_SHOWN = 80
"""Characters of a name that an error shows."""


@dataclass(frozen=True, slots=True)
class _Value:
    """What is kept under one name."""

    form: Form
    kind: Kind
    pieces: tuple[Piece, ...]


class TieredStore(PieceStore):
    """Tensors by name, in the tiers of a policy (anything `TierPolicy.load` takes; `tiers` selects from it).

    A tier without a given capacity starts empty and grows as it is needed, cpu to half of the memory that was free.
    Call it from one thread at a time, in the process that made it. Close it, use it as a context manager, or forget it.
    """

    def __init__(self, policy: Any = None, *, tiers: Sequence[str] | None = None, parts: Parts | None = None) -> None:
        settings = TierPolicy.load(policy, tiers=tiers)
        plant = plan_plant(settings, _accelerators(settings), parts)
        extent_bytes = _chunk_bytes(plant)
        asked = plant.asked(plant.compute_tier(torch.device("cpu")) == "cpu", extent_bytes)
        _check_capacities(plant, asked, extent_bytes)
        growing = {tier: ask for tier, ask in asked.items() if ask.extents is None}
        rooms = {tier: Room(ask.extents or 0, ask.homes) for tier, ask in asked.items()}
        plant.tell_what_is_missing()  # first: a warning may be an error
        setup = plant.build(rooms, extent_bytes, growing=growing)
        self._open(setup, "chunk {}".format, plant, growing)

    @classmethod
    def over(cls, setup: Setup, *, describe: Callable[[int], str]) -> Self:
        """Make a store of tiers that exist, for somebody who adds chunks numbered from zero on and describes them."""
        store = cls.__new__(cls)
        store._open(setup, describe, None, {})
        return store

    def _open(
        self, setup: Setup, describe: Callable[[int], str], plant: Plant | None, growing: Mapping[str, Asked]
    ) -> None:
        values: dict[str, _Value] = {}
        # knows the values but not the store, which would otherwise be in a cycle and outlive its last reference
        super().__init__(
            setup,
            describe=lambda chunk: _describe(chunk, values) if chunk < 0 else describe(chunk),
            growing=growing,
        )
        self._values = values
        self._plant = plant
        self._registered: dict[str, tuple[tuple[int, int], ...]] = {}
        self._lent: Counter[str] = Counter()
        self._gathered: dict[str, tuple[Tensor, Tensor]] = {}  # tensors in many pieces, and their bytes, while lent

    # -- tensors ------------------------------------------------------------------------------------------------

    def put(self, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor under a name, in place of what had the name. All or nothing.

        Raises CapacityError or DiskFullError without room for it, beside the old value unless that has its size;
        LeaseError while the name is leased; TypeError for a tensor without plain bytes (sparse, quantized, meta,
        DTensor).
        """
        _check_name(name)
        form, raw = take_apart(tensor)
        with self._entered():
            self._raise_errors()
            if name in self._registered:
                raise ValueError(f"{name!r} names the state of a parameter in this store: choose another name")
            self._refuse_lent(name, "replaced")
            old, kind = self._values.get(name), self._kind_of(name, form)
            new = _Value(form, kind, self._write_anew(kind, raw) if old is None else self._replace(old, kind, raw))
            self._values[name] = new
            self._gathered.pop(name, None)
            if old is not None and old.pieces != new.pieces:
                self._give_back(old.kind, old.pieces)

    def get(self, name: str) -> Tensor:
        """Copy a tensor: shape, dtype and device are those it was put with, and so are its strides if it was dense."""
        with self._entered():
            value = self._find(name)
            tensor, raw = value.form.empty(value.form.device)
            if name in self._gathered:
                raw.copy_(self._gathered[name][1])
            else:
                self._read(value.kind, value.pieces, raw)
            return tensor

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Tensor]:
        """Lend a tensor on the device of the tier where it is used; changes are kept, also when the body raises.

        It must not be used after the end. Leases may be nested, of one tensor too: all see the same memory. A tensor in
        many chunks is gathered, and scattered at the end; if that fails, its changes stay in memory, are what `get` and
        the next lease see, and are scattered at the end of that. An end between a backward that updates parameters and
        `step()` is not waited for, as that would be for ever: the chunk may leave, or the changes are scattered, later.
        """
        with self._entered():
            value = self._find(name)
            self._lent[name] += 1
        try:
            with self._lend_gathered(name, value) if len(value.pieces) > 1 else self._lend_piece(value) as tensor:
                yield tensor
        finally:
            self._lent[name] -= 1
            if not self._lent[name]:
                del self._lent[name]
                if name in self._gathered:
                    self._do_soon(partial(self._scatter, name))

    def delete(self, name: str) -> None:
        """Forget a tensor. Raises LeaseError while it is leased."""
        with self._entered():
            value = self._find(name)
            self._refuse_lent(name, "deleted")
            del self._values[name]
            self._gathered.pop(name, None)
            self._give_back(value.kind, value.pieces)

    def prefetch(self, names: str | Iterable[str]) -> None:
        """Begin to bring tensors to where they are used, as far as there is room; wait for nothing."""
        with self._entered():
            self.fetch(self._chunks_of(names))

    def evict(self, names: str | Iterable[str]) -> None:
        """Begin to send tensors to their homes; wait for nothing. A chunk shared with a leased tensor stays.

        Raises LeaseError if one of the tensors is leased.
        """
        with self._entered():
            chunks = self._chunks_of(names)
            for name in _listed(names):
                self._refuse_lent(name, "evicted")
                self._scatter(name)
            self.send_home([chunk for chunk in chunks if not self._ledger.is_leased(chunk)])

    @overload
    def where(self, name: str) -> dict[str, int]: ...

    @overload
    def where(self) -> dict[str, dict[str, int]]: ...

    def where(self, name: str | None = None) -> dict[str, int] | dict[str, dict[str, int]]:
        """Say in which tiers a tensor's bytes are, as bytes by tier; without a name, that of every name.

        A parameter of an optimizer has a name here too. What has no bytes (yet) is nowhere. Bytes may be in cpu
        though the policy has no such tier: in extents for staging, which `stats` counts as the cpu tier's.
        """
        with self._entered():
            if name is not None:
                return self._tiers_of(name, self.tier_of)
            tiers = {chunk: place.tier for place, chunk in self._ledger.valid_places().items()}
            return {name: self._tiers_of(name, tiers.get) for name in (*self._registered, *self._values)}

    def register(self, name: str, chunks_bytes: Sequence[tuple[int, int]]) -> None:
        """Let `where` answer for a parameter: the chunks its state is in, and how many bytes of each."""
        if name in self._values:
            raise ValueError(f"{name!r} names a tensor in this store already")
        self._registered[name] = tuple(chunks_bytes)

    def names(self) -> list[str]:
        """Name the tensors, in the order in which they were first put."""
        with self._entered():
            return list(self._values)

    def __contains__(self, name: object) -> bool:
        with self._entered():
            return name in self._values

    def __len__(self) -> int:
        with self._entered():
            return len(self._values)

    # -- the whole ----------------------------------------------------------------------------------------------

    def resize(self, tier: str, capacity: int | str) -> int:
        """Give a tier a capacity (`8MiB`, or bytes), and return the bytes it has then: fewer by less than a chunk, or
        more by less than a slab, as it shrinks by whole slabs. From then on it grows no further by itself.

        Raises CapacityError or DiskFullError, with everything as it was, if that cannot be; LeaseError if a leased
        chunk is in the way; WrongThreadError while another thread is in the store: see `request_resize`.
        """
        with self._entered():
            self.resize_tier(tier, self._extents_of(tier, capacity))
            return self.setup.tiers[tier].arena.lasting * self._extent_bytes

    def request_resize(self, tier: str, capacity: int | str) -> Future[int]:
        """As `resize`, from any thread at any time: done at the beginning of the next step, or other run of chunks.

        What is returned has the bytes then, or the error; it may be cancelled until then.
        """
        self._extents_of(tier, capacity)  # an error is told at once
        return self._request(partial(self.resize, tier, capacity))

    def _extents_of(self, tier: str, capacity: int | str) -> int:
        """A capacity in extents. Raises PolicyError for none, and for tiers there are not."""
        if not isinstance(tier, str) or tier not in {*self.setup.tiers, *self.setup.later}:
            raise PolicyError(f"found tier {tier!r}; allowed: one that this store has ({', '.join(self._line)})")
        found: Any = capacity
        nbytes = CpuTier(capacity=found).capacity
        if not isinstance(nbytes, int) or nbytes < self._extent_bytes:
            raise PolicyError(
                f"capacity {capacity!r}: give a size such as 8MiB, at least a chunk of {self._extent_bytes:,} bytes"
            )
        return nbytes // self._extent_bytes

    def resize_tier(self, name: str, extents: int) -> None:
        """As ever; nor does the tier grow as values come."""
        super().resize_tier(name, extents)
        self._growing.pop(name, None)

    def check(self) -> None:
        """Raise InvariantError unless every invariant holds: of arenas, ledger and moves, and of names and pieces."""
        with self._entered():
            super().check()
            self._check_pieces(value.pieces for value in self._values.values())
            for name, value in self._values.items():
                if sum(piece.length for piece in value.pieces) != value.form.nbytes:
                    raise InvariantError(f"{name!r} has {value.form.nbytes} bytes, its pieces are {value.pieces}")

    def close(self) -> None:
        """Wait for what is under way and give back memory, files and threads; the tensors are gone. Idempotent."""
        super().close()
        if self.is_closed:
            self._gathered.clear()

    def __enter__(self) -> Self:
        with self._entered():
            return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- writing ------------------------------------------------------------------------------------------------

    def _replace(self, old: _Value, kind: Kind, raw: Tensor) -> tuple[Piece, ...]:
        """Write a new value so that the old one is whole until the new one is; in place where one copy does it."""
        is_alike = (old.kind, old.form.nbytes) == (kind, raw.numel())
        if is_alike and len(old.pieces) <= 1:
            self._write(kind, old.pieces, raw)
            return old.pieces
        try:
            return self._write_anew(kind, raw)
        except (CapacityError, DiskFullError) as error:
            if not is_alike or not self._write_at_once(kind, old.pieces, raw):
                error.add_note("the old value is still there: delete it first, or make more room")
                raise
            return old.pieces

    # -- lending ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lend_piece(self, value: _Value) -> Iterator[Tensor]:
        device = self._device(value.kind)
        if not value.pieces:
            yield value.form.empty(device.torch_device)[0]
            return
        with self.lease_chunk(value.pieces[0].chunk) as record:
            device.finish()
            yield value.form.view(inside(record, value.pieces[0]))

    @contextlib.contextmanager
    def _lend_gathered(self, name: str, value: _Value) -> Iterator[Tensor]:
        with self._entered():
            if name not in self._gathered:
                tensor, raw = value.form.empty(self._device(value.kind).torch_device)
                self._read(value.kind, value.pieces, raw)
                self._gathered[name] = tensor, raw
        yield self._gathered[name][0]

    def _scatter(self, name: str) -> None:
        """Write a gathered tensor back to its chunks, if nobody has it; until that has succeeded, it is the value."""
        if name not in self._gathered or self._lent[name]:
            return
        value = self._values[name]
        try:
            self._write(value.kind, value.pieces, self._gathered[name][1])
        except TierstoreError as error:
            error.add_note(f"the changes of {_short(name)} are kept in memory: lease or evict it again to store them")
            raise
        del self._gathered[name]

    def _refuse_lent(self, name: str, purpose: str) -> None:
        if self._lent[name]:
            raise LeaseError(f"{_short(name)} is leased and cannot be {purpose}: end the lease first")

    # -- kinds ------------------------------------------------------------------------------------------------

    def _kind_of(self, name: str, form: Form) -> Kind:
        """Say where a tensor is used and where it was told to live. Raises PolicyError if that cannot be."""
        compute = self._compute_tier(form.device)
        if compute not in self.setup.tiers:
            raise PolicyError(f"a tensor on {form.device} is used in tier {compute}: add it to {', '.join(self._line)}")
        rules = self._plant.policy.placement if self._plant else ()
        named = next((rule.tier for rule in rules if rule.matches(name)), None)
        if named is None or named not in self.setup.tiers:
            return Kind(form.dtype, compute)
        if self._line.index(named) < self._line.index(compute):
            raise PolicyError(f"placement puts {_short(name)} in {named}; on {form.device} it is used in {compute}")
        return Kind(form.dtype, compute, named)

    def _compute_tier(self, device: torch.device) -> str:
        if self._plant is not None:
            return self._plant.compute_tier(device)
        is_there = "gpu" in self.setup.tiers and self._traffic.memory("gpu").device.torch_device == device
        return "gpu" if is_there else "cpu"

    # -- names --------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> _Value:
        if name not in self._values:
            raise KeyError(self._unknown(name, self._values))
        return self._values[name]

    def _chunks_of(self, names: str | Iterable[str]) -> list[int]:
        values = [self._find(name) for name in _listed(names)]
        return list(dict.fromkeys(piece.chunk for value in values for piece in value.pieces))

    def _tiers_of(self, name: str, tier_of: Callable[[int], str | None]) -> dict[str, int]:
        if name not in self._values and name not in self._registered:
            raise KeyError(self._unknown(name, [*self._values, *self._registered]))
        value = self._values.get(name)
        shares = [(piece.chunk, piece.length) for piece in value.pieces] if value else self._registered[name]
        tiers: Counter[str] = Counter()
        for chunk, nbytes in shares:
            tier = tier_of(chunk) if chunk in self._ledger else None
            if tier is not None:
                tiers[tier] += nbytes
        return {tier: tiers[tier] for tier in self._line if tier in tiers}

    def _unknown(self, name: object, names: Collection[str]) -> str:
        nearest = difflib.get_close_matches(str(name)[:LONGEST_SHOWN], names, n=3)
        near = f"the nearest are {', '.join(map(_short, nearest))}" if nearest else "none is similar"
        return f"there is no tensor {_short(name)} among the {len(names)} in this store; {near}"


def _listed(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"found the name {_short(name)} of type {type(name).__name__}: a name is a str")
    if not name:
        raise ValueError("a name must not be empty")


def _short(name: object) -> str:
    text = repr(name)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}...{text[0]}"


def _describe(chunk: int, values: Mapping[str, _Value]) -> str:
    names = [_short(name) for name, value in values.items() if any(piece.chunk == chunk for piece in value.pieces)]
    if not names:
        return f"chunk {chunk}, of a tensor that is being put,"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"chunk {chunk} ({', '.join(names[:3])}{more})"


def _accelerators(policy: TierPolicy) -> list[torch.device]:
    """The accelerator that tensors may come from, if the policy has any use for it."""
    gpu = policy.tiers.gpu
    if gpu is None or gpu.device == "cpu":
        return []
    accelerator = present_accelerator()
    return [] if accelerator is None else [accelerator]


def _chunk_bytes(plant: Plant) -> int:
    """The policy's, or CHUNK_BYTES, or less for 16 chunks in the smallest memory that was given a capacity."""
    given = [nbytes for tier in ("gpu", "cpu") if (nbytes := plant.given_bytes(tier)) is not None]
    return plant.chunk_bytes(min([16 * CHUNK_BYTES, *given]), 0, classes=None)


def _check_capacities(plant: Plant, asked: Mapping[str, Asked], extent_bytes: int) -> None:
    for tier, ask in asked.items():
        if ask.extents == 0:
            raise CapacityError(
                f"tiers.{tier}.capacity of {plant.given_bytes(tier):,} bytes holds no chunk of {extent_bytes:,} bytes: "
                f"raise it, or lower chunk_size"
            )
