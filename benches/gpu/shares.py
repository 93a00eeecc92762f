"""Several ranks on one GPU, each with a share of its multiprocessors: a small cluster of unlike GPUs from one.

NCCL refuses two ranks on a GPU of one host, so every rank tells it another host's name; then it sends over the
loopback network. The shares are percents that CUDA's MPS server deals out.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

NONE = "none"
"""The share of a rank that takes time slices of the whole GPU."""


def free_port() -> int:
    """A port of this host on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def environment(rank: int, shares: Sequence[str], port: int) -> dict[str, str]:
    """The environment that torchrun would give a rank, with what NCCL and MPS need."""
    made = {
        "RANK": rank, "WORLD_SIZE": len(shares), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1, "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1,
        "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1,
    }  # fmt: skip
    if shares[rank] != NONE:
        made["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = shares[rank]
    return {name: str(value) for name, value in made.items()}


@contextmanager
def mps(shares: Sequence[str]) -> Iterator[bool]:
    """Run CUDA's MPS server while ranks with these shares run, unless they are all :data:`NONE`.

    Gives whether the server runs.
    """
    wanted = set(shares) != {NONE}
    server = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if server is not None:
        subprocess.run([server, "-d"], check=False)
    try:
        yield server is not None
    finally:
        if server is not None:
            subprocess.run([server], input=b"quit\n", check=False)


class SharedDevice:
    """Where the ranks of :class:`emulated.launch.Workers` run: on one GPU, or on this host's CPUs.

    ``device``: ``cuda`` (over NCCL) or ``cpu`` (over gloo, where shares have no effect).
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
        env = {**(os.environ if env is None else env), **own}
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=env)

    def throttle(self, rank: int, on: bool) -> None:
        """Nothing: MPS holds a rank to its share at all times."""

    def free_network_threads(self, rank: int) -> None:
        """Nothing: threads have no share."""

    def keep_pace(self) -> None:
        """Nothing: shares are parts of what there is."""
