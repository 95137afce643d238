"""Repeats file operations that failed in a way that may pass, on the thread they ended; a ticket hears of the last.

So a transfer that follows never notices, and what reaches the ledger as a failure is one that persists. What cannot
succeed the next time either (a descriptor that is closed, a request that is malformed, a disk that is read-only or
gone, bytes that twice were not those written) is not repeated, and neither is what was given up: it may still be at it.
"""

from __future__ import annotations

import errno
import logging

from tierstore.errors import ChecksumError, TransferError, TransferTimeoutError
from tierstore.io import Engine, Operation

RETRIES = 2
"""How often an operation is submitted again before its failure counts."""

_MAY_PASS = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.ENOBUFS, errno.EBUSY),
    *(errno.EREMOTEIO, errno.ECOMM),
}

_log = logging.getLogger("tierstore.retries")


class Retries:
    """Submits operations to an engine, and again as often as that is worth it. `count` is of those submitted again."""

    def __init__(self, io: Engine) -> None:
        self.count = 0  # only to be looked at: threads may count at once
        self._io = io
        self._told: set[str] = set()

    def submit(self, operation: Operation) -> None:
        """Begin an operation; its `done` hears of the first success, or of the last failure. Raises as an engine."""
        self._submit(operation, RETRIES)

    def _submit(self, operation: Operation, left: int) -> None:
        def done(error: TransferError | None) -> None:
            if error is None or not left or not may_pass(error):
                operation.done(error)
                return
            self._tell(operation, error)
            try:
                self._submit(operation, left - 1)
            except Exception as refused:  # the engine is closing, say; somebody waits for `done`
                error.add_note(f"not tried again: {refused}")
                operation.done(error)

        self._io.submit(operation._replace(done=done))

    def _tell(self, operation: Operation, error: TransferError) -> None:
        self.count += 1
        if operation.path not in self._told:
            self._told.add(operation.path)
            _log.warning("trying again, and so from now on without a word for %s: %s", operation.path, error)


def may_pass(error: TransferError) -> bool:
    """Whether an operation that failed so may succeed when it is submitted again."""
    return error.errno in _MAY_PASS and not isinstance(error, TransferTimeoutError | ChecksumError)
