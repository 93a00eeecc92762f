"""The turns of a step in micro-batches as graphs that can be cut into stretches
(:mod:`hetspmd.run.stretches`): what is added to the sums is added by ops, in place, within a stretch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from hetspmd.lower.emit import take_saved
from hetspmd.lower.turn_writer import accumulate

aten = torch.ops.aten


def calls_of_turns(forward: fx.GraphModule) -> list[fx.Node]:
    """The calls of turns in the forward of a step, in their order; none where the step is in one micro-batch."""
    return [node for node in forward.graph.nodes if node.op == "call_module"]


def with_turns(
    forward: fx.GraphModule, name: str, make: Callable[[fx.GraphModule, list[fx.Node]], nn.Module]
) -> fx.GraphModule:
    """A copy of the forward, of a class called ``name``, that calls other turns: what ``make`` makes of each turn,
    once for those that share a graph, and of the calls of it."""
    calls: dict[fx.GraphModule, list[fx.Node]] = {}
    for node in calls_of_turns(forward):
        calls.setdefault(getattr(forward, str(node.target)), []).append(node)
    parts = {
        str(n.target): getattr(forward, str(n.target)) for n in forward.graph.nodes if n.op == "get_attr"
    }
    for turn, nodes in calls.items():
        made = make(turn, nodes)
        parts |= {str(node.target): made for node in nodes}
    copy = fx.Graph()
    copy.output(copy.graph_copy(forward.graph, {}))
    return fx.GraphModule(parts, copy, name)


def sum_of(sums: list[torch.Tensor | None], index: int) -> torch.Tensor:
    """A sum to which a turn adds, which stays in the list."""
    value = sums[index]
    assert value is not None
    return value


def put_sum(sums: list[torch.Tensor | None], index: int, value: torch.Tensor) -> None:
    """What a turn leaves to be added to."""
    sums[index] = value


def with_sums_as_ops(
    turn: fx.GraphModule, *, first: bool, last: bool, moving: bool = False
) -> fx.GraphModule:
    """A copy of a turn that adds to the sums by ops, in place: the first turn leaves its summands in the list, and
    the last one takes the sums from there before it adds to them.

    ``moving``: what stands for a stretch may add to a copy of a sum, which takes its place in the list.
    """
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
            if (first or moving) and not last:
                held = next(values[n] for n in turn.graph.nodes if n.name == "sums")
                for index, value in sums.items():
                    copy.call_function(put_sum, (held, index, value))
            copy.node_copy(node, values.__getitem__)
        else:
            values[node] = copy.node_copy(node, values.__getitem__)
    copy.lint()
    attributes = {str(n.target): getattr(turn, str(n.target)) for n in copy.nodes if n.op == "get_attr"}
    return fx.GraphModule(attributes, copy, type(turn).__name__)
