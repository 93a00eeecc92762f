"""HAP(..., cuda_graphs=...): what runs by captures gives the bits of what runs without.

The capturer is the one for CPUs, which is as strict as CUDA graphs: it repeats recorded ops on the same memory.
"""

from __future__ import annotations

import pytest
import torch
from captures import all_captured, both, compared, steps_of
from small_models import Case, case
from small_plans import cluster, random_plan, segmented_plan
from torch import nn

from hetspmd.optimize.compiler import plan_for
from hetspmd.rules.theory import derive
from hetspmd.search.constraints import Constraints
from hetspmd.trace.trace import trace


@pytest.mark.parametrize("name", ["mlp", "conv", "residual", "attention"])
def test_training_and_evaluation(name: str) -> None:
    hap = both(case(name))
    assert all_captured(hap)
    assert steps_of(hap) == {"": 4}
    assert all(p.between == 0 for p in hap.cuda_graphs_report().plans)


SUBJECTS = [
    ("mlp", 2, 2), ("attention", 2, 1),
    *(pytest.param(n, w, s, marks=pytest.mark.slow)
      for n in ("mlp", "conv", "attention") for w in (2, 3) for s in (3, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "world", "seed"), SUBJECTS)
def test_random_programs(name: str, world: int, seed: int) -> None:
    c = case(name)
    compared(c, random_plan(c, world, seed))


class Parts(nn.Module):
    """A parameter in parts: views that the backward reads after the optimizer has changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.weight.chunk(3)
        return (torch.tanh(x @ first) @ second.T @ third).square().mean()


def test_views_of_parameters() -> None:
    torch.manual_seed(0)
    model, batch = Parts(), {"x": torch.randn(5, 2, dtype=torch.float64)}
    both(Case(model, batch, derive(trace(model, (), batch))))


@pytest.mark.parametrize("name", ["mlp", pytest.param("conv", marks=pytest.mark.slow)])
def test_empty_shards(name: str) -> None:
    c = case(name)
    compared(c, segmented_plan(c, 3))


def test_idle_devices() -> None:
    c = case("mlp")
    plan = plan_for(c.theory, cluster(1, 2, 3), Constraints(), (0.5, 0.5), active=(0, 2))
    reports = compared(c, plan)
    assert "this device is idle" in reports[1]
    assert "4 steps by captures" in reports[0]
