"""Ranks that part in real gloo processes: every one raises the named error within seconds, none hangs or aborts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 3
SOON = 30.0
TOLD = {
    "another_batch": ("BatchMismatchError", "at step 4 rank 1 was given another x than ranks 0 and 2"),
    "another_shape": ("BatchMismatchError", "at step 4 rank 1 called the model in another mode"),
    "another_mode": ("BatchMismatchError", "at step 5 rank 1 called the model in another mode"),
    "state_dict": ("CollectiveMismatchError", "ranks 0 and 2 in step 4, rank 1 in full_state_dict()"),
    "clips": ("CollectiveMismatchError", "ranks 0 and 2 in step 4, rank 1 in the norm of all gradients"),
    "own_weights": ("ParameterMismatchError", "at step 4 rank 1 held another"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD)
def test_ranks_part(tmp_path: Path, name: str) -> None:
    worker = Path(__file__).with_name("part_worker.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(worker), str(rank), str(WORLD), str(tmp_path), name],
            stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    ends = [(process.communicate(timeout=180)[1], process.returncode) for process in processes]
    kind, text = TOLD[name]
    for rank, (stderr, status) in enumerate(ends):
        assert status == 0, stderr
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["error"] == kind, found
        assert text in found["text"]
        assert found["seconds"] < SOON
