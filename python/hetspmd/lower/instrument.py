"""Copies of a local graph that tell a watcher of every call.

A copy computes what the original does, in the same order; the original is left alone, so that nothing is paid while
nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

_ATTRIBUTE = "watcher_of_calls"

Behind = Callable[[fx.Graph, fx.Node, fx.Node, Callable[[fx.Node], fx.Node]], None]
"""``behind(copy, watcher, call, copied)`` writes what follows a call of the original; ``copied`` maps nodes."""


def instrumented(
    module: fx.GraphModule, watcher: object, name: str, behind: Behind, *, ends: tuple[str, str] | None = None
) -> fx.GraphModule:
    """The copy, of a class called ``name``, with copies of the graphs that it calls; calls are copied in the order
    in which they run. ``ends``: the watcher's methods called before the first call and behind the last one."""
    copy, values = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = list(module.graph.nodes)
    for node in (n for n in nodes if n.op in ("placeholder", "get_attr")):
        values[node] = copy.node_copy(node, values.__getitem__)
    reader = copy.create_node("get_attr", _ATTRIBUTE)
    if ends is not None:
        copy.call_method(ends[0], (reader,))
    attributes = {str(n.target): getattr(module, str(n.target)) for n in nodes if n.op == "get_attr"}
    for node in (n for n in nodes if n.op not in ("placeholder", "get_attr")):
        if node.op == "output" and ends is not None:
            copy.call_method(ends[1], (reader,))
        values[node] = copy.node_copy(node, values.__getitem__)
        if node.op == "call_module":
            called = str(node.target)
            attributes[called] = instrumented(getattr(module, called), watcher, f"{name}_{called}", behind)
        if node.op != "output":
            behind(copy, reader, node, values.__getitem__)
    copy.lint()
    return fx.GraphModule({**attributes, _ATTRIBUTE: watcher}, copy, name)
