"""Which collectives may work in the memory of what they are given, decided from a finished local graph.

A started collective leaves its operand alone. Where nothing reads the operand's memory any more, it need not:
the start is then told that its operand is spare. Memory is followed by the nodes that may have allocated it: an
ATen op whose schema returns no alias allocates, each of its results apart; whatever else is called (views,
functions of rules, kernels' readers) may return its arguments. Never spare is what a graph is given, its
constants, what collectives deliver, and what the graph returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import fx

from hetspmd.lower.aliases import allocates_each
from hetspmd.lower.emit import take_saved
from hetspmd.run import buckets, collectives

__all__ = ["mark_spare"]

TAKE_SPARE: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        collectives.start_all_reduce,
        collectives.start_reduce_scatter,
        collectives.start_grouped_reduce,
        collectives.start_ring_reduce,
    }
)
"""The starts that can use a spare operand."""


def mark_spare(graph: fx.Graph) -> None:
    """Set ``spare=True`` on the starts of ``graph`` whose operand's memory nothing reads afterwards."""
    if not any(node.target in TAKE_SPARE for node in graph.nodes):
        return
    memory: dict[fx.Node, frozenset[fx.Node]] = {}
    last: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    starts: list[tuple[int, fx.Node, fx.Node]] = []
    for place, node in enumerate(graph.nodes):
        read = node.all_input_nodes
        for each in read:
            for owner in memory[each]:
                last[owner] = place
        memory[node] = frozenset((node,))
        if node.op != "call_function" or node.target in (collectives.wait, buckets.take, take_saved):
            kept.add(node)
        elif node.target in TAKE_SPARE:
            starts.append((place, node, node.args[1]))
        elif not allocates_each(node):
            memory[node] = memory[node].union(*(memory[each] for each in read))
    for place, start, operand in starts:
        owners = memory[operand]
        if owners.isdisjoint(kept) and all(last[owner] == place for owner in owners):
            start.kwargs = {**start.kwargs, "spare": True}
