"""Every error the library raises on purpose. Nothing else is raised for a condition a user can meet.

TierstoreError
+-- PolicyError (ValueError)            a setting is wrong: names the file, the key's path, what was found
+-- StateDictError (ValueError)         state to be loaded does not fit these parameters
+-- CapacityError (RuntimeError)        a tier has too little room: names the numbers and the setting to raise
+-- SwapError (OSError)                 a swap folder or file cannot be used; `errno` and `filename` are set
|   +-- DiskFullError                   the bytes to reserve are not free; the disk is left as it was
|   +-- TransferError                   a read or a write of a chunk failed, its source is still valid
|       +-- TransferTimeoutError        it is given up after io.timeout: what it may still write to is quarantined
|       +-- TransferNotBegunError       nobody was left to carry it, as all that could hangs: nothing was touched
|       +-- ChecksumError               twice other bytes were read than had been written (io.checksum)
+-- TransferCancelledError              a transfer never began, because one it had to follow failed
+-- AlignmentError (ValueError)         a direct request whose address, offset or length is not a multiple of 4096
+-- EngineUnavailableError (ImportError)  the engine asked for cannot run on this machine
+-- NoThreadError (RuntimeError)        a thread could not be started: names it, and the limits to raise
+-- StoreClosedError (RuntimeError)     use after close()
|   +-- ForkedStoreError                use in a child process of the one that made the store
+-- BusyStoreError (RuntimeError)       use in the middle of a run, on the thread that runs
|   +-- WrongThreadError                use from a second thread while the first one is inside
+-- FailedStepError (RuntimeError)      a step broke off half-way; the store refuses more until state is loaded
+-- LeaseError (RuntimeError)           a chunk that is leased would have to move, or a lease was misused
+-- CheckpointError                     the root of what goes wrong with a checkpoint
|   +-- CheckpointFileError (OSError)   a file or folder of one cannot be read or written; `errno`, `filename` are set
|   |   +-- NoCheckpointError (FileNotFoundError)  there is none at the path
|   +-- DamagedCheckpointError (ValueError)  what is stored contradicts itself or its checksums; none of it is believed
|   |   +-- IncompleteCheckpointError   one that was never finished
|   +-- CheckpointValueError (ValueError)  what was given to be saved cannot be stored: names the key's path
|   +-- RanksError (RuntimeError)       of the ranks that save or load together one has failed, or does not answer
+-- InvariantError (AssertionError)     store.check() found the store inconsistent: a fault of tierstore's own

PartialStateWarning (UserWarning)       not an error: a partial state dict, and what it lacks
"""

from __future__ import annotations

from collections.abc import Mapping


class TierstoreError(Exception):
    """The root of every error raised by tierstore."""


class PolicyError(TierstoreError, ValueError):
    """A policy names an unknown key or tier, or a value outside what is allowed."""


class StateDictError(TierstoreError, ValueError):
    """Optimizer state that was to be loaded does not fit the parameters; nothing was changed."""


class CapacityError(TierstoreError, RuntimeError):
    """A tier has fewer extents than are needed; raised before any byte moves."""


class SwapError(TierstoreError, OSError):
    """A swap folder or swap file cannot be used."""


class DiskFullError(SwapError):
    """The swap space asked for is not free; whatever had been reserved was given back."""


class TransferError(SwapError):
    """Bytes could not be read or written; the copy they came from is still the valid one."""


class TransferTimeoutError(TransferError):
    """A transfer was given up because nothing was heard of it for `io.timeout`; it may come back late."""


class TransferNotBegunError(TransferError):
    """A transfer was not begun because everything that could carry it is at requests that do not come back."""


class ChecksumError(TransferError):
    """What was read, twice, is not what had been written; the copy that it was read from is damaged."""


class PartialStateWarning(UserWarning):
    """A state dict lacks parameters whose state cannot be read: `missing` says which, by name, and why."""

    def __init__(self, missing: Mapping[str, str]) -> None:
        shown = "; ".join(f"{name}: {why}" for name, why in list(missing.items())[:8])
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        super().__init__(
            f"tierstore: this state dict is without the state of {len(missing)} parameters that cannot be read: "
            f"{shown}{more}. Loaded as it is, they begin anew; take them from an older checkpoint"
        )
        self.missing = dict(missing)


class TransferCancelledError(TierstoreError):
    """A transfer never began because one that it had to follow failed."""


class AlignmentError(TierstoreError, ValueError):
    """A request to a file opened with O_DIRECT is not aligned to 4096 bytes."""


class EngineUnavailableError(TierstoreError, ImportError):
    """The I/O engine asked for is not installed or cannot run here."""


class NoThreadError(TierstoreError, RuntimeError):
    """A thread that is needed could not be started, as under a limit on processes or on address space."""


class StoreClosedError(TierstoreError, RuntimeError):
    """The store has been closed."""


class ForkedStoreError(StoreClosedError):
    """The store belongs to the parent of this process."""


class BusyStoreError(TierstoreError, RuntimeError):
    """The store was called while it was in the middle of something."""


class WrongThreadError(BusyStoreError):
    """A second thread called the store while another one was inside."""


class FailedStepError(TierstoreError, RuntimeError):
    """An earlier step broke off half-way, so parameters and state no longer belong to one step."""


class LeaseError(TierstoreError, RuntimeError):
    """A leased chunk was asked to move, or a lease was used outside its rules."""


class CheckpointError(TierstoreError):
    """Something is wrong with a checkpoint."""


class CheckpointFileError(CheckpointError, OSError):
    """A file or folder of a checkpoint cannot be read or written."""


class NoCheckpointError(CheckpointFileError, FileNotFoundError):
    """There is no checkpoint at the path."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """What a checkpoint holds contradicts itself, its checksums or the format; found before it is believed."""


class IncompleteCheckpointError(DamagedCheckpointError):
    """A checkpoint was never finished, as whoever wrote it was ended before; or a part of it is gone."""


class CheckpointValueError(CheckpointError, ValueError):
    """What was given to be saved cannot be stored, or is not what was announced."""


class RanksError(CheckpointError, RuntimeError):
    """Ranks that save or load one checkpoint together could not do it all; raised on each of them."""


class InvariantError(TierstoreError, AssertionError):
    """The store's own records contradict each other."""


def text_of(error: BaseException) -> str:
    """What an error says; its class where it says nothing, as Ctrl-C does."""
    return str(error) or type(error).__name__
