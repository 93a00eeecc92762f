"""What the backward graph reads of the forward graph, and in which form it is saved.

A value that the forward produces is saved as it is. A slice or a mask of a whole one is derived again in the
backward where that costs no memory, i.e. where the whole tensor is kept anyway (parameters, batch, buffers, or
because the backward reads it whole too); elsewhere the slice is saved as a compact copy, and the whole tensor
is freed. Constants do not cross: both graphs have their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hetspmd.placement import PARTIAL, REPLICATE, Placement
from hetspmd.program.dataflow import Key, Values
from hetspmd.program.program import Result
from hetspmd.trace.graph import CONSTANT, Graph

How = Literal["value", "mask", "slice"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A value that the backward takes of the forward.

    Attributes:
        tensor: The tensor's id in the graph.
        form: Its placement.
        how: ``"value"``, as the forward has it; ``"mask"``, as it has it, by rank 0 alone, since the backward reads
            its mask; ``"slice"``, a compact copy of a slice of the replicated value.
    """

    tensor: int
    form: Placement
    how: How

    @property
    def key(self) -> Key:
        """The value."""
        return self.tensor, self.form


def saved_tensors(
    graph: Graph, values: Values, forward: Iterable[int], backward: Iterable[int], gradients: Sequence[Result]
) -> tuple[SavedTensor, ...]:
    """What crosses between the graphs of a program that gives ``gradients``. ``forward`` and ``backward`` are the
    places of their steps in the program, in order; ``values`` what each step reads and writes."""
    produced = set[Key]().union(*[values.writes[place] for place in forward])
    have: set[Key] = set() if graph.tangent is None else {(graph.tangent, REPLICATE)}
    whole: dict[Key, None] = {}
    derived: dict[Key, None] = {}

    def read(key: Key) -> None:
        if key in have or graph.producer(key[0]).op == CONSTANT:
            return
        if key in produced:
            whole[key] = None
        elif (key[0], REPLICATE) not in have:
            derived[key] = None

    for place in backward:
        for key in values.reads[place]:
            if key not in have:
                read(key)
        have.update(values.writes[place])
    for result in gradients:
        read((result.tensor, result.form))
    lasting = {p.tensor for p in graph.parameters} | {i.tensor for i in graph.inputs}
    lasting |= {b.tensor for b in graph.buffers}
    masks: dict[Key, None] = {}
    slices: dict[Key, None] = {}
    for key in derived:
        base = (key[0], REPLICATE)
        if key[1] == PARTIAL:
            masks[base] = None
        elif base in whole or key[0] in lasting:
            whole[base] = None
        else:
            slices[key] = None
    return (
        *(SavedTensor(*key, "value") for key in whole),
        *(SavedTensor(*key, "mask") for key in masks if key not in whole),
        *(SavedTensor(*key, "slice") for key in slices),
    )
