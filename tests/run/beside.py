"""Models that do something beside their graph, on three ranks and on one device, step by step.

One rank traces and two follow, all of unlike shares; a further one would do as the second does, and take a sixth
more time.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from small_plans import cluster
from torch import nn

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP

Each = Callable[[Any, int], object]
RANKS = 3
X = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))


class Beside(nn.Module):
    """Two layers, and a forward that is a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **members: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.function = forward
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def base(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.down(torch.tanh(model.up(x))).square().mean()


@dataclass(frozen=True)
class Trained:
    """Losses by step, what was looked at in the model after them, and of ranks the number of plans."""

    losses: list[float]
    seen: Any
    plans: int = 0


def _steps(call: Any, model: Any, parameters: Any, each: Each, count: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(count):
        each(model, step)
        optimizer.zero_grad()
        loss = call(X)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train(
    make: Callable[[], nn.Module], each: Each = lambda model, step: None, *, steps: int = 4,
    look: Callable[[Any], Any] = lambda model: None, **options: Any,
) -> tuple[Trained, list[Trained]]:  # fmt: skip
    """The one device and the ranks. ``each`` is called with the model and the step before each step."""
    torch.manual_seed(1)
    first = make()
    models = [copy.deepcopy(first) for _ in range(RANKS)]
    devices = cluster(4, 2, 1)

    barrier = threading.Barrier(RANKS, timeout=60.0)

    def together(model: Any, step: int) -> None:
        """No rank changes what the threads share while another one is in the step before."""
        with suppress(threading.BrokenBarrierError):
            barrier.wait()
        each(model, step)

    def rank(communicator: Any) -> Trained:
        hap = HAP(models[communicator.rank], devices, example=(X,), process_group=communicator, **options)
        assert len(hap.plan.active) == RANKS, "the plan must divide"
        try:
            losses = _steps(hap, hap.module, hap.parameters(), together, steps)
        finally:
            barrier.abort()  # none waits for a rank that has failed
        return Trained(losses, look(hap.module), len(hap._plans.entries))

    _seed()
    one = copy.deepcopy(first)
    losses = _steps(one, one, one.parameters(), each, steps)
    single = Trained(losses, look(one))
    _seed()
    return single, run_ranks(RANKS, rank)


def _seed() -> None:
    random.seed(3)
    np.random.seed(3)  # the global generator is what models draw from


def equal(
    make: Callable[[], nn.Module], each: Each = lambda model, step: None, *, plans: int | None = None,
    **options: Any,
) -> Trained:  # fmt: skip
    """Assert that all ranks train as one device; ``plans``: with so many. Returns what one device did."""
    single, ranks = train(make, each, **options)
    for rank in ranks:
        torch.testing.assert_close(rank.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert rank.seen == single.seen
        assert plans is None or rank.plans == plans
    return single
