"""Whether a rank's process is there: known for processes of this machine, from ``/proc``.

A process is its id and start time, in a process-id namespace of a boot of a machine; for any other the answer is
that it is not known. Elsewhere than on Linux nothing is known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["runs", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class Process:
    """``machine`` is the boot and the namespace ("" where there is no ``/proc``), ``started`` in clock ticks."""

    machine: str
    pid: int
    started: str


def this_process() -> Process:
    """The process that calls this."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return Process(machine, pid, _stat(pid)[1])
    except (OSError, IndexError):
        return Process("", pid, "")


def state_of(process: Process, here: Process) -> State:
    """What ``process`` does, seen from the process ``here``."""
    if not here.machine or process.machine != here.machine:
        return "unknown"
    try:
        state, started = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    except (OSError, IndexError):
        return "unknown"
    if started != process.started or state in "ZXx":
        return "gone"
    return "stopped" if state in "Tt" else "runs"


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time (fields 3 and 22 of ``/proc/PID/stat``; the second may hold anything)."""
    fields = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    )
    return fields[0], fields[19]
