"""Ranks that nothing was imported for before: what a trace imports is in the ranks that do not trace, too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RANK = """
import copy, sys, torch, hetspmd
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(1, 2, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(2)
        self.pool = torch.nn.MaxPool2d(2)

    def forward(self, x):
        from late import SCALE, shifted

        return SCALE * self.pool(shifted(self.norm(self.convolution(x)).relu())).square().mean()


device = {"flops": "1 GFLOP/s", "memory": "1GiB"}
cluster = {"devices": [device, device], "network": {"bandwidth": "100Gbit/s", "latency": "1us"}}
model, x = Pooled(), torch.randn(4, 1, 8, 8)
same = copy.deepcopy(model)
hap = hetspmd.HAP(model, cluster, example=(x,))
loss = hap(x).item()
if rank == 0:
    hap.plan.save(f"{folder}/plan.json")
torch.distributed.barrier()
again = hetspmd.HAP(same, cluster, plan=f"{folder}/plan.json")
assert abs(again(x).item() - loss) < 1e-5
torch.distributed.destroy_process_group()
"""

LATE = """
SCALE = 3.0


class Shift:
    by = 0.5


def shifted(x):
    return x + Shift.by
"""


def test_ranks_that_do_not_trace_have_the_modules_of_the_one_that_does(tmp_path: Path) -> None:
    """Rank 0 traces; where its trace reads a name of torch's compiler, rank 1 is asked for the same name; and
    forward imports a module of its own when it is first called."""
    (tmp_path / "late.py").write_text(LATE)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(error for _, error in ended)
