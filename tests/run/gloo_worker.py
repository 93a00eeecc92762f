"""What one gloo process does in tests/run/test_gloo.py; results go to files, one per rank."""

from __future__ import annotations

import copy
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from collective_cases import check_collectives
from small_models import MLP, Branches, Case, case
from small_plans import ahead_plan, cluster, random_plan, segmented_plan
from torch import nn

import hetspmd
from hetspmd.dist.communicator import Work
from hetspmd.dist.process_group import ProcessGroupCommunicator, communicator_for
from hetspmd.dist.random import Randomness
from hetspmd.errors import PlanMismatchError, TraceError, WorldSizeError
from hetspmd.optimize.compiler import plan_for
from hetspmd.plan.plan import Plan
from hetspmd.rules.theory import derive
from hetspmd.run.module import HAP
from hetspmd.run.shard_tensors import plain
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import trace

SEEDS = (1, 2)


class Slow(ProcessGroupCommunicator):
    """Sleeps a little before some primitives, differently on every rank."""

    dice = random.Random(0)

    def all_reduce(self, buffer: torch.Tensor) -> Work:
        if self.dice.random() < 0.3:
            time.sleep(self.dice.random() * 3e-3)
        return super().all_reduce(buffer)


def train(model: nn.Module, c: Case, plan: Plan, communicator: Any) -> dict[str, Any]:
    """Two SGD steps; the loss of both, the first gradients and the final tensors, whole."""
    hap = HAP(model, plan.cluster, plan=plan, process_group=communicator)
    hap.use_randomness(Randomness(3, hap.rank, torch.device("cpu"), reference=True))
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1, momentum=0.9, foreach=True)
    losses, gradients = [], {}
    for step in range(2):
        optimizer.zero_grad()
        output = hap(**c.batch)
        loss = (
            output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        )
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = hap.full_gradients()
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "final": hap.full_tensors()}


def mixed_plans(world: int) -> list[tuple[Case, Plan]]:
    """Float32 models whose steps were traced under autocast."""
    found = []
    for name in ("mlp", "conv", "attention"):
        c = case(name, torch.float32, **({"dropout": 0.0} if name == "attention" else {}))
        with torch.autocast("cpu", torch.bfloat16):
            c = Case(c.model, c.batch, derive(trace(c.model, (), c.batch)))
        found += [(c, random_plan(c, world, seed)) for seed in SEEDS]
    return found


def mixed(model: nn.Module, c: Case, plan: Plan) -> dict[str, Any]:
    """Two micro-batches under autocast, scaled, then clipped: the loss, the norm and the gradients."""
    hap = HAP(model, plan.cluster, plan=plan)
    optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
    scaler = hetspmd.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        with hap.no_sync(), torch.autocast("cpu", torch.bfloat16):
            output = hap(**c.batch)
        loss = (
            output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        )
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(hap.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return {"loss": loss.detach(), "norm": norm, "gradients": hap.full_gradients()}


def plans(world: int) -> list[tuple[Case, Plan]]:
    """The same in every process."""
    cases = [case(name, torch.float32) for name in ("mlp", "conv", "attention")]
    found = [(c, random_plan(c, world, seed)) for c in cases for seed in SEEDS]
    found += [(c, segmented_plan(c, world)) for c in cases]
    return found + [(c, ahead_plan(c, world, 3)) for c in cases]


def worker(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    Slow.dice.seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    results: dict[str, Any] = {"collectives": check_collectives(communicator_for(None, world))}
    slow = Slow()
    results["training"] = [train(copy.deepcopy(c.model), c, plan, slow) for c, plan in plans(world)]
    results["mixed"] = [mixed(copy.deepcopy(c.model), c, plan) for c, plan in mixed_plans(world)]
    results["errors"] = [str(e) for e in errors(rank, world)]
    c = case("mlp", torch.float32)
    hap = HAP(copy.deepcopy(c.model), cluster(*range(1, world + 1)), example=c.batch)
    results["compiled"] = (hap.plan.digest, hap(**c.batch)["loss"].detach())
    results["idle"] = idle()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def idle_plans() -> tuple[Case, list[Plan]]:
    """Plans of four devices, of which rank 1 alone, ranks 0 and 3, and all are active."""
    c = case("conv")
    devices = cluster(1, 2, 3, 4)
    return c, [
        plan_for(c.theory, devices, Constraints({}), (1 / len(active),) * len(active), active=active)
        for active in ((1,), (0, 3), (0, 1, 2, 3))
    ]


def idle() -> list[dict[str, Any]]:
    """For each plan: two steps from the state of the plan before, then evaluation, then the state."""
    c, made = idle_plans()
    found: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for plan in made:
        hap = HAP(copy.deepcopy(c.model), plan.cluster, plan=plan)
        if state:
            hap.load_full_state_dict(state)
        optimizer = torch.optim.SGD(hap.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = hap(**c.batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        hap.eval()
        with torch.no_grad():
            losses.append(hap(**c.batch).item())
        state = hap.full_state_dict()
        local = sum(p.numel() for p in plain(hap.parameters()))
        found.append({"losses": losses, "state": state, "elements": local})
    return found


def errors(rank: int, world: int) -> list[Exception]:
    c = case("mlp", torch.float32)
    found: list[Exception] = []
    try:
        HAP(MLP(), cluster(1, 2), example=c.batch)
    except WorldSizeError as error:
        found.append(error)
    plan = random_plan(c, world, 2 if rank else 4)
    try:
        HAP(copy.deepcopy(c.model), plan.cluster, plan=plan)
    except PlanMismatchError as error:
        found.append(error)
    try:
        HAP(Branches(), cluster(*[1] * world), example=(torch.ones(3),))
    except TraceError as error:
        found.append(error)
    return found
