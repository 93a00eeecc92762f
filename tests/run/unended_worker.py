"""Scripts that train and end without ``destroy_process_group()``; ``python unended_worker.py FOLDER ROUNDS``.

The launcher imports and plans once, then forks the ranks of a few rounds at a time, which end as a script does.
Written to stdout: the exit status of every rank of every round, as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import MLP, Case, case
from small_plans import random_plan

from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

WORLD, AT_ONCE = 3, 4
KEPT: list[Any] = []
"""What a script without functions holds to its end."""


def rank_main(rank: int, port: int, c: Case, plan: Plan) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan)
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    for _ in range(3):
        loss = hap(**c.batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    sys.setswitchinterval(100.0)  # a thread that asks for the GIL at the end gets it late
    KEPT.extend((hap, optimizer, hap(**c.batch)))


def main(folder: Path, rounds: int) -> None:
    planner = os.fork()  # autograd, which a trace starts, must not run before a fork
    if planner == 0:
        random_plan(case("mlp", torch.float32), WORLD, 2).save(folder / "plan.json")
        return
    assert os.waitpid(planner, 0)[1] == 0
    plan = Plan.load(folder / "plan.json")
    _ = plan.theory, plan.digest
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, -100, 3, 4, -100, 2, 2, 1])
    c = Case(MLP(), {"x": torch.randn(9, 6), "labels": labels}, plan.theory)
    found: list[int] = []
    for first in range(0, rounds, AT_ONCE):
        children = []
        for _ in range(first, min(first + AT_ONCE, rounds)):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            for rank in range(WORLD):
                pid = os.fork()
                if pid == 0:
                    rank_main(rank, port, c, plan)
                    return
                children.append(pid)
        found += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
