"""Keeps quotas of CPU time exact on kernels whose clock ticks seldom, and tells how fast the CPUs are.

Linux looks whether a thread has used up its group's quota when something is scheduled on its CPU, at the latest at
the clock's next tick: every 4 ms where it ticks at 250 Hz. A rank that may run for 1 ms of 7 then runs for 4 ms
and stands still for 23, and whoever waits for it at a collective does as well. A process that wakes up on the CPU
every :data:`INTERVAL` makes the kernel look as often: measured at 250 Hz, the median pause of a rank of 0.15 cores
falls from 17 to 5.5 ms, which is what its quota is for. It costs 7 % of a core.

A machine that is itself shared changes its speed by a third within minutes. Every :data:`EVERY`-th time the process
times a few products of small matrices, by which :class:`emulated.cluster.EmulatedCluster` corrects the ranks'
shares, so that a rank's speed is that of a device and not that of the hour.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import fmean

from emulated.child import end_with, environment

INTERVAL = 0.0005
"""Seconds."""
EVERY = 40
SIDE, PRODUCTS = 96, 4
"""The products that are timed, and as many before them, which bring the matrices into the nearest caches."""
SAMPLE, MEMORY = 10, 200
"""Timed rounds that are looked at together, and over which they are averaged: 4 seconds."""
MEASURED, LATEST = 1.5, 30.0
"""Seconds that :meth:`Tickers.measured` takes, and within which it must have begun."""
MOST = 2.0
"""No share is made larger or smaller by more."""

_SET_TIMER_SLACK = 29
"""Of prctl."""
_COUNT = struct.Struct("dd")


@dataclass
class _Ticker:
    """The process of a CPU, what it writes its rounds and their seconds to, and what was last read there."""

    process: subprocess.Popen[bytes]
    shared: mmap.mmap
    rounds: float = 0.0
    seconds: float = 0.0
    speed: float | None = None

    def look(self) -> None:
        rounds, seconds = _COUNT.unpack_from(self.shared)
        passed = rounds - self.rounds
        if passed < SAMPLE:
            return
        now, weight = passed / (seconds - self.seconds), min(1.0, passed / MEMORY)
        self.speed = now if self.speed is None else 1 / ((1 - weight) / self.speed + weight / now)
        self.rounds, self.seconds = rounds, seconds


class Tickers:
    """A process per CPU that wakes up on it until :meth:`end`, or until its parent ends.

    ``pace``: rounds in a second on the core that shares are parts of.
    """

    pace: float | None = None

    def __init__(self, cpus: Iterable[int]) -> None:
        self._tickers: dict[int, _Ticker] = {}
        for cpu in cpus:
            file = os.memfd_create("hetspmd-ticker")
            os.truncate(file, _COUNT.size)
            command = [sys.executable, "-m", "emulated.ticker", str(cpu), str(os.getpid()), str(file)]
            process = subprocess.Popen(command, env=environment(), pass_fds=[file])
            self._tickers[cpu] = _Ticker(process, mmap.mmap(file, _COUNT.size))
            os.close(file)

    def speeds(self, cpus: Collection[int] | None = None) -> list[float]:
        """Rounds in a second, lately, on those of ``cpus`` of which it is known. To be asked often."""
        for ticker in self._tickers.values():
            ticker.look()
        return [t.speed for cpu, t in self._tickers.items() if (cpus is None or cpu in cpus) and t.speed]

    def measured(self) -> float:
        """The mean speed of the CPUs now. Raises TimeoutError if they do not get to it."""
        deadline = time.monotonic() + LATEST
        while len(self.speeds()) < len(self._tickers):
            if time.monotonic() > deadline:
                raise TimeoutError("the machine's CPUs are too busy to measure how fast they are")
            time.sleep(0.05)
        end = time.monotonic() + MEASURED
        while time.monotonic() < end:
            time.sleep(0.05)
            self.speeds()
        return fmean(self.speeds())

    def correction(self, cpus: Collection[int]) -> float:
        """By what a share of these CPUs is to be multiplied so that it computes what it would at the pace."""
        known = self.speeds(cpus)
        if self.pace is None or not known:
            return 1.0
        return min(max(self.pace / fmean(known), 1 / MOST), MOST)

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

    shared = mmap.mmap(file, _COUNT.size)
    left, right = np.full((2, SIDE, SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(left)
    np.matmul(left, right, out=product)
    ctypes.CDLL(None, use_errno=True).prctl(_SET_TIMER_SLACK, 1)
    with contextlib.suppress(PermissionError):  # then it comes no later than others do
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sleep, clock, times = time.sleep, time.perf_counter, range(PRODUCTS)
    rounds = seconds = 0.0
    while True:
        for _ in range(EVERY):
            sleep(INTERVAL)
        for _ in times:
            np.matmul(left, right, out=product)
        start = clock()
        for _ in times:
            np.matmul(left, right, out=product)
        seconds += clock() - start
        rounds += 1
        _COUNT.pack_into(shared, 0, rounds, seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
