"""What each step of a program reads and writes."""

from __future__ import annotations

from collections.abc import Callable
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


class _Kept(dict[int, "ComputeKeys"]):
    """What computations read and write, by the id of the step: no part of copies of its graph."""

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


class ComputeKeys(NamedTuple):
    """A computation, and what it reads and writes."""

    step: Compute
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]


def compute_keys(graph: Graph) -> Callable[[Compute], ComputeKeys]:
    """What computations of a graph read and write. It is told once for each object of a step, which programs of one
    search share, and kept with the graph."""
    kept: _Kept = vars(graph).setdefault("_compute_keys", _Kept())

    def keys(step: Compute) -> ComputeKeys:
        told = kept.get(id(step))
        if told is None or told.step is not step:
            told = kept[id(step)] = ComputeKeys(step, reads(graph, step), writes(graph, step))
        return told

    return keys


class Values(NamedTuple):
    """What each step of a program reads and writes."""

    reads: list[tuple[Key, ...]]
    writes: list[tuple[Key, ...]]

    @classmethod
    def of(cls, graph: Graph, program: Program) -> Self:
        """Those of a program of ``graph``."""
        values, keys = cls([], []), compute_keys(graph)
        for step in program.steps:
            if isinstance(step, Compute):
                told = keys(step)
                values.reads.append(told.reads)
                values.writes.append(told.writes)
            else:
                values.reads.append(((step.tensor, step.source),))
                values.writes.append(((step.tensor, step.target),))
        return values


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
