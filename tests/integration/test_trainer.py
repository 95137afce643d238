"""Hugging Face's Trainer: both ways to give it an optimizer, clipping, accumulation, checkpoints inside an epoch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.conftest import AssertResumed, NoteDifference
from tests.integration.ranks import Ranks
from tests.integration.tiny import (
    OPTIONS,
    TinyModel,
    UnscaledAdamW,
    assert_same_bits,
    assert_same_models,
    assert_took_every_route,
    batch,
    largest_difference,
    policy,
    steps_counted,
    tell_accelerate_of_ranks,
    use_scaler_on_cpu,
)
from tierstore import TieredAdamW

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[integrations]'")
from safetensors.torch import load_file  # noqa: E402

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("fresh_accelerate", "_quiet")]

STEPS = 8
STEPS_SAVED = 3
"""Two batches a step and nine an epoch: steps 1 to 5 are the first epoch, the fifth with one batch."""
CLIP = 0.5
VOCABULARY = 61


@pytest.fixture
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    """Every run collects garbage several times: what was imported before need not be looked through."""
    gc.freeze()
    yield
    gc.unfreeze()


def language_model(*, seed: int = 0) -> nn.Module:
    """A GPT-2 of 60,000 parameters with dropout, tied embeddings and weights of up to three chunks."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=12, n_embd=48, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.GPT2LMHeadModel(config)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(VOCABULARY, (18, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


class PlainTask(nn.Module):
    """A module that is none of transformers' own, with nothing trainable but weights that decay."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.model = TinyModel(seed=seed)
        for parameter in self.model.parameters():
            parameter.requires_grad_(parameter.dim() > 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.model(x) - labels).square().mean()}


class Hungry(PlainTask):
    """Needs much memory for a batch of two."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if len(x) > 1:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(x, labels)


def vectors() -> list[dict[str, Tensor]]:
    return [{"x": batch(number, size=1)[0], "labels": torch.ones(1)} for number in range(18)]


# -- the optimizers -----------------------------------------------------------------------------------------------


KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "autocast": {"bf16": True},
    "fp16": {"fp16": True},
    "bf16 parameters": {},
}


