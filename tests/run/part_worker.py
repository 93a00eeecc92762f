"""What one gloo process of tests/run/test_ranks_part_gloo.py does: RANK WORLD FOLDER CASE."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_models import Case, case
from small_plans import cluster

from hetspmd.errors import HetspmdError
from hetspmd.optimize.compiler import plan_for
from hetspmd.run.module import HAP
from hetspmd.search import constraints as known

ODD = 1


def step(hap: HAP, batch: dict[str, Any], backward: bool = True) -> None:
    found = hap(**batch)
    if backward:
        (found["loss"] if isinstance(found, dict) else found).backward()


def another_batch(hap: HAP, c: Case) -> None:
    step(hap, {**c.batch, "x": c.batch["x"].flip(0)} if hap.rank == ODD else c.batch)


def another_shape(hap: HAP, c: Case) -> None:
    step(hap, {k: v[:6] for k, v in c.batch.items()} if hap.rank == ODD else c.batch)


def another_mode(hap: HAP, c: Case) -> None:
    """All ranks have both plans, of which each would run another one."""
    hap.eval()
    step(hap, c.batch)
    hap.train(hap.rank != ODD)
    step(hap, c.batch)


def state_dict(hap: HAP, c: Case) -> None:
    if hap.rank == ODD:
        hap.full_state_dict()
    step(hap, c.batch)


def own_weights(hap: HAP, c: Case) -> None:
    with torch.no_grad():
        for p in hap.parameters():
            p.mul_(1.0 + 1e-6 * (hap.rank == ODD))
    step(hap, c.batch)


def clips(hap: HAP, c: Case) -> None:
    if hap.rank == ODD:
        torch.nn.utils.clip_grad_norm_(hap.parameters(), 1.0)
    step(hap, c.batch)


CASES = {f.__name__: f for f in (another_batch, another_shape, another_mode, state_dict, own_weights, clips)}


def main(rank: int, world: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.manual_seed(0)
    c = case(
        "conv" if name == "another_mode" else "mlp", torch.float32
    )  # norms: evaluation is another program
    ratios = (tuple(1.0 / world for _ in range(world)),)
    plan = plan_for(c.theory, cluster(*range(1, world + 1)), known.data_parallel(c.theory), ratios)
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan)
    for _ in range(3):
        step(hap, c.batch)
    began = time.monotonic()
    found = {"error": "", "text": ""}
    try:
        CASES[name](hap, c)
    except HetspmdError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps({**found, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
