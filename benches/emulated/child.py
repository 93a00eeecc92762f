"""Helper processes of an emulated cluster: they end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1
"""Of prctl."""


def environment() -> dict[str, str]:
    """That of a process that finds this package and computes with one thread."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip


def end_with(parent: int) -> None:
    """End this process when ``parent`` does, or now if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
