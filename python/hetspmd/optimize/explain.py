"""Why a tensor has its form: the best program's cost for every other form of it.

For each form that a parameter, an input or an output could have, a search constrained to it, on the plan's active
devices and at its lengths, gives the least cost of any program that has it, and a lower bound. The difference to
the best of them is what the form would cost. These costs are the search's own: seconds of all computations and
collectives, added up. Beside them stands the step of the found program in the two-stream simulation, by which
plans are chosen, with gathers as far ahead as is best for this program; it counts only the slowest device of a
stage, and what idle devices are sent. Of a plan across machines it is theirs, without what their accelerators add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hetspmd.cluster.machines import device_word, devices_text
from hetspmd.codec.quantities import seconds_text
from hetspmd.cost.step import StepModel, idle_seconds
from hetspmd.errors import ConstraintError, InfeasibleError, SearchError
from hetspmd.optimize.prefetch import best_distance
from hetspmd.optimize.thresholds import THRESHOLDS
from hetspmd.placement import REPLICATE, Placement, is_sharded, shard
from hetspmd.plan.explanation import EQUAL, Alternative, Explanation
from hetspmd.plan.plan import Plan
from hetspmd.program.program import Compute, Program
from hetspmd.search.constraints import Constraints, named_tensors, nearest, resolve
from hetspmd.search.memory_limits import capacities
from hetspmd.search.search import Limits, search
from hetspmd.search.space import search_space


def explain(
    plan: Plan,
    name: str,
    *,
    constraints: Mapping[str, str | Placement] | None = None,
    limits: Limits | None = None,
) -> Explanation:
    """The cost of every form of the parameter, input or ``output[i]`` called ``name``.

    ``constraints`` (default: those the plan was compiled with): other tensors keep to them in every alternative;
    one on the tensor itself is set aside, to show what it costs. ``limits`` are those of each search.

    Raises ConstraintError if there is no such tensor, InfeasibleError if the constraints do not fit the model.
    """
    theory = plan.theory
    names = named_tensors(theory)
    if name not in names:
        raise ConstraintError(f"{name!r} is no parameter, input or output of the plan{nearest(name, names)}")
    tensor = names[name]
    fixed = resolve(theory, plan.constraints if constraints is None else constraints)
    others = {t: form for t, form in fixed.forms.items() if t != tensor}
    alternatives = [
        _alternative(plan, tensor, form, others, limits or Limits()) for form in _forms(plan, tensor)
    ]
    chosen = _chosen(plan, name, tensor)
    alternatives.sort(key=lambda a: (a.seconds is None, a.seconds or 0.0, a.form != chosen, a.form))
    source = fixed.origins.get(tensor)
    return Explanation(
        name,
        chosen,
        tuple(alternatives),
        _kind(plan, tensor),
        None if source is None else source.glob,
        _notes(plan, chosen, alternatives, source is not None),
    )


def _forms(plan: Plan, tensor: int) -> list[Placement]:
    """Forms that the tensor could have: whole, or sharded along a dim that some rule cuts."""
    if tensor == plan.graph.loss:
        return [REPLICATE]
    forms = [REPLICATE]
    for dim in range(len(plan.graph.tensors[tensor].shape)):
        axis = plan.theory.axes.axis(tensor, dim)
        if axis is not None and axis.units >= 2:
            forms.append(shard(dim))
    return forms


def _alternative(
    plan: Plan, tensor: int, form: Placement, others: Mapping[int, Placement], limits: Limits
) -> Alternative:
    """The best program with ``tensor`` in ``form`` and the constraints ``others``."""
    try:
        space = search_space(plan.theory, Constraints({**others, tensor: form}))
        best = search(space, plan.costs, plan.lengths, limits)
    except InfeasibleError:
        return Alternative(form, None, None, reason="no program has it")
    except SearchError:
        return Alternative(form, None, None, reason="none found within the limits")
    program = _outputs_as_in(plan, best.program, tensor) if plan.idle else best.program
    idle = idle_seconds(plan.graph, program, plan.cluster, plan.active)
    seconds = _step_seconds(plan, StepModel(plan.costs, program, idle=idle))
    return Alternative(form, best.cost, best.lower_bound, seconds)


def _step_seconds(plan: Plan, step: StepModel) -> float:
    """Seconds of a step at the plan's lengths, with gathers as far ahead as is best for it: one group, or as the
    plan, or further."""
    capacity = capacities(plan.costs)

    def fits(distance: int) -> bool:
        return bool((np.array(step.prefetching(distance).held(plan.lengths).peaks) <= capacity).all())

    distances = {best_distance(step, plan.lengths, THRESHOLDS, fits)}
    if fits(plan.schedule.prefetch_distance):
        distances.add(plan.schedule.prefetch_distance)
    return min(step.prefetching(distance).cost(plan.lengths).step_seconds for distance in distances)


def _outputs_as_in(plan: Plan, program: Program, but: int) -> Program:
    """``program`` with outputs that it leaves whole and the plan leaves in slices sliced too, all but ``but``."""
    sliced = {r.tensor: r for r in plan.program.outputs if is_sharded(r.form) and r.tensor != but}
    outputs = tuple(sliced.get(r.tensor, r) if r.form == REPLICATE else r for r in program.outputs)
    return replace(program, outputs=outputs)


def _chosen(plan: Plan, name: str, tensor: int) -> Placement | None:
    """The form in which the plan stores a parameter, leaves an output, or reads an input."""
    for parameter in plan.graph.parameters:
        if parameter.tensor == tensor:
            return plan.parameter_layout()[parameter.name][0]
    if name not in {i.path for i in plan.graph.inputs}:
        return next((r.form for r in plan.program.outputs if r.tensor == tensor), REPLICATE)
    instructions = plan.graph.instructions
    read = {
        form
        for step in plan.program.steps
        if isinstance(step, Compute)
        for t, form in zip(instructions[step.instruction].inputs, step.row.pre, strict=True)
        if t == tensor
    }
    if len(read) > 1:
        return None
    return read.pop() if read else REPLICATE


def _notes(
    plan: Plan, chosen: Placement | None, alternatives: list[Alternative], asked: bool
) -> tuple[str, ...]:
    word = device_word(plan.cluster)
    added = 0.0 if plan.inside is None else plan.inside.seconds
    own = seconds_text(plan.cost.step_seconds - added)
    notes = [f"step: in the simulation, where this plan takes {own}"]
    if plan.inside is not None:
        notes[0] += f"; what goes on inside machines, which adds {seconds_text(added)} to it, is left out"
    if len(plan.active) == 1 and plan.world > 1:
        only = devices_text(word, plan.active)
        notes.append(f"only {only} is active: nothing is divided, so the form makes no difference")
    elif plan.idle:
        notes.append(f"on the active devices; idle: {devices_text(word, plan.idle)}")
    costs = {a.form: a.seconds for a in alternatives if a.seconds is not None}
    if chosen is not None and not asked and chosen in costs:
        least = min(costs.values())
        if costs[chosen] > least * (1 + EQUAL):
            notes.append(
                "the plan's form is not of the least cost: plans are chosen by their step, and a constraint on "
                "another tensor may ask for it"
            )
    return tuple(notes)


def _kind(plan: Plan, tensor: int) -> str:
    e = plan.graph.tensors[tensor]
    return f"{e.dtype}[{', '.join(map(str, e.shape))}]"
