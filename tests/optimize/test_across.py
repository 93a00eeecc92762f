"""Across machines, candidates are compared with what the accelerators inside add to each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetspmd.cluster.cluster import Cluster
from hetspmd.optimize.compile_options import CompileOptions
from hetspmd.optimize.compiler import compile_plan
from hetspmd.optimize.hierarchy import counting_inside, inside_of, step_across
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import synthesize
from hetspmd.report.candidates import candidates_text
from hetspmd.search.constraints import resolve
from hetspmd.search.search import Limits
from hetspmd.trace.trace import split_example
from workbench import traced


def machines(inside: float, between: float) -> Cluster:
    """Three machines of unlike sizes with links of ``inside`` and ``between`` bytes/s."""
    kind = {"memory": 1e12, "memory_bandwidth": 1e8, "launch": 1e-6}
    return Cluster.load(
        {
            "devices": [
                {"name": f"m{i}", "flops": flops, "accelerators": count, **kind,
                 "inside": {"bandwidth": inside, "latency": 1e-6}}
                for i, (flops, count) in enumerate(((1e8, 8), (1e8, 4), (5e7, 4)))
            ],
            "network": {"bandwidth": between, "latency": 1e-5},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def ctx() -> Synthesis:
    theory = traced("dlrm").theory
    return Synthesis(theory, machines(1e6, 1e8), resolve(theory, {}), Limits(seconds=600.0))


def test_what_is_added_inside_counts_in_the_comparison(ctx: Synthesis) -> None:
    outcome = synthesize(ctx)
    inside = inside_of(ctx, outcome.best)
    better, less = step_across(ctx)
    assert better.best.seconds > outcome.best.seconds, "without what is added it is not the fastest"
    assert better.best.seconds + less.seconds < 0.92 * (outcome.best.seconds + inside.seconds)
    assert less == inside_of(ctx, better.best)
    first, *others = better.considered
    assert (first.verdict, first.reason, first.seconds) == ("taken", better.best.reason, better.best.seconds)
    assert len(better.considered) == len(outcome.considered)
    assert all(c.verdict in ("slower", "bound") for c in others)
    none_left = replace(ctx, thresholds=replace(ctx.thresholds, inside_gain=1.0))
    assert counting_inside(none_left, (outcome, inside)) == (outcome, inside)


def test_the_plan_has_the_better_candidate(ctx: Synthesis) -> None:
    entry = traced("dlrm")
    args, kwargs = split_example(entry.example)
    options = CompileOptions(machines="virtual", segments=1)
    plan = compile_plan(entry.model, args, kwargs, ctx.cluster, options, traced=ctx.theory.graph)
    better, inside = step_across(ctx)
    assert plan.cost.step_seconds == pytest.approx(better.best.seconds + inside.seconds)
    assert plan.program == better.best.program
    assert "slower, but for what goes on inside machines" in candidates_text(plan)
