"""What each step of a program reads and writes."""

from __future__ import annotations

from typing import NamedTuple, Self

from hetspmd.errors import PlanError
from hetspmd.placement import PARTIAL, REPLICATE, Placement, is_sharded, placement_text
from hetspmd.program.buckets import Scheduled
from hetspmd.program.program import Communicate, Compute, Program
from hetspmd.trace.graph import Graph

Key = tuple[int, Placement]
"""(tensor id, form): a value of the local program."""


def reads(graph: Graph, step: Scheduled) -> tuple[Key, ...]:
    """The values that a step reads."""
    if isinstance(step, Compute):
        return tuple(zip(graph.instructions[step.instruction].inputs, step.row.pre, strict=True))
    if isinstance(step, Communicate):
        return ((step.tensor, step.source),)
    return tuple((m.tensor, m.source) for m in step.members)


def writes(graph: Graph, step: Scheduled) -> tuple[Key, ...]:
    """The values that a step produces."""
    if isinstance(step, Compute):
        outputs = graph.instructions[step.instruction].outputs
        values = tuple(zip(outputs, step.row.post, strict=True))
        return values if -1 not in outputs else tuple(key for key in values if key[0] >= 0)
    if isinstance(step, Communicate):
        return ((step.tensor, step.target),)
    return tuple((m.tensor, m.target) for m in step.members)


class Values(NamedTuple):
    """What each step of a program reads and writes."""

    reads: list[tuple[Key, ...]]
    writes: list[tuple[Key, ...]]

    @classmethod
    def of(cls, graph: Graph, program: Program) -> Self:
        """Those of a program of ``graph``."""
        return cls([reads(graph, s) for s in program.steps], [writes(graph, s) for s in program.steps])


def provider_of(graph: Graph, have: dict[Key, int], key: Key) -> int:
    """The step that a value comes from, itself or as a slice or mask of a replicated one."""
    tensor, form = key
    step = have.get(key)
    if step is None and (form == PARTIAL or is_sharded(form)):
        step = have.get((tensor, REPLICATE))
    if step is None:
        raise PlanError(
            f"the program reads {graph.tensors[tensor].name} | {placement_text(form)} before it is produced; "
            "compile the plan again"
        )
    return step
