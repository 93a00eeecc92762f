"""Steps that read modules and parameters outside of the model, on three ranks and on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from small_plans import cluster
from torch import nn
from torch.nn import functional as F

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP

X = torch.randn(16, 12, generator=torch.Generator().manual_seed(0))
RANKS = 3


def student() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))


@dataclass
class Step:
    """A model, what computes its loss, what changes between steps, and parameters that the optimizer has beside
    the model's."""

    model: nn.Module
    loss: Callable[..., torch.Tensor]
    each: Callable[[int], object] = lambda step: None
    more: Iterable[torch.Tensor] = ()
    look: Callable[[], Any] = lambda: None


@dataclass
class Losses:
    """The losses of steps, and what was looked at after them."""

    losses: list[float] = field(default_factory=list)
    seen: Any = None


def steps(call: Callable[..., torch.Tensor], parameters: Iterable[Any], step: Step, count: int) -> Losses:
    optimizer = torch.optim.SGD([*parameters, *step.more], lr=0.1)
    found = Losses()
    for number in range(count):
        step.each(number)
        optimizer.zero_grad()
        loss = call(X)
        loss.backward()
        optimizer.step()
        found.losses.append(float(loss.detach()))
    found.seen = step.look()
    return found


def both(make: Callable[[], Step], count: int = 4, **options: Any) -> tuple[Losses, list[Losses]]:
    """What one device does and what three ranks do, each with what ``make`` gives."""

    def made() -> Step:
        torch.manual_seed(1)
        return make()

    one, *each = (made() for _ in range(1 + RANKS))

    def rank(communicator: Any) -> Losses:
        mine = each[communicator.rank]
        hap = HAP(
            mine.model,
            cluster(4, 2, 1),
            example=(X,),
            loss=mine.loss,
            process_group=communicator,
            **options,
        )
        assert len(hap.plan.active) == RANKS, "the plan must divide"
        return steps(hap, hap.parameters(), mine, count)

    single = steps(lambda x: one.loss(one.model, x), one.model.parameters(), one, count)
    return single, run_ranks(RANKS, rank)


def equal(make: Callable[[], Step], count: int = 4, *, moves: bool = True, **options: Any) -> None:
    """Assert that all ranks train as one device. ``moves``: what changes between steps changes the losses."""
    single, ranks = both(make, count, **options)
    if moves:
        still, _ = single, None
        plain = _unchanged(make, count)
        assert max(abs(a - b) for a, b in zip(still.losses, plain.losses, strict=True)) > 1e-4, "no change"
    for found in ranks:
        torch.testing.assert_close(found.losses, single.losses, rtol=1e-5, atol=1e-7)
        assert found.seen == single.seen


def _unchanged(make: Callable[[], Step], count: int) -> Losses:
    torch.manual_seed(1)
    step = make()
    step.each = lambda number: None
    return steps(lambda x: step.loss(step.model, x), step.model.parameters(), step, count)


def distance(model: nn.Module, x: torch.Tensor, teacher: Callable[..., torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(x), teacher(x))


class Scaled(nn.Module):
    """A layer with a buffer, a number, and another way in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(12))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.factor * (2.0 if self.training else 1.0)


class Listed(nn.Module):
    """Layers in the containers of torch, of which the forward asks for one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])
        self.named = nn.ModuleDict({"a": nn.Linear(12, 12)})
        self.rows = nn.ParameterList([torch.ones(12), torch.ones(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.named["a"](x) * self.rows[1] * len(self.layers)


def deep() -> nn.Module:
    """A teacher whose tensors lie below its top."""
    body = nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.GroupNorm(4, 24), nn.BatchNorm1d(24), nn.Linear(24, 12)
    )
    return nn.Sequential(body, Scaled(), Listed()).requires_grad_(False).eval()


def moved(teacher: nn.Module) -> Callable[[int], None]:
    """What moves all tensors of a teacher in place, as averages of weights do."""

    def each(step: int) -> None:
        with torch.no_grad():
            for tensor in (*teacher.parameters(), *teacher.buffers()):
                if tensor.is_floating_point() and step:
                    tensor.mul_(0.9).add_(0.2)

    return each


class Holder:
    """A plain object with a teacher, and a method that is the loss."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return distance(model, x, self.teacher)


def by_closure(teacher: nn.Module) -> Step:
    return Step(student(), lambda model, x: distance(model, x, teacher))
