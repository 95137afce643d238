"""What every tiered optimizer can do with checkpoints: save one, wait for it, load one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tierstore.checkpoint.opening import open_checkpoint
from tierstore.checkpoint.writer import Writer
from tierstore.held import Held
from tierstore.loading import Load
from tierstore.results import Results
from tierstore.rules import Rule
from tierstore.saving import Compression, IfBusy, OpenWriter, Save, begin
from tierstore.sources import Source

Path = str | os.PathLike[str]


class Checkpointed:
    """Stands before torch's optimizer in the bases of `TieredOptimizer`, whose other half it is."""

    rule: ClassVar[Rule]
    open_writer: ClassVar[OpenWriter] = Writer
    param_groups: list[dict[str, Any]]
    _held: Held

    if TYPE_CHECKING:

        def _give_up_backward_and_wait(self) -> None: ...

    def save_checkpoint(
        self,
        path: Path,
        model: torch.nn.Module | None = None,
        extra: object = None,
        wait: bool = True,
        *,
        compression: Compression = "none",
        keep_last: int | None = None,
        if_busy: IfBusy = "wait",
    ) -> Save:
        """Save state, options and step counts, weights of `model`, and `extra` at `path`: one checkpoint, in Zarr v3.

        In bounded memory; what stood at `path` stays until the new one is complete and on the disk. `extra` may be made
        of None, numbers, strings, bytes, lists, tuples, dicts, tensors and numpy arrays. `keep_last`: remove all but so
        many of the newest checkpoints of this series, after this one is safe; of one series are those in the folder
        whose names differ in their last number only.

        With `wait=False` it returns once the model is copied; state is copied chunk by chunk before the next step
        changes it, and written while training goes on. With it goes the half of a split master that the parameter is:
        weights changed by hand before that step would be saved as changed, so wait first. A next save waits for it, or
        raises BusyStoreError (`if_busy="error"`). Its errors are raised by the next call of `step` or a save, by
        `wait()` of what is returned, and by `wait_for_checkpoint()`; training goes on. `close()` and the end of the
        program finish it. A disk that hangs for as long as `tiers.nvme.io.timeout` says ends it with an error.

        Raises CheckpointError for what cannot be stored or written, FailedStepError after a step that broke off.
        """
        with self._held.alone():
            self._held.refuse_if_closed()
            self._held.end_save(if_busy)
            self._held.refuse_to_save()
            binding = None
            if self._held.has_state():
                binding, handed = self._held.bound_inside(self.param_groups)
                handed.absorb()
            save = self._held.save = begin(
                path,
                self.param_groups,
                self.rule,
                binding,
                self._held.alone,
                model=model,
                extra=extra,
                compression=compression,
                keep_last=keep_last,
                open_writer=self.open_writer,
            )
            if wait:
                save.wait()
            return save

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that was begun last is complete and on the disk. Raises its error."""
        if self._held.save is not None:
            self._held.save.wait()

    def load_checkpoint(self, path: Path, model: torch.nn.Module | None = None, *, params: str | None = None) -> Any:
        """Load what `save_checkpoint` saved, into whatever tiers, chunks and dtypes of state this optimizer has; return
        its `extra`.

        Parameters are found by name where they have names here (`named_parameters()`, or `model`'s) and there, else by
        place. `params`: load only parameters, with their state and weights, whose names match a pattern (fnmatch), and
        no options. `path` may be a file of `torch.save(optimizer.state_dict())` too.

        Raises StateDictError, with nothing changed, for another model's or algorithm's; CheckpointError for what cannot
        be read. If that is found half-way, steps are refused until a load has succeeded.
        """
        self._give_up_backward_and_wait()
        with self._held.alone(), open_checkpoint(path) as reader:
            self._held.refuse_if_closed()
            source = Source(reader, Results.under(self._held.policy))
            load = Load(source, self.param_groups, self.rule, model, params)
            extra = reader.extra()
            load.into(self, self._held)
            return extra
