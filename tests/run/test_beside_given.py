"""Batches of classes of the user's own, whose methods read variables."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from beside import X
from small_plans import cluster
from torch import nn

from hetspmd.dist.simulated_world import run_ranks
from hetspmd.run.module import HAP

FACTOR = 1.0


class Row(NamedTuple):
    x: torch.Tensor

    def read(self) -> float:
        return FACTOR


@dataclasses.dataclass
class Batch:
    x: torch.Tensor

    def read(self) -> float:
        return self.factor

    @property
    def factor(self) -> float:
        return FACTOR


class Fields(dict[str, Any]):
    @property
    def x(self) -> torch.Tensor:
        return self["x"]  # type: ignore[no-any-return]  # a field

    def read(self) -> float:
        return FACTOR


@dataclasses.dataclass
class Outer:
    inner: Batch

    @property
    def x(self) -> torch.Tensor:
        return self.inner.x

    def read(self) -> float:
        return self.inner.read()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.down(torch.tanh(self.up(batch.x))).square().mean() * batch.read()  # type: ignore[no-any-return]  # a number


BATCHES: dict[str, Callable[[], Any]] = {
    "named tuple": lambda: Row(X),
    "dataclass": lambda: Batch(X),
    "derived from dict": lambda: Fields(x=X),
    "nested": lambda: Outer(Batch(X)),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    globals()["FACTOR"] = 1.0


def train(call: Any, parameters: Any, batch: Callable[[], Any]) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(4):
        globals()["FACTOR"] = 2.0 if step > 1 else 1.0
        optimizer.zero_grad()
        loss = call(batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", BATCHES)
def test_the_methods_of_a_batch_read(name: str) -> None:
    torch.manual_seed(1)
    model = Net()
    models = [copy.deepcopy(model) for _ in range(4)]
    single = train(model, model.parameters(), BATCHES[name])
    assert single[2] > 1.5 * single[1], "the step must read it"
    globals()["FACTOR"] = 1.0

    def rank(communicator: Any) -> list[float]:
        hap = HAP(
            models[communicator.rank],
            cluster(4, 2, 1, 1),
            example=(BATCHES[name](),),
            process_group=communicator,
        )
        assert len(hap.plan.active) == 4, "the plan must divide"
        return train(hap, hap.parameters(), BATCHES[name])

    for losses in run_ranks(4, rank):
        torch.testing.assert_close(losses, single, rtol=1e-5, atol=1e-7)
