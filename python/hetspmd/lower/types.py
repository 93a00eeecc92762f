"""Dtype and local shape of the values of local graphs, read from what their writers noted and from their calls."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from hetspmd.lower import calls
from hetspmd.lower.emit import DTYPE, SHAPE, VALUE, item, take_saved
from hetspmd.lower.local_program import LocalGraphs, LocalTensor
from hetspmd.lower.turn_writer import TurnGraph
from hetspmd.program.levels import carried
from hetspmd.rules.kernels import dense, dense_rows
from hetspmd.trace.graph import ITEM_SIZES
from hetspmd.trace.values import dtype_name

aten = torch.ops.aten

Key = tuple[int, ...]
"""Of a value: the reference tensor's id, and its form on each level."""


@dataclass(frozen=True)
class ValueType:
    """Dtype and local shape of a value."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEM_SIZES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def value_types(graphs: LocalGraphs | TurnGraph) -> dict[fx.Node, ValueType]:
    """The type of every tensor in the graphs of which it is known; other nodes (started collectives, ops with
    several results) are missing."""
    return _Types(graphs).types


class _Types:
    def __init__(self, graphs: LocalGraphs | TurnGraph) -> None:
        self.graphs, self.tensors = graphs, graphs.reference.tensors
        self.types: dict[fx.Node, ValueType] = {}
        if isinstance(graphs, LocalGraphs):
            self._given(graphs)
        for graph in graphs.graphs:
            for node in graph.nodes:
                type_ = self.types.get(node) or self._type(node)
                if type_ is not None:
                    self.types[node] = type_

    def _given(self, graphs: LocalGraphs) -> None:
        """The inputs of forward, behind the runtime; the tangent."""
        tensors = (*graphs.parameters, *graphs.buffers, *graphs.inputs)
        inputs = [node for node in graphs.forward.nodes if node.op == "placeholder"]
        for node, tensor in zip(inputs[1:], tensors, strict=True):
            self.types[node] = _held(tensor)
        if graphs.backward is not None and graphs.reference.tangent is not None:
            tangent = next(n for n in graphs.backward.nodes if n.target == "tangent")
            meta = self.tensors[graphs.reference.tangent]
            self.types[tangent] = ValueType(meta.dtype, meta.shape)

    def _type(self, node: fx.Node) -> ValueType | None:
        if node.meta.get(SHAPE) is not None and DTYPE in node.meta:
            return ValueType(node.meta[DTYPE], tuple(node.meta[SHAPE]))
        if VALUE in node.meta:
            return self._of(node.meta[VALUE])
        if node.op == "get_attr":
            constant = self.graphs.constants[str(node.target)]
            return ValueType(dtype_name(constant.dtype), tuple(constant.shape))
        return self._called(node) if node.op == "call_function" else None

    def _of(self, key: Key) -> ValueType:
        return ValueType(self.tensors[key[0]].dtype, self.graphs.local_shape(key))

    def _called(self, node: fx.Node) -> ValueType | None:
        """What a call of a writer gives that noted no value, and what ops of rewrites give."""
        args: tuple[Any, ...] = node.args
        if node.target is take_saved:
            return self.types.get(self._saved()[args[1]])
        if node.target is calls.take:
            return self._of(carried(args[0].meta["transfer"])[args[1]][1])
        if node.target is aten.zeros.default:
            return ValueType(dtype_name(node.kwargs["dtype"]), tuple(args[0]))  # type: ignore[arg-type]  # a dtype
        if node.target is item and args[0].target in _BATCH_NORMS:
            return self._per_channel(args[0], args[1])
        operand = self.types.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if operand is None:
            return None
        if node.target is aten.slice.Tensor:
            _, dim, start, stop = args
            return ValueType(operand.dtype, (*operand.shape[:dim], stop - start, *operand.shape[dim + 1 :]))
        if node.target is aten.new_zeros.default:
            return ValueType(operand.dtype, tuple(args[1]))
        scaled = node.target is aten.mul.Tensor and not isinstance(args[1], fx.Node)
        return operand if scaled or node.target in _ALIKE else None

    def _per_channel(self, batch_norm: fx.Node, index: int) -> ValueType | None:
        """A result of a batch norm that is one call: the first one has the shape of the data, which is the first
        argument, the others one number per channel."""
        (data, *_) = batch_norm.args
        type_ = self.types.get(data) if isinstance(data, fx.Node) else None
        return type_ if type_ is None or index == 0 else ValueType(type_.dtype, type_.shape[1:2])

    def _saved(self) -> Any:
        """The nodes of forward that backward reads, in order."""
        return self.graphs.forward.output_node().args[0][3]  # type: ignore[index]  # four results


_BATCH_NORMS = frozenset(
    {aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default}
)

_ALIKE = frozenset({aten.clone.default, dense, dense_rows})
"""Calls that give the type of their first argument."""


def _held(tensor: LocalTensor) -> ValueType:
    return ValueType(tensor.dtype, tensor.local_shape)
