"""A plan of another version of the model's code is noticed at the first step, on every rank, with the place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from small_models import case
from small_plans import ahead_plan, cluster, random_plan, segmented_plan
from torch import nn

import hetspmd
from hetspmd.dist.simulated_world import run_ranks
from hetspmd.errors import PlanMismatchError
from hetspmd.plan.plan import Plan
from hetspmd.run.module import HAP


class Net(nn.Module):
    """What it computes with its parameters is told from outside."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)
        self.function = function
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.function(self, x) * scale


def first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.b(torch.relu(m.a(x))) * m.table).square().mean()


OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "another op": lambda m, x: (m.b(torch.tanh(m.a(x))) * m.table).square().mean(),
    "another number": lambda m, x: (m.b(torch.relu(m.a(x))) * m.table).square().mean() * 0.5,
    "one op less": lambda m, x: (m.b(m.a(x)) * m.table).square().mean(),
    "another order": lambda m, x: (m.table * m.b(torch.relu(m.a(x)))).square().mean(),
    "another reduction": lambda m, x: (m.b(torch.relu(m.a(x))) * m.table).square().sum(),
    "another constant": lambda m, x: (m.b(torch.relu(m.a(x))) * (m.table + 1)).square().mean(),
}
BATCH = {"x": torch.randn(8, 6)}


def steps(plan: Plan, function: Callable[..., torch.Tensor], **options: Any) -> list[Any]:
    torch.manual_seed(1)
    model = Net(function)
    models = [copy.deepcopy(model) for _ in range(plan.cluster.ranks)]

    def body(communicator: Any) -> Any:
        hap = HAP(models[communicator.rank], plan.cluster, plan=plan, process_group=communicator, **options)
        try:
            return hap(**BATCH).item(), hap(**BATCH).item()
        except PlanMismatchError as error:
            with pytest.raises(PlanMismatchError, match="does not compute this model"):
                hap(**BATCH)
            return str(error)

    return run_ranks(plan.cluster.ranks, body)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hetspmd.compile(Net(first), BATCH, cluster(3, 2, 1))


def test_the_same_model_runs(plan: Plan) -> None:
    torch.manual_seed(1)
    wanted = Net(first)(**BATCH).item()
    for loss in steps(Plan.from_json(plan.to_json()), first):
        assert loss == pytest.approx((wanted, wanted), rel=1e-5)


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_model_of_the_same_parameters_is_refused_on_every_rank(plan: Plan, name: str) -> None:
    said = steps(plan, OTHERS[name])
    assert len(set(said)) == 1
    assert said[0].startswith("the plan does not compute this model: ")
    assert "the plan has " in said[0]
    assert "check_plan=False" in said[0]


def test_for_those_who_know(plan: Plan) -> None:
    torch.manual_seed(1)
    wanted = Net(first)(**BATCH).item()
    assert steps(plan, OTHERS["another op"], check_plan=False)[0][0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", ["mlp", "conv", "attention"])
def test_plans_of_all_kinds_are_recognised(name: str) -> None:
    c = case(name)
    plans = [random_plan(c, 3, 1), ahead_plan(c, 3, 2), segmented_plan(c, 3)]
    plans.append(hetspmd.compile(c.model, c.batch, cluster(4, 2, 1), loss_only=True))
    for plan in plans:
        assert all(on_ranks(c, plan, lambda hap: hap(**c.batch) is not None, check_plan=True))
