"""The level of ZeRO at which each parameter of a plan in micro-batches is."""

from __future__ import annotations

from collections.abc import Mapping

from hetspmd.codec.quantities import quantity_text
from hetspmd.codec.tables import counted
from hetspmd.placement import PARTIAL, REPLICATE, is_sharded
from hetspmd.plan.plan import Plan
from hetspmd.program.loop_steps import loop_steps
from hetspmd.program.program import Communicate, Compute


def zero_levels(plan: Plan) -> dict[str, int]:
    """Parameter name to level (Rajbhandari et al. 2020), of the parameters that are trained:

    0: it is whole on every device. 1: it is in shards, and communicated outside of the loop or not at all. 2: its
    gradient is reduced in each micro-batch. 3: it is gathered in each micro-batch.
    """
    batches, graph = plan.batches, plan.graph
    if batches is None:
        return {}
    loop = loop_steps(graph, batches, plan.program)
    steps = [step for place, step in enumerate(plan.program.steps) if place in loop.places]
    moved = {step.tensor for step in steps if isinstance(step, Communicate)}
    gathered = {graph.parameter_of[tensor] for tensor in moved if tensor in graph.parameter_of}
    reduced = {tensor for tensor, form in loop.values if is_sharded(form)}
    stored = plan.update.stored
    levels: dict[str, int] = {}
    for parameter in graph.parameters:
        if parameter.gradient is None:
            continue
        if stored[parameter.name][0] == REPLICATE:
            level = 0
        elif parameter.tensor in gathered:
            level = 3
        else:
            level = 2 if parameter.gradient in reduced and _is_partial(plan, parameter.gradient) else 1
        levels[parameter.name] = level
    return levels


def _is_partial(plan: Plan, tensor: int) -> bool:
    """Whether the devices compute summands of a tensor, rather than their slices of it."""
    made = plan.graph.producers[tensor]
    rows = [step.row for step in plan.program.steps if isinstance(step, Compute) and step.instruction == made]
    place = plan.graph.instructions[made].outputs.index(tensor)
    return any(row.post[place] == PARTIAL for row in rows)


def zero_text(plan: Plan) -> str:
    """One line: how many parameters, of how many bytes, are at each level."""
    levels = zero_levels(plan)
    nbytes: Mapping[str, int] = {p.name: plan.graph.tensors[p.tensor].nbytes for p in plan.graph.parameters}
    parts = []
    for level in sorted(set(levels.values())):
        names = [name for name, own in levels.items() if own == level]
        total = quantity_text(sum(nbytes[n] for n in names), "bytes")
        parts.append(f"{level} for {counted(len(names), 'parameter')} of {total}")
    return f"ZeRO level: {'; '.join(parts)}"