def by_class(cls: type[torch.optim.Optimizer], _: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Let the Trainer make optimizer, groups and scheduler."""
    return {"optimizer_cls_and_kwargs": (cls, {"lr": OPTIONS["lr"], **options})}


def by_instance(cls: type[torch.optim.Optimizer], model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give it an optimizer with two groups, and a scheduler that sets betas too."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decaying = [(name, parameter) for name, parameter in named if parameter.dim() > 1]
    others = [(name, parameter) for name, parameter in named if parameter.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    if not others:  # torch: a group without names, so one without parameters, cannot stand beside one with names
        groups[0]["params"] = [parameter for _, parameter in decaying]
    optimizer = cls(groups, **OPTIONS, **options)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS + 1))}


WAYS = {"optimizers": by_instance, "optimizer_cls_and_kwargs": by_class}


class Run:
    """What a Trainer made of a model."""

    def __init__(
        self,
        folder: Path,
        way: str,
        tiers: str | None,
        *,
        model: nn.Module | None = None,
        data: list[dict[str, Tensor]] | None = None,
        resume: Path | None = None,
        **settings: Any,
    ) -> None:
        """Train. `tiers`: None for torch's fused AdamW. `resume`: the folder of a run to resume at `STEPS_SAVED`."""
        self.model = language_model() if model is None else model
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            max_steps=STEPS,
            save_steps=STEPS_SAVED,
            logging_steps=1,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=CLIP,
            weight_decay=OPTIONS["weight_decay"],
            warmup_steps=2,
            **settings,
        )
        cls, options = (TieredAdamW, {"policy": policy(tiers, folder)}) if tiers else (UnscaledAdamW, {})
        given = WAYS[way](cls, self.model, options) if way in WAYS else {}
        self.trainer = transformers.Trainer(self.model, arguments, train_dataset=data or sentences(), **given)
        if arguments.fp16:
            use_scaler_on_cpu(self.trainer.accelerator)
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.tiers = tiers
        self.train(str(checkpoint_of(resume)) if resume else None)

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        self.trainer.train(resume_from_checkpoint=resume_from_checkpoint)
        self.log = [entry for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def optimizer(self) -> Any:
        return self.trainer.optimizer.optimizer


def checkpoint_of(folder: Path) -> Path:
    return folder / f"checkpoint-{STEPS_SAVED}"


Train = Callable[..., Run]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Make runs, each in the folder of its name, and close their optimizers in the end."""
    runs: list[Run] = []

    def begin(name: str, way: str, tiers: str | None, *, resume: str | None = None, **options: Any) -> Run:
        (tmp_path / name).mkdir()
        runs.append(Run(tmp_path / name, way, tiers, resume=tmp_path / resume if resume else None, **options))
        return runs[-1]

    yield begin
    for run in runs:
        if run.tiers is not None:
            run.optimizer.close()


def assert_same_runs(one: Run, other: Run) -> None:
    """Compare losses, gradient norms and learning rates of all steps, then weights and the optimizer's state."""
    assert len(one.log) == STEPS
    assert [_told(entry) for entry in one.log] == [_told(entry) for entry in other.log]
    assert_same_models(one.model, other.model)
    assert_same_bits(one.optimizer.state_dict(), other.optimizer.state_dict())
    for run in (one, other):
        if run.tiers is not None:
            assert type(run.optimizer) is TieredAdamW
            assert_took_every_route(run.optimizer, run.tiers)


def _told(entry: Mapping[str, float]) -> dict[str, str]:
    return {key: repr(value) for key, value in entry.items()}  # the norm of gradients that overflow is NaN


# -- the same numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "tiers"),
    [("fp32", "cpu-nvme"), ("fp32", "gpu-cpu-nvme"), ("autocast", "gpu-cpu-nvme"), ("fp16", "cpu-nvme")],
)
def test_run_is_that_of_fused_adamw(train: Train, way: str, kind: str, tiers: str) -> None:
    mine = train("mine", way, tiers, **KINDS[kind])
    theirs = train("theirs", way, None, **KINDS[kind])
    assert_same_runs(mine, theirs)
    assert not any(entry["grad_norm"] < CLIP for entry in mine.log)  # or nothing was clipped
    assert steps_counted(mine.optimizer) in (range(2, 7) if kind == "fp16" else [STEPS])
    assert len({entry["learning_rate"] for entry in mine.log}) > STEPS // 2


