"""The stage model and memory against numbers worked out by hand."""

from __future__ import annotations

import pytest
from cost_graphs import cluster, data_parallel, mlp, program, random_program
from hypothesis import given, settings
from hypothesis import strategies as st

from hetspmd.codec.records import decode, encode
from hetspmd.cost.memory import memory_profile
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import Stages, StepCost, StepModel
from hetspmd.placement import shard
from hetspmd.program.lengths import lengths_for
from hetspmd.program.program import Communicate, Compute, Program
from scheduled import simulated_seconds

LATENCY, BANDWIDTH, LAUNCH = 1e-5, 1e9, 1e-6


def test_data_parallel_mlp_costs_exactly_this() -> None:
    """8 ops divided along the batch in the first stage; then the loss and two gradients are all-reduced."""
    theory = mlp(batch=32, width=8, hidden=16)
    model = CostModel(theory, cluster(1e8, 3e8, memory_bandwidth=1e15))
    dp = data_parallel(theory)
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    moves = [s for s in dp.steps if isinstance(s, Communicate)]
    assert [(s.kind, theory.graph.tensors[s.tensor].name) for s in moves] == [
        ("all_reduce", "loss"), ("all_reduce", "gu0"), ("all_reduce", "gv0"),
    ]  # fmt: skip
    flops = 5 * 2 * 32 * 8 * 16 + 2 * 32 * 16 + 32 * 8
    ops = 8 + 2  # and the optimizer's steps on two parameters
    compute = flops / 4 / 1e8 + ops * LAUNCH  # both devices take as long
    communicate = 3 * 2 * LATENCY + (4 + 2 * 8 * 16 * 4) / BANDWIDTH  # 2 (n - 1) / n = 1
    found = StepModel(model, dp).cost(lengths)
    assert found.compute_seconds == pytest.approx(compute)
    assert found.communication_seconds == pytest.approx(communicate)
    assert found.stage_seconds == pytest.approx(compute + communicate)
    assert compute < found.step_seconds <= found.stage_seconds, "gradients travel while others are computed"
    assert found.per_device_compute == pytest.approx((compute, compute))
    assert found.stages == 4
    assert decode(encode(found), StepCost) == found


def test_a_stage_waits_for_its_slowest_device() -> None:
    theory = mlp(batch=32, width=8, hidden=16)
    model = CostModel(theory, cluster(1e8, 3e8, memory_bandwidth=1e15))
    found = StepModel(model, data_parallel(theory)).cost(lengths_for(theory.axes, (0.5, 0.5)))
    flops = 5 * 2 * 32 * 8 * 16 + 2 * 32 * 16 + 32 * 8
    assert found.compute_seconds == pytest.approx(flops / 2 / 1e8 + 10 * LAUNCH)
    assert found.per_device_compute[1] == pytest.approx(flops / 2 / 3e8 + 10 * LAUNCH)


def test_each_collective_begins_a_stage() -> None:
    """One op per stage, the slow device in the first stage idle in the second: maxima do not cancel."""
    theory = mlp(batch=8, width=8, hidden=8)
    u = theory.graph.parameters[0].tensor
    forced = program(theory, lambda _, rows: len(rows) - 1, lambda t: shard(0) if t == u else 0)
    model = CostModel(theory, cluster(1e8, 1e8, memory_bandwidth=1e15))
    lengths = lengths_for(theory.axes, (0.5, 0.5))
    found = StepModel(model, forced).cost(lengths)
    kinds = [s.kind for s in forced.steps if isinstance(s, Communicate)]
    assert len(kinds) == 1  # the parameter is gathered; its whole gradient is cut for nothing
    assert found.stages == 2
    assert found.per_device_compute[0] == pytest.approx(found.compute_seconds)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.floats(0.01, 1), min_size=3, max_size=3))
def test_step_cost_is_the_sum_over_stages(seed: int, weights: list[float]) -> None:
    """Against a plain loop over the program, written without the vectorised parts."""
    theory = mlp(batch=12, width=6, hidden=10, layers=2)
    model = CostModel(theory, cluster(1e8, 2e8, 5e7))
    chosen = random_program(theory, seed)
    lengths = lengths_for(theory.axes, weights)
    total, busy = 0.0, [0.0] * 3
    for step in chosen.steps:
        if isinstance(step, Compute):
            r = theory.rows[step.instruction].index(step.row)
            seconds = model.row_seconds(step.instruction, r, lengths)
            busy = [b + s for b, s in zip(busy, seconds, strict=True)]
        else:
            total += max(busy) + model.move_seconds(step.tensor, step.source, step.target, step.kind, lengths)
            busy = [0.0] * 3
    total += max(busy)
    found = StepModel(model, chosen).cost(lengths)
    assert found.stage_seconds == pytest.approx(total)
    assert Stages(model, chosen).seconds(model.shares(lengths)) == pytest.approx(total)
    assert found.stage_seconds == pytest.approx(found.compute_seconds + found.communication_seconds)
    assert found.step_seconds == simulated_seconds(model, chosen, lengths)
    assert found.compute_seconds >= max(found.per_device_compute) * (1 - 1e-12)


def test_memory_by_hand() -> None:
    """Parameters u, v and Adam's two moments, inputs x and g, and at the peak: a, loss, gv, ga, gh; or, with a
    small share, the loss, both gradients, and three temporaries of the update of v, one of them left of that of u.
    """
    theory = mlp(batch=32, width=8, hidden=16)
    dp = data_parallel(theory)
    lengths = lengths_for(theory.axes, (0.25, 0.75))
    weights = 2 * 8 * 16 * 4
    optimizer = 2 * 8 * 16 * 8
    inputs = 2 * 32 * 8 * 4
    hidden = 32 * 16 * 4  # bytes of a, ga and gh together with their batch whole
    gradient = 8 * 16 * 4
    at_gh = [max(3 * hidden * s + 4 + gradient, 4 + 5 * gradient) for s in (0.25, 0.75)]
    found = memory_profile(theory, dp, lengths).peaks
    assert found == tuple(int(weights + optimizer + inputs + p) for p in at_gh)
    assert memory_profile(theory, dp, lengths, optimizer_bytes=4).peaks[0] == found[0] - optimizer // 2


def test_sharded_parameters_take_their_share() -> None:
    theory = mlp(batch=4, width=8, hidden=16)
    whole = data_parallel(theory)
    batch = theory.axes.of[theory.graph.inputs[0].tensor, 0]

    def choose(instruction: int, rows: list) -> int:
        for i, row in enumerate(rows):
            if theory.row_axes[instruction][theory.rows[instruction].index(row)] == batch:
                return i
        return len(rows) - 1

    sharded = program(theory, choose, lambda t: shard(0))
    lengths = lengths_for(theory.axes, (0.75, 0.25))
    a, b = memory_profile(theory, sharded, lengths).peaks, memory_profile(theory, whole, lengths).peaks
    assert a[1] < a[0]
    assert a[1] < b[1]


def test_a_step_of_another_theory_is_refused() -> None:
    """With a hidden size of 1 there is nothing to divide along it, and so no such triple."""
    theory, other = mlp(), mlp(hidden=1)
    h = next(i for i, rows in enumerate(theory.rows) if any(r.name == "h" for r in rows))
    row = next(r for r in theory.rows[h] if r.name == "h")
    foreign = Program((Compute(h, row),), None, (), (), ())
    model = CostModel(other, cluster(1e8, 1e8))
    with pytest.raises(ValueError, match="is no triple of instruction"):
        StepModel(model, foreign).cost(lengths_for(other.axes, (0.5, 0.5)))
