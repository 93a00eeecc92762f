"""What one process does in tests/gpu/test_gpu.py; ``device`` is the CPU where the file itself is tried."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import loss_of
from small_models import Case, case
from small_plans import random_plan
from torch import nn

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.process_group import ProcessGroupCommunicator
from hetspmd.run.module import HAP

OPTIONS: dict[str, dict[str, Any]] = {"mlp": {}, "conv": {}, "attention": {"dropout": 0.0}}
SEEDS = (1, 2)


def losses(model: nn.Module, c: Case, device: str) -> list[float]:
    """Of three steps of SGD."""
    batch = {name: value.to(device) for name, value in c.batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check_primitives(comm: Communicator, device: str) -> None:
    """Every primitive, on whole numbers."""
    world, rank = comm.world, comm.rank
    own = torch.arange(6.0, device=device) + rank
    total = torch.arange(6.0, device=device) * world + world * (world - 1) / 2
    summed = own.clone()
    comm.all_reduce(summed).wait()
    assert torch.equal(summed, total)
    reduced = own.clone()
    comm.reduce(reduced, world - 1).wait()
    assert rank != world - 1 or torch.equal(reduced, total)
    parts = own.repeat(world)
    part = torch.empty_like(own)
    comm.reduce_scatter(part, parts).wait()
    assert torch.equal(part, total)
    gathered = torch.empty_like(parts)
    comm.all_gather(gathered, own).wait()
    want = torch.cat([torch.arange(6.0, device=device) + r for r in range(world)])
    assert torch.equal(gathered, want)
    sent = own.clone()
    comm.broadcast(sent, 0).wait()
    assert torch.equal(sent, torch.arange(6.0, device=device))
    splits = [6] * world
    comm.all_to_all(gathered, parts, splits, splits).wait()
    assert torch.equal(gathered, want)
    rooms = [own.clone() if r == rank else torch.empty_like(own) for r in range(world)]
    comm.ring_gather(rooms).wait()
    assert torch.equal(torch.cat(rooms), want)
    summands = [own.clone() for _ in range(world)]
    comm.ring_reduce(summands).wait()
    assert torch.equal(summands[rank], total)


def worker(rank: int, world: int, backend: str, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    check_primitives(ProcessGroupCommunicator(), device)
    found = []
    for name, options in OPTIONS.items() if world > 1 else ():
        c = case(name, torch.float32, **options)
        for seed in SEEDS:
            plan = random_plan(c, world, seed)
            hap = HAP(copy.deepcopy(c.model).to(device), plan.cluster, plan=plan)
            found.append(losses(hap, c, device))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def single() -> list[list[float]]:
    """The same losses of the single device."""
    cases = [case(name, torch.float32, **options) for name, options in OPTIONS.items() for _ in SEEDS]
    return [losses(copy.deepcopy(c.model), c, "cpu") for c in cases]
