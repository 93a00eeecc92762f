"""Which collectives may work in the memory of what they are given, decided from a finished local graph.

A started collective leaves its operand alone. Where nothing reads the operand's memory any more, it need not:
the start is then told that its operand is spare. Memory is followed by the nodes that may have allocated it: an
ATen op whose schema returns no alias allocates, each of its results apart; whatever else is called (views,
functions of rules, kernels' readers) may return its arguments. Never spare is what a graph is given, its
constants, what collectives deliver, and what the graph returns; but a sum over turns, which the graph takes from
where it has memory of its own, may be. Nor is what a collective that has started before
may still read: one between machines and one inside a machine are not carried out in the order of their starts.
"""

from __future__ import annotations

from typing import cast

from torch import fx

from hetspmd.cluster.collective_kinds import KINDS, Kind
from hetspmd.lower import calls
from hetspmd.lower.aliases import allocates_each
from hetspmd.lower.emit import take_saved


def mark_spare(graph: fx.Graph) -> None:
    """Set ``spare=True`` on the starts of ``graph`` whose operand's memory nothing reads afterwards."""
    if not any(_takes_spare(node) for node in graph.nodes):
        return
    memory: dict[fx.Node, frozenset[fx.Node]] = {}
    last: dict[fx.Node, int] = {}
    reserved: set[fx.Node] = set()
    starts: list[tuple[int, fx.Node]] = []
    arrived: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        read = node.all_input_nodes
        for each in read:
            for owner in memory[each]:
                last[owner] = place
        memory[node] = frozenset((node,))
        if node.op != "call_function" or (
            node.target in (calls.wait, calls.take, take_saved) and not is_sum(node)
        ):
            reserved.add(node)
            if node.target is calls.wait:
                arrived[read[0]] = place
        elif _takes_spare(node):
            starts.append((place, node))
        elif not allocates_each(node) and not is_sum(node):
            memory[node] = memory[node].union(*(memory[each] for each in read))
    for place, start in starts:
        owners = memory[start.args[2]]  # type: ignore[index]  # a node
        on_their_way = (
            each
            for before, each in starts
            if before < place < arrived.get(each, place) and not KINDS[cast("Kind", each.args[1])].copies
        )
        read_later = reserved.union(*(memory[each.args[2]] for each in on_their_way))  # type: ignore[index]  # a node
        if owners.isdisjoint(read_later) and all(last[owner] == place for owner in owners):
            start.kwargs = {**start.kwargs, "spare": True}


def _takes_spare(node: fx.Node) -> bool:
    return node.target in (calls.start, calls.start_across) and KINDS[cast("Kind", node.args[1])].in_place


def is_sum(node: fx.Node) -> bool:
    """Whether a turn takes here what was summed, to which nothing is added any more."""
    return node.target is take_saved and cast(fx.Node, node.args[0]).name == "sums"
