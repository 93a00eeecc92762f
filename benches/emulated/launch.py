"""Workers on an emulated cluster: one Python process per rank inside its namespace.

Rank 0's address on the bridge is ``MASTER_ADDR``, and gloo is bound to ``eth0``: nothing that the ranks say to each
other avoids the rate limits. The workers live for many jobs, so that PyTorch is imported once.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from emulated.spec import EmulationError

PORT = 29500
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000", "MALLOC_TOP_PAD_": "67108864"
}  # fmt: skip
"""Processes keep the memory that a step has freed, as the allocators of accelerators do (docs/profiling.md)."""

LOOK = 0.2
"""Seconds between looks for threads that ranks have started, and at the machine's speed."""


class Ranks(Protocol):
    """Where the processes run: an emulated cluster, or one that has its methods."""

    @property
    def world(self) -> int:
        """How many ranks there are."""

    def start(
        self, rank: int, command: Sequence[str], *, stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None, stderr: int | IO[Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a rank's process; the options are those of Popen."""

    def address(self, rank: int) -> str:
        """At which the other ranks find this one."""

    def throttle(self, rank: int, on: bool) -> None:
        """Hold a rank to its share, or not."""

    def free_network_threads(self, rank: int) -> None:
        """See to the threads that a rank has started since the last look."""

    def keep_pace(self) -> None:
        """See to the machine's speed."""


class Workers:
    """A context manager around the processes.

    ``timeout``: seconds for the start, for one job, and for one collective. Raises EmulationError if a worker
    fails or does not answer, with the end of its log; the workers are of no use afterwards.
    """

    def __init__(self, cluster: Ranks, *, timeout: float = 600.0) -> None:
        self.cluster = cluster
        self.timeout = timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._unread = [b"" for _ in range(cluster.world)]

    def __enter__(self) -> Workers:
        self._folder = tempfile.TemporaryDirectory(prefix="hetspmd-emulated-")
        try:
            for rank in range(self.cluster.world):
                with self._log(rank).open("wb") as log:
                    self._processes.append(
                        self.cluster.start(
                            rank, [sys.executable, "-m", "emulated.worker"],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                            env=self._environment(rank),
                        )
                    )  # fmt: skip
            self._replies(range(self.cluster.world), {"ready"}, "start")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(self, function: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> list[Any]:
        """``function`` (``module:name``) on the ranks, all at once; their results in the order of ``ranks``."""
        chosen = list(range(self.cluster.world) if ranks is None else ranks)
        for rank in chosen:
            self._send(rank, {"function": function, "arguments": arguments})
        try:
            while True:
                replies = self._replies(chosen, {"throttle", "done"}, function)
                kinds = {r["kind"] for r in replies}
                if kinds == {"done"}:
                    return [r["result"] for r in replies]
                if kinds != {"throttle"} or len({r["on"] for r in replies}) != 1:
                    raise EmulationError(f"{function}: some ranks change their CPU share, others do not")
                for rank, reply in zip(chosen, replies, strict=True):
                    self.cluster.throttle(rank, reply["on"])
                for rank in chosen:
                    self._send(rank, {})
        finally:
            for rank in chosen:
                self.cluster.throttle(rank, False)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        pipe = self._processes[rank].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._failure(rank, "has ended") from None

    def _replies(self, ranks: Sequence[int], kinds: set[str], task: str) -> list[dict[str, Any]]:
        """One message of each rank, of one of these kinds."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                pipe = self._processes[rank].stdout
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                ready = selector.select(min(LOOK, max(0.0, deadline - time.monotonic())))
                for rank in ranks:
                    self.cluster.free_network_threads(rank)
                self.cluster.keep_pace()
                if not ready and time.monotonic() >= deadline:
                    late = [r for r in ranks if r not in found]
                    raise self._failure(late[0], f"and others of {late} did not finish {task} in time")
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        raise self._failure(key.data, f"ended during {task}")
                    self._unread[key.data] += data
                    line, newline, rest = self._unread[key.data].partition(b"\n")
                    if newline:
                        self._unread[key.data] = rest
                        found[key.data] = self._checked(key.data, json.loads(line), kinds)
                        selector.unregister(key.fileobj)
        return [found[rank] for rank in ranks]

    def _checked(self, rank: int, message: dict[str, Any], kinds: set[str]) -> dict[str, Any]:
        if message["kind"] == "failed":
            raise EmulationError(f"rank {rank} failed:\n{message['error']}")
        if message["kind"] not in kinds:
            raise EmulationError(f"rank {rank} said {message['kind']!r}, expected one of {sorted(kinds)}")
        return message

    def _failure(self, rank: int, what: str) -> EmulationError:
        text = self._log(rank).read_text(encoding="utf-8", errors="replace")
        return EmulationError(f"rank {rank} {what}; the end of its log:\n{text[-3000:]}")

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "HETSPMD_DRIVER": str(os.getpid()),
            "HETSPMD_TIMEOUT": str(self.timeout),
            "OMP_NUM_THREADS": "1",
            **KEEP_MEMORY,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.cluster.world),
            "MASTER_ADDR": self.cluster.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def _close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue
        self._folder.cleanup()
