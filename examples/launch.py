"""Starting the workers of an example on this machine, as torchrun does."""

from __future__ import annotations

import os
import subprocess
import sys


def launch_workers(script: str, count: int) -> None:
    """Run ``script`` with this process's arguments in ``count`` workers; exit as they do."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    raise SystemExit(
        subprocess.run([*command, script, *sys.argv[1:]], env=environment, check=False).returncode
    )
