"""Keeps the CPUs busy while ranks are held to their shares, so that a rank runs no faster when the others wait.

Two CPUs of a machine are often two threads of one core, and share its arithmetic units and its clock: a product
of matrices takes 1.2 to 1.3 times as long when the other thread computes as well. Devices of a cluster share
nothing of the kind. So that a rank's op takes the same time whatever the others do (alone, in turns, all at once),
a process of the lowest priority (``SCHED_IDLE``) computes on every CPU whenever no rank wants it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable

from emulated.child import end_with, environment

SIDE = 96
"""Of the matrices, which stay in the nearest caches: what is shared by others is theirs."""


class Ballast:
    """A process on each of ``cpus``, at rest until :meth:`press`; ended with its parent, or by :meth:`end`."""

    def __init__(self, cpus: Iterable[int]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "emulated.ballast", str(cpu), str(os.getpid())], env=environment()
            )
            for cpu in cpus
        ]
        self._pressed = True
        self.press(False)

    def press(self, on: bool) -> None:
        """Keep the CPUs busy from now on, or leave them alone."""
        if on != self._pressed:
            self._pressed = on
            for process in self._processes:
                process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def main(cpu: int, parent: int) -> None:
    """Compute for ever."""
    end_with(parent)
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    import numpy as np

    left, right = np.full((2, SIDE, SIDE), 0.5, dtype=np.float32)
    product = np.empty_like(left)
    while True:
        np.matmul(left, right, out=product)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
