"""Where parameters are stored, and another graph of a model whose parameters lie in shards already: the same shards
serve it.

Where the graph divides a stored dim, and the stored lengths are whole units of its axis, the axis takes these
lengths, and the shards are used where they lie. A parameter whose shards do not fit is stored apart from its use
(:mod:`hetspmd.trace.storage_axes`): of a dim that the graph does not cut, of lengths that are no whole units, or
of other lengths than those of other parameters on one axis, of which those with the most bytes keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hetspmd.errors import PlanError
from hetspmd.placement import REPLICATE, Placement, is_sharded, sharded_dim
from hetspmd.program.lengths import Lengths, Matrix, lengths_for
from hetspmd.program.program import Compute, Program
from hetspmd.rules.theory import Theory, derive
from hetspmd.trace.graph import Graph
from hetspmd.trace.storage_axes import with_storage

Stored: TypeAlias = Mapping[str, tuple[Placement, tuple[int, ...]]]
"""A parameter's name to its stored form and its extents by active device
(:attr:`hetspmd.plan.update.Update.stored`)."""


def given_forms(graph: Graph, program: Program) -> dict[int, Placement]:
    """The placement of each tensor that a program is given: parameters, buffers and inputs, as they are stored."""
    return {
        graph.instructions[step.instruction].outputs[0]: step.row.post[0]
        for step in program.steps
        if isinstance(step, Compute) and graph.instructions[step.instruction].is_source
    }


def as_stored(theory: Theory, stored: Stored, ratios: Matrix) -> tuple[Theory, dict[int, Placement], Lengths]:
    """The theory in which parameters can be stored as ``stored`` says, their forms, and lengths at ``ratios``, but
    for those that storage fixes. A parameter that is not in ``stored`` is whole.

    Raises PlanError for extents that are not those of the parameter.
    """
    units, apart = _fitting(theory, stored)
    while apart:
        theory = derive(with_storage(theory.graph, apart), quiet=True)
        units, apart = _fitting(theory, stored)
    forms = {p.tensor: stored.get(p.name, (REPLICATE, ()))[0] for p in theory.graph.parameters}
    lengths = lengths_for(theory.axes, ratios[: theory.axes.segments])
    return theory, forms, Lengths(lengths.world, tuple(units.get(i, u) for i, u in enumerate(lengths.units)))


def _fitting(theory: Theory, stored: Stored) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """The units of axes that storage fixes, and the stored dims of the parameters that do not fit into them."""
    tensors = theory.graph.tensors
    dims: dict[int, int] = {}
    wanted: dict[int, dict[tuple[int, ...], list[int]]] = {}  # axis -> units -> parameters
    apart: list[int] = []
    for p in theory.graph.parameters:
        form, extents = stored.get(p.name, (REPLICATE, ()))
        if not is_sharded(form):
            continue
        dim, shape = sharded_dim(form), tensors[p.tensor].shape
        if dim >= len(shape) or sum(extents) != shape[dim]:
            raise PlanError(f"{p.name} of shape {list(shape)} cannot be stored in shards of {list(extents)}")
        dims[p.tensor] = dim
        axis = theory.axes.axis(p.tensor, dim)
        unit = shape[dim] // axis.units if axis is not None and axis.units >= 2 else 0
        if axis is None or not unit or any(e % unit for e in extents):
            apart.append(p.tensor)
        else:
            wanted.setdefault(axis.id, {}).setdefault(tuple(e // unit for e in extents), []).append(p.tensor)
    units_by_axis: dict[int, tuple[int, ...]] = {}
    for axis_id, choices in wanted.items():
        weights = {units: sum(tensors[t].nbytes for t in stored_so) for units, stored_so in choices.items()}
        units_by_axis[axis_id] = max(weights, key=weights.__getitem__)
        apart += [
            t for units, stored_so in choices.items() if units != units_by_axis[axis_id] for t in stored_so
        ]
    return units_by_axis, {t: dims[t] for t in apart}
