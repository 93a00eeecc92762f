"""Seconds of single calls on a CPU, as they are in a step: after other work.

A call that is repeated at once finds its code and its temporary memory in the nearest caches, and may take half of
the time that it takes between the other calls of a step. So between two calls ``cold_bytes`` are touched, and
only the calls are timed.

A thread that may run for a part of the time only (a quota of CPU time) seldom stands still within a short call,
and once or twice within a longer one. So CPU seconds of the thread are counted, times what a CPU second takes over
all of the calls and the work between them. Where PyTorch computes with several threads, one thread's CPU time is
not the call's, and the clock is read.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch

from hetspmd.profile.pages import Sample, page_faults
from hetspmd.profile.profile_thresholds import THRESHOLDS


class SingleCalls:
    """Times calls one by one. ``alone``: whether PyTorch computes with one thread."""

    def __init__(self) -> None:
        self._cold = torch.ones(THRESHOLDS.cold_bytes // 4)
        self.alone = torch.get_num_threads() == 1
        self._clock = thread_time if self.alone else perf_counter
        self._passed, self._used = 0.0, 0.0
        self._empty = 0.0
        self._empty = min(self.sample(_nothing).seconds for _ in range(THRESHOLDS.empty_samples))

    def sample(self, call: Callable[[], object]) -> Sample:
        """One call: the mean over as many as take ``sample_seconds`` with the work between them."""
        cold, clock = self._cold, self._clock
        faults = page_faults()
        began, used, taken, calls = perf_counter(), thread_time(), 0.0, 0
        while calls == 0 or perf_counter() - began < THRESHOLDS.sample_seconds:
            cold.add_(1.0)
            start = clock()
            call()
            taken += clock() - start
            calls += 1
        self._passed = THRESHOLDS.past_weight * self._passed + perf_counter() - began
        self._used = THRESHOLDS.past_weight * self._used + thread_time() - used
        pace = max(self._passed / max(self._used, 1e-9), 1.0) if self.alone else 1.0
        seconds = max(pace * taken / calls - self._empty, 1e-9)
        return Sample(seconds, (page_faults() - faults) / calls)


def _nothing() -> None:
    """A call that takes no time but its timing."""
