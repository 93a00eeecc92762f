"""Groups of hetspmd's own, of ranks that have made unequally many groups before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 3


@pytest.mark.parametrize(
    "backend", ["gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu:gloo", "none"))]
)
def test_ranks_that_have_made_unequally_many_groups_make_one_together(tmp_path: Path, backend: str) -> None:
    worker = Path(__file__).with_name("groups_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(tmp_path / "store"), backend],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err
        assert out.split() == ["6", "6", "6", "6", "False"]
