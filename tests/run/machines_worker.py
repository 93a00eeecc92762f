"""What each process of tests/run/test_machines_gloo.py runs: one accelerator of some machines."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine_plans import busy_machines, machine_plan, machines
from ranks import loss_of
from small_models import Case, case

import hetspmd
from hetspmd.dist.random import Randomness
from hetspmd.errors import DroppedOutputWarning
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP


def plans(accelerators: tuple[int, ...]) -> list[tuple[Case, Plan]]:
    """The same in every process: random ones, one of the last machine alone, and some in micro-batches."""
    cases = {name: case(name) for name in ("mlp", "conv", "attention")}
    found = [(c, machine_plan(c, accelerators, seed)) for seed, c in enumerate(cases.values(), 1)]
    last = (len(accelerators) - 1,)
    found.append((cases["mlp"], machine_plan(cases["mlp"], accelerators, 4, last)))
    return [
        *found,
        *((cases[name], in_micro_batches(cases[name], accelerators)) for name in ("mlp", "attention")),
    ]


def in_micro_batches(c: Case, accelerators: tuple[int, ...]) -> Plan:
    """A plan of three levels, with collectives in the loop."""
    cluster = busy_machines(*accelerators)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DroppedOutputWarning)
        return hetspmd.compile(c.model, c.batch, cluster, machines="virtual", micro_batches=2)


def train(c: Case, plan: Plan, communicator: Any = None) -> dict[str, Any]:
    """Two clipped steps of SGD: losses, norms, the first gradients, and the state at the end."""
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan, process_group=communicator)
    hap.use_randomness(Randomness(3, hap.rank, torch.device("cpu"), reference=True))
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)
    losses, norms, gradients = [], [], {}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(hap(**c.batch))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = hap.full_gradients()
        norms.append(float(hetspmd.clip_grad_norm_(hap, 0.5)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "gradients": gradients, "state": hap.full_state_dict()}


def worker(rank: int, accelerators: tuple[int, ...], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=sum(accelerators))
    results: list[Any] = [train(c, plan) for c, plan in plans(accelerators)]
    c = case("mlp")
    hap = HAP(copy.deepcopy(c.model), machines(*accelerators), example=c.batch, machines="virtual")
    results.append((hap.plan.digest, loss_of(hap(**c.batch)).item()))
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
