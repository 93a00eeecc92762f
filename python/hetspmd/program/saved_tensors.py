"""What the backward graph reads of the forward graph, and in which form it is saved.

A value that the forward produces is saved as it is. A slice or a mask of a whole one is derived again in the
backward where that costs no memory, i.e. where the whole tensor is kept anyway (parameters, batch, buffers, or
because the backward reads it whole too); elsewhere the slice is saved as a compact copy, and the whole tensor
is freed. Constants do not cross: both graphs have their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetspmd.placement import PARTIAL, REPLICATE
from hetspmd.program.buckets import Scheduled
from hetspmd.program.program import Result
from hetspmd.program.schedule import Key, Schedule, reads, writes
from hetspmd.trace.graph import CONSTANT, Graph

__all__ = ["Crossing", "crossing"]


@dataclass(frozen=True)
class Crossing:
    """What backward reads of forward, in that order: ``whole`` keys are saved as they are, ``slices`` as compact
    copies, and the values of which backward reads masks (``masks``) as they are by rank 0 alone."""

    whole: dict[Key, None] = field(default_factory=dict)
    slices: dict[Key, None] = field(default_factory=dict)
    masks: dict[Key, None] = field(default_factory=dict)


def crossing(graph: Graph, order: Schedule, gradients: Sequence[Result]) -> Crossing:
    """What crosses between the graphs of a program that gives ``gradients``."""
    produced = {key for step in order.forward for key in writes(graph, step)}
    have: set[Key] = set() if graph.tangent is None else {(graph.tangent, REPLICATE)}
    found = Crossing()
    derived: dict[Key, None] = {}
    results = tuple((r.tensor, r.form) for r in gradients)
    steps: list[Scheduled | None] = [*order.backward, None]
    for step in steps:
        for key in results if step is None else reads(graph, step):
            if key in have or graph.producer(key[0]).op == CONSTANT:
                continue
            if key in produced:
                found.whole[key] = None
            elif (key[0], REPLICATE) not in have:
                derived[key] = None
        if step is not None:
            have.update(writes(graph, step))
    lasting = {p.tensor for p in graph.parameters} | {i.tensor for i in graph.inputs}
    lasting |= {b.tensor for b in graph.buffers}
    for key in derived:
        whole = (key[0], REPLICATE)
        if key[1] == PARTIAL:
            found.masks[whole] = None
        elif whole in found.whole or key[0] in lasting:
            found.whole[whole] = None
        else:
            found.slices[key] = None
    return found
