"""Explanations agree with the search: the chosen form is the cheapest, and no other form beats it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hetspmd
from hetspmd.errors import ConstraintError
from hetspmd.explain import explain

CLUSTER = {
    "devices": [{"name": "a", "flops": 4e9}, {"name": "b", "count": 2, "flops": 1e9}],
    "network": {"bandwidth": 1e9, "latency": 1e-6},
}


class Classifier(nn.Module):
    """A hidden layer so wide that its gradient is dear to reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(512, 4096)
        self.head = nn.Linear(4096, 6)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.relu(self.hidden(x))), labels)


@pytest.fixture(scope="module")
def plan() -> hetspmd.Plan:
    return hetspmd.compile(Classifier(), (torch.randn(8, 512), torch.randint(0, 6, (8,))), CLUSTER)


@pytest.mark.parametrize("name", ["hidden.weight", "hidden.bias", "head.weight"])
def test_the_chosen_form_is_the_cheapest(plan: hetspmd.Plan, name: str) -> None:
    found = explain(plan, name)
    assert found.chosen == plan.parameter_layout()[name][0]
    assert [a.form for a in found.alternatives].count(found.chosen) == 1
    least = found.alternatives[0]
    chosen = next(a for a in found.alternatives if a.form == found.chosen)
    assert least.seconds == pytest.approx(chosen.seconds)
    assert chosen.seconds == pytest.approx(plan.search.cost)
    assert len(found.alternatives) == len(plan.graph.tensors[plan.graph.parameters[0].tensor].shape) + 1 or (
        name == "hidden.bias"
    )
    assert "is chosen" in str(found)


def test_a_dear_layer_is_explained(plan: hetspmd.Plan) -> None:
    """Replicating the wide layer costs the all-reduce of its gradient."""
    found = explain(plan, "hidden.weight")
    costs = {a.form: a.seconds for a in found.alternatives}
    assert found.chosen != 0
    assert costs[0] is not None
    assert costs[0] > plan.search.cost * 1.05


def test_unknown_names_are_refused(plan: hetspmd.Plan) -> None:
    with pytest.raises(ConstraintError, match=r"did you mean 'hidden\.weight'"):
        explain(plan, "hiden.weight")
