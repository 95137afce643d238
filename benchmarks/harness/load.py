"""Work for the processor beside what is measured: the update that a training step runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from benchmarks.harness.rawdevice import Sample
from benchmarks.harness.rounds import median


class Load:
    """torch's fused AdamW on `elements` float32 elements, again and again, on all cores but one."""

    def __init__(self, elements: int) -> None:
        self.threads = max(1, torch.get_num_threads() - 1)
        self._tensors = [torch.full((elements,), 0.5) for _ in range(4)]
        self._kept: list[float] = []

    def beside(self, work: Callable[[], Sample]) -> Sample:
        """Do the work while the update runs."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # threads made from now on take it over
        try:
            alone, _ = self._runs(None)
            beside, sample = self._runs(work)
        finally:
            torch.set_num_threads(before)
        self._kept.append(beside / alone)
        assert sample is not None
        return sample

    def kept(self) -> float:
        """The share of its rate that the update kept; 0.0 if it never ran."""
        return median(self._kept)

    def _runs(self, work: Callable[[], Sample] | None) -> tuple[float, Sample | None]:
        """Answer the update's passes per second until the work, or three passes, are over; and the work's sample."""
        ends: list[float] = [time.perf_counter()]
        is_begun, is_over = threading.Event(), threading.Event()

        def update() -> None:
            while not is_over.is_set() or len(ends) < 4:
                self._pass()
                ends.append(time.perf_counter())
                is_begun.set()

        thread = threading.Thread(target=update)
        thread.start()
        is_begun.wait()
        try:
            sample = work() if work is not None else None
        finally:
            is_over.set()
            thread.join()
        return (len(ends) - 1) / (ends[-1] - ends[0]), sample

    def _pass(self) -> None:
        parameter, gradient, first, second = self._tensors
        torch._fused_adamw_(
            [parameter],
            [gradient],
            [first],
            [second],
            [],
            [torch.tensor(1.0)],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
