"""Named tensors: whatever is put comes back to the bit, whatever happened to the store in between."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from tests.fakes import RandomProbe, honest_parts
from tests.tensors import DTYPES, LAYOUTS, assert_same, copy_of, random_tensor, scribble
from tierstore.build import Parts, plan_plant
from tierstore.errors import CapacityError, DiskFullError, LeaseError, PolicyError
from tierstore.pieces import PIECE_ALIGNMENT
from tierstore.placement import Room
from tierstore.policy import TierPolicy
from tierstore.pressure import DiskSpace
from tierstore.store import ChunkInfo
from tierstore.tensors import TieredStore

KIB = 1024
CHUNK = 16 * KIB
GPU = {"device": "cpu", "capacity": 5 * CHUNK}
CPU = {"capacity": 6 * CHUNK}
IO = {"threads": 2, "queue_depth": 4, "request_size": "8KiB"}
NVME = {"capacity": 40 * CHUNK, "io": IO}
TIERS: dict[str, dict[str, Any]] = {
    "gpu, cpu and nvme": {"gpu": GPU, "cpu": CPU, "nvme": NVME},
    "cpu and nvme": {"cpu": CPU, "nvme": NVME},
    "cpu": {"cpu": {"capacity": 40 * CHUNK}},
    "cpu and growing nvme": {"cpu": CPU, "nvme": {"io": IO}},
    "all growing": {"gpu": {"device": "cpu"}, "cpu": {}, "nvme": {"io": IO}},
    "gpu and nvme": {"gpu": GPU, "nvme": NVME},
}
NAMES = ("a", "b", "c", "embed.weight", "a name / with \0 and \N{SNOWMAN}", "long " * 400)


def open_store(tiers: dict[str, Any], **others: Any) -> TieredStore:
    return TieredStore({"chunk_size": CHUNK, "tiers": tiers, **others})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small copies are not worth the threads of torch, which wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=TIERS)
def tiers(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TIERS[request.param]


@pytest.fixture
def store(tiers: dict[str, Any]) -> Iterator[TieredStore]:
    with open_store(tiers) as store:
        yield store
        store.check()


@pytest.fixture
def small() -> Iterator[TieredStore]:
    """Four extents in cpu, eight on nvme."""
    with open_store({"cpu": {"capacity": 4 * CHUNK}, "nvme": {"capacity": 8 * CHUNK, "io": IO}}) as store:
        yield store
        store.check()


# -- against a dict ---------------------------------------------------------------------------------------------


class Trial:
    """A store and a dict that must agree; every operation is checked, and may be refused for want of room."""

    def __init__(self, tiers: dict[str, Any], parts: Parts | None = None) -> None:
        rules = [{"params": "embed*", "tier": "cpu"}] if "cpu" in tiers else []
        parts = replace(parts or Parts(), open_probe=lambda **_: RandomProbe(len(tiers)))
        self.store = TieredStore({"chunk_size": CHUNK, "tiers": tiers, "placement": rules}, parts=parts)
        self.expected: dict[str, Tensor] = {}
        self.refused = 0

    @contextlib.contextmanager
    def refusable(self) -> Iterator[None]:
        try:
            yield
        except CapacityError:
            self.refused += 1

    def put(self, name: str, chance: random.Random) -> None:
        value = random_tensor(chance, 4 * CHUNK)
        with self.refusable():
            self.store.put(name, value)
            self.expected[name] = copy_of(value)

    def get(self, name: str) -> None:
        with self.refusable():
            assert_same(self.store.get(name), self.expected[name])

    def lease(self, name: str, chance: random.Random, *, breaks_off: bool = False) -> None:
        with self.refusable(), contextlib.suppress(KeyboardInterrupt), self.store.lease(name) as tensor:
            assert_same(tensor, self.expected[name])
            scribble(tensor, chance)
            self.expected[name] = copy_of(tensor)
            if breaks_off:
                raise KeyboardInterrupt

    def lease_both(self, one: str, other: str, chance: random.Random) -> None:
        """One within the other, or one twice."""
        with self.refusable(), self.store.lease(one) as first:
            scribble(first, chance)
            self.expected[one] = copy_of(first)
            with self.refusable():
                self.lease(other, chance)
            assert_same(first, self.expected[one])
            with self.refusable():
                self.store.check()
                assert_same(self.store.get(one), first)

    def delete(self, name: str) -> None:
        self.store.delete(name)
        del self.expected[name]

    def prefetch(self, names: list[str]) -> None:
        self.store.prefetch(names)

    def evict(self, names: list[str]) -> None:
        with self.refusable():
            self.store.evict(names)

    def resize(self, tier: str, extents: int) -> None:
        with self.refusable():
            assert self.store.resize(tier, extents * CHUNK) >= extents * CHUNK

    def empty(self, tiers: list[str], to: str | None) -> None:
        with self.refusable(), contextlib.suppress(PolicyError):
            self.store.offload(tiers, to)

    def fill(self) -> None:
        with self.refusable():
            self.store.reload()

    def adapt(self) -> None:
        with self.refusable():
            self.store.adapt()

    def make_room(self, tier: str, names: list[str]) -> None:
        """Use tensors while a tier yields most of what it has."""
        with self.refusable(), self.store.yielding(tier, 1 << 20):
            for name in names:
                self.get(name)

    def check(self) -> None:
        self.store.check()
        assert self.store.names() == list(self.expected)
        places = self.store.where()
        assert {name: sum(place.values()) for name, place in places.items()} == {
            name: value.numel() * value.itemsize for name, value in self.expected.items()
        }

    def finish(self) -> None:
        self.store.wait()
        self.fill()
        for name in list(self.expected):
            self.get(name)
            self.delete(name)
        self.check()
        assert sum(tier.used_bytes for tier in self.store.stats().tiers.values()) == 0
        self.store.close()


class StoreMachine(RuleBasedStateMachine):
    """Any operations in any order; hypothesis looks for the shortest that go wrong."""

    tiers: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.trial = Trial(self.tiers)

    def known(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from(list(self.trial.expected))))

    def some(self, data: st.DataObject) -> list[str]:
        return list(data.draw(st.lists(st.sampled_from(list(self.trial.expected)), max_size=4)))

    def has_any(self) -> bool:
        return bool(self.trial.expected)

    @rule(name=st.sampled_from(NAMES), seed=st.integers(0, 999))
    def put(self, name: str, seed: int) -> None:
        self.trial.put(name, random.Random(seed))

    @precondition(has_any)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        self.trial.get(self.known(data))

    @precondition(has_any)
    @rule(data=st.data(), seed=st.integers(0, 999), breaks_off=st.booleans())
    def lease(self, data: st.DataObject, seed: int, breaks_off: bool) -> None:
        self.trial.lease(self.known(data), random.Random(seed), breaks_off=breaks_off)

    @precondition(has_any)
    @rule(data=st.data(), seed=st.integers(0, 999))
    def lease_both(self, data: st.DataObject, seed: int) -> None:
        self.trial.lease_both(self.known(data), self.known(data), random.Random(seed))

    @precondition(has_any)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.trial.delete(self.known(data))

    @precondition(has_any)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        self.trial.prefetch(self.some(data))

    @precondition(has_any)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.trial.evict(self.some(data))

    @rule(data=st.data(), extents=st.integers(1, 12))
    def resize(self, data: st.DataObject, extents: int) -> None:
        self.trial.resize(data.draw(st.sampled_from(list(self.trial.store.setup.tiers))), extents)

    @rule(number=st.integers(0, 9))
    def give_back(self, number: int) -> None:
        give_back(self.trial, random.Random(number), [])

    @invariant()
    def agrees(self) -> None:
        self.trial.check()

    def teardown(self) -> None:
        self.trial.finish()


@pytest.mark.parametrize("name", ["gpu, cpu and nvme", "cpu and nvme", "cpu"])
def test_any_operations_agree_with_a_dict(name: str) -> None:
    machine = type("Machine", (StoreMachine,), {"tiers": TIERS[name]}).TestCase
    machine.settings = settings(
        max_examples=25, stateful_step_count=30, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), print_blob=False,
    )  # fmt: skip
    machine().runTest()


# -- ten thousand -----------------------------------------------------------------------------------------------


def give_back(trial: Trial, chance: random.Random, names: list[str]) -> None:
    """Let the store give memory back in some way, or take it again."""
    memory = [tier for tier in trial.store.setup.tiers if tier != "nvme"]
    what = chance.random()
    if what < 0.3:
        trial.empty(chance.sample(memory, chance.randint(1, len(memory))), chance.choice([None, "cpu", "nvme"]))
    elif what < 0.5:
        trial.fill()
    elif what < 0.8:
        trial.adapt()
    else:
        trial.make_room(chance.choice(memory), names)


def one_operation(trial: Trial, chance: random.Random) -> None:
    known = list(trial.expected)
    names = [chance.choice(known) for _ in range(min(len(known), 3))]
    name = f"tensor {chance.randrange(40)}" if chance.random() < 0.9 else chance.choice(NAMES)
    what = chance.random()
    if not known or what < 0.3:
        trial.put(name, chance)
    elif what < 0.5:
        trial.get(names[0])
    elif what < 0.65:
        trial.lease(names[0], chance, breaks_off=chance.random() < 0.2)
    elif what < 0.72:
        trial.lease_both(names[0], names[-1], chance)
    elif what < 0.85:
        trial.delete(names[0])
    elif what < 0.89:
        trial.evict(names)
    elif what < 0.94:
        trial.prefetch(names)
    elif what < 0.97:
        give_back(trial, chance, names)
    else:
        tier, extents = chance.choice(list(trial.store.setup.tiers)), chance.randint(2, 14)
        trial.resize(tier, extents + (30 if tier == list(trial.store.setup.tiers)[-1] else 0))


@pytest.mark.parametrize(("name", "count"), [("gpu, cpu and nvme", 4000), ("cpu and nvme", 2000), ("cpu", 1000),
                                             ("cpu and growing nvme", 1000), ("all growing", 1000),
                                             ("gpu and nvme", 1000)])  # fmt: skip
def test_ten_thousand_random_operations_agree_with_a_dict(name: str, count: int) -> None:
    trial, chance = Trial(TIERS[name]), random.Random(name)
    for _ in range(count):
        one_operation(trial, chance)
        trial.check()
    assert trial.refused < count // 4
    trial.finish()


@pytest.mark.parametrize("seed", range(30))
def test_operations_agree_on_devices_that_do_everything_as_late_as_they_may(seed: int) -> None:
    """Extents are poisoned when they are new, given up or about to be filled; copies and launched work run late."""
    parts = honest_parts(seed, asynchronous_host=bool(seed % 2))
    name = ("gpu, cpu and nvme", "gpu and nvme", "all growing")[seed % 3]
    trial, chance = Trial(TIERS[name], parts), random.Random(seed)
    for _ in range(40):
        one_operation(trial, chance)
        trial.check()
    trial.finish()


# -- what can be kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout_of_every_dtype_comes_back(dtype: torch.dtype) -> None:
    chance = random.Random(str(dtype))
    with open_store(TIERS["cpu and nvme"]) as store:
        for number, layout in enumerate(LAYOUTS):
            value = layout(chance, dtype, 9000 // dtype.itemsize)
            store.put(f"{number}", value)
            store.evict(f"{number}")
            assert_same(store.get(f"{number}"), copy_of(value))
        store.check()


def test_a_copy_is_a_copy(store: TieredStore) -> None:
    value = torch.ones(3, requires_grad=True)
    store.put("a", value)
    with torch.no_grad():
        value.zero_()
    store.get("a").zero_()
    assert store.get("a").tolist() == [1, 1, 1]
    assert not store.get("a").requires_grad


class Wrapper(Tensor):
    """A tensor that stands for another, as DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: [1.0], "list"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.ones(2).as_subclass(Wrapper), "Wrapper"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_no_plain_bytes_is_refused(small: TieredStore, make: Any, word: str) -> None:
    with pytest.raises(TypeError, match=word):
        small.put("a", make())
    assert len(small) == 0


