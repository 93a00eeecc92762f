"""Plans that are worth measuring beside the one that is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import has_machines
from hetspmd.cost.model import CostModel
from hetspmd.errors import HetspmdError
from hetspmd.optimize.alternation import Alternation, Clock
from hetspmd.optimize.compiler import compile_plan, following_plan, plan_for
from hetspmd.optimize.following import follows
from hetspmd.placement import Placement
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import by_segment
from hetspmd.ratios.starts import proportional, starting_ratios, teams
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import resolve
from hetspmd.search.search import Limits
from hetspmd.trace.losses import Loss
from hetspmd.trace.trace import trace

__all__ = ["COMPILED", "alternatives"]

COMPILED: Final = "compiled"
FARTHEST: Final = 1.6
"""How many times the predicted seconds of the compiled plan another may have."""


def alternatives(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], cluster: Cluster, *,
    loss: Loss | None = None, constraints: Mapping[str, str | Placement] | None = None, strict: bool = False,
    time_limit: float = 600.0, loss_only: bool = False, **options: Any,
) -> dict[str, Plan]:  # fmt: skip
    """By name, the compiled plan first and then others that fit, the predicted fastest first: the best ones of all
    devices and of each team of fast ones, the fastest alone among them, and data parallelism in proportion to the
    devices' speeds where no constraints are given. Across machines with several accelerators: both ways to plan
    them. Each program once; none whose predicted seconds are beyond :data:`FARTHEST` times the first's.

    Takes the arguments of :func:`hetspmd.optimize.compiler.compile_plan` and raises what it raises.
    """
    shared: dict[str, Any] = {
        "loss": loss,
        "constraints": constraints,
        "strict": strict,
        "time_limit": time_limit,
        "loss_only": loss_only,
    }
    compiled = compile_plan(model, args, kwargs, cluster, **shared, **options)
    found = {COMPILED: compiled}
    if has_machines(cluster):
        for way in ("virtual", "flat"):
            try:
                found[way] = compile_plan(
                    model, args, kwargs, cluster, **shared, **{**options, "machines": way}
                )
            except HetspmdError:  # one of the two may not fit
                continue
        return _distinct(found)
    drawn = options.get("host_randomness", "refuse")
    graph = trace(model, args, kwargs, loss=loss, host_randomness=drawn)
    theory = derive(graph.without_outputs() if loss_only and graph.loss is not None else graph, strict=strict)
    limits = Limits(seconds=time_limit)
    fixed = resolve(theory, constraints)
    costs = CostModel(theory, cluster)
    alternation = Alternation(theory, cluster, fixed, limits, Clock())
    for ranks in (tuple(range(cluster.world)), *teams(costs)):
        if ranks == compiled.active and len(compiled.ratios) == 1:
            continue
        starts = starting_ratios(CostModel(theory, cluster.part(ranks)))
        outcome = alternation.on(ranks, [(name, by_segment(ratios, 1)) for name, ratios in starts])
        if outcome is not None:
            plan = following_plan(theory, cluster, outcome, constraints, limits, Clock())
            if follows(plan) or not follows(compiled):
                found[_name(ranks, cluster.world)] = plan
    if not constraints:
        rows = plan_for(theory, cluster, known.data_parallel(theory), proportional(costs), limits=limits)
        if all(b <= d.memory for b, d in zip(rows.cost.memory_bytes, cluster.devices, strict=True)):
            found["data parallel"] = rows
    return _distinct(found)


def _name(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world:
        return "all devices"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _distinct(found: Mapping[str, Plan]) -> dict[str, Plan]:
    first = found[COMPILED]
    near = [n for n, p in found.items() if p.cost.step_seconds <= FARTHEST * first.cost.step_seconds]
    near.sort(key=lambda n: (n != COMPILED, found[n].cost.step_seconds))
    kept: dict[str, Plan] = {}
    for name in near:
        if not any(_same(found[name], plan) for plan in kept.values()):
            kept[name] = found[name]
    return kept


def _same(one: Plan, other: Plan) -> bool:
    return (one.program, one.lengths, one.active) == (other.program, other.lengths, other.active)
