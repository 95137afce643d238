"""What every tiered optimizer can do with checkpoints: save one, wait for it, load one."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tierstore.checkpoint.opening import open_checkpoint
from tierstore.checkpoint.writer import Writer
from tierstore.held import Held
from tierstore.loading import Load
from tierstore.ranks import Ranks, agree
from tierstore.results import Results
from tierstore.rules import Rule
from tierstore.saving import Compression, Content, IfBusy, OpenWriter, Save, begin
from tierstore.sources import Source
from tierstore.together import begin_together

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
        process_group: ProcessGroup | None = None,
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

        Where parameters are sharded over ranks (FSDP2, tensor parallel), or with a `process_group`, all ranks of it (of
        the default group) call this with one path, and write one checkpoint together, each its own parts; of what is
        not sharded, rank 0's. Parameters that have other values or step counts elsewhere are a CheckpointValueError;
        moments are not compared, nor a model's buffers. With `wait=False` it is there once all ranks have waited, or
        begun the next save, or closed the optimizer with no error on its way. An error on one rank is raised on all, as
        RanksError.

        Raises CheckpointError for what cannot be stored or written, FailedStepError after a step that broke off.
        """
        ranks = self._ranks(model, process_group)
        options: Any = {"compression": compression, "keep_last": keep_last, "open_writer": self.open_writer}
        with self._held.alone():
            if ranks is not None and self._held.save is not None and self._held.save.is_shared:
                self._held.end_save(if_busy)  # all ranks come here, and hear the same
            content = agree(ranks, lambda: self._content(model, extra, if_busy))
            if ranks is None:
                save = begin(path, content, self._held.alone, **options, kind=Save)
            else:
                save = begin_together(ranks, path, content, self._held.alone, **options)
            self._held.save = save
            if wait:
                save.wait()
            return save

    def _content(self, model: torch.nn.Module | None, extra: object, if_busy: IfBusy) -> Content:
        """What there is to be saved, with all state in its binding."""
        self._held.refuse_if_closed()
        self._held.end_save(if_busy)
        self._held.refuse_to_save()
        binding = None
        if self._held.has_state():
            binding, handed = self._held.bound_inside(self.param_groups)
            handed.absorb()
        return Content.of(self.param_groups, self.rule, binding, model, extra)

    def _ranks(self, model: torch.nn.Module | None, process_group: ProcessGroup | None) -> Ranks | None:
        """The ranks that save or load together with this one."""
        own = (parameter for group in self.param_groups for parameter in group["params"])
        of_model = () if model is None else chain(model.parameters(), model.buffers())
        return Ranks.of(chain(own, of_model), process_group)

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that was begun last is complete and on the disk. Raises its error.

        Of one that ranks write together, all of them call this.
        """
        if self._held.save is not None:
            self._held.save.wait()

    def load_checkpoint(
        self,
        path: Path,
        model: torch.nn.Module | None = None,
        *,
        params: str | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Any:
        """Load what `save_checkpoint` saved, into whatever tiers, chunks and dtypes of state this optimizer has; return
        its `extra`.

        Parameters are found by name where they have names here (`named_parameters()`, or `model`'s) and there, else by
        place. `params`: load only parameters, with their state and weights, whose names match a pattern (fnmatch), and
        no options. `path` may be a file of `torch.save(optimizer.state_dict())` too.

        Into parameters that are sharded, or with a `process_group`, all ranks load together, whatever number of ranks
        has saved: each reads what it needs, and gets the `extra` that the rank of its number kept (rank 0's, if there
        was none). None changes anything unless all can load.

        Raises StateDictError, with nothing changed, for another model's or algorithm's; CheckpointError for what cannot
        be read. If that is found half-way, steps are refused until a load has succeeded.
        """
        self._give_up_backward_and_wait()
        ranks = self._ranks(model, process_group)
        with self._held.alone(), ExitStack() as reading:

            def check() -> tuple[Load, Any]:
                reader = open_checkpoint(path)
                reading.enter_context(reader)
                self._held.refuse_if_closed()
                source = Source(reader, Results.under(self._held.policy))
                load = Load(source, self.param_groups, self.rule, model, params)
                return load, reader.extra(0 if ranks is None else ranks.rank)

            load, extra = agree(ranks, check)
            agree(ranks, lambda: load.into(self, self._held))
            return extra
