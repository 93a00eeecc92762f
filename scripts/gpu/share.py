"""Runs a command once per rank, all ranks on one GPU, over NCCL: a small cluster of unlike devices from one GPU.

    python scripts/gpu/share.py --shares 50,25,12,12 -- python scripts/gpu/training.py

NCCL refuses two ranks on a GPU of one host, so every rank tells it another host's name; then it sends over the
loopback network. ``--shares`` are percents of the GPU's multiprocessors, which CUDA's MPS server deals out: it is
started before the ranks and ended after them. ``--shares none,none`` takes time slices instead. Ranks get the
environment of torchrun with LOCAL_RANK=0. Rank 0's output is shown as it comes, another rank's where it fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POLL, GRACE = 0.1, 8.0
"""Seconds between two looks at the ranks, and those that others get after the first has failed."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def environment(rank: int, shares: list[str], port: int) -> dict[str, str]:
    """What rank ``rank`` runs in."""
    made = {
        "RANK": rank, "WORLD_SIZE": len(shares), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1, "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1,
        "OMP_NUM_THREADS": 1, "PYTHONUNBUFFERED": 1,
    }  # fmt: skip
    if shares[rank] != "none":
        made["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = shares[rank]
    return os.environ | {name: str(value) for name, value in made.items()}


def ended(ranks: list[subprocess.Popen[bytes]], until: float) -> int:
    """Wait for the ranks; the first exit status that is not zero, 124 where time runs out."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks):
            until = min(until, time.monotonic() + GRACE)
        if time.monotonic() > until:
            break
        time.sleep(POLL)
    failed = [rank.returncode for rank in ranks if rank.returncode]
    running = [rank for rank in ranks if rank.poll() is None]
    for rank in running:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    return failed[0] if failed else 124 if running else 0


def run(shares: list[str], command: list[str], timeout: float) -> int:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.log" for rank in range(len(shares))]
        ranks = []
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                out = None if rank == 0 else file
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=environment(rank, shares, port),
                        stdout=out,
                        stderr=None if rank == 0 else subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        code = ended(ranks, time.monotonic() + timeout)
        for rank, log in enumerate(logs):
            if code and rank:
                print(f"-- rank {rank}, exit status {ranks[rank].returncode}:\n{log.read_text()[-1500:]}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", default="50,25,12,12", help="one percent, or none, for each rank")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    shares, command = options.shares.split(","), options.command[options.command[:1] == ["--"] :]
    server = shutil.which("nvidia-cuda-mps-control") if set(shares) != {"none"} else None
    if server is not None:
        subprocess.run([server, "-d"], check=False)
    elif set(shares) != {"none"}:
        print("nvidia-cuda-mps-control was not found: ranks share the GPU in time slices", flush=True)
    try:
        return run(shares, command, options.timeout)
    finally:
        if server is not None:
            subprocess.run([server], input=b"quit\n", check=False)


if __name__ == "__main__":
    sys.exit(main())
