"""A process ends in order although its store answers late."""

from __future__ import annotations

import os
import subprocess
import sys

LATE = """
from datetime import timedelta
import torch.distributed as dist
from hetspmd.run.processes import this_process
from hetspmd.run.watch import Watch

me, store = this_process(), dist.HashStore()
for number in range(150):
    watch = Watch(store, str(number), 0, [me, me], None, timeout=6e-3)
    answer = watch._ask(lambda late=400 + 4 * number: store.wait(["never"], timedelta(milliseconds=late)))
    assert answer is None
"""


def test_late_answers_do_not_meet_an_interpreter_that_is_gone() -> None:
    """Without patience at the end, one of so many threads comes back in it: SIGABRT."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LATE], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
