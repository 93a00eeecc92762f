"""What tests/run/test_record.py does on every rank, in threads and in gloo processes."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import loss_of
from small_models import Case, case
from small_plans import cluster

from hetspmd.dist.random import Randomness
from hetspmd.errors import OutputError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Compute
from hetspmd.record.measured import MeasuredSteps
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search import constraints as known

STEPS = 2


def train(hap: HAP, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Losses and gradients of the steps, this rank's."""
    hap.use_randomness(Randomness(3, hap.rank, torch.device("cpu")))
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(hap(**batch))
        loss.backward()
        gradients = plain(p.grad for p in hap.parameters() if p.grad is not None)
        found += [loss.detach(), *(g.clone() for g in gradients)]
        optimizer.step()
    return found


def recorded(hap: HAP, batch: dict[str, Any], path: Path | None) -> tuple[list[torch.Tensor], MeasuredSteps]:
    with hap.record(path) as recording:
        numbers = train(hap, batch)
    return numbers, recording.measured


def check_measured(measured: MeasuredSteps, plan: Plan) -> None:
    """Once per step and rank everything that the program computes; threads do one thing at a time; the ranks tell
    of the same collectives."""
    instructions = plan.graph.instructions
    want = Counter(
        instructions[step.instruction].name
        for step in plan.program.steps
        if isinstance(step, Compute) and not instructions[step.instruction].is_source
    )
    ranks = range(plan.world)
    for rank in ranks:
        mine = [s for s in measured.spans if s.device == rank]
        got = Counter(s.name for s in mine if s.what == "instruction")
        assert got == {name: STEPS * count for name, count in want.items()}
        assert sum(s.what == "optimizer" for s in mine) == STEPS
        graphs = [r.graph for r in measured.runs if r.device == rank]
        assert graphs == ["forward", "backward"] * STEPS
        for streams in (("compute", "waiting"), ("communication",)):
            events = sorted(
                (e.start, e.end) for e in measured.events if e.device == rank and e.stream in streams
            )
            assert events
            assert all(start <= end for start, end in events)
            assert all(before[1] <= after[0] for before, after in pairwise(events))
    names = [[e.name for e in measured.events if (e.device, e.stream) == (r, "communication")] for r in ranks]
    assert all(found == names[0] for found in names)
    for one in measured.carried:
        assert sorted(one.issued) == sorted(one.completed) == sorted(one.streams) == list(ranks)
        starts, ends = zip(*one.streams.values(), strict=True)
        assert min(ends) >= max(one.issued.values())
        assert all(one.issued[r] <= starts[r] and one.completed[r] <= ends[r] for r in ranks)


def data_parallel(world: int) -> tuple[Case, Plan]:
    c = case("conv", torch.float32)
    devices = cluster(*range(1, world + 1))
    return c, plan_for(c.theory, devices, known.data_parallel(c.theory), (1 / world,) * world)


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    c, plan = data_parallel(world)
    found: dict[str, Any] = {"plain": train(HAP(copy.deepcopy(c.model), plan.cluster, plan=plan), c.batch)}
    hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan)
    try:
        recorded(hap, c.batch, Path(folder) / "missing" / "steps.json")
    except OutputError as error:
        found["error"] = str(error)
    found["recorded"], measured = recorded(hap, c.batch, Path(folder) / "steps.json")
    found["measured"], found["text"] = measured, measured.text()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
