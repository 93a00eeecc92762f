"""Scripts that train and end without ``destroy_process_group()``; ``python unended_worker.py FOLDER ROUNDS``.

The launcher imports and plans once, then forks the ranks of a few rounds at a time, which end as a script does.
Written to stdout: the exit status of every rank of every round, as JSON.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import WORLD, exit_statuses, planned
from small_models import Case

from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

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
    made = planned(folder)
    if made is None:
        return
    c, plan = made
    statuses = exit_statuses(lambda _, rank, port: rank_main(rank, port, c, plan), rounds, 120.0)
    if statuses is not None:
        print(json.dumps(statuses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
