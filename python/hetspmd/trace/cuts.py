"""Cuts between segments: each tensor that another segment reads is copied for it (HAP 5.2).

A segment has sharding ratios of its own. In :func:`with_cuts` an explicit identity, :data:`REBALANCE`, stands on
every edge of the graph that leaves a segment; its rule lets the copy's slices have other lengths than the
original's, for the price of an all-to-all, which is none where the lengths agree. All readers of a tensor in one
segment share its copy. So every dim of every tensor is divided by the ratios of one segment, its producer's.

A parameter and its gradient are stored alike: a gradient that comes from another segment than its parameter's (of a
tied parameter) is copied too. A tensor that cannot be divided needs no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hetspmd.trace.graph import REBALANCE, Graph, Instruction, Ref, Tensor


def with_cuts(graph: Graph, segments: Sequence[int], divisible: Callable[[int], bool]) -> Graph:
    """The graph with instruction i in ``segments[i]``, and cuts between the segments.

    ``divisible``: whether a tensor can be sharded. Tensors keep their ids; copies come last. Raises ValueError for
    another number of segments than instructions, or a graph that has cuts already.
    """
    if len(segments) != len(graph.instructions) or graph.segments:
        raise ValueError(f"{len(segments)} segments for {len(graph.instructions)} instructions without cuts")
    tensors = list(graph.tensors)
    home = {t: segments[i.id] for i in graph.instructions for t in i.outputs if t >= 0}
    stored: dict[int, list[int]] = {}
    for p in graph.parameters:
        if p.gradient is not None:
            stored.setdefault(p.gradient, []).append(home[p.tensor])
    copies: dict[tuple[int, int], int] = {}
    instructions: list[Instruction] = []
    cut_segments: list[int] = []

    def append(instruction: Instruction, segment: int) -> None:
        instructions.append(replace(instruction, id=len(instructions)))
        cut_segments.append(segment)

    def copy(tensor: int, segment: int, reader: Instruction) -> int:
        if home[tensor] == segment or not divisible(tensor):
            return tensor
        copy_id = copies.get((tensor, segment))
        if copy_id is None:
            source = graph.tensors[tensor]
            copy_id = copies[tensor, segment] = len(tensors)
            name = f"{source.name} for segment {segment}"
            tensors.append(Tensor(copy_id, name, source.shape, source.dtype))
            rebalance = Instruction(
                0, name, REBALANCE, (Ref(tensor),), (), (tensor,), (copy_id,), reader.phase, reader.source
            )
            append(rebalance, segment)
        return copy_id

    for instruction in graph.instructions:
        segment = segments[instruction.id]
        read = {t: copy(t, segment, instruction) for t in dict.fromkeys(instruction.inputs)}
        append(instruction.reading(read), segment)
        for t in instruction.outputs:
            for place in stored.get(t, ()):
                copy(t, place, instruction)
    parameters = tuple(
        p if p.gradient is None else replace(p, gradient=copies.get((p.gradient, home[p.tensor]), p.gradient))
        for p in graph.parameters
    )
    return replace(
        graph,
        tensors=tuple(tensors),
        instructions=tuple(instructions),
        parameters=parameters,
        segments=tuple(cut_segments),
    )
