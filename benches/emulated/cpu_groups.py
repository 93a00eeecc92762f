"""CPU shares by control groups, of version 1 (the ``cpu`` hierarchy) or 2 (the unified one).

A group with a share of c cores may run for ``c * period`` of every period. A period is :data:`PERIOD`, or longer
where ``c * period`` would fall below the :data:`LEAST_QUOTA` that Linux accepts.

The kernel looks seldom whether a quota is used up; :mod:`emulated.ticker` makes it look more often. It hands a
group's quota to CPUs in slices that may be all of it, so that a thread which wakes on another CPU would wait for
the next period though the group has hardly run. Each rank is therefore kept on one CPU (:func:`placement`).
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PERIOD = 2_000
"""Microseconds; Linux's default of 100 ms would stop a rank for most of a step."""

LEAST_QUOTA = 1_000
"""Microseconds; Linux refuses less."""

_V1 = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"))
_V2 = Path("/sys/fs/cgroup")


def quota(share: float) -> tuple[int, int]:
    """``(quota, period)`` in microseconds for a share in cores."""
    period = max(PERIOD, math.ceil(LEAST_QUOTA / share))
    return max(LEAST_QUOTA, round(share * period)), period


def placement(shares: Sequence[float], cpus: Sequence[int]) -> list[frozenset[int]]:
    """The CPUs of each rank: the largest share first, on the CPU with least to do; all for a share above 1."""
    load = dict.fromkeys(cpus, 0.0)
    found: dict[int, frozenset[int]] = {}
    for rank in sorted(range(len(shares)), key=lambda r: (-shares[r], r)):
        if shares[rank] > 1:
            found[rank] = frozenset(cpus)
            continue
        cpu = min(cpus, key=lambda c: (load[c], c))
        load[cpu] += shares[rank]
        found[rank] = frozenset([cpu])
    return [found[rank] for rank in range(len(shares))]


@dataclass(frozen=True)
class CpuGroups:
    """The groups below ``root``; a group is named by its path from there."""

    root: Path
    version: int

    @classmethod
    def find(cls) -> CpuGroups | None:
        """The hierarchy with the cpu controller, None if there is none."""
        for root in _V1:
            if (root / "cpu.cfs_quota_us").exists() or (root / "cgroup.procs").exists():
                return cls(root, 1)
        controllers = _V2 / "cgroup.controllers"
        if controllers.exists() and "cpu" in controllers.read_text(encoding="ascii").split():
            return cls(_V2, 2)
        return None

    def make(self, group: str) -> None:
        """Make a group, and those above it; without a limit. Raises OSError."""
        path = self.root
        for part in Path(group).parts:
            if self.version == 2:
                (path / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
            path = path / part
            path.mkdir(exist_ok=True)
        if self.version == 2 and len(Path(group).parts) > 1:  # a process's threads may be in several of these
            (path / "cgroup.type").write_text("threaded", encoding="ascii")

    def limit(self, group: str, share: float | None) -> None:
        """Let the group have ``share`` cores from now on (None: no limit). Raises OSError.

        A limit is never lifted to change it. On Linux 6.18 ranks of 0.08 cores whose limits were lifted and set
        again five times a second had 0.2 to 0.4 cores for seconds at a time; those that were only set kept to 0.08.
        """
        path = self.root / group
        budget, period = (None, PERIOD) if share is None else quota(share)
        if self.version == 2:
            text = f"{'max' if budget is None else budget} {period}"
            (path / "cpu.max").write_text(text, encoding="ascii")
            return
        if budget is not None:
            (path / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
        (path / "cpu.cfs_quota_us").write_text(str(-1 if budget is None else budget), encoding="ascii")

    def prefer(self, group: str, on: bool) -> None:
        """Let the group come before everything else that wants the CPU (within its limits), or not."""
        if self.version == 2:
            (self.root / group / "cpu.weight").write_text("10000" if on else "100", encoding="ascii")
        else:
            (self.root / group / "cpu.shares").write_text("262144" if on else "1024", encoding="ascii")

    def join(self, group: str, pid: int) -> None:
        """Move a process into the group. Raises OSError."""
        (self.root / group / "cgroup.procs").write_text(str(pid), encoding="ascii")

    def join_thread(self, group: str, thread: int) -> None:
        """Move one thread of a process that is in a group beside this one. Raises OSError."""
        name = "cgroup.threads" if self.version == 2 else "tasks"
        (self.root / group / name).write_text(str(thread), encoding="ascii")

    def names(self, prefix: str) -> list[str]:
        """Groups directly below the root whose name starts with ``prefix``."""
        return sorted(p.name for p in self.root.glob(f"{prefix}*") if p.is_dir())

    def remove(self, group: str) -> None:
        """Kill what still runs in the group and below it, and remove them. Nothing if there is none.

        Raises OSError for a group that cannot be emptied.
        """
        path = self.root / group
        for attempt in range(101):
            try:
                for child in sorted(p.name for p in path.iterdir() if p.is_dir()):
                    self.remove(f"{group}/{child}")
                inside = "cgroup.threads" if self.version == 2 else "cgroup.procs"
                kill((path / inside).read_text(encoding="ascii").split())
                path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if attempt == 100:
                    raise
                time.sleep(0.02)


def kill(pids: list[str]) -> None:
    """SIGKILL to each of the processes that still runs."""
    for pid in pids:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
