"""Groups of hetspmd's own: of ranks that have made unequally many groups before, and whose links are closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 3


def ended(name: str, *arguments: str) -> list[list[str]]:
    """What each rank of a worker has said."""
    worker = Path(__file__).with_name(name)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    for process, (_, err) in zip(processes, said, strict=True):
        assert process.returncode == 0, err
    return [out.split() for out, _ in said]


@pytest.mark.parametrize(
    "backend", ["gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu:gloo", "none"))]
)
def test_ranks_that_have_made_unequally_many_groups_make_one_together(tmp_path: Path, backend: str) -> None:
    said = ended("groups_worker.py", str(tmp_path / "store"), backend)
    assert said == [["6", "6", "6", "6", "False"]] * WORLD


def test_links_are_closed_though_one_rank_has_gone(tmp_path: Path) -> None:
    """The message to the rank that stays is ended; its thread would abort the process that ends."""
    assert ended("links_worker.py", str(tmp_path))[0] == ["False"]
