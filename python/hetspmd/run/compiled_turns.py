"""``HAP(..., compile=True)`` of a step in micro-batches: the stretches of each turn go through ``torch.compile``.

A turn has the forward and the backward of a micro-batch in one graph, and most often one stretch.

- What is added to the sums is added within the stretch, in place, so that a gradient lives no longer than without
  ``torch.compile``.
- What is computed again begins a stretch of its own: a compiler that saw both would compute it once, and hold it.
- A turn takes its rows of the batch before its first stretch, so that turns of as many rows share what is compiled.

The backward of the step only multiplies the gradients by the one that comes in, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hetspmd.lower.emit import instructions, take_saved
from hetspmd.lower.local_program import LocalProgram
from hetspmd.lower.turn_writer import accumulate
from hetspmd.run.compiled_regions import Busy, Made, in_stretches
from hetspmd.trace.graph import Graph

aten = torch.ops.aten


def compiled(
    program: LocalProgram, options: Mapping[str, Any], busy: Busy, graph: Graph | None
) -> dict[fx.GraphModule, fx.GraphModule]:
    """What runs for the graphs of a rank: copies that run their stretches compiled. ``graph`` is that of the single
    device, and says what is computed again."""
    made: Made = {}
    if any(node.op == "call_module" for node in program.forward.graph.nodes):
        again = _copies(graph)
        return {program.forward: _turns_compiled(program.forward, again, options, busy, made)}
    graphs = [module for module in (program.forward, program.backward) if module is not None]
    return {module: in_stretches(module, options, busy, made) for module in graphs}


def _copies(graph: Graph | None) -> set[int]:
    """The instructions that compute again what others have computed."""
    if graph is None:
        return set()
    return {graph.producers[copy] for block in graph.recomputed for _, copy in block.tensors}


def _turns_compiled(
    forward: fx.GraphModule, again: set[int], options: Mapping[str, Any], busy: Busy, made: Made
) -> fx.GraphModule:
    names = [str(node.target) for node in forward.graph.nodes if node.op == "call_module"]
    parts: dict[str, Any] = {}
    of: dict[fx.GraphModule, fx.GraphModule] = {}
    for name in names:
        turn = getattr(forward, name)
        if turn not in of:
            with_ops = with_sums_as_ops(turn, first=name == names[0], last=name == names[-1])
            begins = _Again(again).begins
            of[turn] = in_stretches(with_ops, options, busy, made, begins=begins, reads=_reads)
        parts[name] = of[turn]
    constants = [str(node.target) for node in forward.graph.nodes if node.op == "get_attr"]
    parts |= {name: getattr(forward, name) for name in constants}
    copy = fx.Graph()
    copy.output(copy.graph_copy(forward.graph, {}))
    return fx.GraphModule(parts, copy, f"Compiled{type(forward).__name__}")


def sum_of(sums: list[torch.Tensor | None], index: int) -> torch.Tensor:
    """A sum to which a turn adds, which stays in the list."""
    value = sums[index]
    assert value is not None
    return value


def put_sum(sums: list[torch.Tensor | None], index: int, value: torch.Tensor) -> None:
    """What the first turn leaves to be added to."""
    sums[index] = value


def with_sums_as_ops(turn: fx.GraphModule, *, first: bool, last: bool) -> fx.GraphModule:
    """A copy of a turn that adds to the sums by ops, in place: the first turn leaves its summands in the list, and
    the last one takes the sums from there before it adds to them."""
    copy, values = fx.Graph(), dict[fx.Node, fx.Node]()
    sums: dict[int, fx.Node] = {}
    for node in turn.graph.nodes:
        if node.target is accumulate:
            held, index, value = (values.get(arg, arg) for arg in node.args)
            if first:
                sums[index] = copy.call_function(aten.clone.default, (value,))
                continue
            total = copy.call_function(take_saved if last else sum_of, (held, index))
            sums[index] = copy.call_function(aten.add_.Tensor, (total, value))
        elif node.target is take_saved and node.args[0].name == "sums":
            values[node] = sums[node.args[1]]
        elif node.op == "output":
            if first and not last:
                held = next(values[n] for n in turn.graph.nodes if n.name == "sums")
                for index, value in sums.items():
                    copy.call_function(put_sum, (held, index, value))
            copy.node_copy(node, values.__getitem__)
        else:
            values[node] = copy.node_copy(node, values.__getitem__)
    copy.lint()
    attributes = {str(n.target): getattr(turn, str(n.target)) for n in copy.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, copy, type(turn).__name__)


class _Again:
    """Where what is computed again begins. ``again``: the instructions that are copies."""

    def __init__(self, again: set[int]) -> None:
        self._again, self._within = again, False

    def begins(self, node: fx.Node) -> bool:
        """Whether it begins with this call; calls are asked for in their order."""
        of = instructions(node)
        if not of:
            return False
        before, self._within = self._within, any(i in self._again for i in of)
        return self._within and not before


def _reads(node: fx.Node) -> bool:
    """Whether a call takes rows of what the graph is given, or of a constant, or a sum."""
    if node.target is sum_of:
        return True
    return (
        node.target is aten.slice.Tensor
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op in ("placeholder", "get_attr")
    )
