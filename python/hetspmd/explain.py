"""Why a tensor has its form: the best program's cost for every other form of it.

For each form that a parameter, an input or an output could have, a search constrained to it, on the plan's active
devices and at its lengths, gives the least cost of any program that has it, and a lower bound. The difference to
the best of them is what the form would cost. These costs are the search's own: seconds of all computations and
collectives, added up. Beside them stands the step of the found program in the two-stream simulation, by which
plans are chosen; it counts only the slowest device of a stage, and what idle devices are sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetspmd.cost.quantities import quantity_text
from hetspmd.cost.step import idle_seconds, step_cost
from hetspmd.errors import ConstraintError, InfeasibleError, SearchError
from hetspmd.forms import IDENTITY, Form, all_gather, is_sharded
from hetspmd.plan import Plan
from hetspmd.report.tables import table
from hetspmd.synth.constraints import Constraints, named_tensors, nearest, resolve, spelling
from hetspmd.synth.program import Compute, Program
from hetspmd.synth.search import Limits, search
from hetspmd.synth.space import search_space

_EQUAL = 1e-9
"""Relative difference below which two costs are the same."""


@dataclass(frozen=True)
class Alternative:
    """A form, and the best program that has it, in seconds.

    ``seconds`` is its cost, ``lower_bound`` what no program with the form can beat; both are additive, as in
    ``plan.search``. ``step_seconds`` is its step in the simulation, as in ``plan.cost``. All are None where no
    program has the form (``reason`` says so), or where the limits struck before one was found.
    """

    form: Form
    seconds: float | None
    lower_bound: float | None
    step_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """The alternatives for one tensor, cheapest first (of equals the chosen one), and the form that the plan chose.

    ``chosen`` is None for an input that the program reads in several forms. ``asked`` is the glob of the
    constraint on the tensor, if there is one; ``notes`` are sentences on what the numbers cover.
    """

    name: str
    chosen: Form | None
    alternatives: tuple[Alternative, ...]
    tensor: str = ""
    asked: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = [a for a in self.alternatives if a.seconds is not None]
        best = found[0].seconds or 0.0 if found else 0.0
        rows = []
        for a in self.alternatives:
            mark = "*" if a.form == self.chosen else ""
            if a.seconds is None or a.lower_bound is None or a.step_seconds is None:
                rows.append([mark, spelling(a.form), "-", "-", "-", a.reason])
                continue
            more = a.seconds - best
            rows.append(
                [
                    mark, spelling(a.form), _seconds(a.seconds), _seconds(a.lower_bound), _seconds(a.step_seconds),
                    f"{_seconds(more)} more" if more > _EQUAL * best else "the least",
                ]
            )  # fmt: skip
        chosen = "read in several forms" if self.chosen is None else spelling(self.chosen)
        title = f"{self.name} ({self.tensor})" if self.tensor else self.name
        asked = f", as the constraint {self.asked!r} asks" if self.asked is not None else ""
        lines = [
            f"{title}: {chosen}{asked}",
            table(["", "the best program with", "cost", "lower bound", "step", ""], rows, right=(2, 3, 4)),
        ]
        lines.append(
            "  *: the plan's form; cost: all computations and collectives, added up, at the plan's shares"
        )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def document(self) -> dict[str, object]:
        """For JSON: forms as users write them, seconds as numbers (null where there is no program)."""
        return {
            "name": self.name,
            "chosen": None if self.chosen is None else spelling(self.chosen),
            "constraint": self.asked,
            "alternatives": [
                {
                    "form": spelling(a.form), "cost": a.seconds, "lower_bound": a.lower_bound,
                    "step_seconds": a.step_seconds,
                }
                for a in self.alternatives
            ],
        }  # fmt: skip


def explain(
    plan: Plan,
    name: str,
    *,
    constraints: Mapping[str, str | Form] | None = None,
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
    found = [_alternative(plan, tensor, form, others, limits or Limits()) for form in _forms(plan, tensor)]
    chosen = _chosen(plan, name, tensor)
    found.sort(key=lambda a: (a.seconds is None, a.seconds or 0.0, a.form != chosen, a.form))
    origin = fixed.origins.get(tensor)
    return Explanation(
        name, chosen, tuple(found), _kind(plan, tensor), None if origin is None else origin.glob,
        _notes(plan, chosen, found, origin is not None),
    )  # fmt: skip


def _forms(plan: Plan, tensor: int) -> list[Form]:
    """Forms that the tensor could have: whole, or sharded along a dim that some rule cuts."""
    if tensor == plan.graph.loss:
        return [IDENTITY]
    forms = [IDENTITY]
    for dim in range(len(plan.graph.tensors[tensor].shape)):
        axis = plan.theory.axes.axis(tensor, dim)
        if axis is not None and axis.units >= 2:
            forms.append(all_gather(dim))
    return forms


def _alternative(
    plan: Plan, tensor: int, form: Form, others: Mapping[int, Form], limits: Limits
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
    program = replace(program, ahead=plan.program.ahead)
    step = step_cost(plan.costs, program, plan.lengths, idle=idle)
    return Alternative(form, best.cost, best.lower_bound, step.step_seconds)


def _outputs_as_in(plan: Plan, program: Program, but: int) -> Program:
    """``program`` with outputs that it leaves whole and the plan leaves in slices sliced too, all but ``but``."""
    sliced = {r.tensor: r for r in plan.program.outputs if is_sharded(r.form) and r.tensor != but}
    outputs = tuple(sliced.get(r.tensor, r) if r.form == IDENTITY else r for r in program.outputs)
    return replace(program, outputs=outputs)


def _chosen(plan: Plan, name: str, tensor: int) -> Form | None:
    """The form in which the plan stores a parameter, leaves an output, or reads an input."""
    for parameter in plan.graph.parameters:
        if parameter.tensor == tensor:
            return plan.parameter_layout()[parameter.name][0]
    if name not in {i.path for i in plan.graph.inputs}:
        return next((r.form for r in plan.program.outputs if r.tensor == tensor), IDENTITY)
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
    return read.pop() if read else IDENTITY


def _notes(plan: Plan, chosen: Form | None, found: list[Alternative], asked: bool) -> tuple[str, ...]:
    notes = [f"step: in the simulation, where this plan takes {_seconds(plan.cost.step_seconds)}"]
    if len(plan.active) == 1 and plan.world > 1:
        notes.append(
            f"only rank {plan.active[0]} is active: nothing is divided, so the form makes no difference"
        )
    elif plan.idle:
        notes.append(f"on the active devices; idle: {', '.join(f'rank {r}' for r in plan.idle)}")
    costs = {a.form: a.seconds for a in found if a.seconds is not None}
    if chosen is not None and not asked and chosen in costs:
        least = min(costs.values())
        if costs[chosen] > least * (1 + _EQUAL):
            notes.append(
                "the plan's form is not of the least cost: plans are chosen by their step, and a constraint on "
                "another tensor may ask for it"
            )
    return tuple(notes)


def _kind(plan: Plan, tensor: int) -> str:
    e = plan.graph.tensors[tensor]
    return f"{e.dtype}[{', '.join(map(str, e.shape))}]"


def _seconds(value: float) -> str:
    return "0 s" if value == 0 else quantity_text(value, "seconds")
