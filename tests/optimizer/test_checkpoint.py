"""`save_checkpoint` and `load_checkpoint`: what is loaded goes on as if nothing had been, in any tiers, to the bit.

Every test that saves reads back from the disk what another optimizer, made anew, loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.optimizer.beside import assert_same_saved, assert_same_values, cloned, nothing_changes
from tests.optimizer.cases import (
    KIB,
    assert_same_parameters,
    assert_state_is_lost,
    same_bits,
    seeded,
    small_policy,
    train,
)
from tests.optimizer.settings import go_on, network
from tierstore import checkpoint, loading
from tierstore.checkpoint.parts import Part
from tierstore.checkpoint.reader import Reader, StoredBlocks, Use
from tierstore.contents import Header
from tierstore.errors import (
    CheckpointValueError,
    DamagedCheckpointError,
    FailedStepError,
    NoCheckpointError,
    StateDictError,
)
from tierstore.export.wrapped import tiered_of
from tierstore.optimizer import TieredAdam, TieredAdamW, TieredLAMB, TieredLion, TieredSGD
from tierstore.results import Results
from tierstore.sources import Source
from tierstore.weights import Restoration

SHAPES: list[tuple[int, ...]] = [(3000,), (512,), (40, 50), (), (0, 3), (20_000,)]
TIERS = ["cpu", "cpu nvme", "gpu cpu nvme"]
MODES: dict[str, tuple[torch.dtype, dict[str, str]]] = {
    "float32": (torch.float32, {}),
    "split": (torch.bfloat16, {"master": "split"}),
    "master float32": (torch.bfloat16, {"master": "float32"}),
    "half": (torch.float16, {}),
    "split, low moments": (torch.bfloat16, {"master": "split", "moments": "parameter"}),
    "no master": (torch.bfloat16, {"master": "none", "moments": "parameter"}),
}
PAGES_ELEMENTS = 100 * 1024
"""Whole pages of any dtype, and more than is read where it is asked for."""
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (TieredAdamW, {}),
    "AdamW amsgrad": (TieredAdamW, {"amsgrad": True}),
    "Adam": (TieredAdam, {"weight_decay": 0.1}),
    "SGD": (TieredSGD, {}),
    "SGD momentum": (TieredSGD, {"momentum": 0.9}),
    "Lion": (TieredLion, {}),
    "LAMB": (TieredLAMB, {}),
}


class Wrapper(Tensor):
    """Stands for a tensor that it has, as quantized weights do."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        wrapper = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        wrapper.wrapped = values
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(func(args[0].wrapped))


def made(
    parameters: Any,
    folder: Path,
    tiers: str = "cpu nvme",
    *,
    make: Any = TieredAdamW,
    chunk: int = 16 * KIB,
    state: Mapping[str, str] | None = None,
    **options: Any,
) -> Any:
    """An optimizer whose state travels, in a folder of its own."""
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    policy = small_policy(swap, tiers.split(), chunk=chunk, **({"state": dict(state)} if state else {}))
    return make(parameters, **{"lr": 1e-2, **options}, policy=policy)