def test_names_are_non_empty_text_of_any_length(small: TieredStore) -> None:
    with pytest.raises(TypeError, match="found the name 3 of type int"):
        small.put(3, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        small.put("", torch.ones(1))
    small.put("x" * 100_000, torch.ones(1))
    assert "x" * 100_000 in small


def test_unknown_names_are_refused_with_the_nearest(small: TieredStore) -> None:
    small.put("layer.weight", torch.ones(1))
    for call in (small.get, small.delete, small.where, small.evict, small.prefetch):
        with pytest.raises(KeyError, match=r"no tensor 'layer\.wieght' among the 1 .*nearest are 'layer\.weight'"):
            call("layer.wieght")  # type: ignore[operator]
    with pytest.raises(KeyError):
        small.lease("other").__enter__()
    assert "layer.wieght" not in small
    with open_store(TIERS["cpu"]) as empty, pytest.raises(KeyError, match="no tensor 'a' among the 0"):
        empty.get("a")


# -- pieces -----------------------------------------------------------------------------------------------------


def test_small_tensors_of_one_dtype_share_a_chunk(small: TieredStore) -> None:
    for number in range(20):
        small.put(f"{number}", torch.full((50,), float(number)))
    assert small.stats().tiers["cpu"].used_bytes == CHUNK
    small.put("integers", torch.ones(2, dtype=torch.int64))
    assert small.stats().tiers["cpu"].used_bytes == 2 * CHUNK
    with small.lease("3") as three, small.lease("4") as four:
        assert abs(four.data_ptr() - three.data_ptr()) % PIECE_ALIGNMENT == 0


def test_a_chunk_is_given_back_with_its_last_tensor(small: TieredStore) -> None:
    small.put("a", torch.ones(5))
    small.put("b", torch.ones(5))
    small.delete("a")
    assert small.stats().tiers["cpu"].used_bytes == CHUNK
    small.delete("b")
    assert small.stats().tiers["cpu"].used_bytes == 0


def test_a_gap_is_filled_before_a_new_chunk_is_taken(small: TieredStore) -> None:
    small.put("first", torch.zeros(CHUNK // 2, dtype=torch.uint8))
    small.put("second", torch.zeros(CHUNK // 2, dtype=torch.uint8))
    small.delete("first")
    for number in range(4):
        small.put(f"{number}", torch.zeros(CHUNK // 8, dtype=torch.uint8))
    assert small.stats().tiers["cpu"].used_bytes == CHUNK


def test_no_history_of_puts_and_deletes_takes_more_and_more_room() -> None:
    chance = random.Random(0)
    with open_store({"cpu": {}}) as store:
        for number in range(1500):
            store.put(f"{number}", torch.zeros(chance.randint(1, 2 * CHUNK), dtype=torch.uint8))
            if number >= 5:
                store.delete(f"{number - chance.choice((5, 5, 4)) if f'{number - 5}' not in store else number - 5}")
        assert len(store) == 5
        assert store.stats().tiers["cpu"].peak_bytes <= 20 * CHUNK


def test_a_tensor_larger_than_a_tier_is_kept_and_leased() -> None:
    value = torch.arange(7 * CHUNK // 4 + 5, dtype=torch.int32)
    with open_store({"cpu": {"capacity": 3 * CHUNK}, "nvme": {"capacity": 12 * CHUNK, "io": IO}}) as store:
        store.put("a", value)
        with store.lease("a") as tensor:
            tensor.add_(1)
        assert torch.equal(store.get("a"), value + 1)
        assert sum(store.where("a").values()) == value.numel() * 4
        store.check()


# -- leases -----------------------------------------------------------------------------------------------------

LARGE = 2 * CHUNK + 100


def fill_and_raise(store: TieredStore, name: str) -> None:
    with store.lease(name) as tensor:
        tensor.fill_(7)
        raise ZeroDivisionError


@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_changes_are_kept_when_the_body_of_a_lease_raises(small: TieredStore, size: int) -> None:
    small.put("a", torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(ZeroDivisionError):
        fill_and_raise(small, "a")
    assert torch.equal(small.get("a"), torch.full((size,), 7, dtype=torch.uint8))
    small.delete("a")


@pytest.mark.parametrize("size", [10, LARGE])
def test_leases_of_one_tensor_see_the_same_memory(small: TieredStore, size: int) -> None:
    small.put("a", torch.zeros(size, dtype=torch.uint8))
    with small.lease("a") as one:
        with small.lease("a") as other:
            other[0] = 1
        one[1] = 2
        assert small.get("a")[:2].tolist() == [1, 2]
    assert small.get("a")[:2].tolist() == [1, 2]


@pytest.mark.parametrize("size", [10, LARGE])
def test_leases_may_end_in_any_order(small: TieredStore, size: int) -> None:
    small.put("a", torch.zeros(size, dtype=torch.uint8))
    first, second = small.lease("a"), small.lease("a")
    one, other = first.__enter__(), second.__enter__()
    one[0] = 1
    first.__exit__(None, None, None)
    other[1] = 2
    second.__exit__(None, None, None)
    assert small.get("a")[:2].tolist() == [1, 2]


@pytest.mark.parametrize("size", [0, 10, LARGE])
def test_a_leased_tensor_is_neither_replaced_nor_deleted_nor_evicted(small: TieredStore, size: int) -> None:
    small.put("a", torch.zeros(size, dtype=torch.uint8))
    with small.lease("a"):
        for call in (small.delete, small.evict, lambda name: small.put(name, torch.ones(1))):
            with pytest.raises(LeaseError, match="'a' is leased"):
                call("a")
    small.put("a", torch.ones(1))
    assert small.get("a").tolist() == [1]


def test_evicting_a_neighbour_of_a_leased_tensor_leaves_their_chunk(small: TieredStore) -> None:
    small.put("a", torch.zeros(3))
    small.put("b", torch.zeros(3))
    with small.lease("a") as tensor:
        small.evict("b")
        small.delete("b")
        small.put("c", torch.ones(3))
        tensor.fill_(5)
    assert (small.get("a").tolist(), small.get("c").tolist()) == ([5, 5, 5], [1, 1, 1])


def test_more_leases_than_there_is_room_for_are_refused(small: TieredStore) -> None:
    for number in range(6):
        small.put(f"{number}", torch.full((CHUNK,), number, dtype=torch.uint8))
    with contextlib.ExitStack() as leases:
        held = [leases.enter_context(small.lease(f"{number}")) for number in range(4)]
        with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity"):
            leases.enter_context(small.lease("4"))
        small.check()
        assert [int(tensor[0]) for tensor in held] == [0, 1, 2, 3]
    assert int(small.get("4")[0]) == 4


# -- places -----------------------------------------------------------------------------------------------------


def test_where_follows_eviction_and_prefetch(small: TieredStore) -> None:
    small.put("a", torch.ones(LARGE, dtype=torch.uint8))
    small.evict(["a"])
    small.wait()
    assert small.where("a") == {"nvme": LARGE}
    small.prefetch(["a"])
    small.wait()
    assert small.where() == {"a": {"cpu": LARGE}}


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_the_first_rule_that_matches_a_name_chooses_its_home(tier: str) -> None:
    rules = [{"params": "*.bias", "tier": tier}, {"params": "*", "tier": "nvme"}]
    with open_store({"gpu": GPU, "cpu": CPU, "nvme": NVME}, placement=rules) as store:
        store.put("a.bias", torch.ones(3))
        store.put("a.weight", torch.ones(3))
        store.evict(["a.bias", "a.weight"])
        store.wait()
        assert store.where() == {"a.bias": {tier: 12}, "a.weight": {"nvme": 12}}


def test_an_optimizers_chunks_and_named_tensors_live_in_one_store() -> None:
    plant = plan_plant(TierPolicy.load({"tiers": {"cpu": {"capacity": 6 * CHUNK}}}), [])
    setup = plant.build({"cpu": Room(6)}, CHUNK)
    with TieredStore.over(setup, describe="parameter of chunk {}".format) as store:
        store.add_chunks({0: ChunkInfo(CHUNK, "cpu"), 1: ChunkInfo(CHUNK, "cpu")})
        store.register("weight", [(0, 1000), (1, 24)])
        assert store.where("weight") == {}
        store.run([0], [], lambda chunk, record, is_fresh: None)
        store.put("mine", torch.ones(LARGE, dtype=torch.uint8))
        assert store.where() == {"weight": {"cpu": 1000}, "mine": {"cpu": LARGE}}
        assert (store.names(), len(store), "weight" in store) == (["mine"], 1, False)
        with pytest.raises(ValueError, match="names the state of a parameter"):
            store.put("weight", torch.ones(1))
        with pytest.raises(ValueError, match="already"):
            store.register("mine", [(0, 8)])
        with pytest.raises(CapacityError):
            store.put("other", torch.ones(2 * CHUNK, dtype=torch.uint8))
        store.check()


def test_a_tensor_in_the_way_of_its_rule_is_refused() -> None:
    """A tensor cannot live in a tier faster than the one it is used in."""
    with open_store({"gpu": GPU, "cpu": CPU}, compute="cpu", placement=[{"params": "*", "tier": "gpu"}]) as store:
        with pytest.raises(PolicyError, match="placement puts 'a' in gpu; on cpu it is used in cpu"):
            store.put("a", torch.ones(1))
        store.check()


# -- room -------------------------------------------------------------------------------------------------------


def fill(store: TieredStore, count: int) -> dict[str, Tensor]:
    values = {f"{number}": torch.full((CHUNK,), number, dtype=torch.uint8) for number in range(count)}
    for name, value in values.items():
        store.put(name, value)
    return values


def assert_holds(store: TieredStore, values: dict[str, Tensor]) -> None:
    store.check()
    assert store.names() == list(values)
    for name, value in values.items():
        assert torch.equal(store.get(name), value)


def test_a_full_store_refuses_and_keeps_what_it_has(small: TieredStore) -> None:
    values = fill(small, 9)
    with pytest.raises(CapacityError, match="raise"):
        small.put("more", torch.zeros(CHUNK, dtype=torch.uint8))
    with pytest.raises(CapacityError) as error:
        small.put("3", torch.zeros(CHUNK + 1, dtype=torch.uint8))
    assert "the old value is still there" in error.value.__notes__[0]
    assert_holds(small, values)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_full_store_takes_a_new_value_of_the_old_size(chunks: int) -> None:
    with open_store({"cpu": {"capacity": chunks * CHUNK}}) as store:
        store.put("a", torch.zeros(chunks * CHUNK, dtype=torch.uint8))
        store.put("a", torch.ones(chunks, CHUNK, dtype=torch.uint8))
        assert torch.equal(store.get("a"), torch.ones(chunks, CHUNK, dtype=torch.uint8))
        store.check()


@pytest.mark.parametrize("name", ["gpu, cpu and nvme", "cpu and nvme"])
def test_tiers_of_a_full_store_change_their_size_and_no_byte(name: str) -> None:
    with open_store(TIERS[name]) as store:
        values = fill(store, 38)
        for tier, extents in (("cpu", 12), ("nvme", 60), ("cpu", 4), ("nvme", 41), ("cpu", 6)):
            assert store.resize(tier, extents * CHUNK) >= extents * CHUNK
            assert_holds(store, values)
        before = store.stats().tiers
        for tier, extents in (("nvme", 20), ("cpu", 1)):
            with pytest.raises(CapacityError, match="raise tiers"):
                store.resize(tier, extents * CHUNK)
            assert {name: tier.capacity_bytes for name, tier in store.stats().tiers.items()} == {
                name: tier.capacity_bytes for name, tier in before.items()
            }
            assert_holds(store, values)


def test_a_tier_that_grows_lies_on_huge_pages_as_one_that_began_so_large(tmp_path: Path) -> None:
    tiers = {"cpu": {"capacity": "2MiB"}, "nvme": {"capacity": "32MiB", "paths": [str(tmp_path)]}}
    with TieredStore({"chunk_size": "1MiB", "tiers": tiers}) as store:
        for tier in ("cpu", "nvme"):
            store.resize(tier, "40MiB")
        assert store.setup.tiers["cpu"].arena.slabs == (1, 1, 16, 16, 6)
        assert store.setup.tiers["nvme"].arena.slabs == (2,) * 20  # of those, room moves in small pieces


def test_sizes_are_given_as_in_a_policy(small: TieredStore) -> None:
    assert small.resize("nvme", "1MiB") == 1 << 20
    with pytest.raises(PolicyError, match=r"found tier 'disk'.*cpu, nvme"):
        small.resize("disk", "1MiB")
    for wrong in ("1MB?", "30%", "auto", 0, 100):
        with pytest.raises(PolicyError, match="capacity"):
            small.resize("cpu", wrong)


def test_a_leased_chunk_is_not_moved_by_a_smaller_tier(small: TieredStore) -> None:
    values = fill(small, 4)
    with contextlib.ExitStack() as leases:
        for name in values:
            leases.enter_context(small.lease(name))
        with pytest.raises((LeaseError, CapacityError)):
            small.resize("cpu", 3 * CHUNK)
        small.check()
        assert small.stats().tiers["cpu"].capacity_bytes == 4 * CHUNK
    assert_holds(small, values)


def test_tiers_without_a_capacity_grow_as_they_are_needed() -> None:
    with open_store({"cpu": {"capacity": 5 * CHUNK}, "nvme": {"io": IO}}) as store:
        assert store.stats().tiers["nvme"].capacity_bytes == 0
        values = fill(store, 5)
        assert store.stats().tiers["nvme"].capacity_bytes == 0
        values |= fill(store, 60)
        assert 60 * CHUNK <= sum(tier.capacity_bytes for tier in store.stats().tiers.values()) <= 90 * CHUNK
        assert_holds(store, values)


def test_a_full_disk_is_an_error_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store({"cpu": {"capacity": 5 * CHUNK}, "nvme": {"io": IO}}) as store:
        values = fill(store, 5)
        with monkeypatch.context() as patch:
            patch.setattr("tierstore.swapfile.disk_space", lambda place: DiskSpace(1 << 40, 1 << 20))
            with pytest.raises(DiskFullError, match=r"nvme\.capacity"):
                store.put("more", torch.ones(CHUNK, dtype=torch.uint8))
            with pytest.raises(DiskFullError):
                store.put("3", torch.ones(3 * CHUNK, dtype=torch.uint8))
            assert_holds(store, values)
        store.put("more", torch.ones(CHUNK, dtype=torch.uint8))
        assert_holds(store, {**values, "more": torch.ones(CHUNK, dtype=torch.uint8)})


def test_a_capacity_below_one_chunk_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"tiers\.cpu\.capacity of 4,096 bytes holds no chunk of 16,384 bytes"):
        open_store({"cpu": {"capacity": 4096}})


@pytest.mark.parametrize(
    ("cpu", "chunk_bytes"), [("auto", 1 << 20), ("1GiB", 1 << 20), ("1MiB", 1 << 16), ("99KiB", 1 << 14)]
)
def test_a_chunk_is_a_mebibyte_or_a_sixteenth_of_the_memory(cpu: str, chunk_bytes: int) -> None:
    with TieredStore({"tiers": {"cpu": {"capacity": cpu}}}) as store:
        store.put("a", torch.ones(1))
        assert store.stats().tiers["cpu"].used_bytes == chunk_bytes


def test_a_store_is_made_of_defaults_of_a_selection_and_of_a_file(tmp_path: Path) -> None:
    with TieredStore(tiers=["cpu", "nvme"]) as store:
        assert list(store.stats().tiers) == ["cpu", "nvme"]
    (tmp_path / "policy.yaml").write_text(f"tiers: {{cpu: {{capacity: 1MiB}}, nvme: {{paths: [{tmp_path}]}}}}")
    with TieredStore(tmp_path / "policy.yaml") as store:
        assert store.stats().io.paths == (str(tmp_path),)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_its_tier_is_left_out_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="the gpu tier is left out") as warned:
        store = TieredStore()
    assert len(warned) == 1
    store.put("a", torch.ones(1))
    assert store.where("a") == {"cpu": 4}
    store.close()


# -- on an accelerator ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")
@pytest.mark.parametrize("name", ["gpu", "gpu, cpu and nvme", "cpu and nvme", "all growing"])
def test_tensors_on_an_accelerator_come_back_to_the_bit(name: str) -> None:
    """In its own tier, streamed through it, or computed in host memory."""
    chance, values = random.Random(0), {}
    device = torch.device(str(torch.accelerator.current_accelerator()), torch.accelerator.current_device_index())
    tiers = {"gpu": {"capacity": 80 * CHUNK}} if name == "gpu" else dict(TIERS[name])
    if "gpu" in tiers:
        tiers["gpu"] = {**tiers["gpu"], "device": "auto"}
    with open_store(tiers) as store:
        for number in range(24):
            value = copy_of(random_tensor(chance, 2 * CHUNK))
            values[f"{number}"] = value if number % 4 == 3 else on_device(value, device)
            store.put(f"{number}", values[f"{number}"])
            store.check()
        for name, value in values.items():
            assert_same(store.get(name), value)
            with store.lease(name) as tensor:
                invert(tensor)
            invert(value)
        store.evict(store.names())
        for name, value in values.items():
            assert_same(store.get(name), value)
        store.check()


def invert(tensor: Tensor) -> None:
    """Change a dense tensor in place, on its device."""
    raw = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    raw.bitwise_xor_(1 if tensor.dtype == torch.bool else 255)


def on_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of any dtype to a device."""
    moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    flat = [one.as_strided((one.numel(),), (1,)).view(torch.uint8) for one in (moved, value)]
    flat[0].copy_(flat[1])
    return moved
