"""What one gloo process does in tests/run/test_staging.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collective_cases import check_collectives
from ranks import loss_of
from small_models import case
from small_plans import random_plan

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.errors import RankFailedError
from hetspmd.run.module import HAP


class Staged(ProcessGroupCommunicator):
    """Takes this host's tensors for an accelerator's."""

    def _staged(self, buffer: torch.Tensor) -> bool:
        return True


def losses(communicator: Communicator) -> list[float]:
    c = case("attention", torch.float32, dropout=0.0)  # modules of the same ranks draw other masks
    plan = random_plan(c, communicator.world, 4)
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan, process_group=communicator, timeout=10.0)
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(hap(**c.batch))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found: dict[str, Any] = {"collectives": check_collectives(Staged())}
    found["losses"] = [losses(ProcessGroupCommunicator()), losses(Staged())]
    dist.barrier()
    guarded = Staged()
    guarded.guard(2.0)
    if rank:
        try:
            guarded.all_reduce(torch.ones(3)).wait()
        except RankFailedError as error:
            found["error"] = str(error)
    torch.save(found, Path(folder) / f"{rank}.pt")
