"""The text of a rank's local graphs: one call per line, with names, dtypes and local shapes.

::

    forward
      %parameter_up_weight: float32[2, 8] | shard(0) = parameter up.weight
      %t: float32[8, 2] | shard(1) = aten.t.default(%parameter_up_weight: float32[2, 8])
      %sum_1_all_reduce = start all_reduce(%sum_1: float32[])  # among ranks 0-2; gives 4 B, gets 4 B
      %sum_1_whole: float32[] | replicated = wait(%sum_1_all_reduce)
      %relu: float32[2, 4] | shard(0) = aten.relu_.default(%mm: float32[2, 4])  # writes to %mm
      return loss = %sum_1_whole: float32[]

The form behind a value's shape is that of the reference tensor it is a part of; across machines there are two, what
the machine holds and what the accelerator holds of that. What a collective gives and gets are the bytes of this
rank's values before and after it. The same graphs have the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
from torch import fx

from hetspmd.lower import calls
from hetspmd.lower.emit import ALSO, VALUE
from hetspmd.lower.fuse import out_of_place
from hetspmd.lower.local_program import LocalGraphs
from hetspmd.lower.turn_writer import TurnGraph
from hetspmd.lower.types import ValueType, value_types
from hetspmd.placement import placement_text
from hetspmd.program.levels import carried
from hetspmd.trace.compat.tensors import is_op

_STARTS: Final = frozenset({calls.start, calls.start_bucket, calls.start_across, calls.start_bucket_across})
_ACROSS: Final = frozenset({calls.start_across, calls.start_bucket_across})


def graphs_text(graphs: LocalGraphs) -> str:
    """The forward and, if there is one, the backward of a rank."""
    return "\n".join(_Text(graphs).lines()) + "\n"


class GraphText:
    """The text of graphs, call by call."""

    def __init__(self, graphs: LocalGraphs | TurnGraph) -> None:
        self.groups, self.local_shape, self.reference = graphs.groups, graphs.local_shape, graphs.reference
        self.types = value_types(graphs)

    def calls(
        self, graph: fx.Graph, sources: list[str], results: Callable[[Any], Iterator[tuple[str, Any]]]
    ) -> Iterator[str]:
        """The lines of a graph. ``sources`` say what it is given; ``results`` name what it returns."""
        said = iter(sources)
        for node in graph.nodes:
            if node.op == "placeholder":
                yield f"  {self._value(node)} = {next(said)}"
            elif node.op == "output":
                for name, value in results(node.args[0]):
                    yield f"  return {name} = {self._argument(value)}"
            else:
                marks = "; ".join(self._marks(node))
                yield f"  {self._value(node)} = {self._call(node)}" + (f"  # {marks}" if marks else "")

    def _value(self, node: fx.Node) -> str:
        """A value where it is made: its name, dtype, shape and form."""
        key = node.meta.get(VALUE)
        form = "" if key is None else " | " + ", ".join(map(placement_text, key[1:]))
        return self._argument(node) + form

    def _argument(self, value: Any) -> str:
        """An argument; of a value its name, dtype and shape."""
        if isinstance(value, fx.Node):
            type_ = self.types.get(value)
            return f"%{value.name}" if type_ is None else f"%{value.name}: {type_}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(self._argument, value)) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {self._argument(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value).removeprefix("torch.")
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        return str(value) if isinstance(value, torch.device) else _name(value)

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return f"constant {node.target}"
        if node.target in _STARTS:  # the dims and extents follow from the forms
            _, kind, operands, *_ = node.args
            values = operands if isinstance(operands, (list, tuple)) else [operands]
            return f"start {kind}({', '.join(map(self._argument, values))})"
        arguments = [self._argument(a) for a in node.args]
        arguments += [f"{k}={self._argument(v)}" for k, v in node.kwargs.items()]
        return f"{_name(node.target)}({', '.join(arguments)})"

    def _marks(self, node: fx.Node) -> Iterator[str]:
        """What else there is to say of a call."""
        if node.target in _STARTS:
            groups = self.groups
            yield f"among {groups.across if node.target in _ACROSS else groups.own}"
            yield self._bytes(node)
        behind = cast("tuple[fx.Node, ...]", node.kwargs.get("behind", ()))
        if behind:
            have = "have" if len(behind) > 1 else "has"
            yield f"when {', '.join(map(self._argument, behind))} {have} arrived"
        if node.kwargs.get("spare"):
            yield "may work in the memory of its operand"
        if out_of_place(node.target) is not node.target:
            (operand, *_) = node.args
            yield f"writes to %{operand}"
        if also := node.meta.get(ALSO):
            yield "does also " + ", ".join(self.reference.instructions[i].name for i in also)

    def _bytes(self, start: fx.Node) -> str:
        """What this rank gives to a collective and gets of it."""
        tensors, shape = self.reference.tensors, self.local_shape
        total = [0, 0]
        for pair in carried(start.meta["transfer"]):
            for side, key in enumerate(pair):
                total[side] += ValueType(tensors[key[0]].dtype, shape(key)).nbytes
        return f"gives {total[0]} B, gets {total[1]} B"


class _Text(GraphText):
    def __init__(self, graphs: LocalGraphs) -> None:
        super().__init__(graphs)
        self.graphs = graphs

    def lines(self) -> Iterator[str]:
        graphs = self.graphs
        tensors, parameters = self.reference.tensors, self.reference.parameters
        sources = [
            "runtime",
            *(f"parameter {p.name}" for p in parameters),
            *(f"buffer {b.name}" for b in self.reference.buffers),
            *(f"input {i.path}" for i in self.reference.inputs),
        ]
        yield "forward"
        yield from self.calls(graphs.forward, sources, self._results_of_forward)
        if graphs.backward is not None:
            loss = self.reference.loss
            of = "the loss" if loss is None else f"the loss {tensors[loss].name}"
            yield ""
            yield "backward"
            said = ["runtime", f"the gradient of {of}", "what forward has saved"]
            yield from self.calls(graphs.backward, said, self._results_of_backward)

    def _results_of_forward(self, returned: Any) -> Iterator[tuple[str, Any]]:
        loss, outputs, changed, saved = returned
        if loss is not None:
            yield "loss", loss
        yield from ((f"output[{i}]", value) for i, value in enumerate(outputs))
        reference = self.reference
        names = [f"buffer {reference.buffers[i].name}" for i in self.graphs.updated]
        names += [f"parameter {reference.parameters[i].name}" for i in self.graphs.written]
        yield from zip(names, changed, strict=True)
        yield from ((f"saved[{i}]", value) for i, value in enumerate(saved))

    def _results_of_backward(self, returned: Any) -> Iterator[tuple[str, Any]]:
        for index, value in zip(self.graphs.differentiable, returned, strict=True):
            yield f"gradient of {self.reference.parameters[index].name}", value


def _name(target: Any) -> str:
    """An op's or a function's name."""
    return str(target) if is_op(target) else str(getattr(target, "__name__", type(target).__name__))
