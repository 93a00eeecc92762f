"""A plan on all its ranks in one process, each with a HAP module of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from small_models import Case
from small_plans import cluster

from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP
from hetspmd.trace.compat.tensors import as_plain

T = TypeVar("T")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def on_ranks(c: Case, plan: Plan, body: Callable[[HAP], T], **options: Any) -> list[T]:
    models = [copy.deepcopy(c.model) for _ in range(plan.cluster.ranks)]
    _ = plan.theory, plan.digest
    options.setdefault("check_plan", False)

    def rank(communicator: Communicator) -> T:
        model = models[communicator.rank]
        return body(HAP(model, plan.cluster, plan=plan, process_group=communicator, **options))

    return run_ranks(plan.cluster.ranks, rank)


def own_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, as a plain tensor."""
    with as_plain():
        found: torch.Tensor = torch.Tensor.grad.__get__(parameter)  # type: ignore[attr-defined]  # of C
    return found


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["loss"]
    return output[0] if isinstance(output, tuple) else output


def lone(c: Case, **options: Any) -> HAP:
    return HAP(copy.deepcopy(c.model), cluster(1), example=c.batch, **options)
