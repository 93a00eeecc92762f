"""What one gloo process of tests/run/test_exit.py does; ``python exit_worker.py RANK WORLD STORE END``.

The process group is there before hetspmd is imported, and the model outlives it, as in a script without functions.
Written to stdout: the threads that run when everything that is to run at the end has run.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])


@atexit.register  # the first to be registered is the last to run
def write() -> None:
    """The names of this process's threads."""
    print(
        *(Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))
    )


torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD)

import hetspmd  # noqa: E402  # what it imports of torch finds the group there


class Model(nn.Module):
    """Returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


speeds = [1e9] * (WORLD - 1) + [1e3]  # the last one is idle, so that the others have a group of their own
devices = [{"flops": s, "memory": "1GiB", "memory_bandwidth": s} for s in speeds]
spec = {"devices": devices, "network": {"bandwidth": "100Gbit/s", "latency": "1ns"}}
x = torch.ones(64, 8)
model = hetspmd.HAP(Model(), spec, example=(x,), constraints={"args[0]": "shard(0)"})
assert len(model.plan.active) == WORLD - 1, model.plan.active
model(x).backward()
model.full_state_dict()
if sys.argv[4] == "destroys":
    dist.destroy_process_group()
