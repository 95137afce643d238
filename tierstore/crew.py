"""Threads that can be started, and daemon threads that carry jobs, each one at a time, in the order they come.

A crew knows at any moment which thread is at which job, so that a thread that dies loses none: its job is told, the
other threads go on, and when the last one is gone all that waits, and all that comes, is told too. Where the system has
fewer threads to give, fewer do the same; where it has none, that is known before any job is taken. No process waits for
these threads when it ends, and `close` does not wait for one whose job does not come back.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Generic, TypeVar

from tierstore.errors import NoThreadError
from tierstore.signals import deferred

Job = TypeVar("Job")

_log = logging.getLogger("tierstore.crew")


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises NoThreadError, with the ways out, if there is none to be had."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(
            f"the thread {thread.name!r} could not be started ({error}): raise the limit on processes and threads "
            f"(ulimit -u, the container's pids limit) or on address space (ulimit -v), or end other threads"
        ) from error


class Crew(Generic[Job]):
    """`carry(job)` is called on one of the threads; `lose(job, error)` where the job cannot be carried to its end.

    There are none until it is told to `grow`. Each calls `begin` first.
    """

    def __init__(
        self,
        carry: Callable[[Job], None],
        lose: Callable[[Job, BaseException], None],
        name: str,
        *,
        begin: Callable[[], object] | None = None,
    ) -> None:
        self._carry = carry
        self._lose = lose
        self._name = name
        self._begin = begin
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each job: much cheaper than a condition
        self._carried: dict[threading.Thread, Job] = {}
        self._death: BaseException | None = None  # of the last worker
        self._must_end = False
        self._is_short = False  # there were not as many threads to be had as were asked for
        self._threads: list[threading.Thread] = []
        self._workers: list[threading.Thread] = []  # those that have not died

    def grow(self, workers: int) -> None:
        """Have so many threads, or, with a warning, as many as can be started. Raises NoThreadError if that is none."""
        if len(self._threads) >= workers or self._is_short:
            return
        with deferred(), self._lock:  # Ctrl-C leaves no thread that `close` does not know
            while len(self._threads) < workers and not self._is_short and not self._must_end:
                worker = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
                try:
                    start(worker)
                except NoThreadError as error:
                    if not self._threads:
                        raise
                    self._is_short = True
                    _log.warning("%s goes on with %d threads of %d: %s", self._name, len(self._threads), workers, error)
                else:
                    self._threads.append(worker)
                    self._workers.append(worker)

    def put(self, job: Job) -> None:
        """Take a job; it comes to `carry`, or at once to `lose` if nobody is left to carry it. For a crew of some."""
        with self._lock:
            death = RuntimeError("the workers were told to end") if self._must_end else self._death
            if death is None:
                self._waiting.append(job)
        if death is None:
            self._news.put(None)
        else:
            self._lose(job, death)

    @property
    def unfinished(self) -> int:
        """How many jobs wait or are carried."""
        with self._lock:  # a job that is being taken is in both
            return len(self._waiting) + len(self._carried)

    def carried(self) -> list[Job | None]:
        """What each worker is at; None for one that waits for a job."""
        with self._lock:
            return [self._carried.get(worker) for worker in self._workers]

    def end(self) -> None:
        """Let the threads end once nothing waits any more, and wait for none. For who knows that no job comes."""
        self._must_end = True  # without the lock, which the thread may hold that the collector runs on
        self._news.put(None)  # each hands it on, also one whose start was interrupted, which nobody knows of

    def close(self, *, leave: Callable[[Job], bool]) -> None:
        """Carry what waits, and end; a worker whose job is to be left ends by itself, if ever."""
        with self._lock:
            self._must_end = True
            carried = {worker: job for worker, job in self._carried.items() if worker in self._workers}
        self.end()
        staying = [worker for worker, job in carried.items() if leave(job)]
        for worker in self._threads:
            if worker not in staying:
                worker.join()

    def _work(self) -> None:
        try:
            if self._begin is not None:
                self._begin()
            while self._carry_next():
                pass
        except BaseException as error:
            self._die(error)

    def _carry_next(self) -> bool:
        """Carry a job; False when there will be no more. An idle worker keeps no job, nor memory of a caller's."""
        worker = threading.current_thread()
        self._carried.pop(worker, None)
        self._news.get()
        if self._must_end:
            self._news.put(None)
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


_Call = tuple[Future[Any], Callable[[], Any]]


class Calls(Executor):
    """Calls on a crew of up to `threads`, which begin when calls would wait for them, or by `grow`, and end with this.

    A process that ends waits for those of the standard library, whose executors, where a thread cannot begin, raise
    that of a call which they have taken, and which is done later all the same, if there is another thread.
    """

    def __init__(self, name: str, threads: int, *, begin: Callable[[], object] | None = None) -> None:
        crew = self._crew = Crew[_Call](_carry_call, _lose_call, name, begin=begin)
        self._threads = threads
        weakref.finalize(self, crew.end).atexit = False  # no thread knows this

    def grow(self) -> None:
        """Have all threads now, or as many as can be started. Raises NoThreadError."""
        self._crew.grow(self._threads)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread call a function; the future has what it returns or raises.

        Raises NoThreadError, with the call not taken, if there is no thread, nor one to be had.
        """
        self._crew.grow(min(self._threads, self._crew.unfinished + 1))
        future: Future[Any] = Future()
        self._crew.put((future, partial(call, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the calls and end the threads."""
        self._crew.close(leave=lambda job: False)


def _carry_call(job: _Call) -> None:
    future, call = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
        del future, job  # which the error's traceback would keep, and the future the error
    else:
        future.set_result(result)


def _lose_call(job: _Call, error: BaseException) -> None:
    future, _ = job
    if future.running():
        future.set_exception(error)
    elif not future.done() or future.cancelled():  # who waits for one that was taken back waits until that is told
        _carry_call((future, partial(_raise, error)))


def _raise(error: BaseException) -> None:
    raise error
