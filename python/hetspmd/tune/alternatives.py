"""Plans that are worth measuring beside the one that is predicted to be the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from torch import nn

from hetspmd.cluster.cluster import Cluster
from hetspmd.cluster.machines import flat, has_machines
from hetspmd.errors import HetspmdError
from hetspmd.optimize.compilation import following_plan, plan_of
from hetspmd.optimize.compile_options import CompileOptions, Machines
from hetspmd.optimize.compiler import compile_plan, plan_for
from hetspmd.optimize.following import follows
from hetspmd.optimize.in_micro_batches import composed, in_micro_batches
from hetspmd.optimize.synthesis import Synthesis
from hetspmd.optimize.synthesize import synthesize_on
from hetspmd.optimize.zero_levels import loop_like, zero_of
from hetspmd.plan.plan import Plan
from hetspmd.program.lengths import by_segment
from hetspmd.ratios.starts import device_subsets, proportional, starting_ratios
from hetspmd.rules.theory import derive
from hetspmd.search import constraints as known
from hetspmd.search.constraints import resolve
from hetspmd.search.search import Limits
from hetspmd.trace.blocks import as_in
from hetspmd.trace.trace import trace
from hetspmd.tune.tune_thresholds import THRESHOLDS

COMPILED: Final = "compiled"


def alternatives(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    cluster: Cluster,
    options: CompileOptions | None = None,
) -> dict[str, Plan]:
    """By name, the compiled plan first and then others that fit, the predicted fastest first: the best ones of all
    devices and of each subset of fast ones, the fastest alone among them, and data parallelism in proportion to the
    devices' speeds where no constraints are given. Across machines with several accelerators: both ways to plan
    them. Each program once; none whose predicted seconds are beyond ``slowest_alternative`` times the first's.

    Takes the arguments of :func:`hetspmd.optimize.compiler.compile_plan` and raises what it raises.
    """
    asked = options or CompileOptions()
    compiled = compile_plan(model, args, kwargs, cluster, asked)
    plans = {COMPILED: compiled}
    cluster = flat(cluster) if asked.zero is not None else cluster
    if has_machines(cluster):
        ways: tuple[Machines, ...] = ("virtual", "flat")
        for way in ways:
            with suppress(HetspmdError):  # one of the two may not fit
                plans[way] = compile_plan(model, args, kwargs, cluster, replace(asked, machines=way))
        return _distinct(plans)
    graph = trace(
        model,
        args,
        kwargs,
        loss=asked.find_loss,
        host_randomness=asked.host_randomness,
        recompute=as_in(compiled.graph),
    )
    if asked.loss_only and graph.loss is not None:
        graph = graph.without_outputs()
    theory, batches = in_micro_batches(derive(graph, strict=asked.strict), compiled.micro_batches)
    limits = Limits(seconds=asked.time_limit)
    wanted = resolve(theory, asked.constraints)
    wanted = wanted if asked.zero is None else zero_of(theory, wanted, asked.zero)
    constraints = composed(theory, batches, wanted)
    batches = None if batches is None else loop_like(theory, batches, compiled)
    ctx = Synthesis(theory, cluster, constraints, limits, batches=batches)
    costs = ctx.costs(ctx.everyone)
    for ranks in (ctx.everyone, *(device_subsets(costs) if asked.zero is None else ())):
        if ranks == compiled.active and len(compiled.ratios) == 1:
            continue
        starts = starting_ratios(ctx.costs(ranks))
        outcome = synthesize_on(ctx, ranks, [(name, by_segment(ratios, 1)) for name, ratios in starts])
        if outcome is not None:
            make = following_plan if batches is None else plan_of
            plan = make(ctx, outcome, asked.constraints)
            if follows(plan) or not follows(compiled):
                plans[_name(ranks, cluster.world)] = plan
    if not asked.constraints and asked.zero is None:
        rows = plan_for(
            theory, cluster, known.data_parallel(theory), proportional(costs), limits=limits, batches=batches
        )
        held = zip(rows.cost.memory_bytes, cluster.devices, strict=True)
        if all(b <= d.memory for b, d in held) and _within_measured(rows):
            plans["data parallel"] = rows
    return _distinct(plans)


def _within_measured(plan: Plan) -> bool:
    """Whether a plan keeps to what measured steps of its model leave room for."""
    costs = plan.costs
    return costs.measured is None or not plan.step.held(plan.lengths).lacking(costs.capacity).any()


def _name(ranks: tuple[int, ...], world: int) -> str:
    if len(ranks) == world:
        return "all devices"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _distinct(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    first = plans[COMPILED]
    slowest = THRESHOLDS.slowest_alternative * first.cost.step_seconds
    near = [n for n, p in plans.items() if p.cost.step_seconds <= slowest]
    near.sort(key=lambda n: (n != COMPILED, plans[n].cost.step_seconds))
    distinct: dict[str, Plan] = {}
    for name in near:
        if not any(_same(plans[name], plan) for plan in distinct.values()):
            distinct[name] = plans[name]
    return distinct


def _same(one: Plan, other: Plan) -> bool:
    return all(
        getattr(one, what) == getattr(other, what)
        for what in ("program", "lengths", "active", "repeated", "own_turns")
    )
