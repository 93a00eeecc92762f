"""Several ranks on one GPU, each with a share of its multiprocessors: a small cluster of unlike GPUs from one.

NCCL refuses two ranks on a GPU of one host, so every rank tells it another host's name; then it sends over the
loopback network. The shares are percents that CUDA's MPS server deals out.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