class Weighted(nn.Module):
    """A model whose parameters are those of a list, so that it can be saved with them."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)


class Named(nn.Module):
    """The same, with the names `p0`, `p1` and so on."""

    def __init__(self, parameters: list[Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", parameter)


class PatientReader(Reader):
    """Knows, of each tensor of the model that is read on threads, how many readings nobody had waited for by then."""

    def __init__(self, path: Path) -> None:
        self.unwaited = 0
        self.unwaited_at: dict[int, int] = {}
        super().__init__(path)

    def blocks(self, section: str, number: int, field: str, wanted: Part) -> StoredBlocks | None:
        blocks = super().blocks(section, number, field, wanted)
        return blocks and StoredBlocks(blocks.elements, partial(self._begin_noted, number, blocks.begin))

    def _begin_noted(self, tensor: int, begin: Any, number: int, use: Use) -> Any:
        if (reading := begin(number, use)) is None:
            return None
        self.unwaited_at[tensor], self.unwaited = self.unwaited, self.unwaited + 1
        return Waited(reading, self)


class Waited(Future[None]):
    """Tells a PatientReader when it is waited for."""

    def __init__(self, reading: Future[None], reader: PatientReader) -> None:
        super().__init__()
        self._reading = reading
        self._reader = reader

    def result(self, timeout: float | None = None) -> None:
        self._reading.result(timeout)
        self._reader.unwaited -= 1


def straight(folder: Path, steps: int, dtype: torch.dtype = torch.float32, **how: Any) -> tuple[list[Parameter], Any]:
    parameters = seeded(*SHAPES, dtype=dtype)
    optimizer = made(parameters, folder, **how)
    train(optimizer, parameters, range(steps))
    return parameters, optimizer


# Each save syncs some forty files and folders: what says most is in the default run.
KEPT = (("cpu", "float32"), ("cpu nvme", "float32"), ("gpu cpu nvme", "split"), ("cpu nvme", "no master"))
KEPT_RULES = ("AdamW amsgrad", "SGD momentum", "Lion")
TIERS_AND_MODES = [
    pytest.param(tiers, mode, marks=[] if (tiers, mode) in KEPT else [pytest.mark.long])
    for tiers in TIERS
    for mode in MODES
]
EVERY_RULE = [pytest.param(rule, marks=[] if rule in KEPT_RULES else [pytest.mark.long]) for rule in RULES]


class TestResuming:
    @pytest.mark.parametrize(("tiers", "mode"), TIERS_AND_MODES)
    def test_five_steps_saved_and_four_loaded_are_nine_in_other_tiers_and_chunks_too(
        self, tiers: str, mode: str, tmp_path: Path
    ) -> None:
        dtype, state = MODES[mode]
        parameters, optimizer = straight(tmp_path, 2, dtype, tiers=tiers, state=state)
        model = Weighted(parameters)
        optimizer.save_checkpoint(tmp_path / "saved", model, extra={"step": 2})
        train(optimizer, parameters, range(2, 5))
        optimizer.save_checkpoint(tmp_path / "saved", model, extra={"step": 5})
        train(optimizer, parameters, range(5, 9))
        others = seeded(*SHAPES, dtype=dtype, seed=9)
        into = TIERS[(TIERS.index(tiers) + 1) % len(TIERS)]
        another = made(others, tmp_path, into, chunk=24 * KIB, state=state, lr=3.0)
        assert another.load_checkpoint(tmp_path / "saved", Weighted(others)) == {"step": 5}
        train(another, others, range(5, 9))
        assert_same_parameters(others, parameters)
        assert_same_saved(another.state_dict(), optimizer.state_dict())
        another.store.check()

    @pytest.mark.parametrize("mode", ["float32", "split", "no master"])
    @pytest.mark.parametrize("pattern", [None, "*1"])
    def test_a_large_chunk_is_read_slice_by_slice(
        self, mode: str, pattern: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """All of it, or what is loaded of it; what others have in it stays."""

        def named(seed: int) -> list[tuple[str, Parameter]]:
            parameters = seeded((5000,), (70_000,), (333,), dtype=dtype, seed=seed)
            return [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]

        dtype, state = MODES[mode]
        pairs = named(0), named(1)
        mine, others = ([parameter for _, parameter in one] for one in pairs)
        optimizer, another = (made(one, tmp_path, "cpu nvme", chunk=1 << 20, state=state) for one in pairs)
        train(optimizer, mine, range(2))
        train(another, others, range(3))
        optimizer.save_checkpoint(tmp_path / "saved", Named(mine))
        wanted = another.state_dict()["state"] if pattern else {}
        wanted = wanted | {key: optimizer.state_dict()["state"][key] for key in ([1] if pattern else range(3))}
        monkeypatch.setattr(loading, "SLICE_BYTES", 100_000)
        another.load_checkpoint(tmp_path / "saved", Named(others), params=pattern)
        assert_same_values(another.state_dict(), {"state": wanted})

    @pytest.mark.parametrize("rule", EVERY_RULE)
    def test_every_rule_goes_on_as_it_would_have(self, rule: str, tmp_path: Path) -> None:
        make, options = RULES[rule]
        parameters, optimizer = straight(tmp_path, 3, torch.bfloat16, make=make, **options)
        checkpoint.save(tmp_path / "saved", optimizer, Weighted(parameters))
        train(optimizer, parameters, range(3, 5))
        others = seeded(*SHAPES, dtype=torch.bfloat16, seed=9)
        another = made(others, tmp_path, "cpu", make=make)
        checkpoint.load(tmp_path / "saved", another, Weighted(others))
        train(another, others, range(3, 5))
        assert_same_parameters(others, parameters)
        assert_same_saved(another.state_dict(), optimizer.state_dict())

    def test_state_in_one_policy_loads_into_every_other_kind_of_state(self, tmp_path: Path) -> None:
        """Split masters and whole ones are the same numbers; moments are rounded where the policy says so."""
        parameters, optimizer = straight(tmp_path, 3, torch.bfloat16, state={"master": "split"})
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters))
        wanted = optimizer.state_dict()["state"]
        for mode in ("master float32", "split, low moments", "no master"):
            others = seeded(*SHAPES, dtype=torch.bfloat16, seed=9)
            another = made(others, tmp_path, "cpu nvme", state=MODES[mode][1])
            another.load_checkpoint(tmp_path / "saved", Weighted(others))
            for key, fields in another.state_dict()["state"].items():
                for name, value in fields.items():
                    assert same_bits(value, wanted[key][name].to(value.dtype)), (mode, key, name)

    def test_masters_that_are_not_stored_are_the_weights_that_were_loaded(self, tmp_path: Path) -> None:
        parameters, optimizer = straight(tmp_path, 3, torch.bfloat16, state=MODES["no master"][1])
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters))
        for mode in ("master float32", "split, low moments"):
            others = seeded(*SHAPES, dtype=torch.bfloat16, seed=9)
            another = made(others, tmp_path, state=MODES[mode][1])
            another.load_checkpoint(tmp_path / "saved", Weighted(others))
            assert_same_parameters(others, parameters)
            for parameter in others:
                assert same_bits(another.state[parameter]["master"], parameter.detach().float())

    def test_parameters_of_every_layout_and_complex_ones_keep_their_values(self, tmp_path: Path) -> None:
        def parameters(seed: int, *, is_transposed: bool) -> list[Parameter]:
            generator = torch.Generator().manual_seed(seed)
            matrix, cube = torch.randn(60, 70, generator=generator), torch.randn(4, 30, 50, generator=generator)
            pairs = torch.randn(40, 90, dtype=torch.complex64, generator=generator)
            spread = torch.randn(50, 80, generator=generator)[:, ::2]
            if is_transposed:
                matrix, pairs = matrix.t().contiguous().t(), pairs.t().contiguous().t()
                cube, spread = cube.permute(2, 0, 1).contiguous().permute(1, 2, 0), spread.contiguous()
            return [Parameter(values) for values in (matrix, cube, pairs, spread)]

        mine = parameters(0, is_transposed=True)
        optimizer = made(mine, tmp_path)
        train(optimizer, mine, range(3))
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(mine))
        wanted = optimizer.state_dict()["state"]
        for is_transposed in (True, False):
            others = parameters(1, is_transposed=is_transposed)
            another = made(others, tmp_path, "gpu cpu nvme")
            another.load_checkpoint(tmp_path / "saved", Weighted(others))
            assert_same_values(another.state_dict(), {"state": wanted})
            assert all(torch.equal(a, b) for a, b in zip(others, mine, strict=True))

    def test_frozen_unused_and_stateless_parameters_empty_groups_and_options_survive(self, tmp_path: Path) -> None:
        def groups(seed: int) -> list[dict[str, Any]]:
            parameters = seeded((1000,), (500,), (500,), (100,), seed=seed)
            parameters[3].requires_grad_(False)
            return [
                {"params": parameters[:2], "lr": torch.tensor(0.01), "tier": "cpu"},
                {"params": []},
                {"params": parameters[2:], "betas": (0.5, 0.75), "note": {"of": [1, None, "mine"]}},
            ]

        mine = groups(0)
        optimizer = made(mine, tmp_path)
        one, other = mine[0]["params"]
        train(optimizer, [one, other], range(2))
        other.grad = None
        other.requires_grad_(False)  # in the middle
        train(optimizer, [one], range(2, 4))
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.save_checkpoint(tmp_path / "saved")
        theirs = groups(1)
        another = made(theirs, tmp_path, "cpu")
        del another.param_groups[0]["tier"]
        another.load_checkpoint(tmp_path / "saved")
        saved, wanted = another.state_dict(), optimizer.state_dict()
        assert set(saved["state"]) == {0, 1} and saved["state"][1]["step"] == 2
        assert_same_values(saved, wanted)
        for found, group in zip(saved["param_groups"], wanted["param_groups"], strict=True):
            assert found == {name: value for name, value in group.items() if name != "tier"}  # its own affair

    def test_a_checkpoint_without_any_state_takes_it_all_away(self, tmp_path: Path) -> None:
        fresh = seeded(*SHAPES)
        made(fresh, tmp_path, betas=(0.5, 0.75)).save_checkpoint(tmp_path / "saved")
        _, optimizer = straight(tmp_path, 2)
        optimizer.load_checkpoint(tmp_path / "saved")
        assert optimizer.state_dict()["state"] == {} and optimizer.param_groups[0]["betas"] == (0.5, 0.75)
        another = made(seeded(*SHAPES), tmp_path)
        another.load_checkpoint(tmp_path / "saved")
        assert another._held.binding is None  # nothing was reserved for nothing

    def test_a_state_that_moments_have_not_begun_for_begins_them_at_the_next_step(self, tmp_path: Path) -> None:
        """SGD without momentum has a master alone; with momentum from then on the first gradient begins the buffer."""
        parameters, optimizer = straight(tmp_path, 2, torch.bfloat16, make=TieredSGD)
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters))
        others = seeded(*SHAPES, dtype=torch.bfloat16, seed=9)
        another = made(others, tmp_path, "cpu", make=TieredSGD)
        another.load_checkpoint(tmp_path / "saved", Weighted(others))
        for one in (optimizer, another):
            one.param_groups[0]["momentum"] = 0.9
        train(optimizer, parameters, range(2, 4))
        train(another, others, range(2, 4))
        assert_same_saved(another.state_dict(), optimizer.state_dict())


class TestFinding:
    def test_named_parameters_are_found_in_another_order_and_other_groups(self, tmp_path: Path) -> None:
        model, twin = network(), network(seed=1)
        optimizer = made(model.named_parameters(), tmp_path)
        go_on(model, optimizer, range(2))
        optimizer.save_checkpoint(tmp_path / "saved", model)
        turned = list(twin.named_parameters())[::-1]
        groups = [{"params": turned[:1]}, {"params": turned[1:], "lr": 7.0}]
        another = made(groups, tmp_path, "cpu")
        another.load_checkpoint(tmp_path / "saved", twin)
        assert [group["lr"] for group in another.param_groups] == [1e-2, 1e-2]
        go_on(model, optimizer, range(2, 4))
        go_on(twin, another, range(2, 4))
        names = dict(model.named_parameters())
        for name, parameter in twin.named_parameters():
            assert same_bits(parameter, names[name])
            assert same_bits(another.state[parameter]["exp_avg"], optimizer.state[names[name]]["exp_avg"])

    def test_names_are_the_models_where_the_optimizer_was_given_none(self, tmp_path: Path) -> None:
        model, twin = network(), network(seed=1)
        optimizer = made(model.parameters(), tmp_path)
        go_on(model, optimizer, range(2))
        optimizer.save_checkpoint(tmp_path / "saved", model)
        with Reader(tmp_path / "saved") as reader:
            assert [entry.name for entry in reader.entries("params").values()] == list(dict(model.named_parameters()))
        another = made(list(twin.parameters())[::-1], tmp_path, "cpu")
        another.load_checkpoint(tmp_path / "saved", twin)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert same_bits(optimizer.state[mine]["exp_avg"], another.state[theirs]["exp_avg"])

    def test_only_what_a_pattern_selects_is_loaded(self, tmp_path: Path) -> None:
        model, twin = network(), network(seed=1)
        optimizer, another = made(model.named_parameters(), tmp_path), made(twin.named_parameters(), tmp_path, lr=0.5)
        go_on(model, optimizer, range(3))
        go_on(twin, another, range(1))
        optimizer.save_checkpoint(tmp_path / "saved", model)
        before, values = cloned(another.state_dict()), [p.detach().clone() for p in twin.parameters()]
        another.load_checkpoint(tmp_path / "saved", twin, params="*.weight")
        after, wanted = another.state_dict(), optimizer.state_dict()
        assert another.param_groups[0]["lr"] == 0.5
        for number, (name, parameter) in enumerate(twin.named_parameters()):
            source, value = (wanted, model.get_parameter(name)) if name.endswith("weight") else (before, values[number])
            assert same_bits(parameter, value), name
            assert all(same_bits(after["state"][number][f], v) for f, v in source["state"][number].items()), name
        another.store.check()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ("a shape", "shape"),
            ("one more", "missing there: more"),
            ("one less", "unexpected: scale"),
            ("another name", "missing there: other.weight, other.bias; unexpected: 0.weight, 0.bias"),
            ("a complex one", "complex64"),
            ("another rule", "is not SGD's: unknown"),
            ("no model saved", "was saved without one"),
            ("a pattern of none", "selects none"),
            ("a pattern without names", "they have none"),
            ("places, one more", "5 parameters, the optimizer 6"),
        ],
    )
    def test_what_does_not_fit_is_refused_before_anything_changes(
        self, change: str, words: str, tmp_path: Path
    ) -> None:
        model: Any = network()
        optimizer = made(model.named_parameters(), tmp_path)
        go_on(model, optimizer, range(1))
        optimizer.save_checkpoint(tmp_path / "saved", None if change == "no model saved" else model)
        twin: Any = network(seed=1)
        make, given, with_model, pattern = TieredAdamW, True, None, None
        if change == "a shape":
            twin.register_parameter("scale", Parameter(torch.ones(2)))
        elif change in ("one more", "places, one more"):
            twin.register_parameter("more", Parameter(torch.ones(2)))
            given = change == "one more"
        elif change == "one less":
            del twin.scale
        elif change == "another name":
            layers = dict(twin.named_children())
            twin = nn.Sequential()
            for name, layer in layers.items():
                twin.add_module({"0": "other"}.get(name, name), layer)
            twin.register_parameter("scale", Parameter(torch.tensor(1.5)))
        elif change == "a complex one":
            twin.register_parameter("scale", Parameter(torch.tensor(1.5 + 1j)))
        elif change == "another rule":
            make = TieredSGD
        elif change == "no model saved":
            with_model = twin
        elif change == "a pattern of none":
            pattern = "nothing*"
        elif change == "a pattern without names":
            given, pattern = False, "*"
        another = made(twin.named_parameters() if given else twin.parameters(), tmp_path, make=make)
        for parameter in twin.parameters():
            parameter.grad = torch.ones_like(parameter)
        another.step()
        with nothing_changes(another), pytest.raises(StateDictError, match=words):
            another.load_checkpoint(tmp_path / "saved", with_model, params=pattern)

    def test_groups_that_mix_parameters_of_several_with_other_options_are_refused(self, tmp_path: Path) -> None:
        one, other = seeded((100,), (200,))
        optimizer = made([{"params": [("a", one)]}, {"params": [("b", other)], "lr": 0.5}], tmp_path)
        optimizer.save_checkpoint(tmp_path / "saved")
        another = made([("b", other), ("a", one)], tmp_path)
        with nothing_changes(another), pytest.raises(StateDictError, match="whose options differ"):
            another.load_checkpoint(tmp_path / "saved")


class TestTorchFiles:
    @pytest.mark.parametrize("is_named", [True, False])
    def test_what_torch_saved_of_its_own_optimizer_loads_parameters_without_state_among_it(
        self, is_named: bool, tmp_path: Path
    ) -> None:
        model, twin = network(), network(seed=1)
        parameters = list(model.named_parameters() if is_named else model.parameters())
        reference = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}], fused=True)
        model.get_parameter("0.bias").requires_grad_(False)
        go_on(model, reference, range(2))
        torch.save(reference.state_dict(), tmp_path / "torch.pt")
        others = list(twin.named_parameters() if is_named else twin.parameters())
        turned = others[::-1] if is_named else others
        groups = (
            [{"params": turned[:3]}, {"params": turned[3:]}]
            if is_named
            else [
                {"params": turned[:2]},
                {"params": turned[2:]},
            ]
        )
        optimizer = made(groups, tmp_path)
        optimizer.load_checkpoint(tmp_path / "torch.pt")
        assert sorted(group["lr"] for group in optimizer.param_groups) == [0.001, 0.5]
        for (_, mine), (name, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            assert set(optimizer.state[theirs]) == set(reference.state[mine]), name
            assert all(same_bits(optimizer.state[theirs][f], value) for f, value in reference.state[mine].items()), name


class TestModels:
    def test_tied_weights_buffers_and_extra_state_come_back_in_place(self, tmp_path: Path) -> None:
        class Model(nn.Module):
            def __init__(self, seed: int) -> None:
                super().__init__()
                torch.manual_seed(seed)
                self.embedding = nn.Embedding(50, 8)
                self.head = nn.Linear(8, 50, bias=False)
                self.head.weight = self.embedding.weight
                self.norm = nn.BatchNorm1d(8)
                self.seen = {"words": seed, "rate": float("nan")}
                self.register_buffer("mask", torch.rand(9, 4).t() > 0.5)
                self.register_buffer("scratch", torch.ones(3), persistent=False)

            def get_extra_state(self) -> Any:
                return self.seen

            def set_extra_state(self, state: Any) -> None:
                self.seen = state

        model, twin = Model(1), Model(2)
        model.norm(torch.randn(4, 8))
        made(model.named_parameters(), tmp_path).save_checkpoint(tmp_path / "saved", model)
        with Reader(tmp_path / "saved") as reader:
            assert len(reader.entries("model")) == len(model.state_dict()) - 2  # one tied, one no tensor
        places = [value.data_ptr() for value in twin.state_dict().values() if isinstance(value, Tensor)]
        made(twin.named_parameters(), tmp_path).load_checkpoint(tmp_path / "saved", twin)
        assert [v.data_ptr() for v in twin.state_dict().values() if isinstance(v, Tensor)] == places
        assert twin.seen["words"] == 1
        for key, value in model.state_dict().items():
            if isinstance(value, Tensor):
                assert torch.equal(twin.state_dict()[key], value), key

    def test_a_model_that_cannot_be_stored_is_refused_and_the_checkpoint_stands(self, tmp_path: Path) -> None:
        class Strange(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"of": object()}

            def set_extra_state(self, state: Any) -> None: ...

        model = nn.Linear(3, 3)
        optimizer = made(model.parameters(), tmp_path)
        optimizer.save_checkpoint(tmp_path / "saved", model, extra=1)
        for bad, words in [(Strange(3, 3), "extra_state"), (nn.Linear(3, 3, device="meta"), "meta device")]:
            with pytest.raises(CheckpointValueError, match=words):
                optimizer.save_checkpoint(tmp_path / "saved", bad, extra=2)
        with pytest.raises(CheckpointValueError, match="extra"):
            optimizer.save_checkpoint(tmp_path / "saved", model, extra={"a": object()})
        assert optimizer.load_checkpoint(tmp_path / "saved", model) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "swap"]

    def test_weights_that_wrap_other_tensors_are_refused_at_once(self, tmp_path: Path) -> None:
        """Two of one shape were taken for one weight in two places, and what was saved could not be loaded."""
        model, plain = nn.ParameterList(), nn.ParameterList()
        for number in range(2):
            values = torch.full((3,), float(number))
            model.append(nn.Parameter(Wrapper(values), requires_grad=False))
            plain.append(nn.Parameter(values))
        optimizer = made(plain.parameters(), tmp_path)
        with pytest.raises(CheckpointValueError, match=r"model\.0 is a Wrapper, a wrapper of other tensors"):
            optimizer.save_checkpoint(tmp_path / "saved", model)
        optimizer.save_checkpoint(tmp_path / "saved", plain)
        with pytest.raises(StateDictError, match=r"model\.0 is a Wrapper"):
            made(model.parameters(), tmp_path).load_checkpoint(tmp_path / "saved", model)

    @pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
    def test_a_buffer_whose_memory_holds_something_else_than_its_values_gets_its_values(
        self, view: Any, tmp_path: Path
    ) -> None:
        def model(seed: int) -> nn.Module:
            made_of = nn.Linear(3, 3)
            values = torch.randn(PAGES_ELEMENTS, 2, generator=torch.Generator().manual_seed(seed))
            made_of.register_buffer("lazy", view(torch.view_as_complex(values)))
            return made_of

        one, other = model(1), model(2)
        made(one.parameters(), tmp_path).save_checkpoint(tmp_path / "saved", one)
        made(other.parameters(), tmp_path).load_checkpoint(tmp_path / "saved", other)
        assert torch.equal(other.lazy.resolve_conj().resolve_neg(), one.lazy.resolve_conj().resolve_neg())

    def test_what_nobody_can_write_to_is_refused_before_anything_changes(self, tmp_path: Path) -> None:
        """Torch refused it when all state was gone and other weights were loaded."""
        with torch.inference_mode():
            inferred = torch.randn(500)
        for number, buffer in enumerate([torch.randn(1).expand(500), inferred]):
            model, twin = network(), network(seed=1)
            optimizer, another = made(model.parameters(), tmp_path), made(twin.parameters(), tmp_path)
            for one in (model, twin):
                one.register_buffer("strange", buffer)
            go_on(model, optimizer, range(2))
            go_on(twin, another, range(1))
            optimizer.save_checkpoint(tmp_path / str(number), model)
            with (
                nothing_changes(another),
                pytest.raises(StateDictError, match=r"model\.strange is .*nothing can be loaded into it"),
            ):
                another.load_checkpoint(tmp_path / str(number), twin)
            another.step()

    def test_a_graph_from_before_a_load_hears_that_weights_were_changed(self, tmp_path: Path) -> None:
        """They are read into memory that autograd does not see written to."""
        parameters = [Parameter(torch.ones(PAGES_ELEMENTS))]
        optimizer = made(parameters, tmp_path)
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters))
        loss = (parameters[0] * parameters[0]).sum()
        optimizer.load_checkpoint(tmp_path / "saved", Weighted(parameters))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_tied_weights_that_were_saved_as_two_are_loaded_one_after_the_other(self, tmp_path: Path) -> None:
        """What both were read into at once was neither, and no longer what its checksum says."""
        optimizer, saved = made([Parameter(torch.ones(3))], tmp_path), Weighted(seeded((PAGES_ELEMENTS,), (3,)))
        saved.weights.append(Parameter(torch.ones(PAGES_ELEMENTS)))
        optimizer.save_checkpoint(tmp_path / "saved", saved)
        weight = Parameter(torch.zeros(PAGES_ELEMENTS))
        tied = Weighted([weight, Parameter(torch.zeros(3)), weight])
        with PatientReader(tmp_path / "saved") as reader:
            source = Source(reader, Results(1 << 20))
            restoration = Restoration(tied, Header.of(reader.path, reader.header), source, lambda key: True)
            restoration.begin(lambda nbytes: None)
            restoration.finish(lambda nbytes: None)
            assert reader.unwaited_at == {0: 0, 2: 0}
        assert_same_parameters(list(tied.parameters()), list(saved.parameters())[:0:-1])


class TestFaults:
    def damage(self, path: Path, number: int, field: str, section: str = "params") -> None:
        """Flip a bit in the middle of one field's only block."""
        (file,) = [file for file in (path / section / f"{number:06d}" / field).iterdir() if file.name != "zarr.json"]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def test_a_load_that_breaks_off_refuses_steps_until_one_succeeds(self, tmp_path: Path) -> None:
        _, optimizer = straight(tmp_path, 2)
        optimizer.save_checkpoint(tmp_path / "good")
        optimizer.save_checkpoint(tmp_path / "bad")
        self.damage(tmp_path / "bad", 5, "exp_avg_sq")
        others = seeded(*SHAPES)
        another = made(others, tmp_path)
        train(another, others, range(1))
        with pytest.raises(DamagedCheckpointError):
            another.load_checkpoint(tmp_path / "bad")
        with pytest.raises(FailedStepError, match=r"loading .* broke off"):
            another.step()
        with pytest.raises(FailedStepError, match="not saved over a checkpoint"):
            another.save_checkpoint(tmp_path / "good")
        assert_state_is_lost(another, "broke off half-way, and there is no state of .* load a checkpoint")
        assert list(tiered_of([optimizer, another])) == [optimizer]
        another.store.check()
        another.load_checkpoint(tmp_path / "good")
        assert_same_saved(another.state_dict(), optimizer.state_dict())
        another.step()

    @pytest.mark.parametrize("where", ["params/000001/exp_avg_sq", "model/000000/values", "model/000001/values"])
    @pytest.mark.parametrize("tiers", ["cpu", "cpu nvme"])
    def test_a_damaged_block_among_many_breaks_a_load_off_wherever_it_is(
        self, tiers: str, where: str, tmp_path: Path
    ) -> None:
        """Blocks of state are read straight to where they go; weights beside them, the last ones after all state."""
        parameters = seeded((1_200_000,), (1_400_000,))
        optimizer = made(parameters, tmp_path, tiers, chunk=512 * KIB)
        train(optimizer, parameters, range(2))
        for name in ("good", "bad"):
            optimizer.save_checkpoint(tmp_path / name, Weighted(parameters))
        file = tmp_path / "bad" / where / "c.0"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        others = seeded((1_200_000,), (1_400_000,), seed=9)
        another = made(others, tmp_path, tiers, chunk=512 * KIB)
        train(another, others, range(1))
        with pytest.raises(DamagedCheckpointError, match=where):
            another.load_checkpoint(tmp_path / "bad", Weighted(others))
        with pytest.raises(FailedStepError, match=r"loading .* broke off"):
            another.step()
        another.load_checkpoint(tmp_path / "good", Weighted(others))
        assert_same_parameters(others, parameters)
        assert_same_saved(another.state_dict(), optimizer.state_dict())

    def test_what_a_pattern_left_half_loaded_is_put_right_by_loading_no_less(self, tmp_path: Path) -> None:
        model, twin = network(), network(seed=1)
        optimizer, another = made(model.named_parameters(), tmp_path), made(twin.named_parameters(), tmp_path)
        go_on(model, optimizer, range(2))
        go_on(twin, another, range(1))
        for name in ("good", "bad"):
            optimizer.save_checkpoint(tmp_path / name)
        self.damage(tmp_path / "bad", 2, "exp_avg")  # 0.bias
        with pytest.raises(DamagedCheckpointError):
            another.load_checkpoint(tmp_path / "bad", params="0.*")
        with pytest.raises(FailedStepError, match="at least all that load was to load"):
            another.load_checkpoint(tmp_path / "good", params="2.*")
        another.load_checkpoint(tmp_path / "good", params="*.*")
        another.step()

    @pytest.mark.parametrize("which", ["0.weight", "2.bias"])
    def test_weights_that_a_pattern_left_half_loaded_are_put_right_by_loading_them(
        self, which: str, tmp_path: Path
    ) -> None:
        """Also those that the optimizer does not have, which no load of a part put right; and not by state alone."""
        model, twin = network(), network(seed=1)
        optimizer, another = (made(list(one.named_parameters())[1:3], tmp_path) for one in (model, twin))  # 0.*
        go_on(model, optimizer, range(2))
        go_on(twin, another, range(1))
        for name in ("good", "bad"):
            optimizer.save_checkpoint(tmp_path / name, model)
        self.damage(tmp_path / "bad", list(model.state_dict()).index(which), "values", "model")
        pattern = f"{which[0]}.*"
        with pytest.raises(DamagedCheckpointError):
            another.load_checkpoint(tmp_path / "bad", twin, params=pattern)
        with pytest.raises(FailedStepError, match=r"loading .* broke off"):
            another.step()
        for less, params in [(twin, "*.weight"), (None, "*")]:
            with pytest.raises(FailedStepError, match="at least all that load was to load"):
                another.load_checkpoint(tmp_path / "good", less, params=params)
        another.load_checkpoint(tmp_path / "good", twin, params=pattern)
        another.step()

    def test_weights_that_are_half_loaded_where_there_is_no_state_refuse_steps_too(self, tmp_path: Path) -> None:
        """Nothing was bound that could refuse them, and half of a model was saved over a checkpoint."""
        model, twin = network(), network(seed=1)
        optimizer, another = made(model.parameters(), tmp_path), made(twin.parameters(), tmp_path)
        for path in (tmp_path / "good", tmp_path / "bad"):
            optimizer.save_checkpoint(path, model)
        self.damage(tmp_path / "bad", list(model.state_dict()).index("2.weight"), "values", "model")
        for how in ({}, {"params": "2.*"}):
            with pytest.raises(DamagedCheckpointError):
                another.load_checkpoint(tmp_path / "bad", twin, **how)
            for refused in (
                lambda: go_on(twin, another, range(1)),
                lambda: another.save_checkpoint(tmp_path / "good", twin),
                lambda: another.load_checkpoint(tmp_path / "good", twin, params="2.*"),
            ):
                with pytest.raises(FailedStepError, match="broke off"):
                    refused()
            another.load_checkpoint(tmp_path / "good", twin)
            assert_same_parameters(list(twin.parameters()), list(model.parameters()))
        go_on(twin, another, range(1))

    def test_a_step_that_broke_off_is_put_right_by_a_whole_load_alone(self, tmp_path: Path) -> None:
        parameters, optimizer = straight(tmp_path, 2)
        optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters))
        optimizer.store.fail("a step broke off")
        with pytest.raises(FailedStepError):
            optimizer.load_checkpoint(tmp_path / "saved", Weighted(parameters), params="*.0")
        optimizer.load_checkpoint(tmp_path / "saved", Weighted(parameters))
        optimizer.step()

    def test_no_checkpoint_and_a_wrong_keep_last_are_told(self, tmp_path: Path) -> None:
        _, optimizer = straight(tmp_path, 1)
        with nothing_changes(optimizer), pytest.raises(NoCheckpointError):
            optimizer.load_checkpoint(tmp_path / "none")
        for wrong in (0, -1, True, 1.5, "3"):
            with pytest.raises(CheckpointValueError, match="keep_last"):
                optimizer.save_checkpoint(tmp_path / "saved", keep_last=wrong)  # type: ignore[arg-type]
            assert not (tmp_path / "saved").exists()

    def test_keep_last_leaves_the_newest(self, tmp_path: Path) -> None:
        _, optimizer = straight(tmp_path, 1)
        (tmp_path / "run").mkdir()
        for step in range(4):
            optimizer.save_checkpoint(tmp_path / "run" / f"step{step}", keep_last=2)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step2", "step3"]
