"""Checkpoints that training goes on beside: they hold the state of the call, and what goes wrong with them is told."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from tests.fakes import FaultyEngine, HeldWriters, honest_parts
from tests.optimizer.beside import assert_same_values, cloned
from tests.optimizer.cases import KIB, assert_same_parameters, seeded, set_gradients, small_policy, train
from tests.optimizer.settings import go_on, network
from tests.optimizer.test_checkpoint import MODES, SHAPES, TIERS, Weighted, made
from tests.processes import run_script
from tierstore.build import Parts
from tierstore.errors import (
    BusyStoreError,
    CheckpointError,
    CheckpointFileError,
    ForkedStoreError,
    NoCheckpointError,
    TransferError,
)
from tierstore.io.base import Kind, Operation
from tierstore.optimizer import TieredAdamW

WRITERS = HeldWriters()


class Held(TieredAdamW):
    """Its checkpoints are written when a test says so."""

    open_writer = WRITERS


@pytest.fixture(autouse=True)
def _let_go() -> Any:
    yield
    WRITERS.release()
    WRITERS.fault = None


def loaded(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[list[Parameter], dict[str, Any]]:
    """Parameters and state in a checkpoint."""
    parameters = seeded(*SHAPES, dtype=dtype, seed=9)
    optimizer = made(parameters, folder, "cpu", state={"master": "float32"})
    optimizer.load_checkpoint(path, Weighted(parameters))
    return parameters, optimizer.state_dict()


class TestCapture:
    @pytest.mark.parametrize("mode", ["float32", "split"])
    @pytest.mark.parametrize("tiers", TIERS)
    def test_the_state_of_the_call_is_saved_while_steps_go_on(self, tiers: str, mode: str, tmp_path: Path) -> None:
        """The writer is held until a step waits for it, so that most of the state is captured from what runs update."""
        dtype, state = MODES[mode]
        parameters = seeded(*SHAPES, dtype=dtype)
        optimizer = made(parameters, tmp_path, tiers, make=Held, state=state)
        train(optimizer, parameters, range(3))
        wanted, values = cloned(optimizer.state_dict()), [p.detach().clone() for p in parameters]
        moved = optimizer.store.stats().to_dict()["routes"]
        WRITERS.hold()
        save = optimizer.save_checkpoint(tmp_path / "saved", extra="mine", wait=False)
        assert not save.is_over and optimizer.store.stats().to_dict()["routes"] == moved  # nothing was read for it
        WRITERS.release()
        train(optimizer, parameters, range(3, 5))
        save.wait()
        assert save.is_over
        train(optimizer, parameters, range(5, 6))
        others = seeded(*SHAPES, dtype=dtype, seed=9)
        another = made(others, tmp_path, "cpu", state={"master": "float32"})
        assert another.load_checkpoint(tmp_path / "saved") == "mine"
        assert_same_values(another.state_dict(), wanted)
        twins = [Parameter(value) for value in values]
        straight = made(twins, tmp_path, tiers, state=state)
        straight.load_state_dict(wanted)
        train(straight, twins, range(3, 6))
        assert_same_parameters(parameters, twins)  # the save has changed nothing of the training
        optimizer.store.check()

    @pytest.mark.parametrize("seed", range(4))
    def test_captures_and_loads_follow_what_an_accelerator_has_yet_to_do(self, seed: int, tmp_path: Path) -> None:
        """Everything that is launched runs late, in an order drawn by the seed; memory is garbage before and after."""

        class Honest(Held):
            parts = honest_parts(seed)

        parameters = seeded((3000,), (40, 50), dtype=torch.bfloat16)
        optimizer = made(parameters, tmp_path, "gpu cpu nvme", make=Honest, state={"master": "split"})
        train(optimizer, parameters, range(2))
        wanted = cloned(optimizer.state_dict())
        save = optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters), wait=False)
        train(optimizer, parameters, range(2, 3))
        save.wait()
        optimizer.load_checkpoint(tmp_path / "saved", Weighted(parameters))
        assert_same_values(optimizer.state_dict(), wanted)
        optimizer.store.check()
        optimizer.close()

    def test_the_models_weights_are_those_of_the_call(self, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES, dtype=torch.bfloat16)
        optimizer = made(parameters, tmp_path, make=Held)
        train(optimizer, parameters, range(2))
        values = [p.detach().clone() for p in parameters]
        save = optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters), wait=False)
        train(optimizer, parameters, range(2, 4))
        save.wait()
        assert_same_parameters(loaded(tmp_path / "saved", tmp_path, torch.bfloat16)[0], values)

    def test_chunks_that_no_step_comes_to_are_captured_at_its_end(self, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path)
        train(optimizer, parameters, range(2))
        wanted = cloned(optimizer.state_dict())
        save = optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters), wait=False)
        optimizer.zero_grad()
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.step()
        optimizer.wait_for_checkpoint()
        assert save.is_over
        assert_same_values(loaded(tmp_path / "saved", tmp_path)[1], wanted)

    @pytest.mark.parametrize(
        "change", ["in place", "whole", "deleted", "another set", "loaded", "checkpoint", "closed"]
    )
    def test_what_changes_state_otherwise_is_not_in_the_checkpoint(self, change: str, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path)
        train(optimizer, parameters, range(2))
        wanted = cloned(optimizer.state_dict())
        optimizer.save_checkpoint(tmp_path / "older")
        save = optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters), wait=False)
        if change == "in place":
            optimizer.state[parameters[5]]["exp_avg"].zero_()
            optimizer.state_dict()
        elif change == "whole":
            optimizer.state[parameters[5]] = {
                "step": 7.0,
                "exp_avg": torch.ones(20_000),
                "exp_avg_sq": torch.ones(20_000),
            }
        elif change == "deleted":
            del optimizer.state[parameters[5]]
        elif change == "another set":
            optimizer.add_param_group({"params": seeded((30_000,))})
            optimizer.store.check()
        elif change == "loaded":
            optimizer.load_state_dict(made(seeded(*SHAPES), tmp_path).state_dict())
        elif change == "checkpoint":
            optimizer.load_checkpoint(tmp_path / "older", params=None)
        elif change == "closed":
            optimizer.close()
        save.wait()
        assert_same_values(loaded(tmp_path / "saved", tmp_path)[1], wanted)

    @pytest.mark.parametrize("mode", ["master float32", "split"])
    def test_weights_that_are_loaded_meanwhile_are_not_in_the_checkpoint(self, mode: str, tmp_path: Path) -> None:
        """A split master is saved with the half that the parameter was at the call, whatever is read into it then."""
        dtype, state = MODES[mode]
        older = seeded(*SHAPES, dtype=dtype, seed=5)
        optimizer = made(older, tmp_path, state=state)
        train(optimizer, older, range(1))
        optimizer.save_checkpoint(tmp_path / "older", Weighted(older))
        parameters = seeded(*SHAPES, dtype=dtype)
        optimizer = made(parameters, tmp_path, state=state)
        train(optimizer, parameters, range(2))
        wanted = cloned(optimizer.state_dict())
        save = optimizer.save_checkpoint(tmp_path / "saved", Weighted(parameters), wait=False)
        optimizer.load_checkpoint(tmp_path / "older", Weighted(parameters), params="weights.*")
        save.wait()
        assert_same_parameters(parameters, older)
        assert_same_values(loaded(tmp_path / "saved", tmp_path, dtype)[1], wanted)

    def test_updates_beside_backward_are_captured_too(self, tmp_path: Path) -> None:
        def trained(steps: range, **more: Any) -> tuple[nn.Module, TieredAdamW]:
            model = network()
            policy = small_policy(tmp_path, ["cpu", "nvme"], **more)
            optimizer = TieredAdamW(model.named_parameters(), lr=1e-2, policy=policy)
            go_on(model, optimizer, steps)
            return model, optimizer

        model, optimizer = trained(range(5), update="backward")
        save = optimizer.save_checkpoint(tmp_path / "saved", model, wait=False)
        go_on(model, optimizer, range(5, 8))
        save.wait()
        twin = network(seed=3)
        another = made(twin.named_parameters(), tmp_path, "cpu")
        another.load_checkpoint(tmp_path / "saved", twin)
        for steps, one, its_model in ((range(5), another, twin), (range(8), optimizer, model)):
            wanted_model, wanted = trained(steps)
            assert_same_parameters(list(its_model.parameters()), list(wanted_model.parameters()))
            assert_same_values(one.state_dict(), wanted.state_dict())


class TestBusy:
    def test_a_next_save_waits_for_the_one_under_way_or_is_refused(self, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path, make=Held)
        train(optimizer, parameters, range(1))
        WRITERS.hold()
        first = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        with pytest.raises(BusyStoreError, match="still being written"):
            optimizer.save_checkpoint(tmp_path / "saved", if_busy="error")
        with pytest.raises(ValueError, match="if_busy"):
            optimizer.save_checkpoint(tmp_path / "saved", if_busy="perhaps")  # type: ignore[arg-type]
        WRITERS.release()
        train(optimizer, parameters, range(1, 2))
        second = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        assert first.is_over
        second.wait()
        assert optimizer.state_dict()["state"][0]["step"] == 2
        assert loaded_steps(tmp_path / "saved", tmp_path) == 2

    def test_close_finishes_what_is_under_way(self, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES)
        with made(parameters, tmp_path) as optimizer:
            train(optimizer, parameters, range(3))
            optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        assert loaded_steps(tmp_path / "saved", tmp_path) == 3

    @pytest.mark.long
    def test_the_end_of_the_program_finishes_what_is_under_way(self, tmp_path: Path) -> None:
        script = f"""
            from pathlib import Path
            from tests.optimizer.test_checkpoint import SHAPES, made, seeded, train
            parameters = seeded(*SHAPES)
            optimizer = made(parameters, Path({str(tmp_path)!r}))
            train(optimizer, parameters, range(3))
            optimizer.save_checkpoint(Path({str(tmp_path)!r}) / "saved", wait=False)
        """
        run_script(script, tmp_path, to_its_end=True)
        assert loaded_steps(tmp_path / "saved", tmp_path) == 3

    def test_a_fork_leaves_what_is_under_way_to_its_parent(self, tmp_path: Path) -> None:
        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path, make=Held)
        train(optimizer, parameters, range(3))
        WRITERS.hold()
        save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        child = os.fork()
        if child == 0:  # pragma: no cover - another process
            status = 1
            try:
                optimizer.close()
                with pytest.raises(ForkedStoreError):
                    save.wait()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        WRITERS.release()
        assert status == 0
        save.wait()
        assert loaded_steps(tmp_path / "saved", tmp_path) == 3


class TestFaults:
    def test_an_error_of_the_writer_is_told_once_and_training_and_the_old_checkpoint_are_as_they_were(
        self, tmp_path: Path
    ) -> None:
        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path, make=Held)
        train(optimizer, parameters, range(1))
        optimizer.save_checkpoint(tmp_path / "saved")
        WRITERS.fault = CheckpointFileError(errno.ENOSPC, "no space left", "there")
        save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        save.finish()  # tells nothing; a step that found it over would raise
        before = cloned(optimizer.state_dict())
        set_gradients(parameters, 2)
        with pytest.raises(CheckpointFileError, match="no space left"):
            optimizer.step()
        assert_same_values(optimizer.state_dict(), before)
        optimizer.step()
        with pytest.raises(CheckpointFileError):
            save.wait()
        with pytest.raises(CheckpointFileError):
            optimizer.save_checkpoint(tmp_path / "saved")
        assert loaded_steps(tmp_path / "saved", tmp_path) == 1
        WRITERS.fault = None
        optimizer.save_checkpoint(tmp_path / "saved")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "swap"]

    def test_a_read_that_fails_while_the_rest_is_captured_fails_the_checkpoint_alone(self, tmp_path: Path) -> None:
        engine = FaultyEngine()
        parameters = seeded(*SHAPES)

        class Faulty(TieredAdamW):
            parts = Parts(open_engine=lambda *_, **__: engine)

        optimizer = made(parameters, tmp_path, make=Faulty)
        train(optimizer, parameters, range(2))
        optimizer.store.wait()
        engine.fail(times=None, kind=Kind.READ)
        with pytest.raises(TransferError):
            optimizer.save_checkpoint(tmp_path / "saved")
        engine.heal()
        with pytest.raises(NoCheckpointError):
            optimizer.load_checkpoint(tmp_path / "saved")
        train(optimizer, parameters, range(2, 3))
        optimizer.save_checkpoint(tmp_path / "saved")
        assert loaded_steps(tmp_path / "saved", tmp_path) == 3

    def test_a_disk_that_hangs_under_a_checkpoint_holds_no_step_up_for_longer_than_the_policy_says(
        self, tmp_path: Path
    ) -> None:
        parameters, theirs = seeded(*SHAPES), seeded(*SHAPES)
        (tmp_path / "swap").mkdir()
        policy = small_policy(tmp_path / "swap", ["cpu", "nvme"], chunk=16 * KIB)
        policy["tiers"]["nvme"]["io"] = {"timeout": "2s"}
        optimizer = Held(parameters, lr=1e-2, policy=policy)
        train(optimizer, parameters, range(1))
        optimizer.save_checkpoint(tmp_path / "saved")
        WRITERS.hold()
        save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        train(optimizer, parameters, range(1, 2))  # more chunks than buffers, so that it waits for one
        assert save.is_over
        with pytest.raises(CheckpointFileError, match=r"nothing was written for 2 s.*/saved") as caught:
            train(optimizer, parameters, range(2, 3))
        assert caught.value.errno == errno.ETIMEDOUT
        train(optimizer, parameters, range(2, 3))
        train(torch.optim.AdamW(theirs, lr=1e-2, fused=True), theirs, range(3))
        assert_same_parameters(parameters, theirs)
        optimizer.store.check()
        optimizer.close()  # while it hangs
        assert loaded_steps(tmp_path / "saved", tmp_path) == 1

    @pytest.mark.usefixtures("interruptible")
    def test_a_second_ctrl_c_while_it_waits_is_told_once(self, tmp_path: Path) -> None:
        class Interrupting(FaultyEngine):
            signals = 0

            def submit(self, operation: Operation) -> None:
                if self.signals and operation.kind is Kind.READ:
                    self.signals -= 1
                    signal.raise_signal(signal.SIGINT)
                super().submit(operation)

        engine = Interrupting()

        class Interrupted(TieredAdamW):
            parts = Parts(open_engine=lambda *_, **__: engine)

        parameters = seeded(*SHAPES)
        optimizer = made(parameters, tmp_path, make=Interrupted)
        train(optimizer, parameters, range(2))
        optimizer.store.wait()
        save = optimizer.save_checkpoint(tmp_path / "saved", wait=False)
        engine.signals = 2
        with pytest.raises(KeyboardInterrupt):
            save.wait()
        train(optimizer, parameters, range(2, 3))
        with pytest.raises(CheckpointError, match=r"broken off before all was copied \(KeyboardInterrupt\)"):
            save.wait()  # who asks again is told what became of it
        with pytest.raises(NoCheckpointError):
            optimizer.load_checkpoint(tmp_path / "saved")
        optimizer.save_checkpoint(tmp_path / "saved")
        assert loaded_steps(tmp_path / "saved", tmp_path) == 3


@pytest.fixture
def interruptible() -> Any:
    """SIGINT as a user has it: a runner in the background may have left it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def loaded_steps(path: Path, folder: Path) -> float:
    """The step count in a checkpoint."""
    optimizer = made(seeded(*SHAPES), folder, "cpu")
    optimizer.load_checkpoint(path)
    return float(optimizer.state_dict()["state"][0]["step"])
