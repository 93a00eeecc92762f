"""What one gloo process does in tests/run/test_captures_everywhere.py: it compares captures with none."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from captures import equal, trained
from ranks import loss_of
from small_models import Case, case
from small_plans import ahead_plan, cluster, random_plan, segmented_in_turns, segmented_plan

import hetspmd
from hetspmd.dist.random import Randomness
from hetspmd.errors import MicroBatchError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.run.simulated_capture import SimulatedCapturer

CASES = ("mlp", "conv", "attention")


def smaller_batches(hap: HAP, c: Case) -> list[torch.Tensor]:
    """Losses of training with batches of two sizes."""
    optimizer = torch.optim.AdamW(hap.parameters(), lr=0.01, eps=1e-4)
    found = []
    for _ in range(3):
        for rows in (9, 9, 4):
            optimizer.zero_grad()
            loss = loss_of(hap(**{name: value[:rows] for name, value in c.batch.items()}))
            loss.backward()
            found.append(loss.detach())
            optimizer.step()
    return found


def plans_in_turns(c: Case) -> list[Plan]:
    """In micro-batches: with parameters that are gathered in each of them, and in segments."""
    try:
        zero = hetspmd.compile(copy.deepcopy(c.model), c.batch, cluster(1, 2, 3), micro_batches=4, zero=3)
    except MicroBatchError:  # batch norm
        return []
    return [zero, segmented_in_turns(c, 3)]


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    counts = []
    first, *_ = cases = [case(name) for name in CASES]
    for c in cases:
        plans = [
            random_plan(c, world, 1),
            random_plan(c, world, 2),
            segmented_plan(c, world),
            ahead_plan(c, world, 3),
            *plans_in_turns(c),
        ]
        for plan in plans:
            found = []
            for asked in (SimulatedCapturer(), False):
                hap = HAP(
                    copy.deepcopy(c.model), plan.cluster, plan=plan, check_plan=False, cuda_graphs=asked
                )
                hap.use_randomness(Randomness(3, rank, torch.device("cpu")))
                found.append([trained(hap, c), smaller_batches(hap, c) if c is first else []])
                counts += [p.steps for p in hap.cuda_graphs_report().plans]
            equal(*found)
    torch.save(counts, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
