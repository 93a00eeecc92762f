"""Plans of the small models: random programs at random lengths, and clusters to go with them."""

from __future__ import annotations

from typing import Any

from program_builder import cheap_random_program, random_program, uneven
from small_models import Case

from hetspmd.balance.lengths import Lengths
from hetspmd.cost.cluster import Cluster
from hetspmd.cost.step import StepCost
from hetspmd.plan import Plan, SearchReport
from hetspmd.synth.program import Program

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
    ratios = (1.0 / world,) * world
    return Plan(
        case.theory.graph, program, ratios, lengths, cluster(*range(1, world + 1)), cost, NO_COST, {}, ()
    )


def random_plan(case: Case, world: int, seed: int) -> Plan:
    """Odd seeds: any program; even seeds: one that communicates less."""
    make = random_program if seed % 2 else cheap_random_program
    return handmade_plan(case, make(case.theory, seed), uneven(case.theory, world, seed))
