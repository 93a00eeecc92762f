"""Runs a command once per rank, all ranks on one GPU, over NCCL: a small cluster of unlike devices from one GPU.

    python scripts/gpu/share.py --shares 50,25,12,12 -- python scripts/gpu/training.py

NCCL refuses two ranks on a GPU of one host, so every rank tells it another host's name; then it sends over the
loopback network. ``--shares`` are percents of the GPU's multiprocessors, which CUDA's MPS server deals out: it is
started before the ranks and ended after them. ``--shares none,none`` takes time slices instead. Ranks get the
environment of torchrun with LOCAL_RANK=0. Rank 0's output is shown as it comes, another rank's where it fails.
"""

# ruff: noqa: E402  # the benches are put on the path first
from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "benches")]

from gpu.shares import environment, free_port, mps

POLL, GRACE = 0.1, 8.0
"""Seconds between two looks at the ranks, and those that others get after the first has failed."""


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
                        env=os.environ | environment(rank, shares, port),
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
    with mps(shares) as served:
        if not served and set(shares) != {"none"}:
            print("nvidia-cuda-mps-control was not found: ranks share the GPU in time slices", flush=True)
        return run(shares, command, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
