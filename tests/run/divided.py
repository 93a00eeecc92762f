"""Small models whose parameters lie in shards of 4 : 2 : 1 : 1 on four ranks, and what one device makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.dist.communicator import Communicator
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP

T = TypeVar("T")
CLUSTER = cluster(4, 2, 1, 1)
torch.manual_seed(0)
X = torch.randn(16, 12, dtype=torch.float64)


class Net(nn.Module):
    """An autoencoder that is itself two modules, a number, and a method besides forward."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.a = wrap(nn.Linear(12, 24))
        self.norm = nn.BatchNorm1d(24)
        self.b = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 12))
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.b(torch.tanh(self.norm(self.a(x)))), x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def net(**options: Any) -> Net:
    """``Net`` with the same weights each time. Without options it draws nothing, so that ranks can call it."""
    if not options:
        return copy.deepcopy(_NET)
    torch.manual_seed(1)
    return Net(**options).double()


torch.manual_seed(1)
_NET = Net().double()


def shards(model: nn.Module) -> dict[str, str]:
    """Constraints that store every matrix in shards."""
    return {name: "shard(0)" for name, p in model.named_parameters() if p.dim() == 2 and p.shape[0] >= 4}


def divided_plan(model: nn.Module, batch: Any = (X,), **options: Any) -> Plan:
    plan = hetspmd.compile(model, batch, CLUSTER, **{"constraints": shards(model), **options})
    assert any(
        form >= 2 and max(extents) < sum(extents) for form, extents in plan.parameter_layout().values()
    )
    return plan


@cache
def net_plan() -> Plan:
    return divided_plan(net())


def on_four(
    body: Callable[..., T], make: Callable[[], nn.Module] = net, plan: Plan | None = None,
    before: Callable[[nn.Module], Any] | None = None, **options: Any,
) -> list[T]:  # fmt: skip
    """``body(hap)`` on every rank, or ``body(hap, before(model))`` of what was done before it was wrapped."""
    plan = plan or (net_plan() if make is net else divided_plan(make()))
    _ = plan.theory, plan.digest
    models = [make() for _ in range(4)]
    done = [() if before is None else (before(model),) for model in models]

    def rank(communicator: Communicator) -> T:
        hap = HAP(models[communicator.rank], CLUSTER, plan=plan, process_group=communicator, **options)
        return body(hap, *done[communicator.rank])

    return run_ranks(4, rank)


def train(
    model: nn.Module, steps: int = 3, optimizer: torch.optim.Optimizer | None = None, x: Any = X
) -> list[float]:
    """The losses of a few steps of AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
