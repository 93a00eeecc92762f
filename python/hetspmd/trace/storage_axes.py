"""Parameters that are stored in other slices than the graph divides them in.

A plan of another mode or batch finds parameters in shards that an earlier plan has chosen. Its own graph may not
cut that dim at all, or only at other places. :func:`with_storage` parts what is stored from what is used: the
readers of such a parameter read a copy of it, :data:`~hetspmd.trace.graph.REBALANCE`, and its gradient is a copy as
well. The stored tensor has then no dim in common with any other op, so its shards may have any lengths, and they
are gathered before their use or moved to the lengths of the copy.

The source of such a parameter says so: ``hetspmd.parameter(stored=0)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetspmd.trace.graph import (
    PARAMETER,
    REBALANCE,
    STORED,
    Graph,
    Instruction,
    Phase,
    Ref,
    Tensor,
)


def with_storage(graph: Graph, dims: Mapping[int, int]) -> Graph:
    """The graph in which the parameters of ``dims`` (tensor id to the stored dim) are stored apart from their use.

    Tensors keep their ids; copies come last. The same graph where there are none. Raises ValueError for a tensor
    that is no parameter, is stored apart already, or has no such dim.
    """
    if not dims:
        return graph
    return _Parting(graph, dims).run()


class _Parting:
    def __init__(self, graph: Graph, dims: Mapping[int, int]) -> None:
        parameters = {p.tensor for p in graph.parameters}
        for tensor, dim in dims.items():
            shape = graph.tensors[tensor].shape if tensor in parameters else ()
            if not 0 <= dim < len(shape) or tensor in graph.stored_apart:
                raise ValueError(f"tensor {tensor} cannot be stored apart along dim {dim}")
        self.graph, self.dims = graph, dims
        self.tensors = list(graph.tensors)
        self.instructions: list[Instruction] = []
        self.segments: list[int] = []
        self.used: dict[int, int] = {}  # what is stored, or read again -> its copy for use
        self.stored_gradients: dict[int, int] = {}  # parameter -> its gradient as it is stored

    def run(self) -> Graph:
        graph = self.graph
        again = graph.second_reads
        owners: dict[int, list[int]] = {}
        for parameter in graph.parameters:
            if parameter.tensor in self.dims and parameter.gradient is not None:
                owners.setdefault(parameter.gradient, []).append(parameter.tensor)
        for instruction in graph.instructions:
            segment = graph.segments[instruction.id] if graph.segments else 0
            read = self._read(instruction)
            if instruction.op == PARAMETER and instruction.outputs[0] in self.dims:
                read = replace(read, kwargs=((STORED, self.dims[instruction.outputs[0]]),))
            self._append(read, segment)
            if again.get(instruction.id) in self.dims:
                self._use(instruction.outputs[0], instruction, segment)
            for tensor in instruction.outputs:
                for owner in owners.get(tensor, ()):
                    home = graph.segment(owner)
                    name = f"{graph.tensors[tensor].name} as stored"
                    self.stored_gradients[owner] = self._copy(
                        tensor, name, "backward", instruction.source, home
                    )
        parameters = tuple(
            replace(p, gradient=self.stored_gradients.get(p.tensor, p.gradient)) for p in graph.parameters
        )
        return replace(
            graph,
            tensors=tuple(self.tensors),
            instructions=tuple(self.instructions),
            parameters=parameters,
            segments=tuple(self.segments) if graph.segments else (),
        )

    def _read(self, instruction: Instruction) -> Instruction:
        """The instruction with copies in the place of what it reads of stored parameters."""
        if instruction.id in self.graph.second_reads:
            return instruction
        for tensor in dict.fromkeys(instruction.inputs):
            if tensor in self.dims and tensor not in self.used:
                self._use(tensor, instruction, self.graph.segment(tensor))
        return instruction.reading(self.used)

    def _use(self, tensor: int, reader: Instruction, segment: int) -> None:
        name = f"{self.graph.tensors[tensor].name} in use"
        self.used[tensor] = self._copy(tensor, name, reader.phase, reader.source, segment)

    def _copy(self, tensor: int, name: str, phase: Phase, source: str, segment: int) -> int:
        meta = self.graph.tensors[tensor]
        copy_id = len(self.tensors)
        self.tensors.append(Tensor(copy_id, name, meta.shape, meta.dtype))
        self._append(
            Instruction(0, name, REBALANCE, (Ref(tensor),), (), (tensor,), (copy_id,), phase, source), segment
        )
        return copy_id

    def _append(self, instruction: Instruction, segment: int) -> None:
        self.instructions.append(replace(instruction, id=len(self.instructions)))
        self.segments.append(segment)
