"""Where the samples of a batch lie in each tensor, as well as shapes tell.

The samples are dim 0 of the inputs. They are followed through the graph without the rules of its ops, which come
later: an op that is not known keeps them at the dim that has the same place and extent. What this says serves to
choose among programs that compute the same, so that a wrong answer costs speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hetspmd.trace.graph import Graph, Instruction
from hetspmd.trace.view_runs import Run, is_view, order_of, view_runs

Shape = tuple[int, ...]
_ROWS_AND_COLUMNS = {"aten.mm.default": 0, "aten.addmm.default": 1}
"""Matrix products, with the position of their left factor among the inputs."""


@dataclass(frozen=True, slots=True)
class SampleDim:
    """The samples lie along ``dim``: it is the product of ``outer`` indices that vary more slowly, the samples, and
    what varies faster. With ``outer`` 1 they are the slowest index."""

    dim: int
    outer: int = 1


def sample_dims(graph: Graph) -> dict[int, SampleDim]:
    """Where the samples lie, by tensor id; without the tensors of which it is not known."""
    found = {i.tensor: SampleDim(0) for i in graph.inputs if graph.tensors[i.tensor].shape}
    for instruction in graph.instructions:
        if any(t in found for t in instruction.inputs):
            for tensor in instruction.outputs:
                place = _after(graph, instruction, tensor, found) if tensor >= 0 else None
                if place is not None:
                    found[tensor] = place
    return found


def _after(
    graph: Graph, instruction: Instruction, output: int, found: dict[int, SampleDim]
) -> SampleDim | None:
    shapes, target = [graph.tensors[t].shape for t in instruction.inputs], graph.tensors[output].shape
    if is_view(instruction.op):
        return through_view(view_runs(shapes[0], target), shapes[0], target, found[instruction.inputs[0]])
    order = order_of(instruction, len(shapes[0]))
    if order is not None:
        place = found[instruction.inputs[0]]
        return SampleDim(order.index(place.dim), place.outer)
    if instruction.op in _ROWS_AND_COLUMNS:
        return _of_product(instruction, found)
    for tensor, shape in zip(instruction.inputs, shapes, strict=True):
        if tensor in found:
            dim = _same_dim(shape, target, found[tensor].dim)
            if dim is not None:
                return SampleDim(dim, found[tensor].outer)
    return None


def through_view(runs: Sequence[Run], source: Shape, target: Shape, place: SampleDim) -> SampleDim | None:
    """Where a view, or the inverse of one, has the samples. None where its dims divide them otherwise."""
    for run in runs:
        if place.dim in run.source:
            faster = run.source[: run.source.index(place.dim)]
            outer = place.outer * prod(source[d] for d in faster)
            for dim in run.target:
                if outer < target[dim]:
                    return SampleDim(dim, outer)
                if outer % target[dim]:
                    return None
                outer //= target[dim]
    return None


def _of_product(instruction: Instruction, found: dict[int, SampleDim]) -> SampleDim | None:
    """Rows of the left factor are rows of the product, columns of the right one its columns."""
    first = _ROWS_AND_COLUMNS[instruction.op]
    for dim in (0, 1):
        place = found.get(instruction.inputs[first + dim])
        if place is not None and place.dim == dim:
            return place
    return None


def _same_dim(source: Shape, target: Shape, dim: int) -> int | None:
    """The dim of another shape that has the place of ``dim``, counted from the front or else from the back."""
    if source[: dim + 1] == target[: dim + 1]:
        return dim
    back = dim + len(target) - len(source)
    return back if back >= 0 and source[dim:] == target[back:] else None
