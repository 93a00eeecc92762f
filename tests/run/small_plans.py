"""Plans of the small models: random programs at random lengths, and clusters to go with them."""

from __future__ import annotations

from typing import Any

from program_builder import cheap_random_program, random_program, uneven
from small_models import Case

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.model import CostModel
from hetspmd.cost.step import StepCost
from hetspmd.optimize.compiler import plan_for
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.partition import partition, segmented
from hetspmd.plan.plan import Plan
from hetspmd.plan.reports import SearchReport
from hetspmd.program.lengths import Lengths, Matrix
from hetspmd.program.micro_batches import micro_batches
from hetspmd.program.program import Program
from hetspmd.program.schedule import make_schedule
from hetspmd.rules.theory import Theory
from hetspmd.search import constraints as known
from scheduled import one_fragment, rescheduled

NO_COST = SearchReport(0.0, 0.0, 0.0, "handmade", 0)


def cluster(*speeds: float) -> Cluster:
    """Devices of these speeds (TFLOP/s) on a fast network, so that even small models are divided."""
    devices: list[dict[str, Any]] = [
        {"name": f"d{i}", "flops": s * 1e6, "memory": "1GiB", "memory_bandwidth": s * 1e6}
        for i, s in enumerate(speeds)
    ]
    return Cluster.load({"devices": devices, "network": {"bandwidth": "100GB/s", "latency": "1ns"}})


def handmade_plan(case: Case, program: Program, lengths: Lengths) -> Plan:
    world = lengths.world
    cost = StepCost(0.0, 0.0, 0.0, 0.0, (0,) * world, 1, (0.0,) * world)
    ratios = ((1.0 / world,) * world,) * case.theory.axes.segments
    devices = cluster(*range(1, world + 1))
    schedule = make_schedule(case.theory, program, CostModel(case.theory, devices).bucket_bytes)
    step = one_fragment(program, schedule, ratios, lengths)
    return Plan(case.theory.graph, step, devices, cost, NO_COST, {}, ())


def segmented_plan(case: Case, world: int) -> Plan:
    """Data parallelism in two segments: in one the first rank has the most, in the other it has nothing."""
    cut, ratios = _cut(case.theory, world)
    return plan_for(cut, cluster(*range(1, world + 1)), known.data_parallel(cut), ratios)


def segmented_in_turns(case: Case, count: int) -> Plan:
    """The same of three ranks, in so many micro-batches."""
    cut, ratios = _cut(in_micro_batches(case.theory, count)[0], 3)
    batches = micro_batches(cut, count)
    constraints = composed(cut, batches, known.data_parallel(cut))
    return plan_for(cut, cluster(1, 2, 3), constraints, ratios, batches=batches)


def _cut(theory: Theory, world: int) -> tuple[Theory, Matrix]:
    cut = segmented(theory, partition(theory, [1.0] * len(theory.graph.instructions), 2))
    assert cut.axes.segments == 2
    first = [float(world - r) for r in range(world)]
    second = [float(r) for r in range(world)]
    return cut, tuple(tuple(x / sum(row) for x in row) for row in (first, second))


def ahead_plan(case: Case, world: int, groups: int) -> Plan:
    """Every parameter in shards, uneven ones, gathered ``groups`` groups ahead."""
    theory, total = case.theory, world * (world + 1) / 2
    ratios = tuple((r + 1) / total for r in range(world))
    plan = plan_for(theory, cluster(*range(1, world + 1)), known.zero_like(theory), ratios)
    return plan.with_step(schedule=rescheduled(plan, groups))


def random_plan(case: Case, world: int, seed: int) -> Plan:
    """Odd seeds: any program; even seeds: one that communicates less."""
    make = random_program if seed % 2 else cheap_random_program
    return handmade_plan(case, make(case.theory, seed), uneven(case.theory, world, seed))
