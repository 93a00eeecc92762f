"""Local graphs cut into *stretches*: what lies between two communications, as a graph of its own.

A stretch is a run of consecutive calls that are taken; whatever else is called stays between, in its order, which
is the same on every rank. Tensors that were saved for the backward are taken where the stretch that reads them
begins, or by the stretch itself, if it alone reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from hetspmd.lower.emit import SHAPE, item, take_saved
from hetspmd.trace.compat.tensors import is_op

TAKEN = "taken"
"""The key in the ``meta`` of an input of a stretch under which the place of the saved tensor stands that it is, if
the stretch takes that itself."""

FREE = "free"
"""The key in the ``meta`` of a stretch's output that says whether results may lie in memory in any order: they are
only saved for the backward, or have too few dims to lie otherwise."""

FEWEST_CALLS = 2
"""Calls of the shortest stretch that compute something: nothing is saved by one alone."""

Taken = Callable[[fx.Node], bool]
"""Whether a stretch takes a call."""
Make = Callable[[fx.GraphModule], nn.Module]
"""What stands for a stretch, made of its graph: it is given what that is given, and returns a tuple."""


def cut(
    module: fx.GraphModule,
    name: str,
    taken: Taken,
    make: Make,
    *,
    begins: Taken = lambda _: False,
    reads: Taken = lambda _: False,
    takes: bool = False,
) -> fx.GraphModule:
    """A copy of a local graph, of a class called ``name``, whose stretches are what ``make`` makes of them.

    What a call with several results gives (:func:`~hetspmd.lower.emit.item`) is of the stretch that has the call.
    ``begins``: whether another stretch begins with a call. ``reads``: whether a call may stand before the stretch
    that needs it, as that of :func:`~hetspmd.lower.emit.take_saved` does, if it reads nothing of the stretch.
    ``takes``: what stands for a stretch takes those saved tensors that only the stretch reads: it is given their
    list first, and then its other inputs. The inputs that it takes are the first of its graph (:data:`TAKEN`).
    """
    return _Cut(module, name, taken, make, begins, reads, takes).copied()


class _Cut:
    def __init__(
        self,
        module: fx.GraphModule,
        name: str,
        taken: Taken,
        make: Make,
        begins: Taken,
        reads: Taken,
        takes: bool,
    ) -> None:
        self._module, self._name, self._taken, self._make = module, name, taken, make
        self._begins, self._reads, self._takes = begins, reads, takes
        self._only_saved = _only_saved(module.graph)
        self._graph = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._stretch: dict[fx.Node, None] = {}

    def copied(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if node.target is item:
                if node.args[0] in self._stretch:
                    self._stretch[node] = None
                    continue
            elif node.target is take_saved or self._stands_before(node):
                pass
            elif self._taken(node):
                if self._begins(node):
                    self._end()
                self._stretch[node] = None
                continue
            elif node.op not in ("placeholder", "get_attr"):
                self._end()
            elif node.op == "get_attr":
                self._attributes[str(node.target)] = getattr(self._module, str(node.target))
            self._copy(node)
        self._graph.lint()
        return fx.GraphModule(self._attributes, self._graph, self._name)

    def _stands_before(self, node: fx.Node) -> bool:
        """Whether a call only reads what there is before the stretch that is being read."""
        return self._reads(node) and self._stretch.keys().isdisjoint(node.all_input_nodes)

    def _copy(self, node: fx.Node) -> None:
        self._values[node] = self._graph.node_copy(node, self._values.__getitem__)

    def _end(self) -> None:
        """Write the stretch that has been read."""
        nodes, self._stretch = list(self._stretch), {}
        if sum(map(_computes, nodes)) < FEWEST_CALLS:
            for node in nodes:
                self._copy(node)
            return
        inside = set(nodes)
        inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        mine = [node for node in inputs if self._takes and _is_taken_by(node, inside)]
        others = [node for node in inputs if node not in set(mine)]
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*mine, *others):
            values[node] = graph.placeholder(node.name)
        for node in mine:
            values[node].meta[TAKEN] = node.args[1]
        for node in nodes:
            values[node] = graph.node_copy(node, values.__getitem__)
        output = graph.output(tuple(values[node] for node in results))
        output.meta[FREE] = all(self._is_free(node, inside) for node in results)
        name = f"stretch_{sum(key.startswith('stretch_') for key in self._attributes)}"
        body = fx.GraphModule({}, graph, f"{type(self._module).__name__}{name.title()}")
        self._attributes[name] = self._make(body)
        lists = [self._values[_list_of(node)] for node in mine[:1]]
        for node in mine:
            self._graph.erase_node(self._values.pop(node))
        call = self._graph.create_node(
            "call_module", name, (*lists, *(self._values[n] for n in others)), name=f"{nodes[0].name}_stretch"
        )
        for index, node in enumerate(results):
            self._values[node] = self._graph.create_node(
                "call_function", operator.getitem, (call, index), name=node.name
            )

    def _is_free(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        """Whether a result of a stretch may lie in memory in any order."""
        if len(node.meta.get(SHAPE, (0,) * 3)) < 3:
            return True
        return node in self._only_saved and all(user in inside or user.op == "output" for user in node.users)


def _only_saved(graph: fx.Graph) -> set[fx.Node]:
    """What a forward only saves."""
    (results,) = graph.output_node().args
    if (
        not isinstance(results, (tuple, list))
        or len(results) != 4
        or not isinstance(results[3], (tuple, list))
    ):
        return set()
    returned: set[Any] = set()
    fx.map_arg(tuple(results[:3]), returned.add)
    return {node for node in results[3] if isinstance(node, fx.Node)} - returned


def _is_taken_by(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a node takes a saved tensor that only the nodes ``inside`` read."""
    return node.target is take_saved and _list_of(node).name == "saved" and inside.issuperset(node.users)


def _list_of(take: fx.Node) -> fx.Node:
    """The list from which a saved tensor is taken."""
    given = take.args[0]
    assert isinstance(given, fx.Node)
    return given


def _computes(node: fx.Node) -> bool:
    """Whether a call does more than to show memory as another tensor."""
    if not is_op(node.target):
        return node.target is not item
    returns = node.target._schema.returns
    return any(r.alias_info is None or r.alias_info.is_write for r in returns)
