"""What each process of the process test in tests/run/test_tune.py runs."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import loss_of
from small_models import case

import hetspmd
from hetspmd.run.module import HAP


def worker(rank: int, world: int, folder: str) -> None:
    """Tune, train a step with what was chosen, and one on the first of the other plans."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    c = case("mlp", torch.float32)
    devices = [
        {"name": f"d{i}", "flops": 1e7 / (i + 1), "memory": "1GiB", "memory_bandwidth": "10GB/s"}
        for i in range(world)
    ]
    cluster = {"devices": devices, "network": {"bandwidth": "1GB/s", "latency": "1us"}}
    model = copy.deepcopy(c.model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    drawn = torch.random.get_rng_state()
    tuned = hetspmd.tune(model, c.batch, cluster, optimizer=torch.optim.SGD, steps=2)
    kept = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    undrawn = bool(torch.equal(drawn, torch.random.get_rng_state()))
    losses = []
    for _ in range(2):
        hap = HAP(copy.deepcopy(model), cluster, plan=tuned.plan)
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_of(hap(**c.batch))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = {
        "digest": tuned.plan.digest, "name": tuned.name, "seconds": dict(tuned.seconds), "kept": kept,
        "undrawn": undrawn, "losses": losses,
    }  # fmt: skip
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
