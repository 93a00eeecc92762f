"""A process ends in order although its store answers late, or a rank that it waited for dies meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LATE = """
from datetime import timedelta
import torch.distributed as dist
from hetspmd.dist.processes import this_process
from hetspmd.dist.failure_detection import FailureDetector

me, store = this_process(), dist.HashStore()

class LateStore:
    def __init__(self, number):
        self.late = timedelta(milliseconds=400 + 4 * number)

    def set(self, key, value):
        store.wait(["never"], self.late)

    def check(self, keys):
        store.wait(["never"], self.late)

for number in range(150):
    watch = FailureDetector(LateStore(number), str(number), 0, [me, me], None, timeout=6e-3)
    {asks}
"""
ASKS = {
    "asking": "assert watch.board.ask(lambda: watch.board.store.check([])) is None",
    "busy": "with watch.busy(): pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_late_answers_do_not_meet_an_interpreter_that_is_gone(asks: str) -> None:
    """Without patience at the end, one of so many threads comes back in it: SIGABRT."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LATE.replace("{asks}", asks)], capture_output=True, text=True,
        timeout=120, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


ENDS = """
import atexit, ctypes
atexit.register(ctypes.PyDLL(None).sleep, 2)  # the last to be called: who asks for the GIL now, gets it too late

import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from hetspmd.errors import RankFailedError
from hetspmd.dist.process_group import ProcessGroupCommunicator

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
communicator = ProcessGroupCommunicator()
communicator.guard(2.0)
if rank == 0:
    while not (folder / "ends").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    os._exit(0)
try:
    communicator.broadcast(torch.zeros(5), 0).wait()
except RankFailedError:
    (folder / "ends").touch()
    raise SystemExit(7) from None
"""


@pytest.mark.slow
def test_a_rank_that_dies_while_another_ends(tmp_path: Path) -> None:
    """gloo's thread then lets go of the broadcast, which must not be the last to hold its tensor."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", ENDS, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    )  # fmt: skip
    told, others = (process.communicate(timeout=120)[1] for process in (second, first))
    assert second.returncode == 7, told
    assert others == ""
