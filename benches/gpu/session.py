"""Measuring points one after the other: the ranks that do it, and what becomes of a point that fails.

Ranks are processes that live for many points of the same shares. After a point that failed they are of no use, and
the next point gets new ones.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import IO, Any

from emulated.launch import KEEP_MEMORY, Workers
from gpu.points import AUTOCAST, NEEDS, ONE_GPU, PURE, SINGLE, Key, size_of
from gpu.results import Arm, Line, arm_of
from gpu.shared import SharedPoint
from gpu.shares import NONE, environment, free_port, mps
from versus.results import check_same

LOSSES: Mapping[str, tuple[float, float]] = {
    SINGLE: (1e-3, 0.05), AUTOCAST: (2e-2, 0.1), PURE: (5e-2, 0.2),
}  # fmt: skip
"""Relative difference of the losses of a point's arms that rounding may make, in the first and the second step."""


class SharedDevice:
    """Where the ranks of :class:`emulated.launch.Workers` run: on one GPU, or on this host's CPUs.

    ``device``: ``cuda`` (over NCCL) or ``cpu`` (over gloo, where shares have no effect). The allocator of the host
    is as users have it.
    """

    def __init__(self, shares: Sequence[str], device: str) -> None:
        self.shares, self.device, self.world = tuple(shares), device, len(shares)
        self._port = free_port()

    def address(self, rank: int) -> str:
        """At which the other ranks find this one."""
        del rank
        return "127.0.0.1"

    def start(
        self, rank: int, command: Sequence[str], *, stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None, stderr: int | IO[Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a rank's process; the options are those of Popen."""
        shares = self.shares if self.device == "cuda" else (NONE,) * self.world
        own = environment(rank, shares, self._port)
        own["HETSPMD_BACKEND"] = "nccl" if self.device == "cuda" else "gloo"
        given = {name: value for name, value in (env or os.environ).items() if name not in KEEP_MEMORY}
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=given | own)

    def throttle(self, rank: int, on: bool) -> None:
        """Nothing: MPS holds a rank to its share at all times."""

    def free_network_threads(self, rank: int) -> None:
        """Nothing: threads have no share."""

    def keep_pace(self) -> None:
        """Nothing: shares are parts of what there is."""


class SkippedError(Exception):
    """The machine lacks what a point needs."""


class Session:
    """A context manager around the ranks that measure points, as the bench's options have it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._stack = ExitStack()
        self._workers: Workers | None = None
        self._shares: tuple[str, ...] = ()
        self._machine: dict[str, str] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def line(self, key: Key) -> Line:
        """Measure a point. What fails becomes the line's reason."""
        began = time.monotonic()
        try:
            found = self._measured(key)
        except SkippedError as error:
            found = {"reason": str(error), "skipped": True}
        except Exception as error:  # the next point may go well
            found = {"reason": said(error)}
            self._end()
        return Line(
            *key, size=size_of(key, self.options.small), machine=self._machine,
            day=datetime.now(UTC).date().isoformat(), took=round(time.monotonic() - began, 1),
            small=self.options.small, **found,
        )  # fmt: skip

    def _measured(self, key: Key) -> dict[str, Any]:
        """The fields of a line that a point has which goes well."""
        if (package := NEEDS.get(key.model)) is not None and find_spec(package) is None:
            raise SkippedError(f"the package {package} is not installed")
        shares = (NONE,) if key.part in ONE_GPU else tuple(key.at.split(":"))
        workers = self._on(shares)
        if key.part in ONE_GPU:
            found: dict[str, Any] = {"arms": self._one(key, workers)}
        else:
            found = SharedPoint(key, self.options, workers, self._machine).measure()
        made = {name: arm.losses for name, arm in found["arms"].items() if not arm.reason}
        if made:
            check_same(made, str(key), LOSSES[key.precision])
        return found

    def _on(self, shares: tuple[str, ...]) -> Workers:
        """Ranks of these shares. Raises SkippedError where the machine cannot deal them out."""
        if self._workers is not None and self._shares == shares:
            return self._workers
        self._end()
        device = self.options.device
        if device == "cuda" and not self._stack.enter_context(mps(shares)) and set(shares) != {NONE}:
            raise SkippedError("nvidia-cuda-mps-control, which deals out shares, was not found")
        workers = self._stack.enter_context(
            Workers(SharedDevice(shares, device), timeout=self.options.timeout)
        )
        self._machine = workers.run("gpu.rank:machine", ranks=[0], device=device)[0]
        self._workers, self._shares = workers, shares
        return workers

    def _end(self) -> None:
        """End the ranks and the server of their shares."""
        self._workers = None
        self._stack.close()

    def _one(self, key: Key, workers: Workers) -> dict[str, Arm]:
        """The arms of a point of one GPU."""
        options = self.options
        found = workers.run(
            "gpu.one:measure", part=key.part, model=key.model, size=size_of(key, options.small),
            precision=key.precision, device=options.device, rounds=options.rounds, steps=options.steps,
        )[0]  # fmt: skip
        return {name: arm_of(arm) for name, arm in found.items()}


def said(error: Exception) -> str:
    """An error in a line: its first and its last line, which in a traceback says what went wrong."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    if len(lines) > 1:
        text = f"{text} {lines[-1]}"
    return f"{type(error).__name__}: {text}"[:400]
