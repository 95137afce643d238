"""Daemon threads that carry jobs, each one at a time, in the order they come.

It knows at any moment which thread is at which job, so that a thread that dies loses none: its job is told, the other
threads go on, and when the last one is gone all that waits, and all that comes, is told too. No process waits for these
threads when it ends, and `close` does not wait for one whose job does not come back.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")

_log = logging.getLogger("tierstore.io")


class Crew(Generic[Job]):
    """`carry(job)` is called on one of the threads; `lose(job, error)` where the job cannot be carried to its end."""

    def __init__(
        self, carry: Callable[[Job], None], lose: Callable[[Job, BaseException], None], workers: int, name: str
    ) -> None:
        self._carry = carry
        self._lose = lose
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each job: much cheaper than a condition
        self._carried: dict[threading.Thread, Job] = {}
        self._death: BaseException | None = None  # of the last worker
        self._must_end = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(workers)
        ]
        self._workers = list(self._threads)  # those that have not died
        for worker in self._threads:
            worker.start()

    def put(self, job: Job) -> None:
        """Take a job; it comes to `carry`, or at once to `lose` if nobody is left to carry it."""
        with self._lock:
            death = RuntimeError("the workers were told to end") if self._must_end else self._death
            if death is None:
                self._waiting.append(job)
        if death is None:
            self._news.put(None)
        else:
            self._lose(job, death)

    def carried(self) -> list[Job | None]:
        """What each worker is at; None for one that waits for a job."""
        with self._lock:
            return [self._carried.get(worker) for worker in self._workers]

    def close(self, *, leave: Callable[[Job], bool]) -> None:
        """Carry what waits, and end; a worker whose job is to be left ends by itself, if ever."""
        with self._lock:
            self._must_end = True
            carried = {worker: job for worker, job in self._carried.items() if worker in self._workers}
        for _ in self._threads:
            self._news.put(None)  # whoever gets one when nothing waits any more ends
        staying = [worker for worker, job in carried.items() if leave(job)]
        for worker in self._threads:
            if worker not in staying:
                worker.join()

    def _work(self) -> None:
        try:
            while self._carry_next():
                pass
        except BaseException as error:
            self._die(error)

    def _carry_next(self) -> bool:
        """Carry a job; False when there will be no more. An idle worker keeps no job, nor memory of a caller's."""
        worker = threading.current_thread()
        self._carried.pop(worker, None)
        self._news.get()
        with self._lock:
            if not self._waiting:
                return not self._must_end
            job = self._carried[worker] = self._waiting[0]
            self._waiting.popleft()
        self._carry(job)
        return True

    def _die(self, error: BaseException) -> None:
        """Hear that this worker cannot go on."""
        worker = threading.current_thread()
        with self._lock:
            self._workers.remove(worker)
            job = self._carried.pop(worker, None)
            lost = [] if job is None or (self._waiting and self._waiting[0] is job) else [job]
            if not self._workers:
                self._death = error
                lost += self._waiting
                self._waiting.clear()
            left = len(self._workers)
        self._news.put(None)  # this one may have got one, and carried nothing
        _log.error("the worker %s died, %d of its lane are left", worker.name, left, exc_info=error)
        for one in lost:
            self._lose(one, error)
