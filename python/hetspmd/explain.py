"""Why a tensor is stored as it is: the best program's cost for every other form of it.

For each form that a parameter, an input or an output could have, a search constrained to it, at the plan's
lengths, gives the least cost of any program that has it. The difference to the best of them is what the form
would cost. Costs are the search's own (additive, without the stage model's maxima).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hetspmd.errors import ConstraintError, InfeasibleError
from hetspmd.forms import IDENTITY, Form, all_gather, form_text
from hetspmd.plan import Plan
from hetspmd.synth.constraints import Constraints, named_tensors
from hetspmd.synth.search import Limits, search
from hetspmd.synth.space import search_space


@dataclass(frozen=True)
class Alternative:
    """A form, the cost in seconds of the best program that has it, and the lower bound of that cost.

    Both are None where no program has the form.
    """

    form: Form
    seconds: float | None
    lower_bound: float | None


@dataclass(frozen=True)
class Explanation:
    """The alternatives for one tensor, cheapest first, and the form that the plan chose."""

    name: str
    chosen: Form
    alternatives: tuple[Alternative, ...]

    def __str__(self) -> str:
        best = min((a.seconds for a in self.alternatives if a.seconds is not None), default=0.0)
        lines = [f"{self.name}: {form_text(self.chosen)} is chosen; the best program with"]
        for a in self.alternatives:
            if a.seconds is None:
                lines.append(f"  {form_text(a.form):<16} does not exist")
            else:
                extra = f"{a.seconds - best:.3g} s more" if a.seconds > best else "the least"
                lines.append(f"  {form_text(a.form):<16} costs {a.seconds:.6g} s, {extra}")
        return "\n".join(lines)


def explain(plan: Plan, name: str, *, limits: Limits | None = None) -> Explanation:
    """The cost of every form of the parameter, input or ``output[i]`` called ``name``.

    Raises ConstraintError if there is no such tensor.
    """
    theory = plan.theory
    names = named_tensors(theory)
    if name not in names:
        close = difflib.get_close_matches(name, list(names), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConstraintError(f"{name!r} is no parameter, input or output of the plan{hint}")
    tensor = names[name]
    forms: list[Form] = [IDENTITY]
    for dim in range(len(theory.graph.tensors[tensor].shape)):
        axis = theory.axes.axis(tensor, dim)
        if axis is not None and axis.units >= 2:
            forms.append(all_gather(dim))
    found: list[Alternative] = []
    for form in forms:
        try:
            space = search_space(theory, Constraints({tensor: form}))
            best = search(space, plan.costs, plan.lengths, limits or Limits())
            found.append(Alternative(form, best.cost, best.lower_bound))
        except InfeasibleError:
            found.append(Alternative(form, None, None))
    found.sort(key=lambda a: (a.seconds is None, a.seconds or 0.0, a.form))
    return Explanation(name, _chosen(plan, tensor), tuple(found))


def _chosen(plan: Plan, tensor: int) -> Form:
    for parameter in plan.graph.parameters:
        if parameter.tensor == tensor:
            return plan.parameter_layout()[parameter.name][0]
    return next((r.form for r in plan.program.outputs if r.tensor == tensor), IDENTITY)
