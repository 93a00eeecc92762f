"""A process that ends has ended the threads of its process groups, which would abort it otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
@pytest.mark.parametrize("end", ["destroys", "leaves"])
def test_no_thread_of_a_group_is_left(tmp_path: Path, end: str) -> None:
    """One that lets go of a tensor when the interpreter is gone ends the process by SIGABRT, once in a hundred.

    A group that the program itself has made and leaves keeps its three; HAP sends nothing over it."""
    worker = Path(__file__).with_name("exit_worker.py")
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path / "store"), end],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        threads = out.split()
        assert any("python" in name for name in threads), "the main one"
        left = sorted(name for name in threads if "gloo" in name)
        assert left == ([] if end == "destroys" else ["gloo_tcp_loop", *["pt_gloo_runloop"] * 2]), threads


@pytest.mark.slow
def test_scripts_that_do_not_destroy_their_group(tmp_path: Path) -> None:
    worker = Path(__file__).with_name("unended_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), "20"], check=False, capture_output=True, text=True,
        timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    assert statuses == [0] * (20 * WORLD), done.stderr