def test_run_is_that_of_the_optimizer_the_trainer_makes_by_itself(train: Train) -> None:
    mine = train("mine", "optimizer_cls_and_kwargs", "cpu-nvme")
    theirs = train("theirs", "none", None, learning_rate=OPTIONS["lr"])
    assert_same_runs(mine, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_group_without_parameters_changes_nothing(train: Train, way: str) -> None:
    mine = train("mine", way, "gpu-cpu-nvme", model=PlainTask(), data=vectors())
    theirs = train("theirs", way, None, model=PlainTask(), data=vectors())
    assert [bool(group["params"]) for group in mine.optimizer.param_groups] == [True, False]
    assert_same_runs(mine, theirs)
    resumed = train("resumed", way, "cpu-nvme", model=PlainTask(seed=1), data=vectors(), resume="mine")
    assert_same_runs(resumed, mine)


def test_training_again_goes_on_with_the_same_optimizer(train: Train) -> None:
    """The Trainer counts steps from zero; the optimizer goes on."""
    mine, theirs = (train(str(tiers), "optimizer_cls_and_kwargs", tiers) for tiers in ("cpu-nvme", None))
    optimizer = mine.optimizer
    for run in (mine, theirs):
        torch.manual_seed(7)  # for dropout
        run.train()
    assert mine.optimizer is optimizer
    assert steps_counted(optimizer) == 2 * STEPS
    assert_same_runs(mine, theirs)


def test_smaller_batch_is_found_as_with_fused_adamw(train: Train) -> None:
    """The Trainer begins again, with a new optimizer, when memory does not suffice for a batch."""
    mine, theirs = (
        train(str(tiers), "optimizer_cls_and_kwargs", tiers, model=Hungry(), data=vectors(), auto_find_batch_size=True)
        for tiers in ("cpu-nvme", None)
    )
    assert mine.trainer._train_batch_size == 1
    assert_same_runs(mine, theirs)


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "kind"), [("optimizers", "fp32"), *(("optimizer_cls_and_kwargs", kind) for kind in KINDS)]
)
def test_resumed_run_is_the_uninterrupted_one(
    train: Train, assert_resumed: AssertResumed, monkeypatch: pytest.MonkeyPatch, way: str, kind: str
) -> None:
    """In the middle of an epoch, by the safe loader alone, into other tiers."""
    dtype = torch.bfloat16 if kind == "bf16 parameters" else torch.float32
    straight = train("straight", way, "cpu-nvme", model=language_model().to(dtype), **KINDS[kind])
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    other_start = language_model(seed=1).to(dtype)
    resumed = train("resumed", way, "gpu-cpu-nvme", model=other_start, resume="straight", **KINDS[kind])
    assert_resumed(resumed.model, straight.model)
    assert_same_runs(resumed, straight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("first", "second"), [(None, "cpu-nvme"), ("cpu-nvme", None)], ids=["to us", "from us"])
def test_checkpoint_is_taken_over(
    train: Train, assert_resumed: AssertResumed, way: str, first: str | None, second: str | None
) -> None:
    straight = train("straight", way, first)
    resumed = train("resumed", way, second, model=language_model(seed=1), resume="straight")
    assert_resumed(resumed.model, straight.model)
    assert_same_runs(resumed, straight)


def test_checkpoint_of_low_precision_parameters_has_their_masters(train: Train, tmp_path: Path) -> None:
    train("mine", "optimizers", "cpu-nvme", model=language_model().to(torch.bfloat16))
    weights = load_file(checkpoint_of(tmp_path / "mine") / "model.safetensors")
    saved = torch.load(checkpoint_of(tmp_path / "mine") / "optimizer.pt", weights_only=True)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    assert len(names) == len(saved["state"]) > 0
    for name, state in zip(names, saved["state"].values(), strict=True):
        assert {field: value.dtype for field, value in state.items()} == dict.fromkeys(state, torch.float32)
        assert_same_bits(state["master"].to(torch.bfloat16), weights[name], name)


# -- several ranks ------------------------------------------------------------------------------------------------


def _train_on_ranks(folder: Path) -> float:
    tell_accelerate_of_ranks()
    transformers.logging.set_verbosity_error()

    def run(name: str, tiers: str | None, **options: Any) -> Run:
        return Run(folder / name, "optimizer_cls_and_kwargs", tiers, ddp_backend="gloo", **options)

    straight, theirs = run("straight", "cpu-nvme"), run("theirs", None)
    assert isinstance(straight.trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    assert_same_runs(straight, theirs)
    dist.barrier()
    resumed = run("resumed", "gpu-cpu-nvme", model=language_model(seed=1), resume=folder / "straight")
    assert_same_runs(resumed, straight)
    straight.optimizer.close()
    resumed.optimizer.close()
    return largest_difference(resumed.model, straight.model)


def test_run_on_two_ranks_is_that_of_fused_adamw_and_resumes(
    two_ranks: Ranks, tmp_path: Path, note_difference: NoteDifference
) -> None:
    for name in ("straight", "theirs", "resumed"):
        (tmp_path / name).mkdir()
    for difference in two_ranks.run(_train_on_ranks, tmp_path):
        note_difference(difference)
