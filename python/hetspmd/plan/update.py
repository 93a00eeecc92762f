"""The update of the parameters: where each lies between steps, what the optimizer reads, and what it leaves.

All of this follows from the programs of a step, so that nothing can contradict them. An optimizer of a rank sees
the rank's shards alone: its state for a parameter lies as the parameter does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetspmd.errors import PlanError
from hetspmd.placement import Placement, is_sharded, sharded_dim
from hetspmd.plan.step_plan import StepPlan
from hetspmd.program.stored import Stored, given_forms
from hetspmd.rules.theory import Theory


@dataclass(frozen=True, kw_only=True)
class ParameterUpdate:
    """What the update is of one parameter.

    Attributes:
        name: The parameter's first name.
        tensor: Its tensor.
        fragment: Number of the fragment that stores it.
        stored: The placement in which it is stored, and the optimizer's state for it.
        extents: Elements per active device of the fragment along the sharded dim; empty for other placements.
        reads: The placement in which the update reads the gradient; None for a parameter that has none.
    """

    name: str
    tensor: int
    fragment: int
    stored: Placement
    extents: tuple[int, ...]
    reads: Placement | None

    @property
    def leaves(self) -> Placement | None:
        """The placement in which the update leaves the parameter for the next step, which is the stored one; None
        for a parameter that is not updated."""
        return None if self.reads is None else self.stored


@dataclass(frozen=True)
class Update:
    """The update of a step.

    Attributes:
        parameters: What it is of each parameter, in the order of the graph.
    """

    parameters: tuple[ParameterUpdate, ...]

    @property
    def stored(self) -> Stored:
        """Parameter name to the placement in which it is stored, and its elements per active device along the
        sharded dim (empty for a whole parameter)."""
        return {p.name: (p.stored, p.extents) for p in self.parameters}


def update_of(step: StepPlan, theory: Theory) -> Update:
    """The update of a step of the theory's graph.

    Raises PlanError for a parameter that no fragment stores.
    """
    graph = theory.graph
    given = [given_forms(graph, fragment.program) for fragment in step.fragments]
    left: Mapping[int, Placement] = {
        r.tensor: r.form for fragment in step.fragments for r in fragment.program.gradients
    }
    parameters = []
    for p in graph.parameters:
        number = next((n for n, forms in enumerate(given) if p.tensor in forms), None)
        if number is None:
            raise PlanError(f"parameter {p.name} is stored nowhere; compile the plan again")
        stored = given[number][p.tensor]
        extents: tuple[int, ...] = ()
        if is_sharded(stored):
            extent = graph.tensors[p.tensor].shape[sharded_dim(stored)]
            extents = step.fragments[number].lengths.extents(theory.axes, p.tensor, stored, extent)
        parameters.append(
            ParameterUpdate(
                name=p.name,
                tensor=p.tensor,
                fragment=number,
                stored=stored,
                extents=extents,
                reads=None if p.gradient is None else left.get(p.gradient),
            )
        )
    return Update(tuple(parameters))
