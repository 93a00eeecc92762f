"""A process that ends has ended the threads of its process groups, which would abort it otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORLD = 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads in /proc")
def test_no_thread_of_a_group_is_left(tmp_path: Path) -> None:
    """One that lets go of a tensor when the interpreter is gone ends the process by SIGABRT, once in a hundred."""
    worker = Path(__file__).with_name("exit_worker.py")
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        threads = out.split()
        assert any("python" in name for name in threads), "the main one"
        assert not [name for name in threads if "gloo" in name], threads
