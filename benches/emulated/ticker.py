"""Keeps quotas of CPU time exact on kernels whose clock ticks seldom, and tells how fast the CPUs are.

Linux looks whether a thread has used up its group's quota when something is scheduled on its CPU, at the latest at
the clock's next tick: every 4 ms where it ticks at 250 Hz. A rank that may run for 1 ms of 7 then runs for 4 ms
and stands still for 23, and whoever waits for it at a collective does as well. A process that wakes up on the CPU
every :data:`INTERVAL` makes the kernel look as often: measured at 250 Hz, the median pause of a rank of 0.15 cores
falls from 17 to 5.5 ms, which is what its quota is for. It costs 7 % of a core.

A machine that is itself shared changes its speed by a quarter within minutes. Every :data:`EVERY`-th time the
process times a few products of small matrices, by which :class:`emulated.cluster.EmulatedCluster` corrects the
ranks' shares, so that a rank's speed is that of a device and not that of the hour.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean

from emulated.child import end_with, environment

INTERVAL = 0.0005
"""Seconds."""
EVERY = 40
SIDE, PRODUCTS = 96, 4
"""The products that are timed, and as many before them, which bring the matrices into the nearest caches."""
MEMORY = 128
"""Timed rounds that count: 3 seconds, whose mean speed is what a rank's ops have. Not their median: where two CPUs
are threads of one core, rounds are of two kinds, and the median jumps from one to the other. Not the mean seconds:
a round in which the machine stood still would weigh more than it does in what a rank computes meanwhile."""
LEAST = 20
"""Rounds, half a second, from which a speed is known."""
MEASURED, LATEST = 3.0, 30.0
"""Seconds that :meth:`Tickers.measured` takes, and within which it must have begun."""
MOST = 2.0
"""No share is made larger or smaller by more."""

_SET_TIMER_SLACK = 29
"""Of prctl."""
_ROOM = 8 * (1 + MEMORY)
"""Bytes: the number of rounds, and the seconds of the last ones."""


@dataclass
class _Ticker:
    """The process of a CPU, and what it writes its rounds to."""

    process: subprocess.Popen[bytes]
    shared: mmap.mmap
    since: int = 0
    """Rounds before this one do not count."""

    @property
    def speed(self) -> float | None:
        """Rounds in a second; None before there are enough."""
        rounds, *seconds = array("d", self.shared[:])
        last = range(max(self.since, int(rounds) - MEMORY), int(rounds))
        return fmean(1 / seconds[i % MEMORY] for i in last) if len(last) >= LEAST else None

    def forget(self) -> None:
        """Count rounds from now on."""
        self.since = int(array("d", self.shared[:8])[0])


class Tickers:
    """A process per CPU that wakes up on it until :meth:`end`, or until its parent ends.

    ``pace``: rounds in a second on the core that shares are parts of.
    """

    pace: float | None = None

    def __init__(self, cpus: Iterable[int]) -> None:
        self._tickers: dict[int, _Ticker] = {}
        for cpu in cpus:
            file = os.memfd_create("hetspmd-ticker")
            os.truncate(file, _ROOM)
            command = [sys.executable, "-m", "emulated.ticker", str(cpu), str(os.getpid()), str(file)]
            process = subprocess.Popen(command, env=environment(), pass_fds=[file])
            self._tickers[cpu] = _Ticker(process, mmap.mmap(file, _ROOM))
            os.close(file)
        self._corrections: dict[frozenset[int], float] = {}

    def forget(self) -> None:
        """Count what is measured from now on: what runs on the CPUs changes, and with it how fast they are."""
        for ticker in self._tickers.values():
            ticker.forget()

    def speeds(self, cpus: Collection[int] | None = None) -> list[float]:
        """Rounds in a second, lately, on those of ``cpus`` of which it is known."""
        found = (t.speed for cpu, t in self._tickers.items() if cpus is None or cpu in cpus)
        return [speed for speed in found if speed is not None]

    def measured(self) -> float:
        """The mean speed of the CPUs now. Raises TimeoutError if they do not get to it."""
        deadline = time.monotonic() + LATEST
        while len(self.speeds()) < len(self._tickers):
            if time.monotonic() > deadline:
                raise TimeoutError("the machine's CPUs are too busy to measure how fast they are")
            time.sleep(0.05)
        time.sleep(MEASURED)
        return fmean(self.speeds())

    def correction(self, cpus: Collection[int]) -> float:
        """By what a share of these CPUs is to be multiplied so that it computes what it would at the pace; the last
        one that was known, until there is another."""
        known = self.speeds(cpus)
        if self.pace is not None and known:
            self._corrections[frozenset(cpus)] = min(max(self.pace / fmean(known), 1 / MOST), MOST)
        return self._corrections.get(frozenset(cpus), 1.0)

    def end(self) -> None:
        """End the processes."""
        for ticker in self._tickers.values():
            ticker.process.kill()
        for ticker in self._tickers.values():
            ticker.process.wait()
            ticker.shared.close()


def main(cpu: int, parent: int, file: int) -> None:
    """Wake up for ever."""
    end_with(parent)
    os.sched_setaffinity(0, {cpu})
    import numpy as np

    shared = memoryview(mmap.mmap(file, _ROOM)).cast("d")
    left, right = np.full((2, SIDE, SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(left)
    np.matmul(left, right, out=product)
    ctypes.CDLL(None, use_errno=True).prctl(_SET_TIMER_SLACK, 1)
    with contextlib.suppress(PermissionError):  # then it comes no later than others do
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sleep, clock, times = time.sleep, time.perf_counter, range(PRODUCTS)
    rounds = 0
    while True:
        for _ in range(EVERY):
            sleep(INTERVAL)
        for _ in times:
            np.matmul(left, right, out=product)
        start = clock()
        for _ in times:
            np.matmul(left, right, out=product)
        shared[1 + rounds % MEMORY] = clock() - start
        rounds += 1
        shared[0] = rounds


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
