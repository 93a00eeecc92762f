"""Bytes that a program holds after the backward whatever its schedule: they are known from its placements alone."""

from __future__ import annotations

import numpy as np

from hetspmd.cost.loop_memory import AxisPlaces
from hetspmd.cost.memory import OPTIMIZER_BYTES
from hetspmd.cost.model import Index
from hetspmd.placement import Placement
from hetspmd.program.lengths import Lengths
from hetspmd.program.micro_batches import MicroBatches
from hetspmd.program.program import Compute, Program
from hetspmd.rules.theory import Theory


def lasting_bytes(
    theory: Theory, program: Program, lengths: Lengths, batches: MicroBatches | None = None
) -> Index:
    """Bytes of parameters, of the optimizer's state and of gradients on each device at integer lengths, shape
    (devices): no more than the peak of what is held (:class:`hetspmd.cost.memory.Holdings`).

    A gradient that may share its storage with something is left out.
    """
    graph, places = theory.graph, AxisPlaces(theory, batches)
    parameters = {p.tensor: p.gradient is not None for p in graph.parameters}
    nbytes: dict[int, int] = {}
    for step in program.steps:
        if not isinstance(step, Compute):
            continue
        for tensor, form in zip(graph.instructions[step.instruction].outputs, step.row.post, strict=True):
            if tensor in parameters:
                axis, held = places.of(tensor, form)
                trained = graph.tensors[tensor].numel * OPTIMIZER_BYTES if parameters[tensor] else 0
                nbytes[axis] = nbytes.get(axis, 0) + held + trained
    gradients: dict[int, set[Placement]] = {}
    for result in program.gradients:
        gradients.setdefault(result.tensor, set()).add(result.form)
    for tensor, forms in gradients.items():
        producer = graph.producers[tensor]
        own = not graph.instructions[producer].is_source and not theory.rules[producer].alias
        if own and len(forms) == 1:
            axis, held = places.of(tensor, *forms)
            nbytes[axis] = nbytes.get(axis, 0) + held
    units, of = places.units(lengths)
    lasting: Index = sum(
        (units[axis] * (held // of[axis]) for axis, held in nbytes.items()),
        start=np.zeros(lengths.world, dtype=np.int64),
    )
    return lasting
