"""HAP of segments in micro-batches: the training loop of a user, equal to one device with the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from evaluations import ask
from test_micro_batches_training import DEVICES, Model, batch, trained

import hetspmd
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.partition import partition, segmented
from hetspmd.optimize.zero_levels import repeated_in
from hetspmd.plan.plan import Plan
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.program import Communicate
from hetspmd.rules.theory import derive
from hetspmd.search.constraints import zero
from hetspmd.trace.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::hetspmd.errors.DroppedOutputWarning")

SEGMENTS = ((0.5, 0.3, 0.2), (0.2, 0.0, 0.8), (0.0, 0.9, 0.1))
"""Ratios of three segments."""


@pytest.mark.parametrize(("count", "level"), [(2, 0), (3, 3), pytest.param(9, 1, marks=pytest.mark.slow)])
def test_segments_with_ratios_of_their_own(count: int, level: int) -> None:
    """With batches of other sizes, whose plans have the first one's segments."""
    theory, _ = in_micro_batches(derive(trace(Model().double(), (), batch(9, 0))), count)
    theory = segmented(theory, partition(theory, [1.0] * len(theory.graph.instructions), 3))
    batches = micro_batches(theory, count)
    batches = replace(batches, repeated=repeated_in(theory, batches, level))
    constraints = composed(theory, batches, zero(theory, level))
    plan = plan_for(theory, DEVICES, constraints, SEGMENTS, batches=batches)
    asked = ask(Model().double(), trained, cluster=DEVICES, plan=plan)
    assert asked.error() < 1e-9
    training = [plan for plan in asked.plans if plan.graph.training and plan.program.gradients]
    assert [plan.micro_batches for plan in training] == [count, min(count, 4), 2]
    for plan in asked.plans:
        assert plan.ratios == SEGMENTS
        kinds = [step.kind for step in plan.program.steps if isinstance(step, Communicate)]
        assert "rebalance" in kinds or plan not in training


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 3, "segments": 2, "recompute": "all"},
        {"micro_batches": "auto", "segments": 2, "zero": 3},
    ],
)
def test_segments_that_are_asked_for(options: dict[str, Any]) -> None:
    asked = ask(Model().double(), trained, cluster=DEVICES, example=batch(9, 0), **options)
    assert asked.error() < 1e-9
    assert asked.plans[0].graph.segment_count == 2
    assert "one_segment" in asked.plans[0].baselines


def test_one_segment_where_nobody_asks_for_more() -> None:
    plan = hetspmd.compile(Model(), batch(9, 0), DEVICES, micro_batches=3)
    assert plan.graph.segment_count == 1
    again = Plan.from_json(
        hetspmd.compile(Model(), batch(9, 0), DEVICES, micro_batches=3, segments=2).to_json()
    )
    assert (again.graph.segment_count, again.micro_batches) == (2, 3)
