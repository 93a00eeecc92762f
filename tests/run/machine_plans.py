"""Plans across machines of several accelerators: random programs and lengths of the machines, data parallel
inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from program_builder import cheap_random_program, random_program, uneven
from small_models import Case
from small_plans import NO_COST

from hetspmd.cluster.cluster import Cluster
from hetspmd.cost.step import StepCost
from hetspmd.optimize.hierarchy import inside_of
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.plan.plan import Plan
from hetspmd.program.schedule import make_schedule
from hetspmd.search.constraints import Constraints
from hetspmd.search.search import Limits
from scheduled import one_fragment


def machines(*accelerators: int, memory: str = "1GiB", inside: str = "1TB/s") -> Cluster:
    """Machines with these numbers of accelerators, each faster than the one before, on a network that is slow
    beside the one inside."""
    entries: list[dict[str, Any]] = []
    for i, count in enumerate(accelerators):
        speed = 1e6 * (i + 1)
        entry: dict[str, Any] = {
            "name": f"n{i}",
            "flops": speed,
            "memory": memory,
            "memory_bandwidth": "1TB/s",
        }
        if count > 1:
            entry |= {"accelerators": count, "inside": {"bandwidth": inside, "latency": "1ns"}}
        entries.append(entry | {"launch": 1e-9})
    network = {"bandwidth": "100MB/s", "latency": "1us"}
    return Cluster.load({"devices": entries, "network": network})


def busy_machines(*accelerators: int, memory: str = "1GiB") -> Cluster:
    """Slow machines with these numbers of accelerators, each faster than the one before, on a fast network, so that
    all of them have work."""
    entries: list[dict[str, Any]] = []
    for i, count in enumerate(accelerators):
        entry: dict[str, Any] = {"name": f"n{i}", "flops": 1e6 * (i + 1), "memory": memory, "launch": 1e-9}
        if count > 1:
            entry |= {"accelerators": count, "inside": {"bandwidth": "1TB/s", "latency": "1ns"}}
        entries.append(entry)
    return Cluster.load({"devices": entries, "network": {"bandwidth": "100GB/s", "latency": "1ns"}})


def machine_plan(
    case: Case, accelerators: tuple[int, ...], seed: int, active: tuple[int, ...] | None = None
) -> Plan:
    """Odd seeds: any program of the machines; even ones: one that communicates less."""
    cluster = machines(*accelerators)
    ranks = tuple(range(len(accelerators))) if active is None else active
    world = len(ranks)
    program = (random_program if seed % 2 else cheap_random_program)(case.theory, seed)
    lengths = uneven(case.theory, world, seed)
    ctx = Synthesis(case.theory, cluster, Constraints(), Limits())
    schedule = make_schedule(case.theory, program, ctx.costs(ranks).bucket_bytes)
    candidate: Any = SimpleNamespace(
        active=ranks, program=program, schedule=schedule, lengths=lengths, arrivals={}
    )
    inside = inside_of(ctx, candidate)
    everyone = len(accelerators)
    cost = StepCost(0.0, 0.0, 0.0, 0.0, (0,) * everyone, 1, (0.0,) * everyone)
    ratios = ((1.0 / world,) * world,)
    step = one_fragment(program, schedule, ratios, lengths, active=ranks, inside=inside)
    return Plan(case.theory.graph, step, cluster, cost, NO_COST, {}, ())
