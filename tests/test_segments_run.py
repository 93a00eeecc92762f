"""Segments with sharding ratios of their own equal the single device (HAP 5.2), whatever ratios and program.

Every model is cut into segments whose ratios differ, with devices that have no share of one or of any segment, and
each style of parallelism is forced upon it; tied weights are cut too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from hetspmd.cost.model import CostModel
from hetspmd.errors import ProofError
from hetspmd.optimize.partition import partition, segmented
from hetspmd.placement import REPLICATE, before_cut, is_before_cut, placement_text, shard
from hetspmd.plan.plan import Plan
from hetspmd.program.checker import check
from hetspmd.program.program import Communicate, Compute, communication_text
from hetspmd.rules.theory import Theory, derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import Constraints
from hetspmd.trace.graph import REBALANCE
from hetspmd.trace.trace import trace
from hetspmd.verify.comparison import verify
from workbench import cluster, traced

CLUSTER = cluster(5, 1, 3, 2)
MATRIX = ((0.5, 0.0, 0.3, 0.2), (0.0, 0.4, 0.1, 0.5), (0.25, 0.25, 0.25, 0.25), (0.0, 0.0, 1.0, 0.0))


@cache
def cut(name: str, count: int) -> Theory:
    theory = traced(name).theory
    weights = [float(s) for s in CostModel(theory, CLUSTER).whole().mean(axis=1)]
    return segmented(theory, partition(theory, weights, count))


def forced(name: str, count: int, constraints: Constraints) -> Plan:
    """The best program under ``constraints`` with unlike ratios, proven and equal to the single device."""
    from hetspmd.optimize.compiler import plan_for

    entry, theory = traced(name), cut(name, count)
    plan = plan_for(theory, CLUSTER, constraints, MATRIX[: theory.axes.segments])
    report = verify(
        entry.model, entry.example, CLUSTER, plan=plan, loss=entry.loss, optimizers=("sgd",), tolerance=1e-9
    )
    report.require()
    return plan


def rebalances(plan: Plan) -> list[Communicate]:
    return [s for s in plan.program.steps if isinstance(s, Communicate) and s.kind == "rebalance"]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "vit"])
def test_data_parallel(name: str, count: int) -> None:
    theory = cut(name, count)
    assert theory.axes.segments == count
    plan = forced(name, count, known.data_parallel(theory))
    moved = rebalances(plan)
    # What crosses a cut in forward comes back as a gradient.
    assert len(moved) >= 2 * (count - 1)
    assert {plan.graph.segment(s.tensor) for s in moved} == set(range(count))
    for step in moved:
        before, after = (
            plan.theory.axes.sharded(step.tensor, step.source),
            plan.theory.axes.sharded(step.tensor, step.target),
        )
        assert before is not None
        assert after is not None
        assert (before.units, before.group, before.alignment) == (after.units, after.group, after.alignment)
        assert before.segment != after.segment


@pytest.mark.parametrize("style", [known.zero_like, known.tensor_parallel, lambda _: Constraints()])
@pytest.mark.parametrize("name", ["gpt2", "bert-moe", "dlrm"])
def test_styles(name: str, style: object) -> None:
    forced(name, 3, style(cut(name, 3)))


@pytest.mark.parametrize(
    "name", ["unet", *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5", "bart", "lstm", "swin"))]
)
def test_graphs_that_are_no_chains(name: str) -> None:
    forced(name, 3, known.data_parallel(cut(name, 3)))


def test_tied_weights_are_cut() -> None:
    """GPT-2's first and last layer are one parameter: in shards, its copy moves to the last segment's lengths, and
    its gradient back."""
    theory = cut("gpt2", 3)
    tied = next(p for p in theory.graph.parameters if len(p.names) > 1)
    copies = [i for i in theory.graph.instructions if i.op == REBALANCE and i.inputs[0] == tied.tensor]
    assert len(copies) == 1
    assert theory.graph.segment(tied.tensor) == 0
    assert tied.gradient is not None
    assert theory.graph.segment(tied.gradient) == 0
    back = theory.graph.producer(tied.gradient)
    back = back if back.op == REBALANCE else theory.graph.producer(back.inputs[0])
    assert back.op == REBALANCE
    in_shards = {copies[0].id, back.id}
    wanted = Constraints(
        {tied.tensor: shard(0)}, lambda i, row, _axis: i not in in_shards or row.post == (before_cut(0),)
    )
    plan = forced("gpt2", 3, wanted)
    assert {copies[0].outputs[0], back.outputs[0]} <= {s.tensor for s in rebalances(plan)}


def test_equal_ratios_are_one_segment() -> None:
    """At equal ratios cuts are free: the best program costs what it costs without cuts, and sends nothing more."""
    from hetspmd.optimize.compiler import plan_for

    for name in ("gpt2", "bert"):
        whole = plan_for(traced(name).theory, CLUSTER, Constraints(), MATRIX[0])
        apart = plan_for(cut(name, 3), CLUSTER, Constraints(), MATRIX[0])
        assert apart.search.cost == pytest.approx(whole.search.cost, rel=1e-6)
        assert all(
            apart.costs.move_seconds(s.tensor, s.source, s.target, s.kind, apart.lengths) == 0
            for s in rebalances(apart)
        )
        assert apart.cost.step_seconds == pytest.approx(whole.cost.step_seconds, rel=1e-6)


def test_cuts_are_the_only_copies() -> None:
    plan = forced("bert", 2, Constraints())
    for step in plan.program.steps:
        if isinstance(step, Compute) and any(map(is_before_cut, step.row.post)):
            assert plan.graph.instructions[step.instruction].op == REBALANCE


def test_cut_theory_of_a_traced_model() -> None:
    """Where nothing can be divided no copy is made; all else that crosses is copied once per segment."""
    theory = cut("gpt2", 3)
    graph = theory.graph
    copies = [i for i in graph.instructions if i.op == REBALANCE]
    assert len({(i.inputs[0], graph.segments[i.id]) for i in copies}) == len(copies)
    for i in graph.instructions:
        for t in i.inputs:
            divided = any(
                (axis := theory.axes.axis(t, d)) is not None and axis.units >= 2
                for d in range(len(graph.tensors[t].shape))
            )
            if divided and i.op != REBALANCE:
                assert graph.segment(t) == graph.segments[i.id]
    for p in graph.parameters:
        if p.gradient is not None:
            assert graph.segment(p.gradient) == graph.segment(p.tensor)


def test_the_checker_wants_every_rebalance() -> None:
    """Without one, or along another dim, a copy's own slices are not proved."""
    theory = cut("gpt2", 2)
    plan = forced("gpt2", 2, known.data_parallel(theory))
    step = rebalances(plan)[0]
    place = plan.program.steps.index(step)
    steps = plan.program.steps
    for wrong in (
        (),
        (replace(step, target=shard(1)),),
        (replace(step, kind="all_to_all"),),
        (replace(step, kind="all_gather", target=REPLICATE),),
    ):
        with pytest.raises(ProofError):
            check(theory, replace(plan.program, steps=(*steps[:place], *wrong, *steps[place + 1 :])))
    assert placement_text(step.source) == "shard(0)'"
    assert communication_text(step, "x") == "Rebalance(x, 0)"


def test_tensors_of_many_dims_are_not_divided_beyond_the_first() -> None:
    """Forms name the first 14 dims; a factor along a later one is left out."""
    parts = [torch.ones((1,) * 14 + (2,)), torch.ones((2,) + (1,) * 14)]

    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

    for x, divided in zip(parts, (False, True), strict=True):
        made = derive(trace(Wide(), (x,), {}, training=False))
        (row,) = (i for i in made.graph.instructions if i.op.startswith("aten.mul"))
        assert (len([r for r in made.rows[row.id] if r.factor is not None]) > 0) == divided
    with pytest.raises(ValueError, match="less than 14"):
        shard(14)
