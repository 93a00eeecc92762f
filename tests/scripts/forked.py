"""Runs ``train`` of a script on one device and on four ranks, in processes that are forked when all is imported.

    python forked.py SCRIPT FOLDER

Ranks find in the environment what ``torchrun`` puts there. What ``train`` returns lies in FOLDER afterwards, in
``alone.pt`` and ``rank0.pt`` to ``rank3.pt``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo

import hetspmd.optimize.compiler
import hetspmd.run.module  # noqa: F401  # so that no process imports it again
from hetspmd.cluster.cluster import Cluster
from hetspmd.trace.compat.joint import exporter

RANKS = 4
CLUSTER = Cluster.load(Path(__file__).parents[2] / "examples" / "clusters" / "four-slow.yaml")
"""Slow devices on a fast network, so that even small models are divided."""


def environment(rank: int, port: int) -> dict[str, str]:
    """What ``torchrun`` gives a process."""
    of = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "GROUP_RANK": 0}
    return {k: str(v) for k, v in of.items()} | {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none",
    }  # fmt: skip


def work(script: str, folder: Path, rank: int | None, port: int) -> int:
    """One process; its exit status."""
    try:
        if rank is not None:
            os.environ.update(environment(rank, port))
        torch.set_default_dtype(torch.float64)
        found = importlib.import_module(script).train(rank is None, folder)
        torch.save(found, folder / ("alone.pt" if rank is None else f"rank{rank}.pt"))
    except BaseException:  # the process ends here, whatever it is
        traceback.print_exc()
        return 1
    return 0


def main(script: str, folder: Path) -> int:
    """Fork the processes and wait for them; 1 if one has failed."""
    torch.set_num_threads(1)
    exporter()
    importlib.import_module(script)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for rank in (None, *range(RANKS)):
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            status = work(script, folder, rank, port)
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    return int(failed(children))


def failed(children: list[int]) -> bool:
    """Wait for all processes; whether one has failed. When one does, the others, which would wait for it, are
    killed."""
    running, one = set(children), False
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not one:
            one = True
            for other in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return one


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
