"""Turns between the first and the last one that do the same with other rows are one graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from evaluations import ask
from program_builder import divided_in_the_loop
from small_plans import cluster
from test_micro_batches_training import Model, batch
from test_ranks_in_turns import KINDS, check, traced
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.lower import lower_plan
from hetspmd.lower.turn_writer import TurnGraph, _TurnWriter
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import in_micro_batches
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import in_own_turns
from hetspmd.rules.theory import derive
from hetspmd.trace.trace import trace

CPU = torch.device("cpu")
DEVICES = cluster(4, 2, 1)

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")


@pytest.mark.parametrize("name", ["gpt2", "t5", "bart", "bert-moe"])
def test_models(name: str) -> None:
    """In five turns, as alike as the rows allow, with collectives in the loop and without."""
    for kind, part in zip(KINDS, (0.0, 1.0, 0.5, 1.0), strict=True):
        check(traced(name), kind, [((0.2,) * 5, part)])


def written(plan: Plan, rank: int) -> list[TurnGraph]:
    seen: list[Any] = []
    lower_plan(plan, rank, CPU, lambda *now: seen.append(now[2]))
    return list(seen[-1].turns)


def graphs(plan: Plan, rank: int = 0) -> list[int]:
    """For each turn the first one with the same graph."""
    return [turn.of for turn in written(plan, rank)]


def test_which_turns_share_a_graph() -> None:
    model = Model().double()
    plan = hetspmd.compile(model, batch(24, 0), cluster(1), micro_batches=6)
    assert graphs(plan) == [0, 1, 1, 1, 1, 5]
    plan = hetspmd.compile(model, batch(27, 0), cluster(1), micro_batches=6)  # 5, 5, 5, 4, 4, 4 rows
    assert graphs(plan) == [0, 1, 1, 3, 3, 5]
    plan = hetspmd.compile(model, batch(9, 0), cluster(1), micro_batches=2)
    assert graphs(plan) == [0, 1]
    plan = hetspmd.compile(model, batch(24, 0), DEVICES, micro_batches=6)
    assert len(plan.active) == 3
    of = [graphs(plan, rank) for rank in range(3)]
    assert all(len(set(each)) < 6 for each in of)


def test_turns_of_their_own() -> None:
    theory, batches = in_micro_batches(derive(trace(Model().double(), (), batch(24, 0))), 2)
    assert batches is not None
    own = in_own_turns(theory, batches, (6, 1, 4))
    plan = plan_for(theory, DEVICES, divided_in_the_loop(theory, 3), (0.5, 0.25, 0.25), batches=own)
    assert [graphs(plan, rank) for rank in range(3)] == [[0, 1, 2, 2, 4, 5], [0], [0, 1, 2, 3]]


def test_dropout_draws_what_the_whole_batch_draws() -> None:
    report = hetspmd.verify(Model(dropout=0.3).double(), batch(27, 0), DEVICES, micro_batches=9)
    report.require()
    assert report.random


class Weighted(nn.Module):
    """Weights that are constants, one for each row, and one for each place in the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([float(1 + n % 5) for n in range(12)], dtype=x.dtype)
        places = torch.arange(12).to(x.dtype)
        scores = self.last(F.gelu(self.first(x)) * weights[:, None])
        return (F.cross_entropy(scores, labels, reduction="none") * (1 + places)).sum()


def test_constants_with_a_row_for_each_sample() -> None:
    example = {"x": torch.randn(12, 4, dtype=torch.float64), "labels": torch.randint(0, 3, (12,))}

    def steps(run: Any) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(run.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = run(**copy.deepcopy(example))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    for devices in (cluster(1), DEVICES):
        asked = ask(Weighted().double(), steps, cluster=devices, example=example, micro_batches=6)
        assert asked.error() < 1e-9
        (plan,) = asked.plans
        assert plan.micro_batches == 6
        own = [each for turn in written(plan, 0) for each in turn.own]
        assert any(isinstance(each, torch.Tensor) for each in own), "a constant is given to each turn"
        assert len(set(graphs(plan))) < 6


def test_rows_of_what_the_loop_has_whole_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that cuts rows of its turn out of anything but what turns are given serves that turn alone."""
    plan = hetspmd.compile(Model().double(), batch(24, 0), cluster(1), micro_batches=6)
    narrow = _TurnWriter.narrow

    def cut(self: Any, whole: Any, key: Any, level: int) -> Any:
        self.given = []
        return narrow(self, whole, key, level)

    monkeypatch.setattr(_TurnWriter, "narrow", cut)
    assert graphs(plan) == [0, 1, 2, 3, 4, 5]
